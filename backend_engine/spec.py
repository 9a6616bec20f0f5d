"""What the one decoder needs to know about a model, read from a Hugging Face config. Families are in families.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..prompt.errors import ConfigError
from .families import FAMILIES, FULL, SLIDING, Family, size
from .rope import NONE, RopeSpec, rope_from_config

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of gates in configs, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder-only transformer with RMSNorm, rotary positions and a gated feed-forward.

    `max_context` is the number of tokens for which the arithmetic is exact: a rope type whose angles depend on the
    length lowers it below the model's own claim. `ropes` and `windows` have an entry for each layer; a window is how
    many keys a row sees at most, itself included. With `norm_offset` norms multiply by 1 + their weight; with
    `sandwich` what attention and feed-forward add is normed too.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    activation: str
    norm_eps: float
    norm_offset: bool
    sandwich: bool
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    scale: float  # factor of the attention scores
    embedding_scale: float
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    max_context: int
    eos_ids: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`. Raises ConfigError that names what is missing or not supported."""
    name = _architecture(config)
    family = FAMILIES[name]
    config = _completed(config, family)
    _refuse_what_is_not_computed(config)
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    claimed, layers = int(config.get("max_position_embeddings") or 2048), size(config, "num_hidden_layers")
    kinds = _kinds(config, family)
    return ModelSpec(
        family=name,
        vocab=size(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=size(config, "intermediate_size"),
        activation=_activation(config),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        norm_offset=family.norm_offset,
        sandwich=family.sandwich,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias(config),
        out_bias=family.out_bias(config),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        ropes=_ropes(config, family, kinds, head_dim=head_dim, max_positions=claimed),
        windows=_windows(config, kinds),
        max_context=claimed,
        eos_ids=eos_ids(config),
    )


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a generation, from a config or a generation config; both write one id, a list or null."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _architecture(config: Mapping[str, Any]) -> str:
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    named = [*(config.get("architectures") or ()), by_type.get(str(config.get("model_type")))]
    for name in named:
        if name in FAMILIES:
            return name
    shown = ", ".join(str(name) for name in config.get("architectures") or [config.get("model_type")])
    raise ConfigError(f"config.json: architecture {shown} is not supported; supported are {', '.join(FAMILIES)}")


def _completed(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The language model's config with its family's defaults; what ends a generation may stand beside it."""
    if family.nested is None:
        return {**family.defaults, **config}
    nested = config.get(family.nested) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"config.json: {family.nested} must be an object")
    outer = {key: config[key] for key in ("eos_token_id", "tie_word_embeddings") if config.get(key) is not None}
    return {**family.defaults, **nested, **outer}


def _refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ConfigError(f"config.json: {key} {config[key]} is not supported (only null)")


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ConfigError(f"config.json: hidden_act {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _kinds(config: Mapping[str, Any], family: Family) -> list[str]:
    """The type of each layer, FULL or SLIDING."""
    kinds, layers = config.get("layer_types") or family.kinds(config), config["num_hidden_layers"]
    if unknown := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
        raise ConfigError(f"config.json: layer type {unknown[0]!r} is not supported; known: {FULL}, {SLIDING}")
    if len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    return list(kinds)


def _windows(config: Mapping[str, Any], kinds: list[str]) -> tuple[int | None, ...]:
    if SLIDING not in kinds or config.get("sliding_window") is None:
        return (None,) * len(kinds)
    window = size(config, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(
    config: Mapping[str, Any], family: Family, kinds: list[str], *, head_dim: int, max_positions: int
) -> tuple[RopeSpec, ...]:
    made = {
        kind: rope_from_config(family.rope(config, kind), head_dim=head_dim, max_positions=max_positions)
        for kind in dict.fromkeys(kinds)
    }
    return tuple(
        made[kind] if roped else replace(made[kind], kind=NONE)
        for kind, roped in zip(kinds, family.ropes(config), strict=True)
    )
