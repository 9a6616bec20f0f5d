"""The wired house for prompts that are sent elsewhere: the caller sends them itself, we only rewrite.

No model is loaded to answer with. One is loaded to score text, where a policy prunes by a model's surprise, when the
first prompt needs it; the embedder and the collections likewise.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

from ..compressors.context import Score
from ..compressors.registry import create
from ..policies import EmbeddedBackend, Policy, PolicySet, Resolution
from ..policies.decide import compressor_options
from ..prompt import Prompt, PromptsluiceError, Report
from .backends.base import Answer, Backend, Call, ModelCard, Stream, estimated_tokens
from .house import Sluice
from .pipeline import prepare

_CALLER = "caller"
# Who answers is not known here. Tokens are mostly billed there, so one less is worth this many milliseconds, about what
# it takes to prefill it on two cores; a policy may set more.
_TOKEN_VALUE_MS = 4.0


class CallersOwn(Backend):
    """Stands for the call that the user's code makes: counts tokens by estimate and answers nothing.

    `model` is a backend that was not started and whose scorer is lent; it is closed with this one.
    """

    def __init__(self, name: str, *, model: Backend | None = None) -> None:
        super().__init__(name)
        self._model = model

    def scorer(self) -> Score | None:
        return self._model.scorer() if self._model else None

    async def models(self) -> Sequence[ModelCard]:
        return []

    def count_tokens(self, text: str) -> int:
        return estimated_tokens(text)

    async def complete(self, call: Call) -> Answer | Stream:
        raise PromptsluiceError("prompts that are rewritten in process are sent by their caller")

    async def close(self) -> None:
        if self._model:
            await self._model.close()


class Elsewhere:
    """The pipeline's `prepare` on a house of its own."""

    def __init__(self, sluice: Sluice) -> None:
        self._sluice = sluice
        self._loaded = False

    @classmethod
    async def open(cls, policies: PolicySet) -> Self:
        """Open the rooms that rewriting needs; heavy ones load when a prompt first needs them."""
        return cls(await Sluice.open(policies, backends=_closed(policies)))

    async def prepare(self, prompt: Prompt, *, policy: str | None) -> tuple[Prompt, Report]:
        """Rewrite by the named policy, or by the file's default one. UnknownPolicy lists those there are."""
        name = policy or self._sluice.policy_set.default_policy
        valued = _valued(self._sluice.policy_set.policy(name))
        if needs_vectors(valued):
            await self._embedder_loaded()
        resolution = Resolution(
            model="", backend=_CALLER, policy=valued, policy_name=name, reason="named in the program"
        )
        prepared = await prepare(self._sluice, prompt, resolution, tenant="", request_id="in-process")
        return prepared.prompt, prepared.report

    async def close(self) -> None:
        """Close the house."""
        await self._sluice.close()

    async def _embedder_loaded(self) -> None:
        """Load it before the clock of a step runs, or a short program's only prompt would come too late for it."""
        if not self._loaded:
            try:
                await asyncio.to_thread(self._sluice.rooms.embed, ["ready"])
            except PromptsluiceError:
                return  # the step that needs it fails for the same reason, and says so in the report
            self._loaded = True


def needs_vectors(policy: Policy) -> bool:
    """Whether the policy retrieves, or may judge text by what it means."""
    used = (create(step.use, compressor_options(step)) for step in policy.compress)
    return policy.retrieve is not None or any(getattr(one, "relevance", "words") != "words" for one in used)


def _closed(policies: PolicySet) -> Mapping[str, Backend]:
    """A stand-in for each backend of the file; the first embedded one lends its scorer."""
    embedded = {name: spec for name, spec in policies.backends.items() if isinstance(spec, EmbeddedBackend)}
    models = {name: _unstarted(policies, name, spec) for name, spec in list(embedded.items())[:1]}
    return {name: CallersOwn(name, model=models.get(name)) for name in (_CALLER, *policies.backends)}


def _unstarted(policies: PolicySet, name: str, spec: EmbeddedBackend) -> Backend:
    from ..backend_engine.hub import ModelHub, default_root
    from ..kv_reuse import EmptyStore
    from .backends.embedded import EmbeddedBackend as Engine

    hub = ModelHub(policies.models_cache or default_root())
    return Engine(name, spec, path=lambda: hub.resolve(spec.model), store=EmptyStore)


def _valued(policy: Policy) -> Policy:
    return policy.model_copy(update={"token_value_ms": max(policy.token_value_ms, _TOKEN_VALUE_MS)})
