"""Stored KV for one chat: which of its text is known, what the engine is given of it, and what is stored for next time.

Imports torch, as engine_room.py does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...backend_engine.types import Reuse
from ...kv_reuse.blend import ReusePlan
from ...kv_reuse.selectors import Repair, make_repair
from ...policies.schema import ReuseSpec
from ...prompt import Kind, Prompt, Segment
from .engine_room import EngineRoom, Tokens

_BEHIND = 8  # tokens that a chat template puts behind the last message, about
_LAST = 16  # tokens of a prompt that are always computed
_LONG_QUESTION = 600  # characters; beyond it, a message that shows no documents may still hold some


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """What the engine is given; for each salt what was found, and what is to be computed for next time, after which
    anchor. `fresh` is text that was not known as chunks, under the salt `own`."""

    reuse: Reuse | None
    plans: tuple[tuple[str, ReusePlan], ...]
    fresh: tuple[tuple[int, ...], ...] = ()
    own: str = ""

    @property
    def note(self) -> str:
        """What was found, by tier, and what was missed, for the report; empty where there was nothing to look for."""
        tiers = Counter(hit.tier for _, plan in self.plans for hit in plan.hits)
        missing = sum(len(plan.misses) for _, plan in self.plans) + len(self.fresh)
        if not tiers and not missing:
            return ""
        by_tier = ", ".join(f"{count} from {tier}" for tier, count in sorted(tiers.items()))
        return f"{tiers.total()} chunks loaded{by_tier and f' ({by_tier})'}, {missing} missing"


def reused(
    room: EngineRoom, prompt: Prompt, tokens: Tokens, policy: ReuseSpec, *, salt: Callable[[Segment], str], own: str
) -> Reused:
    """What of a chat is stored, placed where it is needed: the encoded chunks under their segments' salts, and whatever
    of the other text is found under the salt `own`.

    What the user asks at the end is always computed: its meaning is in what stands before it.
    """
    ids = tokens.encoded.ids
    spans: dict[str, list[tuple[int, int]]] = {own: []}
    for start, length, mark in tokens.encoded.spans:
        spans.setdefault(salt(tokens.segments[mark]), []).append((start, length))
    taken = [(start, length) for start, length, _ in tokens.encoded.spans]
    until = max(0, len(ids) - max(_LAST, room.tokenizer.count(asked_last(prompt)) + _BEHIND))
    least, finder = policy.min_chunk_tokens, room.reuser.finder
    found = finder.find(ids, salt=own, least=least, taken=taken, until=until)
    repair = make_repair(policy.selector) if policy.mode == "blend" else Repair()
    plans = {
        one: room.reuser.plan(
            ids,
            places,
            mode=policy.mode,
            ratio=policy.ratio,
            repair=repair,
            salt=one,
            found=found if one == own else (),
        )
        for one, places in spans.items()
    }
    covered = [*taken, *((hit.start, hit.tokens) for hit in plans[own].hits)]
    fresh = finder.fresh(
        ids,
        salt=own,
        covered=covered,
        least=least,
        until=until,
        sights=policy.learn_after,
        most=policy.learn_tokens,
    )
    given = joined([plan.reuse for plan in plans.values() if plan.reuse is not None])
    return Reused(reuse=given, plans=tuple(plans.items()), fresh=tuple(fresh), own=own)


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
