"""``headrace serve`` as a process at one port, in all of its lives."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from configs.limits import DEFAULT_LIMITS
from tests.free_ports import free_ports

_END_S = 30


class ServedProcess:
    """The command, serving the directories of ``models`` by their names to one tenant."""

    def __init__(self, models: Mapping[str, Path], directory: Path) -> None:
        named = (word for name, path in models.items() for word in ("--model", f"{name}={path}"))
        self._words = [
            *(sys.executable, "-m", "main", "serve", "--dir", str(directory), "--listen", f"127.0.0.1:{free_ports(1)}"),
            *("--tenant", "alice", *named),
        ]
        self._log = directory.with_suffix(".log")
        self.begin()

    def begin(self) -> None:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=subprocess.STDOUT)
        until_s = time.monotonic() + DEFAULT_LIMITS.run_patience_s
        while "TINKER_API_KEY" not in (said := self._log.read_text()):
            assert self._process.poll() is None and time.monotonic() < until_s, said
            time.sleep(0.05)
        self.variables = dict(re.findall(r"(TINKER_\w+)=(\S+)", said))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_END_S)
