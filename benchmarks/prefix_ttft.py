"""Time to first token of a 2,000-token prompt, and of the same prompt again: through a real gateway and the OpenAI SDK.

Run: python benchmarks/prefix_ttft.py [--tokens 2000] [--rounds 5] [--model smollm2-135m-instruct]

Each round asks about a prompt that was never seen (first), then sends the identical request once more (second). The
prompt's length is adjusted with the model's own tokenizer. One machine, medians. The policy is `off`.
"""

import argparse
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

from openai import OpenAI
from promptsluice.backend_engine.hub import pull
from promptsluice.gateway.cli.demo_server import running_gateway
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

WORDS = [
    "river",
    "stone",
    "market",
    "signal",
    "paper",
    "window",
    "engine",
    "garden",
    "letter",
    "bridge",
    "summer",
    "record",
    "number",
    "method",
]


def prompt_of(tokens: int, count: Tokenizer, seed: int) -> str:
    """Random words of about `tokens` tokens, new for each seed."""
    draw = random.Random(seed)
    text = " ".join(draw.choice(WORDS) for _ in range(tokens))
    ids = count.encode(text, add_special_tokens=False).ids[:tokens]
    return f"{seed} {count.decode(ids)}\nWhich word comes first?"


def ask(client: OpenAI, model: str, text: str) -> tuple[float, int, int]:
    """(seconds to the first token, prompt tokens, cached tokens) of one streamed greedy answer."""
    began, first, usage = time.perf_counter(), None, None
    stream = client.chat.completions.create(
        model=f"{model}:off",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        choice = chunk.choices[0] if chunk.choices else None
        # An answer may end with its first token, which then has no text.
        if choice and first is None and (choice.delta.content or choice.finish_reason):
            first = time.perf_counter() - began
        usage = chunk.usage or usage
    if first is None or usage is None or usage.prompt_tokens_details is None:
        raise SystemExit("the gateway sent no token or no usage")
    return first, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    count = Tokenizer.from_file(str(pull(options.model) / "tokenizer.json"))
    firsts, seconds, cached, sizes = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "policies.yaml"
        config.write_text(
            f"version: 1\ndefault_policy: off\nbackends:\n  local: {{kind: embedded, model: {options.model}}}\n"
        )
        with running_gateway(config, log=Path(folder) / "gateway.log") as base_url:
            client = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=300)
            ask(client, options.model, "warm up")
            for seed in track(range(options.rounds), description="rounds"):
                text = prompt_of(options.tokens, count, seed)
                first, size, _ = ask(client, options.model, text)
                second, _, hits = ask(client, options.model, text)
                firsts.append(first)
                seconds.append(second)
                cached.append(hits)
                sizes.append(size)
    table = Table("request", "TTFT ms (median)", "min", "max", "cached tokens", title=f"{platform.machine()}")
    for name, values, hits in (("first", firsts, 0), ("second", seconds, statistics.median(cached))):
        row = [f"{1000 * value:.0f}" for value in (statistics.median(values), min(values), max(values))]
        table.add_row(name, *row, f"{hits:.0f} of {statistics.median(sizes):.0f}")
    console = Console(width=120)
    console.print(table)
    ratio = statistics.median(firsts) / statistics.median(seconds)
    console.print(f"the second is {ratio:.1f} times as fast to its first token as the first")


if __name__ == "__main__":
    main()
