"""Which way a prompt is served: full prefill, chunks as stored, or a blend, whichever is predicted to be first.

Knows only time. What a way loses is the gate's business (gate.py), which bounds the ratio from below.
"""

import math
import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from ..backend_engine.types import PrefillWork
from .costs import Fit
from .gate import LADDER
from .repeats import Sight
from .selectors import Repair
from .work import Counter, Prompt, Work

_GAIN = 0.92  # of full prefill's time: what is predicted to gain less may lose
_FREE = 1.05  # of the least ratio's time: more rows for this are taken for the answers' sake
_LEARNED = 0.15  # the weight of one request in a way's correction
_FORGOTTEN = 0.02  # of a way's correction, each time that another way is taken: else one bad case would end it
_FARTHEST = math.log(10.0)
_KEPT = 64


class Way(StrEnum):
    """`UNTOUCHED`: too short for stored KV even to be looked up. `KEPT`: the prompt goes on from a blended one, and has
    no stored KV behind it."""

    UNTOUCHED = "untouched"
    FULL = "full"
    KEPT = "kept"
    REUSE = "reuse"
    BLEND = "blend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way, and predictions of the seconds that the engine computes: this way, and a full prefill.

    None: nothing was measured yet. `repeated`: a full prefill although this way is faster, for it will be found again.
    """

    way: Way
    ratio: float = 0.0
    seconds: float | None = None
    full_seconds: float | None = None
    repeated: bool = False


class Controller:
    """Predicts by what was measured on this machine, and corrects itself by what came true. For any thread."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._prefill = Fit()
        self._load = Fit()
        self._mix: dict[str, float] = {}  # the share of looked up tokens that each tier had
        self._drifts = {way: _Drift() for way in Way}
        self._taken = Tally[Way]()
        self._lock = threading.Lock()

    def calibrate(self, measured: Iterable[PrefillWork]) -> None:
        """Begin with what calibration.py measured."""
        for work in measured:
            self._prefill.pin(_quantities(work), work.seconds)

    def fastest(self, prompt: Prompt, *, mode: str, ratio: float, repair: Repair) -> float | None:
        """Seconds of the way that would be chosen for a prompt, its lookup included; None while nothing was measured.
        For planning: it counts as no choice."""
        best = self._best(prompt, mode=mode, ratio=ratio, repair=repair)
        if best.seconds is None or best.full_seconds is None:
            return None
        spent = self._lookup_seconds(prompt)
        return best.seconds + spent if _gains(best, spent=spent) else best.full_seconds

    def promising(self, prompt: Prompt, *, mode: str, ratio: float, repair: Repair) -> bool:
        """Whether it would pay if the KV of all spans were stored where most was found lately; yes if nobody knows."""
        best = self._best(prompt, mode=mode, ratio=ratio, repair=repair)
        pays = _gains(best, spent=self._lookup_seconds(prompt))
        if not pays:
            with self._lock:
                self._count(Way.UNTOUCHED)
        return pays

    def choose(
        self,
        prompt: Prompt,
        *,
        mode: str,
        ratio: float,
        repair: Repair,
        more: bool = False,
        seen: Sequence[Sight] = (),
    ) -> Choice:
        """The way for a prompt whose `spans` are loaded: what that took is spent.

        In mode "blend" the share `ratio` is recomputed; with `more`, the highest that takes hardly longer than it.
        `seen` are beginnings of it that were blended before.
        """
        choice = self._best(prompt, mode=mode, ratio=ratio, repair=repair, more=more)
        gains = choice.way is not Way.FULL and _gains(choice)
        if not gains or self._found_again(prompt, choice, seen=seen):
            full = choice.full_seconds
            choice = Choice(way=Way.FULL, seconds=full, full_seconds=full, repeated=bool(gains))
        with self._lock:
            self._count(choice.way)
        return choice

    def full(self, prompt: Prompt) -> Choice:
        """A full prefill whatever it takes, for requests that may not use stored KV."""
        seconds = self._predicted(Way.FULL, self._counter.full(prompt))
        with self._lock:
            self._count(Way.FULL)
        return Choice(way=Way.FULL, seconds=seconds, full_seconds=seconds)

    def loaded(self, tokens: Mapping[str, int], *, wanted: int, seconds: float) -> None:
        """A lookup of chunks with `wanted` tokens found so many in each tier, and moved them to their places."""
        self._load.add({"lookups": 1.0, **{tier: float(count) for tier, count in tokens.items()}}, seconds)
        with self._lock:
            for tier in {*self._mix, *tokens}:
                before, now = self._mix.get(tier, 0.0), tokens.get(tier, 0) / max(1, wanted)
                self._mix[tier] = before + _LEARNED * (now - before)

    def ran(self, work: PrefillWork, choice: Choice | None = None) -> None:
        """A prefill has run; `choice` is what was predicted for it."""
        if not work.rows:
            return
        if choice is None or choice.way is Way.FULL:  # where rows are scattered, the way's correction learns from them
            self._prefill.add(_quantities(work), work.seconds)
        if choice is not None and choice.seconds:
            with self._lock:
                self._drifts[choice.way].add(predicted=choice.seconds, real=work.seconds)

    def readings(self) -> dict[str, float]:
        """Gauges by name: how often each way was taken, and how near its predictions come."""
        with self._lock:
            found = {f"reuse_decided_{way}": float(self._taken[way]) for way in Way}
            for way in (Way.FULL, Way.KEPT, Way.REUSE, Way.BLEND):
                found |= {f"reuse_{name}_{way}": value for name, value in self._drifts[way].readings().items()}
        names = {"rows": "reuse_cost_row_s", "steps": "reuse_cost_step_s", "pairs": "reuse_cost_pair_s"}
        found |= {names[name]: cost for name, cost in self._prefill.costs().items()}
        loads = self._load.costs()
        return found | {f"reuse_cost_load_{tier}_s": cost for tier, cost in loads.items() if tier != "lookups"}

    def _best(self, prompt: Prompt, *, mode: str, ratio: float, repair: Repair, more: bool = False) -> Choice:
        full = self._predicted(Way.FULL, self._counter.full(prompt))
        if not prompt.left:
            if prompt.kept <= prompt.prefix:
                return Choice(way=Way.FULL, seconds=full, full_seconds=full)
            seconds = self._predicted(Way.KEPT, self._counter.continued(prompt))
            return Choice(way=Way.KEPT, ratio=ratio, seconds=seconds, full_seconds=full)
        if mode == "reuse":
            seconds = self._predicted(Way.REUSE, self._counter.reused(prompt))
            return Choice(way=Way.REUSE, seconds=seconds, full_seconds=full)

        def blended(share: float) -> float | None:
            return self._predicted(Way.BLEND, self._counter.reused(prompt, ratio=share, repair=repair))

        seconds = blended(ratio)
        if more and seconds is not None:
            higher = [(step, blended(step)) for step in LADDER if step > ratio]
            free = [(step, took) for step, took in higher if took is not None and took <= _FREE * seconds]
            ratio, seconds = free[-1] if free else (ratio, seconds)
        return Choice(way=Way.BLEND, ratio=ratio, seconds=seconds, full_seconds=full)

    def _lookup_seconds(self, prompt: Prompt) -> float:
        """Loading all spans from where most was found lately."""
        tokens = sum(length for _, length in prompt.spans)
        with self._lock:
            mix = dict(self._mix)
        found = sum(mix.values())
        quantities = {tier: tokens * share / found for tier, share in mix.items()} if found else {}
        return self._load.seconds({"lookups": 1.0, **quantities}) or 0.0

    def _found_again(self, prompt: Prompt, choice: Choice, *, seen: Sequence[Sight]) -> bool:
        """Whether a full prefill is cheaper over all prompts that begin so: later ones find that in the tree.

        How many still come nobody knows; what came so many times comes as often again. So a full prefill is paid for
        once when what was spent instead has about reached its price, and the sum is at most twice the least one
        possible, as with renting and buying (Karlin, Manasse, Rudolph and Sleator 1988).
        """
        full, each = choice.full_seconds, choice.seconds
        if each is None or full is None:
            return False
        return any(full + (one.times + 1) * self._behind(prompt, one.tokens) < (one.times + 2) * each for one in seen)

    def _behind(self, prompt: Prompt, tokens: int) -> float:
        """Seconds of a full prefill that finds the first `tokens` in the prefix tree."""
        prefix = max(prompt.prefix, min(tokens, prompt.tokens - 1))
        return self._predicted(Way.FULL, self._counter.full(replace(prompt, prefix=prefix))) or 0.0

    def _predicted(self, way: Way, work: Work) -> float | None:
        seconds = self._prefill.seconds(work.quantities())
        with self._lock:
            return None if seconds is None else seconds * self._drifts[way].factor

    def _count(self, taken: Way) -> None:
        self._taken[taken] += 1
        for way, drift in self._drifts.items():
            if way is not taken:
                drift.forget()


def _gains(choice: Choice, *, spent: float = 0.0) -> bool:
    """Whether a way is predicted to be faster than a full prefill, `spent` seconds included; yes while nobody knows."""
    if choice.seconds is None or choice.full_seconds is None:
        return True
    return choice.seconds + spent < _GAIN * choice.full_seconds


class _Drift:
    """How far a way's predictions are off."""

    def __init__(self) -> None:
        self._log = 0.0
        self._errors: deque[float] = deque(maxlen=_KEPT)
        self._predicted = self._real = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def add(self, *, predicted: float, real: float) -> None:
        self._predicted += predicted
        self._real += real
        self._errors.append(abs(real / predicted - 1.0))
        off = max(-_FARTHEST, min(_FARTHEST, math.log(max(real, 1e-9) / predicted)))
        self._log = max(-_FARTHEST, min(_FARTHEST, self._log + _LEARNED * off))

    def forget(self) -> None:
        self._log *= 1.0 - _FORGOTTEN

    def readings(self) -> dict[str, float]:
        return {
            "predicted_s": self._predicted,
            "real_s": self._real,
            "correction": self.factor,
            "error": median(self._errors) if self._errors else 0.0,
        }


def _quantities(work: PrefillWork) -> dict[str, float]:
    return {"steps": work.steps, "rows": float(work.rows), "pairs": float(work.pairs)}
