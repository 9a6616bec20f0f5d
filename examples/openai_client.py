"""The smallest client: the official OpenAI SDK with another base URL. Start the gateway first: make serve

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/openai_client.py "What is a socket?"

Needs the `client` extra: pip install 'promptsluice[client]'
"""

import os
import sys

from openai import OpenAI

MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")


def main(question: str) -> None:
    """Ask under the policy `lossless`, print the answer as it comes, then what was done to the prompt."""
    client = OpenAI()
    # The policy is a suffix of the model's name; the header x-promptsluice-policy or a route in the policy file do too.
    stream = client.chat.completions.create(
        model=f"{MODEL}:lossless",
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-promptsluice-report": "1"},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n\nprompt tokens: {chunk.usage.prompt_tokens}")
        if report := (chunk.model_extra or {}).get("promptsluice"):
            print(f"tokens before: {report['tokens_in']}, after: {report['tokens_out']}, policy: {report['policy']}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "What is a socket?")
