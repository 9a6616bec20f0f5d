"""The model families: how each one's Hugging Face config differs from Llama's. A family is an entry here.

The functions read a config that was completed with its family's defaults, because a config omits what equals them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..prompt.errors import ConfigError

Config = Mapping[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


def _attention_bias(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


def _no(config: Config) -> bool:
    return False


def size(config: Config, key: str) -> int:
    """A number that must be there. Raises ConfigError otherwise."""
    value = config.get(key)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _all_full(config: Config) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def _same_rope(config: Config, kind: str) -> Config:
    return config


def _mistral_kinds(config: Config) -> list[str]:
    return [SLIDING] * config["num_hidden_layers"]


def _qwen_kinds(config: Config) -> list[str]:
    first = config["max_window_layers"] if config.get("use_sliding_window") else config["num_hidden_layers"]
    return [SLIDING if layer >= first else FULL for layer in range(config["num_hidden_layers"])]


def _smollm3_ropes(config: Config) -> list[bool]:
    interval, layers = size(config, "no_rope_layer_interval"), config["num_hidden_layers"]
    # In spite of its name, 1 is a layer with rope.
    given = config.get("no_rope_layers") or [(layer + 1) % interval for layer in range(layers)]
    if len(given) < layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(given)} entries for {layers} layers")
    return [bool(roped) for roped in given[:layers]]


def _smollm3_kinds(config: Config) -> list[str]:
    slides = bool(config.get("use_sliding_window"))
    return [SLIDING if slides and not roped else FULL for roped in _smollm3_ropes(config)]


def _gemma_kinds(config: Config) -> list[str]:
    pattern = size(config, "sliding_window_pattern")
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(config["num_hidden_layers"])]


def _gemma_rope(config: Config, kind: str) -> Config:
    """Two embeddings: a short one in sliding layers, a long one, which alone is scaled, in the others."""
    params = (config.get("rope_parameters") or {}).get(kind) or {}
    if kind == SLIDING:
        return {"rope_parameters": {"rope_theta": config["rope_local_base_freq"], **params}}
    theta = {"rope_theta": config["rope_theta"]}
    return {"rope_parameters": {**theta, **params}, "rope_scaling": config.get("rope_scaling")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from Llama.

    `kinds` gives the layers' types where the config has no `layer_types`; `rope` the config that a layer type's rope
    is read from; `ropes` which layers have one. `sandwich` norms stand behind attention and feed-forward too;
    `norm_offset` norms multiply by 1 + weight. `nested` is the key of the language model's config. Activations of a
    family without `float16` exceed its range.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: Callable[[Config], bool] = _no
    out_bias: Callable[[Config], bool] = _no
    qk_norm: bool = False
    norm_offset: bool = False
    sandwich: bool = False
    scaled_embedding: bool = False
    kinds: Callable[[Config], list[str]] = _all_full
    rope: Callable[[Config, str], Config] = _same_rope
    ropes: Callable[[Config], list[bool]] = lambda config: [True] * config["num_hidden_layers"]
    nested: str | None = None
    float16: bool = True


def _gemma3(model_type: str, *, nested: str | None = None) -> Family:
    return Family(
        model_type=model_type,
        nested=nested,
        float16=False,
        qkv_bias=_attention_bias,
        out_bias=_attention_bias,
        qk_norm=True,
        norm_offset=True,
        sandwich=True,
        scaled_embedding=True,
        kinds=_gemma_kinds,
        rope=_gemma_rope,
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_type="llama", qkv_bias=_attention_bias, out_bias=_attention_bias),
    "MistralForCausalLM": Family(
        model_type="mistral",
        kinds=_mistral_kinds,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias=lambda config: True,
        kinds=_qwen_kinds,
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qkv_bias=_attention_bias,
        out_bias=_attention_bias,
        qk_norm=True,
        kinds=_qwen_kinds,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        qkv_bias=_attention_bias,
        out_bias=_attention_bias,
        kinds=_smollm3_kinds,
        ropes=_smollm3_ropes,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
    ),
    "Gemma3ForCausalLM": _gemma3("gemma3_text"),
    "Gemma3ForConditionalGeneration": _gemma3("gemma3", nested="text_config"),
}
