"""Records of requests: what became of a prompt's segments, sums over time, and their bounds."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.compressors.result import Change, Rewrite
from promptsluice.gateway.caller import Caller
from promptsluice.gateway.records import Fate, Record, Records, outlined
from promptsluice.gateway.records.series import History, Share, Sums
from promptsluice.policies.schema import RecordsSpec
from promptsluice.prompt import NotFound, Prompt, Report, StepReport, Usage

HISTORY = "Ducks swim. Geese fly far. Swans sing."


def prompt(text: str = HISTORY) -> Prompt:
    return Prompt.from_messages(
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Which?"},
        ]
    )


def change(whole: Prompt, rewrite: Rewrite) -> Change:
    first = whole.segments[0]
    return Change(
        segment=first.id, path=first.path, kind=first.kind, tokens_before=9, tokens_after=5, pieces=rewrite.pieces
    )


def rewritten(whole: Prompt, *rewrites: Rewrite) -> tuple[Prompt, list[list[Change]]]:
    """The prompt whose first segment was rewritten again and again."""
    first = replace(whole.segments[0], rewritable=True)
    text = first.text
    for rewrite in rewrites:
        text = rewrite.text(text)
    segments = (replace(first, text=text), *whole.segments[1:])
    return whole._with(segments=segments), [[change(whole, rewrite)] for rewrite in rewrites]


def parts(found: Any) -> list[tuple[Fate, str | None]]:
    return [(part.fate, part.text) for part in found.segments[0].parts]


def test_an_untouched_prompt_is_kept() -> None:
    found = outlined(prompt(), prompt(), text=False)
    assert [segment.fate for segment in found.segments] == [Fate.KEPT] * 3
    assert [part.chars for part in found.segments[0].parts] == [len(HISTORY)]


def test_several_steps_are_shown_as_one_over_the_text_that_came() -> None:
    whole = prompt()
    after, changes = rewritten(whole, Rewrite.of_kept([(0, 11), (26, 38)]), Rewrite(((0, 11), " [...]")))
    found = outlined(whole, after, changes=changes, text=True)
    assert found.segments[0].fate is Fate.SUMMARIZED
    assert parts(found) == [
        (Fate.KEPT, "Ducks swim."),
        (Fate.PRUNED, " Geese fly far. Swans sing."),
        (Fate.SUMMARIZED, " [...]"),
    ]


@given(st.text("ab .", max_size=40), st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=40))
def test_parts_say_both_texts(text: str, first: list[bool], second: list[bool]) -> None:
    """Kept and pruned parts are the text before, kept and put in parts the text after."""
    whole = prompt(text)

    def dropping(source: str, keep: list[bool]) -> Rewrite:
        return Rewrite.of_kept([(at, at + 1) for at, kept in zip(range(len(source)), keep, strict=False) if kept])

    one = dropping(text, first)
    two = Rewrite((*dropping(one.text(text), second).pieces, "!"))
    after, changes = rewritten(whole, one, two)
    found = outlined(whole, after, changes=changes, text=True).segments[0].parts
    assert "".join(part.text or "" for part in found if part.fate is not Fate.SUMMARIZED) == text
    assert "".join(part.text or "" for part in found if part.fate is not Fate.PRUNED) == two.text(one.text(text))


def test_without_text_only_sizes_are_kept() -> None:
    whole = prompt("Secret. " * 500)
    after, changes = rewritten(whole, Rewrite.of_kept([(0, 8), (80, 88)]))
    found = outlined(whole, after, changes=changes, text=False)
    assert [(part.fate, part.chars) for part in found.segments[0].parts] == [(Fate.KEPT, 16), (Fate.PRUNED, 3984)]
    assert "Secret" not in repr(found)


def test_a_segment_that_is_gone_was_pruned_and_another_text_took_its_place() -> None:
    whole = prompt()
    gone = whole._with(segments=whole.segments[1:])
    assert outlined(whole, gone, text=True).segments[0].fate is Fate.PRUNED
    restored = whole._with(segments=(replace(whole.segments[0], text="Birds."), *whole.segments[1:]))
    assert parts(outlined(whole, restored, text=True)) == [(Fate.PRUNED, HISTORY), (Fate.SUMMARIZED, "Birds.")]


def test_an_outline_is_bounded() -> None:
    many = Prompt.from_messages([{"role": "user", "content": "x" * 1000}] * 2000)
    found = outlined(many, many, text=True)
    assert (len(found.segments), found.left_out) == (400, 1600)
    assert sum(len(part.text or "") for segment in found.segments for part in segment.parts) <= 262_144
    huge = prompt("y" * 5_000_000)
    part = outlined(huge, huge, text=True).segments[0].parts[0]
    assert (part.chars, len(part.text or "")) == (5_000_000, 16_384)
    confetti = prompt("ab" * 5000)
    after, changes = rewritten(confetti, Rewrite.of_kept([(2 * at, 2 * at + 1) for at in range(5000)]))
    crumbs = outlined(confetti, after, changes=changes, text=True).segments[0].parts
    assert [(part.fate, part.chars, part.text) for part in crumbs] == [
        (Fate.KEPT, 5000, None),
        (Fate.PRUNED, 5000, None),
    ]


def record(tenant: str = "", *, policy: str = "off", text: str = "") -> Record:
    whole = prompt(text or HISTORY)
    kept = Record.of(Caller(request_id="r", path="/v1/chat/completions", api_key=tenant or None))
    kept.report = Report(policy=policy, tokens_in=10, tokens_out=8, pruned=2)
    kept.outline = outlined(whole, whole, text=True)
    return kept


def put(records: Records, tenant: str = "", **fields: Any) -> Record:
    one = record(tenant, **fields)
    one.ended("ok")
    records.finished(one)
    return one


def test_each_tenant_has_room_of_its_own_and_all_have_a_bound() -> None:
    records = Records(RecordsSpec(count=3))
    quiet = put(records, "quiet")
    for _ in range(10):
        put(records, "loud")
    assert records.held(quiet.tenant)[0] == 1
    assert records.held(None)[0] == 4
    narrow = Records(RecordsSpec(count=100, bytes=2**20, total=40_000))
    for place in range(50):
        put(narrow, f"tenant {place}")
    count, size = narrow.held(None)
    assert 2 <= count < 50 and size <= 40_000
    assert (
        narrow.page(None, limit=1)[0]["id"]
        == narrow.page(Caller(request_id="", api_key="tenant 49").tenant, limit=9)[0]["id"]
    )


def test_what_is_too_large_is_kept_without_its_prompt() -> None:
    records = Records(RecordsSpec(bytes=24_000))
    one = put(records, text="z" * 16_000)
    two = put(records, text="z" * 16_001 + "\u2603" * 16_000)
    assert one.outline is not None and two.outline is None
    assert records.get(None, two.id).detail()["segments"] is None
    assert records.held(None)[1] <= 24_000


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    records = Records(RecordsSpec(count=0))
    put(records)
    assert not records.wanted and records.page(None, limit=5) == [] and records.held(None) == (0, 0)
    assert records.since_start().requests == 1


def test_a_tenant_sees_its_own_only() -> None:
    records = Records(RecordsSpec())
    mine, theirs = put(records, "mine"), put(records, "theirs")
    assert [one["id"] for one in records.page(mine.tenant, limit=9)] == [mine.id]
    assert records.get(mine.tenant, mine.id) is mine
    with pytest.raises(NotFound) as hidden:
        records.get(mine.tenant, theirs.id)
    with pytest.raises(NotFound) as missing:
        records.get(mine.tenant, "0123")
    assert hidden.value.message == missing.value.message
    assert records.sums(mine.tenant, window_s=3600)[0]["off"].requests == 1
    assert records.sums(None, window_s=3600)[0]["off"].requests == 2
    assert records.sums("nobody", window_s=3600)[0] == {}


def test_pages_follow_each_other() -> None:
    records = Records(RecordsSpec())
    ids = [put(records, "t").id for _ in range(7)][::-1]
    first = [one["id"] for one in records.page(None, limit=3)]
    second = [one["id"] for one in records.page(None, limit=3, before=first[-1])]
    assert first + second == ids[:6]
    assert [one["id"] for one in records.page(None, limit=3, before="gone")] == ids[:3]


def test_a_record_is_json_and_names_no_message_of_an_error() -> None:
    one = record()
    one.failed(NotFound("there is no secret", param="model", code="model_not_found"))
    one.usage, one.ttft_s = Usage(prompt_tokens=3), 0.5
    wire = json.loads(json.dumps(one.detail(), allow_nan=False))
    assert wire["error"] == {"type": "not_found_error", "param": "model", "code": "model_not_found"}
    assert wire["status"] == 404 and "secret" not in json.dumps(wire)
    assert wire["headers"]["x-promptsluice-policy"] == "off"
    assert wire["segments"][0]["parts"] == [{"fate": "kept", "chars": len(HISTORY), "text": HISTORY}]


def counted(*times_s: float) -> Sums:
    sums = Sums()
    for seconds in times_s:
        sums.add(Share.of(Report(), outcome="ok", ttft_s=seconds))
    return sums


def test_quantiles_are_within_five_percent() -> None:
    sums = counted(*(place / 1000 for place in range(1, 1001)))
    for share in (0.5, 0.95, 0.99):
        assert sums.quantile(share) == pytest.approx(share, rel=0.05)
    assert counted().quantile(0.5) is None
    assert counted(0.0, 1e-9).quantile(0.5) == pytest.approx(1e-4, rel=0.05)


def test_sums_are_of_their_window() -> None:
    history = History()
    step = StepReport(name="s", ms=1.0, tokens_before=9, tokens_after=5, saved_ms=40.0)
    report = Report(tokens_in=9, pruned=4, overhead_ms=2.0, steps=[step])
    for now in (100_020.0, 103_000.0, 103_590.0):
        history.add(now, "balanced", Share.of(report, outcome="ok", completion=7))
    of = {window: history.policies(103_600.0, window)["balanced"].to_wire() for window in (900, 3600, 86_400, 0)}
    assert [of[window]["requests"] for window in (900, 3600, 86_400, 0)] == [2, 3, 3, 3]
    assert (of[0]["pruned"], of[0]["saved_ms"], of[0]["overhead_ms"], of[0]["completion"]) == (12, 120.0, 6.0, 21)
    width, slots = history.slots(103_600.0, 3600)
    assert width == 60 and sum(one.requests for _, one in slots) == 3
    history.add(103_600.0 + 2 * 86_400, "balanced", Share.of(Report(), outcome="failed"))
    assert history.policies(103_600.0 + 2 * 86_400, 86_400)["balanced"].to_wire()["requests"] == 1


def test_slots_of_all_windows_end_now_and_hold_what_just_happened() -> None:
    now = 1_000_000_007.0
    records = Records(RecordsSpec(), clock=lambda: now)
    put(records)
    for window in (900, 3600, 86_400, 0):
        _, width, slots = records.sums(None, window_s=window)
        assert [at % width for at, _ in slots] == [0] * len(slots) and len(slots) <= 60 + 240 * (width == 360)
        assert slots[-1][0] <= now < slots[-1][0] + width
        assert slots[-1][1]["ok"] == 1


@pytest.mark.slow
def test_histories_of_tenants_are_bounded() -> None:
    clock = iter(range(10**9, 2 * 10**9, 20))
    records = Records(RecordsSpec(count=0), clock=lambda: next(clock))
    for place in range(3000):
        put(records, f"tenant {place}")
    assert records._sums <= 20_000
    assert records._sums == sum(map(len, records._histories.values()))
