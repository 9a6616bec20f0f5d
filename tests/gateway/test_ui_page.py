"""The page in a real browser: what a person sees and can do, at both widths, in both colours, and with hostile text."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .browser import Page, browser, chromium
from .harness import Gateway, Upstream, http, start_gateway, stop_gateway
from .test_upstream import DONE, USAGE_CHUNK, answers, chunk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no chromium or google-chrome on this machine's PATH"),
]

KEY = "ann-secret-4711"
CONFIG = """
version: 1
default_policy: off
server: {{records: {{text: true}}{server}}}
backends:
  echo: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}}
  far: {{kind: openai, base_url: "http://127.0.0.1:{port}/v1", models: [far]}}
  dead: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [dead], breaker: {{failures: 1, cooldown: 600}}}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
policies:
  off: {{extends: off, allow_client_policy: all}}
  tidy: {{extends: lossless, min_prompt_tokens: 0, token_value_ms: 100}}
"""
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    " \u202egnp.exe\u2069 \u05e9\u05dc\u05d5\u05dd \x07\x1b[31m Z\u0338\u0322\u031b " + "A" * 9000
)
LOOKS = [(1440, 900, False), (1440, 900, True), (390, 844, False), (390, 844, True)]
# Of what is shown: texts whose contrast with their ground is under 4.5 to 1 (WCAG 2.2, 1.4.3).
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = color.slice(0, 3).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] > 250) return color;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("noscript, option") || !element.checkVisibility()) continue;
    const pair = [light(rgb(getComputedStyle(element).color)), light(ground(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) poor.add(`${element.tagName}.${element.className}: ${ratio.toFixed(2)}`);
  }
  return [...poor];
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    binary = chromium()
    assert binary is not None, "skipped without one"
    with browser(binary, tmp_path_factory.mktemp("browser")) as page:
        yield page


def started(root: Path, server: str = "", port: int = 9) -> Gateway:
    """`port` is the upstream's."""
    policy_file = root / "policy.yaml"
    policy_file.write_text(CONFIG.format(root=root, server=server, port=port))
    return start_gateway(policy_file)


@pytest.fixture(scope="module")
def busy(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that has seen answers, streams, errors and hostile text."""
    gateway = started(tmp_path_factory.mktemp("ui"), port=upstream.port)
    upstream.answer(answers(chunk("Ducks."), chunk(finish="stop"), USAGE_CHUNK, DONE))
    passages = {"role": "user", "content": "Ducks   swim.\n\n\n\n\nGeese fly.   " * 30}
    question = {"role": "user", "content": "Which <b>bird</b> swims?"}
    gateway.post({"model": "far:tidy", "messages": [passages, question], "stream": True}, **{"x-request-id": "tidied"})
    gateway.post({"model": "echo", "messages": [{"role": "user", "content": HOSTILE}]}, **{"x-request-id": "hostile"})
    gateway.post({"model": "dead", "messages": [question]})
    gateway.post({"model": "nobody", "messages": [question]})
    yield gateway
    stop_gateway(gateway)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    gateway = started(tmp_path_factory.mktemp("keyed"), f", api_keys: [{{name: ann, sha256: {digest}}}]")
    yield gateway
    stop_gateway(gateway)


def overview(page: Page, gateway: Gateway) -> None:
    page.complaints.clear()
    page.open(f"{gateway.url}/ui")
    page.until("document.querySelector('.system h2') !== null")


def request(page: Page, gateway: Gateway, request_id: str) -> None:
    """Open one request by its address."""
    lines = http.get(f"{gateway.url}/ui/api/requests").json()["requests"]
    found = next(line["id"] for line in lines if line["request_id"] == request_id)
    page.complaints.clear()
    page.open(f"{gateway.url}/ui#/requests/{found}")
    page.until("document.querySelector('h1 code') !== null")


@pytest.mark.parametrize(("width", "height", "dark"), LOOKS)
def test_all_is_there_and_legible(page: Page, busy: Gateway, width: int, height: int, dark: bool) -> None:
    page.look(width=width, height=height, dark=dark)
    overview(page, busy)
    text = page.text()
    for wanted in ("Requests\n4", "50%", "By policy", "tidy", "Quality gate", "Caches", "Controller", "breaker open"):
        assert wanted in text, (wanted, text)
    assert page.run("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    assert page.run(CONTRAST) == []
    request(page, busy, "tidied")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(CONTRAST) == []
    assert page.complaints == []


def test_segments_show_what_became_of_them(page: Page, busy: Gateway) -> None:
    page.look(width=1440, height=900)
    request(page, busy, "tidied")
    fates = page.run("[...document.querySelectorAll('.segment > .head > .chip')].map((chip) => chip.textContent)")
    assert fates == ["pruned", "kept"]
    struck = "[...document.querySelectorAll('.segment del')]"
    assert page.run(f"{struck}.length > 0 && {struck}.every((one) => one.textContent.trim() === '')")
    assert page.run(f"getComputedStyle({struck}[0]).textDecorationLine") == "line-through"
    kept = page.run("document.querySelector('.segment .text').textContent")
    assert kept.startswith("Ducks   swim.") and "Geese fly." in kept
    text = page.text()
    for wanted in ("by lossless", "policy tidy (model suffix)", "x-promptsluice-policy", "prompt_tokens", "streamed"):
        assert wanted in text, wanted


def test_hostile_text_is_only_text(page: Page, busy: Gateway) -> None:
    request(page, busy, "hostile")
    assert page.run("document.title") == "promptsluice"
    assert page.run("document.querySelectorAll('.text script, .text img').length") == 0
    shown = page.run("document.querySelector('.text').textContent")
    assert shown.startswith("<script>document.title='owned'</script><img src=x")
    assert "\u27e8U+202E\u27e9gnp.exe\u27e8U+2069\u27e9" in shown and "\u2407\u241b[31m" in shown
    assert "\u202e" not in shown and len(shown) < 6000
    page.run("document.querySelector('.text button').click()")
    assert len(page.run("document.querySelector('.text').textContent")) > 9000
    assert page.run("document.querySelector('.text').scrollWidth <= document.querySelector('.text').clientWidth + 1")
    assert page.complaints == []


def test_the_keyboard_reaches_everything(page: Page, busy: Gateway) -> None:
    page.look(width=1440, height=900)
    overview(page, busy)
    assert all(name.strip() for name in page.controls()), page.controls()
    assert {"Live", "Period", "promptsluice", "Skip to content"} <= page.controls().keys()
    reached: list[str] = []
    for _ in range(12):
        page.press("Tab")
        reached.append(page.run("document.activeElement.getAttribute('href') ?? document.activeElement.id"))
        if reached[-1].startswith("#/requests/"):
            break
    assert reached[:4] == ["#view", "#/", "window", "live"]
    page.press("Enter")
    page.until("document.querySelector('h1 code') !== null")
    assert page.run("document.activeElement.tagName") == "H1", "who reads with a screen reader is told of the new view"
    page.run("history.back()")
    page.until("document.querySelector('.tiles dl') !== null")


def test_who_has_the_focus_keeps_it_when_figures_change(page: Page, busy: Gateway) -> None:
    overview(page, busy)
    page.run("document.querySelectorAll('.requests a')[1].focus()")
    before = page.run("document.activeElement.getAttribute('href')")
    rows = page.run("document.querySelectorAll('.requests tbody tr').length")
    busy.post({"model": "echo", "messages": [{"role": "user", "content": "One more."}]})
    page.until(f"document.querySelectorAll('.requests tbody tr').length === {rows + 1}")
    assert page.run("document.activeElement.getAttribute('href')") == before


def test_a_request_that_is_gone_is_said(page: Page, busy: Gateway) -> None:
    page.open(f"{busy.url}/ui#/requests/00ff")
    page.until("document.querySelector('#problem').textContent.includes('not kept')")
    assert page.run("document.querySelector('#problem').getAttribute('role')") == "alert"
    page.run("location.hash = '#/'")
    page.until("document.querySelector('.tiles dl') && document.querySelector('#problem').textContent === ''")


def test_without_traffic_the_page_says_how_to_begin(page: Page, keyed: Gateway) -> None:
    signed_in(page, keyed)
    text = page.text()
    assert "No requests yet." in text and f"{keyed.url}/v1" in text and "No requests in this period." in text


def signed_in(page: Page, gateway: Gateway, key: str = KEY) -> None:
    page.open(f"{gateway.url}/ui")
    page.run("sessionStorage.clear()")
    page.open(f"{gateway.url}/ui")
    page.until("document.activeElement.id === 'key'")
    page.type(key)
    page.press("Enter")
    page.until("document.querySelector('.tiles dl, .key-form .problem') !== null")


def test_a_key_is_asked_for_and_kept_in_this_tab_only(page: Page, keyed: Gateway) -> None:
    page.look(width=390, height=844)
    signed_in(page, keyed, "wrong")
    assert "Not accepted: this API key is not known." in page.text()
    assert page.run("sessionStorage.length") == 0 and page.run("document.activeElement.id") == "key"
    signed_in(page, keyed)
    assert "key ann" in page.text()
    assert page.run("sessionStorage.getItem('promptsluice-key')") == KEY
    assert KEY not in page.run("location.href + document.cookie + JSON.stringify({ ...localStorage })")
    assert KEY not in page.run("document.documentElement.outerHTML")
    assert KEY not in keyed.log.read_text()
    page.run("document.querySelector('#forget').click()")
    page.until("document.querySelector('.key-form') !== null")
    assert page.run("sessionStorage.length") == 0


def test_a_gateway_that_is_gone_is_said(page: Page, tmp_path: Path) -> None:
    gateway = started(tmp_path)
    overview(page, gateway)
    stop_gateway(gateway)
    page.until("document.querySelector('#problem').textContent.includes('cannot be reached')")
    assert "By policy" in page.text(), "what was shown stays"


def test_screenshots_have_colours(page: Page, busy: Gateway, tmp_path: Path) -> None:
    """Dark and light differ, and neither is empty: a page that paints nothing compresses to almost nothing."""
    shots: dict[bool, Any] = {}
    for dark in (False, True):
        page.look(width=1440, height=900, dark=dark)
        overview(page, busy)
        page.screenshot(tmp_path / "shot.png")
        shots[dark] = (tmp_path / "shot.png").read_bytes()
    assert shots[False] != shots[True]
    assert min(len(shot) for shot in shots.values()) > 20_000
