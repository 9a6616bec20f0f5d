"""Row selectors: what they choose, and how they are named."""

from typing import Any, Literal

import pytest
import torch
from promptsluice.kv_reuse import AUTO, ChunkHeads, KVDeviation, QueryAttention, Repair, make_repair, selector_names
from promptsluice.prompt.errors import BadRequest


@pytest.mark.parametrize("on", ["k", "v"])
@pytest.mark.parametrize("quota", [0, 1, 5, 16])
def test_deviation_takes_the_rows_that_differ_most(on: Literal["k", "v"], quota: int):
    stored = torch.randn(16, 2, 4)
    size = torch.randperm(16).float()
    fresh = stored + size[:, None, None] * torch.nn.functional.normalize(torch.randn(16, 8), dim=1).reshape(16, 2, 4)
    same = torch.randn(16, 2, 4)
    deviating, equal = {f"fresh_{on}": fresh, f"stored_{on}": stored}, "kv".replace(on, "")
    rows = KVDeviation(on=on).select(**deviating, **{f"fresh_{equal}": same, f"stored_{equal}": same}, quota=quota)
    expected = [row for row in range(16) if size[row] >= 16 - quota]
    assert rows.dtype == torch.int64 and rows.tolist() == expected


def test_deviation_is_taken_in_float32():
    stored = torch.zeros(3, 1, 2, dtype=torch.float16)
    fresh = torch.tensor([300.0, 400.0, 500.0]).half()[:, None, None].expand(3, 1, 2)  # squares overflow float16
    rows = KVDeviation().select(fresh_k=stored, fresh_v=fresh, stored_k=stored, stored_v=stored, quota=1)
    assert rows.tolist() == [2]


def test_deviation_of_keys_and_values_together():
    stored = torch.zeros(4, 1, 2)
    k, v = (torch.tensor(sizes)[:, None, None].expand(4, 1, 2) for sizes in ([3.0, 0, 2, 0], [0.0, 3.5, 3, 1]))
    rows = KVDeviation(on="kv").select(fresh_k=k, fresh_v=v, stored_k=stored, stored_v=stored, quota=2)
    assert rows.tolist() == [1, 2]


OFFSETS = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3])  # of three chunks


@pytest.mark.parametrize(("quota", "expected"), [(0, []), (3, [0, 3, 5]), (6, [0, 1, 3, 4, 5, 6]), (9, list(range(9)))])
def test_chunk_heads_are_the_same_number_of_rows_of_each_chunk(quota: int, expected: list[int]):
    rows = ChunkHeads().choose(attention=None, offsets=OFFSETS, quota=quota)
    assert rows.dtype == torch.int64 and sorted(rows.tolist()) == expected


def test_query_attention_takes_what_is_looked_at_and_chunk_heads_first_if_asked():
    attention = torch.tensor([0.1, 0.9, 0.2, 0.0, 0.3, 0.1, 0.0, 0.8, 0.7])
    plain = QueryAttention().choose(attention=attention, offsets=OFFSETS, quota=3)
    assert plain.dtype == torch.int64 and sorted(plain.tolist()) == [1, 7, 8]
    mixed = QueryAttention(heads=1).choose(attention=attention, offsets=OFFSETS, quota=4)
    assert sorted(mixed.tolist()) == [0, 1, 3, 5]


def test_selectors_have_names():
    assert selector_names() == ("auto", "chunk_heads", "kv_deviation", "query_attention")
    assert make_repair("auto") == AUTO
    assert make_repair("kv_deviation", layer=3, on="k") == Repair(selector=KVDeviation(layer=3, on="k"))
    assert make_repair("chunk_heads") == Repair(chooser=ChunkHeads())
    assert make_repair("query_attention", heads=2) == Repair(chooser=QueryAttention(heads=2))


@pytest.mark.parametrize(
    ("name", "options", "message", "param"),
    [
        ("nearest", {}, "no row selector 'nearest'; there are: auto, chunk_heads, kv_deviation", "reuse.selector"),
        ("kv_deviation", {"depth": 2}, "no option 'depth'; it has: layer, on", "reuse.selector.depth"),
        ("auto", {"depth": 1}, "'auto' has no option 'depth'", "reuse.selector.depth"),
        (
            "query_attention",
            {"depth": 0.5, "until": 0.5},
            "until must be above depth .0.5. and at most 1",
            "reuse.selector.until",
        ),
        ("query_attention", {"depth": 1.0}, "depth must be from 0 to below 1", "reuse.selector.depth"),
        ("query_attention", {"heads": -1}, "heads must not be negative", "reuse.selector.heads"),
        ("kv_deviation", {"layer": 0}, "layer must be at least 1, got 0", "reuse.selector.layer"),
        ("kv_deviation", {"on": "q"}, "on must be 'k', 'v' or 'kv', got 'q'", "reuse.selector.on"),
    ],
)
def test_what_does_not_exist_is_refused(name: str, options: dict[str, Any], message: str, param: str):
    with pytest.raises(BadRequest, match=message) as caught:
        make_repair(name, **options)
    assert caught.value.param == param
