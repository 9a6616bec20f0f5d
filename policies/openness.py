"""Which segments a plan may touch at all, and the reason for each that it may not.

Keeps the promise that turn N+1 begins with turn N's rewritten prompt: what is said here of a segment depends on the
policy, the segment and what stands before it, never on later turns.
"""

from collections.abc import Sequence

from ..prompt import Kind, Prompt, Segment
from ..prompt.cut import Protection
from .schema import Policy
from .steps import Reason

_CLOSED_KINDS = {
    Kind.CODE: Reason("protected_kind", "code is never rewritten"),
    Kind.IMAGE: Reason("protected_kind", "an image is never rewritten"),
    Kind.TOOL_SCHEMA: Reason("protected_kind", "a tool schema is never rewritten"),
    Kind.TOOL_CALL: Reason("protected_kind", "a tool call is never rewritten"),
    Kind.QUESTION: Reason("protected_kind", "the question is never rewritten"),
}


def opened(prompt: Prompt, policy: Policy) -> Prompt:
    """The prompt as this policy protects it. To be called first of all, before anything is retrieved or rewritten."""
    protect = policy.protect
    if protect.system and protect.last_user:
        return prompt
    return prompt.with_protection(Protection(system=protect.system, last_user=protect.last_user))


class Openness:
    """Answers for the segments of one prompt."""

    def __init__(self, segments: Sequence[Segment], policy: Policy) -> None:
        users = {segment.message for segment in segments if segment.role == "user"}
        # A user message right before another one belongs to the same turn: it was never the last one of a request.
        self._asked = frozenset(message for message in users if message + 1 not in users)
        self._policy = policy

    def closed(self, segment: Segment) -> Reason | None:
        """Why the segment may not be rewritten; None when it may."""
        protect = self._policy.protect
        if not segment.text.strip():
            return Reason("empty", "empty")
        if segment.kind in _CLOSED_KINDS:
            return _CLOSED_KINDS[segment.kind]
        if segment.kind is Kind.SYSTEM and protect.system:
            return Reason("protected_system", "the system prompt is protected (protect.system)")
        if segment.role in protect.roles:
            return Reason("protected_role", f"role {segment.role} is protected by the policy (protect.roles)")
        if segment.kind in protect.kinds:
            return Reason("protected_by_policy", f"kind {segment.kind} is protected by the policy (protect.kinds)")
        if not segment.rewritable:
            return Reason(*self._unopened(segment))
        if segment.original is not None and segment.message in self._asked and self._verbatim(segment):
            return Reason(
                "sent_before", "a user's turn goes on as it was first sent, so that cached prefixes stay valid"
            )
        return None

    def _unopened(self, segment: Segment) -> tuple[str, str]:
        if segment.original is None:
            return "markup", "what stands around retrieved text"
        if segment.role == "user":
            return "protected_last_user", "the last user message is protected (protect.last_user)"
        return "not_understood", f"role {segment.role} or its content is not understood, so it goes out as it came"

    def _verbatim(self, segment: Segment) -> bool:
        return self._policy.protect.last_user or segment.kind is not Kind.DOCUMENT
