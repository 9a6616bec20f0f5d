"""Retrieve, plan, rewrite: what is done to a prompt before it is dispatched. Blocking; runs on a worker thread.

Fails open: a step that breaks leaves the prompt as it was before the step, and its report says so.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..compressors.context import CompressionContext, Count, Embed, Memory, Score
from ..compressors.registry import create
from ..compressors.result import LATE, Change
from ..policies import CostModel, Ledger, Plan, Policy, Step, opened, plan
from ..policies.costs import EMBEDDING
from ..policies.schema import RetrieveSpec
from ..policies.stored import StoredKV
from ..prompt import Prompt, PromptsluiceError, Report, Segment, StepReport, Usage
from ..rag.markup import escaped
from .backends.base import estimated_tokens
from .edge import log_failure
from .generating import Generating
from .observed import step as span_of
from .turns import Turns

log = logging.getLogger("promptsluice.gateway")

# Where the policy sets no time, rewriting may take as long as the prefill that it is about to shorten, or as what it
# saves is worth, within bounds.
_LEAST_TIME_S = 1.0
_MOST_TIME_S = 10.0
_BATCH = 64
BUSY = "busy"
"""Why a step failed, where there was no free worker for it."""


class Retriever(Protocol):
    """Puts what was found for the question into a prompt; also says how many chunks. May load an embedder first."""

    def __call__(self, spec: RetrieveSpec, prompt: Prompt, *, count: Count) -> tuple[Prompt, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the steps of one request may use. `kv_reuse`: the backend can use stored KV. `costs` may take a millisecond,
    to fit what was measured. `ledger` takes in what ran, `turns` what prompts became.

    `generate` asks a model on the side, `memory` and `keep` keep texts for the tenant whose request it is: what was
    made, and the original of what was rewritten, by its id, unless it is too large. `store` has the KV that is
    stored of that tenant's own text, where a policy uses it.
    """

    count: Count
    costs: Callable[[], CostModel]
    ledger: Ledger
    retrieve: Retriever
    turns: Turns
    embed: Embed | None = None
    score: Score | None = None
    generate: Generating | None = None
    memory: Memory | None = None
    keep: Callable[[str, str], bool] | None = None
    store: Callable[[Policy], StoredKV | None] = lambda policy: None
    kv_reuse: bool = False


@dataclass(slots=True, kw_only=True)
class Optimized:
    """The outcome so far. `plan` is None where there was nothing to plan; else it was made for the prompt `planned`,
    which the `changes` have led from to `prompt`: of each step that ran its name and what it did. `failed` has the
    steps that failed or were late, each with a slug that says why.
    """

    prompt: Prompt
    plan: Plan | None = None
    planned: Prompt | None = None
    changes: list[tuple[str, Sequence[Change]]] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    tokens_in: int = 0
    retrieved: int = 0
    pruned: int = 0
    side: Usage = field(default_factory=Usage)
    originals: list[str] = field(default_factory=list)

    def report_to(self, report: Report) -> None:
        """Fill in the fields of a request's report."""
        report.steps = list(self.steps)
        report.failed = dict(self.failed)
        report.tokens_in = self.tokens_in
        report.retrieved = self.retrieved
        report.pruned = self.pruned
        report.side_prompt, report.side_completion = self.side.prompt_tokens, self.side.completion_tokens
        report.originals = list(self.originals)
        report.tokens_out = self.tokens_in + self.retrieved - self.pruned


def passed_over(prompt: Prompt, *, reason: str, why: str) -> Optimized:
    """The outcome where nothing could be done at all. `reason` is for a person, `why` a slug."""
    size = sum(estimated_tokens(segment.text) for segment in prompt.segments)
    note = StepReport(name="optimize", ms=0.0, tokens_before=size, tokens_after=size, note=f"passed over: {reason}")
    return Optimized(prompt=prompt, steps=[note], failed={"optimize": why}, tokens_in=size)


def optimized(
    prompt: Prompt,
    policy: Policy,
    tools: Tools,
    *,
    request_id: str,
    scope: str,
    fail_closed: bool = False,
    wanted: Callable[[], bool] = lambda: True,
) -> Optimized:
    """Carry out a policy. Never raises for what a prompt holds or for a step that fails.

    `scope` is whose earlier turns are remembered, and by which rules they were rewritten; `fail_closed`: nothing is
    sent, and so nothing remembered, where a step fails. `wanted` says at the end whether it will be sent: that somebody
    still waits for it.
    """
    run = _Run(prompt, policy, tools, request_id, scope)
    run.attempt("protect", run.protect)
    run.attempt("count", run.measure)
    run.attempt("turns", run.recall)
    if policy.retrieve is not None and prompt.question:
        run.attempt("retrieve", run.retrieve)
    run.attempt("plan", run.plan)
    for step in run.out.plan.steps if run.out.plan else ():
        if step.use:
            run.attempt(step.name, lambda step=step: run.compress(step))
    if policy.originals is not None and tools.keep is not None:
        run.attempt("originals", run.keep_originals)
    if wanted() and not (fail_closed and run.out.failed):
        run.attempt("remember", lambda: tools.turns.remember(prompt, run.out.prompt, scope=scope, lost=run.lost))
    if tools.generate is not None:
        run.out.side = tools.generate.usage
    return run.out


def id_of(original: str) -> str:
    """By which a text is fetched again: the same for the same text, so that a mark never changes."""
    return hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _Run:
    """One request's way through the steps. `lost`: by segment, the tokens that lossy steps took."""

    def __init__(self, prompt: Prompt, policy: Policy, tools: Tools, request_id: str, scope: str) -> None:
        self.out = Optimized(prompt=prompt)
        self._scope = scope
        self._settled: Mapping[int, int] = {}
        self._policy = policy
        self._tools = tools
        self._request_id = request_id
        self._deadline = time.monotonic() + _LEAST_TIME_S
        self.lost = Counter[int]()
        self._embedded = False

    def attempt(self, name: str, step: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            with span_of(name) as span:
                step()
                if span is not None and self.out.steps:
                    done = self.out.steps[-1]
                    span.set_attributes({"promptsluice.tokens_in": done.tokens_before})
                    span.set_attributes({"promptsluice.tokens_out": done.tokens_after})
        except PromptsluiceError as error:
            log.warning("request %s goes on without %s: %s", self._request_id, name, error.message)
            self._failed(name, began, error.message, why=error.code or error.type)
        except Exception as error:  # noqa: BLE001 - the optimizer fails open, whatever breaks in it
            log_failure(error, request_id=self._request_id)
            self._failed(name, began, type(error).__name__, why=LATE if isinstance(error, TimeoutError) else "error")

    def protect(self) -> None:
        """Cut the prompt anew where the policy opens or closes more than usual."""
        self.out.prompt = opened(self.out.prompt, self._policy)

    def measure(self) -> None:
        self.out.tokens_in = sum(self._size(segment) for segment in self.out.prompt.segments)

    def recall(self) -> None:
        """Put in what earlier turns were rewritten to."""
        began, before = time.perf_counter(), self.out.tokens_in
        self.out.prompt, self._settled = self._tools.turns.recall(self.out.prompt, scope=self._scope)
        if self.out.prompt.changed:
            after = sum(self._size(segment) for segment in self.out.prompt.segments)
            self.out.pruned = before - after
            again = {segment.message for segment in self.out.prompt.segments if segment.id in self._settled}
            self._done("turns", began, before=before, after=after, note=f"{len(again)} messages as sent before")

    def retrieve(self) -> None:
        began = time.perf_counter()
        assert self._policy.retrieve is not None, "the policy retrieves nothing"
        prompt, chunks = self._tools.retrieve(self._policy.retrieve, self.out.prompt, count=self._tools.count)
        fresh = [segment for segment in prompt.segments if segment.original is None]
        self.out.prompt, self.out.retrieved = prompt, sum(self._size(segment) for segment in fresh)
        before = self.out.tokens_in - self.out.pruned
        self._done("retrieve", began, before=before, after=before + self.out.retrieved, note=f"{chunks} chunks")
        self._tools.ledger.ran("retrieve", tokens=1, ms=self.out.steps[-1].ms)

    def plan(self) -> None:
        tools = self._tools
        made = plan(
            self.out.prompt,
            self._policy,
            tools.costs(),
            count=tools.count,
            kv_reuse=tools.kv_reuse,
            store=tools.store(self._policy),
            settled=self._settled,
        )
        self.out.plan, self.out.planned = made, self.out.prompt
        worth_s = max(made.prefill_ms, sum(step.saved_ms for step in made.steps)) / 1000
        allowed_s = self._policy.rewrite_timeout or min(_MOST_TIME_S, max(_LEAST_TIME_S, worth_s))
        self._deadline = time.monotonic() + allowed_s

    def compress(self, step: Step) -> None:
        began = time.perf_counter()
        self._embedded = False
        context = CompressionContext(
            count=self._tools.count,
            question=self.out.prompt.question,
            embed=self._embed if self._tools.embed is not None and step.embeds else None,
            score=self._tools.score,
            generate=self._tools.generate,
            memory=self._tools.memory,
            deadline=self._deadline,
            only=step.segments,
        )
        compressor = create(step.use, step.options)
        result = compressor.compress(self.out.prompt, context=context)
        self.out.prompt = _still_data(result.prompt)
        if not compressor.lossless:
            self.lost.update({one.segment: max(0, one.tokens_before - one.tokens_after) for one in result.changes})
        before, after = result.tokens_before, result.tokens_after
        self.out.pruned += before - after
        if result.trouble:
            self.out.failed[step.name] = result.trouble
        self.out.changes.append((step.name, result.changes))
        saved_ms = step.saved_ms * (before - after) / max(1, step.tokens_before - step.tokens_after)
        self._done(
            step.name,
            began,
            before=before,
            after=after,
            predicted_ms=step.predicted_ms,
            saved_ms=saved_ms,
            note=result.note,
        )
        # What a lossless step finds depends on the text, not on the step: it costs next to nothing and is always tried.
        if before and not compressor.lossless and not result.trouble and time.monotonic() < self._deadline:
            ms, ran = self.out.steps[-1].ms, EMBEDDING.get(step.cost_name) if self._embedded else None
            self._tools.ledger.ran(ran or step.cost_name, tokens=before, ms=ms, predicted_ms=step.predicted_ms)
            if step.asked_rate is None:  # where it found nothing of its kind says little of where it will
                found = [one for one in result.changes if one.tokens_after < one.tokens_before]
                before, after = sum(one.tokens_before for one in found), sum(one.tokens_after for one in found)
            if before:
                self._tools.ledger.left(step.cost_name, expected=step.asked_rate, real=after / before)

    def keep_originals(self) -> None:
        """Keep what lossy steps have rewritten; where the policy says so, the text that is left names it."""
        spec, keep = self._policy.originals, self._tools.keep
        assert spec is not None and keep is not None, "there is nowhere to keep originals"
        marked: dict[int, str] = {}
        for segment in self.out.prompt.segments:
            again = segment.id in self._settled  # its mark, if any, is in its text
            if not (self._settled[segment.id] if again else self.lost[segment.id]) or segment.original is None:
                continue
            original_id = id_of(segment.original)
            if not keep(original_id, segment.original):
                continue
            self.out.originals.append(original_id)
            if again:
                continue
            text = f"{segment.text.rstrip()}\n[original: {original_id}]"
            if spec.marks and (size := self._tools.count(text)) < self._tools.count(segment.original):
                marked[segment.id] = text
                self.out.pruned -= size - self._size(segment)
        self.out.prompt = self.out.prompt.replace(marked)

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors in batches, so that a text of a million sentences ends at the deadline and not in an hour."""
        assert self._tools.embed is not None, "offered only where there is an embedder"
        self._embedded = True
        parts: list[NDArray[np.float32]] = []
        for at in range(0, max(1, len(texts)), _BATCH):
            if time.monotonic() > self._deadline:
                raise TimeoutError("the deadline passed while embedding")
            parts.append(self._tools.embed(texts[at : at + _BATCH]))
        return np.concatenate(parts)

    def _size(self, segment: Segment) -> int:
        return self._tools.count(segment.text) if segment.text else 0

    def _failed(self, name: str, began: float, said: str, *, why: str) -> None:
        self.out.failed[name] = why
        size = self.out.tokens_in + self.out.retrieved - self.out.pruned
        self._done(name, began, before=size, after=size, note=f"failed, left as it was: {said}")

    def _done(
        self,
        name: str,
        began: float,
        *,
        before: int,
        after: int,
        note: str = "",
        predicted_ms: float | None = None,
        saved_ms: float | None = None,
    ) -> None:
        self.out.steps.append(
            StepReport(
                name=name,
                ms=(time.perf_counter() - began) * 1000,
                tokens_before=before,
                tokens_after=after,
                predicted_ms=predicted_ms,
                saved_ms=saved_ms,
                note=note,
            )
        )


def _still_data(prompt: Prompt) -> Prompt:
    """The prompt with its retrieved text escaped again: what is left of a text may make a mark that it did not have."""
    texts = {one.id: one.text for one in prompt.segments if one.source is not None and one.original is None}
    made = {place: clean for place, text in texts.items() if (clean := escaped(text)) != text}
    return prompt.replace(made) if made else prompt
