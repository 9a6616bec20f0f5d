"""The engine's vocabulary: what goes in, what comes out, and the contract of reused KV.

Imports torch for types only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from .params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from .grammar.compiler import CompiledGrammar
    from .rounded_kv import RoundedBlock

FinishReason = Literal["stop", "length", "abort"]
KVDtype = Literal["auto", "int8", "fp8"]
"""How a pool holds keys and values: as the model computes them, or rounded to 8 bits."""


@dataclass(frozen=True, slots=True)
class KVBlock:
    """Keys and values of consecutive tokens for all layers: `k`, `v` are [layers, tokens, kv_heads, head_dim].

    Keys carry the rotation of the positions that they were computed (or re-positioned) for.
    """

    k: "Tensor"
    v: "Tensor"

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    @property
    def tensors(self) -> "tuple[Tensor, ...]":
        return self.k, self.v

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def mapped(self, change: "Callable[[Tensor], Tensor]") -> "KVBlock":
        """The block of what `change` makes of each tensor."""
        return KVBlock(change(self.k), change(self.v))

    def part(self, start: int, stop: int | None = None) -> "KVBlock":
        """Views of some of the tokens."""
        return self.mapped(lambda tensor: tensor[:, start:stop])

    def widened(self) -> "KVBlock":
        """What it stands for in a floating dtype: itself."""
        return self


class RowSelector(Protocol):
    """Chooses which reused rows are recomputed (the selective recompute of CacheBlend, arXiv:2405.16444).

    At `layer` the engine has computed fresh keys and values of all rows that may be repaired; the selector sees them
    beside the stored ones and names the `quota` rows to go on with. It must not change its inputs, and must be a pure
    function of them: one selector serves many requests at a time.
    """

    @property
    def layer(self) -> int: ...

    def select(
        self, *, fresh_k: "Tensor", fresh_v: "Tensor", stored_k: "Tensor", stored_v: "Tensor", quota: int
    ) -> "Tensor":
        """Return `quota` row indices, int64, ascending and unique. Inputs are [rows, kv_heads, head_dim]."""
        ...


class RowChooser(Protocol):
    """Chooses which reused rows are recomputed before any of them runs, so that the others cost nothing at all.

    With a `depth`, the engine first runs what is not reused over the stored KV, and sums the attention weights of the
    prompt's last rows, those behind the last span, on each key, over heads and over the layers from this share of the
    depth on, up to the share `until`: later layers are not run for it, nor waited for. Without a depth, rows are chosen
    by their places alone. It must be a pure function of its inputs.
    """

    @property
    def depth(self) -> float | None: ...

    @property
    def until(self) -> float: ...

    def choose(self, *, attention: "Tensor | None", offsets: "Tensor", quota: int) -> "Tensor":
        """Return `quota` row indices, int64, unique. `attention` float32 [rows] is None without a depth; `offsets`
        int64 [rows] are the rows' places in their chunks."""
        ...


@dataclass(frozen=True, slots=True)
class ReusedSpan:
    """Stored KV for the tokens `start ..

    start + kv.tokens - 1` of a request. Its keys are rotated for these positions, or for `position ...`, from where the
    engine turns them while it loads them.
    """

    start: int
    kv: "KVBlock | RoundedBlock"
    position: int | None = None

    @property
    def stop(self) -> int:
        return self.start + self.kv.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Reused spans of one request, ascending and disjoint.

    With neither `selector` nor `chooser` the rows of the spans are not computed at all ("reuse"). With a selector all
    rows run up to its layer and `ceil(ratio * rows)` of the repairable rows go on ("blend"), each chunk of the prefill
    choosing its share; with a chooser so many are chosen before the prefill. `ratio=1.0` equals a full prefill.
    What is computed behind the first span's start enters the prefix tree under a key of its own, or not at all.
    """

    spans: tuple[ReusedSpan, ...]
    selector: RowSelector | None = None
    chooser: RowChooser | None = None
    ratio: float = 0.15

    @property
    def share(self) -> float:
        """Of the spans' rows, what is recomputed."""
        return 0.0 if self.selector is None and self.chooser is None else self.ratio


class Blending(NamedTuple):
    """How near reused rows come to a full prefill: the share `ratio` of them is recomputed, chosen as `way` says.

    A request with one may go on from a prompt that was blended at least so well, and what it blends itself is kept for
    those that go on from it; without one, only what a full prefill computed is found.
    """

    way: str
    ratio: float

    def serves(self, wanted: "Blending") -> bool:
        """Whether what was blended so is good enough for who wants it blended as `wanted`."""
        return self.ratio >= wanted.ratio and (self.way == wanted.way or not wanted.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request to the engine: token ids in, token ids out.

    `namespace` separates tenants: in the prefix tree, and in who is served next. `prompt_logprobs` asks for the
    log-probability of each prompt token but the first, or of those alone whose places are `scored` (the others are
    NaN); `keep_kv` for the prompt's KV. Neither uses a prefix hit; rows of reused spans tell nothing (NaN). Higher
    `priority` is served first. `grammar` (from the engine's `grammars`) restricts what is written; the generation
    ends where nothing may follow. `continues`: the text goes on where the prompt's ends, so that a tokenizer that
    drops the space a text begins with keeps it here. `first_logprobs` asks for the whole distribution of the first
    token. `idle`: for EngineService.run_idle, which gives it up for anybody else.
    """

    ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    grammar: "CompiledGrammar | None" = None
    reuse: Reuse | None = None
    blending: Blending | None = None
    namespace: str = ""
    prefix_cache: bool = True
    prompt_logprobs: bool = False
    scored: Sequence[int] | None = None
    keep_kv: bool = False
    priority: int = 0
    request_id: str = ""
    continues: bool = False
    first_logprobs: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log-probability of a token in the model's own distribution, and of the likeliest there, as pairs of
    id and value.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to a request: text that is safe to show, the ids behind it, and how it ended, if it did.

    `logprobs`, where asked for, has an entry for each of `token_ids` but one that ended the text by its id.
    `prompt_logprobs`, on the first delta of a request that asked for them and for `logprobs`, has an entry for each
    prompt token but the first. `stop` is the stop string that ended the text, where one did.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """What a prefill cost: `rows` that ran (a probe's among them), the keys that they saw together (`pairs`), and its
    share of the steps and their `seconds`, by rows where a step was shared.
    """

    steps: float = 0.0
    rows: int = 0
    pairs: int = 0
    seconds: float = 0.0

    def __add__(self, other: "PrefillWork") -> "PrefillWork":
        return PrefillWork(
            steps=self.steps + other.steps,
            rows=self.rows + other.rows,
            pairs=self.pairs + other.pairs,
            seconds=self.seconds + other.seconds,
        )


NO_WORK = PrefillWork()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The counters of a finished request. Times in milliseconds from submission.

    `cached_tokens` came from the prefix tree, `loaded_tokens` of them from a tier under it, `blended_tokens` of them
    are a blended prompt's and not exact; `reused_tokens` came from spans without being recomputed; `recomputed_tokens`
    are rows of spans that were repaired. `prompt_logprobs` is float32
    [prompt_tokens - 1], `first_logprobs` float32 [vocab], natural log, both on the CPU.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    loaded_tokens: int = 0
    blended_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    work: PrefillWork = NO_WORK
    prompt_logprobs: "Tensor | None" = None
    first_logprobs: "Tensor | None" = None
    kv: KVBlock | None = None
