"""benchmarks/plan.py in small: a tiny model, a few requests of each class, and what it prints of them."""

import argparse
import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_report import ratio, tables, verdict
from plan_requests import Asked, taken
from plan_rows import Row
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TEMPLATE = "{% for one in messages %}<|im_start|>{{ one['role'] }}\n{{ one['content'] }}<|im_end|>\n{% endfor %}"
PLACES = ["north", "south", "east", "west", "upper", "lower", "old", "new", "red", "green", "blue", "grey"]
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}


def told(subject: str) -> str:
    return "".join(f"The {place} hall of the {subject} was repaired last spring, they say.\n" for place in PLACES)


def data(folder: Path) -> Path:
    """As much of the five data sets as their readers look at."""
    turns = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Find it."}]
    for n in range(4):
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": told(f"{PLACES[n]} thing")},
        ]
    passages = [[f"Title {n}", [told(f"{PLACES[n]} house")]] for n in range(6)]
    question = {"question": "When?", "supporting_facts": [["Title 1", 0]], "context": passages}
    files = {
        "mt_bench/question.jsonl": {"question_id": 101, "turns": ["Who?", "And why?"]},
        "mt_bench/gpt-4.jsonl": {"question_id": 101, "choices": [{"turns": ["Somebody."]}]},
        "gsm8k/test.jsonl": {"question": "How many are three?"},
        "hotpotqa_100/hotpotqa_distractor_100.jsonl": question,
        "tau_bench/gpt-4o-airline.json": [{"traj": turns}],
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    pages = folder / "fastapi_docs" / "en"
    pages.mkdir(parents=True)
    for n in range(12):
        (pages / f"{n}.md").write_text(told(f"{PLACES[n]} page").replace("\n", "\n\n"))
    return folder


def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, under a name that nothing else has."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("plan_benchmark", BENCHMARKS / "plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_way_answers_the_same_requests_and_all_is_told(
    tiny_model: Callable[..., Path],
    smollm2_dir: Path,
    minilm_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmark = loaded(monkeypatch)
    sizes = {"vocab_size": 49_160, "hidden_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    weights = tiny_model("Llama", tie_word_embeddings=True, **sizes)
    model = tmp_path / "tiny"
    shutil.copytree(weights, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    ways = ["off", "extractive", "planner"]
    options = argparse.Namespace(
        folder=data(tmp_path / "data"),
        requests=10,
        tokens=2,
        ways=ways,
        model=str(model),
        threads=torch.get_num_threads(),
        kv_memory="32MiB",
        rows=tmp_path / "rows.jsonl",
        seconds=None,
        report=False,
        each=None,
        hold=None,
        size=1.0,
        dtype="float32",
        quantize="none",
    )
    with (tmp_path / "printed").open("w") as file:
        benchmark.run(options, Console(file=file, width=200))
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
        again = options.rows.read_text()
        benchmark.run(options, Console(file=file, width=200))
    assert options.rows.read_text() == again, "what was measured is not measured again"
    options.rows.write_text("\n".join([*again.splitlines()[:-1], again.splitlines()[-1][:40]]))
    options.report = True
    with (tmp_path / "cut").open("w") as file:
        benchmark.run(options, Console(file=file, width=200))
    assert "9 of 10 requests under 3 ways" in (tmp_path / "cut").read_text(), "half a request counts for nothing"
    options.each = 1
    with (tmp_path / "few").open("w") as file:
        benchmark.run(options, Console(file=file, width=200))
    assert "all: 4 requests" in (tmp_path / "few").read_text(), "one of each class"
    assert "4 of 10 requests under 3 ways, the first 1 of each class\n" in (tmp_path / "few").read_text()
    options.report = False
    with (tmp_path / "taken").open("w") as file:
        benchmark.run(options, Console(file=file, width=200))
    assert "4 of 4 requests under 3 ways, the first 1 of each class of 10\n" in (tmp_path / "taken").read_text()
    assert "too few requests for a verdict" in (tmp_path / "taken").read_text()
    options.tokens = 3
    with pytest.raises(SystemExit, match="answers of 2 tokens"):
        benchmark.run(options, Console(quiet=True))
    assert {(row["request"], row["way"]) for row in rows} == {(n, way) for n in range(10) for way in ways}
    assert {row["kind"] for row in rows} == {"chat", "rag", "tools", "repeats"}
    for row in rows:
        assert row["seconds"] > 0 and row["tokens_in"] >= row["tokens_out"] > 0
    sent = {way: sum(row["tokens_out"] for row in rows if row["way"] == way) for way in ways}
    assert sent["extractive"] < sent["off"] >= sent["planner"]
    printed = (tmp_path / "printed").read_text()
    assert all(title in printed for title in ("chat: 3 requests", "tools: 3 requests", "all: 10 requests"))
    assert "planner takes" in printed and "threads" in printed
    assert "10 of 10 requests under 3 ways" in printed


def rows_of(seconds: dict[str, list[float]], *, kinds: list[str]) -> list[Row]:
    counts = dict.fromkeys(("idle_s", "overhead_ms", "tokens_in", "tokens_out", "cached", "reused", "recomputed"), 0)
    return [
        Row(request=n, kind=kind, way=way, seconds=spent[n], steps={}, **counts)
        for n, kind in enumerate(kinds)
        for way, spent in seconds.items()
    ]


def test_the_ratio_of_sums_has_an_interval() -> None:
    times = {"off": [1.0 + n for n in range(40)], "planner": [(0.5 + n % 2) * (1.0 + n) for n in range(40)]}
    rows = rows_of(times, kinds=["chat"] * 40)
    found = ratio(rows, "planner", "chat")
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(1.0, abs=0.05) and found.high - found.low < 0.6
    assert ratio(rows, "off") == (1.0, 1.0, 1.0)
    assert "MORE than" in verdict(rows[1::2] + rows[::2], ["off", "planner"]) or found.value <= 1.02


def test_each_class_has_a_ratio_and_a_verdict_of_its_own() -> None:
    kinds = ["chat", "rag"] * 10
    times = {
        "off": [1.0] * 20,
        "lossless": [0.5] * 20,
        "planner": [1.1 if kind == "chat" else 0.5 for kind in kinds],
    }
    rows = rows_of(times, kinds=kinds)
    assert ratio(rows, "planner", "chat") == pytest.approx((1.1, 1.1, 1.1))
    assert ratio(rows, "planner", "rag") == pytest.approx((0.5, 0.5, 0.5))
    whole = ratio(rows, "planner")
    assert whole.value == pytest.approx(0.8) and whole.low < 0.75 and whole.high > 0.85
    told = verdict(rows, list(times))
    assert "MORE than 2 % worse" in told and "worst: chat, 1.100" in told and "lossless (0.500)" in told
    assert verdict(rows, ["off", "lossless"]) == "no verdict without off and a planner"


def test_few_requests_of_a_class_have_no_verdict() -> None:
    times = {"off": [1.0] * 9, "planner": [0.9] * 9}
    told = verdict(rows_of(times, kinds=["chat"] * 5 + ["rag"] * 4), list(times))
    assert "planner takes 0.900 of off" in told and "too few" in told and "rag (4)" in told and "chat" not in told
    assert "worse" not in told
    assert "at most 2 %" in verdict(rows_of(times, kinds=["chat"] * 9), list(times))


@pytest.mark.slow
def test_time_that_a_run_rests_is_not_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = loaded(monkeypatch)
    (row,) = rows_of({"off": [1.0]}, kinds=["chat"])
    hold, asked, said, now = tmp_path / "hold", [], [], 0.0

    class Gateway:
        async def ask(self, number: int, *_: Any, **__: Any) -> Any:
            nonlocal now
            asked.append(number)
            now += 1.0
            if number < 2:
                hold.touch()
            return row

    @asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[Gateway]:
        yield Gateway()

    async def later(_: float) -> None:
        nonlocal now
        now += 100.0
        if now % 1000 > 300:
            hold.unlink()
            now += 1000.0 - now % 1000

    monkeypatch.setattr(benchmark, "opened", opened)
    monkeypatch.setattr(benchmark.asyncio, "sleep", later)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now)
    options = argparse.Namespace(ways=["off"], each=None, hold=hold, seconds=2.5, rows=None, tokens=1)
    requests = [Asked("chat", [])] * 9
    asyncio.run(benchmark.measured(requests, [], options, said.append))
    assert asked == [0, 1, 2] and said == [f"rests while {hold} exists"] * 2


@pytest.mark.parametrize("each", ["0", "-1", "x"])
def test_less_than_one_of_each_class_is_refused(
    each: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = loaded(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["plan.py", "nowhere", "--report", "--each", each])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert f"--each: '{each}': give a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("each", "wanted"), [(None, [0, 1, 2, 3, 4, 5]), (1, [0, 1, 4]), (2, [0, 1, 2, 4, 5]), (0, [])]
)
def test_the_first_of_each_class_are_taken(each: int | None, wanted: list[int]) -> None:
    assert taken(["chat", "rag", "chat", "chat", "tools", "rag"], each) == wanted


def test_a_table_tells_of_total_median_and_the_slowest() -> None:
    rows = rows_of({"off": [float(n) for n in range(1, 21)]}, kinds=["chat"] * 20)
    table = tables(rows, ["off"])[-1]
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells[:6] == ["off", "210.0", "1.000", "1.000", "10500", "19000"]
