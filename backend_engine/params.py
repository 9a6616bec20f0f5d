"""How a request's next tokens are chosen: the parameters under their usual names, and the bounds of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..prompt.errors import BadRequest, ConfigError

MOST_TOP_LOGPROBS = 20
PENALTY = 2.0
"""Frequency and presence penalties lie between minus and plus this."""
BIAS = 100.0
REPETITION = (0.01, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. `temperature=0` is greedy; `top_k=0` means no limit; `max_tokens=None`: to the
    context's end.

    `max_tokens=0` prefills only: scoring and the capture of a chunk's KV. `frequency_penalty` and `presence_penalty`
    weigh tokens of the output (OpenAI's formula), `repetition_penalty` those of prompt and output (Keskar et al.,
    arXiv:1909.05858); `logit_bias` has pairs of id and what is added to its logit. `logprobs=n` asks for each token's
    log-probability and those of the n likeliest. Before `min_tokens` tokens nothing ends the text but its length.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change what the next one's logits are."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1

    @property
    def shaped(self) -> bool:
        """Whether the model's logits are changed before the temperature and the filters."""
        return self.penalized or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens can never be drawn, however likely the model finds them."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def plain(self) -> bool:
        """Whether a token follows from the logits, temperature, filters and seed, and nothing is asked about it."""
        return not self.shaped and self.logprobs is None

    def validate(self) -> None:
        """Raise BadRequest naming the first field that has the wrong type or is out of its range."""
        _real(self.temperature, "temperature", 0.0, 2.0)
        _real(self.top_p, "top_p", 0.0, 1.0)
        _require(self.top_p > 0, "top_p", "top_p must be above 0 and at most 1")
        _whole(self.top_k, "top_k", 0, 1 << 31, "0 (off) or a positive integer")
        _real(self.min_p, "min_p", 0.0, 1.0)
        _real(self.frequency_penalty, "frequency_penalty", -PENALTY, PENALTY)
        _real(self.presence_penalty, "presence_penalty", -PENALTY, PENALTY)
        _real(self.repetition_penalty, "repetition_penalty", *REPETITION)
        if self.seed is not None:
            _whole(self.seed, "seed", -(1 << 63), (1 << 63) - 1, "a signed 64-bit integer")
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", 0, None, "an integer that is not negative")
        _whole(self.min_tokens, "min_tokens", 0, None, "an integer that is not negative")
        if self.logprobs is not None:
            most = MOST_TOP_LOGPROBS
            _whole(self.logprobs, "logprobs", 0, most, f"an integer between 0 and {most}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"min_tokens ({self.min_tokens}) is more than the answer may have ({self.max_tokens} tokens)",
        )
        _each(self.stop, "stop", lambda text: isinstance(text, str) and bool(text), "a string that is not empty")
        _each(self.stop_token_ids, "stop_token_ids", lambda one: _is(one, int), "a token id")
        _each(self.logit_bias, "logit_bias", _is_bias, f"a token id with a number between {-BIAS:g} and {BIAS:g}")
        ids = [pair[0] for pair in self.logit_bias]
        _require(len(set(ids)) == len(ids), "logit_bias", "logit_bias names a token id twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request names nothing: plain sampling from the model's distribution, unless its makers
    recommend otherwise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def recommended(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults that a model's `generation_config.json` names, read as vLLM reads it: `do_sample` changes nothing.

    Raises ConfigError for a value that no request could ask for.
    """
    named = {name: generation_config.get(name) for name in SamplingDefaults.__dataclass_fields__}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        SamplingParams(**given).validate()
    except BadRequest as error:
        raise ConfigError(
            f"generation_config.json: {error.message}; correct it, or have the backend ignore it with "
            "'generation_config: none'"
        ) from error
    return SamplingDefaults(**given)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_number(value: Any, low: float, high: float) -> bool:
    return (_is(value, int) or _is(value, float)) and low <= value <= high and math.isfinite(value)


def _is_bias(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and _is(pair[0], int) and _is_number(pair[1], -BIAS, BIAS)


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise BadRequest(message, param=param)


def _real(value: Any, param: str, low: float, high: float) -> None:
    _require(_is_number(value, low, high), param, f"{param} must be a number between {low:g} and {high:g}")


def _whole(value: Any, param: str, low: int, high: int | None, said: str) -> None:
    inside = _is(value, int) and low <= value and (high is None or value <= high)
    _require(inside, param, f"{param} must be {said}")


def _each(values: Any, param: str, good: Callable[[Any], bool], said: str) -> None:
    _require(isinstance(values, tuple) and all(map(good, values)), param, f"each entry of {param} must be {said}")
