"""Raw prompts on the real model through the OpenAI SDK: transformers' tokens and log-probabilities, choices, limits."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from promptsluice.backend_engine import ChatTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from .harness import Gateway, http

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m-instruct"
FRANCE, ROME = "The capital of France is", "naïve 😀: Rome is the capital of"


@pytest.fixture(scope="module")
def theirs(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)


@torch.inference_mode()
def greedy(reference: Any, ids: list[int], count: int) -> list[int]:
    made = reference.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return made[0, len(ids) :].tolist()


def test_texts_and_ids_go_on_as_in_transformers(client: openai.OpenAI, theirs: Any, reference: Any) -> None:
    ids = [theirs(text)["input_ids"] for text in (FRANCE, ROME)]
    expected = [theirs.decode(greedy(reference, one, 12)) for one in ids]
    for prompt in ([FRANCE, ROME], ids):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 24
    assert "Paris" in expected[0]


def test_scores_of_a_prompt(client: openai.OpenAI, theirs: Any, reference: Any, smollm2_dir: Path) -> None:
    """As evaluations ask for them: nothing is generated, the prompt is said back with its log-probabilities."""
    ids = theirs(ROME)["input_ids"]
    with torch.inference_mode():
        scores = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = scores.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    raw = ChatTokenizer(smollm2_dir).token_bytes
    best = [raw[one].decode("utf-8", "backslashreplace") for one in scores.argmax(-1).tolist()]
    for prompt in (ROME, ids):
        (choice,) = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=2).choices
        told = choice.logprobs
        assert choice.text == ROME and choice.finish_reason == "length" and told is not None
        assert told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        torch.testing.assert_close(torch.tensor(told.token_logprobs[1:]), expected, rtol=0, atol=1e-3)
        assert [max(top, key=top.__getitem__) for top in told.top_logprobs[1:]] == best
        for token, after, at in zip(told.tokens, told.top_logprobs, told.text_offset, strict=True):
            assert "\\x" in token or ROME[at:].startswith(token)
            assert after is None or (token in after and 2 <= len(after) <= 3)


def streamed(chunks: Any, choices: int) -> tuple[list[str], list[list[Any]], Any]:
    """Texts and columns by choice, and the usage; each frame has one choice at most."""
    texts, usage = [""] * choices, None
    rows: list[list[Any]] = [[] for _ in range(choices)]
    for chunk in chunks:
        assert len(chunk.choices) <= 1 and usage is None, "the usage is last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            told = choice.logprobs
            if told is not None:
                rows[choice.index] += zip(
                    told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
                )
    return texts, rows, usage


def test_choices_of_prompts_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": [FRANCE, ROME], "n": 2, "seed": 3, "max_tokens": 8, "logprobs": 1}
    whole = client.completions.create(**fields, echo=True)
    texts, rows, usage = streamed(
        client.completions.create(**fields, echo=True, stream=True, stream_options={"include_usage": True}), 4
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) == 4
    assert all(text.startswith(prompt) for text, prompt in zip(texts, [FRANCE, FRANCE, ROME, ROME], strict=True))
    assert whole.usage is not None and usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    for choice, found in zip(whole.choices, rows, strict=True):
        told = choice.logprobs
        assert told is not None and told.text_offset is not None and told.tokens is not None
        assert [row[0] for row in found] == told.tokens and [row[3] for row in found] == told.text_offset
        last = told.text_offset[-1]
        assert "\\x" in told.tokens[-1] or choice.text[last:] == told.tokens[-1]
    alone = client.completions.create(**fields | {"prompt": ROME})
    assert [ROME + choice.text for choice in alone.choices] == texts[2:], "other prompts change nothing"


def test_fields_that_chats_have_too(engine: Gateway, client: openai.OpenAI, theirs: Any) -> None:
    fields: Any = {"model": MODEL, "prompt": FRANCE, "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**fields).choices[0].text
    stopped = client.completions.create(**fields, stop=" Paris").choices[0]
    assert stopped.text == plain[: plain.index(" Paris")] and stopped.finish_reason == "stop"
    penalized = client.completions.create(**fields | {"max_tokens": 40}, presence_penalty=2, frequency_penalty=2)
    assert penalized.choices[0].text != client.completions.create(**fields | {"max_tokens": 40}).choices[0].text
    chosen = client.completions.create(**fields, extra_body={"guided_choice": [" Lyon", " Oslo"]}).choices[0]
    assert chosen.text in (" Lyon", " Oslo") and chosen.finish_reason == "stop"
    (paris,) = theirs(" Paris")["input_ids"]
    assert " Paris" not in client.completions.create(**fields, logit_bias={str(paris): -100}).choices[0].text
    raw = http.post(f"{engine.url}/v1/completions", json={**fields, "logprobs": 5, "logit_bias": {"9": -100}}).text
    assert "Infinity" not in raw and "NaN" not in raw and json.loads(raw)["choices"][0]["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x " * 9_000}, "prompt"),
        ({"prompt": "x " * (4 << 20)}, "prompt"),
        ({"prompt": [1, 49152]}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt"),
        ({"prompt": ["x " * 800] * 2, "n": 2}, "prompt"),
        ({"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"prompt": "a", "guided_regex": "("}, "guided_regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_cannot_do(engine: Gateway, fields: dict[str, Any], param: str, stream: bool) -> None:
    refused = http.post(f"{engine.url}/v1/completions", json={"model": MODEL, "stream": stream, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
