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
- What is stored of a text changes with time: only what an earlier turn decided (the fourth rule) holds it.
- A compressor judges a segment by the question of the segment's own turn (compressors/question.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..prompt import Prompt, Segment
from .costs import CostModel
from .decide import Allowance, Decider, Stored, leaves, methods_of
from .openness import Openness
from .schema import Policy
from .steps import Action, Decision, Plan, Step
from .stored import StoredKV, Stretch

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
    store: StoredKV | None = None,
    settled: Mapping[int, int] | None = None,
) -> Plan:
    """Decide for each segment; call it after retrieval, before anything is rewritten but segments that are `settled`:
    they stay as they are now. Beside their ids stand the tokens that lossy steps once took.

    `count` gives a text's tokens. `kv_reuse`: whether the backend can use stored KV; `stored`: whether a segment's is
    likely there. `store` says what is stored of the client's own text: that text is left alone where the whole prompt
    is then predicted to be faster than with all of it rewritten. Where retrieval is due and nothing was retrieved yet
    (a dry run), it becomes a step of its own.
    """
    decider = Decider(
        policy=policy,
        costs=costs,
        kv_reuse=kv_reuse,
        stored=stored,
        methods=tuple(methods_of(policy, costs)),
    )
    settled = settled or {}
    made = _planned(prompt, decider, count, settled)
    if store is None or not decider.reuses or not any(step.use for step in made.steps):
        return made
    known = _known(prompt, made, policy, store, settled)
    if not any(known.get(one.segment) for one in made.decisions if one.action is Action.COMPRESS):
        return made
    keeping = _planned(prompt, replace(decider, kept=known), count, settled)
    keeping_ms, made_ms = (_total_ms(one, policy, known, store, settled) for one in (keeping, made))
    return keeping if keeping_ms is not None and made_ms is not None and keeping_ms <= made_ms else made


def _planned(prompt: Prompt, decider: Decider, count: Count, settled: Mapping[int, int]) -> Plan:
    decisions = _decisions(prompt, decider, count, settled)
    return _assembled(decider, [*_retrieval(prompt, decider), *_compressions(decisions, decider)], decisions)


def _known(prompt: Prompt, made: Plan, policy: Policy, store: StoredKV, settled: Collection[int]) -> Mapping[int, int]:
    """By segment, tokens of its present text whose KV is stored, where these are half of it or more."""
    sizes = {one.segment: one.tokens for one in made.decisions if one.segment not in settled}
    found: dict[int, int] = {}
    for segment in prompt.segments:
        size = sizes.get(segment.id, 0)
        if size >= policy.reuse.min_chunk_tokens and (known := store.known(segment.text)) >= size / 2:
            found[segment.id] = min(size, known)
    return found


def _total_ms(
    made: Plan, policy: Policy, known: Mapping[int, int], store: StoredKV, settled: Collection[int]
) -> float | None:
    """Until the first token, with rewriting and with what the policy says that tokens are worth beside their time; None
    while the backend knows nothing."""
    prefix = sum(one.tokens for one in made.decisions if one.segment in settled)
    stretches = [
        Stretch(one.tokens_after, 0 if one.action is Action.COMPRESS else known.get(one.segment, 0))
        for one in made.decisions
    ]
    prefill_ms = store.prefill_ms(stretches, prefix=prefix)
    if prefill_ms is None:
        return None
    worth_ms = policy.token_value_ms * sum(one.tokens_after for one in made.decisions)
    return prefill_ms + worth_ms + sum(step.predicted_ms for step in made.steps if step.use)


@dataclass(slots=True)
class _Tally:
    """Of the segments that were decided: their tokens as they came, those that lossy steps may take, what compressors
    cost, and which of them run."""

    reached: int = 0
    removed: int = 0
    ms: float = 0.0
    begun: set[str] = field(default_factory=set)

    def allowed(self, decider: Decider) -> Allowance:
        return decider.allowance(reached=self.reached, removed=self.removed, ms=self.ms, begun=self.begun)

    def add(self, decision: Decision) -> Decision:
        self.begun.update(decision.uses)
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
            cost_name, saved_ms = method.compressor.cost_name, (sum(before) - sum(after)) * decider.token_ms
            yield Step(
                name=method.label,
                use=method.use,
                options=method.options,
                segments=frozenset(chosen),
                tokens_before=sum(before),
                tokens_after=sum(after),
                predicted_ms=decider.costs.compress_ms(cost_name, sum(before)),
                saved_ms=saved_ms,
                asked_rate=method.asked,
                cost_name=cost_name,
                embeds=decider.embedding_pays(cost_name, tokens=sum(before), saved_ms=saved_ms),
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
