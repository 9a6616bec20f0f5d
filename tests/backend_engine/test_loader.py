"""Loading: the files that a model may consist of, and clear errors for what is missing, damaged or not supported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine import KVPool, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.dtype_choice import preferred
from promptsluice.backend_engine.loader import cpu_has_bfloat16, fingerprint_of, resolve_dtype
from promptsluice.backend_engine.spec import spec_from_config
from promptsluice.prompt.errors import ConfigError, ModelUnavailable
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 64,
}


@pytest.fixture
def copy(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def last_logits(directory: Path) -> Tensor:
    model = load_model(directory)
    pool = KVPool(model.spec, pages=1)
    part = RequestRows(ids=[5, 6, 7], indices=[0, 1, 2], pages=[0], logits=[2])
    return model.decoder.logits(model.decoder.forward(build_batch([part], page_size=16), pool).hidden)


def test_spec_of_a_minimal_config_has_the_family_defaults() -> None:
    spec = spec_from_config({**LLAMA, "eos_token_id": [2, 7]})
    assert (spec.kv_heads, spec.head_dim, spec.max_context, spec.tied) == (6, 16, 2048, False)
    assert (spec.qkv_bias, spec.out_bias, spec.qk_norm, spec.eos_ids) == (False, False, False, (2, 7))
    qwen3 = spec_from_config({**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.group, qwen3.ropes[0].dim) == (128, True, 3, 128)
    by_type = spec_from_config({**LLAMA, "architectures": None, "model_type": "qwen2", "num_key_value_heads": 2})
    assert (by_type.family, by_type.qkv_bias) == ("Qwen2ForCausalLM", True)


def test_which_layers_have_a_window() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 64}
    assert spec_from_config(qwen).windows == (None, None)
    assert spec_from_config({**qwen, "use_sliding_window": True}).windows == (None, None)
    sliding = spec_from_config({**qwen, "use_sliding_window": True, "max_window_layers": 1})
    assert (sliding.windows, sliding.max_context) == ((None, 64), 32768)
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert spec_from_config(mistral).windows == (4096, 4096)
    assert spec_from_config({**mistral, "sliding_window": None}).windows == (None, None)


def test_gemma_configs_omit_nearly_everything() -> None:
    """As the one of a 4B checkpoint with images, whose language model is all that is read."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3"}
    spec = spec_from_config({**config, "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (spec.vocab, spec.heads, spec.kv_heads, spec.head_dim, spec.tied) == (262208, 8, 4, 256, True)
    assert (spec.scale, spec.embedding_scale, spec.eos_ids) == (1 / 16, 2560**0.5, (1, 106))
    assert spec.windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert [(rope.theta, rope.factor) for rope in spec.ropes[4:6]] == [(1e4, 1.0), (1e6, 8.0)]
    assert (spec.activation, spec.norm_offset, spec.sandwich, spec.max_context) == ("gelu_tanh", True, True, 131072)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": "wide"}, "sliding_window"),
        ({"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 2, "no_rope_layers": [1]}, "no_rope_layers"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3}, "text_config"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "num_attention_heads": 8, "sliding_window_pattern": 0},
            "sliding_window_pattern",
        ),
    ],
)
def test_configs_that_are_not_supported(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        spec_from_config({**LLAMA, **changes})


def test_sharded_weights_are_the_same_model(copy: Path, tiny_llama_dir: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, copy / shard)
    (copy / "model.safetensors").unlink()
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for shard in shards for name in shards[shard]}}))
    torch.testing.assert_close(last_logits(copy), last_logits(tiny_llama_dir), rtol=0, atol=0)
    (copy / "b.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"b\.safetensors"):
        load_model(copy)


def test_generation_config_decides_what_ends_a_generation(copy: Path) -> None:
    assert load_model(copy).spec.eos_ids == (2,)
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 9]}', encoding="utf-8")
    assert load_model(copy).spec.eos_ids == (2, 9)


def test_gguf_is_the_same_model(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    import gguf

    directory = tiny_model("Qwen2", tie_word_embeddings=True)
    path = tmp_path / "tiny.gguf"
    _write_gguf(gguf, path, load_file(directory / "model.safetensors"))
    model, pool_rows = load_model(path), RequestRows(ids=[5, 6, 7], indices=[0, 1, 2], pages=[0], logits=[2])
    pool = KVPool(model.spec, pages=1)
    hidden = model.decoder.forward(build_batch([pool_rows], page_size=16), pool).hidden
    theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    torch.testing.assert_close(model.decoder.logits(hidden), expected, rtol=0, atol=1e-4)
    assert model.tokenizer is not None


def _write_gguf(gguf: Any, path: Path, tensors: dict[str, Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(4)
    writer.add_context_length(1024)
    writer.add_embedding_length(tensors["model.norm.weight"].shape[0])
    writer.add_feed_forward_length(tensors["model.layers.0.mlp.up_proj.weight"].shape[0])
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", *(f"t{number}" for number in range(510))])
    writer.add_token_types([1] * 511 + [3])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(511)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 4)
    for name, tensor in tensors.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_fingerprint_follows_weights_config_and_dtype(copy: Path, tiny_llama_dir: Path) -> None:
    original = load_model(tiny_llama_dir).fingerprint
    assert load_model(copy).fingerprint == original
    edit(copy / "config.json", rms_norm_eps=1e-4)
    assert load_model(copy).fingerprint != original
    shutil.copy(tiny_llama_dir / "config.json", copy / "config.json")
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, copy / "model.safetensors")
    assert load_model(copy).fingerprint != original


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM kernels here"
)
def test_quantized_weights_are_near_the_exact_ones(tiny_llama_dir: Path) -> None:
    exact, rounded = load_model(tiny_llama_dir, dtype="float32"), load_model(tiny_llama_dir, quantize="int8")
    assert rounded.fingerprint != exact.fingerprint and rounded.decoder.dtype == torch.float32
    part = RequestRows(ids=range(10, 50), indices=range(40), pages=[2, 0, 1], logits=range(40))
    batch = build_batch([part], page_size=16)
    logits = [
        model.decoder.logits(model.decoder.forward(batch, KVPool(model.spec, pages=3)).hidden)
        for model in (exact, rounded)
    ]
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.1


def test_what_is_missing_is_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such model directory"):
        load_model(tmp_path / "nowhere")
    for odd in ("~\0", "~no-such-user/x", "/" + "x" * 5000):
        with pytest.raises(ModelUnavailable, match="cannot be used as a path"):
            load_model(odd)
    with pytest.raises(ModelUnavailable, match="neither"):
        load_model(copy / "config.json")
    tensors = load_file(copy / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copy)
    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": lost[:-1]}, copy / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"up_proj\.weight is \[127, 96\], not \[128, 96\]"):
        load_model(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="safetensors"):
        load_model(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        load_model(copy)


def test_what_is_damaged_is_named(copy: Path, tmp_path: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelUnavailable, match="damaged or cut short"):
        load_model(copy)
    (copy / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        load_model(copy)
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF but not really")
    with pytest.raises(ModelUnavailable, match=r"broken\.gguf"):
        load_model(gguf)


def test_prequantized_weights_are_refused(copy: Path) -> None:
    edit(copy / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="gptq"):
        load_model(copy)


def test_dtypes() -> None:
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("fastest", "cuda") == torch.bfloat16
    assert resolve_dtype("float16", "cuda") == torch.float16
    with pytest.raises(ConfigError, match="bfloat16"):
        resolve_dtype("int3", "cpu")
    with pytest.raises(ConfigError, match="float16"):
        resolve_dtype("float16", "cpu")


def test_the_fastest_dtype_is_measured_once_and_must_win_clearly() -> None:
    assert preferred(float32=2.0, bfloat16=1.0) == torch.bfloat16
    assert preferred(float32=1.0, bfloat16=0.9) == torch.float32
    assert preferred(float32=1.0, bfloat16=40.0) == torch.float32
    measured = resolve_dtype("fastest", "cpu")
    assert measured == torch.float32 or (measured == torch.bfloat16 and cpu_has_bfloat16())
    assert all(resolve_dtype("fastest", "cpu") == measured for _ in range(20))


def test_bfloat16_where_the_cpu_has_it(tiny_llama_dir: Path) -> None:
    if not cpu_has_bfloat16():
        with pytest.raises(ConfigError, match="bfloat16"):
            load_model(tiny_llama_dir, dtype="bfloat16")
        return
    model = load_model(tiny_llama_dir, dtype="bfloat16")
    assert model.fingerprint != load_model(tiny_llama_dir).fingerprint
    pool = KVPool(model.spec, pages=3, dtype=torch.bfloat16)
    ids = list(range(10, 50))
    part = RequestRows(ids=ids, indices=range(40), pages=[2, 0, 1], logits=range(40))
    got = model.decoder.logits(model.decoder.forward(build_batch([part], page_size=16), pool).hidden)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    error = (got - expected).norm() / expected.norm()
    assert error < 0.05, error


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_fingerprint_is_known_without_loading(tiny_llama_dir: Path, quantize: Any) -> None:
    loaded = load_model(tiny_llama_dir, dtype="float32", quantize=quantize)
    assert fingerprint_of(tiny_llama_dir, dtype="float32", quantize=quantize) == loaded.fingerprint
