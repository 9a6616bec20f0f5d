"""No request waits for a compiler: what random steps launch was launched before the first of them."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.attention import attention_backend
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.span_loads import SpanLoader
from promptsluice.backend_engine.tiers.streams import InlineStream
from promptsluice.backend_engine.warm_up import warm_up

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"
SPARE = 300
pytestmark = pytest.mark.slow

# In a process of its own, since here the interpreter runs kernels. Nothing is compiled and nothing launched: the hook,
# which is asked before a kernel is compiled, says each time that this is done elsewhere.
LAUNCHED = """
import json, random, sys
from dataclasses import replace
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from promptsluice.backend_engine import likeliest_triton, pool_triton, warm_up as module
from promptsluice.backend_engine.attention.paged import TritonAttention
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.fused_triton import TritonOps
from promptsluice.backend_engine.linear import float_forms
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.probe import Probe
from promptsluice.backend_engine.span_loads import SpanLoader
from promptsluice.backend_engine.tiers.streams import InlineStream
from promptsluice.backend_engine.weights import SafetensorsSource, load_weights

class Card:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

launched = set()
driver.set_active(Card())
triton.knobs.runtime.jit_cache_hook = lambda *, repr, key, **_: launched.add(repr.partition("[")[0] + key) or True

folder, spare, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
spec = load_model(folder, native=False).spec
forms = float_forms(dtype, torch.device("cuda"))
weights = load_weights(SafetensorsSource(Path(folder)), spec, dtype=dtype, device="cpu", forms=forms)
decoder = Decoder(spec, weights, attention=TritonAttention(), ops=TritonOps())
pool = KVPool(spec, pages=spare + 1, page_size=16, dtype=dtype, device=torch.device("cpu"))
module.likeliest = likeliest_triton.likeliest  # as on a card
KVPool.copy = lambda self, source, target, *, tokens: pool_triton.copy_slots(
    self.data, source * self.page_size, target * self.page_size, tokens
)
spans = SpanLoader(pool, decoder.ropes, TritonOps(), InlineStream())
module.warm_up(decoder, pool, spans, spare=spare, max_tokens=spare * 16)
before, dice = set(launched), random.Random(int(sys.argv[4]))
for _ in range(60):
    parts = []
    for _ in range(dice.choice((1, 1, 2, 3, 9, 20))):
        rows = 1 if dice.random() < 0.5 else round(2 ** dice.uniform(1, 8))
        keys = max(rows, min(spare * 16, round(2 ** dice.uniform(3, 13))))
        pages = [dice.randrange(spare) for _ in range(-(-keys // 16))]
        parts.append(RequestRows(ids=[5] * rows, indices=range(keys - rows, keys), pages=pages, logits=[rows - 1]))
    batch = build_batch(parts, page_size=16)
    if dice.random() < 0.5:
        rows, keys, ahead = dice.randrange(1, 64), dice.randrange(1, 4000), dice.randrange(2)
        probe = Probe(rows=torch.zeros(rows, dtype=torch.int64), slots=torch.zeros(keys + 1, dtype=torch.int64)[ahead:],
                      depth=0.5, attention=torch.zeros(keys))
        batch = replace(batch, probes=(probe,))
    output = decoder.forward(batch, pool)
    likeliest_triton.likeliest(decoder.logits(output.hidden))
print(json.dumps({"before": sorted(before), "after": sorted(launched - before)}))
"""


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("gemma3", "bfloat16")])
def test_what_random_steps_launch_was_launched_before(family: str, dtype: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"tiny_{family}_dir")
    run = subprocess.run(
        [sys.executable, "-c", LAUNCHED, str(folder), str(SPARE), dtype, "7"],
        capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    kernels = {name.partition("[")[0] for name in found["before"]}
    assert {"attend", "merge", "_rotated_into", "_add_norm", "_placed", "_denominators", "_copied"} <= kernels
    assert found["after"] == []


def test_only_the_spare_page_is_written(tiny_llama_dir: Path) -> None:
    model = load_model(tiny_llama_dir, dtype="float32", device=DEVICE.type, native=False)
    ops = import_module("promptsluice.backend_engine.fused_triton").TritonOps()
    decoder = Decoder(model.spec, model.decoder.weights, attention=attention_backend("triton"), ops=ops)
    pool = KVPool(model.spec, pages=9, page_size=16, dtype=torch.float32, device=DEVICE)
    pool.data.normal_()
    before = pool.data.clone()
    warm_up(decoder, pool, SpanLoader(pool, decoder.ropes, ops, InlineStream()), spare=8, max_tokens=5)
    assert torch.equal(pool.data[:, :, : 8 * 16], before[:, :, : 8 * 16])
    assert not torch.equal(pool.data[:, :, 8 * 16 :], before[:, :, 8 * 16 :])
