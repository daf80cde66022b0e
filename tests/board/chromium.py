"""A headless Chromium driven over a pipe by the DevTools protocol, without a driver package."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.docs.browser import FLAGS, chromium

TIMEOUT_S = 60.0


class ProtocolError(AssertionError):
    """The browser could not obey a command."""


class Page:
    """A tab of the browser. Messages are JSON objects with a NUL byte at the end."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._buffer = b""
        self._last_id = 0
        self._session = ""
        self.problems: list[str] = []
        """Exceptions of scripts, errors in the console, and requests to other hosts than this one."""
        self.requests: list[str] = []
        """Addresses that were requested."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str, width: int, height: int = 900, *, theme: str = "light") -> None:
        """Open an address in a window of a size, for a system with a light or dark theme."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        # The same address with another fragment would not load the page again.
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def leave(self) -> None:
        """Leave the page and forget its problems and requests."""
        self._call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.problems.clear()
        self.requests.clear()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline_s = time.monotonic() + TIMEOUT_S
        # An element that does not exist yet is not an error.
        expression = f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"
        while not self._is_true(expression):
            assert time.monotonic() < deadline_s, f"{condition} stays false; problems: {self.problems}"
            time.sleep(0.05)

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(expression))
        except ProtocolError:
            # A page that is loaded again has no context for a moment.
            return False

    def key(self, name: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        codes |= {"PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
        text = {"Enter": "\r", " ": " "}.get(name, "")
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if kind == "keyDown" and text else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=codes[name], **extra)

    def drag(self, element: str, start: float, end: float) -> None:
        """Drag the mouse over an element (a JavaScript expression) from one fraction of its width to another."""
        box = f"{element}.getBoundingClientRect()"
        left, top, width, height = (self.evaluate(f"{box}.{side}") for side in ("x", "y", "width", "height"))
        y = top + height / 2
        self._mouse("mouseMoved", left + start * width, y, 0)
        self._mouse("mousePressed", left + start * width, y, 1)
        self._mouse("mouseMoved", left + (start + end) / 2 * width, y, 1)
        self._mouse("mouseMoved", left + end * width, y, 1)
        self._mouse("mouseReleased", left + end * width, y, 0)

    def _mouse(self, kind: str, x: float, y: float, buttons: int) -> None:
        button = "left" if kind != "mouseMoved" or buttons else "none"
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page, as PNG."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(data["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}}

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise ProtocolError(answer["error"])
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._from_browser, 1 << 20)
            assert block, "the browser has ended"
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        method = event.get("method")
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(json.dumps(parameters["entry"])[:2000])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            self.requests.append(url)
            if not url.startswith(("http://127.0.0.1:", "file://", "data:", "about:")):
                self.problems.append(f"request to {url}")


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """Start a browser with an empty profile, and end it after the block."""
    program = chromium()
    assert program is not None
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    command = f'exec "$@" 3<&{read_end} 4>&{write_end}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        pass_fds=(read_end, write_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
    os.close(write_end)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(30)
