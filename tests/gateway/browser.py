"""A headless Chromium driven over its DevTools protocol: just what the tests of the page need."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_KEYS = {"Tab": 9, "Enter": 13}


def chromium() -> str | None:
    """The browser of this machine, if it has one."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `complaints` are what the page logged as errors, and what its security policy has refused."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._asked = 0
        self._loaded = False
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Ask the browser, and wait for its answer."""
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._asked:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """The size of the window, and the colours that the system has."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}]
        )

    def open(self, url: str) -> None:
        """Load a page anew."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and give its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (
                f"never true: {script}; the page says {self.run('document.body?.innerText')}"
            )
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """What a person reads."""
        return self.run("document.body.innerText")

    def press(self, key: str) -> None:
        """One key, as from the keyboard."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def controls(self) -> dict[str, str]:
        """Names and roles of all that can be operated, as a screen reader has them."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"link", "button", "checkbox", "combobox", "textbox"}
        found = [node for node in nodes if not node["ignored"] and node.get("role", {}).get("value") in roles]
        return {node.get("name", {}).get("value", ""): node["role"]["value"] for node in found}

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")


@contextmanager
def browser(binary: str, profile: Path) -> Iterator[Page]:
    """A browser of its own, with nothing kept from before."""
    quiet = ("--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # fmt: skip
    # Containers run tests as root, where Chromium has no sandbox to offer; all that it opens is ours.
    command = [binary, *quiet, "--no-sandbox", f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(
            _target(process, profile / "DevToolsActivePort"), max_size=None, open_timeout=PATIENCE_S
        ) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _target(process: "subprocess.Popen[bytes]", port_file: Path) -> str:
    """The address of the first tab, once the browser is up."""
    import httpx

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the browser ended with code {process.returncode}"
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if lines:
            tabs = httpx.get(f"http://127.0.0.1:{lines[0]}/json/list", trust_env=False, timeout=PATIENCE_S).json()
            pages = [tab for tab in tabs if tab["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise AssertionError("the browser did not come up in time")
