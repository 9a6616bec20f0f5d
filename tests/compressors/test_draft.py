"""Where a text is cut that is judged only in part."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from promptsluice.compressors import protected_spans
from promptsluice.compressors.base import Task
from promptsluice.compressors.draft import Draft
from promptsluice.compressors.result import Span
from promptsluice.prompt import Prompt

PIECES = st.sampled_from(["at ", "6:00 EST", "$50,000 in", " ", "\n", "word", "x", "不", "12 kg ", "a b"])


def task(text: str, protected: Sequence[Span]) -> Task:
    prompt = Prompt.from_messages([{"role": "user", "content": "x"}])
    segment = replace(prompt.segments[0], text=text)
    return Task(segment=segment, question="", tokens=len(text), protected=tuple(protected))


@given(st.lists(PIECES, max_size=12).map("".join), st.data())
def test_it_is_cut_at_the_last_white_space_that_parts_nothing_protected(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    protected = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    end = data.draw(st.integers(0, max(0, len(text) - 1)))
    whole = Draft.of(task(text, protected))
    free = [
        place
        for place in range(end + 1)
        if place == 0 or (text[place - 1].isspace() and not any(start < place < stop for start, stop in protected))
    ]
    assert whole.before(end, task(text, protected)).text == text[: free[-1]] or end >= len(text)


def test_a_protected_span_with_white_space_in_it_is_never_parted() -> None:
    text = "It costs $50,000 in all, and more."
    spans = protected_spans(text)
    assert [text[start:stop] for start, stop in spans] == ["$50,000 in"]
    for end in range(*spans[0]):
        assert Draft.of(task(text, spans)).before(end, task(text, spans)).text == "It costs "
    assert Draft.of(task(text, spans)).before(spans[0][1], task(text, spans)).text == "It costs "
