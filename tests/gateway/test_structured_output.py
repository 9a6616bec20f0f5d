"""Structured output over the wire: the real model, the OpenAI SDK, and a server that goes on meanwhile."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from .harness import Gateway

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m-instruct"


class City(BaseModel):
    name: str = Field(max_length=30)
    country: Literal["France", "Italy", "Spain"]
    millions: int = Field(ge=0, le=40)


def asked(question: str) -> Any:
    return [{"role": "user", "content": question}]


def test_the_sdk_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=asked("Tell me about Paris."), response_format=City, temperature=0, max_tokens=80
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(answer.message.parsed, City)


def test_streamed_as_whole(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": asked("Describe Rome as JSON."), "temperature": 0, "max_tokens": 80}
    with client.chat.completions.stream(**fields, response_format=City) as stream:
        streamed = stream.get_final_completion().choices[0].message
    whole = client.chat.completions.parse(**fields, response_format=City).choices[0].message
    assert streamed.content == whole.content and streamed.parsed == whole.parsed is not None


def test_responses_parse_too(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Describe Rome as JSON.", "temperature": 0, "max_output_tokens": 80}
    with client.responses.stream(**fields, text_format=City) as stream:
        streamed = stream.until_done().get_final_response()
    whole = client.responses.parse(**fields, text_format=City)
    assert isinstance(whole.output_parsed, City) and streamed.output_parsed == whole.output_parsed
    assert whole.usage is not None and whole.usage.input_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**fields, text={"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}})
    assert raised.value.param == "text.format.schema.not"


def test_extensions_of_vllm(client: openai.OpenAI) -> None:
    def answer(**extra: Any) -> str:
        made = client.chat.completions.create(
            model=MODEL,
            messages=asked("Is the sky blue? When was it so?"),
            temperature=1,
            max_tokens=60,
            extra_body=extra,
        )
        return made.choices[0].message.content or ""

    assert answer(guided_choice=["yes", "no", "perhaps"]) in ("yes", "no", "perhaps")
    assert re.fullmatch(r"\d{4}-\d{2}", answer(structured_outputs={"regex": r"\d{4}-\d{2}"}))
    assert json.loads(answer(guided_json={"enum": [1, "two"]})) in (1, "two")


def test_free_and_constrained_requests_at_once(client: openai.OpenAI) -> None:
    def free(_: int) -> str | None:
        made = client.chat.completions.create(
            model=MODEL, messages=asked("Count to ten."), temperature=0, max_tokens=24
        )
        return made.choices[0].message.content

    def bound(seed: int) -> str | None:
        made = client.chat.completions.create(
            model=MODEL, messages=asked("A number?"), seed=seed, max_tokens=24, extra_body={"guided_regex": "[0-9]{12}"}
        )
        return made.choices[0].message.content

    alone = free(0)
    with ThreadPoolExecutor(6) as pool:
        bounds, frees = pool.map(bound, range(3)), pool.map(free, range(3))
        assert all(re.fullmatch("[0-9]{12}", text or "") for text in bounds)
        assert set(frees) == {alone}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json.uniqueItems"),
        ({"guided_json": {"$ref": "http://127.0.0.1:9/x.json"}}, "guided_json.$ref"),
        ({"guided_json": {"type": "string", "format": "shoe-size"}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 1_000 for _ in range(5_000)]}}, "guided_json"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "((a{99}){99}){99}"}, "guided_regex"),
    ],
)
def test_what_cannot_be_enforced_is_refused(engine: Gateway, fields: dict[str, Any], param: str) -> None:
    response = engine.post({"model": MODEL, "messages": asked("hi"), "max_tokens": 5, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error"


def test_cut_by_max_tokens(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=asked("Write."), response_format={"type": "json_object"}, temperature=0, max_tokens=3
    ).choices[0]
    assert made.finish_reason == "length" and (made.message.content or "").startswith("{")
