"""A real browser without a window, spoken to through its debugging pipe: screenshots, console, and requests of a page."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """One tab. ``requests``: addresses asked for; ``complaints``: errors and warnings of the console, and exceptions."""

    def __init__(self, width: int = 1100, height: int = 900, *, dark: bool = False, path: str | None = None) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[str] = []
        self._count = 0
        self._buffer = b""
        self._session = ""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process, self._to, self._from = _start(path or browser_path() or BROWSERS[0], self._profile.name)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._profile.cleanup()

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, path: Path) -> None:
        """Returns once the page has loaded."""
        self._events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and wait for its answer."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self._read()
        answer = self._answers.pop(number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        while b"\0" not in self._buffer:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "id" in message:
            self._answers[message["id"]] = message
        else:
            self._note(message["method"], message["params"])

    def _note(self, method: str, about: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])


def _start(path: str, profile: str) -> tuple[int, int, int]:
    """The process, and descriptors to write to it and to read from it: its 3 and 4."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (theirs_in, theirs_out)]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
    actions = [
        *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)),
        *((os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate(moved, 3)),
    ]
    command = [path, *flags, f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(path, command, os.environ, file_actions=actions)
    for descriptor in (theirs_in, theirs_out, *moved):
        os.close(descriptor)
    return process, ours_out, ours_in
