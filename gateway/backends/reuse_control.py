"""Whether stored KV is used for a request, by what was measured on this machine and by what the gate allows.

The controller knows time, the gate knows loss; here they meet a policy. Blocking; imports torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...backend_engine.service import EngineService
from ...backend_engine.types import Blending, PrefillWork, Result, Reuse
from ...kv_reuse.blend import SpanHit
from ...kv_reuse.checking import Check, Checker
from ...kv_reuse.controller import Choice, Controller, Way
from ...kv_reuse.gate import LADDER, Bounds, Gate, Standing, gate_file
from ...kv_reuse.repeats import Beginnings, Marks, marks_of
from ...kv_reuse.selectors import Repair, make_repair
from ...kv_reuse.work import Counter as WorkCounter
from ...kv_reuse.work import Prompt
from ...policies.schema import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What the engine is given, what was predicted for it, and the tokens that each tier had, blended prompts (`KEPT`)
    among them.

    `blending` is how well what it may go on from was blended; None where only a full prefill's KV will do. `marks` is
    what the prompt is known by when it comes again.
    """

    reuse: Reuse | None
    choice: Choice
    blending: Blending | None = None
    tiers: Mapping[str, int] = field(default_factory=dict)
    check: Check | None = None
    marks: Marks = ()

    @property
    def note(self) -> str:
        """For a person."""
        choice = self.choice
        way = f"{choice.way} at {choice.ratio:.0%}" if choice.way is Way.BLEND else str(choice.way)
        if KEPT in self.tiers:
            way += f", behind {self.tiers[KEPT]} tokens of a blended prompt"
        if choice.repeated:
            way += ", so that the prefix tree has it"
        if choice.seconds is None or choice.full_seconds is None:
            return f"{way}, not predicted yet"
        return f"{way}, predicted {1000 * choice.seconds:.0f} ms of {1000 * choice.full_seconds:.0f} ms"


class ReuseControl:
    """Of one engine. `folder` is where the gate's standings are kept; None: they end with the process.

    `measured` prefills are what is known before anything has run.
    """

    def __init__(
        self, service: EngineService, *, fingerprint: str, folder: Path | None, measured: Iterable[PrefillWork] = ()
    ) -> None:
        engine = service.engine
        self._service = service
        self.controller = Controller(
            WorkCounter(layers=engine.model.spec.layers, step_tokens=engine.options.step_tokens)
        )
        self.controller.calibrate(measured)
        self.gate = Gate(None if folder is None else gate_file(folder, fingerprint))
        self._checker = Checker(service, self.gate)
        self._served = Beginnings()  # with stored KV

    def start(self) -> None:
        """Begin to check."""
        self._checker.start()

    def close(self) -> None:
        self._checker.close()

    def promising(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        policy: Policy,
        *,
        tenant: str,
        collection: str,
    ) -> bool:
        """Whether to look stored KV up at all for chunks at these places; where blending is off, for a check only."""
        reuse = policy.reuse
        if reuse.mode not in ("reuse", "blend"):
            return False
        blending = self.blending(policy, collection)
        if blending is None:
            return self.gate.sampled(_bounds(policy))
        prompt = self._prompt(ids, spans, tenant, blending)
        return self.controller.promising(prompt, mode=reuse.mode, ratio=reuse.least_ratio, repair=_repair(policy))

    def predicted(
        self, tokens: int, spans: Sequence[tuple[int, int]], *, prefix: int, policy: Policy, collection: str
    ) -> float | None:
        """Seconds to the first token of a prompt that is not there yet, of which the first `prefix` tokens will be in
        the prefix tree and `spans` are stored. None while nothing was measured."""
        blending = self.blending(policy, collection)
        prompt = Prompt(tokens=tokens, prefix=min(prefix, tokens), spans=tuple(spans) if blending else ())
        ratio = policy.reuse.least_ratio if blending is None else blending.ratio
        return self.controller.fastest(prompt, mode=policy.reuse.mode, ratio=ratio, repair=_repair(policy))

    def blending(self, policy: Policy, collection: str) -> Blending | None:
        """How well a blended prompt must have been blended for a request to go on from it; None: it may not."""
        if policy.reuse.mode == "reuse":
            return Blending("", 0.0)
        least = self.gate.least(collection) if policy.reuse.mode == "blend" else None
        return None if least is None else Blending(policy.reuse.selector, max(policy.reuse.least_ratio, least))

    def decided(
        self,
        ids: Sequence[int],
        hits: Sequence[SpanHit],
        reuse: Reuse | None,
        policy: Policy,
        *,
        tenant: str,
        collection: str,
        again: Callable[[], Reuse | None],
    ) -> Decided:
        """The way for a prompt of which `hits` were loaded as `reuse`; `again` does that once more, for a check."""
        blending = self.blending(policy, collection)
        prompt = self._prompt(ids, [(hit.start, hit.tokens) for hit in hits], tenant, blending)
        marks = marks_of(ids, tenant=tenant)
        if blending is None:
            choice = self.controller.full(prompt)
        else:
            choice = self.controller.choose(
                prompt,
                mode=policy.reuse.mode,
                ratio=blending.ratio,
                repair=_repair(policy),
                more=policy.reuse.ratio == "auto",
                seen=self._served.sights(marks),
            )
        taken = choice.way in (Way.KEPT, Way.REUSE, Way.BLEND)
        kept = prompt.kept - prompt.prefix if taken and prompt.kept > prompt.prefix else 0
        checked = LADDER[-1] if blending is None else choice.ratio if taken and policy.reuse.mode == "blend" else None
        bounds, check = _bounds(policy), None
        if (reuse or kept) and checked is not None and (blending is None or self.gate.sampled(bounds)):
            check = Check(
                ids=tuple(ids),
                again=lambda: _with_ratio(again(), checked),
                reused=sum(span.kv.tokens for span in reuse.spans) if reuse else 0,
                collection=collection,
                bounds=bounds,
                behind=(blending, tenant) if blending is not None and kept else None,
            )
        return Decided(
            reuse=_with_ratio(reuse, choice.ratio) if choice.way in (Way.REUSE, Way.BLEND) else None,
            choice=choice,
            blending=blending if taken else None,
            tiers=tokens_by_tier(hits) | ({KEPT: kept} if kept else {}),
            check=check,
            marks=marks,
        )

    def loaded(self, hits: Sequence[SpanHit], *, wanted: int, seconds: float) -> None:
        """What a lookup of chunks with `wanted` tokens found, and how long it and moving that took."""
        self.controller.loaded(tokens_by_tier(hits), wanted=wanted, seconds=seconds)

    def finished(self, result: Result, decided: Decided | None = None) -> None:
        """A request has ended: compare with what was predicted, and have it checked if it was drawn."""
        self.controller.ran(result.work, None if decided is None else decided.choice)
        if decided is None:
            return
        if decided.reuse is not None and not result.blended_tokens:
            self._served.add(decided.marks)
        elif decided.choice.repeated:
            self._served.forget(decided.marks)
        if decided.check is not None:
            self._checker.offer(decided.check)

    def readings(self) -> dict[str, float]:
        """The controller's gauges by name."""
        return self.controller.readings()

    def standings(self) -> dict[str, Standing]:
        """The gate's, by collection."""
        return self.gate.standings()

    def _prompt(
        self, ids: Sequence[int], spans: Sequence[tuple[int, int]], tenant: str, blending: Blending | None
    ) -> Prompt:
        prefix = self._service.known_tokens(ids, namespace=tenant)
        kept = self._service.known_tokens(ids, namespace=tenant, blending=blending)
        return Prompt(tokens=len(ids), prefix=prefix, spans=tuple(spans), kept=kept)


KEPT = "kept"
"""What is told as the tier of a blended prompt's own rows."""


def tokens_by_tier(hits: Sequence[SpanHit]) -> dict[str, int]:
    """How many tokens each tier had."""
    tokens = Counter[str]()
    for hit in hits:
        tokens[hit.tier] += hit.tokens
    return dict(sorted(tokens.items()))


def _repair(policy: Policy) -> Repair:
    return make_repair(policy.reuse.selector) if policy.reuse.mode == "blend" else Repair()


def _bounds(policy: Policy) -> Bounds:
    return Bounds(policy.quality.sample, policy.quality.max_kl, policy.quality.min_agreement)


def _with_ratio(reuse: Reuse | None, ratio: float) -> Reuse | None:
    return None if reuse is None else replace(reuse, ratio=ratio)
