"""Row selectors: what they choose, and how they are named."""

from typing import Any, Literal

import pytest
import torch
from promptsluice.kv_reuse import KVDeviation, make_selector, selector_names
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


def test_selectors_have_names():
    assert selector_names() == ("kv_deviation",)
    assert make_selector("kv_deviation") == KVDeviation(layer=1, on="v")
    assert make_selector("kv_deviation", layer=3, on="k") == KVDeviation(layer=3, on="k")


@pytest.mark.parametrize(
    ("name", "options", "message", "param"),
    [
        ("nearest", {}, "no row selector 'nearest'; there are: kv_deviation", "reuse.selector"),
        ("kv_deviation", {"depth": 2}, "no option 'depth'; it has: layer, on", "reuse.selector.depth"),
        ("kv_deviation", {"layer": 0}, "layer must be at least 1, got 0", "reuse.selector.layer"),
        ("kv_deviation", {"on": "q"}, "on must be 'k' or 'v', got 'q'", "reuse.selector.on"),
    ],
)
def test_what_does_not_exist_is_refused(name: str, options: dict[str, Any], message: str, param: str):
    with pytest.raises(BadRequest, match=message) as caught:
        make_selector(name, **options)
    assert caught.value.param == param
