"""From a grammar to what a request follows, by llguidance: for one tokenizer, with a cache, within limits.

Compiling takes milliseconds, hostile grammars seconds, and the first one of a model waits for an index of its
vocabulary: not for an event loop, and not for the engine's thread. It lets other threads run.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from ...prompt.errors import BadRequest
from .lark import JSON_OPTIONS
from .matcher import Matcher
from .spec import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_LEXER_STATES = 50_000  # 1 to 2 kB each, per request


class Indexable(Protocol):
    """A tokenizer whose vocabulary can be read."""

    @property
    def backend(self) -> "Tokenizer": ...


class CompiledGrammar:
    """A grammar for one tokenizer; immutable, shared by any number of requests."""

    def __init__(self, core: "LLMatcher", *, grammar: Grammar, compiler: "GrammarCompiler") -> None:
        self._core = core
        self._grammar = grammar
        self.compiler = compiler

    def matcher(self, *, param: str | None = None) -> Matcher:
        """A fresh place at the grammar's beginning."""
        return Matcher(self._core.deep_copy(), param=param or self._grammar.param)


class GrammarCompiler:
    """Compiles grammars for a tokenizer with a model's `vocab` and `eos_ids`; safe for several threads.

    The `kept` grammars used last are kept, by content.
    """

    def __init__(self, tokenizer: Indexable | None, *, vocab: int, eos_ids: Sequence[int], kept: int = 128) -> None:
        self._indexed = tokenizer
        self._vocab = vocab
        self._eos_ids = list(eos_ids)
        self._kept = kept
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Blocks. Raises BadRequest with what is wrong or not supported."""
        known = self._known(grammar)
        if known is not None:
            return known
        with self._compiling:  # one at a time: the second of two equal ones finds the first's
            known = self._known(grammar)
            if known is None:
                known = CompiledGrammar(self._compile(grammar), grammar=grammar, compiler=self)
                self._keep(grammar, known)
        return known

    def _known(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return self._cache.get(grammar)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._cache[grammar] = compiled
            while len(self._cache) > self._kept:
                self._cache.popitem(last=False)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, max_lexer_states=_LEXER_STATES)
        tokenizer = self._tokenizer(grammar.param)
        core = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        # The first mask is the dearest one: every copy has it.
        first = 0 if core.is_error() else int.from_bytes(core.compute_bitmask(), "little")
        if not core.is_error() and not first & ~sum(1 << token for token in tokenizer.eos_tokens):
            raise _refused(grammar, "nothing matches it but the empty text")
        if core.is_error():
            raise _refused(grammar, core.get_error())
        return core

    def _tokenizer(self, param: str) -> "LLTokenizer":
        if self._indexed is None:
            raise BadRequest("structured output needs a model with a tokenizer", param=param)
        try:
            return self._index
        except ValueError as error:
            raise BadRequest(
                f"this model's tokenizer does not allow structured output: {error}", param=param
            ) from error

    @cached_property
    def _index(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        assert self._indexed is not None
        return LLTokenizer(self._indexed.backend.to_str(), n_vocab=self._vocab, eos_token=self._eos_ids or None)


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher, regex_to_lark

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(regex_to_lark(grammar.text, use_ascii="dws"))
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise _refused(grammar, str(error)) from error


def _refused(grammar: Grammar, reason: str) -> BadRequest:
    """The library's reason in one line. For a regular expression it shows the whole pattern first."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "unknown")
    what = {"json_schema": "schema", "regex": "regular expression", "lark": "set of functions"}[grammar.kind]
    message = f"{grammar.param}: this {what} is not supported: {told.removeprefix('error:').strip()[:300]}"
    return BadRequest(message, param=grammar.param, code="invalid_value")
