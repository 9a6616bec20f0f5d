"""Diffs with less context."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.compressors.structure.diff import with_less_context


def less(text: str, context: int = 1) -> str:
    return with_less_context(text, context=context).text(text)


def diff(old: list[str], new: list[str], *, around: int = 8) -> str:
    named = difflib.unified_diff(old, new, "a/f.py", "b/f.py", n=around)
    return "".join(named)


def test_unchanged_lines_far_from_changes_go() -> None:
    old = [f"line {n}\n" for n in range(30)]
    new = [*old[:10], "changed\n", *old[11:20], "added\n", *old[20:]]
    assert less("Here it is:\n" + diff(old, new) + "Done.\n") == (
        "Here it is:\n--- a/f.py\n+++ b/f.py\n@@ -3,26 +3,27 @@\n[7 unchanged lines]\n line 9\n"
        "-line 10\n+changed\n line 11\n[7 unchanged lines]\n line 19\n+added\n line 20\n[7 unchanged lines]\nDone.\n"
    )


def test_what_is_no_whole_hunk_stays() -> None:
    for text in (
        "@@ -1,9 +1,9 @@\n a\n b\n c\n d\n+e\n",
        "@@ -1,9 +1,9 @@\n a\nno diff\n",
        "@@ -1,2 +1,2 @@",
        "@@ -1 +1 @@\n",
    ):
        assert less(text, 0) == text


lines = st.lists(st.sampled_from(["a\n", "b\n", "", "@@ -1,4 +1,4 @@\n", " \n", "[3 unchanged lines]\n"]), max_size=30)


@given(lines, lines, st.integers(0, 3))
def test_changed_lines_stay_and_twice_is_once(old: list[str], new: list[str], context: int) -> None:
    text = diff([line for line in old if line], [line for line in new if line])
    once = less(text, context)
    assert less(once, context) == once
    kept = [line for line in text.split("\n") if line.startswith(("+", "-"))]
    assert [line for line in once.split("\n") if line.startswith(("+", "-"))] == kept


@pytest.mark.slow
def test_a_megabyte_is_no_trouble() -> None:
    for text in (
        "@@ -1,99999 +1,99999 @@\n" * 40_000,
        "@@ -1,300000 +1,300000 @@\n" + " \n" * 300_000,
        "@@ -1,9 +1,9 @@\n \n" * 50_000,
    ):
        assert len(less(text)) <= len(text)
