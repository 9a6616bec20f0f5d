"""One request in the engine: its tokens, how far their KV is computed, and which pages hold it. State only."""

import math
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..prompt.errors import PromptsluiceError
from .detokenize import Detokenizer
from .drafter import Drafter
from .grammar.matcher import Matcher
from .kept_blends import KeptBlend, Marks
from .pages import Pages
from .tiers.base import Fetch
from .types import (
    NO_WORK,
    Delta,
    GenerationRequest,
    KVBlock,
    PrefillWork,
    Result,
    ReusedSpan,
    RowChooser,
    TokenLogprobs,
)

Rows = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, dtype=np.int32)
NO_ROWS: Rows = np.empty(0, dtype=np.int64)


class Sink(Protocol):
    """Takes what a request produces, in the engine's thread; returns at once. Ends with one `done` or `failed`.

    One that raises is told `failed`.
    """

    def delta(self, delta: Delta) -> None: ...

    def done(self, result: Result) -> None: ...

    def failed(self, error: PromptsluiceError) -> None: ...


class Phase(Enum):
    WAITING = "waiting"  # holds no pages: new, or preempted
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """`tokens[:length]` are the prompt and what was generated; the KV of the first `computed` of them is in the pool.

    While prefilling, `plan` lists the rows to run (places in key order, ascending), of which `ran` are done; rows of
    reused spans may be missing from it. `limit` bounds what may enter the prefix tree, where `marks` are above its ids:
    nothing computed after a reused span may, before the whole prompt is.
    """

    request: GenerationRequest
    sink: Sink
    tokens: Rows
    prompt: int
    most: int  # of `length`
    seed: int
    detokenizer: Detokenizer | None
    length: int
    order: int = 0
    phase: Phase = Phase.WAITING
    row: int = -1  # in the running table
    pages: Pages = field(default_factory=lambda: NO_PAGES)
    computed: int = 0
    plan: Rows = field(default_factory=lambda: NO_ROWS)
    ran: int = 0
    spans: tuple[ReusedSpan, ...] = ()  # what a prefix hit left of the request's
    repairable: NDArray[np.bool_] | None = None  # per row of `plan`
    begun: int = 0  # where the prefill begins: what came before was cached
    probing: bool = False  # `plan` only shows which reused rows the prompt's end looks at
    attention: Tensor | None = None  # on each of the first `asked` keys, while probing
    limit: int = 0
    kept: KeptBlend | None = None  # the blended prompt that it goes on from
    marks: Marks = ()
    digests: list[bytes] = field(default_factory=list)  # of its leading whole pages, once they were needed
    leader: "tuple[Sequence, int] | None" = None  # who computes a prefix that this one waits for, and its length
    drafter: Drafter | None = None  # from the first step on for which tokens are guessed
    logprobs: Tensor | None = None
    telling: NDArray[np.bool_] | None = None  # of the prompt's rows, those that score the token behind them
    told: dict[int, TokenLogprobs] = field(default_factory=dict)  # of what follows a prompt token's place
    first_logprobs: Tensor | None = None
    work: PrefillWork = NO_WORK
    kv: KVBlock | None = None
    names: dict[Marks, list[bytes]] = field(default_factory=dict)  # of the leading whole pages, as far as needed
    fetch: Fetch | None = None  # what a slow tier brings for it, once it was asked
    matcher: Matcher | None = None  # stands behind the newest token
    undecided: bool = False  # the next token has to be drawn by the host
    cached: int = 0
    loaded: int = 0  # of those cached, the tokens that a tier brought back
    blended: int = 0  # of those cached, a blended prompt's
    reused: int = 0
    recomputed: int = 0
    furthest: int = 0  # `computed`, when the device had no memory for it
    raised: int = 0  # above the request's priority, after a long wait
    charged: int = 0  # how many of its tokens its tenant has been charged for
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is served first, and preempted last."""
        return -self.priority, self.order

    @property
    def priority(self) -> int:
        return self.request.priority + self.raised

    @property
    def remaining(self) -> int:
        """Rows of the prefill that have not run."""
        return len(self.plan) - self.ran

    @property
    def ids(self) -> Rows:
        return self.tokens[: self.length]

    @property
    def generated(self) -> int:
        return self.length - self.prompt

    @property
    def generates(self) -> bool:
        return self.most > self.prompt

    @property
    def predictable(self) -> bool:
        """Whether tokens may be guessed for it: each is drawn by its row's logits, seed and number alone."""
        return self.generates and self.matcher is None and not self.request.sampling.shaped

    @property
    def shares(self) -> bool:
        """Whether it reads and feeds the prefix tree."""
        request = self.request
        return request.prefix_cache and not request.prompt_logprobs and not request.keep_kv

    @property
    def storable(self) -> int:
        """How many leading tokens the prefix tree may know."""
        return min(self.computed, self.limit) if self.shares else 0

    def append(self, token: int) -> None:
        """Add the token that was drawn after all others had been computed."""
        self.computed = self.length
        if self.length == len(self.tokens):
            grown = np.empty(min(self.most, 2 * self.length), dtype=np.int64)
            grown[: self.length] = self.tokens
            self.tokens = grown
        self.tokens[self.length] = token
        self.length += 1
        self.undecided = False

    def start(self, cached: int, spans: tuple[ReusedSpan, ...], *, loading: int = 0) -> None:
        """Plan the prefill of all tokens after a prefix hit of `cached`, with the reused `spans` that lie behind it.

        The last `loading` of the cached ones are on their way: they count as computed after the first step.
        """
        inside = np.zeros(self.length, dtype=bool)
        for span in spans:
            inside[span.start : span.stop] = True
        inside[self.prompt - 1] = False  # the last prompt token is always computed
        rows = np.arange(cached, self.length)
        reuse = self.request.reuse
        if reuse is None or not spans:
            self.plan, self.repairable = rows, None
        elif reuse.selector is None or reuse.ratio <= 0:
            self.plan, self.repairable = rows[~inside[cached:]], None
        else:
            self.plan, self.repairable = rows, inside[cached:]
        if spans or not self.generated:  # else it was preempted, and finds what it had blended
            self.reused, self.recomputed = int(np.count_nonzero(inside)), 0
        self.spans = spans
        self.probing, self.attention = False, None
        self.limit = spans[0].start if spans else self.most
        self.marks = () if self.kept is None else self.kept.marks
        self.ran = 0
        self.begun, self.computed = cached, cached - loading
        self.phase = Phase.PREFILL
        if reuse is not None and spans and reuse.chooser is not None and reuse.ratio > 0:
            self._choose_or_probe(reuse.chooser, first=cached)

    @property
    def glances(self) -> float:
        """The share of the layers that are run for it now: what was computed stays only where that is all of them."""
        reuse = self.request.reuse
        return reuse.chooser.until if self.probing and reuse is not None and reuse.chooser is not None else 1.0

    @property
    def asked(self) -> int:
        """How many leading tokens stand before the end that asks: up to the last span's."""
        return min(self.spans[-1].stop, self.prompt - 1)

    def _choose_or_probe(self, chooser: RowChooser, *, first: int) -> None:
        assert self.request.reuse is not None
        if chooser.depth is None or self.request.reuse.ratio >= 1:
            self.choose(first=first)
        else:
            self.plan, self.probing = self.plan[self.plan < self.prompt], True

    def choose(self, *, first: int) -> None:
        """Plan the rows from `first` on that the chooser names, beside those that are not reused."""
        reuse, probed = self.request.reuse, self.attention
        assert reuse is not None and reuse.chooser is not None and self.spans
        last = self.prompt - 1
        places = np.concatenate([np.arange(span.start, span.stop) for span in self.spans])
        offsets = np.concatenate([np.arange(span.kv.tokens) for span in self.spans])[places != last]
        places = places[places != last]
        quota = math.ceil(reuse.ratio * len(places) - 1e-9)
        chosen = np.arange(len(places))
        if quota < len(places):
            attention = None if probed is None else probed[torch.from_numpy(places).to(probed.device)]
            rows = reuse.chooser.choose(attention=attention, offsets=torch.from_numpy(offsets), quota=quota)
            assert rows.shape == (quota,), (rows.shape, quota)
            chosen = rows.cpu().numpy()
        needed = np.ones(self.length, dtype=bool)
        needed[places] = False
        needed[places[chosen]] = True
        self.plan = np.flatnonzero(needed[first:]) + first
        self.ran, self.recomputed, self.probing, self.attention = 0, quota, False, None

    def stop(self, phase: Phase) -> None:
        """Forget what was in the pool."""
        self.phase = phase
        self.row, self.computed, self.ran = -1, 0, 0
        self.pages, self.plan, self.spans, self.repairable = NO_PAGES, NO_ROWS, (), None
        self.probing, self.attention = False, None
        self.kept, self.marks = None, ()

    def quota(self, count: int) -> int:
        """How many repairable rows of the plan's next `count` are recomputed.

        Over the chunks it adds up to the ratio of them all, rounded up, however small the chunks are.
        """
        reuse = self.request.reuse
        assert reuse is not None and self.repairable is not None
        repairable = int(np.count_nonzero(self.repairable[: self.ran + count]))
        return math.ceil(reuse.ratio * repairable - 1e-9) - self.recomputed


def telling_rows(request: GenerationRequest) -> NDArray[np.bool_] | None:
    """Which rows of a prompt score the token behind them, [tokens - 1]; None where nobody asks."""
    if not request.prompt_logprobs:
        return None
    told = np.full(len(request.ids), request.scored is None)
    told[np.asarray(request.scored or (), dtype=np.int64)] = True
    return told[1:]


def trimmed(spans: tuple[ReusedSpan, ...], covered: int) -> tuple[ReusedSpan, ...]:
    """What is left of reused spans behind the first `covered` tokens."""
    left = []
    for span in spans:
        drop = covered - span.start
        if drop <= 0:
            left.append(span)
        elif span.stop > covered:
            position = None if span.position is None else span.position + drop
            left.append(ReusedSpan(covered, span.kv.part(drop), position))
    return tuple(left)
