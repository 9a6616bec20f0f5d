"""The ways that plan.py compares: what policy each is, and the gateway's policy file around it. Used by plan.py."""

import argparse
from pathlib import Path

OFF, PLANNER, CAREFUL = "off", "planner", "planner-blend"
_TEXT = "kinds: [document, history, tool_result]"
_METHODS = {
    "lossless": "{use: lossless}",
    "extractive": f"{{use: extractive, {_TEXT}, target_rate: 0.5, min_tokens: 64}}",
    "perplexity": f"{{use: perplexity, {_TEXT}, target_rate: 0.5, min_tokens: 64}}",
    "summarize": f"{{use: summarize, {_TEXT}, min_tokens: 64, options: {{backend: local, model: local, timeout: 60}}}}",
}
_KV = ("reuse", "blend")
PLANNERS = {CAREFUL: "blend", PLANNER: "reuse"}
"""What each does with stored KV."""
WAYS = (OFF, *_METHODS, *_KV, *PLANNERS)
_ALWAYS = "token_value_ms: 1000000, rewrite_timeout: 600"


def policy_of(way: str) -> str:
    """The policy of a way, in YAML."""
    quality = "quality: {sample: 0}"
    if way == OFF:
        return "{extends: off}"
    if way in _METHODS:
        return f"{{compress: [{_METHODS[way]}], {quality}, {_ALWAYS}}}"
    if way in _KV:
        return f"{{reuse: {{mode: {way}}}, {quality}}}"
    return f"{{compress: [{', '.join(_METHODS.values())}], reuse: {{mode: {PLANNERS[way]}}}, {quality}}}"


def policy_file(way: str, *, root: Path, options: argparse.Namespace) -> str:
    """A gateway for one way."""
    return (
        f"version: 1\ndefault_policy: way\npolicies: {{way: {policy_of(way)}}}\n"
        f"server: {{log: {{format: json}}, ui: false}}\n"
        f"kv_cache: {{path: {root / way}, disk: 0, ram: 1GiB}}\ncollections: {{root: {root / way / 'collections'}}}\n"
        f"backends: {{local: {{kind: embedded, model: {options.model}, served_name: local, dtype: {options.dtype}, "
        f"quantize: {options.quantize}, kv_memory: {options.kv_memory}, threads: {options.threads}}}}}\n"
    )
