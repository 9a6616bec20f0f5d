"""Chunks that go on unread: what comes out is what would come out of reading each of them, however the reads fall."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from promptsluice.gateway.backends.base import Frame
from promptsluice.gateway.backends.forms import to_be_read
from promptsluice.gateway.backends.upstream import ChatStreamReader, Secret
from promptsluice.gateway.wire import EventSplitter, frame
from promptsluice.prompt import UpstreamError

TEXTS = [" word", "x", "ümlaut 日本", 'a "quote"', "back\\slash", "line\nend", "\u2028", "", "🙂", "content", "tab\t"]


def chunk(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, **more}
    return {"id": "c-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], "usage": None}


def event(value: Any, *, ascii_only: bool = True) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=ascii_only).encode() + b"\n\n"


def reader(*, include_usage: bool = True) -> ChatStreamReader:
    return ChatStreamReader(backend="b", secret=Secret(None), include_usage=include_usage)


def sent(pieces: list[bytes], *, unread: bool) -> tuple[bytes, int, list[Frame], str]:
    """The bytes that go out, the text in them, the frames, and what was wrong."""
    splitter, reading, items, wrong = EventSplitter(), reader(), list[Frame](), ""
    try:
        for piece in pieces:
            for data in to_be_read(splitter, reading, piece, items) if unread else splitter.feed(piece):
                items += reading.read(data)
        items += reading.end()
    except UpstreamError as error:
        wrong = error.message
    out = b"".join(item.data if item.framed else frame(item.data) for item in items if item.data)
    return out, sum(item.content for item in items), items, wrong


def cut(stream: bytes, dice: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(stream):
        size = dice.choice((1, 7, 100, 1000, len(stream)))
        yield stream[at : at + size]
        at += size


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_the_same_goes_out_whether_chunks_are_read_or_not(seed: int) -> None:
    dice = random.Random(seed)
    ascii_only = seed % 2 == 0
    values: list[dict[str, Any]] = [chunk(dice.choice(TEXTS[:3] if seed % 3 else TEXTS)) for _ in range(40)]
    if seed % 5 == 0:
        values[dice.randrange(40)]["choices"][0]["delta"] = {"tool_calls": [{"index": 0, "id": "content"}]}
    if seed % 5 == 1:
        values[dice.randrange(40)]["usage"] = {"prompt_tokens": 3, "completion_tokens": 1}
    end = {**chunk("", finish_reason="stop")}
    stream = b"".join(event(value, ascii_only=ascii_only) for value in (*values, end)) + b"data: [DONE]\n\n"
    pieces = list(cut(stream, dice))
    plain, unread = sent(pieces, unread=False), sent(pieces, unread=True)
    assert unread[0] == plain[0] and unread[1] == plain[1] and unread[3] == plain[3] == ""
    assert [item.usage for item in unread[2] if item.usage] == [item.usage for item in plain[2] if item.usage]


def test_a_run_is_one_frame() -> None:
    stream = b"".join(event(chunk(f" word{number}")) for number in range(50))
    items = sent([stream], unread=True)[2]
    assert [item.framed for item in items] == [False, True] and items[1].data == stream[len(items[0].data) + 8 :]


def thought(number: int) -> dict[str, Any]:
    return chunk("", delta={"reasoning_content": f"hm{number}"})


def scrambled(number: int) -> dict[str, Any]:
    return {**chunk("word"), "obfuscation": "x" * (number % 7 + 1)}


def newline(number: int) -> dict[str, Any]:
    return chunk("\n")


@pytest.mark.parametrize("before", [thought, scrambled, newline])
def test_what_was_not_alike_for_long_may_be_later(before: Any) -> None:
    odd = [before(number) for number in range(100)]
    plain = [chunk(f" word{number}") for number in range(400)]
    stream = [event(value) for value in (*plain[:20], *odd, *plain)]
    for pieces in (stream, [b"".join(stream)]):
        out, _, items, wrong = sent([*pieces, b"data: [DONE]\n\n"], unread=True)
        assert out == b"".join(stream) and not wrong
        assert sum(not item.framed for item in items) < len(odd) + 20


@pytest.mark.parametrize(
    "odd",
    [
        b'data: {"id": "c-1", "choices": [{"index": 0, "delta": {"content": "a"b"}}]}\n\n',
        b'data: {"broken\n\n',
        event(chunk("a")).replace(b'"a"', b'"a\x01b"'),
        event(chunk("a")).replace(b'"a"', b'"a\\"'),
        event(chunk("a")).replace(b'"a"', b'"\xff\xfe"'),
    ],
)
def test_what_is_no_json_is_an_error_after_the_chunks_before_it(odd: bytes) -> None:
    stream = b"".join(event(chunk("a")) for _ in range(5)) + odd + event(chunk("a"))
    out, _, _, wrong = sent([stream], unread=True)
    assert out == b"".join(event(chunk("a")) for _ in range(5)) and "broken JSON" in wrong


def test_an_error_among_chunks_ends_the_stream_there() -> None:
    failed = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
    stream = event(chunk("a")) * 4 + event(failed)
    items = sent([stream], unread=True)[2]
    assert items[-1].failed and sum(item.data.count(b"c-1") for item in items) == 4


def test_other_framings_are_read_and_written_as_ours() -> None:
    lines = event(chunk("a")).replace(b"\n\n", b"\r\n\r\n") * 3
    named = (b"id: 7\n" + event(chunk("a"))) * 3
    tight = event(chunk("a")).replace(b"data: ", b"data:") * 3
    for stream in (lines, named, tight):
        assert sent([stream], unread=True)[0] == event(chunk("a")) * 3
