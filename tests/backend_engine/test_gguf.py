"""GGUF files of several families and quantizations: the logits of transformers, with the scaling that it leaves out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from promptsluice.backend_engine import KVPool, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.hub.convert import restore_scaling
from promptsluice.prompt.errors import ModelUnavailable
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

IDS = list(range(40, 140))
Quant = gguf.GGMLQuantizationType
ARCHITECTURES = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Gemma3": "gemma3"}


def write_gguf(
    path: Path, directory: Path, architecture: str, quant: Quant, rope: dict[str, Any] | None = None
) -> None:
    """What llama.cpp's converter makes of a checkpoint; `rope` are the keys of its rope's scaling."""
    config = json.loads((directory / "config.json").read_text())
    layers, heads, kv_heads = (config[f"num_{key}"] for key in ("hidden_layers", "attention_heads", "key_value_heads"))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    params = config["rope_parameters"]
    writer.add_rope_freq_base(params.get("full_attention", params)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if rope:
        writer.add_string(f"{architecture}.rope.scaling.type", rope["type"])
        writer.add_float32(f"{architecture}.rope.scaling.factor", rope["factor"])
        if original := rope.get("original_context_length"):
            writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", original)
    if params.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    add_tokenizer(writer, architecture, config["vocab_size"])
    names = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
                                     layers)  # fmt: skip
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        kind = quant if values.ndim == 2 else Quant.F32
        writer.add_tensor(called, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """A projection whose rotary pairs lie side by side."""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(matrix.shape))


def llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    """Straight from the definition, in float64."""
    params, dim = config["rope_parameters"], config["head_dim"]
    found = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * params["rope_theta"] ** (2 * pair / dim)
        turns = params["original_max_position_embeddings"] / wavelength
        smooth = (turns - params["low_freq_factor"]) / (params["high_freq_factor"] - params["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        found.append(1 / ((1 - smooth) / params["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def add_tokenizer(writer: Any, architecture: str, vocab: int) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = [*special, "t", "1", "t1", "▁", *(f"w{number}" for number in range(vocab - 8))]
    writer.add_token_types([3] * 4 + [1] * (vocab - 4))
    writer.add_token_list(words)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    if architecture == "gemma3":
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(number) for number in range(vocab)])
        writer.add_unk_token_id(3)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(["t 1"])


def logits_of(path: Path) -> Tensor:
    model = load_model(path)
    pool = KVPool(model.spec, pages=7)
    part = RequestRows(ids=IDS, indices=range(len(IDS)), pages=range(7), logits=range(len(IDS)))
    return model.decoder.logits(model.decoder.forward(build_batch([part], page_size=16), pool).hidden)


def theirs(directory: Path, **options: Any) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quant"),
    [("Llama", Quant.Q8_0), ("Qwen2", Quant.F16), ("Qwen3", Quant.Q4_1), ("Gemma3", Quant.Q4_1)],
)
def test_logits_equal_those_of_transformers(
    family: str, quant: Quant, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    layers = {"num_hidden_layers": 7, "sliding_window": 30, "query_pre_attn_scalar": 256} if family == "Gemma3" else {}
    layers |= {"head_dim": 128} if family == "Qwen3" else {}  # transformers reads no other one
    directory, path = tiny_model(family, tie_word_embeddings=True, **layers), tmp_path / "tiny.gguf"
    write_gguf(path, directory, ARCHITECTURES[family], quant)
    got = logits_of(path)
    torch.testing.assert_close(got, theirs(tmp_path, gguf_file=path.name), rtol=0, atol=1e-4)
    original = theirs(directory)
    assert (got - original).norm() / original.norm() < {Quant.F16: 0.01, Quant.Q8_0: 0.1, Quant.Q4_1: 0.6}[quant]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "keys"),
    [
        ("Llama", {"rope_parameters": LLAMA3}, {}),
        ("Qwen2", {"rope_parameters": YARN}, {"type": "yarn", "factor": 4.0, "original_context_length": 256}),
        ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_hidden_layers": 7},
         {"type": "linear", "factor": 8.0}),
    ],
    ids=["llama3", "yarn", "linear"],
)  # fmt: skip
def test_the_scaling_of_a_rope_is_kept(
    family: str, settings: dict[str, Any], keys: dict[str, Any], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    directory, path = tiny_model(family, tie_word_embeddings=True, **settings), tmp_path / "tiny.gguf"
    write_gguf(path, directory, ARCHITECTURES[family], Quant.F32, keys)
    torch.testing.assert_close(logits_of(path), theirs(directory), rtol=0, atol=1e-4)


def test_divisors_of_another_rope_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    directory, path = tiny_model("Llama", rope_parameters=LLAMA3 | {"high_freq_factor": 3.0}), tmp_path / "tiny.gguf"
    write_gguf(path, directory, "llama", Quant.F32)
    with pytest.raises(ModelUnavailable, match=r"rope_freqs\.weight"):
        load_model(path)


def test_the_27b_gemma_scales_its_scores_by_its_width(tiny_gemma3_dir: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_gemma3_dir, "gemma3", Quant.F16)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    for layers, expected in ((62, 168), (48, 256)):
        config = Gemma3TextConfig(hidden_size=5376, num_attention_heads=32, num_hidden_layers=layers)
        restore_scaling(config, reader)
        assert config.query_pre_attn_scalar == expected
