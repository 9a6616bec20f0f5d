"""Compressors that a policy file names: do they exist, and do they take these options? Runs none of them."""

from collections.abc import Iterator

from ..compressors.registry import create, names
from ..prompt import BadRequest
from .complaints import nearest
from .decide import compressor_options
from .schema import PolicyFile
from .yamltree import Path

_OWN_FIELDS = ("use", "kinds", "target_rate", "min_tokens")


def check_compressors(file: PolicyFile) -> Iterator[tuple[Path, str]]:
    """(path, message) for each compressor or option that cannot be had."""
    for name, policy in file.policies.items():
        for i, spec in enumerate(policy.compress):
            path: Path = ("policies", name, "compress", i)
            if spec.use not in names():
                known = ", ".join(names())
                yield (
                    (*path, "use"),
                    f"unknown compressor {spec.use[:60]!r}; nearest: {nearest(spec.use, names())!r} (of {known})",
                )
                continue
            backend = spec.options.get("backend") if spec.use == "summarize" else None
            if backend and backend not in file.backends:
                known = ", ".join(file.backends)
                yield (*path, "options", "backend"), f"unknown backend {str(backend)[:60]!r} (of {known})"
            try:
                create(spec.use, compressor_options(spec))
            except BadRequest as error:
                at = (error.param,) if error.param in _OWN_FIELDS else ("options", error.param or "")
                yield (*path, *at), f"compressor {spec.use}: {error.message}"
