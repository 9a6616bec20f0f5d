"""Tool calls of the embedded engine through a real server: forced by a grammar, and read out of what is written.

A random model with the real vocabulary: what it writes is what a grammar makes it write.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from .harness import PATIENCE_S, Gateway, start_gateway, stop_gateway

pytestmark = pytest.mark.slow
CONFIG = """
version: 1
default_policy: off
backends:
  hermes: {{kind: embedded, model: {root}/hermes, kv_memory: 16MiB, threads: 1}}
  llama3: {{kind: embedded, model: {root}/llama3, kv_memory: 16MiB, threads: 1}}
  mistral: {{kind: embedded, model: {root}/mistral, kv_memory: 16MiB, threads: 1}}
  strange: {{kind: embedded, model: {root}/strange, kv_memory: 16MiB, threads: 1}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv, ram: 1MiB, disk: 0}}
"""
TURNS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)
TEMPLATES = {
    "hermes": TURNS + "{# <tool_call> #}",
    "llama3": TURNS + '{# <|start_header_id|> "parameters" #}',
    "mistral": TURNS + "{# [TOOL_CALLS] #}",
    "strange": TURNS,
}
FAMILIES = ["hermes", "llama3", "mistral"]
WHERE = {"$defs": {"C": {"enum": ["Rome", "Oslo"]}}, "properties": {"city": {"$ref": "#/$defs/C"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        **WHERE, "type": "object", "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
HI: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def toolbox(
    tiny_model: Callable[..., Path], smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("toolbox")
    weights = tiny_model("Llama", vocab_size=49_160, hidden_size=48, num_hidden_layers=1, tie_word_embeddings=True)
    for name, template in TEMPLATES.items():
        shutil.copytree(weights, root / name)
        shutil.copy(smollm2_dir / "tokenizer_config.json", root / name)
        tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
        if name == "mistral":
            tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
        tokenizer.save(str(root / name / "tokenizer.json"))
        (root / name / "chat_template.jinja").write_text(template)
    policy_file = root / "policy.yaml"
    policy_file.write_text(CONFIG.format(root=root))
    running = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    yield running
    stop_gateway(running)


@pytest.fixture
def sdk(toolbox: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{toolbox.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as one:
        yield one


def choice_of(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def written(text: str) -> dict[str, Any]:
    """Have the model write exactly this."""
    return {"guided_choice": [text]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_function_is_called(sdk: openai.OpenAI, family: str) -> None:
    fields: Any = {"model": family, "messages": HI, "tools": TOOLS, "tool_choice": choice_of("weather"), "seed": 1}
    choice = sdk.chat.completions.create(**fields, max_tokens=200).choices[0]
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    answered: Any = [*HI, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    assert sdk.chat.completions.create(model=family, messages=answered, tools=TOOLS, max_tokens=3).usage


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_as_whole(sdk: openai.OpenAI, family: str) -> None:
    fields: Any = {"model": family, "messages": HI, "tools": TOOLS, "tool_choice": choice_of("weather"), "seed": 2}
    whole = sdk.chat.completions.create(**fields, max_tokens=200).choices[0].message.tool_calls
    frames = [chunk.choices[0] for chunk in sdk.chat.completions.create(**fields, max_tokens=200, stream=True)]
    deltas = [delta for frame in frames for delta in frame.delta.tool_calls or []]
    assert deltas[0].id and deltas[0].type == "function" and deltas[0].function and deltas[0].function.name == "weather"
    assert all(delta.index == 0 for delta in deltas) and len(deltas) > 2
    assert all(d.id is None and d.type is None and d.function and d.function.name is None for d in deltas[1:])
    arguments = "".join(delta.function.arguments or "" for delta in deltas if delta.function)
    assert whole and arguments == whole[0].function.arguments
    assert [frame.finish_reason for frame in frames if frame.finish_reason] == ["tool_calls"]
    assert not any(frame.delta.content for frame in frames)


@pytest.mark.parametrize("family", FAMILIES)
def test_some_function_is_called(sdk: openai.OpenAI, family: str) -> None:
    names: set[str] = set()
    for seed in range(6):
        choice = sdk.chat.completions.create(
            model=family, messages=HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed,
            max_tokens=200,
        ).choices[0]  # fmt: skip
        ((name, arguments),) = called(choice.message)
        assert isinstance(json.loads(arguments), dict) and choice.finish_reason == "tool_calls"
        names.add(name)
    assert names <= {"weather", "now"}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice_of("now")]}}
    choice = sdk.chat.completions.create(
        model=family, messages=HI, tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False, seed=0, max_tokens=200
    ).choices[0]
    ((name, arguments),) = called(choice.message)
    assert name == "now" and json.loads(arguments) == {}


def test_calls_are_read_out_of_free_text(sdk: openai.OpenAI) -> None:
    one = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    text = f'Let me see.\n{one}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    fields: Any = {"model": "hermes", "messages": HI, "tools": TOOLS, "max_tokens": 200, "extra_body": written(text)}
    choice = sdk.chat.completions.create(**fields).choices[0]
    assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
    assert called(choice.message) == [("weather", '{"city": "Rome"}'), ("now", "{}")]
    with sdk.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.content == "Let me see." and streamed.finish_reason == "tool_calls"
    assert called(streamed.message) == called(choice.message)
    unread = sdk.chat.completions.create(**fields | {"tool_choice": "none"}).choices[0].message
    assert unread.content == text and unread.tool_calls is None


def test_only_one_call_without_parallel_ones(sdk: openai.OpenAI) -> None:
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    choice = sdk.chat.completions.create(
        model="hermes", messages=HI, tools=TOOLS, max_tokens=200, parallel_tool_calls=False,
        extra_body=written(f"{one}\n{one}"),
    ).choices[0]  # fmt: skip
    assert len(choice.message.tool_calls or []) == 1 and choice.finish_reason == "tool_calls"


def test_responses_have_the_calls(sdk: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice: Any = {"type": "function", "name": "weather"}
    fields: Any = {"model": "hermes", "input": "How is it?", "tools": tools, "tool_choice": choice}
    with sdk.responses.stream(**fields, max_output_tokens=200) as stream:
        final = stream.until_done().get_final_response()
    (call,) = final.output
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments)["city"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    fields = {"model": "hermes", "input": output, "previous_response_id": final.id, "max_output_tokens": 20}
    assert sdk.responses.create(**fields).usage


def test_what_cannot_be_forced_is_refused(toolbox: Gateway) -> None:
    def param(**fields: Any) -> str:
        response = toolbox.post(
            {"model": "hermes", "messages": HI, "tools": TOOLS, "tool_choice": "required", **fields}
        )
        assert response.status_code == 400, response.text
        return response.json()["error"]["param"]

    assert param(model="strange") == "tool_choice"
    assert param(response_format={"type": "json_object"}) == "tool_choice"
    odd = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    assert param(tools=[odd]) == "tools[0].function.parameters.not"
