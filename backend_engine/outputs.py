"""What becomes of drawn tokens: they join their sequences, go to the sinks as text, and end requests."""

import logging
import time
from collections import Counter
from dataclasses import replace

from ..prompt.errors import PromptsluiceError
from .detokenize import Detokenizer, TextDecoder
from .drawing import Drawer
from .readings import Latencies
from .sampling import UNDECIDED
from .scheduler import Scheduler
from .sequence import Phase, Sequence
from .spec import ModelSpec
from .table import RunningTable
from .tiers.base import PrefixTier
from .types import Delta, FinishReason, GenerationRequest, Result, TokenLogprobs

logger = logging.getLogger(__name__)

# Ids of the prompt that a text which goes on from it is decoded behind: a character has up to four bytes.
_DECODED_BEHIND = 8


class Outputs:
    """For the engine's thread. A request whose own detokenizer, grammar or sink breaks is given up alone."""

    def __init__(
        self, spec: ModelSpec, *, scheduler: Scheduler, table: RunningTable, drawer: Drawer, tier: PrefixTier
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._table = table
        self._drawer = drawer
        self._tier = tier
        self.totals: Counter[str] = Counter()
        self.latencies = Latencies()

    def take(self, sequence: Sequence, draft: list[int], drawn: list[int]) -> None:
        """Accept what was drawn after the last token, and after each guess that turned out to be what was drawn."""
        for at, token in enumerate(drawn):
            if sequence.phase is Phase.DONE or draft[:at] != drawn[:at]:
                break  # it ended while this step was already running, or the rest followed a wrong guess
            if token == UNDECIDED:  # the next step runs the same row again
                sequence.undecided = True
                self._table.set_token(sequence)
                break
            try:
                self._accept(sequence, token)
            except PromptsluiceError as error:
                self.give_up(sequence, error)
            except Exception as error:  # noqa: BLE001 - logged where the request is given up
                self._undeliverable(sequence, error)
            self.totals["accepted"] += at > 0
        self.totals["drafted"] += len(draft)

    def _accept(self, sequence: Sequence, token: int) -> None:
        """Add a token to a sequence; tell its sink; end it if this was its last."""
        sequence.append(token)
        self._table.set_token(sequence)
        self.totals["generated"] += 1
        ended = sequence.matcher is not None and sequence.matcher.accept(token)
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            self._tier.computed(len(sequence.plan), sequence.first_token - (sequence.admitted or sequence.first_token))
        self.latencies.token(sequence)
        reason, told = self._reason(sequence, token), self._drawer.told(sequence)
        delta = Delta(token_ids=(token,), prompt_logprobs=_of_prompt(sequence) if sequence.generated == 1 else ())
        if reason != "stop":  # what ends a text by its id is not part of it
            text, stopped = sequence.detokenizer.push(token) if sequence.detokenizer else ("", False)
            reason = "stop" if stopped or ended else reason
            delta = replace(delta, text=text, logprobs=() if told is None else (told,))
        if reason is None:
            sequence.sink.delta(delta)
        else:
            self.finish(sequence, reason, delta)

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.sampling
        if token in params.stop_token_ids or (token in self._spec.eos_ids and not params.ignore_eos):
            return "stop"
        return "length" if sequence.length == sequence.most else None

    def finish(self, sequence: Sequence, reason: FinishReason, last: Delta | None = None) -> None:
        """End a sequence; `last` is what its last token added."""
        last = last or Delta(prompt_logprobs=() if sequence.generated else _of_prompt(sequence))
        try:
            rest = sequence.detokenizer.flush() if sequence.detokenizer else ""
        except Exception as error:  # noqa: BLE001 - logged where the request is given up
            self._undeliverable(sequence, error)
            return
        self._scheduler.finish(sequence)
        result = _result(sequence, reason)
        self.latencies.end(sequence, reason)
        self.totals["finished"] += 1
        self.totals["prompt"] += sequence.prompt
        self.totals["reused"] += result.reused_tokens
        self.totals["recomputed"] += result.recomputed_tokens
        try:
            stop = sequence.detokenizer.stop if sequence.detokenizer and reason == "stop" else None
            sequence.sink.delta(replace(last, text=last.text + rest, finish_reason=reason, stop=stop))
            sequence.sink.done(result)
        except Exception as error:  # noqa: BLE001 - logged where the request is given up
            self._undeliverable(sequence, error)

    def _undeliverable(self, sequence: Sequence, error: Exception) -> None:
        """Give up a request whose detokenizer or sink broke, which must not harm the others."""
        logger.error("the output of request %s is lost", sequence.request.request_id, exc_info=error)
        self.give_up(sequence, PromptsluiceError(f"the output could not be delivered: {error}"))

    def give_up(self, sequence: Sequence, error: PromptsluiceError) -> None:
        """End a request with `error`; nothing that it computed since it was last advanced is kept."""
        if sequence.phase is not Phase.DONE:
            self._scheduler.discard(sequence)
        try:
            sequence.sink.failed(error)
        except Exception:
            logger.exception("the sink of request %s failed", sequence.request.request_id)


def detokenizer(tokenizer: TextDecoder, request: GenerationRequest) -> Detokenizer:
    """What turns a request's output into text and finds its stop strings."""
    params, after = request.sampling, request.ids[-_DECODED_BEHIND:] if request.continues else ()
    return Detokenizer(tokenizer, stops=params.stop, unstopped=params.min_tokens, after=after)


def _of_prompt(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
    return tuple(one for _, one in sorted(sequence.told.items()))


def _result(sequence: Sequence, reason: FinishReason) -> Result:
    now = time.monotonic()
    return Result(
        finish_reason=reason,
        prompt_tokens=sequence.prompt,
        completion_tokens=sequence.generated,
        cached_tokens=sequence.cached,
        loaded_tokens=min(sequence.loaded, sequence.cached),
        blended_tokens=min(sequence.blended, sequence.cached),
        reused_tokens=sequence.reused - sequence.recomputed,
        recomputed_tokens=sequence.recomputed,
        queue_ms=1000 * ((sequence.admitted or now) - sequence.submitted),
        ttft_ms=1000 * ((sequence.first_token or now) - sequence.submitted),
        work=sequence.work,
        prompt_logprobs=sequence.logprobs,
        first_logprobs=sequence.first_logprobs,
        kv=sequence.kv,
    )
