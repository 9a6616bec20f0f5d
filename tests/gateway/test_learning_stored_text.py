"""What of a chat is computed for next time, when, and what the planner is then told of it; on a tiny engine."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import fakeredis
import pytest
import safetensors
import torch
from promptsluice.backend_engine.types import Result
from promptsluice.gateway import stores
from promptsluice.gateway.backends import engine_room
from promptsluice.gateway.backends.background import Lesson
from promptsluice.gateway.backends.base import Call
from promptsluice.gateway.backends.decisions import decided
from promptsluice.gateway.backends.engine_room import EngineRoom
from promptsluice.gateway.backends.registry import backends_of
from promptsluice.gateway.backends.stored_text import StoredText
from promptsluice.gateway.cli.kv import forgotten
from promptsluice.gateway.parameters import chat_parameters
from promptsluice.gateway.rooms import Rooms
from promptsluice.gateway.salts import Salts
from promptsluice.kv_reuse import RamStore
from promptsluice.policies import EmbeddedBackend, Policy, PolicySet
from promptsluice.policies.stored import Stretch
from promptsluice.prompt import ConfigError, Prompt, Report

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
DOCUMENT = "".join(f"Sentence {n} tells of the harbour, of its {n + 2} piers and of the ferry.\n" for n in range(20))
SHORTER = DOCUMENT[: len(DOCUMENT) // 4]
BLEND = Policy.model_validate({"reuse": {"mode": "blend", "min_chunk_tokens": 32}, "quality": {"sample": 0}})


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path], smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = tiny_model("Llama", vocab_size=49_160, hidden_size=48, num_hidden_layers=1, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("room") / "tiny"
    shutil.copytree(weights, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def spec_of(folder: Path, **fields: object) -> EmbeddedBackend:
    spec = {"kind": "embedded", "model": str(folder), "kv_memory": "16MiB", "threads": 1, "dtype": "float32"}
    return EmbeddedBackend.model_validate(spec | fields)


@pytest.fixture(scope="module")
def room(folder: Path) -> Iterator[EngineRoom]:
    opened = EngineRoom.open(spec_of(folder), path=folder, store=RamStore(1 << 26))
    yield opened
    opened.control.close()
    opened.service.stop()


@pytest.mark.parametrize(("device", "dtype", "why"), [("cpu", "int4", "'int4' is not known"), ("cuda", "fp8", "8.9")])
def test_a_dtype_of_chunks_that_cannot_be_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: Any, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    path = tmp_path / "nothing to load"
    with pytest.raises(ConfigError, match=f"kv_cache.chunk_dtype .*{why}"):
        EngineRoom.open(spec_of(path, device=device), path=path, store=RamStore(1 << 20), chunk_dtype=dtype)


@pytest.mark.slow
def test_a_model_whose_chunks_cannot_be_moved_leaves_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*args: object, **options: object) -> None:
        raise ConfigError("chunk KV cannot be moved")

    monkeypatch.setattr(engine_room, "Reuser", refusing)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="cannot be moved"):
        EngineRoom.open(spec_of(folder), path=folder, store=RamStore(1 << 20))
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_chunks_are_kept_and_deleted_as_the_policy_file_says(folder: Path, tmp_path: Path) -> None:
    backend = spec_of(folder).model_dump(exclude_unset=True)
    cache = {"disk": "1MiB", "path": str(tmp_path / "kv"), "chunk_dtype": "int8"}
    policies = PolicySet.from_text(json.dumps({"version": 1, "backends": {"local": backend}, "kv_cache": cache}))
    (engine,) = backends_of(policies, Rooms(policies)).values()
    opened = cast(Any, engine)._opened()
    try:
        opened.warm([DOCUMENT], salt=Salts.of(policies).everywhere("docs")[0])
    finally:
        opened.control.close()
        opened.service.stop()
    (file,) = (tmp_path / "kv").glob("*.safetensors")
    with safetensors.safe_open(file, "pt") as tensors:
        assert tensors.get_tensor("k").dtype == torch.int8
    forgotten(policies, "docs", [DOCUMENT])
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.parametrize("away", [False, True])
def test_a_command_deletes_what_gateways_share_without_a_disk_tier(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    server = fakeredis.FakeServer()
    monkeypatch.setattr(stores, "connect", lambda *args, **options: fakeredis.FakeRedis(server=server))
    cache = {"ram": "1MiB", "path": str(tmp_path), "shared": {"url": "redis://127.0.0.1:1/0"}}
    backend = spec_of(folder).model_dump(exclude_unset=True)
    policies = PolicySet.from_text(json.dumps({"version": 1, "backends": {"local": backend}, "kv_cache": cache}))
    store = stores.chunk_store(policies)
    opened = EngineRoom.open(spec_of(folder), path=folder, store=store)
    try:
        opened.warm([DOCUMENT], salt=Salts.of(policies).everywhere("docs")[0])
    finally:
        opened.control.close()
        opened.service.stop()
    assert len(fakeredis.FakeRedis(server=server).keys()) == 1
    server.connected = not away
    forgotten(policies, "docs", [DOCUMENT])
    server.connected = True
    assert len(fakeredis.FakeRedis(server=server).keys()) == away
    assert not list(stores.lasting_store(policies).catalogue()), "whoever asks next delivers what was left"


class Jobs:
    """Background work that runs when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def run(self, job: Callable[[], object]) -> None:
        self.waiting.append(job)

    def learn(self, lesson: Lesson) -> None:
        self.waiting.append(lesson.job)

    def done(self) -> None:
        for job in self.waiting:
            job()
        self.waiting.clear()


def chat(tenant: str) -> Call:
    messages = [{"role": "user", "content": f"<document>{DOCUMENT}</document>"}, {"role": "user", "content": "Why?"}]
    prompt = Prompt.from_messages(messages, model="m")
    return Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND, tenant=tenant)


def document_of(prompt: Prompt) -> int:
    return next(segment.id for segment in prompt.segments if segment.text == DOCUMENT)


@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True])
def test_text_is_learned_as_it_came_and_when_the_answer_is_there(room: EngineRoom, rewritten: bool) -> None:
    call, jobs = chat(f"tenant {rewritten}"), Jobs()
    if rewritten:
        prompt = call.prompt.replace({document_of(call.prompt): SHORTER})
        call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND, tenant=call.tenant)
    tokens = room.encode(call.prompt, chunks=frozenset(), with_tools=True)
    background: Any = jobs
    _, learn = decided(room, call, tokens, salts=Salts(), background=background)
    assert not jobs.waiting, "it would share the engine's steps with the request"
    learn(Result(finish_reason="stop", prompt_tokens=len(tokens.encoded.ids), completion_tokens=1))
    assert jobs.waiting
    jobs.done()
    store = StoredText(room, BLEND, salt=Salts().tenant(call.tenant))
    assert store.known(DOCUMENT) > 0.8 * room.tokenizer.count(DOCUMENT)
    assert store.known("Something else entirely, said in some other words.\n" * 9) == 0
    assert StoredText(room, BLEND, salt=Salts().tenant("another")).known(DOCUMENT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("retrieved", [False, True])
def test_what_was_retrieved_is_not_learned_as_a_clients_text(folder: Path, tmp_path: Path, retrieved: bool) -> None:
    """It is deleted with its document, by the borders of the document's chunks."""
    backend = spec_of(folder).model_dump(exclude_unset=True)
    cache = {"path": str(tmp_path)}
    policies = PolicySet.from_text(json.dumps({"version": 1, "backends": {"local": backend}, "kv_cache": cache}))
    (backend,) = backends_of(policies, Rooms(policies)).values()
    engine, jobs = cast(Any, backend), Jobs()
    engine._background = jobs
    prompt = Prompt.from_messages([{"role": "user", "content": "Why?"}], model="m")
    text = (DOCUMENT, "docs/1") if retrieved else (DOCUMENT, None)
    prompt = prompt.insert_before(prompt.segments[0].id, [("<document>\n", None), text, ("\n</document>\n", None)])
    call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND)
    opened = engine._opened()
    try:
        ready = engine._readied(opened, call, chat_parameters(prompt.body), None, None)
        ready.finished(Result(finish_reason="stop", prompt_tokens=len(ready.requests[0].ids), completion_tokens=1))
        jobs.done()
        ids = opened.tokenizer.encode_plain(DOCUMENT)
        assert bool(opened.reuser.finder.find(ids, salt=Salts().tenant(call.tenant))) is not retrieved
    finally:
        opened.control.close()
        opened.service.stop()


def test_the_price_of_a_prompt_falls_with_what_is_stored_and_what_is_in_the_prefix_cache(room: EngineRoom) -> None:
    store = StoredText(room, BLEND, salt="")

    def price(*stretches: Stretch, prefix: int = 0) -> float:
        found = store.prefill_ms(stretches, prefix=prefix)
        assert found is not None, "a room measures some prefills when it is opened"
        return found

    whole = price(Stretch(2000), Stretch(20))
    assert 0 < price(Stretch(2000), Stretch(20), prefix=1500) < whole
    assert price(Stretch(1000), Stretch(20)) < whole
    assert price(Stretch(2000, 1900), Stretch(20)) <= whole
