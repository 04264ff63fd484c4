"""Environments of their own for other people's programs: a release of the client, the cookbook of recipes.

python -m venv ─▶ the named packages, without what they depend on ─▶ behind them, what this environment has
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

_UNREACHABLE = ("after connection broken by", "Network is unreachable", "Temporary failure in name resolution")
_INSTALL_S, _END_S = 300, 30


def environment(path: Path, *packages: str) -> Path:
    """The interpreter of a new environment with exactly these packages; the test is skipped without an index."""
    venv.create(path, symlinks=True)
    python = path / "bin" / "python"
    (own,) = path.glob("lib/python*/site-packages")
    (own / "behind.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *packages]
    done = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=_INSTALL_S)
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip("pip reaches no package index, from which other people's programs would come")
    assert done.returncode == 0, done.stderr[-3000:]
    return python


class Program:
    """Somebody's program in an environment of its own, under way. ``variables``: where its server is."""

    def __init__(self, python: Path, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._log = folder / "program.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), *words], cwd=folder, env=inherited | {"TINKER_TELEMETRY": "0"} | dict(variables),
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait(self, limit_s: float) -> None:
        """Wait for its end, which is a success."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert code == 0, self.said()

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for something that the program does before its end."""
        until_s = time.monotonic() + limit_s
        while not condition():
            assert self._process.poll() is None and time.monotonic() < until_s, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self._log.read_text()[-5000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)
