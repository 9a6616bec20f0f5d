"""Which sinks a room has, and when a chunk is computed once more behind a nearer one; on a tiny engine."""

import gc
import shutil
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from promptsluice.backend_engine.types import Result, Reuse
from promptsluice.gateway import pipeline
from promptsluice.gateway.accounts import Begun
from promptsluice.gateway.backends.background import Lesson
from promptsluice.gateway.backends.base import Call
from promptsluice.gateway.backends.decisions import decided
from promptsluice.gateway.backends.engine_room import EngineRoom
from promptsluice.gateway.backends.reuse_control import Decided
from promptsluice.gateway.backends.reusing import reused
from promptsluice.gateway.backends.sinks import sinks_of
from promptsluice.gateway.salts import Salts
from promptsluice.kv_reuse import ChunkStore, DiskStore, RamStore
from promptsluice.kv_reuse.blend import SpanHit
from promptsluice.kv_reuse.tiered import TieredStore
from promptsluice.policies import EmbeddedBackend, Policy
from promptsluice.prompt import Prompt, Report
from torch import Tensor

from .test_learning_stored_text import BLEND, DOCUMENT, TEMPLATE


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path], smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 49_160, "hidden_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    folder = tmp_path_factory.mktemp("anchored") / "tiny"
    shutil.copytree(tiny_model("Llama", tie_word_embeddings=True, **sizes), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def opened(folder: Path, store: ChunkStore | None = None, **fields: object) -> EngineRoom:
    spec = {"kind": "embedded", "model": str(folder), "kv_memory": "16MiB", "threads": 1, "dtype": "float32"}
    store = store if store is not None else RamStore(1 << 26)
    return EngineRoom.open(EmbeddedBackend.model_validate(spec | fields), path=folder, store=store, chunk_dtype="model")


@pytest.fixture
def room(folder: Path) -> Iterator[EngineRoom]:
    room = opened(folder)
    yield room
    room.control.close()
    room.service.stop()


class Lessons:
    """Background work that is told, and done when the test says so."""

    def __init__(self) -> None:
        self.told: list[Lesson] = []

    def run(self, job: Callable[[], object]) -> None:
        job()

    def learn(self, lesson: Lesson) -> None:
        self.told.append(lesson)

    def done(self) -> list[bool]:
        """Whether each had to be done, idle time or not."""
        told, self.told = self.told, []
        for lesson in told:
            lesson.job()
        return [lesson.anyway for lesson in told]


def prompt_of(before: str) -> Prompt:
    text = f"{before}<document>{DOCUMENT}</document>"
    return Prompt.from_messages([{"role": "user", "content": part} for part in (text, "Why?")], model="m")


def result(*, reused: int = 0) -> Result:
    return Result(finish_reason="stop", prompt_tokens=2000, completion_tokens=1, reused_tokens=reused)


def asked(room: EngineRoom, before: str, lessons: Lessons, *, ran: bool = True) -> tuple[list[bool], list[int]]:
    """A chat with the document behind some text: its lessons, which are done, and the anchors of what served it, or
    would have where it was computed in full."""
    prompt = prompt_of(before)
    call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND, tenant="")
    tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)
    background: Any = lessons
    _, learn = decided(room, call, tokens, salts=Salts(), background=background)
    found = room.reuser.finder.find(tokens.encoded.ids, salt=Salts().tenant(""))
    plan = room.reuser.plan(tokens.encoded.ids, [], found=found, salt=Salts().tenant(""), sight=False)
    learn(result(reused=sum(hit.tokens for hit in plan.hits) if ran else 0))
    return lessons.done(), [hit.anchor for hit in plan.hits]


@pytest.mark.slow
def test_a_nearer_sink_is_computed_for_in_idle_time_from_the_second_sight_on(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)  # however fast this machine is
    short, middle, long = (len(sink) for sink in sinks_of(room.tokenizer, room=8192))
    assert (short, middle, long) == (215, 676, 1329)
    lessons, filled = Lessons(), "Nothing of this is told to anybody.\n" * 180
    assert asked(room, "", lessons) == ([False], []), "nobody knows where what is learned will stand"
    assert asked(room, "", lessons) == ([], [middle])
    assert asked(room, "", lessons) == ([False], [middle]), "the second time that it was found there"
    assert asked(room, "", lessons) == ([], [short])
    served = [asked(room, filled, lessons)[1] for _ in range(3)]
    assert [found[-1] for found in served] == [middle, middle, long]
    assert asked(room, "", lessons) == ([], [short])


@pytest.mark.slow
def test_what_was_served_another_way_or_never_is_no_sight(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)
    _, middle, _ = (len(sink) for sink in sinks_of(room.tokenizer, room=8192))
    lessons = Lessons()
    assert asked(room, "", lessons)[0] == [False]
    for ran in (False, False, True, False):
        assert asked(room, "", lessons, ran=ran) == ([], [middle]), "its second time there is still to come"
    prompt = prompt_of("")
    call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND, tenant="")
    tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)
    decided(room, call, tokens, salts=Salts(), background=cast(Any, lessons))  # and is refused, or its client leaves
    assert asked(room, "", lessons) == ([False], [middle])


@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True])
def test_text_that_is_learned_at_its_second_sight_counts_only_where_its_request_ended(
    room: EngineRoom, rewritten: bool
) -> None:
    reuse = {"mode": "blend", "min_chunk_tokens": 32, "learn_after": 2}
    policy, lessons = Policy.model_validate({"reuse": reuse, "quality": {"sample": 0}}), Lessons()
    other = "Nothing of this is told to anybody.\n" * 20
    prompt = prompt_of(f"<document>{other}</document>")
    if rewritten:  # the document is not
        prompt = prompt.replace({one.id: other[:36] for one in prompt.segments if one.text == other})
        assert prompt.changed
    tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)

    def learned(*, ended: bool = True) -> bool:
        call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=policy, tenant="")
        _, learn = decided(room, call, tokens, salts=Salts(), background=cast(Any, lessons))
        if ended:
            learn(result())
            lessons.done()
        return bool(room.reuser.finder.find(tokens.encoded.ids, salt=Salts().tenant("")))

    assert [learned(ended=False), learned(ended=False), learned(), learned(ended=False), learned()] == [False] * 4 + [
        True
    ]


@pytest.mark.slow
def test_a_lesson_names_what_it_is_about(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)
    told: list[list[frozenset[Hashable]]] = []
    for learning in (True, False):  # what is new; where it could be nearer
        waiting = Waiting()
        for _ in range(3):
            asked(room, "", waiting)
            room.reuser.forget([[1, 2, 3]])  # another chunk
        told.append([lesson.about for lesson in waiting.told])
        asked(room, "", Lessons() if learning else waiting)
    (new, *more), (nearer, *again) = told
    assert new and more == [new] * 2 and nearer and again == [nearer]
    assert len(new) == len(nearer) and not new & nearer
    assert all(isinstance(name, bytes) and len(name) == 16 for name in new | nearer), "no chunk is hashed to compare"


class Waiting(Lessons):
    """Those that find no idle time yet."""

    def done(self) -> list[bool]:
        return []


@pytest.mark.slow
def test_what_waits_to_be_computed_does_not_bring_back_what_was_deleted(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)
    salt = Salts().tenant("")
    for _ in range(2):
        asked(room, "", Lessons())
    text = f"<document>{DOCUMENT}</document>"
    chunks = [match.chunk for match in room.reuser.finder.find(room.tokenizer.encode_plain(text), salt=salt)]
    for served in (1, 0):  # it could be nearer; it is new
        waiting = Waiting()
        assert len(asked(room, "", waiting)[1]) == served and len(waiting.told) == 1
        assert room.reuser.forget(chunks, salts=[salt]) == served
        Lessons.done(waiting)
        assert room.reuser.forget(chunks, salts=[salt]) == 0
    assert asked(room, "", Lessons())[0] and room.reuser.forget(chunks, salts=[salt]) == 1, "it came again"


def test_a_call_says_when_its_request_arrived() -> None:
    resolution: Any = SimpleNamespace(model="m", policy=BLEND)
    caller: Any = SimpleNamespace(
        request_id="r", ticket=None, tenant="", forwarded={}, path="/v1/chat/completions", wants_report=False
    )
    begun = Begun(resolution=resolution, report=Report(), began=5.0)
    assert pipeline.asked(begun, {}, caller)["arrived"] == 5.0, "not when its prompt was rewritten"


@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True])
def test_what_was_deleted_after_a_request_had_arrived_is_not_learned_from_it(room: EngineRoom, rewritten: bool) -> None:
    prompt, lessons, salt = prompt_of(""), Lessons(), Salts().tenant("")
    tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)
    asked(room, "", lessons)
    chunks = [match.chunk for match in room.reuser.finder.find(tokens.encoded.ids, salt=salt)]
    assert len(chunks) == room.reuser.forget(chunks, salts=[salt]) == 1
    if rewritten:
        document = next(segment.id for segment in prompt.segments if DOCUMENT in segment.text)
        prompt = prompt.replace({document: DOCUMENT[: len(DOCUMENT) // 4]})
        tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)

    def learned(*, deleted: bool) -> int:
        call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND, tenant="")
        if deleted:  # while the request is rewritten, before its backend has it
            room.reuser.forget(chunks, salts=[salt])
        decided(room, call, tokens, salts=Salts(), background=cast(Any, lessons))[1](result())
        assert len(lessons.done()) == 1
        return room.reuser.forget(chunks, salts=[salt])

    assert learned(deleted=True) == 0
    assert learned(deleted=False) == 1


@pytest.mark.slow
def test_the_time_of_slow_tiers_that_were_asked_in_vain_is_not_that_of_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = opened(folder, TieredStore(DiskStore(tmp_path, 1 << 26), ram_budget=1 << 26))
    try:
        told: list[Sequence[SpanHit]] = []
        monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)
        monkeypatch.setattr(room.control, "loaded", lambda hits, **options: told.append(hits))
        asked(room, "", Lessons())
        served = [bool(asked(room, "", Waiting())[1]) and len(told) for _ in range(3)]
        assert served == [2, 2, 3], "all were served; the second one after a look at the disk"
        assert [len(hits) for hits in told] == [0, 1, 1]
    finally:
        room.control.close()
        room.service.stop()


@pytest.mark.slow
def test_a_check_of_another_copy_than_was_served_is_given_up(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)
    asked(room, "", Lessons())
    prompt = prompt_of("")
    tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)
    found = reused(
        room,
        prompt,
        tokens,
        BLEND.reuse,
        chunks=frozenset(),
        salt=lambda segment: "",
        own=Salts().tenant(""),
        prefix=0,
        promising=lambda places: True,
    )
    same = found.again()
    assert found.reuse is not None and same is not None
    assert [span.start for span in same.spans] == [span.start for span in found.reuse.spans]
    ((_, plan),) = found.plans
    (match,) = room.reuser.finder.find(tokens.encoded.ids, salt=Salts().tenant(""))
    assert room.reuser.warm(
        [match.chunk], anchor=sinks_of(room.tokenizer, room=8192)[0], salt=Salts().tenant("")
    ).computed
    assert found.again() is None and len(plan.hits) == 1


@pytest.mark.slow
def test_what_waits_for_a_check_or_to_be_learned_holds_no_kv(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.control, "promising", lambda *args, **options: True)
    asked(room, "", Lessons())
    checks: list[Callable[[], Reuse | None]] = []
    keys: list[weakref.ref[Tensor]] = []
    decide = room.control.decided

    def watched(ids: Sequence[int], hits: Sequence[SpanHit], reuse: Reuse, *args: Any, **options: Any) -> Decided:
        keys.extend(weakref.ref(span.kv.k) for span in reuse.spans)
        checks.append(options["again"])
        return replace(decide(ids, hits, reuse, *args, **options), reuse=None)

    monkeypatch.setattr(room.control, "decided", watched)
    prompt, background = prompt_of(""), Waiting()
    call = Call(model="m", report=Report(), request_id="", prompt=prompt, policy=BLEND, tenant="")
    tokens = room.encode(prompt, chunks=frozenset(), with_tools=True)
    _, learn = decided(room, call, tokens, salts=Salts(), background=cast(Any, background))
    gc.collect()
    assert len(keys) == 1 and keys[0]() is None
    again = checks[0]()
    assert again is not None and len(again.spans) == 1
    learn(result())


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "general"), [({"kv_memory": "512KiB"}, 1), ({"context_limit": 2000}, 0)])
def test_gateways_with_less_memory_or_shorter_prompts_find_what_others_computed(
    folder: Path, fields: dict[str, object], general: int
) -> None:
    room = opened(folder, **fields)
    try:
        sinks = sinks_of(room.tokenizer, room=8192)
        ids = room.tokenizer.encode_plain(DOCUMENT)
        room.warm([DOCUMENT], salt="")
        plans = [room.reuser.plan([*ids, 1], [(0, len(ids))], sight=False)]
        for sink in sinks:
            assert room.reuser.warm([ids], anchor=sink, salt=f"{len(sink)}").computed == 1
            plans.append(room.reuser.plan([*ids, 1], [(0, len(ids))], salt=f"{len(sink)}", sight=False))
        assert [[hit.anchor for hit in plan.hits] for plan in plans] == [
            [len(sink)] for sink in (sinks[general], *sinks)
        ]
    finally:
        room.control.close()
        room.service.stop()
