"""What the planner has to know about stored KV: how much of a text has some, and what a prompt then costs."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Stretch(NamedTuple):
    """Consecutive text of a prompt: `tokens` of it, of which `stored` have KV in the store."""

    tokens: int
    stored: int = 0


class StoredKV(Protocol):
    """A backend's store, for one tenant and one policy. Blocking, a few milliseconds; any thread."""

    def known(self, text: str) -> int:
        """Tokens of a text whose KV is stored, in pieces long enough for the policy; about, for tokens at a text's
        borders depend on what stands beside it."""
        ...

    def prefill_ms(self, stretches: Sequence[Stretch], *, prefix: int) -> float | None:
        """The way to the first token of such a prompt, by full prefill or with stored KV, whichever is faster. The
        first `prefix` tokens are in the prefix cache. None while nobody knows."""
        ...
