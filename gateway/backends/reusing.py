"""Stored KV for one chat: which of its text is known, what the engine is given of it, and what is stored for next time.

Imports torch, as engine_room.py does.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...backend_engine.types import Reuse
from ...kv_reuse.blend import ReusePlan, SpanHit
from ...kv_reuse.finding import Fresh, Span
from ...kv_reuse.index import Match
from ...kv_reuse.selectors import Repair, make_repair
from ...policies.schema import ReuseSpec
from ...prompt import Kind, Prompt, Segment
from .engine_room import EngineRoom, Tokens

_BEHIND = 8  # tokens that a chat template puts behind the last message, about
_LAST = 16  # tokens of a prompt that are always computed
_LONG_QUESTION = 600  # characters; beyond it, a message that shows no documents may still hold some


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """What may be given to the engine; for each salt what was found, without its KV, and what is to be computed for
    next time, after which anchor. `fresh` is text that was not known as chunks, under the salt `own`. `wanted` tokens
    could have been stored; they were `looked_up`, or not worth it. `again` looks the same up once more: None where that
    is not what was found, but computed after other anchors. `rewritten`: text of it is not as it came, and not what is
    stored for next time.
    """

    reuse: Reuse | None
    plans: tuple[tuple[str, ReusePlan], ...]
    again: Callable[[], Reuse | None]
    fresh: Fresh
    own: str = ""
    wanted: int = 0
    looked_up: bool = True
    rewritten: bool = False

    @property
    def hits(self) -> tuple[SpanHit, ...]:
        """Of all salts, by their places."""
        return tuple(sorted(hit for _, plan in self.plans for hit in plan.hits))

    @property
    def sought(self) -> bool:
        """Slow tiers were asked in vain for better ones than there are in memory."""
        return any(plan.sought for _, plan in self.plans)

    @property
    def note(self) -> str:
        """What was found, by tier, and what was missed, for the report."""
        tiers = Counter(hit.tier for hit in self.hits)
        missing = sum(len(plan.misses) for _, plan in self.plans) + len(self.fresh.chunks)
        by_tier = ", ".join(f"{count} from {tier}" for tier, count in sorted(tiers.items()))
        return f"{tiers.total()} chunks loaded{by_tier and f' ({by_tier})'}, {missing} missing"


def reused(
    room: EngineRoom,
    prompt: Prompt,
    tokens: Tokens,
    policy: ReuseSpec,
    *,
    chunks: frozenset[int],
    salt: Callable[[Segment], str],
    own: str,
    prefix: int,
    promising: Callable[[Sequence[Span]], bool],
) -> Reused:
    """What of a chat is stored, placed where it is needed: of the encoded spans those of the segments `chunks` under
    their salts, and whatever of the text outside of all these is found, or learned, under the salt `own`; nothing where
    these places are not `promising`.

    The first `prefix` tokens are in the prefix tree and free: only what goes on behind them is looked for. What
    the user asks at the end is always computed: its meaning is in what stands before it.
    """
    ids = tokens.encoded.ids
    spans: dict[str, list[Span]] = {own: []}
    taken: list[Span] = []
    apart: list[Span] = []  # of a collection, but not worth looking up
    for start, length, mark in tokens.encoded.spans:
        segment = tokens.segments[mark]
        if start + length <= prefix:
            continue
        if segment.id in chunks:
            spans.setdefault(salt(segment), []).append((start, length))
            taken.append((start, length))
        else:
            apart.append((start, length))
    until = max(0, len(ids) - max(_LAST, room.tokenizer.count(asked_last(prompt)) + _BEHIND))
    least, finder = policy.min_chunk_tokens, room.reuser.finder
    exact = (0, prefix)
    found = finder.find(ids, salt=own, least=least, taken=[*taken, *apart, exact], until=until)
    places = sorted([*taken, *((match.start, match.length) for match in found)])
    looked_up = bool(places) and promising(places)
    plan_all = partial(_plans, room, ids, spans, policy, found={own: found})
    plans = plan_all() if looked_up else {}
    known, served = plans[own].hits if looked_up else (), _copies(plans)

    def again() -> Reuse | None:  # it may wait for minutes, and holds no KV meanwhile
        anew = plan_all(sight=False)
        return _given(anew) if _copies(anew) == served else None

    fresh = finder.fresh(
        ids,
        salt=own,
        covered=[exact, *apart, *(taken if looked_up else places), *((hit.start, hit.tokens) for hit in known)],
        least=least,
        until=until,
        sights=policy.learn_after,
        most=policy.learn_tokens,
    )
    return Reused(
        reuse=_given(plans),
        plans=tuple((salt, plan._replace(reuse=None)) for salt, plan in plans.items()),
        again=again,
        fresh=fresh,
        own=own,
        wanted=sum(length for _, length in places) + sum(map(len, fresh.chunks)),
        looked_up=looked_up or not places,
        rewritten=any(segment.changed and segment.original is not None for segment in prompt.segments),
    )


def _plans(
    room: EngineRoom,
    ids: Sequence[int],
    spans: Mapping[str, Sequence[Span]],
    policy: ReuseSpec,
    *,
    found: Mapping[str, Sequence[Match]],
    sight: bool = True,
) -> dict[str, ReusePlan]:
    """By salt. Loads what is stored. `sight`: for a request that came, not for a check of it."""
    repair = make_repair(policy.selector) if policy.mode == "blend" else Repair()
    return {
        salt: room.reuser.plan(
            ids,
            places,
            mode=policy.mode,
            ratio=policy.least_ratio,
            repair=repair,
            salt=salt,
            found=found.get(salt, ()),
            sight=sight,
        )
        for salt, places in spans.items()
    }


def _given(plans: Mapping[str, ReusePlan]) -> Reuse | None:
    return joined([plan.reuse for plan in plans.values() if plan.reuse is not None])


def _copies(plans: Mapping[str, ReusePlan]) -> dict[str, list[tuple[int, int, int]]]:
    """By salt: where what is stored begins, how much of it is loaded, and how long its anchor was."""
    return {salt: [(hit.start, hit.tokens, hit.anchor) for hit in plan.hits] for salt, plan in plans.items()}


def asked_last(prompt: Prompt) -> str:
    """What a prompt ends with that is a question, as far as that shows: of a long message without any marks of its
    documents, the last paragraph."""
    users = [segment for segment in prompt.segments if segment.role == "user"]
    last = [segment for segment in users if segment.message == prompt.segments[-1].message]
    if not last or last[-1].kind is not Kind.QUESTION:
        return ""
    text = last[-1].text
    if len(last) == 1 and len(text) > _LONG_QUESTION:
        return text.rstrip().rpartition("\n\n")[2][-_LONG_QUESTION:]
    return text


def joined(parts: Sequence[Reuse]) -> Reuse | None:
    """Reuse of several groups of spans of one prompt, which agree in everything else."""
    if not parts:
        return None
    spans = sorted((span for part in parts for span in part.spans), key=lambda span: span.start)
    return replace(parts[0], spans=tuple(spans))
