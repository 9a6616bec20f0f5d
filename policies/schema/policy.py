"""The section `policies`: what may be done to a request."""

from typing import Annotated, Literal

from pydantic import Field

from ..fields import Items, KindName, Option, PolicyNames, Seconds, Share, Text
from .base import Spec

_AUTO_RATIO = 0.15


class RetrieveSpec(Spec):
    """Which collection is searched for the question, and how much of it goes into the prompt."""

    collection: Text = "docs"
    top_k: Annotated[int, Field(ge=1, le=1000)] = 4
    max_tokens: Annotated[int, Field(ge=1)] = 2048


class CompressSpec(Spec):
    """One compressor in the order of use.

    `target_rate` is the share of tokens that stays. `kinds` None means what the compressor is made for. Segments under
    `min_tokens` are left alone (None: the compressor's own bound).
    """

    use: Text
    kinds: Items[KindName] | None = None
    target_rate: Share | None = None
    min_tokens: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, Option] = Field(default_factory=dict)


class ReuseSpec(Spec):
    """How stored KV may be used.

    off: not at all, not even the engine's prefix cache. prefix: the prefix cache only. reuse: chunks as stored,
    nothing repaired. blend: chunks with at least the share `ratio` of their rows recomputed, chosen by `selector`;
    `auto` is 0.15, and more where that takes no longer. More than that, too, where `quality` is not met.
    Text is looked up, and stored, in pieces of at least `min_chunk_tokens`. What is not found is computed in the
    background and stored once it was seen `learn_after` times (0: never), at most `learn_tokens` of each request.
    """

    mode: Literal["off", "prefix", "reuse", "blend"] = "prefix"
    ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    selector: Text = "auto"
    min_chunk_tokens: Annotated[int, Field(ge=1)] = 64
    learn_after: Annotated[int, Field(ge=0, le=16)] = 1
    learn_tokens: Annotated[int, Field(ge=0)] = 8192

    @property
    def least_ratio(self) -> float:
        """The share of rows that is recomputed at least."""
        return _AUTO_RATIO if self.ratio == "auto" else self.ratio


class ProtectSpec(Spec):
    """What no step may rewrite, beyond code, tool schemas, tool calls and the question, which nothing can open.

    `last_user: false` opens the documents inside the user's message, at the price of the prefix cache in later turns.
    """

    system: bool = True
    last_user: bool = True
    roles: Items[Text] = ()
    kinds: Items[KindName] = ()


class CacheSpec(Spec):
    """Whole answers are kept and given again for `ttl` seconds: to requests that are equal in everything, or, from a
    cosine of `similarity` on, to those whose question means the same and that are equal in everything else.
    """

    ttl: Seconds = 3600.0
    similarity: Annotated[float, Field(gt=0, le=1)] | None = None


class KeepOriginalsSpec(Spec):
    """What lossy steps rewrite is kept as it was, for GET /v1/originals/{id} (bounds: `server.originals`). `marks`: the
    text that is left ends with `[original: id]`.
    """

    marks: bool = False


class QualitySpec(Spec):
    """Bounds on what may be lost. `max_removed`: the share of a segment that lossy steps together may take away.

    Of blended requests the share `sample` is compared with full prefill in idle time. Where their mean KL of the next
    token (nats) is certainly above `max_kl`, or fewer than `min_agreement` of 16 greedy tokens are the same, a
    collection's ratio is raised, and in the end it is not blended any more.
    """

    max_removed: Annotated[float, Field(ge=0, lt=1)] = 0.8
    sample: Annotated[float, Field(ge=0, le=1)] = 0.02
    max_kl: Annotated[float, Field(gt=0)] = 0.25
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.0


class BudgetSpec(Spec):
    """Bounds on all that is done to one prompt.

    `max_removed`: the share of its tokens that lossy steps may take away, held at every segment for all that stands up
    to it, as later turns begin with the same text. `rewrite_ms`: milliseconds that compressors may cost by prediction;
    what does not fit in any more is left as it is.
    """

    max_removed: Annotated[float, Field(ge=0, le=1)] = 1.0
    rewrite_ms: Annotated[float, Field(gt=0)] | None = None


class Policy(Spec):
    """What may be done to a request. In a file every field is optional, and what is not given comes from `extends`.

    `min_prompt_tokens`: below it nothing is done; it is applied to the prompt up to each segment (see plan.py).
    `token_value_ms`: what a saved prompt token is worth in milliseconds beyond its prefill (a provider's price, for
    example), in the planner's break-even.
    `rewrite_timeout`: seconds that rewriting may take; what is not done by then is left as it was. None: as long as
    what it is predicted to save, between 1 and 10 seconds.
    `allow_client_policy`: which other policies a client may ask for where this one would apply: none, all or a list of
    names (held as (), ("*",) or the names).
    """

    extends: Text | None = None
    description: str = ""
    retrieve: RetrieveSpec | None = None
    compress: Items[CompressSpec] = ()
    reuse: ReuseSpec = ReuseSpec()
    protect: ProtectSpec = ProtectSpec()
    quality: QualitySpec = QualitySpec()
    budget: BudgetSpec = BudgetSpec()
    cache: CacheSpec | None = None
    originals: KeepOriginalsSpec | None = None
    min_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    token_value_ms: Annotated[float, Field(ge=0)] = 0.0
    rewrite_timeout: Seconds | None = None
    allow_client_policy: PolicyNames = ()

    @property
    def passthrough(self) -> bool:
        """Whether a request goes out as the bytes that came in."""
        return self.retrieve is None and not self.compress
