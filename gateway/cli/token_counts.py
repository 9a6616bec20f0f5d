"""Token counts for dry runs: by the backend's own tokenizer when its files are here, else estimates; it says which."""

from collections.abc import Callable
from pathlib import Path

from ...backend_engine.hub import ModelHub, default_root
from ...policies import PolicySet
from ...prompt import PromptsluiceError
from ..backends.base import estimated_tokens


class TokenCounts:
    """Counters by backend. Reads tokenizer.json only: no torch, no network."""

    def __init__(self, policies: PolicySet) -> None:
        self._policies = policies
        self._hub = ModelHub(policies.models_cache or default_root())
        self._counts: dict[str, tuple[Callable[[str], int], str]] = {}

    def of(self, backend: str) -> Callable[[str], int]:
        """The counter for a backend's prompts."""
        return self._counter(backend)[0]

    def source(self, backend: str) -> str:
        """Where the counts come from, in words."""
        return self._counter(backend)[1]

    def _counter(self, backend: str) -> tuple[Callable[[str], int], str]:
        if backend not in self._counts:
            spec = self._policies.backends[backend]
            self._counts[backend] = self._make(spec.model if spec.kind == "embedded" else spec.tokenizer)
        return self._counts[backend]

    def _make(self, model: str | None) -> tuple[Callable[[str], int], str]:
        file = self._tokenizer_file(model) if model else None
        if file is None:
            return (
                estimated_tokens,
                f"estimates ({f'{model} is not here' if model else 'the backend names no tokenizer'})",
            )
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        # What looks like a special token in a prompt is plain text.
        tokenizer.encode_special_tokens = True
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False)), f"counted by {model}'s tokenizer"

    def _tokenizer_file(self, model: str) -> Path | None:
        try:
            file = self._hub.resolve(model) / "tokenizer.json"
        except PromptsluiceError:
            return None
        return file if file.is_file() else None
