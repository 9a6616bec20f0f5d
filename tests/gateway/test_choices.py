"""Choices as one stream: their seeds, their order, what ends one of them, and the parameters behind them."""

import asyncio
from collections.abc import AsyncGenerator

import openai
import pytest
from promptsluice.backend_engine.params import SamplingDefaults
from promptsluice.backend_engine.types import Delta, TokenLogprobs
from promptsluice.gateway.backends.choices import LOWEST_LOGPROB, choice_seed, described, merged
from promptsluice.gateway.parameters import chat_parameters
from promptsluice.prompt import BadRequest, Overloaded

from .harness import Gateway


def test_seeds_differ_by_choice_and_reproduce() -> None:
    seeds = [choice_seed(5, index) for index in range(128)]
    assert seeds[0] == 5 and len(set(seeds)) == 128
    assert seeds == [choice_seed(5, index) for index in range(128)]
    assert not {choice_seed(6, index) for index in range(128)} & set(seeds)
    assert all(seed is not None and -(1 << 63) <= seed < 1 << 63 for seed in seeds)
    assert choice_seed(None, 3) is None


class Source:
    """Deltas that come when they are let go; says whether it was closed."""

    def __init__(self, count: int, *, error: Exception | None = None) -> None:
        self.closed = False
        self._count = count
        self._error = error

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                yield Delta(text=str(number))
            if self._error is not None:
                raise self._error
            await asyncio.sleep(0 if self._count else 3600)
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 3])
async def test_every_delta_comes_once_in_its_choices_order(count: int) -> None:
    pieces = [piece async for piece in merged([Source(4).deltas() for _ in range(count)])]
    for index in range(count):
        assert [delta.text for owner, delta in pieces if owner == index] == ["0", "1", "2", "3"]


async def test_a_failure_ends_all_choices() -> None:
    sources = [Source(0), Source(2, error=Overloaded("full")), Source(0)]
    with pytest.raises(Overloaded, match="full"):
        async for _ in merged([source.deltas() for source in sources]):
            pass
    assert all(source.closed for source in sources)


async def test_closing_closes_all_choices() -> None:
    sources = [Source(3), Source(0)]
    pieces = merged([source.deltas() for source in sources])
    await anext(pieces)
    await pieces.aclose()
    assert all(source.closed for source in sources)


def test_tokens_are_described_by_text_and_bytes() -> None:
    tokens = {1: b"a", 2: "é".encode()[:1], 3: b"<|end|>"}
    told = described(tokens)([TokenLogprobs(2, float("-inf"), ((1, -0.5), (3, -1.0)))])
    assert told == [
        {
            "token": "\\xc3",
            "logprob": LOWEST_LOGPROB,
            "bytes": [195],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "<|end|>", "logprob": -1.0, "bytes": list(b"<|end|>")},
            ],
        }
    ]


def test_what_a_request_names_goes_before_the_models_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    silent = chat_parameters({"messages": [], "temperature": None}).sampling(defaults)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.6, 0.9, 20, 0.1)
    assert silent.repetition_penalty == 1.1
    named = chat_parameters(
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    ).sampling(defaults)  # fmt: skip
    assert (named.temperature, named.top_p, named.top_k, named.min_p, named.repetition_penalty) == (0, 1, 0, 0, 1)
    assert chat_parameters({}).sampling().temperature == 1


def test_what_the_wire_accepts_the_engine_accepts() -> None:
    asked = {"logit_bias": {"5": -100, "0": 1.5}, "stop_token_ids": [7], "min_tokens": 2, "max_tokens": 3, "n": 2}
    parameters = chat_parameters({**asked, "logprobs": True, "top_logprobs": 20, "presence_penalty": -2})
    sampling = parameters.sampling()
    sampling.validate()
    assert sampling.logit_bias == ((5, -100.0), (0, 1.5)) and sampling.stop_token_ids == (7,)
    assert sampling.logprobs == 20 and chat_parameters({"logprobs": True}).sampling().logprobs == 0
    for key in ("-1", "05", " 5", "٣", "99999999999", ""):
        with pytest.raises(BadRequest, match="token ids as strings"):
            chat_parameters({"logit_bias": {key: 1}})


def test_choices_of_an_echo(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    messages: list = [{"role": "user", "content": "one two three"}]
    whole = client.chat.completions.create(model="echo", messages=messages, n=3)
    assert [choice.message.content for choice in whole.choices] == ["one two three"] * 3
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 9)
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in client.chat.completions.create(model="echo", messages=messages, n=3, stream=True):
        assert len(chunk.choices) == 1
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason is not None
    assert texts == ["one two three"] * 3 and roles == ends == [1, 1, 1]
