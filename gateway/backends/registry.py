"""Backends by their kind in the policy file. Lazy: an upstream-only gateway never imports the engine."""

from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING

from ...policies import PolicySet
from ...policies.schema import EmbeddedBackend, OpenAIBackend
from ..rooms import Rooms
from .base import Backend, counted_tokens, estimated_tokens

if TYPE_CHECKING:
    from ...backend_engine import ChatTokenizer


def backends_of(policy_set: PolicySet, rooms: Rooms, *, replaced: Collection[str] = ()) -> dict[str, Backend]:
    """One backend for each entry of the file but the `replaced` ones; none is started."""
    return {name: _make(policy_set, rooms, name) for name in policy_set.backends if name not in replaced}


def _make(policy_set: PolicySet, rooms: Rooms, name: str) -> Backend:
    spec = policy_set.backends[name]
    if isinstance(spec, EmbeddedBackend):
        from .embedded import EmbeddedBackend as Engine

        return Engine(
            name,
            spec,
            path=lambda: rooms.model_path(spec.model),
            store=rooms.store,
            salts=rooms.salts,
            prefixes=policy_set.prefix_cache_path(spec),
            standings=policy_set.kv_cache_path if policy_set.kv_cache.disk else None,
            chunk_dtype=policy_set.kv_cache.chunk_dtype,
        )
    from .openai import UpstreamBackend

    return UpstreamBackend(name, spec, api_key=policy_set.upstream_key(name), count=_counter(spec, rooms))


def _counter(spec: OpenAIBackend, rooms: Rooms) -> Callable[[str], int]:
    return estimated_tokens if spec.tokenizer is None else _Counter(rooms, spec.tokenizer).count


class _Counter:
    """Counts with a tokenizer that is loaded when it is first needed, in a worker thread."""

    def __init__(self, rooms: Rooms, name: str) -> None:
        self._rooms = rooms
        self._name = name

    @cached_property
    def _tokenizer(self) -> "ChatTokenizer":
        from ...backend_engine import ChatTokenizer

        return ChatTokenizer(self._rooms.model_path(self._name))

    def count(self, text: str) -> int:
        return counted_tokens(text, self._tokenizer.count)
