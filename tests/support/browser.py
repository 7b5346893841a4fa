"""A real browser, driven over a pipe: Debian's chromium without a window.

The DevTools protocol over file descriptors 3 and 4 (`--remote-debugging-pipe`): JSON messages that end with NUL
(github.com/chromium/chromium, content/browser/devtools/devtools_pipe_handler.cc). No port, no library. Every wait has
a deadline.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.support.patience import patient

WAIT_S: Final = patient(60.0)
"""Far above what a page takes, on a machine that is busy with something else as well."""

NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Where a distribution has it; the first one is the smallest."""


class BrowserError(Exception):
    """The browser is not there, or did not do what it was told."""


def find() -> str:
    """The browser's program. Raises `BrowserError`."""
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise BrowserError("there is no chromium: install Debian's package chromium-headless-shell")


class Tab:
    """One tab."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What the browser told by itself, in order."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol. Raises `BrowserError`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str, *, width: int = 1500, height: int = 900, dark: bool = False) -> None:
        """Opens a page and waits until it was loaded and drawn."""
        if self._session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises `BrowserError` if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until a JavaScript expression is true. Raises `BrowserError`."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {WAIT_S:g} s: {expression}")
            time.sleep(0.02)

    def key(self, name: str, text: str = "") -> None:
        """Presses a key and lets it go."""
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, **given)

    def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        """A movement, a press or a turn of the wheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def click(self, x: float, y: float) -> None:
        """A click of the left button."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """What is to be seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            # Not select(): it takes no descriptor above 1023, and whoever ran before in this process may have as many.
            waiting = select.poll()
            waiting.register(self._back, select.POLLIN)
            ready = waiting.poll(1000 * max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._back, 1 << 16) if ready else b""
            if not chunk:
                raise BrowserError("the browser ended" if ready else f"no answer within {WAIT_S:g} s")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextmanager
def open_browser() -> Iterator[Tab]:
    """A browser with one tab, and a profile that is gone afterwards. Raises `BrowserError`."""
    program = find()
    (read_to, write_to), (read_back, write_back) = os.pipe(), os.pipe()
    # Beyond 10, so that moving one of them to 3 or 4 does not overwrite the other.
    far_to, far_back = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_to, write_back))
    with tempfile.TemporaryDirectory(prefix="gpuactors-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                sys.executable, "-c",
                f"import os, sys; os.dup2({far_to}, 3); os.dup2({far_back}, 4); os.execv(sys.argv[1], sys.argv[1:])",
                # Root in a container has no user namespace to give a sandbox, and the page is our own.
                program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                "--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(far_to, far_back),
        )  # fmt: skip
        for descriptor in (read_to, write_back, far_to, far_back):
            os.close(descriptor)
        try:
            yield Tab(write_to, read_back)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()
            os.close(write_to)
            os.close(read_back)
