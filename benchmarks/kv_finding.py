"""What it costs to find stored chunks in a prompt: `python benchmarks/kv_finding.py [--chunks N] [--tokens N]`.

Prints milliseconds for 1,000 prompt tokens, by how much of the prompt is stored, and the index's bytes a token.
"""

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence

from promptsluice.kv_reuse import ChunkIndex, EmptyStore, Finder, breaks_of

VOCABULARY = 50_000
ROUNDS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=2000, help="stored chunks")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a chunk")
    options = parser.parse_args()
    source = random.Random(0)
    chunks = [words(source, options.tokens) for _ in range(options.chunks)]
    index = ChunkIndex(most_tokens=2 * options.chunks * options.tokens)
    breaks = breaks_of((b"\n\n" if id_ % 97 == 0 else b"word" for id_ in range(VOCABULARY)), walls=[])
    finder = Finder(EmptyStore(), fingerprint="model", breaks=breaks, index=index)
    tracemalloc.start()
    for chunk in chunks:
        finder.know(chunk, salt="tenant")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(
        f"{options.chunks} chunks of {options.tokens} tokens; the index takes {held / index.tokens:.1f} bytes a token"
    )
    print("tokens  stored  find, ms per 1,000 tokens  cutting the rest, ms per 1,000 tokens")
    for size in (1_000, 4_000, 16_000, 64_000):
        for share in (0.0, 0.5, 1.0):
            measure(finder, prompt(source, chunks, size, share), share)
    repeated = [7] * 16_000
    finder.know(repeated[: options.tokens], salt="tenant")
    measure(finder, repeated, 1.0, what="one token repeated")


def words(source: random.Random, count: int) -> list[int]:
    return source.choices(range(VOCABULARY), k=count)


def prompt(source: random.Random, chunks: Sequence[list[int]], size: int, share: float) -> list[int]:
    ids: list[int] = []
    while len(ids) < size:
        ids += source.choice(chunks) if source.random() < share else words(source, len(chunks[0]))
    return ids[:size]


def measure(finder: Finder, ids: list[int], share: float, *, what: str = "") -> None:
    finding: list[float] = []
    cutting: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        found = finder.find(ids, salt="tenant", least=64)
        done = time.perf_counter()
        finder.fresh(ids, salt="tenant", covered=[(one.start, one.length) for one in found], least=64)
        cutting.append(time.perf_counter() - done)
        finding.append(done - began)
    per = 1e6 / len(ids)
    print(
        f"{len(ids):6}  {share:5.0%}  {statistics.median(finding) * per:8.3f} (worst {max(finding) * per:.3f})"
        f"  {statistics.median(cutting) * per:8.3f}  {what}"
    )


if __name__ == "__main__":
    main()
