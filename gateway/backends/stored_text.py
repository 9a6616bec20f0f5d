"""What is stored of clients' own text, and what a prompt with it costs: the planner's view of an engine's chunk store.

Blocking; imports torch.
"""

from collections.abc import Sequence

from ...policies.schema import Policy
from ...policies.stored import Stretch
from .engine_room import EngineRoom


class StoredText:
    """Of one tenant, whose chunks have the salt `salt`, under one policy."""

    def __init__(self, room: EngineRoom, policy: Policy, *, salt: str) -> None:
        self._room = room
        self._policy = policy
        self._salt = salt

    def known(self, text: str) -> int:
        ids = self._room.tokenizer.encode_plain(text)
        least = self._policy.reuse.min_chunk_tokens
        return sum(match.length for match in self._room.reuser.finder.find(ids, salt=self._salt, least=least))

    def prefill_ms(self, stretches: Sequence[Stretch], *, prefix: int) -> float | None:
        at, spans = 0, []
        for one in stretches:
            if one.stored:
                spans.append((at, one.stored))
            at += one.tokens
        retrieve = self._policy.retrieve
        collection = "" if retrieve is None else retrieve.collection
        seconds = self._room.control.predicted(at, spans, prefix=prefix, policy=self._policy, collection=collection)
        return None if seconds is None else 1000 * seconds
