"""The policies that every installation has; a policy file may extend them, or replace one by defining its name."""

from types import MappingProxyType
from typing import Any

_LOSSLESS = {"use": "lossless"}
_TEXT = ("document", "history", "tool_result")

PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "off": {
            "description": "nothing is done: the bytes go out as they came; the engine's prefix cache stays",
        },
        "lossless": {
            "description": "white space, JSON spacing and exact repeats of blocks and lines; nothing is lost",
            "compress": (_LOSSLESS,),
            "min_prompt_tokens": 64,
        },
        "balanced": {
            "description": "lossless, and of large documents, history and tool results the sentences that matter",
            "compress": (
                _LOSSLESS,
                {"use": "extractive", "kinds": _TEXT, "target_rate": 0.65, "min_tokens": 160},
            ),
            "quality": {"max_removed": 0.5},
            "min_prompt_tokens": 384,
        },
        "aggressive": {
            "description": "balanced at a higher rate, and tokens that a model would have guessed are dropped",
            "compress": (
                _LOSSLESS,
                {"use": "extractive", "kinds": _TEXT, "target_rate": 0.5, "min_tokens": 128},
                {"use": "perplexity", "kinds": _TEXT, "target_rate": 0.7, "min_tokens": 96},
            ),
            "quality": {"max_removed": 0.75},
            # Pruning under the answering model costs about a prefill: it is for those who want fewer tokens anyway.
            "token_value_ms": 20.0,
            "min_prompt_tokens": 256,
        },
        "rag": {
            "description": "lossless, chunks of a collection are added and their stored KV is blended in",
            "retrieve": {"collection": "docs", "top_k": 4, "max_tokens": 2048},
            "compress": (_LOSSLESS,),
            "reuse": {"mode": "blend", "ratio": "auto"},
        },
    }
)
"""Name to the fields that differ from a policy's defaults."""
