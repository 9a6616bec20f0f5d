"""The prefix tree against a naive model: a list of every sequence that was ever inserted."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from promptsluice.backend_engine.pages import PageAllocator, Pages
from promptsluice.backend_engine.radix import RadixTree
from promptsluice.backend_engine.tiers.keys import PageKeys

SIZE = 4


def _ids(*tokens: int) -> NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


@dataclass
class Host:
    """Plays the engine: `content[page]` are the tokens that a page holds in a pool that stores ids instead of KV."""

    pages: int = 64
    allocator: PageAllocator = field(init=False)
    tree: RadixTree = field(init=False)
    content: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.pages)
        self.tree = RadixTree(self.allocator, page_size=SIZE)

    def start(self, ids: NDArray[np.int64], namespace: str = "") -> tuple[Pages, int] | None:
        """Take the match and fresh pages for the rest, as the scheduler does; None if there is no room."""
        match = self.tree.match(ids, namespace=namespace)
        self.allocator.ref(match.pages)
        need = -(-len(ids) // SIZE) - len(match.pages)
        self.tree.evict(need - self.allocator.free)
        if need > self.allocator.free:
            self.allocator.unref(match.pages)
            return None
        pages = np.concatenate((match.pages, self.allocator.alloc(need)))
        for number, page in enumerate(match.pages):
            assert self.content[int(page)] == ids[number * SIZE : (number + 1) * SIZE].tolist()
        if match.partial_tokens and match.partial in self.content:
            shared = ids[len(match.pages) * SIZE : match.tokens].tolist()
            assert self.content[match.partial][: match.partial_tokens] == shared
        for number in range(len(match.pages), len(pages)):
            self.content[int(pages[number])] = ids[number * SIZE : (number + 1) * SIZE].tolist()
        return pages, match.tokens

    def finish(self, ids: NDArray[np.int64], pages: Pages, namespace: str = "") -> None:
        self.allocator.unref(self.tree.insert(ids, pages, namespace=namespace, tail=True))

    def once(self, *tokens: int, namespace: str = "") -> int:
        """Run a whole request; return how many tokens were cached."""
        started = self.start(_ids(*tokens), namespace)
        assert started is not None
        self.finish(_ids(*tokens), started[0], namespace)
        self.check()
        return started[1]

    def check(self, running: int = 0) -> None:
        self.tree.check()
        self.allocator.check()
        if not running:
            assert self.allocator.free + self.tree.pages == self.pages
            assert self.tree.evictable == self.tree.pages


def test_tokens_match_one_by_one_and_whole_pages_are_shared() -> None:
    host = Host()
    assert host.once(*range(10)) == 0
    match = host.tree.match(_ids(*range(7), 99))
    assert (match.tokens, len(match.pages), match.partial_tokens) == (7, 1, 3)
    assert host.tree.match(_ids(*range(20))).tokens == 10
    assert host.tree.match(_ids(5, 6)).tokens == 0


def test_namespaces_share_nothing() -> None:
    host = Host()
    host.once(*range(8), namespace="a")
    assert host.once(*range(8), namespace="b") == 0
    assert host.once(*range(8), namespace="a") == 8


def test_a_longer_sequence_replaces_the_tail_that_it_covers() -> None:
    host = Host()
    host.once(1, 2, 3, 4, 5)
    host.once(1, 2, 3, 4, 5, 6)
    assert host.tree.pages == 2
    host.once(1, 2, 3, 4, 5)
    assert host.tree.pages == 2
    host.once(1, 2, 3, 4, 7)
    assert host.tree.pages == 3


def test_two_who_computed_the_same_end_up_with_the_same_pages() -> None:
    host, ids = Host(), _ids(*range(10))
    (a, _), (b, _) = host.start(ids), host.start(ids)  # type: ignore[misc]
    a = host.tree.insert(ids[:8], a)
    b = host.tree.insert(ids[:8], b)
    assert a[:2].tolist() == b[:2].tolist() and a[2] != b[2]
    assert host.allocator.free == 64 - 4
    host.finish(ids, a)
    host.finish(ids, b)
    host.check()
    assert host.tree.pages == 3


def nodes(tree: RadixTree) -> int:
    return sum(1 for _ in tree._nodes(tree._top))


def test_pieces_of_one_prefill_are_one_node_until_another_branches_off() -> None:
    host, ids = Host(), _ids(*range(32))
    (pages, _), other = host.start(ids), _ids(*range(12), *range(50, 58))  # type: ignore[misc]
    for known in (8, 16, 20):
        pages = host.tree.insert(ids[:known], pages, grows=known > 8)
        host.check(running=1)
    assert nodes(host.tree) == 1 and host.tree.match(ids).tokens == 20
    (theirs, cached) = host.start(other)  # type: ignore[misc]
    host.finish(other, theirs)
    assert cached == 12 and nodes(host.tree) == 3
    pages = host.tree.insert(ids[:28], pages, grows=True)  # its own branch grows on
    host.check(running=1)
    assert nodes(host.tree) == 3
    host.finish(ids, pages)
    host.check()
    assert host.tree.match(ids).tokens == 32 and host.tree.match(other).tokens == 20


def test_what_others_left_does_not_grow() -> None:
    host = Host()
    host.once(*range(8))
    (pages, _) = host.start(_ids(*range(16)))  # type: ignore[misc]
    host.finish(_ids(*range(16)), pages)
    assert nodes(host.tree) == 2, "each keeps the time of its own last use"


def test_eviction_takes_the_least_recently_used_and_never_what_is_in_use() -> None:
    host = Host(pages=6)
    host.once(*range(8))
    host.once(*range(50, 58))
    host.tree.match(_ids(*range(8)))
    assert host.tree.evict(1) == 1
    assert host.tree.match(_ids(*range(50, 58))).tokens == 4
    assert host.tree.match(_ids(*range(8))).tokens == 8
    started = host.start(_ids(*range(5)))
    assert started is not None
    assert host.tree.evict(100) == 2
    host.check(running=1)
    assert host.tree.match(_ids(*range(8))).tokens == 4


def test_a_shared_page_is_copied_not_written() -> None:
    host = Host()
    host.once(1, 2, 3, 4, 5, 6)
    started = host.start(_ids(1, 2, 3, 4, 5, 9))
    assert started is not None
    pages, cached = started
    assert cached == 5
    assert host.allocator.refs(pages).tolist() == [2, 1]


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=22)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(8, 40),
    st.lists(
        st.one_of(
            st.tuples(st.just("start"), SEQUENCE, st.sampled_from(["", "t"])),
            st.tuples(st.just("progress"), st.integers(0, 9), st.integers(0, 22)),
            st.tuples(st.just("finish"), st.integers(0, 9), st.booleans()),
            st.tuples(st.just("evict"), st.integers(0, 9), st.none()),
        ),
        max_size=40,
    ),
)
def test_the_tree_agrees_with_a_list_of_sequences(pages: int, steps: list[tuple]) -> None:
    host, running, known = Host(pages), list[tuple[NDArray[np.int64], Pages, str]](), list[tuple[str, list[int]]]()
    evicted = False
    for action, first, second in steps:
        if action == "start":
            free = host.allocator.free
            longest = max((_shared(first, ids) for space, ids in known if space == second), default=0)
            started = host.start(_ids(*first), second)
            evicted |= free < -(-len(first) // SIZE)
            if started is not None:
                running.append((_ids(*first), started[0], second))
                assert started[1] <= longest
                assert evicted or started[1] == longest
        elif action == "evict":
            evicted |= host.tree.evict(first) > 0
        elif running:
            ids, held, space = running.pop(first % len(running))
            if action == "progress":
                part, grows = ids[:second], bool(first % 2)
                running.append((ids, host.tree.insert(part, held, namespace=space, grows=grows), space))
                known.append((space, part[: len(part) // SIZE * SIZE].tolist()))
            elif second:
                host.finish(ids, held, space)
                known.append((space, ids.tolist()))
            else:
                host.allocator.unref(held)
        host.check(running=len(running))
    for _, held, _ in running:
        host.allocator.unref(held)
    host.check()
    host.tree.evict(host.pages)
    host.check()
    assert host.allocator.free == pages


def _shared(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_an_empty_namespace_leaves_nothing_behind() -> None:
    host = Host()
    host.allocator.unref(host.tree.insert(_ids(1, 2), host.allocator.alloc(1), namespace="gone"))
    host.once(1, 2, 3, namespace="x")
    host.tree.evict(host.pages)
    host.tree.check()
    assert host.tree.pages == 0


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SEQUENCE, st.sampled_from(["", "t"]), st.integers(0, 3)), max_size=20))
def test_evicted_pages_are_named_by_all_that_comes_before_them(steps: list[tuple[list[int], str, int]]) -> None:
    """A name that is made along the tree's edges, wherever they were cut, is the one made of the tokens alone."""
    naming = PageKeys(fingerprint="f", layout=(1, 1, 1), dtype="float32", page_size=SIZE)
    allocator, meant, content = PageAllocator(400), dict[bytes, list[int]](), dict[int, list[int]]()
    handed: list[bytes] = []

    def evicted(names: list[bytes], pages: Pages) -> None:
        handed.extend(names)
        assert [meant[name] for name in names] == [content[int(page)] for page in pages]
        assert len(set(names)) == len(names) and (allocator.refs(pages) == 0).all()

    tree = RadixTree(allocator, page_size=SIZE, naming=naming, evicted=evicted)
    for tokens, space, wanted in steps:
        ids = _ids(*tokens)
        pages = allocator.alloc(-(-len(ids) // SIZE))
        for number, name in enumerate(naming.extend(naming.start(space), ids)):
            meant[name] = [*map(ord, space), *tokens[: (number + 1) * SIZE]]
            content[int(pages[number])] = meant[name]
        pages = tree.insert(ids[: len(ids) // 2], pages, namespace=space)
        tree.evict(wanted)
        allocator.unref(tree.insert(ids, pages, namespace=space, tail=True, grows=wanted > 1))
        tree.evict(wanted)
        tree.check()
    tree.evict(allocator.pages)
    assert set(handed) == set(meant) and allocator.free == allocator.pages


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1])
def test_every_length_is_found_again(length: int) -> None:
    host = Host()
    host.once(*range(length))
    assert host.once(*range(length)) == length
