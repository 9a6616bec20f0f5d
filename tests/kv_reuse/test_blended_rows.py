"""The blended forward against a dense float64 reference: exact mask, random rows, random pages, mixed batches."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import repositioned
from torch import Tensor

from .reference import Outcome, Reference
from .rows import RandomRows

FAMILIES = ("tiny_llama_dir", "tiny_mistral_dir", "tiny_qwen2_dir", "tiny_qwen3_dir", "tiny_gemma3_dir")
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A prompt with chunks (start, length), and how much of them is repaired from `layer` on."""

    ids: list[int]
    spans: list[tuple[int, int]]
    ratio: float
    layer: int
    seed: int

    @property
    def repairable(self) -> list[int]:
        return [place for start, length in self.spans for place in range(start, start + length)]


def random_case(seed: int, *, ratio: float | None = None) -> Case:
    """Chunks at the very start, side by side, twice in one prompt, of one token: all occur over the seeds."""
    rng = random.Random(seed)
    library = [[rng.randrange(512) for _ in range(rng.choice([1, 7, 16, 33]))] for _ in range(3)]
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for _ in range(rng.randint(2, 5)):
        ids += [rng.randrange(512) for _ in range(rng.choice([0, 0, 1, 9]))]
        chunk = rng.choice(library)
        spans.append((len(ids), len(chunk)))
        ids += chunk
    ids += [rng.randrange(512) for _ in range(rng.choice([1, 12]))]
    return Case(ids, spans, rng.choice([0.15, 0.5]) if ratio is None else ratio, rng.randrange(4), seed)


class Bench:
    """A pool with its pages dealt at random, and the parts of one step."""

    def __init__(self, model: LoadedModel, *, seed: int, page_size: int = 4, pages: int = 256) -> None:
        self.model = model
        self.pool = KVPool(model.spec, pages=pages, page_size=page_size)
        self.free = random.Random(seed).sample(range(pages), pages)
        self.parts: list[RequestRows] = []

    def pages(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.pool.page_size))]

    def slots(self, part: RequestRows, start: int, stop: int) -> Tensor:
        size = self.pool.page_size
        return torch.tensor([part.pages[place // size] * size + place % size for place in range(start, stop)])

    def kv(self, part: RequestRows) -> KVBlock:
        return self.pool.read(self.slots(part, 0, part.indices[-1] + 1))

    def add_plain(self, ids: Sequence[int]) -> RequestRows:
        part = RequestRows(ids=ids, indices=range(len(ids)), pages=self.pages(len(ids)), logits=(len(ids) - 1,))
        self.parts.append(part)
        return part

    def add_blended(self, case: Case, selector: RandomRows) -> RequestRows:
        """All rows run to the selector's layer; the chunks' KV, computed alone, lies in the pool already."""
        total, repairable = len(case.ids), set(case.repairable)
        part = RequestRows(
            ids=case.ids,
            indices=range(total),
            pages=self.pages(total),
            logits=(total - 1,),
            selector=selector,
            repairable=[place in repairable for place in range(total)],
            quota=round(case.ratio * len(repairable)),
        )
        self.load(part, case)
        self.parts.append(part)
        return part

    def add_reused(self, case: Case) -> RequestRows:
        """Only the rows between the chunks are computed."""
        loaded = set(case.repairable)
        indices = [place for place in range(len(case.ids)) if place not in loaded]
        part = RequestRows(
            ids=[case.ids[place] for place in indices],
            indices=indices,
            pages=self.pages(len(case.ids)),
            logits=(len(indices) - 1,),
        )
        self.load(part, case)
        self.parts.append(part)
        return part

    def load(self, part: RequestRows, case: Case) -> None:
        for start, length in case.spans:
            alone = self.alone(case.ids[start : start + length])
            moved = repositioned(alone, self.model.decoder.ropes, old=0, new=start)
            self.pool.write_block(self.slots(part, start, start + length), moved)

    def alone(self, ids: Sequence[int]) -> KVBlock:
        side = Bench(self.model, seed=0, pages=16)
        part = side.add_plain(ids)
        side.run()
        return side.kv(part)

    def run(self) -> Tensor:
        """Logits [requests, vocab] of each part's last row."""
        batch = build_batch(self.parts, page_size=self.pool.page_size)
        return self.model.decoder.logits(self.model.decoder.forward(batch, self.pool).hidden)


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def check(bench: Bench, part: RequestRows, logits: Tensor, expected: Outcome) -> None:
    torch.testing.assert_close(logits.double(), expected.logits, rtol=TOLERANCE, atol=TOLERANCE)
    kv = bench.kv(part)
    torch.testing.assert_close(kv.k.double(), expected.k, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(kv.v.double(), expected.v, rtol=TOLERANCE, atol=TOLERANCE)


def repaired(case: Case, selector: RandomRows) -> set[int]:
    (chosen,) = selector.chosen
    places = case.repairable
    return {places[row] for row in chosen.tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_repaired_row_sees_exactly_the_keys_up_to_its_own(model: LoadedModel, reference: Reference, seed: int):
    case = random_case(seed)
    selector = RandomRows(seed, layer=case.layer)
    bench = Bench(model, seed=seed)
    part = bench.add_blended(case, selector)
    (logits,) = bench.run()
    rows = repaired(case, selector)
    expected = reference.blended(case.ids, case.spans, layer=case.layer, repaired=rows)
    check(bench, part, logits, expected)


@pytest.mark.parametrize("seed", range(3))
def test_repairing_every_row_is_a_full_prefill(model: LoadedModel, reference: Reference, seed: int):
    case = random_case(seed, ratio=1.0)
    bench = Bench(model, seed=seed)
    part = bench.add_blended(case, RandomRows(seed, layer=case.layer))
    (logits,) = bench.run()
    check(bench, part, logits, reference.full(case.ids))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_reuse_without_repair(model: LoadedModel, reference: Reference, seed: int):
    case = random_case(seed)
    bench = Bench(model, seed=seed)
    part = bench.add_reused(case)
    (logits,) = bench.run()
    check(bench, part, logits, reference.blended(case.ids, case.spans))


@pytest.mark.slow
def test_blended_reused_and_plain_requests_share_a_step(model: LoadedModel, reference: Reference):
    bench = Bench(model, seed=1)
    plain = [[random.Random(number).randrange(512) for _ in range(20 + number)] for number in range(2)]
    one, two, three = random_case(10), random_case(11), random_case(12)
    first, second = RandomRows(1, layer=1), RandomRows(2, layer=2)
    parts = [
        bench.add_plain(plain[0]),
        bench.add_blended(one, first),
        bench.add_reused(two),
        bench.add_blended(three, second),
        bench.add_plain(plain[1]),
    ]
    logits = bench.run()
    expected = [
        reference.full(plain[0]),
        reference.blended(one.ids, one.spans, layer=1, repaired=repaired(one, first)),
        reference.blended(two.ids, two.spans),
        reference.blended(three.ids, three.spans, layer=2, repaired=repaired(three, second)),
        reference.full(plain[1]),
    ]
    for part, row, outcome in zip(parts, logits, expected, strict=True):
        check(bench, part, row, outcome)


@pytest.mark.slow
def test_the_reference_would_notice_a_wrong_mask_and_wrong_rows(reference: Reference):
    """The comparisons above are worth something only if these faults are far outside of their tolerance."""
    case = random_case(3)
    rows = case.repairable[::5]
    right = reference.blended(case.ids, case.spans, layer=1, repaired=rows).logits
    faults = {
        "sees the future": reference.blended(case.ids, case.spans, layer=1, repaired=rows, blind_to_order=True),
        "other rows": reference.blended(case.ids, case.spans, layer=1, repaired=case.repairable[1::5]),
        "other layer": reference.blended(case.ids, case.spans, layer=2, repaired=rows),
        "nothing reused": reference.full(case.ids),
    }
    for fault, outcome in faults.items():
        assert (outcome.logits - right).abs().max() > 1e-2, fault


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_the_real_model_blends_as_the_reference_does(smollm2: LoadedModel, smollm2_dir: Path, ratio: float):
    model = smollm2
    assert model.tokenizer is not None
    texts = ["A query parameter has a default value.", "Paths are matched in order.", "A body is read as JSON."]
    ids = model.tokenizer.encode_plain("Answer from the documents.\n")
    spans: list[tuple[int, int]] = []
    for text in (texts[0], texts[2], texts[1], texts[0]):
        chunk = model.tokenizer.encode_plain(f"\n{text}\n")
        spans.append((len(ids), len(chunk)))
        ids = [*ids, *chunk]
    case = Case([*ids, *model.tokenizer.encode_plain("Question: which default?")], spans, ratio, layer=1, seed=0)
    selector = RandomRows(0, layer=1)
    bench = Bench(model, seed=0)
    part = bench.add_blended(case, selector)
    (logits,) = bench.run()
    reference = Reference(smollm2_dir)
    rows = repaired(case, selector)
    expected = reference.blended(case.ids, spans, layer=1, repaired=rows) if ratio < 1 else reference.full(case.ids)
    check(bench, part, logits, expected)
