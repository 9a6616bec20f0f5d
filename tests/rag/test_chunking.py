"""Chunking: nothing lost, nothing too long, cut where the structure says."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.rag import Chunker, piece_of

# Lengths that are additive, that are not, and one that punishes borders.
COUNTS: dict[str, Callable[[str], int]] = {
    "characters": len,
    "words": lambda text: len(re.findall(r"\w+|[^\w\s]", text)),
    "bytes": lambda text: len(text.encode()) // 3 + 1,
}
LINES = st.sampled_from(
    [
        "# Title",
        "### Deep { #anchor }",
        "A sentence. Another one! A third?",
        "- item one",
        "  - nested item",
        "```python",
        "```",
        "~~~",
        "    indented code",
        "| a | b |",
        "|---|---|",
        "> quoted text",
        "---",
        "===",
        "",
        "   ",
        "\t",
        "<div>",
        "中文句子。第二句!第三句?",
        "हिन्दी वाक्य। दूसरा।",
        "word " * 40,
        "x" * 90,
        "👩‍👩‍👧‍👦" * 5,
        "é" * 20,
    ]
)
TEXTS = st.one_of(
    st.lists(LINES, max_size=30).map("\n".join),
    st.lists(LINES, max_size=10).map("\r\n".join),
    st.text(max_size=400).filter(lambda text: "\0" not in text),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=TEXTS,
    measure=st.sampled_from(sorted(COUNTS)),
    limit=st.integers(16, 80),
    markdown=st.booleans(),
    share=st.sampled_from([0, 0, 4, 2]),
)
def test_chunks_cover_the_text_and_keep_the_limit(
    text: str, measure: str, limit: int, markdown: bool, share: int
) -> None:
    count = COUNTS[measure]
    chunker = Chunker(count=count, max_tokens=limit, overlap=limit // share if share else 0)
    chunks = chunker.chunks(text, markdown=markdown)
    if not text.strip():
        assert chunks == []
        return
    assert chunks[0].start == 0
    assert chunks[-1].end == len(text)
    for chunk in chunks:
        assert chunk.text == text[chunk.start : chunk.end]
        assert chunk.text
        assert count(chunk.text) <= limit
    for before, after in pairwise(chunks):
        assert before.start < after.start <= before.end < after.end
        if not share:
            assert after.start == before.end
    assert chunker.chunks(text, markdown=markdown) == chunks


def chunks_of(text: str, *, limit: int = 30, markdown: bool = True, overlap: int = 0) -> list[str]:
    chunker = Chunker(count=lambda text: len(text.split()), max_tokens=limit, overlap=overlap)
    return [chunk.text for chunk in chunker.chunks(text, markdown=markdown)]


def sentence(words: int, first: str = "Some") -> str:
    return " ".join([first, *["word"] * (words - 2), "end."])


def test_code_is_whole_unless_it_is_larger_than_a_chunk() -> None:
    code = "```python\n" + "\n\n".join(f"value_{n} = {n}" for n in range(6)) + "\n```\n"
    text = f"{sentence(15)}\n\n{code}\n{sentence(15)}\n"
    assert sum(code in chunk for chunk in chunks_of(text)) == 1
    long = "```\n" + "".join(f"line number {n} here\n" for n in range(20)) + "```\n"
    parts = chunks_of(long)
    assert len(parts) == 3
    assert all(part.endswith("\n") for part in parts)  # between lines


def test_fences_in_lists_quotes_and_unclosed_ones() -> None:
    inner = "  ```sh\n  one two three\n\n  four five six\n  ```\n"
    text = f"- {sentence(22)}\n\n{inner}- next {sentence(12)}\n"
    assert sum(inner in chunk for chunk in chunks_of(text)) == 1
    open_end = f"{sentence(20)}\n\n```\n# no heading\n\n" + "a b c\n" * 5
    assert [chunk.startswith("```") for chunk in chunks_of(open_end)] == [False, True]


def test_headings_become_context_and_stay_with_their_text() -> None:
    text = (
        f"# Book {{ #book }}\n\n{sentence(20)}\n\n## `Part` One\n\n{sentence(20)}\n\n{sentence(20)}\n\n# Other\n\nx\n"
    )
    chunker = Chunker(count=lambda text: len(text.split()), max_tokens=30)
    chunks = chunker.chunks(text, markdown=True)
    assert [chunk.headings for chunk in chunks] == [(), ("Book",), ("Book", "`Part` One"), ()]
    assert chunks[1].text.startswith("## `Part` One\n\nSome")
    assert chunks[3].text == "# Other\n\nx\n"


def test_a_heading_moves_on_with_what_follows_it() -> None:
    text = f"{sentence(12)}\n\n# A\n\n## B\n\n{sentence(25)}\n"
    assert chunks_of(text) == [f"{sentence(12)}\n\n", f"# A\n\n## B\n\n{sentence(25)}\n"]


def test_paragraphs_then_sentences_then_words() -> None:
    paragraph = " ".join([sentence(14, "First"), sentence(14, "Second"), sentence(14, "Third")])
    assert chunks_of(paragraph) == [
        f"{sentence(14, 'First')} {sentence(14, 'Second')} ",
        sentence(14, "Third"),
    ]
    assert [len(chunk.split()) for chunk in chunks_of("word " * 70)] == [30, 30, 10]


def test_front_matter_is_no_heading() -> None:
    text = f"---\ntitle: Things\n---\n# Real\n\n{sentence(28)}\n"
    chunks = Chunker(count=lambda text: len(text.split()), max_tokens=30).chunks(text, markdown=True)
    assert [chunk.headings for chunk in chunks] == [(), ()]
    assert chunks[1].text.startswith("# Real")


def test_chinese_is_cut_after_sentences() -> None:
    text = "今天天气很好。我们去公园散步。" * 10
    chunks = Chunker(count=len, max_tokens=40).chunks(text, markdown=False)
    assert all(chunk.text.endswith("。") for chunk in chunks)
    assert [len(chunk.text) for chunk in chunks] == [37, 38, 37, 38]


def test_an_emoji_family_is_not_torn_apart() -> None:
    family = "👩‍👩‍👧‍👦"
    chunks = Chunker(count=len, max_tokens=16).chunks(family * 8, markdown=False)
    assert all(chunk.text == family * (len(chunk.text) // len(family)) for chunk in chunks)


def test_overlap_repeats_whole_sentences_but_no_code() -> None:
    text = " ".join(f"Sentence {n} has five." for n in range(12))
    first, second, *_ = chunks_of(text, limit=20, overlap=6)
    assert first == " ".join(f"Sentence {n} has five." for n in range(3)) + " "
    assert second == " ".join(f"Sentence {n} has five." for n in range(2, 6)) + " "
    coded = f"{sentence(10)}\n\n```\na b c\n```\n\n" + sentence(12)
    assert chunks_of(coded, limit=24, overlap=8)[1] == sentence(12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["\n", " \n", ".", "{#", "# {#\n", "<", "< ", "- ", "(", "`", "> ", "|", "1. ", "\u200b"]
)
def test_hostile_repetition_ends(unit: str) -> None:
    """Quadratic work would not end on these: 200,000 characters of one pattern."""
    text = unit * (200_000 // len(unit)) + "x"
    chunks = Chunker(count=lambda text: len(piece_of(text)) // 4, max_tokens=1000).chunks(text, markdown=True)
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(len(title) <= 200 for chunk in chunks for title in chunk.headings)


@pytest.mark.slow
def test_real_tokens_and_pages(smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    pages = sorted((Path(__file__).parents[1] / "data" / "rag").rglob("*.md"))
    assert len(pages) >= 3
    for page in pages:
        text = page.read_text(encoding="utf-8")
        chunks = Chunker(count=count, max_tokens=120).chunks(text, markdown=True)
        assert "".join(chunk.text for chunk in chunks) == text
        sizes = [count(chunk.text) for chunk in chunks]
        assert max(sizes) <= 120
        assert sum(sizes) / len(sizes) > 60
