"""Fakes at the compressors' seams: a token count, an embedder and a scorer, all deterministic and cheap."""

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from promptsluice.compressors import CompressionContext
from promptsluice.prompt import Prompt

_TOKEN = re.compile(r"\s?[^\W\d_]{1,6}|\d|\s?[^\w\s]|\s+|.", re.DOTALL)


def count_tokens(text: str) -> int:
    """About as many tokens as a byte-pair tokenizer makes: pieces of words, single digits, punctuation."""
    return sum(1 for _ in _TOKEN.finditer(text))


def bag_of_words(texts: Sequence[str]) -> NDArray[np.float32]:
    """Texts that share words are near each other: `[texts, 64]`."""
    vectors = np.zeros((len(texts), 64), dtype=np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in re.findall(r"\w{3,}|[\u4e00-\u9fff]", text.lower()):
            row[zlib.crc32(word.encode("utf-8", "surrogatepass")) % 64] += 1.0
    return vectors


def word_frequency(
    texts: Sequence[str], *, wanted: object = None, given: str = "", remaining: Callable[[], float]
) -> Iterator[tuple[int, NDArray[np.float64], int]]:
    """A token is the less surprising the more often it was there before; a text's first one has no score. Windows of
    200 tokens.
    """
    for number, text in enumerate(texts):
        seen = Counter(match[0].strip().lower() for match in _TOKEN.finditer(given))
        rows: list[tuple[int, int, float]] = []
        for match in _TOKEN.finditer(text):
            token = match[0].strip().lower()
            seen[token] += 1
            rarity = 1.0 + zlib.crc32(token.encode("utf-8", "surrogatepass")) % 1000 / 100
            rows.append((match.start(), match.end(), -rarity / seen[token] if match.start() else math.nan))
        for at in range(0, len(rows), 200):
            if remaining() <= 0:
                return
            window = rows[at : at + 200]
            yield number, np.array(window), window[-1][1]


@pytest.fixture
def context() -> Callable[..., CompressionContext]:
    """Make a context of fakes; keyword arguments override parts of it."""

    def make(**changes: Any) -> CompressionContext:
        parts = {"count": count_tokens, "embed": bag_of_words, "score": word_frequency}
        return CompressionContext(**{**parts, **changes})

    return make


@pytest.fixture
def prompt_of() -> Callable[..., Prompt]:
    """A chat in which each given text is the result of a tool call, before a last question."""

    def make(*texts: str, question: str = "What now?") -> Prompt:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        for n, text in enumerate(texts):
            call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages.append({"role": "user", "content": "Please look."})
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": text})
        return Prompt.from_messages([*messages, {"role": "user", "content": question}])

    return make


@pytest.fixture
def tool_texts() -> Callable[[Prompt], list[str]]:
    """The contents of a prompt's tool messages."""
    return lambda prompt: [message["content"] for message in prompt.messages if message["role"] == "tool"]


@pytest.fixture
def data() -> Path:
    return Path(__file__).parents[1] / "data" / "compressors"
