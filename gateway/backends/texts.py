"""Raw prompts on the embedded engine: ids for the engine, and the text that an echo shows of them. Blocking."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...backend_engine.types import GenerationRequest
from ...prompt import BadRequest
from ..text_parameters import RawPrompt, TextParameters
from ..text_wire import Echo
from .base import TextCall
from .generations import Ready, capped, refuse_hopeless

if TYPE_CHECKING:
    from ...backend_engine.grammar.compiler import CompiledGrammar
    from .engine_room import EngineRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A prompt as the model reads it; `added` ids before it are the tokenizer's own."""

    ids: tuple[int, ...]
    added: int = 0


def readied(
    room: "EngineRoom", call: TextCall, parameters: TextParameters, grammar: "CompiledGrammar | None"
) -> tuple[Ready, Sequence[Echo]]:
    """The requests of a call, and what is said back of its prompts, in their order. BadRequest, ContextTooLong."""
    read = [_read(room, parameters, index) for index in range(len(parameters.prompts))]
    call.report.tokens_in = call.report.tokens_out = sum(len(one.ids) for one in read)
    requests = [
        GenerationRequest(
            ids=one.ids,
            sampling=capped(parameters.sampling(room.defaults), prompt=len(one.ids), limit=room.limit, param="prompt"),
            grammar=grammar,
            namespace=call.tenant,
            prompt_logprobs=parameters.echo and parameters.logprobs is not None,
            request_id=call.request_id,
            continues=True,
        )
        for one in read
    ]
    shown = zip(parameters.prompts, read, strict=True) if parameters.echo else ()
    told = parameters.logprobs is not None
    return Ready.of(requests, n=parameters.n), [_echo(room, prompt, one, told=told) for prompt, one in shown]


def _read(room: "EngineRoom", parameters: TextParameters, index: int) -> _Read:
    prompt, tokenizer = parameters.prompts[index], room.tokenizer
    if isinstance(prompt, str):
        refuse_hopeless(len(prompt), longest_token=tokenizer.longest_token, limit=room.limit, param="prompt")
        ids, added = tokenizer.encode_raw(prompt, add_special_tokens=parameters.add_special_tokens)
        if not ids:
            raise BadRequest("the prompt has no tokens", param="prompt")
        return _Read(ids=tuple(ids), added=added)
    vocab = room.model.spec.vocab
    if max(prompt) >= vocab:
        raise BadRequest(f"prompt has ids beyond the {vocab} of this model", param="prompt")
    return _Read(ids=prompt)


def _echo(room: "EngineRoom", prompt: RawPrompt, read: _Read, *, told: bool) -> Echo:
    tokenizer = room.tokenizer
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
    tokens = [tokenizer.token_bytes[one] for one in read.ids] if told else []
    return Echo(text=text, tokens=tokens, added=read.added)
