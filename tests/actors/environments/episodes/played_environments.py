"""Environments and agents of the tests; the zygote imports this file, as it would a user's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Countdown:
    """Asks for its number less one, and again, until it is 0; wrong answers cost."""

    def __init__(self, start: int = 2) -> None:
        self.left = start

    def reset(self, row: dict[str, Any]) -> str:
        return f"{row['prompt']}: {self.left}?"

    def step(self, answer: str) -> tuple[str, float, bool]:
        right = answer == str(self.left - 1)
        self.left -= right
        return f"{self.left}?", float(right), self.left == 0


class Noted:
    """Adds a line to a file when it begins; then it does what its row says."""

    def __init__(self, note: str) -> None:
        self._note = Path(note)

    def reset(self, row: dict[str, Any]) -> str:
        self._how = row["prompt"]
        with self._note.open("a") as file:
            file.write(f"{os.getpid()} {Path.cwd()} {random.random()}\n")
        return "go"

    def step(self, answer: str) -> tuple[str, float, bool]:
        if self._how == "raise":
            raise ValueError("the map is upside down")
        if self._how == "hang":
            subprocess.Popen(["sleep", "600"], start_new_session=True)  # leaves the group
            subprocess.Popen(["sleep", "601"])
            time.sleep(600)
        if self._how == "exit":
            os._exit(3)
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._how == "flood":
            for _ in range(4000):
                print("x" * 1000)
            sys.stdout.flush()
            Path("scratch").write_text("y" * 100)
        if self._how == "nan":
            return "", float("nan"), True
        if self._how == "orphan":
            child = subprocess.Popen(["sleep", "602"], start_new_session=True)
            self._note.with_name("orphan").write_text(str(child.pid))
        return "", 1.0, True


class Async:
    """Is asynchronous throughout, and tells numbers."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": str(row["prompt"])}]

    async def step(self, answer: str) -> tuple[None, float, bool]:
        return None, 0.25, True

    async def score(self) -> float:
        return 0.5

    def metrics(self) -> dict[str, float]:
        return {"luck": 3}


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def slow(seconds: float) -> str:
    """Take a while."""
    time.sleep(seconds)
    return "at last"


def loud(characters: int) -> str:
    """Say much."""
    return "z" * characters


def broken() -> str:
    """Do nothing well."""
    raise KeyError("no such drawer")


def right(prompt: str, response: str, answer: Any, **_: Any) -> float:
    return float(response == answer)


def execute(code: str) -> str:
    """Run code, as tools of sandboxes do."""
    exec(code, {})  # what a model writes
    return "done"


def half() -> str:
    """Say what no encoding has room for."""
    return "a\ud800b"
