"""The embedded engine with everything around it: model, tokenizer, service thread, chunk reuse. Blocking throughout.

Imports torch, so that only a worker thread of a gateway with an embedded backend ever imports this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer

from ...backend_engine.chat import ChunkMark
from ...backend_engine.engine import Engine
from ...backend_engine.loader import LoadedModel, load_model
from ...backend_engine.options import EngineOptions
from ...backend_engine.service import EngineService
from ...backend_engine.tokenizer import ChatTokenizer, Encoded
from ...backend_engine.types import GenerationRequest, SamplingParams
from ...compressors.context import TokenScore
from ...kv_reuse.blend import ReusePlan, Reuser
from ...kv_reuse.selectors import make_selector
from ...kv_reuse.store import ChunkStore
from ...policies.schema import EmbeddedBackend, ReuseSpec
from ...prompt import BadRequest, ConfigError, ContextTooLong, Prompt

_WINDOW = 1024  # tokens that are scored in one piece
_OVERLAP = 64  # of these, tokens that only give context
_NORMALIZED = 4  # characters that a normalizer (NFC, NFKC) makes one of, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoom:
    """One loaded model, ready to answer. `limit`: tokens that prompt and answer may have together."""

    model: LoadedModel
    tokenizer: ChatTokenizer
    service: EngineService
    reuser: Reuser
    limit: int
    _plain: Tokenizer

    @classmethod
    def open(cls, spec: EmbeddedBackend, *, path: Path, store: ChunkStore) -> Self:
        """Load the model and start its thread; takes seconds. ModelUnavailable or ConfigError where that is
        impossible.
        """
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        device = spec.device if spec.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(path, dtype=spec.dtype, device=device)
        if model.tokenizer is None:
            raise ConfigError(f"the model {spec.model} has no tokenizer; it cannot answer chat messages")
        options = EngineOptions(
            kv_bytes=spec.kv_memory, step_tokens=max(spec.step_tokens, spec.max_running), max_running=spec.max_running
        )
        engine = Engine(model, options=options)
        service = EngineService(engine, max_waiting=spec.queue)
        service.start()
        plain = Tokenizer.from_str(model.tokenizer.backend.to_str())
        plain.encode_special_tokens = True
        return cls(
            model=model,
            tokenizer=model.tokenizer,
            service=service,
            reuser=Reuser(service, store, spec=model.spec, fingerprint=model.fingerprint, device=device),
            limit=min(engine.max_tokens, spec.context_limit or engine.max_tokens),
            _plain=plain,
        )

    def encode(self, prompt: Prompt, *, chunks: frozenset[int], with_tools: bool) -> Encoded:
        """Ids of the chat; the segments `chunks` are tokenized on their own and come back as spans.

        ContextTooLong for what is hopelessly long, before minutes are spent on tokenizing it.
        """
        fewest = prompt.chars // (self.tokenizer.longest_token * _NORMALIZED)
        if fewest > self.limit:
            raise ContextTooLong(
                f"the prompt has more than {fewest} tokens, but this model takes {self.limit} with the answer",
                param="messages",
            )
        tools = prompt.body.get("tools") if with_tools else None
        if any(not isinstance(tool, dict) for tool in tools or ()):
            raise BadRequest("each tool must be an object", param="tools")
        return self.tokenizer.encode_chat(prompt.messages, tools=tools or None, chunks=marks(prompt, chunks))

    def reuse(self, encoded: Encoded, policy: ReuseSpec) -> ReusePlan:
        """What of the encoded chunks is stored, placed where it is needed."""
        spans = [(start, length) for start, length, _ in encoded.spans]
        selector = make_selector(policy.selector) if policy.mode == "blend" else None
        return self.reuser.plan(encoded.ids, spans, mode=policy.mode, ratio=policy.ratio, selector=selector)

    def warm(self, texts: Sequence[str]) -> None:
        """Compute and store the KV of chunks ahead of their use."""
        self.reuser.warm([self.tokenizer.encode_plain(text) for text in texts])

    def score(self, text: str) -> list[TokenScore]:
        """The log-probability of each token of `text`, in windows that overlap where the text is long."""
        encoding = self._plain.encode_batch([text], add_special_tokens=False)[0]  # `encode` stops all other threads
        ids, offsets = encoding.ids, encoding.offsets
        scores: list[TokenScore] = []
        for first in range(0, len(ids), _WINDOW - _OVERLAP):
            window = ids[first : first + _WINDOW]
            fresh = 1 if first == 0 else _OVERLAP
            if len(window) <= fresh:
                break
            logprobs = self._logprobs(window)
            scores += [TokenScore(*offsets[first + at], logprobs[at - 1]) for at in range(fresh, len(window))]
        return scores

    def _logprobs(self, ids: Sequence[int]) -> list[float]:
        request = GenerationRequest(
            ids=tuple(ids),
            sampling=SamplingParams(max_tokens=0),
            prompt_logprobs=True,
            prefix_cache=False,
            request_id="score",
        )
        logprobs = self.service.run(request).prompt_logprobs
        assert logprobs is not None, "the engine was asked for prompt_logprobs"
        return logprobs.tolist()


def marks(prompt: Prompt, chunks: frozenset[int]) -> list[ChunkMark]:
    """Where the segments `chunks` stand in the rendered messages, as places of characters in their leaf."""
    found: list[ChunkMark] = []
    at = 0
    for before, segment in pairwise((None, *prompt.segments)):
        assert segment is not None, "only the first of the row is None"
        at = 0 if before is None or before.path != segment.path else at + len(before.text)
        if segment.id in chunks and segment.text:
            part = segment.path[3] if len(segment.path) > 3 else None
            assert part is None or isinstance(part, int), segment.path
            found.append(
                ChunkMark(
                    message=prompt.rendered_index(segment.message), part=part, start=at, end=at + len(segment.text)
                )
            )
    return found
