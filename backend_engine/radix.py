"""The prefix tree: which token prefixes have their KV in the pool. Host only; it moves references, never KV.

Matching is by token, sharing by whole page: a match's whole pages are shared, the last, partly matching page is copied
by the caller (copy-on-write). Nodes hold whole pages; a sequence's last, partly filled page is a leaf of its own, a
*tail*.

There are no locks: the tree holds one reference on each of its pages, and whoever uses a page holds all pages before
it too, so a page may be evicted exactly if nothing follows it and the tree's reference is the only one.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from .pages import PageAllocator, Pages
from .tiers.keys import PageKeys

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: whole, shared `pages`, then a page `partial` whose first `partial_tokens` match.

    Nothing is referenced yet: take references (and copy from `partial`) before the tree changes.
    """

    pages: Pages
    partial: int
    partial_tokens: int
    tokens: int  # in all


class _Node:
    """`ids` continue the parent's prefix and lie in `pages`: whole ones, or one partly filled (a tail, a leaf)."""

    __slots__ = ("children", "ids", "key", "names", "pages", "parent", "queued", "used")

    def __init__(self, key: bytes, ids: Ids, pages: Pages, *, parent: "_Node | None", used: int) -> None:
        self.key = key
        self.ids = ids
        self.pages = pages
        self.names: list[bytes] = []  # of the first pages, as far as they were needed
        self.parent = parent
        self.used = used
        self.queued = False
        self.children: dict[bytes, _Node] = {}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a walk ended: `inside` tokens into the edge of `node`, after `matched` tokens in the pages `pages`."""

    node: _Node
    inside: int
    matched: int
    pages: Pages


_NO_IDS = np.empty(0, dtype=np.int64)
_NO_PAGES = np.empty(0, dtype=np.int32)


class RadixTree:
    """Prefixes per namespace, evicted least recently used first, from their ends.

    With `naming`, the names and pages that `evict` has just freed are handed to `evicted`, before anybody can take
    them: all at once, each page after those before it in its prefix. Tails have no names.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        naming: PageKeys | None = None,
        evicted: Callable[[list[bytes], Pages], object] = lambda names, pages: None,
    ) -> None:
        self.page_size = page_size
        self.pages = 0
        self._allocator = allocator
        self._naming = naming
        self._evicted = evicted
        self._top = _Node(b"", _NO_IDS, _NO_PAGES, parent=None, used=0)  # its children are the namespaces' roots
        self._held = np.zeros(allocator.pages, dtype=bool)
        self._clock = count(1)
        self._heap: list[tuple[int, int, _Node]] = []  # leaves by last use; entries may be out of date

    @property
    def evictable(self) -> int:
        """How many pages `evict` could free now."""
        held = np.flatnonzero(self._held).astype(np.int32)
        return int(np.count_nonzero(self._allocator.refs(held) == 1))

    @property
    def surely_evictable(self) -> int:
        """At least so many pages are evictable: as if each reference that is not the tree's were on a page of its own
        of the tree. Known without a look at the pool."""
        return max(0, 2 * self.pages - self._allocator.references)

    def match(self, ids: Ids, *, namespace: str = "") -> Match:
        """Find the longest prefix of `ids` in the tree and mark it as just used."""
        root = self._top.children.get(namespace.encode())
        if root is None:
            return Match(_NO_PAGES, -1, 0, 0)
        place = self._walk(root, ids)
        partial, extra = self._longest_start(place, ids[place.matched :])
        return Match(place.pages, partial, extra, place.matched + extra)

    def known(self, ids: Ids, *, namespace: str = "") -> int:
        """About how many leading tokens of `ids` are in the tree, in whole pages; marks nothing.

        The only method for other threads: while the tree changes it may see less, or what is just going.
        """
        node, matched, size = self._top.children.get(namespace.encode()), 0, self.page_size
        while node is not None:
            node = node.children.get(ids[matched : matched + size].tobytes())
            if node is None:
                break
            edge = node.ids
            common = common_tokens(edge, ids[matched:]) // size * size
            matched += common
            if common < len(edge):
                break
        return matched

    def insert(self, ids: Ids, pages: Pages, *, namespace: str = "", tail: bool = False, grows: bool = False) -> Pages:
        """Make the KV of `ids`, which lies in `pages`, known; return the pages that the caller holds from now on.

        Where the tree already knew a page's tokens, the caller's reference moves from its own page to the tree's. Only
        whole pages are taken, and with `tail` also the last, partly filled one, which nobody may write to afterwards.
        With `grows`, for a caller that goes on with a prefill, what is new becomes part of the leaf before it: if each
        piece were a node, later looks at the prefix would walk over all of them.
        """
        whole = len(ids) // self.page_size
        assert len(pages) * self.page_size >= len(ids), (len(ids), len(pages))
        place = self._walk(self._root(namespace), ids[: whole * self.page_size])
        done = len(place.pages)
        self._adopt(place.pages, pages[:done])
        held = np.concatenate((place.pages, pages[done:]))
        rest = ids[place.matched :]
        if done < whole:
            cut = (whole - done) * self.page_size
            node = self._end(place)
            if grows and not node.children and len(node.pages):
                self._extend(node, rest[:cut], pages[done:whole])
            else:
                node = self._add(node, rest[:cut], pages[done:whole])
            place = _Place(node, len(node.ids), whole * self.page_size, _NO_PAGES)
            rest = rest[cut:]
        if tail and len(rest) and self._longest_start(place, rest)[1] < len(rest):
            self._add(self._end(place), rest, pages[whole : whole + 1])
        if not self._top.children[namespace.encode()].children:
            del self._top.children[namespace.encode()]
        return held

    def evict(self, wanted: int) -> int:
        """Free `wanted` pages, or all that are evictable if those are fewer; return how many were freed."""
        freed, kept = 0, []
        gone: list[tuple[list[bytes], Pages]] = []
        while freed < wanted and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.parent is None or node.children:
                continue
            if used != node.used:
                self._queue(node)
                continue
            names = self._names(node)
            dropped = self._shorten(node, wanted - freed)
            freed += len(dropped)
            if names:
                gone.append((names[len(node.pages) :], dropped))
            if len(node.pages):
                kept.append(node)
            else:
                self._unlink(node)
        for node in kept:
            self._queue(node)
        if gone:
            gone.reverse()  # a node is emptied before its parent
            self._evicted([name for names, _ in gone for name in names], np.concatenate([pages for _, pages in gone]))
        return freed

    def _root(self, namespace: str) -> _Node:
        key = namespace.encode()
        if key not in self._top.children:
            self._top.children[key] = _Node(key, _NO_IDS, _NO_PAGES, parent=self._top, used=0)
        return self._top.children[key]

    def _walk(self, root: _Node, ids: Ids) -> _Place:
        """Follow the whole pages that match."""
        size, now = self.page_size, next(self._clock)
        node, inside, matched, pages = root, 0, 0, [_NO_PAGES]
        while inside == len(node.ids) and len(ids) - matched >= size:
            child = node.children.get(ids[matched : matched + size].tobytes())
            if child is None:
                break
            node, inside = child, common_tokens(child.ids, ids[matched:]) // size * size
            node.used = now
            pages.append(node.pages[: inside // size])
            matched += inside
        return _Place(node, inside, matched, np.concatenate(pages))

    def _longest_start(self, place: _Place, rest: Ids) -> tuple[int, int]:
        """Of the pages that follow `place`, the one that shares the most leading tokens with `rest`, and how many."""
        node, size = place.node, self.page_size
        if place.inside < len(node.ids):
            common = common_tokens(node.ids[place.inside : place.inside + size], rest)
            return (int(node.pages[place.inside // size]), common) if common else (-1, 0)
        best, found = 0, None
        for child in node.children.values():
            common = common_tokens(child.ids[:size], rest)
            if common > best:
                best, found = common, child
        if found is None:
            return -1, 0
        found.used = next(self._clock)
        return int(found.pages[0]), best

    def _end(self, place: _Place) -> _Node:
        """The node that ends exactly at `place`; an edge is cut in two if need be."""
        node, inside = place.node, place.inside
        if inside == len(node.ids):
            return node
        parent, pages = node.parent, inside // self.page_size
        assert parent is not None and inside > 0, (inside, node.ids)
        upper = _Node(node.key, node.ids[:inside], node.pages[:pages], parent=parent, used=node.used)
        upper.names, node.names = node.names[:pages], node.names[pages:]
        parent.children[node.key] = upper
        node.parent, node.ids, node.pages = upper, node.ids[inside:], node.pages[pages:]
        node.key = node.ids[: self.page_size].tobytes()
        upper.children[node.key] = node
        return upper

    def _add(self, parent: _Node, ids: Ids, pages: Pages) -> _Node:
        """Add a leaf; tails that it covers go."""
        first = ids[: self.page_size]
        for child in list(parent.children.values()):
            if len(child.ids) < self.page_size and common_tokens(child.ids, first) == len(child.ids):
                self._drop(child.pages)
                child.parent = None
                del parent.children[child.key]
        node = _Node(first.tobytes(), ids.copy(), pages.copy(), parent=parent, used=next(self._clock))
        assert node.key not in parent.children, ids
        parent.children[node.key] = node
        self._hold(pages)
        self._queue(node)
        return node

    def _extend(self, leaf: _Node, ids: Ids, pages: Pages) -> None:
        """Add whole pages to a leaf of whole pages."""
        leaf.ids, leaf.pages = np.concatenate((leaf.ids, ids)), np.concatenate((leaf.pages, pages))
        self._hold(pages)

    def _hold(self, pages: Pages) -> None:
        self._allocator.ref(pages)
        self._held[pages] = True
        self.pages += len(pages)

    def _adopt(self, known: Pages, own: Pages) -> None:
        different = known != own
        self._allocator.ref(known[different])
        self._allocator.unref(own[different])

    def _shorten(self, node: _Node, wanted: int) -> Pages:
        """Drop up to `wanted` pages, which nobody else uses, from the end of a leaf; returns them."""
        used_by_others = np.flatnonzero(self._allocator.refs(node.pages) > 1)
        keep = max(len(node.pages) - wanted, int(used_by_others[-1]) + 1 if len(used_by_others) else 0)
        dropped = node.pages[keep:]
        self._drop(dropped)
        node.pages, node.ids, node.names = node.pages[:keep], node.ids[: keep * self.page_size], node.names[:keep]
        return dropped

    def _names(self, node: _Node) -> list[bytes]:
        """The names of a node's pages, each made of all tokens before it; noted, also for the nodes on the way."""
        if self._naming is None or len(node.ids) % self.page_size:
            return []
        unnamed, above = [], node
        while len(above.names) < len(above.pages):
            unnamed.append(above)
            if above.names:
                break
            assert above.parent is not None
            above = above.parent
        last = above.names[-1] if above.names else self._naming.start(above.key.decode())
        for each in reversed(unnamed):
            rest = each.ids[len(each.names) * self.page_size :]
            each.names = each.names + self._naming.extend(last, rest)  # a new list: `evict` holds the old one
            last = each.names[-1]
        return node.names

    def _drop(self, pages: Pages) -> None:
        self._allocator.unref(pages)
        self._held[pages] = False
        self.pages -= len(pages)

    def _unlink(self, node: _Node) -> None:
        """Take an emptied leaf out; its parent may become a leaf, a namespace's root may go."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        if parent.children or parent is self._top:
            return
        if len(parent.pages):
            self._queue(parent)
        else:
            self._unlink(parent)

    def _queue(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.used, id(node), node))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        pages = [_NO_PAGES]
        for node in self._nodes(self._top):
            assert len(node.ids) > 0 and len(node.pages) == -(-len(node.ids) // self.page_size), node.ids
            assert len(node.ids) % self.page_size == 0 or (len(node.pages) == 1 and not node.children), node.ids
            assert node.parent is not None and node.parent.children[node.key] is node
            assert node.key == node.ids[: self.page_size].tobytes()
            assert len(node.names) <= len(node.pages), node.names
            assert node.queued or node.children, "a leaf that could never be evicted"
            refs = self._allocator.refs(node.pages) - 1
            below = sum(int(self._allocator.refs(child.pages[:1])[0]) - 1 for child in node.children.values())
            assert (np.diff(refs) <= 0).all() and refs[-1] >= below >= 0, "a page is used without those before it"
            pages.append(node.pages)
        assert all(root.children for root in self._top.children.values()), "an empty namespace is kept"
        held = np.sort(np.concatenate(pages))
        assert (held == np.flatnonzero(self._held)).all() and len(held) == self.pages, (held, self.pages)
        assert self.surely_evictable <= self.evictable, (self.surely_evictable, self.evictable)

    def _nodes(self, node: _Node) -> Iterator[_Node]:
        for child in node.children.values():
            if child.parent is not self._top:
                yield child
            yield from self._nodes(child)


def common_tokens(a: Ids, b: Ids) -> int:
    """How many leading tokens are equal."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    return int(different.argmax()) if different.any() else size
