"""From prompt, policy and costs to a plan: a decision for each segment, and the steps that carry them out.

Nothing is done that is predicted to cost as much as it saves. And every decision depends on the policy, the costs, the
segment and what stands before it only, so that turn N+1 keeps turn N's rewritten prefix:

- `min_prompt_tokens` is compared with the prompt up to the segment's end: an early segment stays untouched for ever.
- A user's turn goes on as it was first sent (openness.py); documents sent in a message of their own before the question
  may be rewritten, for they always stood before it.
- Retrieved text is gone in the next turn, so it does not count for what stands after it.
- What an earlier turn decided is not decided again while the gateway remembers it (gateway/turns.py).
- The budget is kept at each segment for all of the client's own text that stands up to it, by what lossy steps are
  asked to take away, not by what they were seen to; what was retrieved has what is left of it.
- A compressor judges a segment by the question of the segment's own turn (compressors/question.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..prompt import Prompt, Segment
from .costs import CostModel
from .decide import Allowance, Decider, Stored, leaves, methods_of
from .openness import Openness
from .schema import Policy
from .steps import Action, Decision, Plan, Step

Count = Callable[[str], int]


def retrieved(segment: Segment) -> bool:
    """Whether the segment was put in from a collection, whose chunks have their KV computed at ingest."""
    return segment.original is None and segment.source is not None


def plan(
    prompt: Prompt,
    policy: Policy,
    costs: CostModel,
    *,
    count: Count,
    kv_reuse: bool = True,
    stored: Stored = retrieved,
    settled: Mapping[int, int] | None = None,
) -> Plan:
    """Decide for each segment; call it after retrieval, before anything is rewritten but segments that are `settled`:
    they stay as they are now. Beside their ids stand the tokens that lossy steps once took.

    `count` gives a text's tokens. `kv_reuse`: whether the backend can use stored KV; `stored`: whether a segment's is
    likely there. Where retrieval is due and nothing was retrieved yet (a dry run), it becomes a step of its own.
    """
    decider = Decider(
        policy=policy,
        costs=costs,
        kv_reuse=kv_reuse,
        stored=stored,
        methods=tuple(methods_of(policy, costs)),
    )
    decisions = _decisions(prompt, decider, count, settled or {})
    return _assembled(decider, [*_retrieval(prompt, decider), *_compressions(decisions, decider)], decisions)


@dataclass(slots=True)
class _Tally:
    """Of the segments that were decided: their tokens as they came, those that lossy steps may take, and what
    compressors cost."""

    reached: int = 0
    removed: int = 0
    ms: float = 0.0

    def allowed(self, decider: Decider) -> Allowance:
        return decider.allowance(reached=self.reached, removed=self.removed, ms=self.ms)

    def add(self, decision: Decision) -> Decision:
        self.removed += decision.removed
        self.ms += decision.ms if decision.action is Action.COMPRESS else 0.0
        return decision


def _decisions(prompt: Prompt, decider: Decider, count: Count, settled: Mapping[int, int]) -> tuple[Decision, ...]:
    """Of the client's own segments first: what was retrieved gets what they leave of the budget, for they may not
    depend on it.
    """
    openness, tally = Openness(prompt.segments, decider.policy), _Tally()
    decisions: dict[int, Decision] = {}
    put_in: list[tuple[Segment, int, int]] = []
    for segment in prompt.segments:
        tokens = count(segment.text) if segment.text else 0
        if segment.original is None:
            put_in.append((segment, tokens, tally.reached + tokens))
            continue
        tally.reached += count(segment.original) if segment.changed else tokens
        tally.removed += settled.get(segment.id, 0)
        decisions[segment.id] = tally.add(
            decider.decide(
                segment,
                tokens=tokens,
                reached=tally.reached,
                openness=openness,
                allowance=tally.allowed(decider),
                settled=segment.id in settled,
            )
        )
    tally.reached += sum(tokens for _, tokens, _ in put_in)
    for segment, tokens, reached in put_in:
        allowance = tally.allowed(decider)
        decisions[segment.id] = tally.add(
            decider.decide(
                segment, tokens=tokens, reached=reached, openness=openness, allowance=allowance, settled=False
            )
        )
    return tuple(decisions[segment.id] for segment in prompt.segments)


def _retrieval(prompt: Prompt, decider: Decider) -> Iterator[Step]:
    spec = decider.policy.retrieve
    if spec is not None and prompt.question and not any(map(retrieved, prompt.segments)):
        yield Step(
            name="retrieve",
            segments=frozenset(),
            tokens_before=0,
            tokens_after=spec.max_tokens,
            predicted_ms=decider.costs.retrieve.ms(1),
            saved_ms=0.0,
            options={"collection": spec.collection, "top_k": spec.top_k, "max_tokens": spec.max_tokens},
        )


def _compressions(decisions: Sequence[Decision], decider: Decider) -> Iterator[Step]:
    sizes = {decision.segment: decision.tokens for decision in decisions}
    for method in decider.methods:
        chosen = [decision.segment for decision in decisions if method.label in decision.uses]
        before = [sizes[segment] for segment in chosen]
        after = [leaves(method, tokens) for tokens in before]
        sizes.update(zip(chosen, after, strict=True))
        if chosen:
            yield Step(
                name=method.label,
                use=method.use,
                options=method.options,
                segments=frozenset(chosen),
                tokens_before=sum(before),
                tokens_after=sum(after),
                predicted_ms=decider.costs.compress_ms(method.compressor.cost_name, sum(before)),
                saved_ms=(sum(before) - sum(after)) * decider.token_ms,
                asked_rate=method.asked,
                cost_name=method.compressor.cost_name,
            )


def _assembled(decider: Decider, steps: list[Step], decisions: tuple[Decision, ...]) -> Plan:
    reused = [decision for decision in decisions if decision.action in (Action.REUSE, Action.BLEND)]
    reused_tokens = sum(decision.tokens for decision in reused)
    if reused:
        reuse = decider.policy.reuse
        steps.append(
            Step(
                name=reuse.mode,
                segments=frozenset(decision.segment for decision in reused),
                tokens_before=reused_tokens,
                tokens_after=reused_tokens,
                predicted_ms=sum(decision.ms for decision in reused),
                saved_ms=sum(decision.saved_ms for decision in reused),
                options={"ratio": decider.ratio, "selector": reuse.selector},
            )
        )
    before = sum(decision.tokens for decision in decisions)
    added = sum(step.tokens_after for step in steps if step.name == "retrieve")
    after = sum(decision.tokens_after for decision in decisions)
    work = sum(step.predicted_ms for step in steps)
    return Plan(
        steps=tuple(steps),
        decisions=decisions,
        tokens_before=before,
        tokens_after=after + added,
        prefill_ms=decider.costs.prefill.ms(before),
        predicted_ms=work + decider.prefill_ms(fresh=after - reused_tokens, chunks=added),
    )
