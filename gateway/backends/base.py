"""The backend's contract: what answers a prepared prompt. The echo backend is its smallest implementation."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...compressors.context import Score
from ...policies import CostModel, Ledger, Line, Plan, Policy
from ...policies.ledger import measured_prefill
from ...policies.stored import StoredKV
from ...prompt import BadRequest, Path, Prompt, Report, Usage

if TYPE_CHECKING:
    from ...backend_engine.readings import Readings
    from ...kv_reuse.gate import Standing

ATTEMPTS_HEADER = "x-promptsluice-attempts"
"""How often an answer was asked for before it came, over all upstreams."""
_COUNTED = 1 << 18


@dataclass(slots=True)
class Reading:
    """Whether a backend was given the prompt: from then on it is read, and paid for, whoever waits for the answer."""

    begun: bool = False

    def begin(self) -> None:
        self.begun = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What all requests for a completion have. A backend changes two things in it: `report` (tokens reused, recomputed,
    cached), and `reading`, which it begins when the prompt goes out to a server or into the engine.

    `arrived` is the reading of time.perf_counter when it came, before its prompt was rewritten.
    `charged`: it has limits of tokens, so that its usage has to be known, whether its client asks for it or not.
    `model` is the name that the client asked for, without a policy suffix. `tenant` separates caches. `headers` are
    those of the client's headers that may go upstream. `unread`: nobody on the way back reads a stream's frames, and
    several may come as one (`Frame.framed`).
    """

    model: str
    report: Report
    request_id: str
    stream: bool = False
    include_usage: bool = False
    charged: bool = False
    tenant: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    unread: bool = False
    reading: Reading = field(default_factory=Reading)
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Asked):
    """One prepared chat; `prompt` has been rewritten already."""

    prompt: Prompt
    policy: Policy
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesCall(Call):
    """A prepared chat that came as a body of Anthropic's Messages API (`raw`). `prompt` says the same as a chat.

    `origins` maps the path of a text in the chat to its path in the body. `path` is the route below an upstream's base
    URL; `versions` are the client's `anthropic-*` headers.
    """

    raw: bytes = field(repr=False)
    origins: Mapping[Path, Path] = field(repr=False)
    path: str = "/messages"
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall(Asked):
    """One legacy text completion, to which no policy is applied: the body as it came (`raw`) and what it says."""

    raw: bytes = field(repr=False)
    body: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One chunk of a stream: the JSON of a `chat.completion.chunk` or a `text_completion`. `content` is about how many
    bytes of the answer's text it carries, of thoughts and calls, too; 0 for none.

    `more`: the next frame is there already, so that both may be written at once; only a hint.

    `framed`: `data` are one or more whole events as they go out, `events` of them, of chunks that differ in their text
    only.

    A frame with empty `data` only brings `usage` for the books and is not sent. `failed`: the data is an error object.
    `event` is its name as a server-sent event; those of chats have none.
    """

    data: bytes
    content: int = 0
    usage: Usage | None = None
    failed: bool = False
    event: str = ""
    more: bool = False
    framed: bool = False
    events: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole response: JSON bytes with the status and the headers that go with them."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A streamed response. Its taker must exhaust `frames` or `aclose()` it; closing stops the work behind it.

    `asked_at`: the reading of time.perf_counter when its backend was asked for it, waits before that not counted.
    """

    frames: AsyncGenerator[Frame, None]
    headers: Mapping[str, str] = field(default_factory=dict)
    asked_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as /v1/models lists it. `context` is in tokens, None where it is not known."""

    id: str
    owned_by: str
    context: int | None = None


class Backend(ABC):
    """Answers prepared prompts.

    A backend never changes the prompt, never reads a destination from it, and keeps no reference to a call after its
    reply is finished or closed. `complete` is cancelled when the client leaves: everything it has begun must end then.
    """

    kv_reuse: ClassVar[bool] = False
    """Whether stored chunk KV can be used."""
    relays: ClassVar[bool] = False
    """Whether `relay` can be asked: there is an upstream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ledger = Ledger(CostModel() if self.kv_reuse else CostModel.upstream())
        """What requests to it took; the pipeline writes it."""

    def costs(self) -> CostModel:
        """What prompts for this backend cost, as far as is known now."""
        return measured_prefill(self.ledger.costs(), self.prefill_cost())

    async def start(self) -> None:  # noqa: B027 - nothing to do is a fine start
        """Get ready to answer; called once, in the background of a server that is already alive."""

    async def close(self) -> None:  # noqa: B027
        """Let go of everything; called once, after the last reply."""

    async def available(self) -> None:  # noqa: B027
        """Return when requests can be answered; raise the reason when they never will be."""

    def ready(self) -> str | None:
        """None when requests can be answered, else why not yet, for a person."""
        return None

    def healthy(self) -> bool:
        """False when the backend hangs and only a restart would help."""
        return True

    def stats(self) -> Mapping[str, float]:
        """Gauges by name, for /metrics. May block on a disk; called from worker threads."""
        return {}

    def readings(self) -> "Readings | None":
        """What an engine in this process tells for monitoring; None where there is none."""
        return None

    def blends(self) -> "Mapping[str, Standing]":
        """What blending stored KV was seen to lose, by collection."""
        return {}

    def stored_kv(self, policy: Policy, *, tenant: str) -> StoredKV | None:
        """What is stored of a tenant's own text, for the planner; None where the policy or the backend uses none."""
        return None

    def scorer(self) -> Score | None:
        """Log-probabilities of a text's tokens under this model, blocking; None where there are none to be had."""
        return None

    def tokenize(self, prompt: Prompt | str) -> Sequence[int]:
        """The ids of a text, or of a chat as it would go into the model; special tokens in texts are plain text.

        Blocking. BadRequest where no tokenizer is known.
        """
        raise BadRequest(f"no tokenizer is known for the models of backend {self.name!r}", param="model")

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. BadRequest as above, and for an id that the model lacks."""
        raise BadRequest(f"no tokenizer is known for the models of backend {self.name!r}", param="model")

    async def relay(
        self,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        request_id: str,
        reading: Reading | None = None,
    ) -> Answer:
        """Pass a request that is no chat on, unread, to `path` (as "/embeddings") below the upstream's base URL.

        Its error bodies come back as answers. `reading` begins when it goes out. BadRequest where there is no upstream.
        """
        raise BadRequest(f"the models of backend {self.name!r} do not serve {path}", param="model")

    async def continue_text(self, call: TextCall) -> Answer | Stream:
        """Go on where raw prompts end; all else is as in `complete`. BadRequest where that cannot be done."""
        raise BadRequest(f"the models of backend {self.name!r} do not serve /completions", param="model")

    @property
    def speaks_messages(self) -> bool:
        """Whether `converse` can be asked: bodies of Anthropic's API are answered as they are, not as chats."""
        return False

    async def converse(self, call: MessagesCall) -> Answer | Stream:
        """Answer a body of Anthropic's API in its own form; all else is as in `complete`."""
        raise BadRequest(f"the models of backend {self.name!r} do not serve {call.path}", param="model")

    def count_prompt(self, prompt: Prompt) -> int:
        """Tokens of a chat as it would go into the model; an estimate where its template is not known. Blocking."""
        return sum(self.count_tokens(segment.text) for segment in prompt.segments if segment.text)

    def warm(self, texts: Sequence[str], *, collection: str) -> None:  # noqa: B027
        """A hint, any thread: these chunks of a collection will be asked for, their KV may be computed ahead. Does not
        block."""

    def forget(self, texts: Sequence[str], *, collection: str) -> None:  # noqa: B027
        """Any thread: these chunks are gone from a collection, and their KV has to go, too. Does not block."""

    @abstractmethod
    async def models(self) -> Sequence[ModelCard]:
        """The models that this backend serves, as far as it knows them."""

    def prefill_cost(self) -> Line | None:
        """What the backend measured of its own prefill, up to date; None where it measures nothing."""
        return None

    @abstractmethod
    def count_tokens(self, text: str) -> int:
        """Tokens of a plain text; exact where the tokenizer is known, else an estimate. Called from worker threads."""

    @abstractmethod
    async def complete(self, call: Call) -> Answer | Stream:
        """Answer a call: a Stream when `call.stream`, unless it is refused with an error body, which is an Answer.

        Raises PromptsluiceError when nothing has been sent yet. After the first frame the stream's iterator raises it.
        The usage frame, last and with no choices, is among the frames exactly when `call.include_usage`.
        """


def counted_tokens(text: str, count: Callable[[str], int]) -> int:
    """By a tokenizer's `count`; of a text beyond `_COUNTED` characters only its beginning is counted, and scaled up.

    A prompt is counted several times on its way, and a tokenizer takes a second for two or three megabytes.
    """
    head = text[:_COUNTED]
    return count(text) if len(head) == len(text) else round(count(head) * len(text) / len(head))


def estimated_tokens(text: str) -> int:
    """For where no tokenizer is known: four UTF-8 bytes a token, near for English, high for most other scripts."""
    return (len(text.encode("utf-8", "replace")) + 3) // 4


def size_of(text: str) -> int:
    """UTF-8 bytes of a piece of an answer; at least 1, for a piece without text is one, too."""
    return max(1, len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
