"""/v1/embeddings: the own embedder through the OpenAI SDK, other models through their upstream, limits."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from promptsluice.rag import SentenceEmbedder

from .harness import Exchange, Gateway, Upstream, http

MODEL = "all-minilm-l6-v2"


@pytest.mark.slow
def test_through_the_sdk(gateway: Gateway, minilm_dir: Path) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120)
    texts = ["A boat on the lake", "Ein Boot", "船"]
    wanted = SentenceEmbedder(str(minilm_dir)).embed(texts)
    for encoding in ("float", "base64"):
        answer = client.embeddings.create(model=MODEL, input=texts, encoding_format=encoding)
        assert [one.index for one in answer.data] == [0, 1, 2]
        got = np.array([_floats(one.embedding) for one in answer.data], dtype=np.float32)
        np.testing.assert_allclose(got, wanted, atol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 6
    plain = client.embeddings.create(model=MODEL, input=texts[0])  # base64 beneath, which the SDK decodes
    np.testing.assert_allclose(plain.data[0].embedding, wanted[0], atol=1e-6)
    by_ids = client.embeddings.create(model=MODEL, input=[[1037, 4049, 2006, 1996, 2697]])
    np.testing.assert_allclose(by_ids.data[0].embedding, wanted[0], atol=1e-5)
    assert client.embeddings.create(model=MODEL, input=[1037, 4049, 2006, 1996, 2697]).data[0].index == 0


def _floats(embedding: Any) -> Any:
    return embedding if isinstance(embedding, list) else np.frombuffer(base64.b64decode(embedding), "<f4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [1 << 40]}, "input"),
        ({"input": "a", "dimensions": 100}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "purpose": "x"}, "purpose"),
        ({"input": "boat " * 300}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({}, "input"),
    ],
)
def test_bad_requests(gateway: Gateway, minilm_dir: Path, fields: dict[str, Any], param: str) -> None:
    response = http.post(f"{gateway.url}/v1/embeddings", json={"model": MODEL, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and "constrained" not in error["message"]


def test_other_models_belong_to_their_upstream(gateway: Gateway, upstream: Upstream) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.json("200 OK", b'{"data": [], "usage": {"prompt_tokens": 3}}')

    upstream.answer(answer)
    raw = b'{"model": "far",  "input": ["x"], "truncate_prompt_tokens": 5}'
    headers = {"authorization": "Bearer client-key"}
    response = http.post(f"{gateway.url}/v1/embeddings", content=raw, headers=headers)
    assert response.status_code == 200 and response.json()["data"] == []
    (seen,) = upstream.seen
    assert seen.line.startswith("POST /v1/embeddings ") and seen.body == raw
    assert "client-key" not in seen.headers["authorization"]
    http.post(f"{gateway.url}/v1/embeddings", content=raw.replace(b"far", b"far:off"))
    assert json.loads(upstream.seen[-1].body)["model"] == "far"


def test_models_that_do_not_embed(gateway: Gateway) -> None:
    response = http.post(f"{gateway.url}/v1/embeddings", json={"model": "echo", "input": "a"})
    assert response.status_code == 400 and "do not serve /embeddings" in response.json()["error"]["message"]
    assert http.post(f"{gateway.url}/v1/embeddings", json={"model": "nope", "input": "a"}).status_code == 404
