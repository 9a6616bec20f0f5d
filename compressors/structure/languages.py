"""Programming languages: their names, how source in them looks, and what in their syntax trees is a comment or a body.

To add one: its grammar's package in pyproject.toml, and an entry here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

_LOOKED_AT = 20_000  # characters by which a language is guessed
# How lines begin in languages that are not known here, and look like one that is: nothing is guessed beside them.
_FOREIGN = re.compile(
    r"^[ \t]*+(?:using[ ][\w.]++;|namespace[ ]\w++[.;]"  # C#
    r"|(?:(?:override|private|protected|internal|public|suspend|inline)[ ])*+(?:fun[ ][\w<]|val[ ]\w|data[ ]class[ ])"
    r"|package[ ]\w++\.[\w.]++[ \t]*$|companion[ ]object\b|object[ ]\w++[ ][^\n]{0,200}\{"  # Kotlin, Scala
    r"|(?:\w++[ ])?func[ ][^\n]{1,200}->|guard[ ](?:let|var)[ ]|(?:extension|protocol)[ ]\w"
    r"|import[ ](?:Foundation|UIKit|AppKit|SwiftUI|Combine|XCTest)\b"  # Swift
    r"|\#import\b|@(?:implementation|end)\b|@property[ ]?\("  # Objective-C
    r"|import[ ]'(?:package|dart):|(?:end|fi|esac|done)[ \t]*$|use[ ](?:strict|warnings);"  # Dart, Ruby, shells, Perl
    r"|sub[ ]\w++[ ]\{|pragma[ ]solidity\b|\#!/\S*?/(?:env[ ])?(?:ba|z|k|da)?sh\b)"
    r"|^<(?:template|script|style|html|head|body|!doctype|\?php)\b"  # Vue, Svelte, pages, PHP
    r"|[=(,+][ ]?(?:@|\$@|@\$)\"",  # C#'s verbatim strings, in which a backslash is a backslash
    re.MULTILINE | re.IGNORECASE,
)
_MARKUP = re.compile(r"</[\w>]|/>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """`grammar`: module and function of its tree-sitter grammar. Node types: `comments`, and `functions` with bodies.

    `cues`: how a line of it begins that is not one of most others.
    """

    grammar: tuple[str, str]
    comments: tuple[str, ...] = ("comment",)
    functions: tuple[str, ...]
    cues: str

    @property
    def indented(self) -> bool:
        """Whether blocks are told by their indentation, and documentation stands in strings."""
        return self.grammar[0] == "tree_sitter_python"


_SCRIPT_FUNCTIONS = (
    "function_declaration",
    "generator_function_declaration",
    "function_expression",
    "arrow_function",
    "method_definition",
)
_SCRIPT_CUES = (
    r"(?:export[ ]|default[ ])*+(?:(?:const|let|var)[ ]\w|(?:async[ ])?function\b|class[ ]\w[ \w]*+\{)"
    r"|import[ ][^\n]{1,200}from[ ]['\"]|module\.exports\b"
)
_C_CUES = r"\#(?:include|define|if|ifdef|ifndef|endif)\b|(?:static|extern|struct|typedef|int|void|char|size_t)[ ]"

LANGUAGES: Mapping[str, Language] = {
    "python": Language(
        grammar=("tree_sitter_python", "language"),
        functions=("function_definition",),
        cues=r"(?:async[ ])?def[ ]\w+\(|class[ ]\w[^\n]{0,200}:$|from[ ][\w.]+[ ]import[ ]"
        r"|import[ ][\w.]+(?:[ ]as[ ]\w+)?$"
        r"|@\w|(?:el)?if[ ][^\n]{1,200}:$|for[ ]\w[^\n]{1,200}:$|with[ ][^\n]{1,200}:$|(?:try|else):$",
    ),
    "typescript": Language(
        grammar=("tree_sitter_typescript", "language_typescript"),
        functions=_SCRIPT_FUNCTIONS,
        cues=_SCRIPT_CUES + r"|(?:export[ ])?(?:interface|type|enum|namespace)[ ]\w|(?:readonly|declare)[ ]\w"
        r"|[^\n]{0,200}:[ ](?:string|number|boolean|unknown|void|Promise<)",
    ),
    # It is told by `dialect`.
    "tsx": Language(grammar=("tree_sitter_typescript", "language_tsx"), functions=_SCRIPT_FUNCTIONS, cues="(?!)"),
    "javascript": Language(
        grammar=("tree_sitter_javascript", "language"), functions=_SCRIPT_FUNCTIONS, cues=_SCRIPT_CUES
    ),
    "java": Language(
        grammar=("tree_sitter_java", "language"),
        comments=("line_comment", "block_comment"),
        functions=("method_declaration", "constructor_declaration"),
        cues=r"package[ ][\w.]+;|import[ ](?:static[ ])?[\w.*]+;|(?:public|private|protected)[ ]\w|@Override\b",
    ),
    "go": Language(
        grammar=("tree_sitter_go", "language"),
        functions=("function_declaration", "method_declaration", "func_literal"),
        cues=r"package[ ]\w+$|func[ (]|type[ ]\w+[ ](?:struct|interface)\b|import[ ][(\"]|[\w, ]{1,100}:=[ ]|defer[ ]",
    ),
    "rust": Language(
        grammar=("tree_sitter_rust", "language"),
        comments=("line_comment", "block_comment"),
        functions=("function_item",),
        cues=r"use[ ][\w:]+|(?:pub(?:\(\w+\))?[ ])?(?:fn|struct|enum|mod|trait)[ ]\w|impl\b|let[ ](?:mut[ ])?\w|\#!?\[",
    ),
    "cpp": Language(
        grammar=("tree_sitter_cpp", "language"),
        functions=("function_definition",),
        cues=_C_CUES
        + r"|template[ ]?<|namespace\b|using[ ]|class[ ]\w|(?:public|private|protected):|[^\n]{0,200}\bstd::",
    ),
    "c": Language(grammar=("tree_sitter_c", "language"), functions=("function_definition",), cues=_C_CUES),
}
"""By name. Of two that look alike the one with more cues is first, and must have more of them."""

_ALIASES = {
    "py": "python", "python3": "python", "pyi": "python", "js": "javascript", "jsx": "javascript", "mjs": "javascript",
    "node": "javascript", "ts": "typescript", "golang": "go", "rs": "rust", "c++": "cpp", "cc": "cpp", "cxx": "cpp",
    "hpp": "cpp", "h": "c",
}  # fmt: skip
_NARROWER = {"typescript": "javascript", "cpp": "c"}


def named(name: str) -> str | None:
    """The language that a fence calls by this name; None for one that is not known here."""
    word = name.lower().removeprefix("{.").rstrip("}")
    word = _ALIASES.get(word, word)
    return word if word in LANGUAGES else None


def dialect(language: str, source: str) -> str:
    """The language whose grammar reads this source: TypeScript with markup has one of its own."""
    return "tsx" if language == "typescript" and _MARKUP.search(source) else language


def foreign(text: str) -> bool:
    """Whether a line of a text is of a language that is not known here."""
    return _FOREIGN.search(text[:_LOOKED_AT]) is not None


def guessed(text: str) -> tuple[str | None, int]:
    """The language that most lines of a text look like, None where no line looks like any, and how many do."""
    head = text[:_LOOKED_AT]
    found = {name: sum(1 for _ in _cues(name).finditer(head)) for name in LANGUAGES}
    for wider, narrower in _NARROWER.items():
        if found[wider] == found[narrower]:
            found[wider] = 0
    best = max(found, key=lambda name: found[name])
    return (best if found[best] else None), found[best]


@cache
def _cues(name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*+(?:{LANGUAGES[name].cues})", re.MULTILINE)


@cache
def grammar(name: str) -> Any:
    """The language's tree-sitter grammar."""
    module, function = LANGUAGES[name].grammar
    return import_module("tree_sitter").Language(getattr(import_module(module), function)())
