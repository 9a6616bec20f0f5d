"""The wire: frames, splices, and the splitter for any stream cut anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.gateway.wire import ChatWriter, Choice, EventSplitter, dumps, frame, spliced
from promptsluice.prompt import Usage


@pytest.mark.slow
@given(
    st.lists(st.text(st.characters(blacklist_categories=["Cs"])), min_size=1),
    st.sampled_from(["\n", "\r", "\r\n"]),
    st.data(),
)
def test_splitter_gives_back_what_was_framed(texts: list[str], line_end: str, data: st.DataObject) -> None:
    events = [dumps(text) for text in texts]
    stream = b"".join(map(frame, events)).replace(b"\n", line_end.encode())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    splitter = EventSplitter()
    found = [event for piece in pieces for event in splitter.feed(piece)]
    assert [*found, *splitter.finish()] == events


def test_splitter_joins_data_lines_and_drops_the_rest() -> None:
    splitter = EventSplitter()
    stream = b": hello\nevent: x\nid: 1\nretry: 9\ndata:a\ndata: b\ndata\n\n\n\ndata: c"
    assert list(splitter.feed(stream)) == [b"a\nb"]
    assert list(splitter.finish()) == [b"c"]


def test_splitter_refuses_an_endless_event() -> None:
    splitter = EventSplitter(limit=100)
    with pytest.raises(ValueError, match="longer than 100"):
        for _ in range(10):
            list(splitter.feed(b"data: " + b"x" * 50 + b"\n"))


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'{"n":1.50e3}', b'{"n":1.50e3,"k":[1]}'), (b" {} \n", b'{"k":[1]}'), (b"[]", b"[]"), (b"", b"")],
)
def test_splice_keeps_every_other_byte(before: bytes, after: bytes) -> None:
    assert spliced(before, "k", [1]) == after


def test_chunks_of_one_answer_agree_and_are_ascii() -> None:
    writer = ChatWriter(model='m"\u2028')
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    raw = [writer.begin(), writer.content("h\u2028\u0085\n😀"), writer.finish("stop"), writer.usage(usage)]
    assert all(chunk.isascii() and b"\n" not in chunk for chunk in raw)
    role, content, finish, last = map(json.loads, raw)
    assert (
        len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in (role, content, finish)})
        == 1
    )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content["choices"][0]["delta"] == {"content": "h\u2028\u0085\n😀"}
    assert finish["choices"][0]["finish_reason"] == "stop" and finish["choices"][0]["delta"] == {}
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 5
    assert all("usage" not in chunk for chunk in (role, content, finish))


def test_choices_carry_their_index() -> None:
    writer = ChatWriter(model="m")
    told = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    raw = [writer.begin(2), writer.content("a", index=2, logprobs=told), writer.finish("length", index=2)]
    role, content, finish = (json.loads(chunk)["choices"][0] for chunk in raw)
    assert [one["index"] for one in (role, content, finish)] == [2, 2, 2]
    assert content["logprobs"] == {"content": told, "refusal": None} and role["logprobs"] is None
    choices = [Choice(text="a", reason="stop", logprobs=told), Choice(text="b", reason="length")]
    whole = json.loads(writer.whole(choices, usage=Usage(prompt_tokens=3, completion_tokens=2)))["choices"]
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in whole] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    assert whole[0]["logprobs"]["content"] == told and whole[1]["logprobs"] is None


def test_json_is_strict() -> None:
    with pytest.raises(ValueError):
        dumps(float("nan"))
