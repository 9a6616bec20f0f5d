"""Who gets the new policy of a staged rollout: a draw by a stable hash, so that everybody stays in one group.

A raised percentage only adds members, and a hold-out never gets the policy. Nothing is remembered: the same draw comes
out in every gateway and after every restart.
"""

from enum import StrEnum
from hashlib import blake2b

from ..prompt import Prompt
from .schema import RolloutSpec

_POINTS = 2**48  # few enough that each is a float of its own


class Group(StrEnum):
    """Where a request of a rollout belongs: it gets the new policy, it never will, or it does not yet."""

    ROLLOUT = "rollout"
    HOLDOUT = "holdout"
    BASE = "base"


def beginning(prompt: Prompt) -> bytes:
    """A digest of what all turns of a conversation have in common: its messages up to the user's first one, as they
    came. Tools are not part of it, for clients change them from turn to turn.
    """
    last = next((segment.message for segment in prompt.segments if segment.role == "user"), None)
    digest = blake2b(digest_size=16)
    for segment in prompt.segments:
        if segment.message >= 0 and segment.original is not None and (last is None or segment.message <= last):
            text = segment.original.encode("utf-8", "surrogatepass")
            digest.update(f"{segment.role[:64]!a} {len(text)}\n".encode() + text)
    return digest.digest()


def drawn(spec: RolloutSpec, *, key_sha256: str | None, conversation: bytes) -> Group:
    """The group of a request. Of the points 0 to 100 the hold-out has the upper end and the rollout grows from 0."""
    key = (key_sha256 or "").encode()
    who = b"key\0" + key if spec.by == "key" and key else b"conversation\0" + key + b"\0" + conversation
    hashed = blake2b(who, digest_size=6, key=blake2b(name_of(spec).encode(), digest_size=16).digest())
    point = 100 * int.from_bytes(hashed.digest()) / _POINTS
    if point >= 100 - spec.holdout:
        return Group.HOLDOUT
    return Group.ROLLOUT if point < spec.percent else Group.BASE


def name_of(spec: RolloutSpec) -> str:
    """What the rollout is called in headers, logs and metrics."""
    return spec.name or spec.policy
