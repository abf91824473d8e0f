"""Chromium without a window, driven over the DevTools protocol on a pipe (`--remote-debugging-pipe`): JSON messages
that end with a zero byte, on the file descriptors 3 and 4 of the process. No package, no port.

Protocol: chromedevtools.github.io/devtools-protocol, domains Target, Page, Runtime, Input, Emulation, Network, Log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0  # seconds for one answer: a hung browser fails a test instead of stopping the run


def find() -> str | None:
    """The browser: STATICMEM_CHROMIUM, else the first of the usual names on the path."""
    return os.environ.get("STATICMEM_CHROMIUM") or next((found for n in NAMES if (found := shutil.which(n))), None)


class Browser:
    """A browser process with one page at a time."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", "--hide-scrollbars", "--disable-background-networking", "--disable-extensions",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_child, from_child)]  # clear of 3 and 4
        nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        pipes = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends, 3)]
        self._pid = os.posix_spawn(executable, [executable, *flags], os.environ, file_actions=[*nowhere, *pipes])
        for end in (to_child, from_child, *ends):
            os.close(end)
        self._buffer, self._next = b"", 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError, RuntimeError):
            self.call("Browser.close")
        end = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.05)
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to a command; events on the way are kept in `events`."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(PATIENCE)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A page of a file or at an address, once its script is done."""
        return Page(self, path if isinstance(path, str) else path.resolve().as_uri(), width, height, dark)


class Page:
    """A page that is open. `requests` are the addresses that it asked for; `problems` errors and what was blocked."""

    def __init__(self, browser: Browser, address: str, width: int, height: int, dark: bool) -> None:
        self.browser = browser
        self.target = str(browser.call("Target.createTarget", url="about:blank")["targetId"])
        self.session = str(browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.js(expression):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {expression}; {self.problems}")
            time.sleep(0.02)

    def _events(self, method: str) -> list[dict[str, Any]]:
        mine = [e for e in self.browser.events if e.get("sessionId") == self.session and e["method"] == method]
        return [event["params"] for event in mine]

    @property
    def requests(self) -> list[str]:
        self.js("0")  # takes in the events up to now
        return [str(params["request"]["url"]) for params in self._events("Network.requestWillBeSent")]

    @property
    def problems(self) -> list[str]:
        """Exceptions, errors and warnings of the console, and what the policy blocked."""
        self.js("0")
        found = [str(p["exceptionDetails"].get("exception", p)) for p in self._events("Runtime.exceptionThrown")]
        found += [str(p["args"]) for p in self._events("Runtime.consoleAPICalled") if p["type"] in ("error", "warning")]
        return found + [str(p["entry"]["text"]) for p in self._events("Log.entryAdded")]

    # -- a user ----------------------------------------------------------------------------------------------------

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element in the window, scrolled into view."""
        quoted = json.dumps(selector)
        self.js(f"document.querySelector({quoted}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        found = self.js(
            f"(r => [r.left, r.top, r.width, r.height])(document.querySelector({quoted}).getBoundingClientRect())"
        )
        left, top, width, height = found
        return left, top, width, height

    def move(self, x: float, y: float, buttons: int = 0) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=buttons)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1, clickCount=1)
        for step in range(1, 6):
            self.move(x + (to_x - x) * step / 5, y + (to_y - y) * step / 5, buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=to_y, button="left", clickCount=1)

    def wheel(self, x: float, y: float, delta: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta)

    def key(self, key: str, code: int = 0, text: str = "") -> None:
        extra = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        import base64

        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
