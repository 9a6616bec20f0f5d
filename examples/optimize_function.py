"""The decorator: your function keeps calling whatever it calls, its `messages` are rewritten before. No gateway needed.

    OPENAI_API_KEY=... MODEL=gpt-4.1-mini python examples/optimize_function.py

Works with any client; this one uses the OpenAI SDK (pip install 'promptsluice[client]'). OPENAI_BASE_URL sets another
server.
"""

import os
from collections.abc import Iterator
from typing import Any

from openai import OpenAI
from promptsluice import optimize

MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
LOG = "\n\n".join(f"worker {n % 3}:   connection refused by 10.0.0.7:5432   (retry in 30 s)" for n in range(60))


@optimize("lossless", on_report=lambda report: print(f"tokens before: {report.tokens_in}, after: {report.tokens_out}"))
def stream_answer(messages: list[Any]) -> Iterator[str]:
    """A generator stays a generator; sync, async and async-generator functions and methods work the same way."""
    for chunk in OpenAI().chat.completions.create(model=MODEL, messages=messages, max_tokens=64, stream=True):
        if chunk.choices:
            yield chunk.choices[0].delta.content or ""


def main() -> None:
    """Ask about a log that repeats itself."""
    for piece in stream_answer([{"role": "user", "content": LOG}, {"role": "user", "content": "What is wrong?"}]):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
