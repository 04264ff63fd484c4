"""Headless Chromium, driven over two pipes (``--remote-debugging-pipe``): JSON messages, each ended by a zero byte."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 90.0
"""A browser's first start on a busy machine."""
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)


class Chromium:
    """One browser with one page. ``async`` is not needed: a test does one thing at a time."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900) -> None:
        requests, self._in = os.pipe()
        self._out, answers = os.pipe()
        theirs, ours = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (requests, answers))
        os.close(requests)
        os.close(answers)
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{ours} {theirs}<&- {ours}>&-'  # it speaks through descriptors 3 and 4
        flags = [*_FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), *flags],
            pass_fds=(theirs, ours), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        self._ids = itertools.count(1)
        self._left = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        request = {"id": number, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._in, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._out], [], [], PATIENCE_S)
            assert ready, "the browser is silent"
            part = os.read(self._out, 1 << 16)
            assert part, "the browser has ended"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a line of JavaScript comes to in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until it is true in the page."""
        end = time.monotonic() + PATIENCE_S
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} has not come true; the page says: {self.text('body')[:2000]}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What a person reads there, on one line."""
        return " ".join(str(self.value(f"document.querySelector({json.dumps(selector)}).textContent")).split())

    def picture(self, path: Path, *, dark: bool = False, whole: bool = True) -> None:
        """The page as PNG, ``whole`` or as much of it as the window shows."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
