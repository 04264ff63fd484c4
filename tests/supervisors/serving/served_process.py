"""``headrace serve`` as a process at one port, in all of its lives."""

from __future__ import annotations

import json
import os
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

    def __init__(self, models: Mapping[str, Path], directory: Path, *words: str) -> None:
        self._directory = directory
        named = (word for name, path in models.items() for word in ("--model", f"{name}={path}"))
        self._words = [
            *(sys.executable, "-m", "main", "serve", "--dir", str(directory), "--listen", f"127.0.0.1:{free_ports(1)}"),
            *("--tenant", "alice", *named, *words),
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
        self.url, self.key = self.variables["TINKER_BASE_URL"], self.variables["TINKER_API_KEY"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)

    def kill_one(self, name: str) -> bool:
        """Kill the process of that name alone; False: it is not there now."""
        asked = [sys.executable, "-m", "main", "ctl", "--control", str(self._directory), "tree", "--json"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        if told.returncode:
            return False
        pids = [row["pid"] for row in json.loads(told.stdout) if row["name"] == name and row["pid"]]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_END_S)
