"""The embedded backend's own arithmetic, without a model: caps, sizes, chunk marks, and a model that cannot be had."""

import json
import shutil
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from promptsluice.backend_engine import ChatTokenizer
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.types import KVBlock, Reuse, ReusedSpan
from promptsluice.gateway.backends.embedded import EmbeddedBackend
from promptsluice.gateway.backends.engine_room import marks
from promptsluice.gateway.backends.generations import capped, count_template
from promptsluice.gateway.backends.reusing import joined
from promptsluice.gateway.backends.sinks import LADDER, sinks_of
from promptsluice.kv_reuse import EmptyStore, make_repair
from promptsluice.kv_reuse.anchors import MOST_TOKENS, Anchors
from promptsluice.kv_reuse.prose import DOCUMENTS
from promptsluice.policies.schema import EmbeddedBackend as Spec
from promptsluice.prompt import ContextTooLong, ModelUnavailable, Prompt, Report
from promptsluice.rag.render import render_block


class Hit(NamedTuple):
    chunk_id: str
    text: str
    headings: tuple[str, ...] = ()


@pytest.mark.parametrize(("asked", "given"), [(None, 90), (5, 5), (0, 0), (1 << 60, 90)])
def test_max_tokens_is_a_cap(asked: int | None, given: int) -> None:
    assert capped(SamplingParams(max_tokens=asked), prompt=10, limit=100).max_tokens == given


@pytest.mark.parametrize("prompt", [100, 101, 10_000])
def test_a_prompt_without_room_for_an_answer(prompt: int) -> None:
    with pytest.raises(ContextTooLong, match=f"has {prompt} tokens.*shorten it by {prompt - 99}"):
        capped(SamplingParams(max_tokens=1), prompt=prompt, limit=100)


def test_the_templates_tokens_count_before_and_after() -> None:
    report = Report(tokens_in=100, tokens_out=60)
    count_template(report, 75)
    assert (report.tokens_in, report.tokens_out) == (115, 75)


def test_marks_are_the_chunks_characters() -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "What is it?"}]
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    body["messages"].append({"role": "user", "content": parts})
    prompt = Prompt.from_body(json.dumps(body).encode())
    question = prompt.segments[-1]
    pieces = [("<open>\n", None), ("chunk one", "d#0"), ("\n--\n", None), ("chunk two", "d#1"), ("\n", None)]
    prompt = prompt.insert_before(question.id, pieces).drop_units({0})
    chunks = frozenset(segment.id for segment in prompt.segments if segment.source is not None)
    found = [
        prompt.messages[mark.message]["content"][mark.part]["text"][mark.start : mark.end]
        for _, mark in marks(prompt, chunks)
    ]
    assert found == ["chunk one", "chunk two"]
    assert [segment.source for segment, _ in marks(prompt, chunks)] == ["d#0", "d#1"]
    assert marks(prompt, frozenset()) == []


@pytest.mark.slow
def test_chunks_are_computed_after_beginnings_of_chats_with_more_and_more_prose(smollm2_dir: Path) -> None:
    tokenizer = ChatTokenizer(smollm2_dir)
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hello"}]).ids
    sinks = sinks_of(tokenizer, room=8192)
    assert [len(sink) for sink in sinks] == [236, 697, 1350] and len(sinks[-1]) < MOST_TOKENS
    assert all(longer[: len(sink)] == sink for sink, longer in pairwise(sinks))
    assert Anchors(sinks).general() == sinks[1]
    for sink, documents in zip(sinks, LADDER, strict=True):
        text = tokenizer.decode(sink)
        assert [document.strip() in text for document in DOCUMENTS] == [n < documents for n in range(len(DOCUMENTS))]
        assert text.endswith(f'\n<document index="{documents + 1}" source="">\n')
    (template,) = sinks_of(tokenizer, room=1179)
    assert len(template) == 24 and chat[:24] == template == sinks[0][:24]


@pytest.mark.slow
@pytest.mark.parametrize(("room", "lengths"), [(6749, [236, 697]), (3484, [236]), (1180, [236]), (64, [24])])
def test_sinks_that_would_fill_the_context_are_left_out(smollm2_dir: Path, room: int, lengths: list[int]) -> None:
    assert [len(sink) for sink in sinks_of(ChatTokenizer(smollm2_dir), room=room)] == lengths


@pytest.mark.slow
def test_a_template_that_writes_the_date_has_the_same_sinks_every_day(smollm2_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    dated = "{% if strftime_now is defined %}It is the {{ strftime_now('%d.%m.%Y') }}.\n{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(dated + "{% for one in messages %}{{ one['content'] }}{% endfor %}")
    tokenizer = ChatTokenizer(tmp_path)
    sinks = [tokenizer.decode(sink) for sink in sinks_of(tokenizer, room=8192)]
    assert len(sinks) == 3 and all(sink.startswith("It is the 01.01.2025.\n") for sink in sinks)
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.decode(tokenizer.encode_chat(chat).ids) == f"It is the {datetime.now():%d.%m.%Y}.\nHello"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dated", "begins"),
    [
        ("\n {{ strftime_now('%d %b %Y').split()[2] | int + 1 }}\n", "\n 2026\n"),
        ("\n  {% if true %}{{ strftime_now('%-d.%-m.%y') }}{% endif %};", "\n1.1.25;"),
        ("  {% if true %}{{ strftime_now('%A, %j') }}{% endif %};", "Wednesday, 001;"),
        ("{{ strftime_now('%H') | int(5) - strftime_now('%H') | int(7) }};", "-2;"),
        ("{% if '%' in strftime_now('%H') %}{{ raise_exception('no hour') }}{% endif %}any;", "any;"),
        ("\n\nNo date;", "\n\nNo date;"),
    ],
)
def test_a_template_that_takes_the_date_apart_has_sinks(
    smollm2_dir: Path, tmp_path: Path, dated: str, begins: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        f"{dated}{{% for one in messages %}}{{{{ one['content'] }}}}{{% endfor %}}"
    )
    tokenizer = ChatTokenizer(tmp_path)
    sinks = [tokenizer.decode(sink) for sink in sinks_of(tokenizer, room=8192)]
    assert len(sinks) == 3 and [sink[: len(begins)] for sink in sinks] == [begins] * 3


@pytest.mark.slow
def test_a_sink_is_what_a_retrieved_documents_text_is_behind_in_a_chat(smollm2_dir: Path) -> None:
    tokenizer = ChatTokenizer(smollm2_dir)
    prompt = Prompt.from_messages([{"role": "user", "content": "Which ship?"}], model="m")
    pieces = render_block([Hit("", text) for text in (*DOCUMENTS[:4], "The ship is called Ada.")])
    prompt = prompt.insert_before(prompt.segments[-1].id, pieces)
    chunks = frozenset(segment.id for segment in prompt.segments if segment.source is not None)
    encoded = tokenizer.encode_chat(prompt.messages, chunks=[mark for _, mark in marks(prompt, chunks)])
    start = encoded.spans[4][0]
    assert encoded.ids[:start] == sinks_of(tokenizer, room=8192)[1]


def test_spans_of_several_salts_become_one_reuse_in_their_order() -> None:
    block = KVBlock(torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1))
    repair = make_repair("auto")
    parts = [
        Reuse(spans=tuple(ReusedSpan(start, block) for start in starts), chooser=repair.chooser, ratio=0.3)
        for starts in ((4, 20), (10,))
    ]
    whole = joined(parts)
    assert whole is not None and [span.start for span in whole.spans] == [4, 10, 20]
    assert (whole.chooser, whole.ratio) == (repair.chooser, 0.3) and joined([]) is None


async def test_a_model_that_cannot_be_had() -> None:
    def missing() -> Path:
        raise ModelUnavailable("run: promptsluice models pull x")

    backend = EmbeddedBackend("local", Spec(kind="embedded", model="x"), path=missing, store=EmptyStore)
    await backend.start()
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="models pull"):
            await backend.available()
    assert backend.ready() == "run: promptsluice models pull x" and backend.healthy()
    assert [card.id for card in await backend.models()] == ["x"]
    await backend.close()
