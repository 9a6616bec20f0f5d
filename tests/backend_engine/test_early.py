"""The kernels of a decode step of few rows, compiled for cards that need not be here.

They wait once, and write nothing before. In a process of its own, since here the interpreter runs kernels.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from promptsluice.backend_engine.early import launch_options

SHARED = 101376  # bytes of shared memory of a program on the cards that have least of it
COMPILED = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from promptsluice.backend_engine import few_rows_triton, fused_triton, one_row_triton
from promptsluice.backend_engine.attention import decode_kernels

MATRIX = dict(IN="i32", OUT="i32")
WIDTH = dict(SLICES=4, SLICE=256, ROWS=8)

def head(dim, keys, group):
    return dict(GROUP=group, KV=2, DIM=dim, DIM_PAD=dim, PAGE=16, WINDOW=0, NORM=True, GROUP_PAD=16, BLOCK_N=keys,
                SPLIT=True)

def kernels(dtype):
    x = "*" + dtype
    attention = dict(visible="*i32", table="*i32", slots="*i64", part="*fp32", lse="*fp32", kv_slot="i32",
                     table_row="i32", turn_row="i32", rows="i32", splits="i32", scale_log2="fp32", eps="fp32")
    yield one_row_triton._tile_product, MATRIX, dict(BIAS=True, BLOCK_N=2, BLOCK=8192), 8
    yield one_row_triton._product, MATRIX, dict(BIAS=False, EVEN=True, BLOCK_N=8, BLOCK_K=512), 4
    yield (one_row_triton._normed_product, dict(MATRIX, eps="fp32"),
           dict(BIAS=True, FIRST=True, GATED=True, SILU=True, BLOCK_N=4, BLOCK=1024), 4)
    if dtype != "fp32":
        yield (few_rows_triton._whole, dict(MATRIX, rows="i32"),
               dict(WIDTH, BIAS=True, GATED=True, SILU=True, COLUMNS=8, BLOCKS=2), 4)
        yield few_rows_triton._part, dict(MATRIX, rows="i32", out="*fp32"), dict(WIDTH, COLUMNS=16), 4
    yield (fused_triton._add_norm, dict(rows="i32", hidden="i32", eps="fp32"),
           dict(PARTS=5, BLOCK=1024, FIRST=True), 8)
    heads = ((64, 64, 4), (128, 32, 2)) if dtype != "fp32" else ((64, 32, 2), (128, 32, 4))
    for dim, keys, warps in heads:
        yield decode_kernels.attend_row, attention, head(dim, keys, 7), warps
    if dtype != "fp32":
        yield decode_kernels.attend_row, attention, head(256, 32, 4), 4
    yield (decode_kernels.merge_row, attention,
           dict(HEADS=14, DIM=64, DIM_PAD=64, WINDOW=0, BLOCK_N=64, SPLITS_PAD=64), 1)

def compiled(kernel, types, constants, warps, dtype, card):
    constants = dict(constants, EARLY=card >= 90)
    signature = {name: "constexpr" if name in constants else types.get(name, "*" + dtype) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=dict(num_warps=warps))
    text = made.asm["ptx"]
    waits = [at.start() for at in re.finditer("griddepcontrol.wait", text)]
    stores = [at.start() for at in re.finditer(r"st\\.global", text)]
    begins = text.find("griddepcontrol.launch_dependents")
    return dict(kernel=kernel.__name__, dtype=dtype, card=card, warps=warps, shared=made.metadata.shared,
                waits=len(waits), begins=begins >= 0, first_store_behind=not waits or min(stores) > waits[0],
                constants={name: str(value) for name, value in constants.items()})

found = [compiled(*kernel, "bf16", 90) for kernel in kernels("bf16")]
# Elsewhere, and in float32, what may ask for more than there is.
large = ("attend_row", "_whole")
found += [compiled(*kernel, dtype, 80) for dtype in ("bf16", "fp32") for kernel in kernels(dtype)
          if kernel[0].__name__ in large]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_kernels_wait_once_and_write_nothing_before() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {one["kernel"] for one in found} >= {"attend_row", "merge_row", "_whole", "_part", "_product", "_add_norm"}
    for one in found:
        early = one["card"] >= 90
        assert one["waits"] == (1 if early else 0) and one["begins"] == early, one
        assert one["first_store_behind"] and one["shared"] <= SHARED, one


def test_nothing_is_launched_early_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_options(torch.device("cpu")) == {"EARLY": False}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 4))
    assert launch_options(torch.device("cuda", 7)) == {"EARLY": False}
