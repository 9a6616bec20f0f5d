"""Requests with a grammar in the engine: valid output whatever else runs, and nobody else's tokens change."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.grammar import Grammar
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from promptsluice.prompt.errors import BadRequest

from .driving import DEVICE, Collected, alone, assert_idle, finish, greedy, random_ids, tiny_engine, together
from .eager import EagerSteps
from .writing import EOS, tiny_tokenizer

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["dot", "größer"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny random model that can write text."""
    path = tmp_path_factory.mktemp("writing") / "model"
    shutil.copytree(tiny_llama_dir, path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_model(path, dtype="float32", device=DEVICE)


def constrained(
    engine: Engine, grammar: Grammar, seed: int, *, temperature: float = 0.0, max_tokens: int = 150, **fields: Any
) -> GenerationRequest:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, **fields)
    return GenerationRequest(ids=random_ids(9, seed), sampling=params, grammar=engine.grammars.compile(grammar))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("steps", [None, EagerSteps])
def test_output_is_valid(model: LoadedModel, temperature: float, steps: Any) -> None:
    """Also on the way of a GPU, where greedy steps would run ahead of the tokens that masks depend on."""
    engine = tiny_engine(model, single_rows=steps)
    grammar = Grammar.json_schema(POINT)
    requests = [constrained(engine, grammar, seed, temperature=temperature) for seed in range(3)]
    for output in together(engine, *requests):
        value = json.loads(output.text)
        assert value["kind"] in ("dot", "größer") and 0 <= value["x"] <= 99 and len(value) == 2
        assert output.result.finish_reason == "stop" and output.tokens[-1] != EOS
    assert_idle(engine)


@pytest.mark.parametrize("steps", [None, EagerSteps])
def test_free_rows_beside_constrained_ones_are_as_if_alone(model: LoadedModel, steps: Any) -> None:
    engine = tiny_engine(model, single_rows=steps)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True)
    free = [greedy(random_ids(12, seed), 20) for seed in (1, 2)]
    free.append(GenerationRequest(ids=random_ids(30, 3), sampling=sampled))
    expected = [alone(tiny_engine(model), request).tokens for request in free]
    digits = constrained(engine, Grammar.regex("[0-9]{30}"), 4)
    outputs = together(engine, free[0], digits, free[1], free[2])
    assert outputs.pop(1).text.isdigit()
    assert [output.tokens for output in outputs] == expected


def test_what_is_valid_already_stays_as_it_is(model: LoadedModel) -> None:
    """A grammar that allows any text but control tokens changes nothing about a greedy text without them."""
    engine = tiny_engine(model)
    for seed in range(5):
        free = alone(engine, greedy(random_ids(9, seed), 20))
        bound = constrained(engine, Grammar.regex("(?s:.)*"), seed, max_tokens=20)
        if not {0, 1, EOS} & set(free.tokens) and "\ufffd" not in free.text:
            assert alone(engine, bound).tokens == free.tokens


def test_preempted_requests_keep_their_place(model: LoadedModel) -> None:
    grammar = Grammar.regex("[a-z]{10}-[0-9]{10}-[A-Z]{10}")
    roomy, tight = tiny_engine(model), tiny_engine(model, pages=25)
    expected = [alone(roomy, constrained(roomy, grammar, seed)).text for seed in range(4)]
    outputs = together(tight, *(constrained(tight, grammar, seed) for seed in range(4)))
    assert tight.stats().preemptions > 0
    assert [output.text for output in outputs] == expected
    assert all(re.fullmatch(grammar.text, output.text) for output in outputs)
    assert_idle(tight)


def test_max_tokens_cuts_and_says_so(model: LoadedModel) -> None:
    engine = tiny_engine(model)
    output = alone(engine, constrained(engine, Grammar.regex("[a-z]{20}[0-9]{50}"), 1, max_tokens=9))
    assert output.result.finish_reason == "length" and len(output.tokens) == 9
    exact = alone(engine, constrained(engine, Grammar.regex("[0-9]"), 1, max_tokens=1))
    assert exact.result.finish_reason == "stop" and exact.text.isdigit()


def test_stop_strings_work_within_a_grammar(model: LoadedModel) -> None:
    engine = tiny_engine(model)
    output = alone(engine, constrained(engine, Grammar.regex("[0-9]{3}END[0-9]{40}"), 1, stop=("END",)))
    assert output.result.finish_reason == "stop" and output.text.rstrip("0123456789") == "" and len(output.text) == 3


def test_the_models_end_of_text_is_possible_where_the_grammar_may_end(model: LoadedModel) -> None:
    """Of the ids of many endings one is drawn sooner or later; also when it alone would not end a text."""
    engine = tiny_engine(model)
    for ignored in (False, True):
        requests = [
            constrained(engine, Grammar.regex("[0-9]+"), seed, temperature=2.0, max_tokens=60, ignore_eos=ignored)
            for seed in range(12)
        ]
        outputs = [output for output in together(engine, *requests) if output.result.finish_reason == "stop"]
        assert outputs and all(output.text.isdigit() and output.tokens[-1] == EOS for output in outputs)


@pytest.mark.slow
def test_a_grammar_that_gets_too_complex_ends_its_own_request_only(model: LoadedModel) -> None:
    branches = [
        {"type": "object", "properties": {f"a{n}": {"type": "string"}, f"b{n}": {"type": "null"}}} for n in range(1_300)
    ]
    explosive = {"type": "array", "prefixItems": [{"type": "boolean"}, {"anyOf": branches}], "minItems": 2}
    engine = tiny_engine(model)
    bad, good = Collected(), Collected()
    engine.add(constrained(engine, Grammar.json_schema(explosive, param="guided_json"), 1), bad)
    engine.add(constrained(engine, Grammar.json_schema(POINT), 2), good)
    finish(engine)
    assert bad.error is not None and isinstance(bad.error, BadRequest)
    assert bad.error.param == "guided_json" and "too complex" in bad.error.message
    assert json.loads(good.text)
    assert_idle(engine)


def test_a_grammar_of_another_engine_is_refused(model: LoadedModel) -> None:
    engine = tiny_engine(model)
    other = constrained(tiny_engine(model), Grammar.json_object(), 1)
    with pytest.raises(BadRequest, match="another engine"):
        engine.add(other, Collected())
    with pytest.raises(BadRequest, match="tokenizer"):
        tiny_engine(replace(model, tokenizer=None)).grammars.compile(Grammar.json_object())
