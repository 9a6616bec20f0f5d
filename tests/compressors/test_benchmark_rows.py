"""What the benchmarks keep of a long run, so that it goes on where it was stopped or killed."""

import argparse
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_rows import earlier_rows, setting_of
from promptsluice.compressors.structure.folds import folded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script as a module, under a name that nothing else has."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"{name}_script", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("half", ["", '{"key": "ab", "val', '{"key": "ab", "value": {"a": 1}', "{}"])
def test_half_a_line_of_a_killed_run_is_written_over(
    half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_rows = script("kept_rows", monkeypatch)
    path = tmp_path / "rows.jsonl"
    kept_rows.KeptRows(path).put({"n": 1}, "one", "ü")
    whole = path.read_text()
    path.write_text(whole + half)
    rows = kept_rows.KeptRows(path)
    assert path.read_text() == whole + half, "who only reads changes nothing"
    assert rows.get("one", "ü") == {"n": 1} and rows.get("two") is None
    rows.put({"n": 2}, "two")
    rows.put({"n": 3}, "three")
    assert path.read_text().startswith(whole)
    again = kept_rows.KeptRows(path)
    assert [again.get(*words) for words in (("one", "ü"), ("two",), ("three",))] == [{"n": 1}, {"n": 2}, {"n": 3}]


def plan_options(path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        rows=path,
        ways=["off", "planner"],
        requests=9,
        each=None,
        model="m",
        dtype="float32",
        quantize="none",
        tokens=2,
        size=1.0,
    )


def plan_row(way: str, seconds: Any, setting: str) -> dict[str, Any]:
    counts = dict.fromkeys(("idle_s", "overhead_ms", "tokens_in", "tokens_out", "cached", "reused", "recomputed"), 0)
    own = {"request": 0, "kind": "chat", "way": way, "seconds": seconds, "steps": {}}
    return {**own, **counts, "setting": setting}


@pytest.mark.parametrize("damaged", [b"", b'{"request": 1, "ki', b"\xff\xfe"])
def test_a_damaged_line_is_named(damaged: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_rows = script("kept_rows", monkeypatch)
    path = tmp_path / "rows.jsonl"
    options = plan_options(path)
    whole = json.dumps(plan_row("off", 1.0, setting_of(options))).encode()
    path.write_bytes(b"\n".join([whole, damaged, whole, b""]))
    with pytest.raises(SystemExit, match=r"rows\.jsonl, line 2 is damaged: delete it"):
        earlier_rows(options)
    kept_rows.KeptRows(path.with_name("kept.jsonl")).put({"n": 1}, "one")
    with path.with_name("kept.jsonl").open("ab") as file:
        file.write(damaged + b"\n")
    with pytest.raises(SystemExit, match=r"kept\.jsonl, line 2 is damaged: delete it"):
        kept_rows.KeptRows(path.with_name("kept.jsonl"))


def test_results_of_something_else_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_rows = script("kept_rows", monkeypatch)
    path = tmp_path / "rows.jsonl"
    options = plan_options(path)
    setting = setting_of(options)
    rows = [{"key": "a", "of": "b", "value": {}}, 3, [], *(plan_row("off", bad, setting) for bad in ("1", 0.0, None))]
    for row in rows:
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(SystemExit, match=r"rows\.jsonl, line 1 is no result of this benchmark: name another file"):
            earlier_rows(options)
        if row != rows[0]:
            with pytest.raises(SystemExit, match="line 1 is no result"):
                kept_rows.KeptRows(path)
    with pytest.raises(SystemExit, match="cannot be read"):
        kept_rows.KeptRows(tmp_path)


def test_a_request_that_was_asked_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = plan_options(path)

    def line(way: str, seconds: float) -> str:
        return json.dumps(plan_row(way, seconds, setting_of(options)))

    path.write_text(f"{line('off', 1.0)}\n{line('planner', 2.0)[:-9]}")
    assert earlier_rows(options) == [], "half a request counts for nothing"
    path.write_text("".join(f"{line(*one)}\n" for one in (("off", 1.0), ("off", 3.0), ("planner", 4.0))))
    assert {row.way: row.seconds for row in earlier_rows(options)} == {"off": 3.0, "planner": 4.0}


def test_what_another_model_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = script("compress_subjects", monkeypatch)
    kept = subjects.KeptRows(tmp_path / "rows.jsonl")

    class Counting:
        name = "counting"
        asked = 0

        def compress(self, text: str, *, question: str, rate: float) -> Any:
            self.asked += 1
            return subjects.Outcome(text, 0.0, 0.0, "")

    subject = Counting()
    for setting, asked in (("a, float32", 1), ("a, float32", 1), ("a, bfloat16", 2), ("b, float32", 3)):
        subjects.Remembered(subject, kept, setting).compress("text", question="q", rate=0.5)
        assert subject.asked == asked


def test_what_folded_lines_stand_for_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("compress_cases", monkeypatch)
    line = "2024-05-01 12:00:00 worker-7 asks /items/42 again and waits"
    case = made.Case("", f"begin\n{line}\n{line}\n{line}\nend 99", "What happened?")
    text = folded(case.text).text(case.text)
    assert text == f"begin\n{line}\n[the line above 2 more times]\nend 99"
    assert made.lost(case, text) == []
    fewer = f"begin\n{line}\n[the line above 1 more time]\nend"
    assert made.lost(case, fewer) == ["2024-05-01 12:00:00", "7", "/items/42", "99"]


def test_an_answer_stands_in_a_text_as_no_part_of_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stands = script("compress_cases", monkeypatch).stands
    assert [stands("no", text) for text in ("to the north", "He said no.", "no")] == [False, True, True]
    assert stands("U.S.", "in the U.S. (then)") and stands("猫", "“猫”")


def test_answers_share_no_word_with_their_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unshared = script("compress_unshared", monkeypatch)
    text = "The mayor of Ely was old. He left for Bath.\n\nThe mayor of Hull left in 1999. He liked Bath."
    assert unshared.unshared(text, "Where did the mayor of Ely go?", "Bath")
    assert not unshared.unshared(text, "Whom did he like?", "Bath"), "one of its sentences shares a word"
    assert not unshared.unshared(text, "Where did the mayor of Ely go?", "1999")
    assert not unshared.unshared(text, "Where did the mayor of Ely go?", "York"), "it stands nowhere"
    left = [{"Bath": True, "Ely": False}, {"1999": True}, {}]
    assert list(unshared._share(left)) == ["3", "0.75 [0.50, 1.00]"]
    ours = [unshared.Left(0.5, 1.0, one) for one in left[:2]]
    theirs = [unshared.Left(0.5, 1.0, dict.fromkeys(one, False)) for one in left[:2]]
    assert unshared._more(ours, theirs) == "+0.75 [+0.50, +1.00]" and unshared._more(ours, ()) == "-"
    folder = tmp_path / "xquad"
    folder.mkdir()
    for language, question in (("en", "Where did the mayor of Ely go?"), ("zh", "市长去了哪里")):
        paragraph = {"context": text, "qas": [{"question": question, "answers": [{"text": "Bath"}]}]}
        file = {"data": [{"paragraphs": [paragraph]}]}
        (folder / f"xquad.{language}.json").write_text(json.dumps(file), encoding="utf-8")
    (one,) = unshared.asked(tmp_path, "xquad zh of en", count=5, chars=500)
    assert one == unshared.Asked(text, "市长去了哪里", ("Bath",))


def test_a_question_that_a_way_failed_at_is_left_out_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    unshared = script("compress_unshared", monkeypatch)

    class Some:
        def __init__(self, name: str, *, fails: str = "") -> None:
            self.name, self._fails = name, fails

        def compress(self, text: str, *, question: str, rate: float) -> Any:
            failed = question == self._fails
            return unshared.Outcome("" if failed else text, 0.0, 0.0, "no time" if failed else "")

    found = [unshared.Asked("He left for Bath.", question, ("Bath",)) for question in ("one", "two", "three")]
    subjects = [Some("ours", fails="one"), Some("headroom", fails="two")]
    machinery = argparse.Namespace(count=len)
    told = unshared._measured(found, machinery, subjects, [0.5])
    assert {way: len(left) for (_, way), left in told.left.items()} == {"ours": 1, "headroom": 1, "ours: at ours": 1}
    assert all(one.stays == {"Bath": True} for left in told.left.values() for one in left)
    assert told.failed == {(0.5, "ours"): 1, (0.5, "headroom"): 1, (0.5, "ours: at ours"): 1}
    whole = unshared.Told()
    whole.add(told)
    whole.add(unshared._measured(found[:1], machinery, subjects, [0.33]))
    with io.StringIO() as file:
        unshared._print(unshared.Console(file=file, width=150), "all sets", whole)
        printed = file.getvalue()
    assert "all sets: 1 questions" in printed and "failed" in printed and "0.33" in printed
