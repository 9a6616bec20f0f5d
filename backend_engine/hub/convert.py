"""GGUF to Hugging Face layout: dequantized by transformers to float32, so that every engine reads the same numbers.

float32 keeps the dequantized values exactly (a block's scale times a small integer does not fit bfloat16). It costs
four bytes a parameter in memory and on disk.
"""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...prompt.errors import ModelUnavailable

# GGUF names the pre-tokenizer instead of carrying it, and transformers rebuilds plain byte-level BPE for all of them.
# Under `smollm` every digit stands alone before the byte-level split, which also changes how white space before a
# number falls: "\n\n1" is two tokens, not three.
_DIGITS_APART = frozenset({"smollm"})
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The one Gemma 3 whose scores are not scaled by its head size; files do not say so, its number of layers does.
_GEMMA_27B_LAYERS = 62


def convert_gguf(gguf: Path, into: Path) -> str:
    """Write config.json, generation_config.json, model.safetensors (float32) and tokenizer files of a GGUF file.

    Returns the description of the weights, such as `Q4_1 dequantized to float32`. Imports torch and transformers.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    reader = GGUFReader(gguf)
    with _no_bars():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        _restore_pretokenizer(tokenizer, reader)
        tokenizer.save_pretrained(into)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    restore_scaling(model.config, reader)
    _save_weights(model, into / "model.safetensors")
    _save_configs(model, into)
    return f"{_quantization(reader)} dequantized to float32"


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' own bars off the terminal; the pull shows its progress itself."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _save_weights(model: Any, path: Path) -> None:
    """By hand, as save_pretrained refuses a model that came from a quantized file. Tied weights are stored once."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tied = model.config.tie_word_embeddings
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    if tied:
        weights.pop("lm_head.weight", None)
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from error
        raise
    path.chmod(0o644)


def _save_configs(model: Any, into: Path) -> None:
    config = {key: value for key, value in model.config.to_diff_dict().items() if key != "quantization_config"}
    config["architectures"] = [type(model).__name__]
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    (into / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    model.generation_config.save_pretrained(into)


def restore_scaling(config: Any, reader: Any) -> None:
    """Put the rope's scaling and the scores' factor, which transformers' reader leaves out, into the config."""
    if scaling := _rope_scaling(config, reader):
        config.rope_parameters.get("full_attention", config.rope_parameters).update(scaling)
    if config.model_type == "gemma3_text" and config.num_hidden_layers == _GEMMA_27B_LAYERS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _rope_scaling(config: Any, reader: Any) -> dict[str, Any] | None:
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return _llama3_scaling(config, tensor.data)
    prefix = f"{_field(reader, 'general.architecture')}.rope.scaling"
    kind = _field(reader, f"{prefix}.type")
    if kind in (None, "none"):
        return None
    found: dict[str, Any] = {"rope_type": kind, "factor": _field(reader, f"{prefix}.factor")}
    if original := _field(reader, f"{prefix}.original_context_length"):
        found["original_max_position_embeddings"] = original
    return found


def _llama3_scaling(config: Any, divisors: Any) -> dict[str, Any]:
    """The settings behind a file's divisors of the frequencies: of all Llama 3 models but for the factor the same."""
    import torch

    from ..rope import INVERSE_FREQUENCIES, rope_from_config

    scaling = {**_LLAMA3, "factor": float(divisors.max())}
    params = {**config.rope_parameters, **scaling}
    spec = rope_from_config({"rope_parameters": params}, head_dim=config.head_dim, max_positions=1)
    expected = INVERSE_FREQUENCIES["default"](spec) / INVERSE_FREQUENCIES["llama3"](spec)
    if not torch.allclose(torch.from_numpy(divisors.copy()), expected, rtol=1e-4):
        raise ModelUnavailable("rope_freqs.weight holds divisors of frequencies that are not Llama 3's")
    return scaling


def _restore_pretokenizer(tokenizer: Any, reader: Any) -> None:
    from tokenizers import pre_tokenizers

    if _field(reader, "tokenizer.ggml.pre") in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _quantization(reader: Any) -> str:
    """The file's main quantization by its GGUF name, `Q4_1`."""
    from gguf import LlamaFileType

    kind = _field(reader, "general.file_type")
    return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_") if kind is not None else "GGUF"


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return field.contents() if field is not None else None
