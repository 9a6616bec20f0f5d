"""Grammars without a model: whatever is drawn within one is valid, and what cannot be enforced is refused by name."""

import json
import re
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from promptsluice.backend_engine.grammar import Grammar
from promptsluice.backend_engine.grammar.compiler import GrammarCompiler
from promptsluice.backend_engine.grammar.filling import Masks
from promptsluice.backend_engine.grammar.regex import regex_parts
from promptsluice.prompt.errors import BadRequest

from .writing import EOS, VOCAB, allowed, tiny_compiler, tiny_tokenizer, written

ANY: dict[str, Any] = {"type": "object"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """An object with these members and no others; all are required unless some are named."""
    names = list(required or properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "any object": ANY,
    "anything": {},
    "nested objects": closed(a=closed(b=closed(c={"type": "integer"}), d={"type": "boolean"}), e={"type": "null"}),
    "optional members": closed("b", a={"type": "integer"}, b={"type": "string"}, c={"type": "boolean"}),
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "typed others": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "patterned names": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    "enum": {"enum": ["red", "grün", 3, None, {"a": [1]}, "\n", 'say "hi"']},
    "const": {"const": {"x": [1, 2, "日本"]}},
    "anyOf": {"anyOf": [closed(a={"type": "integer"}), {"type": "string"}, {"type": "array", "maxItems": 0}]},
    "tagged oneOf": {
        "oneOf": [
            closed(kind={"const": "a"}, x={"type": "integer"}),
            closed(kind={"const": "b"}, y={"type": "string"}),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 50}]},
    "recursion": {
        "$defs": {
            "node": closed(value={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
        },
        "$ref": "#/$defs/node",
    },
    "tree": {
        "definitions": {
            "t": closed(
                leaf={"type": "boolean"}, sub={"type": "array", "items": {"$ref": "#/definitions/t"}, "maxItems": 2}
            )
        },
        "$ref": "#/definitions/t",
    },
    "integers": {"type": "integer", "minimum": -15, "exclusiveMaximum": 1200},
    "numbers": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "pattern anywhere": {"type": "string", "pattern": "[0-9]x", "maxLength": 20},
    "unicode pattern": {"type": "string", "pattern": "^[à-ü]{2,4}😀$"},
    "formats": closed(**{name: {"type": "string", "format": name} for name in ("date", "uuid", "ipv4")}),
    "email": {"type": "string", "format": "email"},
    "time": {
        "type": "array",
        "items": {"anyOf": [{"format": "time", "type": "string"}, {"format": "date-time", "type": "string"}]},
    },
    "unicode names": closed(**{"naïve": {"type": "integer"}, "日本": {"type": "boolean"}, 'quo"te': {"type": "null"}}),
    "many types": {"type": ["string", "integer", "null"], "maxLength": 4},
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return tiny_compiler()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_at_random_is_valid(compiler: GrammarCompiler, name: str) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    compiled = compiler.compile(Grammar.json_schema(schema))
    ends = 0
    for seed in range(6):
        text, ended = written(compiled, seed)
        if ended:
            ends += 1
            validator.validate(json.loads(text))
    assert ends >= 3


def test_json_object_is_an_object(compiler: GrammarCompiler) -> None:
    for seed in range(6):
        text, ended = written(compiler.compile(Grammar.json_object()), seed)
        assert text.startswith("{") and (not ended or isinstance(json.loads(text), dict))


@pytest.mark.parametrize(
    "pattern",
    [
        "abc", "^abc$", "a|bc|", "[a-z]{3,8}", r"\d{4}-\d{2}-\d{2}", "(ab|cd)+e?", r"[^a-z\n]{5}", "(?i)yes|no",
        r"\(\d+\) \d{3}/\d{4}", "[äöü日本😀]{2,4}", r"\w+@\w+\.(com|org)", r"a\nb",
    ],
)  # fmt: skip
def test_a_regular_expression_matches_the_whole(compiler: GrammarCompiler, pattern: str) -> None:
    compiled = compiler.compile(Grammar.regex(pattern))
    ends = [text for text, ended in (written(compiled, seed) for seed in range(6)) if ended]
    assert len(ends) >= 3
    assert all(re.fullmatch(pattern, text) for text in ends), ends


def test_a_choice_is_literal(compiler: GrammarCompiler) -> None:
    options = ["a.b", "(x)", "C:\\dir", "1+1=2", "new\nline", "grün", "[a-z]", "50%", "a/b", "$5", "~`'\"<>!@&;:,_ #-"]
    compiled = compiler.compile(Grammar.choice(options))
    seen = {written(compiled, seed)[0] for seed in range(30)}
    assert seen <= set(options) and len(seen) > 5
    for option in options:
        assert written(compiler.compile(Grammar.choice([option])), 0) == (option, True)


def test_whitespace_between_tokens_is_bounded(compiler: GrammarCompiler) -> None:
    """A model that loves line breaks still gets somewhere."""
    matcher = compiler.compile(Grammar.json_schema(closed(a={"type": "integer", "maximum": 9, "minimum": 0}))).matcher()
    masks, tokenizer = Masks(rows=1, vocab=VOCAB, device=torch.device("cpu")), tiny_tokenizer()
    newline, ids, ended = tokenizer.encode("\n").ids[0], [], False
    while not ended:
        mask = masks.of([matcher])
        assert mask is not None
        possible = allowed(mask)[0]
        ids.append(newline if possible[newline] else int(possible.argmax()))
        ended = matcher.accept(ids[-1])
        assert len(ids) < 300
    assert set(json.loads(tokenizer.decode(ids))) == {"a"}


def test_the_end_can_be_chosen_where_more_could_follow(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar.regex("a+")).matcher()
    masks = Masks(rows=1, vocab=VOCAB, device=torch.device("cpu"))
    first = masks.of([matcher])
    assert first is not None and not allowed(first)[0, EOS]
    assert not matcher.accept(tiny_tokenizer().encode("a").ids[0])
    second = masks.of([matcher])
    assert second is not None and allowed(second)[0, EOS]
    assert matcher.accept(EOS)


def test_masks_of_a_mixed_batch(compiler: GrammarCompiler) -> None:
    """Each row has its own; rows without a grammar allow everything, also where one had been before."""
    masks = Masks(rows=4, vocab=VOCAB, device=torch.device("cpu"))
    digits, letters = (compiler.compile(Grammar.regex(text)) for text in ("[0-9]{9}", "[a-z]{9}"))
    assert masks.of([None, None]) is None
    for order in ([digits, None, letters, digits], [None, letters, None], [letters, digits]):
        mask = masks.of([one and one.matcher() for one in order])
        assert mask is not None and mask.dtype == torch.int32 and mask.shape == (len(order), VOCAB // 32)
        for row, one in zip(allowed(mask), order, strict=True):
            alone = None if one is None else masks_alone(one.matcher())
            assert np.array_equal(row, np.ones(VOCAB, dtype=bool) if alone is None else alone)


def masks_alone(matcher: Any) -> np.ndarray:
    mask = Masks(rows=1, vocab=VOCAB, device=torch.device("cpu")).of([matcher])
    assert mask is not None
    return allowed(mask)[0]


def test_one_failed_matcher_harms_no_other(compiler: GrammarCompiler) -> None:
    failed, fine = (compiler.compile(Grammar.regex("[0-9]{9}")).matcher(param="guided_regex") for _ in range(2))
    with pytest.raises(BadRequest, match="guided_regex"):
        failed.accept(tiny_tokenizer().encode("x").ids[0])
    mask = Masks(rows=2, vocab=VOCAB, device=torch.device("cpu")).of([failed, fine])
    assert mask is not None and allowed(mask)[0].all() and allowed(mask)[1].sum() < 200
    with pytest.raises(BadRequest):
        failed.accept(5)


@pytest.mark.parametrize(
    ("schema", "place", "said"),
    [
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems", "'uniqueItems' cannot be enforced"),
        (closed(a={"not": {"type": "null"}}), "s.properties.a.not", "'not'"),
        (closed(a={"anyOf": [ANY, {"type": "string", "maxLenght": 3}]}), "s.properties.a.anyOf[1].maxLenght", "maxLe"),
        ({"type": "string", "nullable": True}, "s.nullable", "'nullable'"),
        ({"if": {}, "then": {}}, "s.if", "'if'"),
        ({**ANY, "dependentRequired": {"a": ["b"]}}, "s.dependentRequired", "dependentRequired"),
        ({**ANY, "unevaluatedProperties": False}, "s.unevaluatedProperties", "unevaluated"),
        ({**ANY, "propertyNames": {"maxLength": 3}}, "s.propertyNames", "propertyNames"),
        ({"type": "array", "contains": {}}, "s.contains", "contains"),
        ({"x-guidance": {"lenient": True}, "type": "string"}, "s.x-guidance", "x-guidance"),
        ({"$dynamicRef": "#x"}, "s.$dynamicRef", "dynamicRef"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "s.$ref", "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "s.$ref", "nothing is fetched"),
        ({"$ref": 5}, "s.$ref", "stay within"),
        ({"$ref": "#/$defs/missing"}, "s", "does not exist"),
        ({"type": "strng"}, "s", "strng"),
        ({"type": "string", "format": "shoe-size"}, "s", "shoe-size"),
        ({"type": "integer", "minimum": "3"}, "s", "minimum"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "s", "Unsatisfiable"),
        (False, "s", "nothing is valid"),
        ({"enum": []}, "s", "s: "),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "s", "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "s", "look-around"),
        ({"type": "string", "pattern": "(a"}, "s", "unclosed"),
        ({"type": "string", "pattern": 5}, "s.pattern", "must be a string"),
        ({"anyOf": 5}, "s.anyOf", "list"),
        ({"properties": {"a": 5}}, "s.properties.a", "object or a boolean"),
        ({"properties": []}, "s", "s: "),
        (7, "s", "object or a boolean"),
        ({1: 2}, "s", "must be strings"),
        ({"default": float("nan")}, "s", "not JSON"),
        ({"const": "\ud800"}, "s", "s: "),
    ],
)
def test_what_cannot_be_enforced_is_named(compiler: GrammarCompiler, schema: Any, place: str, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)) as caught:
        compiler.compile(Grammar.json_schema(schema, param="s"))
    assert caught.value.param == place and "\n" not in caught.value.message


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(levels: int) -> Any:
    """Few words for a schema of 2**levels parts, as Python objects that share their parts."""
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema(nested(1_000)),
        lambda: Grammar.json_schema(nested(100_000)),
        lambda: Grammar.json_schema(doubled(40)),
        lambda: Grammar.json_schema({"description": "x" * 5_000_000}),
        lambda: Grammar.json_schema({"enum": [f"value {number}" for number in range(400_000)]}),
        lambda: Grammar.json_schema(closed(**{f"p{number}": {"type": "string"} for number in range(5_000)})),
        lambda: Grammar.json_schema({"anyOf": [closed(**{f"p{n}": ANY}) for n in range(5_000)]}),
        lambda: Grammar.json_schema(
            {"allOf": [{"anyOf": [closed(**{f"{side}{n}": ANY}) for side in "ab"]} for n in range(30)]}
        ),
        lambda: Grammar.json_schema({"type": "string", "pattern": "(a{1000}){1000}"}),
        lambda: Grammar.json_schema({"patternProperties": {"(a{1000}){1000}": {}}}),
        lambda: Grammar.regex("(a{1000}){1000}"),
        lambda: Grammar.regex("[0-9]{40}((a|b{9}){999}){999}"),
        lambda: Grammar.regex("a{999999999}"),
        lambda: Grammar.regex("(" * 20_000 + "a" + ")" * 20_000),
        lambda: Grammar.regex("(a|"),
        lambda: Grammar.regex("a" * 5_000_000),
        lambda: Grammar.regex(r"(a)\1"),
        lambda: Grammar.regex(r"[^\s\S]"),
        lambda: Grammar.regex(""),
        lambda: Grammar.regex("\ud800"),
        lambda: Grammar.choice([]),
        lambda: Grammar.choice(["a", ""]),
        lambda: Grammar.choice(["a" * 1_000_000]),
    ],
)
def test_hostile_grammars_end_in_an_error(compiler: GrammarCompiler, make: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        compiler.compile(make())
    assert len(caught.value.message) < 600 and "\n" not in caught.value.message


def test_a_schema_in_a_circle_is_refused() -> None:
    circle: dict[str, Any] = {"type": "array"}
    circle["items"] = circle
    with pytest.raises(BadRequest, match="nested deeper"):
        Grammar.json_schema(circle)


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [("abc", 3), ("a{3}", 3), ("(ab){2,5}c", 11), ("((a{10}){10}){10}", 1000), (r"\d{4}[a-z{]{2}\{9}", 9), ("", 0)],
)
def test_the_size_of_a_regular_expression(pattern: str, parts: int) -> None:
    assert regex_parts(pattern) == parts


def test_the_cache_goes_by_content(compiler: GrammarCompiler) -> None:
    own = tiny_compiler(kept=2)
    first = own.compile(Grammar.regex("a{1,3}", param="guided_regex"))
    assert own.compile(Grammar.regex("a{1,3}", param="response_format")) is first
    own.compile(Grammar.regex("b"))
    assert own.compile(Grammar.regex("a{1,3}")) is first
    own.compile(Grammar.regex("c"))
    own.compile(Grammar.regex("d"))
    assert own.compile(Grammar.regex("a{1,3}")) is not first
    assert Grammar.regex("{}") != Grammar.json_schema({})


def test_threads_that_want_the_same_grammar_share_it() -> None:
    own, found = tiny_compiler(), []
    threads = [threading.Thread(target=lambda: found.append(own.compile(Grammar.json_object()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_a_vocabulary_that_cannot_be_indexed() -> None:
    for other in (
        GrammarCompiler(None, vocab=512, eos_ids=[2]),
        tiny_compiler(vocab=9),
    ):
        with pytest.raises(BadRequest, match="tokenizer"):
            other.compile(Grammar.regex("a"))


def test_ids_without_a_token_are_never_allowed() -> None:
    """A model may have more rows of logits than its tokenizer has tokens."""
    compiler = tiny_compiler(vocab=VOCAB + 100, eos_ids=(EOS, 0))
    matcher = compiler.compile(Grammar.regex("(?s:.)*")).matcher()
    mask = Masks(rows=1, vocab=VOCAB + 100, device=torch.device("cpu")).of([matcher])
    assert mask is not None and mask.shape == (1, 20)
    words = mask.numpy().view(np.uint32)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(-1)
    assert bits[[EOS, 0]].all() and not bits[1] and not bits[VOCAB:].any()
