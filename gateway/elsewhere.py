"""The wired house for prompts that are sent elsewhere: the caller sends them itself, we only rewrite.

No model is loaded to answer with: what a policy file calls its backends is left closed.
"""

from collections.abc import Sequence
from typing import Self

from ..policies import PolicySet, Resolution
from ..prompt import Prompt, PromptsluiceError, Report
from .backends.base import Answer, Backend, Call, ModelCard, Stream, estimated_tokens
from .house import Sluice
from .pipeline import prepare

_CALLER = "caller"


class CallersOwn(Backend):
    """Stands for the call that the user's code makes: counts tokens by estimate and answers nothing."""

    async def models(self) -> Sequence[ModelCard]:
        return []

    def count_tokens(self, text: str) -> int:
        return estimated_tokens(text)

    async def complete(self, call: Call) -> Answer | Stream:
        raise PromptsluiceError("prompts that are rewritten in process are sent by their caller")


class Elsewhere:
    """The pipeline's `prepare` on a house of its own."""

    def __init__(self, sluice: Sluice) -> None:
        self._sluice = sluice

    @classmethod
    async def open(cls, policies: PolicySet) -> Self:
        """Open the rooms that rewriting needs; heavy ones load when a policy first asks for them."""
        closed = {name: CallersOwn(name) for name in (*policies.backends, _CALLER)}
        return cls(await Sluice.open(policies, backends=closed))

    async def prepare(self, prompt: Prompt, *, policy: str | None) -> tuple[Prompt, Report]:
        """Rewrite by the named policy, or by the file's default one. UnknownPolicy lists those there are."""
        policies = self._sluice.policy_set
        name = policy or policies.default_policy
        resolution = Resolution(
            model="", backend=_CALLER, policy=policies.policy(name), policy_name=name, reason="named in the program"
        )
        prepared = await prepare(self._sluice, prompt, resolution)
        return prepared.prompt, prepared.report

    async def close(self) -> None:
        """Close the house."""
        await self._sluice.close()
