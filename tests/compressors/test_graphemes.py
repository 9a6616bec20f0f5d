"""Characters of several code points: no compressor parts a letter from its marks, an emoji, a digit in its keycap."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create, protected_spans
from promptsluice.compressors.atoms import atoms_of
from promptsluice.compressors.graphemes import end_of, parted, start_of
from promptsluice.prompt import Prompt

regex = pytest.importorskip("regex")

ALPHABET = (
    *"aB1 .,=<>*([)\"`'-#_:/\n\r\t5%", "\u0301", "\u0338", "\u20e3", "\ufe0f", "\u200d", "\u200c", "\u3000", "かは葛",
    "\u3099", "\uff9e", "∈", "«", "»", "‼", "↔", "▶", "⌚", "©", "👩", "👍", "\U0001f3fd", "🇩🇪", "न",
    "\u094d", "\u093e", "५", "ก", "\u0e33", "\u1100", "\u1161", "\u11a8", "한", "\u0600", "--x=", "not ", "不得",
    "and ", "- ", "# ", "Ann: ",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join)


def borders(text: str) -> set[int]:
    """Where Unicode lets a character end."""
    return set(itertools.accumulate((len(found) for found in regex.findall(r"\X", text)), initial=0))


@settings(deadline=None)
@given(text=TEXTS)
def test_borders_are_those_of_unicode(text: str) -> None:
    free = {at for at in range(len(text) + 1) if not parted(text, at)}
    assert free <= borders(text)
    for at in range(len(text) + 1):
        assert start_of(text, at) in free and end_of(text, at) in free
        assert start_of(text, at) <= at <= end_of(text, at)


@settings(deadline=None)
@given(text=TEXTS)
def test_atoms_and_protected_spans_are_of_whole_characters(text: str) -> None:
    whole = borders(text)
    protected = protected_spans(text)
    assert all({start, end} <= whole for start, end in protected)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(protected))
    atoms = atoms_of(text, protected=protected)
    assert all({atom.start, atom.end} <= whole for atom in atoms)
    assert all(left.end <= right.start for left, right in itertools.pairwise(atoms))
    left_out = set(range(len(text))).difference(*(range(atom.start, atom.end) for atom in atoms))
    assert all(text[at].isspace() for at in left_out)


PROSE = "quiet rivers carry heavy boats along green hills under pale clouds while farmers watch distant storms "


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(text=TEXTS, target=st.floats(0.1, 0.9), protect=st.booleans())
def test_no_character_is_parted_in_what_goes_out(
    text: str,
    target: float,
    protect: bool,
    context: Callable[..., CompressionContext],
    prompt_of: Callable[..., Prompt],
) -> None:
    text = f"{PROSE}{text} {PROSE}{text}"
    options = {"target_rate": target, "min_tokens": 1, "kinds": ["tool_result"]}
    made = create("perplexity", options if protect else {**options, "protect": []})
    result = made.compress(prompt_of(text), context=context())
    whole = borders(text)
    for change in result.changes:
        assert all({start, end} <= whole for start, end in change.kept), change.kept


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Press 1\ufe0f\u20e3 now", ["Press", "1\ufe0f\u20e3", "now"]),
        ("see #\ufe0f\u20e3 or \u25b6\ufe0f it", ["see", "#\ufe0f\u20e3", "or", "\u25b6\ufe0f", "it"]),
        ("If a =\u0338b, x \u2208\u0338 S", ["If", "a", "=\u0338", "b", ",", "x", "\u2208\u0338", "S"]),
        ("(\u0301 odd \u00ab\u0338 >\u0338", ["(\u0301", "odd", "\u00ab\u0338", ">\u0338"]),
        ("a \u0301 b\n\u0301", ["a", " \u0301", "b", "\u0301"]),
        (">\u0338 quoted", [">\u0338", "quoted"]),
    ],
)
def test_marks_stay_with_what_they_stand_on(text: str, wanted: list[str]) -> None:
    assert [text[atom.start : atom.end] for atom in atoms_of(text, protected=protected_spans(text))] == wanted


def test_protected_text_has_the_marks_behind_it() -> None:
    for text, wanted in (("Press 1\ufe0f\u20e3 now", "1\ufe0f\u20e3"), ('a "no"\u0301 b', '"no"\u0301')):
        assert [text[start:end] for start, end in protected_spans(text)] == [wanted]
