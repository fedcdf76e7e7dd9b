"""A browser to look at pages with: Chromium without a window, spoken to over pipes by its DevTools protocol.

Two pipes and JSON are all that it takes (https://chromedevtools.github.io/devtools-protocol), so no library is needed.
It loads nothing that a page does not ask for, keeps nothing, and ends with the `with`.
"""

import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

TIMEOUT_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank"),
)


def found() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class DoesNotStart(Exception):
    """The browser is there, but nothing can be said to it."""


class Tab:
    """A page in a browser.

    Attributes:
        problems: what the page has thrown, and what it has written to the console as an error.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to a page, and wait until it is there."""
        self._events.clear()
        self._call("Page.navigate", url=address)
        deadline = monotonic() + TIMEOUT_S
        while "Page.loadEventFired" not in self._events:
            self._read(deadline)

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = monotonic() + TIMEOUT_S
        while not self.run(f"new Promise(done => setTimeout(() => done(Boolean({script})), 20))"):
            if monotonic() > deadline:
                raise AssertionError(f"it has not become true: {script}")

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Let the window be so large."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, scheme: str) -> None:
        """Let the system's colours be "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def center(self, selector: str) -> tuple[float, float]:
        """Where in the window an element is, after it was scrolled to."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', "
            "behavior: 'instant'}); const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        return box[0] + box[2] / 2, box[1] + box[3] / 2

    def click(self, selector: str) -> None:
        """Click an element."""
        x, y = self.center(selector)
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y)
        self._mouse("mouseReleased", x, y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move the mouse with its button pressed."""
        self._mouse("mouseMoved", *start)
        self._mouse("mousePressed", *start)
        for part in (0.3, 0.7, 1.0):
            self._mouse("mouseMoved", start[0] + part * (end[0] - start[0]), start[1] + part * (end[1] - start[1]))
        self._mouse("mouseReleased", *end)

    def hover(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self._mouse("mouseMoved", x, y)

    def double_click(self, x: float, y: float) -> None:
        """Click twice."""
        for count in (1, 2):
            self._mouse("mousePressed", x, y, count)
            self._mouse("mouseReleased", x, y, count)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen as a PNG file."""
        import base64

        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        button = {"button": "left", "buttons": 1, "clickCount": count}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def _call(self, method: str, **params: object) -> Any:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = monotonic() + TIMEOUT_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(deadline - monotonic(), 0.0))
            content = os.read(self._from, 1 << 20) if ready else b""
            if not content:
                raise AssertionError("the browser does not answer")
            self._rest += content
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        method = message.get("method", "")
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        return message


@contextmanager
def browsing(program: str) -> Generator[Tab]:
    """A tab of a browser that is started for it, and ended after it."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()

    def arrange() -> None:  # the browser reads from its descriptor 3 and writes to 4
        spare = os.dup(to_us)
        os.dup2(from_us, 3)
        os.dup2(spare, 4)
        os.set_inheritable(3, True)
        os.set_inheritable(4, True)

    with TemporaryDirectory() as profile:
        command = [program, *_OPTIONS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=arrange,
            start_new_session=True,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            try:
                tab = Tab(to_browser, from_browser)
            except (AssertionError, OSError) as error:
                raise DoesNotStart(str(error)) from error
            yield tab
        finally:
            os.close(to_browser)
            os.close(from_browser)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
