"""A Llama checkpoint in Hugging Face layout as a float16 GGUF file without a tokenizer, for llama.cpp to run on ids."""

from pathlib import Path

import gguf
import torch
from promptsluice.backend_engine.spec import ModelSpec
from promptsluice.backend_engine.weights import SafetensorsSource


def write_f16_gguf(directory: Path, spec: ModelSpec, path: Path) -> Path:
    """Matrices become float16, norms stay float32. Only for plain Llama models: no biases, default rope."""
    if spec.family != "LlamaForCausalLM" or spec.qkv_bias or spec.mlp_bias:
        raise SystemExit(f"{directory}: only plain Llama models are written as GGUF, this is {spec.family}")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.ropes[0].theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.layers)
    source = SafetensorsSource(directory)
    for name in source.shapes:
        tensor, target = source.get(name).float(), names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, spec.heads if "q_proj" in name else spec.kv_heads)
        writer.add_tensor(target, (tensor.half() if tensor.ndim == 2 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs, not halves of a head."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
