"""What the one decoder needs to know about a model, read from a Hugging Face config. A family is an entry here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..prompt.errors import ConfigError
from .rope import RopeSpec, rope_from_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder-only transformer with RMSNorm, rotary positions and a gated SiLU feed-forward.

    `max_context` is the number of tokens for which the arithmetic is exact: a sliding window or a rope type whose
    angles depend on the length lowers it below the model's own claim.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    max_context: int
    eos_ids: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from Llama. The functions read a config; a config omits what equals its family's default."""

    qkv_bias: Callable[[Mapping[str, Any]], bool]
    out_bias: Callable[[Mapping[str, Any]], bool] = lambda config: False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden / heads
    kv_heads: int | None = None  # None: as many as heads
    max_context: int = 2048
    window: Callable[[Mapping[str, Any]], int | None] = lambda config: None


def _attention_bias(config: Mapping[str, Any]) -> bool:
    return bool(config.get("attention_bias", False))


def _qwen_window(config: Mapping[str, Any]) -> int | None:
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=_attention_bias, out_bias=_attention_bias),
    "MistralForCausalLM": Family(
        qkv_bias=lambda config: False,
        kv_heads=8,
        max_context=131072,
        window=lambda config: config.get("sliding_window", 4096),
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=lambda config: True, kv_heads=32, max_context=32768, window=_qwen_window
    ),
    "Qwen3ForCausalLM": Family(
        qkv_bias=_attention_bias,
        out_bias=_attention_bias,
        qk_norm=True,
        head_dim=128,
        kv_heads=32,
        max_context=32768,
        window=_qwen_window,
    ),
}  # fmt: skip

_BY_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`. Raises ConfigError that names what is missing or not supported."""
    name = _architecture(config)
    family = FAMILIES[name]
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or family.kv_heads or heads
    head_dim = config.get("head_dim") or family.head_dim or hidden // heads
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported (only silu)")
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    claimed = int(config.get("max_position_embeddings") or family.max_context)
    rope = rope_from_config(config, head_dim=head_dim, max_positions=claimed)
    return ModelSpec(
        family=name,
        vocab=_size(config, "vocab_size"),
        hidden=hidden,
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_size(config, "intermediate_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias(config),
        out_bias=family.out_bias(config),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=rope,
        max_context=min(claimed, family.window(config) or claimed),
        eos_ids=eos_ids(config),
    )


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a generation, from a config or a generation config; both write one id, a list or null."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _architecture(config: Mapping[str, Any]) -> str:
    named = [*(config.get("architectures") or ()), _BY_MODEL_TYPE.get(str(config.get("model_type")))]
    for name in named:
        if name in FAMILIES:
            return name
    shown = ", ".join(str(name) for name in config.get("architectures") or [config.get("model_type")])
    raise ConfigError(f"config.json: architecture {shown} is not supported; supported are {', '.join(FAMILIES)}")


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value
