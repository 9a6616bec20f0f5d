"""Runs sampled blends again beside a full prefill while the engine has nothing else to do, and tells the gate."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ..backend_engine.generation import Finished
from ..backend_engine.types import Blending, GenerationRequest, Reuse, SamplingParams
from ..prompt.errors import PromptsluiceError
from .gate import Bounds, Gate, Sample

log = logging.getLogger(__name__)

GREEDY = 16  # tokens of a continuation that are compared
_WAITING = 4
_PATIENCE_S = 120.0
_LOOK_S = 0.2


class IdleRunner(Protocol):
    """The part of the engine's service that runs a request while nothing else does; None if it could not."""

    def run_idle(self, request: GenerationRequest) -> Finished | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A blended request to compare. `again` finds its stored KV once more, so that none is held while it waits.

    `behind`: it went on from a blended prompt, found as such in a namespace of the prefix tree.
    """

    ids: tuple[int, ...]
    again: Callable[[], Reuse | None]
    reused: int  # tokens that the blend's spans had
    collection: str
    bounds: Bounds
    behind: tuple[Blending, str] | None = None


class Checker:
    """Checks in a thread of its own, one at a time. Who finds the queue full, or no idle time, is dropped."""

    def __init__(self, service: IdleRunner, gate: Gate, *, patience_s: float = _PATIENCE_S) -> None:
        self._service = service
        self._gate = gate
        self._patience_s = patience_s
        self._queue: queue.Queue[Check | None] = queue.Queue(maxsize=_WAITING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="blend checks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, check: Check) -> bool:
        """Queue a check; never blocks."""
        try:
            self._queue.put_nowait(check)
        except queue.Full:
            self._gate.dropped(check.collection)
            return False
        return True

    def close(self) -> None:
        """End after the step that runs; what waits is dropped. The engine's end ends a check that runs."""
        self._ended.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return  # the thread looks at the event before it takes the next one

    def _main(self) -> None:
        while (check := self._queue.get()) is not None and not self._ended.is_set():
            try:
                sample = self.compared(check)
            except PromptsluiceError as error:  # the engine is full or shutting down
                log.info("a blend was not checked: %s", error.message)
                sample = None
            except Exception:
                log.exception("checking a blend failed")
                sample = None
            if sample is None:
                self._gate.dropped(check.collection)
            else:
                self._gate.record(check.collection, sample, check.bounds)

    def compared(self, check: Check) -> Sample | None:
        """The blend against full prefill; None where idle time or the chunks are gone."""
        reuse = check.again()
        if (0 if reuse is None else sum(span.kv.tokens for span in reuse.spans)) != check.reused:
            return None
        plain = GenerationRequest(
            ids=check.ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=GREEDY, ignore_eos=True),
            prefix_cache=False,
            priority=-100,
            request_id="blend-check",
            first_logprobs=True,
            idle=True,
        )
        asked = replace(plain, reuse=reuse)
        if check.behind is not None:
            blending, namespace = check.behind
            asked = replace(asked, blending=blending, namespace=namespace, prefix_cache=True)
        blend = self._patiently(asked)
        if blend is None or (check.behind is not None and not blend.result.blended_tokens):
            return None
        full = self._patiently(plain)
        if full is None:
            return None
        ratio = reuse.ratio if reuse is not None else check.behind[0].ratio if check.behind is not None else 0.0
        return _sample(full, blend, ratio=ratio)

    def _patiently(self, request: GenerationRequest) -> Finished | None:
        until = time.monotonic() + self._patience_s
        while (finished := self._service.run_idle(request)) is None:
            if time.monotonic() > until or self._ended.wait(_LOOK_S):
                return None
        return finished


def _sample(full: Finished, blend: Finished, *, ratio: float) -> Sample:
    first, other = full.result.first_logprobs, blend.result.first_logprobs
    assert first is not None and other is not None, "both were asked for"
    kl = float((first.double().exp() * (first.double() - other.double())).sum())
    same = sum(one == two for one, two in zip(full.tokens, blend.tokens, strict=False))
    return Sample(ratio, max(0.0, kl), same / max(1, len(full.tokens)))
