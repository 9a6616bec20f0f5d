"""The wrapped client: one line changes, every chat completion of the client is rewritten before it is sent.

    OPENAI_API_KEY=... MODEL=gpt-4.1-mini python examples/wrap_client.py

Needs the `client` extra: pip install 'promptsluice[client]'. OPENAI_BASE_URL sets another server.
"""

import asyncio
import os
from typing import Any

from openai import AsyncOpenAI
from promptsluice import wrap

MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
LOG = "\n\n".join(f"worker {n % 3}:   connection refused by 10.0.0.7:5432   (retry in 30 s)" for n in range(60))


async def main() -> None:
    """Two questions at a time; the report of each is read in its own task."""
    async with AsyncOpenAI() as plain:
        client = wrap(plain, policy="lossless")
        await asyncio.gather(*(ask(client, question) for question in ("What is wrong?", "Which port is it?")))


async def ask(client: Any, question: str) -> None:
    """Ask about the log and print the answer with the report."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": LOG}, {"role": "user", "content": question}], max_tokens=64
    )
    report = client.promptsluice_report
    print(f"{question} {answer.choices[0].message.content}")
    print(f"tokens before: {report.tokens_in}, after: {report.tokens_out}")


if __name__ == "__main__":
    asyncio.run(main())
