"""The decision for one segment: leave, compress, reuse or blend, whichever is predicted to pay, and why."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..compressors.base import Compressor
from ..compressors.registry import create, option_names
from ..prompt import Kind, Segment
from .costs import EMBEDDING, CostModel
from .openness import Openness
from .schema import CompressSpec, Policy
from .steps import Action, Decision, Reason, Verdict

Stored = Callable[[Segment], bool]

_NOTHING = Reason("nothing_to_take", "has nothing to take away")
_GAIN = 0.9  # of what is saved: what costs nearly as much may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A compress entry of the policy. `label` tells two entries with the same compressor apart; `asked` is the share of
    tokens that it is made to leave, None where it may take all, `rate` the share that it is expected to. `compressor`
    has the `options`.
    """

    label: str
    use: str
    compressor: Compressor
    options: Mapping[str, Any]
    asked: float | None
    rate: float


def compressor_options(spec: CompressSpec) -> dict[str, Any]:
    """The options of a compress entry as the compressor takes them."""
    given = {"kinds": spec.kinds, "target_rate": spec.target_rate, "min_tokens": spec.min_tokens}
    return {**spec.options, **{name: value for name, value in given.items() if value is not None}}


def methods_of(policy: Policy, costs: CostModel) -> Iterator[Method]:
    """The policy's compressors in order; the rates of lossy ones are raised to keep within `quality.max_removed`."""
    lossy: list[tuple[frozenset[Kind], float]] = []
    for i, spec in enumerate(policy.compress):
        options = compressor_options(spec)
        compressor = create(spec.use, options)
        earlier = sum(other.use == spec.use for other in policy.compress[:i])
        expected = costs.expected_rate(compressor.cost_name)
        aims = compressor.lossless or hasattr(compressor, "target_rate")
        rate = expected
        if not compressor.lossless:
            # Of one without a target not what was learned: what others are asked would change with every text.
            asked = float(options.get("target_rate", getattr(compressor, "target_rate", costs.unknown_rate)))
            left = math.prod(before for kinds, before in lossy if kinds & compressor.kinds)
            least = min(1.0, (1.0 - policy.quality.max_removed) / left)
            rate = max(asked, least)
            lossy.append((compressor.kinds, rate))
            if "target_rate" in option_names(spec.use):
                options["target_rate"] = rate
            if options.get("target_tokens") is not None:
                options["floor_rate"] = max(float(options.get("floor_rate", 0.0)), least)
            if rate != asked or "floor_rate" in options:
                compressor = create(spec.use, options)
        label = f"{spec.use}#{earlier + 1}" if earlier else spec.use
        yield Method(
            label=label,
            use=spec.use,
            compressor=compressor,
            options=options,
            asked=rate if aims else None,
            rate=costs.reached_rate(compressor.cost_name, rate) if aims else expected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What the policy's budget has left at a segment: tokens that lossy steps may take away, and milliseconds.

    `begun` are the methods that run anyway, for segments before this one: what a run costs once is paid for.
    """

    tokens: float
    ms: float
    begun: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """Decides by one policy and one cost model.

    `kv_reuse`: whether the backend can use stored KV; `stored`: whether a segment's is likely in the chunk store.
    `kept` are segments of the client's that keep their text for the sake of the KV that is stored of it.
    """

    policy: Policy
    costs: CostModel
    kv_reuse: bool
    stored: Stored
    methods: tuple[Method, ...]
    kept: Collection[int] = ()

    @property
    def token_ms(self) -> float:
        """What a token less in the prompt is worth."""
        return self.costs.prefill.per_token + self.policy.token_value_ms

    @property
    def reuses(self) -> bool:
        """Whether stored KV of chunks is used at all."""
        return self.kv_reuse and self.policy.reuse.mode in ("reuse", "blend")

    @property
    def ratio(self) -> float:
        """The share of a chunk's rows that is recomputed."""
        return self.policy.reuse.least_ratio if self.policy.reuse.mode == "blend" else 0.0

    def prefill_ms(self, *, fresh: int, chunks: int) -> float:
        """Prefilling `fresh` tokens, and `chunks` more that come from a collection, with their stored KV where used."""
        if self.reuses:
            return self.costs.prefill.ms(fresh) + self.costs.reuse_ms(chunks, self.ratio)
        return self.costs.prefill.ms(fresh + chunks)

    def embedding_pays(self, cost_name: str, *, tokens: int, saved_ms: float) -> bool:
        """Whether a method that can do without an embedder may ask it."""
        dear = EMBEDDING.get(cost_name)
        return dear is None or self.costs.compress_ms(dear, tokens) < _GAIN * saved_ms

    def allowance(self, *, reached: int, removed: int, ms: float, begun: Collection[str]) -> Allowance:
        """The rest of the budget where the prompt has come to `reached` tokens, lossy steps have taken away `removed`
        of them, and the compressors `begun` cost `ms`."""
        budget = self.policy.budget
        return Allowance(
            tokens=math.inf if budget.max_removed == 1 else budget.max_removed * reached - removed,
            ms=math.inf if budget.rewrite_ms is None else budget.rewrite_ms - ms,
            begun=begun,
        )

    def decide(
        self,
        segment: Segment,
        *,
        tokens: int,
        reached: int,
        openness: Openness,
        allowance: Allowance,
        settled: bool,
    ) -> Decision:
        """`reached`: tokens of the prompt as it came up to the end of this segment. `settled`: decided by an earlier
        turn.
        """
        base = Decision(
            segment=segment.id,
            message=segment.message,
            role=segment.role,
            kind=segment.kind,
            source=segment.source,
            tokens=tokens,
            tokens_after=tokens,
        )
        if settled:
            as_sent = "as it went out in an earlier turn, so that cached prefixes stay valid"
            return base.because(Reason("sent_before", as_sent))
        if self.reuses and self.stored(segment):
            return self._reused(base)
        if segment.id in self.kept:
            return base.because(Reason("kv_kept", "its KV is stored, which another text would not have"))
        if not self.methods:
            return base.because(Reason("no_methods", "the policy rewrites nothing"))
        closed = openness.closed(segment)
        if closed is not None:
            return base.because(closed)
        if reached < self.policy.min_prompt_tokens:
            least = self.policy.min_prompt_tokens
            early = f"within the first {least} tokens of the prompt (min_prompt_tokens)"
            return base.because(Reason("min_prompt_tokens", early))
        return self._compressed(base, segment.text, allowance)

    def _reused(self, base: Decision) -> Decision:
        """Load the chunk's KV if that pays. Its text stays either way: another text would be another chunk."""
        reuse = self.policy.reuse
        if base.tokens < reuse.min_chunk_tokens:
            small = f"under {reuse.min_chunk_tokens} tokens (min_chunk_tokens): prefilled"
            return base.because(Reason("min_chunk_tokens", small))
        cost, saving = self.costs.reuse_ms(base.tokens, self.ratio), self.costs.prefill.ms(base.tokens)
        if cost >= saving:
            dear = f"stored KV would cost {cost:.1f} ms, prefill costs {saving:.1f} ms"
            return base.because(Reason("kv_not_worth_it", dear))
        repaired = f", {self.ratio:.0%} of its rows are recomputed" if self.ratio else ""
        reason = f"stored KV is loaded{repaired}; another text would lose it"
        code = "kv_reused" if reuse.mode == "reuse" else "kv_blended"
        return replace(base, action=Action(reuse.mode), ms=cost, saved_ms=saving, code=code, reason=reason)

    def _compressed(self, base: Decision, text: str, allowance: Allowance) -> Decision:
        tokens, cost, removed = base.tokens, 0.0, 0
        verdicts: list[Verdict] = []
        for method in self.methods:
            lost = 0 if method.compressor.lossless else min(tokens - spares(method, tokens), base.tokens - removed)
            left = Allowance(tokens=allowance.tokens - removed, ms=allowance.ms - cost)
            name, begun = method.compressor.cost_name, method.label in allowance.begun
            own_cost = self.costs.compress_ms(name, tokens, begun=begun)
            refused = self._refused(method, base, tokens, own_cost) or self._too_much(own_cost, lost, left)
            if refused is None and not method.compressor.applies(text):
                refused = _NOTHING
            if refused is None:
                cost += own_cost
                removed += lost
                tokens = leaves(method, tokens)
            why = refused or Reason("used", f"leaves about {method.rate:.0%}")
            said = f"{method.label} {why.text}"
            verdicts.append(Verdict(method=method.label, used=refused is None, code=why.code, reason=said))
        uses = tuple(verdict.method for verdict in verdicts if verdict.used)
        return replace(
            base,
            action=Action.COMPRESS if uses else Action.LEAVE,
            uses=uses,
            tokens_after=tokens,
            ms=cost,
            saved_ms=(base.tokens - tokens) * self.token_ms,
            removed=removed,
            code="compressed" if uses else _common(verdicts),
            reason="; ".join(verdict.reason for verdict in verdicts),
            methods=tuple(verdicts),
        )

    def _refused(self, method: Method, base: Decision, tokens: int, cost: float) -> Reason | None:
        """Why a method is not used on a segment that has come down to `tokens`; None when it is."""
        if base.kind not in method.compressor.kinds:
            return Reason("other_kind", f"is not for {base.kind}")
        if tokens < method.compressor.min_tokens:
            return Reason("min_tokens", f"needs {method.compressor.min_tokens} tokens")
        saved = tokens - leaves(method, tokens)
        if saved <= 0 and method.compressor.lossless:
            return _NOTHING
        if saved <= 0:
            return Reason("max_removed", "is used up by quality.max_removed")
        saving = saved * self.token_ms
        dear = f"would cost {cost:.1f} ms and save {saving:.1f} ms"
        return Reason("not_worth_it", dear) if cost >= _GAIN * saving else None

    def _too_much(self, cost: float, lost: int, left: Allowance) -> Reason | None:
        """Why a method does not fit into what is left of the budget; None when it does."""
        budget = self.policy.budget
        if lost > 0 and lost > left.tokens:
            return Reason("budget_removed", f"would take more than {budget.max_removed:.0%} of the prompt (budget)")
        if cost > left.ms:
            return Reason("budget_ms", f"would cost more than is left of {budget.rewrite_ms:g} ms (budget)")
        return None


def _common(verdicts: Sequence[Verdict]) -> str:
    """The code that all have in common."""
    codes = {verdict.code for verdict in verdicts}
    return codes.pop() if len(codes) == 1 else "no_method_fits"


def leaves(method: Method, tokens: int) -> int:
    """Tokens that a method is expected to leave of so many."""
    return max(1, round(tokens * method.rate)) if tokens else 0


def spares(method: Method, tokens: int) -> int:
    """Tokens that a lossy method is asked to leave of so many, whatever it was seen to leave of late; none where it has
    no target.
    """
    if method.asked is None:
        return 0
    target: Callable[[int], float] | None = getattr(method.compressor, "target", None)
    return math.floor(method.asked * tokens if target is None else target(tokens))
