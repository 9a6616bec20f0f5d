"""Answers that were given, kept to be given again: by everything that a request says, within bytes and a time."""

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..prompt import Kind, Prompt
from .backends.base import Call

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

# How an answer is delivered, not what it says.
_FRAMING = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Key:
    """`rest` is a digest of all that a request says but its question: who asks, policy and backend as they are, model,
    messages, tools, images, every field. `question` is empty where it cannot be told apart from the rest.
    """

    rest: str
    question: str


def key_of(call: Call, *, backend: str) -> Key:
    """Of a prompt as it will be sent: with what was retrieved for it, after its policy has rewritten it."""
    body = {name: value for name, value in call.prompt.body.items() if name not in _FRAMING}
    question, messages = _apart(call.prompt)
    said = [call.tenant, backend, call.model, call.policy.model_dump_json(), {**body, "messages": messages}]
    digest = hashlib.sha256(json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
    return Key(digest, question)


def _apart(prompt: Prompt) -> tuple[str, Any]:
    """The question, where it is a text of its own, and the messages without it; else all of them as they are."""
    asked = [segment for segment in prompt.segments if segment.kind is Kind.QUESTION and segment.text]
    messages: list[Any] = prompt.messages
    if len(asked) != 1 or sum(segment.path == asked[0].path for segment in prompt.segments) != 1:
        return "", messages
    path = asked[0].path
    place = prompt.rendered_index(asked[0].message)
    fresh: Any = deepcopy(dict(messages[place]))
    holder = fresh
    for step in path[2:-1]:
        holder = holder[step]
    holder[path[-1]] = None
    return asked[0].text, [*messages[:place], fresh, *messages[place + 1 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    body: bytes
    until: float
    vector: "Vector | None"

    @property
    def size(self) -> int:
        return len(self.body) + (0 if self.vector is None else self.vector.nbytes)


class AnswerCache:
    """Whole chat completions by their keys, at most `limit` bytes of them; what was used longest ago goes first.

    Any thread. `clock` is in seconds.
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._alike: dict[str, set[Key]] = {}
        self._size = 0

    def stats(self) -> dict[str, int]:
        """How many answers it holds, of how many bytes, and how many bytes it may hold."""
        with self._lock:
            return {"entries": len(self._kept), "bytes": self._size, "budget": self._limit}

    def get(self, key: Key) -> bytes | None:
        """The answer to the very same request."""
        with self._lock:
            return self._fresh(key)

    def nearest(self, key: Key, vector: "Vector", *, similarity: float) -> bytes | None:
        """The answer to the question that is most like this one, if its cosine is `similarity` or more; all else is
        equal. `vector` is [dim], of length 1.
        """
        with self._lock:
            near: list[tuple[float, Key]] = []
            for other in self._alike.get(key.rest, ()):
                known = self._kept[other].vector
                if known is not None and (cosine := float(known @ vector)) >= similarity:
                    near.append((cosine, other))
            near.sort(key=lambda pair: pair[0], reverse=True)
            return next((found for _, other in near if (found := self._fresh(other)) is not None), None)

    def put(self, key: Key, body: bytes, *, ttl: float, vector: "Vector | None" = None) -> None:
        """Keep an answer for `ttl` seconds."""
        fresh = _Kept(body=body, until=self._clock() + ttl, vector=vector)
        if fresh.size > self._limit:
            return
        with self._lock:
            self._drop(key)
            self._kept[key] = fresh
            self._alike.setdefault(key.rest, set()).add(key)
            self._size += fresh.size
            while self._size > self._limit:
                self._drop(next(iter(self._kept)))

    def _fresh(self, key: Key) -> bytes | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.until <= self._clock():
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return kept.body

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._size -= kept.size
            alike = self._alike[key.rest]
            alike.discard(key)
            if not alike:
                del self._alike[key.rest]
