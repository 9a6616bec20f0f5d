"""Does turn N+1 begin with turn N's rewritten prompt? Real conversations, request by request, in the real pipeline.

Run: python benchmarks/prefix_stability.py FOLDER [--trajectories 200] [--scored 3] [--policies lossless balanced ...]

FOLDER has tau-bench's trajectories (`gpt-4o-airline.json`, or any *.json with a list of {"traj": messages}) and perhaps
Markdown files, which become the collection that `rag` asks. A request is everything before an assistant's turn. Every
preset is run, and every compressor alone over all text that may be opened at all. `--scored`: of how many conversations
where a language model scores text, which takes minutes for each. Embedder and scorer are the default models.

Exit status 1 when a prefix is broken. Retrieved text is no part of the client's next request: under `rag` a prefix is
held against what stands before the message that it was put into, from the user's next turn on.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from promptsluice.compressors.registry import names
from promptsluice.gateway.inprocess import Optimizer
from promptsluice.policies import PRESETS, PolicySet
from promptsluice.rag import Collections, Document, SentenceEmbedder
from rich.console import Console
from rich.progress import track
from rich.table import Table

Messages = list[dict[str, Any]]
TEXT = "[document, history, tool_result]"
SCORED = ("aggressive", "perplexity")


@dataclass(slots=True)
class Seen:
    """One policy over all conversations; lengths are characters of the messages as JSON."""

    conversations: int = 0
    pairs: int = 0
    broken: int = 0
    shared: int = 0
    before: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    failed: int = 0


def policy_file(root: Path) -> str:
    """The presets, with a saved token worth some waiting, or little would be rewritten; and each compressor alone."""
    presets = "".join(f"  {name}: {{extends: {name}, token_value_ms: 50, rewrite_timeout: 3600}}\n" for name in PRESETS)
    alone = "".join(
        f"  only-{name}: {{compress: [{{use: {name}, kinds: {TEXT}, min_tokens: 16}}], protect: {{system: false}}, "
        "token_value_ms: 50, rewrite_timeout: 3600}\n"
        for name in names()
    )
    return f"version: 1\ncollections: {{root: {root}/c}}\nkv_cache: {{path: {root}/kv}}\npolicies:\n{presets}{alone}"


def conversations(folder: Path) -> list[Messages]:
    """All trajectories in the folder."""
    files = sorted(folder.glob("*.json"))
    found = [one["traj"] for file in files for one in json.loads(file.read_text("utf-8"))]
    if not found:
        raise SystemExit(f"{folder} has no *.json with trajectories")
    return found


def requests(messages: Messages) -> Iterator[Messages]:
    """What a client sends, in order."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            yield messages[:i]


def ingest(policies: PolicySet, folder: Path) -> bool:
    """The folder's Markdown as the collection of the preset `rag`; whether there is any."""
    pages = [Document(id=page.name, text=page.read_text("utf-8")) for page in sorted(folder.glob("*.md"))]
    if pages:
        from promptsluice.gateway.cli.serve import hub_of

        embedder = SentenceEmbedder(str(hub_of(policies).resolve(policies.models.embedder)))
        library = Collections(policies.collections_root, embedder=embedder, count_tokens=lambda text: len(text) // 4)
        library.create("docs").add(pages)
    return bool(pages)


def kept(before: Messages, request: Messages, following: Messages) -> Messages:
    """What of a rewritten prompt has to come back: all, or under retrieval what stands before the question's turn."""
    asked = max(i for i, message in enumerate(request) if message["role"] == "user")
    put_in = before[asked]["content"] != request[asked]["content"]
    again = any(message["role"] == "user" for message in following[len(request) :])
    return before[:asked] if put_in and again else before


def follow(optimizer: Optimizer, policy: str, chosen: Sequence[Messages], *, retrieves: bool) -> Seen:
    """Every conversation, turn by turn."""
    seen = Seen()
    for messages in track(chosen, description=policy):
        asked = list(requests(messages))
        made = [optimizer.prepare(request, policy=policy) for request in asked]
        sent = [prompt.messages for prompt, _ in made]
        seen.failed += sum(bool(report.failed) for _, report in made)
        seen.tokens_in += made[-1][1].tokens_in  # of the longest prompt
        seen.tokens_out += made[-1][1].tokens_out
        seen.conversations += 1
        for (request, following), (before, after) in zip(pairwise(asked), pairwise(sent), strict=True):
            whole, wanted = before, kept(before, request, following) if retrieves else before
            same = next((i for i, (a, b) in enumerate(zip(whole, after, strict=False)) if a != b), len(whole))
            seen.pairs += 1
            seen.broken += same < len(wanted)
            seen.before += len(json.dumps(whole))
            seen.shared += len(json.dumps(whole[:same]))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--scored", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=[*PRESETS, *(f"only-{name}" for name in names())])
    options = parser.parse_args()
    found = conversations(options.folder)[: options.trajectories]
    table = Table(
        "policy", "conversations", "pairs of turns", "broken", "shared", "tokens at the end", "late or failed"
    )
    broken = 0
    with tempfile.TemporaryDirectory() as root:
        policies = PolicySet.from_text(policy_file(Path(root)))
        there = ingest(policies, options.folder)
        with Optimizer(policies) as optimizer:
            for name in options.policies:
                if name == "rag" and not there:
                    continue
                scored = name.removeprefix("only-") in SCORED
                chosen = found[: options.scored] if scored else found
                retrieves = policies.policy(name).retrieve is not None
                seen = follow(optimizer, name, chosen, retrieves=retrieves)
                broken += seen.broken
                share, after = seen.shared / seen.before, f"{seen.tokens_in} -> {seen.tokens_out}"
                row = (seen.conversations, seen.pairs, seen.broken, f"{share:.2%}", after, seen.failed)
                table.add_row(name, *map(str, row))
    Console(width=130).print(table)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
