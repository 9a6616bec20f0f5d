"""What the planner learns of compressors without a target rate, from the texts in which they found something."""

from typing import Any

import pytest
from promptsluice.gateway.optimization import Tools, optimized
from promptsluice.gateway.turns import Turns
from promptsluice.policies import CostModel, Ledger, Policy
from promptsluice.prompt import Prompt

CODE = Policy.model_validate({"compress": ({"use": "code"},), "token_value_ms": 50.0})
SOURCE = "import os\nimport sys\nimport re\n# one comment of some words\nx = 1\n# and another of as many\n"
JSON = '{"temperature": 12, "wind": "north"}'


def nothing_found(*_: object, **__: object) -> Any:
    raise AssertionError("no policy here retrieves")


def run(ledger: Ledger, *results: str) -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for n, text in enumerate(results):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        talk.append({"role": "assistant", "content": None, "tool_calls": [call]})
        talk.append({"role": "tool", "tool_call_id": f"c{n}", "content": text})
    prompt = Prompt.from_messages([*talk, {"role": "user", "content": "So?"}])
    tools = Tools(count=len, costs=ledger.costs, ledger=ledger, retrieve=nothing_found, turns=Turns(0))
    optimized(prompt, CODE, tools, request_id="r", scope="a")


def test_texts_without_source_do_not_speak_against_source() -> None:
    ledger = Ledger(CostModel())
    for _ in range(20):
        run(ledger, JSON, JSON)
    assert ledger.costs().expected_rate("code") == CostModel().unknown_rate


def test_the_share_that_is_left_of_source_is_learned() -> None:
    ledger = Ledger(CostModel())
    left = SOURCE.replace("# one comment of some words\n", "").replace("# and another of as many\n", "")
    for _ in range(40):
        run(ledger, SOURCE, JSON)
    assert ledger.costs().expected_rate("code") == pytest.approx(len(left) / len(SOURCE), abs=0.02)
    assert not ledger.costs().missed
