"""What one call asks of the engine, request by request, and what these came to: limits, sizes, usage."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...backend_engine.types import Delta, GenerationRequest, Result, SamplingParams
from ...policies import Action, Plan
from ...prompt import ContextTooLong, Overloaded, Prompt, PromptsluiceError, Report, Usage
from ..edge import internal_error
from .choices import choice_seed

if TYPE_CHECKING:
    from ...backend_engine.service import EngineService

_NORMALIZED = 4  # characters that a normalizer (NFC, NFKC) makes one of, at most


@dataclass(slots=True, kw_only=True)
class Ready:
    """A call as the engine takes it, one request a choice, `n` of them for each prompt, and what each came to in the
    end.
    """

    requests: tuple[GenerationRequest, ...]
    n: int = 1
    finished: Callable[[Result], object] = lambda result: None
    results: dict[int, Result] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prompts: Sequence[GenerationRequest],
        *,
        n: int,
        finished: Callable[[Result], object] = lambda result: None,
    ) -> "Ready":
        """`n` choices for each prompt, each with a seed of its own that is the same whatever the other prompts are.

        `finished` is told the result of each prompt's first choice.
        """
        seeded = (
            replace(request, sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, index)))
            for request in prompts
            for index in range(n)
        )
        return cls(requests=tuple(seeded), n=n, finished=finished)

    def usage(self) -> Usage:
        """As it is billed: each prompt once, the tokens of all choices.

        `cached_tokens` are prompt tokens that were not computed for the first choice, by prefix or by chunk.
        """
        firsts = [self.results[index] for index in range(0, len(self.requests), self.n)]
        return Usage(
            prompt_tokens=sum(result.prompt_tokens for result in firsts),
            completion_tokens=sum(result.completion_tokens for result in self.results.values()),
            cached_tokens=sum(result.cached_tokens + result.reused_tokens for result in firsts),
        )

    def note(self, report: Report, index: int) -> None:
        """Enter what the engine did for a prompt's first choice."""
        if index % self.n == 0:
            result = self.results[index]
            report.cached += result.cached_tokens
            report.loaded += result.loaded_tokens
            report.blended += result.blended_tokens
            report.reused += result.reused_tokens
            report.recomputed += result.recomputed_tokens
            self.finished(result)


async def deltas(service: "EngineService", ready: Ready, index: int, report: Report) -> AsyncGenerator[Delta, None]:
    """Of one choice. A prompt's first is queued first: it computes the prompt, and the others find it in the prefix
    tree.
    """
    request = ready.requests[index]
    generation = service.generate(request)
    try:
        async for delta in generation:
            if delta.finish_reason == "abort":
                raise Overloaded("the server is shutting down")
            yield delta
    except PromptsluiceError as error:
        # The plain class is the engine's word for a bug; its message is for the log.
        if type(error) is PromptsluiceError:
            raise internal_error(request.request_id) from error
        raise
    finally:
        generation.abort()
    ready.results[index] = generation.result
    ready.note(report, index)


def reused_segments(plan: Plan | None) -> frozenset[int]:
    """The segments whose stored KV the plan wants."""
    decisions = () if plan is None else plan.decisions
    return frozenset(one.segment for one in decisions if one.action in (Action.REUSE, Action.BLEND))


def retrieved_segments(prompt: Prompt) -> frozenset[int]:
    """The segments that were retrieved, whose KV goes with their documents: none of it is learned as a client's text,
    cut in another way."""
    return frozenset(one.id for one in prompt.segments if one.original is None and one.source is not None)


def capped(sampling: SamplingParams, *, prompt: int, limit: int, param: str = "messages") -> SamplingParams:
    """`max_tokens` is a cap, so that more than there is room for is no error; a prompt without room for a token is."""
    room = limit - prompt
    least = 0 if sampling.max_tokens == 0 else 1
    if room < least:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens, but this model takes {limit} with the answer; "
            f"shorten it by {least - room}",
            param=param,
        )
    return replace(sampling, max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room))


def refuse_hopeless(chars: int, *, longest_token: int, limit: int, param: str) -> None:
    """ContextTooLong for a prompt of so many characters that it cannot fit, before minutes are spent on tokenizing."""
    fewest = chars // (longest_token * _NORMALIZED)
    if fewest > limit:
        raise ContextTooLong(
            f"the prompt has more than {fewest} tokens, but this model takes {limit} with the answer", param=param
        )


def count_template(report: Report, tokens: int) -> None:
    """Make the report's sizes exact: the chat template's own tokens stand in the prompt before and after."""
    template = tokens - report.tokens_out
    report.tokens_in += template
    report.tokens_out = tokens
