"""What became of each segment of a prompt, and why: one line for each, for people and for programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..compressors.result import Change
from ..policies import Action, Decision
from ..prompt import Segment
from .pipeline import Prepared

Count = Callable[[str], int]


def segment_lines(prepared: Prepared, count: Count) -> list[dict[str, Any]]:
    """In the order of the prompt. `count` gives a text's tokens. Blocking."""
    decisions = {decision.segment: decision for decision in prepared.plan.decisions} if prepared.plan else {}
    done: dict[int, list[tuple[str, Change]]] = {}
    for name, changes in prepared.changes:
        for change in changes:
            done.setdefault(change.segment, []).append((name, change))
    return [
        _line(segment, decisions.get(segment.id), done.get(segment.id, ()), prepared.report.failed, count)
        for segment in prepared.prompt.segments
    ]


def _line(
    segment: Segment,
    decision: Decision | None,
    done: Sequence[tuple[str, Change]],
    failed: Mapping[str, str],
    count: Count,
) -> dict[str, Any]:
    """Where it is from, what was planned for it, what was done, and what it has become.

    `code` and `reason` speak of what was done in the end; `methods` of each of the policy's compressors.
    """
    code, reason = _reason(segment, decision, done, failed)
    return {
        "path": list(segment.path),
        "role": segment.role,
        "kind": segment.kind,
        "source": segment.source,
        "original": segment.original,
        "text": segment.text,
        "tokens_before": count(segment.original) if segment.original else 0,
        "tokens_after": count(segment.text) if segment.text else 0,
        "inserted": segment.original is None,
        "changed": segment.changed,
        "action": decision.action if decision else Action.LEAVE,
        "uses": list(decision.uses) if decision else [],
        "code": code,
        "reason": reason,
        "methods": [asdict(verdict) for verdict in decision.methods] if decision else [],
        "steps": [
            {"name": name, "tokens_before": one.tokens_before, "tokens_after": one.tokens_after, "note": one.note}
            for name, one in done
        ],
    }


def _reason(
    segment: Segment, decision: Decision | None, done: Sequence[tuple[str, Change]], failed: Mapping[str, str]
) -> tuple[str, str]:
    """(code, for a person)"""
    if decision is None:
        why = ", ".join(f"{step}: {slug}" for step, slug in failed.items())
        return ("failed", f"nothing could be planned ({why})") if why else ("policy_off", "the policy changes nothing")
    code, reason = decision.code, decision.reason
    if segment.original is None and segment.source is not None:
        reason = f"retrieved from {segment.source}; {reason}"
        code = "retrieved" if decision.action is Action.LEAVE else code
    if decision.action is Action.COMPRESS and not segment.changed:
        broken = [f"{name}: {failed[name]}" for name in decision.uses if name in failed]
        notes = [f"{name}: {one.note}" for name, one in done if one.note]
        code = "failed" if broken else "nothing_found"
        what = "was not carried out" if broken else "found nothing to take away"
        reason = "; ".join([reason, f"but that {what}", *dict.fromkeys([*broken, *notes])])
    return code, reason
