"""Source code without comments, documentation and bodies: still source, broken or hostile text left alone, in time."""

import ast
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create
from promptsluice.compressors.base import Task
from promptsluice.compressors.structure.code import Code
from promptsluice.compressors.structure.languages import LANGUAGES, foreign, guessed, named
from promptsluice.compressors.structure.syntax import syntax_of
from promptsluice.prompt import Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
ALL: Mapping[str, Any] = {"comments": True, "docstrings": True, "bodies": True}

PYTHON = '''#!/usr/bin/env python
# Licence and other words.
"""What this module does."""
import os


@wrapped
def first(a, b):  # says little
    # What comes now.
    """Adds."""
    total = a + b  # type: ignore[operator]
    text = "# no comment"
    print(text, "größer")  # größer
    return total


class Thing:
    """A thing."""

    async def second(self):
        "Only words."

    def third(self): return 3  # short
'''
SCRIPT = """// Words.
import {x} from 'y';
/** Documentation. */
export function first(a /* one */, b) {
  // what comes now
  const z = a/* x */+b;
  const url = "http://example.com";
  return /*
  */ z; // eslint-disable-line
}
const second = (x) => {
  one();
  two();
  three();
};
"""


def task_of(text: str, prompt_of: PromptOf, question: str = "") -> Task:
    segment = next(one for one in prompt_of("A text.").segments if one.text == "A text.")
    return Task(segment=replace(segment, text=text), question=question, tokens=len(text), protected=())


def shortened(text: str, prompt_of: PromptOf, context: Make, question: str = "", **options: Any) -> str:
    compressor = create("code", options)
    assert isinstance(compressor, Code)
    task = replace(task_of(text, prompt_of, question), protected=compressor.protected(text))
    return compressor.rewrite_text(task, context=context()).text(text)


def test_comments_go_and_what_tools_read_stays(prompt_of: PromptOf, context: Make) -> None:
    short = shortened(PYTHON, prompt_of, context)
    assert [line for line in short.splitlines() if "#" in line] == [
        "#!/usr/bin/env python",
        "    total = a + b  # type: ignore[operator]",
        '    text = "# no comment"',
    ]
    assert ast.dump(ast.parse(short)) == ast.dump(ast.parse(PYTHON))
    assert shortened(PYTHON, prompt_of, context, comments=False) == PYTHON


def test_documentation_and_bodies_go_where_that_is_asked(prompt_of: PromptOf, context: Make) -> None:
    short = shortened(PYTHON, prompt_of, context, docstrings=True)
    assert all(ast.get_docstring(node) is None for node in ast.walk(ast.parse(short))
               if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))  # fmt: skip
    outline = shortened(PYTHON, prompt_of, context, bodies=True)
    assert '    """Adds."""\n    ...  # 4 lines left out\n' in outline
    assert "return 3" in outline
    assert "total" in shortened(PYTHON, prompt_of, context, "What does first() return?", bodies=True)
    assert ast.parse(shortened(PYTHON, prompt_of, context, **ALL))


def test_scripts(prompt_of: PromptOf, context: Make) -> None:
    short = shortened(SCRIPT, prompt_of, context)
    assert "a +b" in short.replace("a+b", "a +b")
    assert "/** Documentation. */" in short
    assert '"http://example.com"' in short
    assert "return /*\n  */ z; // eslint-disable-line" in short
    assert "Words" not in short
    assert "what comes" not in short
    outline = shortened(SCRIPT, prompt_of, context, bodies=True)
    assert "first(a , b) { /* 5 lines left out */ }\nconst second = (x) => { /* 3 lines left out */ };\n" in outline


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("python", "def a(x):\n    # gone\n    b = 1\n    c = 2\n    return b\n"),
        ("javascript", "function a(x) {\n  // gone\n  b();\n  c();\n  return 1;\n}\n"),
        ("typescript", "export function a(x: number): number {\n  // gone\n  b();\n  c();\n  return 1;\n}\n"),
        ("java", "class A {\n  int a(int x) {\n    // gone\n    b();\n    c();\n    return 1;\n  }\n}\n"),
        ("go", "package p\n\nfunc a(x int) int {\n\t// gone\n\tb()\n\tc()\n\treturn 1\n}\n"),
        ("rust", "fn a(x: i32) -> i32 {\n    // gone\n    b();\n    c();\n    1\n}\n"),
        ("c", "int a(int x) {\n  // gone\n  b();\n  c();\n  return 1;\n}\n"),
        ("cpp", "std::string a(int x) {\n  // gone\n  b();\n  c();\n  return {};\n}\n"),
    ],
)
def test_every_language(language: str, source: str, prompt_of: PromptOf, context: Make) -> None:
    text = f"Words.\n\n```{language}\n{source}```\n\nWords."
    assert "gone" not in shortened(text, prompt_of, context)
    outline = shortened(text, prompt_of, context, bodies=True)
    assert "lines left out" in outline
    assert "b()" not in outline
    syntax = syntax_of(outline.split("\n", 3)[3].split("```")[0], language, expired=lambda: False)
    assert syntax is not None
    assert syntax.errors == []
    assert set(LANGUAGES) >= {language}


def test_what_could_not_be_parsed_stays(prompt_of: PromptOf, context: Make) -> None:
    broken = (
        "def good():\n    # gone\n    return 1\n\n\ndef bad(x):\n    x = 2 $ 3\n    y = 3\n    z = 4\n    return x\n"
    )
    text = f"```python\n{broken}```\n"
    short = shortened(text, prompt_of, context, **ALL)
    assert "x = 2 $ 3" in short
    assert "y = 3" in short
    assert "gone" not in short
    prose = "# Title\n\nFrom here on it is prose, for example:\n\n- if it rains\n- what then?\n" * 5
    assert shortened(prose, prompt_of, context, **ALL) == prose
    assert shortened("```python\nprint(1)  # open", prompt_of, context, **ALL) == "```python\nprint(1)  # open"
    unknown = "```brainfudge\n+++ # x\n```\n"
    assert shortened(unknown, prompt_of, context, **ALL) == unknown


def test_marked_text_stays(prompt_of: PromptOf, context: Make) -> None:
    text = PYTHON.replace("# What comes now.", "# <keep>What comes now.</keep>")
    short = shortened(text, prompt_of, context, **ALL)
    assert "# <keep>What comes now.</keep>" in short
    assert "# Licence" not in short


def test_files_that_tools_read_and_how_often_it_runs(prompt_of: PromptOf, context: Make, tool_texts: Any) -> None:
    for source in (PYTHON, SCRIPT):
        for options in ({}, ALL):
            once = create("code", options).compress(prompt_of(source), context=context())
            assert once.rate < 1.0
            again = create("code", options).compress(once.prompt, context=context())
            assert tool_texts(again.prompt) == tool_texts(once.prompt)


def test_languages_by_name_and_by_looks() -> None:
    assert named("py") == "python"
    assert named("{.ts}") == "typescript"
    assert named("C++") == "cpp"
    assert named("klingon") is None
    assert named("tsx") == "tsx"
    assert guessed(PYTHON)[0] == "python"
    assert guessed(SCRIPT)[0] == "javascript"
    assert guessed("interface A {\n  b: string\n}\nexport const c: A = 1;\nexport class D {}\n") == ("typescript", 4)
    assert guessed("A text about nothing.\n" * 40) == (None, 0)
    own = Path(__file__).read_text(encoding="utf-8")
    assert guessed(own)[0] == "python"
    assert not foreign(PYTHON + "@property\ndef a(self): ...\n")
    assert not foreign(TSX + SCRIPT)


TSX = """import React from 'react';
interface Props { name: string }
export const Help = (props: Props) => {
  // gone
  return <p>Visit http://example.com/docs for <b>more</b> help</p>;
};
export const Other: string = 'x';
"""
C_SHARP = """public class Runner : Base {
    public void Go(int n) {
        // one
        var dir = @"C:\\tmp\\"; var url = "http://example.com/a"; Run(dir, url);
    }
    private int a;
    struct Pair { int b; }
}
"""
KOTLIN = """import a.b
import c.d
import e.f

val url = "http://example.com" // x
fun main() { val s = "# no" }
"""
SWIFT = """import Foundation
let a = 1
let b = 2
let c = 3
let d = #"a " // b"#
"""
VUE = "<template>\n  <p>a // b</p>\n</template>\n<script>\nconst a = 1\nconst b = 2\nconst c = 3 // x\n</script>\n"


def test_markup_in_typescript_is_no_comment(prompt_of: PromptOf, context: Make) -> None:
    for text in (TSX, f"Words.\n\n```ts\n{TSX}```\n", f"Words.\n\n```tsx\n{TSX}```\n"):
        assert shortened(text, prompt_of, context) == text.replace("  // gone\n", "")


@pytest.mark.parametrize(
    "source",
    [C_SHARP, KOTLIN, SWIFT, VUE, PYTHON + "def broken(:\n", SCRIPT + "const a = (1;\n", SCRIPT + "function a() {"],
)
def test_a_language_that_does_not_explain_all_changes_nothing(source: str, prompt_of: PromptOf, context: Make) -> None:
    assert shortened(source, prompt_of, context, **ALL) == source


def test_fences_in_the_strings_of_a_program_are_strings(prompt_of: PromptOf, context: Make) -> None:
    words = 'TEXT = """\n```python\n# stays\nx = 1\n```\n"""\n'
    for before in ("import os\n# gone\n", "import os\nimport sys\nimport re\n# gone\n"):
        assert shortened(before + words, prompt_of, context) == before.replace("# gone\n", "") + words
    broken = f"import os\nimport sys\nimport re\n{words}\ndef a(:\n"
    assert shortened(broken, prompt_of, context) == broken
    kotlin = KOTLIN + words
    assert shortened(kotlin, prompt_of, context) == kotlin
    page = "Using it:\n\nimport the module\n\n```python\n# gone\nx = 1\n```\n"
    assert "gone" not in shortened(page, prompt_of, context)


@pytest.mark.parametrize(
    "text",
    [
        "~" * 20_000 + "`",
        "```" + "a" * 20_000 + "`",
        "```python\n" + "def a(b):\n    x=3\n" + "x" * 20_000 + "=>\n```\n",
        "```js\n" + "(" + "x" * 20_000 + "=>{\n\n\n\n\n})\n```\n",
        "class " + "a" * 20_000,
        " " * 20_000 + "x",
    ],
)
def test_lines_of_one_character_take_no_time(text: str, prompt_of: PromptOf, context: Make) -> None:
    """What looks for source reads a line once: these took minutes."""
    assert shortened(text, prompt_of, context) == text


@pytest.mark.parametrize(
    ("language", "kept"),
    [
        ("go", '// #include <stdio.h>\n/*\nint a;\n*/\nimport "C"\n'),
        ("go", "//export Foo\nfunc Foo() {}\n"),
        ("go", "// Code generated by x. DO NOT EDIT.\n"),
        ("python", '# /// script\n# dependencies = [\n#   "x",\n# ]\n#\n# more\n# ///\n'),
        ("python", "x = 1  # only by hand  # pragma: no cover\n"),
        ("python", "# flake8: noqa\ny = a  # nosec B101\n"),
        ("python", "# vim: set fileencoding=latin-1\n"),
        ("python", "# cython: language_level=3\n# yapf: disable\nx = 1  # doctest: +SKIP\ny = 1  # pyre-fixme[6]\n"),
        ("python", "x = 1  # nosemgrep\n"),
        (
            "javascript",
            "// biome-ignore lint: x\n// deno-lint-ignore a\n/** @jsx h */\nconst a = /* #__PURE__ */ b();\n",
        ),
        (
            "javascript",
            "import(/* webpackChunkName: 'a' */ 'b');\n/* c8 ignore next */\n// $FlowFixMe[x]\n/* global a */\n",
        ),
        ("javascript", "switch (a) { case 1: b(); // fallthrough\ncase 2: c(); }\n//# sourceMappingURL=a.map\n"),
        ("typescript", '/// <reference types="node" />\nlet a = 1;\n'),
    ],
)
def test_comments_that_are_more_than_words_stay(language: str, kept: str, prompt_of: PromptOf, context: Make) -> None:
    mark = "#" if language == "python" else "//"
    text = f"```{language}\n{kept}{mark} gone\n{mark} away\n```\n"
    assert shortened(text, prompt_of, context, docstrings=True) == f"```{language}\n{kept}```\n"


def test_the_last_line_of_a_macro(prompt_of: PromptOf, context: Make) -> None:
    source = "#define A(x) \\\n  f(x); \\\n  // gone\nint b = 1;\n#define C \\\n  /* gone */\nint d = 1;\n"
    short = shortened(f"```c\n{source}```\n", prompt_of, context)
    assert "  f(x); \\\n\nint b" in short.replace("  // gone", "")
    assert "#define C \\\n\nint d" in short.replace("  /* gone */", "")


BODY = "{\n  one();\n  two();\n  three();\n}"


@pytest.mark.parametrize(
    ("language", "source", "name"),
    [
        ("go", f"func (s *Server) Serve(w int) {BODY}\n", "Serve"),
        ("go", f"func main() {{\n  f := func() {BODY}\n  f()\n}}\n", "f"),
        ("java", f"class A {{\n@Cached(of = 3) int size(int x) {BODY}\n}}\n", "size"),
        ("javascript", f"const second = (x) => {BODY};\n", "second"),
        ("javascript", f"const third = memo(async (x) => {BODY});\n", "third"),
        ("javascript", f"x = {{ a: function () {BODY} }};\n", "a"),
        ("javascript", f"module.exports.fourth = function () {BODY};\n", "fourth"),
        ("javascript", f"class A {{ b = () => {BODY} }}\n", "b"),
        ("typescript", f"class A {{ b = (): void => {BODY} }}\n", "b"),
        ("tsx", f"const fifth = (x: number) => {BODY};\nconst a = <b></b>;\n", "fifth"),
        ("c", f"static int *(go)(int x) {BODY}\n", "go"),
        ("cpp", f"template <class T> T &Pile<T>::top(int x) const {BODY}\n", "top"),
        ("rust", f"impl A {{\n  fn go(&self) {BODY}\n}}\n", "go"),
        ("python", "class A:\n  @b(1)\n  def go(self):\n    a = 1\n    b = 2\n    return 3\n", "go"),
    ],
)
def test_functions_that_are_asked_about(
    language: str, source: str, name: str, prompt_of: PromptOf, context: Make
) -> None:
    text = f"```{language}\n{source}```\n"
    assert "lines left out" in shortened(text, prompt_of, context, "What does it do?", bodies=True)
    assert shortened(text, prompt_of, context, f"What does `{name}` do?", bodies=True) == text


def test_what_is_around_or_within_a_function_that_is_asked_about(prompt_of: PromptOf, context: Make) -> None:
    inner = BODY.replace("two()", f"two(function inner() {BODY}, () => {BODY})")
    text = f"```js\nfunction outer() {inner}\nfunction other() {BODY}\n```\n"
    short = shortened(text, prompt_of, context, "What does inner return?", bodies=True)
    assert short.count("lines left out") == 2
    assert f"function inner() {BODY}" in short
    short = shortened(text, prompt_of, context, "What does outer return?", bodies=True)
    assert short == text.replace(f"other() {BODY}", "other() { /* 3 lines left out */ }")


@pytest.mark.parametrize("unit", ["(", "[", "{", "a(", "/*", "`${", "# x\n", '"', "x=>", "\n", "/* a */ x "])
@pytest.mark.parametrize("size", [40_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_hostile_text_ends(unit: str, size: int, prompt_of: PromptOf, context: Make) -> None:
    """However the parser fares: it is told to stop."""
    text = f"```python\n{(unit * size)[:size]}\n```\n"
    began = time.monotonic()
    compressor = create("code", ALL)
    assert isinstance(compressor, Code)
    rewrite = compressor.rewrite_text(task_of(text, prompt_of), context=context(deadline=began + 0.2))
    assert len(rewrite.text(text)) <= len(text)


def test_a_deadline_that_is_over_and_a_parser_that_is_stopped(prompt_of: PromptOf, context: Make) -> None:
    assert syntax_of("(" * 100_000, "python", expired=lambda: True) is None
    compressor = create("code")
    assert isinstance(compressor, Code)
    late = compressor.rewrite_text(task_of(f"```python\n{PYTHON}```\n", prompt_of), context=context(deadline=0.0))
    assert "deadline reached" in late.note


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.sampled_from(
            [
                "def f(x):",
                "class A:",
                "    return 1",
                "    # c",
                '    """d"""',
                "        y = (",
                "# ü",
                "x = 'é' # z",
                ")",
                "",
            ]
        ),
        max_size=25,
    )
)
def test_nothing_is_made_up_and_twice_is_once(lines: list[str], prompt_of: PromptOf, context: Make) -> None:
    text = "```python\n" + "\n".join(lines) + "\n```\n"
    short = shortened(text, prompt_of, context, **ALL)
    assert len(short) <= len(text) + 25 * len(lines)
    assert set(short) <= set(text) | set("... # lines left out0123456789")
    assert shortened(short, prompt_of, context, **ALL) == short
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return
    ast.parse(short.removeprefix("```python\n").removesuffix("```\n"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Prose.\n\n```python\n# a remark\nx = 1\n```\n", True),
        ("Prose.\n\n```text\n# a remark\n```\n", False),
        ("Prose of several lines.\nfor example: this one,\nand no more.\n", False),
        ("import os\nfrom a import b\n\ndef go():\n    pass  # so\n", True),
        ("@@ -1,1 +1,1 @@\n-import os\n-import re\n-import io\n+import sys\n", False),
        ("", False),
    ],
)
def test_texts_without_source_are_told_without_a_parser(text: str, wanted: bool) -> None:
    assert create("code").applies(text) is wanted
