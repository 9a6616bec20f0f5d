"""Stored text is found at any offset, on its own tokens, and new text is cut where its content says."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from promptsluice.kv_reuse import ChunkIndex, EmptyStore, Finder, Match, breaks_of
from promptsluice.kv_reuse.cuts import BLANK, LINE, NONE, WALL, cut
from promptsluice.kv_reuse.finding import Fresh, disjoint, outside
from promptsluice.kv_reuse.index import SURE
from promptsluice.kv_reuse.windows import WIDTH, window_digests


def array(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def text(seed: int, tokens: int, *, words: int = 1000) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(words) for _ in range(tokens)]


def finder(*chunks: Sequence[int], **options: object) -> Finder:
    made = Finder(EmptyStore(), fingerprint="model", **options)
    for chunk in chunks:
        made.know(chunk, salt="a")
    return made


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 2**64 - 1))
def test_equal_windows_have_equal_digests_and_others_do_not(ids: list[int], seed: int):
    digests = window_digests(array(ids), seed=seed)
    windows = [tuple(ids[at : at + WIDTH]) for at in range(max(0, len(ids) - WIDTH + 1))]
    assert len(digests) == len(windows)
    assert len(set(zip(windows, digests.tolist(), strict=True))) == len(set(windows)) == len(set(digests.tolist()))


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from([2, 5, 1000]))
@example(seed=0, words=1)
def test_whatever_is_found_is_there_and_whatever_is_there_is_found(seed: int, words: int):
    source = random.Random(seed)
    chunks = [text(seed + number, source.randrange(SURE, 120), words=words) for number in range(4)]
    prompt: list[int] = []
    there: list[tuple[int, int]] = []
    for _ in range(source.randrange(8)):
        if source.random() < 0.4:
            prompt += text(source.randrange(2**32), source.randrange(50), words=words)
            continue
        chunk = source.choice(chunks)
        first, last = sorted(source.sample(range(len(chunk) + 1), 2)) if source.random() < 0.5 else (0, len(chunk))
        there.append((len(prompt), last - first))
        prompt += chunk[first:last]
    index = ChunkIndex()
    for chunk in chunks:
        index.add(chunk, salt="a")
    matches = index.matches(array(prompt), salt="a", least=1)
    for match in matches:
        assert match.length >= WIDTH
        assert match.chunk[match.offset : match.offset + match.length] == tuple(prompt[match.start : match.stop])
        assert list(match.chunk) in chunks
    covered = [(match.start, match.length) for match in matches]
    for start, length in there:
        near = [(at - start, size) for at, size in covered if at + size > start and at < start + length]
        # Between runs that overlap, a rest without a whole known window may stay.
        assert all(size < SURE for _, size in outside(length, near)), (start, length, near)


def test_a_chunk_is_found_whole_in_part_twice_and_beside_misses():
    chunk, other = text(1, 100), text(2, 70)
    found = finder(chunk, other).find(
        [*text(3, 20), *chunk, *text(4, 9), *other[20:], *chunk, *text(5, 40), *chunk[:40]], salt="a"
    )
    assert found == [
        Match(20, 100, tuple(chunk), 0),
        Match(129, 50, tuple(other), 20),
        Match(179, 100, tuple(chunk), 0),
        Match(319, 40, tuple(chunk), 0),
    ]


def test_what_is_too_short_taken_or_behind_the_end_is_not_found():
    chunk = text(1, 100)
    known = finder(chunk)
    assert known.find([*text(3, 20), *chunk[:31]], salt="a") == []
    assert known.find([*text(3, 20), *chunk[:32]], salt="a") == [Match(20, 32, tuple(chunk), 0)]
    assert known.find(chunk, salt="a", least=101) == []
    assert known.find(chunk, salt="a", until=60) == [Match(0, 60, tuple(chunk), 0)]
    assert known.find(chunk, salt="a", taken=[(0, 30), (95, 5)]) == [Match(30, 65, tuple(chunk), 30)]
    assert known.find(chunk, salt="a", taken=[(20, 60)]) == [] and known.find(chunk, salt="a", taken=[(0, 100)]) == []


def test_of_overlapping_runs_the_longest_stands_and_a_beginning_before_a_middle():
    one, two = tuple(text(1, 100)), tuple(text(2, 110))
    assert disjoint([Match(0, 100, one, 0), Match(60, 110, two, 0)], least=32) == [
        Match(0, 60, one, 0),
        Match(60, 110, two, 0),
    ]
    assert disjoint([Match(0, 100, one, 0), Match(0, 108, two, 2)], least=32) == [Match(0, 100, one, 0)]
    assert disjoint([Match(0, 40, one, 0), Match(0, 100, two, 10)], least=32) == [Match(0, 100, two, 10)]


def test_salts_find_only_their_own():
    chunk = text(1, 60)
    known = finder(chunk)
    assert known.find(chunk, salt="a") and known.find(chunk, salt="b") == []
    known.forget(chunk, salt="b")
    assert known.find(chunk, salt="a")
    known.know(chunk, salt="b")
    known.forget(chunk, salt="a")
    assert known.find(chunk, salt="a") == [] and known.find(chunk, salt="b")


def test_the_index_is_bounded_and_lets_go_of_what_was_found_least_recently():
    chunks = [text(number, 60) for number in range(4)]
    index = ChunkIndex(most_tokens=180)
    for chunk in chunks[:3]:
        index.add(chunk, salt="a")
    index.matches(array(chunks[0]), salt="a", least=32)
    index.add(chunks[3], salt="a")
    index.add(text(9, 181), salt="a")
    assert (len(index), index.tokens) == (3, 180)
    assert [bool(index.matches(array(chunk), salt="a", least=32)) for chunk in chunks] == [True, False, True, True]
    for chunk in chunks:
        index.discard(chunk, salt="a")
    assert (len(index), index.tokens, index.windows) == (0, 0, 0)


def test_boilerplate_that_many_chunks_share_hides_none_of_them():
    header = text(0, 48)
    chunks = [[*header, *text(number, 64)] for number in range(1, 40)]
    known = finder(*chunks)
    for chunk in chunks:
        assert known.find([*text(99, 7), *chunk, *text(98, 7)], salt="a") == [Match(7, 112, tuple(chunk), 0)]


def test_a_prompt_that_repeats_one_token_is_found_chunk_by_chunk():
    assert finder([7] * 100).find([7] * 250, salt="a") == [
        Match(0, 100, (7,) * 100, 0),
        Match(100, 100, (7,) * 100, 0),
        Match(200, 50, (7,) * 100, 0),
    ]


WORD, DOT, LINE_ID, PARAGRAPH, CONTROL = range(5)
PIECES = [b" word", b".", b"\n", b".\n\n", b"<|end|>"]
BREAKS = breaks_of(PIECES, walls=[CONTROL])


def test_what_tokens_end():
    assert breaks_of([b"a", b"\n", b"x\n", b"\n\n", b" \n \n ", b"\nx", b"<>"], walls=[6]).tolist() == [
        NONE,
        LINE,
        LINE,
        BLANK,
        BLANK,
        NONE,
        WALL,
    ]


def lengths(ids: list[int], **options: int) -> list[tuple[int, int]]:
    return cut(array(ids), BREAKS, **{"least": 32, "most": 100, **options})


def test_text_is_cut_behind_paragraphs_that_are_long_enough():
    words = [WORD] * 20
    ids = [*words, PARAGRAPH, *words, LINE_ID, LINE_ID, *words, PARAGRAPH, *words, DOT, LINE_ID, *words]
    assert lengths(ids) == [(0, 43), (43, 63)]
    assert lengths([*words, CONTROL, *words, *words, PARAGRAPH, CONTROL]) == [(21, 41)]
    assert lengths([*words, *words, LINE_ID, LINE_ID, LINE_ID, *words, *words]) == [(0, 43), (43, 40)]


def test_a_long_paragraph_is_cut_behind_a_line_or_else_by_its_content():
    words = [WORD] * 60
    assert lengths([*words, LINE_ID, *[WORD] * 30, LINE_ID, *words]) == [(0, 92), (92, 60)]
    long = text(1, 300, words=400)
    for spans in (lengths([9 + id_ for id_ in long]), lengths([9 + id_ for id_ in long], least=50)):
        assert all(size <= 100 for _, size in spans) and len(spans) >= 3


@given(st.lists(st.sampled_from([WORD, DOT, LINE_ID, PARAGRAPH, CONTROL, 9]), max_size=400), st.integers(1, 40))
def test_cuts_are_disjoint_bounded_and_leave_little(ids: list[int], least: int):
    spans = cut(array(ids), BREAKS, least=least, most=2 * least)
    end = 0
    for start, size in spans:
        assert start >= end and least <= size <= 2 * least and CONTROL not in ids[start : start + size]
        end = start + size
    for start, size in outside(len(ids), spans):
        runs = "".join("|" if id_ == CONTROL else "x" for id_ in ids[start : start + size]).split("|")
        assert all(len(run) < least for run in runs)


def document(seed: int) -> list[int]:
    ids: list[int] = []
    for number in range(3):
        ids += [9 + id_ for id_ in text(100 * seed + number, 30)]
        ids.append(PARAGRAPH)
    return ids


def asked(*documents: int, question: int) -> list[int]:
    body = [id_ for number in documents for id_ in document(number)]
    return [CONTROL, *[5] * 9, *body, *text(question, 12), CONTROL]


@pytest.mark.parametrize("sights", [1, 2])
def test_the_same_documents_in_another_order_are_found_once_they_were_seen_often_enough(sights: int):
    known = finder(breaks=BREAKS, shortest=20)
    orders = [(1, 2, 3), (3, 1, 2), (2, 3, 1), (3, 2, 1)]
    shares: list[float] = []
    for number, order in enumerate(orders):
        ids = asked(*order, question=1000 + number)
        until = len(ids) - 13
        found = known.find(ids, salt="a", until=until)
        covered = [(match.start, match.length) for match in found]
        fresh = known.fresh(ids, salt="a", until=until, covered=covered, sights=sights)
        known.saw(fresh.sights)
        for chunk in fresh.chunks:
            known.know(chunk, salt="a")
        shares.append(sum(length for _, length in covered) / (3 * len(document(1))))
    # Where documents met other text, their chunks had something of it; what was left over is learned next.
    assert shares[:sights] == [0] * sights and shares[sights] > 0.7 and shares[3] > 0.95


def test_new_chunks_are_bounded_and_counted_by_tenant():
    known = finder(breaks=BREAKS, shortest=20)
    ids = asked(1, 2, 3, question=1)
    assert sum(map(len, known.fresh(ids, salt="a", covered=[], most=100).chunks)) in range(60, 101)
    once, again = (known.fresh(ids, salt="b", covered=[], sights=2) for _ in range(2))
    assert once.chunks == again.chunks == (), "what was not told to have come did not"
    known.saw(once.sights)
    assert known.fresh(ids, salt="c", covered=[], sights=2).chunks == ()
    assert known.fresh(ids, salt="b", covered=[(0, len(ids))], sights=2) == Fresh()
    assert known.fresh(ids, salt="b", covered=[], sights=0) == Fresh()
    assert known.fresh(ids, salt="b", covered=[], sights=2).chunks
    assert finder().fresh(ids, salt="b", covered=[]) == Fresh()
