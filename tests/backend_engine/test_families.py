"""Families through the engine and in narrow dtypes: windows smaller than prompts, two ropes, nested checkpoints."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine import KVPool, load_model
from promptsluice.backend_engine.attention import attention_backend
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.weights import SafetensorsSource, load_weights
from promptsluice.prompt.errors import ConfigError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from .driving import DEVICE, Reference, assert_idle, greedy, random_ids, tiny_engine, together

if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"


def logits_of(decoder: Decoder, ids: tuple[int, ...]) -> Tensor:
    """Logits [tokens, vocab] of one prompt, on pages in odd order."""
    needed = -(-len(ids) // 16)
    pool = KVPool(decoder.spec, pages=needed, dtype=decoder.dtype, device=decoder.device)
    part = RequestRows(
        ids=ids, indices=range(len(ids)), pages=list(reversed(range(needed))), logits=range(len(ids))
    )  # fmt: skip
    out = decoder.forward(build_batch([part], page_size=16, device=decoder.device), pool)
    return decoder.logits(out.hidden).cpu()


def theirs(directory: Path, ids: tuple[int, ...]) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny_mistral_dir", "tiny_smollm3_dir", "tiny_gemma3_dir"])
def test_chunks_batches_and_prefix_hits_equal_transformers(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    expected, prompts = Reference(directory), [random_ids(length, length) for length in (1, 19, 70)]
    engine = tiny_engine(load_model(directory, dtype="float32", device=DEVICE), step_tokens=33)
    outputs = together(engine, *(greedy(ids) for ids in prompts))
    assert [output.tokens for output in outputs] == [expected.greedy(ids) for ids in prompts]
    longer = [(*ids, *output.tokens, *random_ids(30, 1)) for ids, output in zip(prompts, outputs, strict=True)]
    again = together(engine, *(greedy(ids) for ids in longer))
    assert all(output.result.cached_tokens > 0 for output in again[1:])
    assert [output.tokens for output in again] == [expected.greedy(ids) for ids in longer]
    assert_idle(engine)


def test_the_language_model_of_a_checkpoint_with_images(tiny_gemma3_dir: Path, tmp_path: Path) -> None:
    """Both ways in which such checkpoints nest it; images' tensors are left alone."""
    ids, config = random_ids(50, 1), json.loads((tiny_gemma3_dir / "config.json").read_text())
    expected = logits_of(load_model(tiny_gemma3_dir).decoder, ids)
    tensors = load_file(tiny_gemma3_dir / "model.safetensors")
    for outer, inner in (("model.language_model.", ""), ("language_model.", "model.")):
        folder = tmp_path / inner / outer
        folder.mkdir(parents=True)
        nested = {f"{outer}{inner}{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
        save_file({**nested, "vision_tower.patch": torch.zeros(3)}, folder / "model.safetensors")
        whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "eos_token_id": [1, 7]}
        (folder / "config.json").write_text(json.dumps(whole))
        model = load_model(folder)
        assert model.spec.eos_ids == (1, 7)
        torch.testing.assert_close(logits_of(model.decoder, ids), expected, rtol=0, atol=0)


def test_a_gemma_saved_with_images_by_transformers(tmp_path: Path, tiny_gemma3_dir: Path) -> None:
    import transformers

    text = json.loads((tiny_gemma3_dir / "config.json").read_text())
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole: Any = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    whole.save_pretrained(tmp_path)
    ids = random_ids(50, 1)
    with torch.inference_mode():
        expected = whole(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(load_model(tmp_path).decoder, ids), expected, rtol=0, atol=1e-4)


def narrow(directory: Path, dtype: torch.dtype) -> Decoder:
    """As on a GPU; `load_model` refuses what this CPU would be slow at."""
    spec = load_model(directory).spec
    return Decoder(spec, load_weights(SafetensorsSource(directory), spec, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("tiny_llama_dir", torch.float16),
        ("tiny_qwen3_dir", torch.float16),
        ("tiny_mistral_dir", torch.bfloat16),
        ("tiny_gemma3_dir", torch.bfloat16),
    ],
)
def test_narrow_dtypes_are_near(family: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    directory, ids = request.getfixturevalue(family), random_ids(60, 2)
    decoder, expected = narrow(directory, dtype), theirs(directory, ids)
    assert decoder.dtype == dtype
    error = (logits_of(decoder, ids) - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01), error


def test_norms_of_gemma_keep_what_bfloat16_would_round_away(tiny_gemma3_dir: Path) -> None:
    decoder = narrow(tiny_gemma3_dir, torch.bfloat16)
    stored = load_file(tiny_gemma3_dir / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    assert decoder.dtype == torch.bfloat16
    torch.testing.assert_close(decoder.weights.layers[0].input_norm, 1.0 + stored, rtol=0, atol=0)


def test_float16_is_refused_where_it_overflows(tiny_gemma3_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"Gemma3ForCausalLM.*bfloat16"):
        load_model(tiny_gemma3_dir, dtype="float16", device="cuda")


@pytest.mark.slow
def test_the_gpu_kernels_are_the_same_model(tiny_gemma3_dir: Path) -> None:
    """A chunk and a decode through the Triton backend and the Triton operations, beyond the window."""
    directory, ids = tiny_gemma3_dir, random_ids(31, 3)
    model = load_model(directory, dtype="float32", device=DEVICE)
    ops = import_module("promptsluice.backend_engine.fused_triton").TritonOps()
    decoder = Decoder(model.spec, model.decoder.weights, attention=attention_backend("triton"), ops=ops)
    pool = KVPool(model.spec, pages=2, device=DEVICE)
    got = []
    for rows in (range(30), range(30, 31)):
        part = RequestRows(ids=[ids[row] for row in rows], indices=rows, pages=[1, 0], logits=[len(rows) - 1])
        out = decoder.forward(build_batch([part], page_size=16, device=DEVICE), pool)
        got.append(decoder.logits(out.hidden).cpu())
    torch.testing.assert_close(torch.cat(got), theirs(directory, ids)[29:], rtol=0, atol=1e-4)
