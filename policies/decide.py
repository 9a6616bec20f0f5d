"""The decision for one segment: leave, compress, reuse or blend, whichever is predicted to pay, and why."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..compressors.base import Compressor
from ..compressors.registry import create, option_names
from ..prompt import Kind, Segment
from .costs import CostModel
from .openness import Openness
from .schema import CompressSpec, Policy
from .steps import Action, Decision

Stored = Callable[[Segment], bool]

_GAIN = 0.9  # of what is saved: what costs nearly as much may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A compress entry of the policy. `label` tells two entries with the same compressor apart; `asked` is the share of
    tokens that it is made to leave, `rate` the share that it is expected to.
    """

    label: str
    use: str
    compressor: Compressor
    options: Mapping[str, Any]
    asked: float
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
        rate = costs.expected_rate(compressor.cost_name)
        if not compressor.lossless:
            asked = float(options.get("target_rate", getattr(compressor, "target_rate", rate)))
            left = math.prod(before for kinds, before in lossy if kinds & compressor.kinds)
            least = min(1.0, (1.0 - policy.quality.max_removed) / left)
            rate = max(asked, least)
            lossy.append((compressor.kinds, rate))
            if "target_rate" in option_names(spec.use):
                options["target_rate"] = rate
            if options.get("target_tokens") is not None:
                options["floor_rate"] = max(float(options.get("floor_rate", 0.0)), least)
        label = f"{spec.use}#{earlier + 1}" if earlier else spec.use
        yield Method(
            label=label,
            use=spec.use,
            compressor=compressor,
            options=options,
            asked=rate,
            rate=costs.reached_rate(compressor.cost_name, rate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """Decides by one policy and one cost model.

    `kv_reuse`: whether the backend can use stored KV; `stored`: whether a segment's is likely in the chunk store.
    """

    policy: Policy
    costs: CostModel
    kv_reuse: bool
    stored: Stored
    methods: tuple[Method, ...]

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

    def decide(self, segment: Segment, *, tokens: int, reached: int, openness: Openness, settled: bool) -> Decision:
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
            return replace(base, reason="as it went out in an earlier turn, so that cached prefixes stay valid")
        if self.reuses and self.stored(segment):
            return self._reused(base)
        if not self.methods:
            return replace(base, reason="the policy rewrites nothing")
        closed = openness.closed(segment)
        if closed is not None:
            return replace(base, reason=closed)
        if reached < self.policy.min_prompt_tokens:
            least = self.policy.min_prompt_tokens
            return replace(base, reason=f"within the first {least} tokens of the prompt (min_prompt_tokens)")
        return self._compressed(base)

    def _reused(self, base: Decision) -> Decision:
        """Load the chunk's KV if that pays. Its text stays either way: another text would be another chunk."""
        reuse = self.policy.reuse
        if base.tokens < reuse.min_chunk_tokens:
            return replace(base, reason=f"under {reuse.min_chunk_tokens} tokens (min_chunk_tokens): prefilled")
        cost, saving = self.costs.reuse_ms(base.tokens, self.ratio), self.costs.prefill.ms(base.tokens)
        if cost >= saving:
            return replace(base, reason=f"stored KV would cost {cost:.1f} ms, prefill costs {saving:.1f} ms")
        repaired = f", {self.ratio:.0%} of its rows are recomputed" if self.ratio else ""
        reason = f"stored KV is loaded{repaired}; another text would lose it"
        return replace(base, action=Action(reuse.mode), ms=cost, saved_ms=saving, reason=reason)

    def _compressed(self, base: Decision) -> Decision:
        tokens, cost = base.tokens, 0.0
        uses: list[str] = []
        reasons: list[str] = []
        for method in self.methods:
            refused = self._refused(method, base, tokens)
            if refused is not None:
                reasons.append(f"{method.label} {refused}")
                continue
            cost += self.costs.compress_ms(method.compressor.cost_name, tokens)
            tokens = leaves(method, tokens)
            uses.append(method.label)
            reasons.append(f"{method.label} leaves about {method.rate:.0%}")
        return replace(
            base,
            action=Action.COMPRESS if uses else Action.LEAVE,
            uses=tuple(uses),
            tokens_after=tokens,
            ms=cost,
            saved_ms=(base.tokens - tokens) * self.token_ms,
            reason="; ".join(reasons),
        )

    def _refused(self, method: Method, base: Decision, tokens: int) -> str | None:
        """Why a method is not used on a segment that has come down to `tokens`; None when it is."""
        if base.kind not in method.compressor.kinds:
            return f"is not for {base.kind}"
        if tokens < method.compressor.min_tokens:
            return f"needs {method.compressor.min_tokens} tokens"
        saved = tokens - leaves(method, tokens)
        if saved <= 0:
            return "has nothing to take away" if method.compressor.lossless else "is used up by max_removed"
        cost, saving = self.costs.compress_ms(method.compressor.cost_name, tokens), saved * self.token_ms
        return f"would cost {cost:.1f} ms and save {saving:.1f} ms" if cost >= _GAIN * saving else None


def leaves(method: Method, tokens: int) -> int:
    """Tokens that a method is expected to leave of so many."""
    return max(1, round(tokens * method.rate)) if tokens else 0
