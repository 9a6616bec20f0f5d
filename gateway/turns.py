"""What the messages of conversations went out as, so that the next turn sends the same text and pays nothing for it.

A turn is rewritten once. The next one finds its messages by a digest of all that stands before them, and puts them in
as they were sent, whatever the planner would say by now: costs are learned all the time, deadlines pass or not, and a
prefix cache behind us hits only what stays the same. It ends with the process; then the planner decides anew, by rules
that look only at what stands before a segment.
"""

import hashlib
import itertools
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..policies import Policy
from ..prompt import Path, Prompt, Segment

_NODE_BYTES = 256  # of a message that was left as it came: its digest and the books
_PIECE_BYTES = 128
_SHARE = 8  # a prompt may take an eighth of the memory: else one would have all others forgotten
_DIGEST = 16


class Piece(NamedTuple):
    """What went out in the place of a segment, None for what came; `lost` tokens of it went in lossy steps."""

    text: str | None = None
    lost: int = 0


@dataclass(frozen=True, slots=True)
class _Sent:
    """One message: of its leaves that were changed, by the rest of their path, the pieces in order."""

    leaves: Mapping[Path, tuple[Piece, ...]]

    @property
    def size(self) -> int:
        pieces = [piece for leaf in self.leaves.values() for piece in leaf]
        texts = sum(sys.getsizeof(piece.text) for piece in pieces if piece.text is not None)
        return _NODE_BYTES + _PIECE_BYTES * len(pieces) + texts


class Turns:
    """At most `most_bytes` of text; what was longest not asked for goes first. For any thread.

    A `scope` separates tenants, backends and policies.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._sent: OrderedDict[bytes, _Sent] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def held(self) -> int:
        """About how many bytes."""
        return self._bytes

    def recall(self, prompt: Prompt, *, scope: str) -> tuple[Prompt, Mapping[int, int]]:
        """The prompt with the messages that were sent before as they were sent, and by the ids of their segments the
        tokens that lossy steps took.

        They are the first ones, up to one that is new. Call it after the prompt was cut as its policy protects it, and
        before anything else changes it.
        """
        known = self._known(_chain(prompt, scope))
        found: dict[int, Piece] = {}
        for path, segments in _by_leaf(prompt, messages=len(known)).items():
            pieces = known[segments[0].message].leaves.get(path[2:], [Piece()] * len(segments))
            # The same message under the same policy is always cut alike.
            found |= {segment.id: piece for segment, piece in zip(segments, pieces, strict=True)}
        texts = {segment: piece.text for segment, piece in found.items() if piece.text is not None}
        return prompt.settled(texts), {segment: piece.lost for segment, piece in found.items()}

    def remember(self, came: Prompt, sent: Prompt, *, scope: str, lost: Mapping[int, int] | None = None) -> None:
        """A prompt and what it became; `lost`: by segment, the tokens that lossy steps took. Messages that are known
        stay as they are known.
        """
        if self._most <= 0 or sent.dropped:
            return
        changed: dict[int, dict[Path, tuple[Piece, ...]]] = {}
        for path, segments in _by_leaf(sent, messages=len(came.body["messages"])).items():
            if any(segment.changed for segment in segments):
                pieces = tuple(
                    Piece(segment.text if segment.changed else None, (lost or {}).get(segment.id, 0))
                    for segment in segments
                )
                changed.setdefault(segments[0].message, {})[path[2:]] = pieces
        fresh = [(key, _Sent(changed.get(i, {}))) for i, key in enumerate(_chain(came, scope))]
        room = itertools.accumulate(node.size for _, node in fresh)
        fresh = [
            one for one, size in zip(fresh, room, strict=True) if size <= max(self._most // _SHARE, _NODE_BYTES * 2)
        ]
        with self._lock:
            for key, node in reversed(fresh):  # a beginning is forgotten after what follows it
                known = self._sent.pop(key, None)
                self._bytes += node.size if known is None else 0
                self._sent[key] = known or node
            while self._bytes > self._most and self._sent:
                self._bytes -= self._sent.popitem(last=False)[1].size

    def _known(self, chain: Sequence[bytes]) -> list[_Sent]:
        known: list[_Sent] = []
        with self._lock:
            for key in chain:
                sent = self._sent.get(key)
                if sent is None:
                    break
                known.append(sent)
            for key in reversed(chain[: len(known)]):
                self._sent.move_to_end(key)
        return known


def scope_of(sent: str, tenant: str, backend: str, policy: Policy) -> str:
    """Of what is `sent` where (a request, or a shadow that is not), for whom, and by which rules it is rewritten."""
    parts = json.dumps([sent, tenant, backend, policy.model_dump_json()])
    return hashlib.blake2b(parts.encode(), digest_size=_DIGEST).hexdigest()


def _chain(prompt: Prompt, scope: str) -> list[bytes]:
    """For each message a digest of it and of all before it, as they came."""
    digests: list[bytes] = []
    last = scope.encode()
    for message in prompt.arrived:
        text = json.dumps(message, ensure_ascii=True, sort_keys=True, default=str)
        last = hashlib.blake2b(last + text.encode(), digest_size=_DIGEST).digest()
        digests.append(last)
    return digests


def _by_leaf(prompt: Prompt, *, messages: int) -> dict[Path, list[Segment]]:
    """The segments of the first messages, as far as they came from the client, by leaf."""
    leaves: dict[Path, list[Segment]] = {}
    for segment in prompt.segments:
        if 0 <= segment.message < messages and segment.original is not None:
            leaves.setdefault(segment.path, []).append(segment)
    return leaves
