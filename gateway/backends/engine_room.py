"""The embedded engine with everything around it: model, tokenizer, service thread, chunk reuse. Blocking throughout.

Imports torch, so that only a worker thread of a gateway with an embedded backend ever imports this file.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer

from ...backend_engine.chat import ChunkMark
from ...backend_engine.fitting import fitting_engine
from ...backend_engine.grammar import Grammar
from ...backend_engine.grammar.compiler import CompiledGrammar
from ...backend_engine.loader import LoadedModel, load_model
from ...backend_engine.model import Decoder
from ...backend_engine.options import EngineOptions
from ...backend_engine.params import SamplingDefaults, recommended
from ...backend_engine.rounded_kv import kv_fingerprint
from ...backend_engine.service import EngineService
from ...backend_engine.text_scoring import Encoding, TextScorer
from ...backend_engine.tokenizer import ChatTokenizer, Encoded
from ...backend_engine.types import PrefillWork
from ...kv_reuse.blend import Reuser
from ...kv_reuse.calibration import measured
from ...kv_reuse.cuts import Breaks, breaks_of
from ...kv_reuse.rounding import ChunkDtype, chosen_dtype, chunk_fingerprint
from ...kv_reuse.store import ChunkStore
from ...policies.schema import EmbeddedBackend
from ...prompt import BadRequest, ConfigError, Prompt, Segment
from .generations import refuse_hopeless
from .reuse_control import ReuseControl
from .sinks import longest_sink, sinks_of

log = logging.getLogger(__name__)

_HOST_BYTES = 4 << 30  # for evicted prefixes of a GPU's pool
_PASSING_BYTES = 256 << 20  # on a CPU, for what goes to disk and comes from there


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A prompt's ids, and per marked chunk the segment that it is."""

    encoded: Encoded
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineRoom:
    """One loaded model, ready to answer. `limit`: tokens that prompt and answer may have together.

    `defaults` is how tokens are drawn for requests that do not say.
    """

    model: LoadedModel
    tokenizer: ChatTokenizer
    service: EngineService
    reuser: Reuser
    control: ReuseControl
    limit: int
    defaults: SamplingDefaults
    _plain: Tokenizer

    @classmethod
    def open(
        cls,
        spec: EmbeddedBackend,
        *,
        path: Path,
        store: ChunkStore,
        prefixes: Path | None = None,
        standings: Path | None = None,
        chunk_dtype: ChunkDtype = "auto",
    ) -> Self:
        """Load the model and start its thread; takes seconds. ModelUnavailable or ConfigError where that is
        impossible. `prefixes` is the folder of evicted prefixes, `standings` that of what blending was seen to lose.
        Chunks are kept in `chunk_dtype`.
        """
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        device = device_of(spec)
        chunk_dtype = chosen_dtype(chunk_dtype, device)  # what the device refuses is refused before minutes of loading
        model = load_model(path, dtype=spec.dtype, device=device, quantize=spec.quantize, native=spec.native)
        if model.tokenizer is None:
            raise ConfigError(f"the model {spec.model} has no tokenizer; it cannot answer chat messages")
        defaults = recommended(model.generation_config if spec.generation_config == "model" else {})
        engine = fitting_engine(model, options=engine_options(spec, on_card=device != "cpu", prefixes=prefixes))
        service = EngineService(
            engine,
            max_waiting=spec.queue,
            max_waiting_tokens=spec.queue_tokens,
            queue_timeout_s=spec.queue_timeout,
        )
        fingerprint = kv_fingerprint(model.fingerprint, spec.kv_dtype)
        context = model.spec.max_context
        plain = Tokenizer.from_str(model.tokenizer.backend.to_str())
        plain.encode_special_tokens = True
        room = cls(
            model=model,
            tokenizer=model.tokenizer,
            service=service,
            reuser=Reuser(
                service,
                store,
                spec=model.spec,
                fingerprint=fingerprint,
                sinks=sinks_of(model.tokenizer, room=context),  # whatever this gateway has memory for
                longest_sink=longest_sink(min(context, spec.context_limit or context)),
                memory=engine.allocator.pages * engine.options.page_size,
                breaks=breaks_in(model.tokenizer),
                device=device,
                dtype=chunk_dtype,
            ),
            control=ReuseControl(
                service,
                fingerprint=chunk_fingerprint(fingerprint, chunk_dtype),
                folder=standings,
                measured=_measured(model.decoder),
            ),
            limit=min(engine.max_tokens, spec.context_limit or engine.max_tokens),
            defaults=defaults,
            _plain=plain,
        )
        service.start()  # last: whatever is refused leaves no thread, which would hold the model
        return room

    def encode(self, prompt: Prompt, *, chunks: frozenset[int], with_tools: bool) -> Tokens:
        """Ids of the chat; the segments `chunks` are tokenized on their own and come back as spans.

        ContextTooLong for what is hopelessly long, before minutes are spent on tokenizing it.
        """
        longest = self.tokenizer.longest_token
        refuse_hopeless(prompt.chars, longest_token=longest, limit=self.limit, param="messages")
        tools = prompt.body.get("tools") if with_tools else None
        if any(not isinstance(tool, dict) for tool in tools or ()):
            raise BadRequest("each tool must be an object", param="tools")
        marked = marks(prompt, chunks)
        encoded = self.tokenizer.encode_chat(prompt.messages, tools=tools or None, chunks=[mark for _, mark in marked])
        return Tokens(encoded=encoded, segments=tuple(segment for segment, _ in marked))

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """For this model's tokenizer; the first one takes a second, hostile ones take some. BadRequest says why not."""
        return self.service.engine.grammars.compile(grammar)

    def warm(self, texts: Sequence[str], *, salt: str) -> None:
        """Compute and store the KV of chunks ahead of their use, behind the sink of a middle length."""
        self.reuser.warm([self.tokenizer.encode_plain(text) for text in texts], salt=salt)

    def forget(self, texts: Sequence[str], *, salts: Sequence[str]) -> None:
        """Delete the KV of chunks, under whatever anchors."""
        self.reuser.forget([self.tokenizer.encode_plain(text) for text in texts], salts=salts)

    @cached_property
    def scorer(self) -> TextScorer:
        """Log-probabilities of texts; any thread but the engine's."""
        return TextScorer(
            self.service.run_all,
            self._plain_encoding,
            rows=self.service.engine.options.step_tokens,
            room=self.service.engine.max_tokens,
        )

    def _plain_encoding(self, text: str) -> Encoding:
        encoding = self._plain.encode_batch([text], add_special_tokens=False)[0]  # `encode` stops all other threads
        return Encoding(encoding.ids, encoding.offsets)


def _measured(decoder: Decoder) -> list[PrefillWork]:
    try:
        return measured(decoder)
    except torch.OutOfMemoryError:
        log.warning("the device has no memory to measure prefills now; the controller learns from what runs")
        return []


def device_of(spec: EmbeddedBackend) -> str:
    """Where the model runs."""
    return spec.device if spec.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def breaks_in(tokenizer: ChatTokenizer) -> Breaks:
    """Behind which tokens a text may be cut; control tokens stand in no chunk."""
    pieces = (tokenizer.token_bytes[id_] for id_ in range(tokenizer.backend.get_vocab_size()))
    added = tokenizer.backend.get_added_tokens_decoder()
    return breaks_of(pieces, walls=[id_ for id_, token in added.items() if token.special])


def engine_options(spec: EmbeddedBackend, *, on_card: bool, prefixes: Path | None) -> EngineOptions:
    """The engine's sizes for a backend of the policy file.

    What it leaves open is chosen by the device. A CPU's step of 512 rows takes about as long as a caller should wait
    for an abort; a GPU needs thousands of rows to be busy, and below some tens its step takes hardly less time.
    """
    cache = spec.prefix_cache
    usual = _HOST_BYTES if on_card else _PASSING_BYTES if prefixes else 0
    return EngineOptions(
        kv_bytes=spec.kv_memory,
        kv_dtype=spec.kv_dtype,
        step_tokens=max(spec.step_tokens or (4096 if on_card else 512), spec.max_running),
        stall=spec.stall,
        least_prefill=64 if on_card else 16,
        max_running=spec.max_running,
        guessed_tokens=spec.guessed_tokens,
        host_bytes=usual if cache.host is None else cache.host,
        disk_bytes=cache.disk.size if cache.disk and prefixes else 0,
        disk_path=prefixes,
    )


def marks(prompt: Prompt, chunks: frozenset[int]) -> list[tuple[Segment, ChunkMark]]:
    """Where the segments `chunks` stand in the rendered messages, as places of characters in their leaf."""
    found: list[tuple[Segment, ChunkMark]] = []
    at = 0
    for before, segment in pairwise((None, *prompt.segments)):
        assert segment is not None, "only the first of the row is None"
        at = 0 if before is None or before.path != segment.path else at + len(before.text)
        if segment.id in chunks and segment.text:
            part = segment.path[3] if len(segment.path) > 3 else None
            assert part is None or isinstance(part, int), segment.path
            message = prompt.rendered_index(segment.message)
            found.append((segment, ChunkMark(message=message, part=part, start=at, end=at + len(segment.text))))
    return found
