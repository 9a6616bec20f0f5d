"""What a request must fulfil before it may wait: everything that would make it fail or hang later is refused here."""

from collections.abc import Sequence

from ..prompt.errors import BadRequest, ContextTooLong
from .loader import LoadedModel
from .rounded_kv import flaw_of
from .sequence import Rows
from .types import GenerationRequest, Reuse


def check_request(request: GenerationRequest, ids: Rows, model: LoadedModel, *, room: int) -> None:
    """Raise BadRequest or ContextTooLong. `ids` are the request's; `room`: how many tokens a sequence may have, by
    context and KV memory."""
    params, spec = request.sampling, model.spec
    params.validate()
    if not len(ids):
        raise BadRequest("the prompt has no tokens", param="messages")
    longest = room - (params.max_tokens != 0)
    if len(ids) > longest:
        raise ContextTooLong(
            f"the prompt has {len(ids)} tokens, but there is room for {longest} (the model's context is "
            f"{spec.max_context} tokens, and KV memory may hold fewer); shorten the prompt",
            param="messages",
        )
    if ids.min() < 0 or ids.max() >= spec.vocab:
        raise BadRequest(f"token ids must lie between 0 and {spec.vocab - 1}", param="messages")
    if request.scored is not None and not all(0 <= place < len(ids) for place in request.scored):
        raise BadRequest(f"scored names places of the prompt, from 0 to {len(ids) - 1}", param="scored")
    if any("\ud800" <= char <= "\udfff" for char in request.namespace):
        raise BadRequest("the namespace has a lone surrogate", param="namespace")
    _check_ids(params.stop_token_ids, "stop_token_ids", vocab=spec.vocab)
    _check_ids([token for token, _ in params.logit_bias], "logit_bias", vocab=spec.vocab)
    if params.stop and model.tokenizer is None:
        raise BadRequest("stop strings need a model with a tokenizer", param="stop")
    if request.reuse is not None:
        _check_reuse(request.reuse, model, prompt=len(ids))
        if request.prompt_logprobs and (request.reuse.selector or request.reuse.chooser or params.logprobs is not None):
            raise BadRequest(
                "prompt_logprobs beside reused spans tells of the rows that run, and nothing of a repair; leave out the"
                " selector, the chooser and logprobs",
                param="prompt_logprobs",
            )


def _check_ids(ids: Sequence[int], param: str, *, vocab: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise BadRequest(f"{param} names the token id {wrong}; this model's lie between 0 and {vocab - 1}", param=param)


def _check_reuse(reuse: Reuse, model: LoadedModel, *, prompt: int) -> None:
    spec, end = model.spec, 0
    if not 0 <= reuse.ratio <= 1:
        raise BadRequest(f"the ratio of recomputed rows must lie between 0 and 1, found {reuse.ratio}", param="reuse")
    if reuse.selector is not None and not 0 <= reuse.selector.layer < spec.layers:
        raise BadRequest(
            f"the selector's layer must lie between 0 and {spec.layers - 1}, found {reuse.selector.layer}",
            param="reuse",
        )
    if reuse.selector is not None and reuse.chooser is not None:
        raise BadRequest("rows are named by a selector or by a chooser, not by both", param="reuse")
    for span in reuse.spans:
        if flaw := flaw_of(span.kv):  # kernels read it by its address
            raise BadRequest(f"a reused span is not whole: {flaw}", param="reuse")
        if span.start < end or span.stop > prompt:
            raise BadRequest(
                f"reused spans must ascend within the {prompt} prompt tokens; {span.start} to {span.stop} does not",
                param="reuse",
            )
        shape = (spec.layers, span.kv.tokens, spec.kv_heads, spec.head_dim)
        if span.kv.k.shape != shape:
            raise BadRequest(
                f"a reused span has the shape {tuple(span.kv.k.shape)}; this model needs {shape}", param="reuse"
            )
        end = span.stop
