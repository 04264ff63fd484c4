"""``make check-gpu``: whether what runs on a CPU runs on the device of this machine, in ten minutes, without a network.

    device ─▶ usable? ─▶ each part, a process of its own ─▶ gpu_report.md, and a line: N passed, N failed, N skipped
                 └ no: one sentence, and the others are skipped

A part that fails or hangs takes no other's place. The report is written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from actors.weights.segments import remove_segments
from benchmarks.check_gpu import report
from benchmarks.check_gpu.parts import PARTS, Part, Place
from benchmarks.check_gpu.running import Result, run
from configs.run_files import MEMORY_ID

CHECK_S: Final = 600.0
"""All parts together: what would begin later is skipped."""
_DEVICE_S: Final = 90.0
"""Importing torch and starting CUDA takes seconds; the first time after a boot, half a minute."""
_DEVICE: Final = "device"
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_NO_DEVICE: Final = Result("skipped", why="there is no device to run on")
_NOT_REACHED: Final = Result("skipped", why="the check was ended before it came to this")


class Check:
    """The parts of one check that were asked for, and what has become of them."""

    def __init__(self, device: str, parts: Sequence[str], file: Path, scratch: Path) -> None:
        self.results = dict.fromkeys([_DEVICE, *parts], _NOT_REACHED)
        self._device, self._file, self._scratch = device, file, scratch
        self._facts: dict[str, Any] = {}
        self._ends_s = perf_counter() + CHECK_S

    def run(self) -> None:
        """Run all parts, and write the report after each."""
        self._settle(_DEVICE, self._look())
        for name in list(self.results)[1:]:
            self._settle(name, self._run(PARTS[name], self._scratch / name))

    def _look(self) -> Result:
        command = [sys.executable, "-m", "benchmarks.check_gpu.device", self._device]
        ended = run(command, self._scratch / _DEVICE, self._environment(), _DEVICE_S)
        if ended.code is None:
            return Result("failed", why=f"the device gave no answer for {_DEVICE_S:g} s\n{ended.tail}")
        if not ended.out:
            return Result("failed", why=ended.tail, seconds=ended.seconds)
        self._facts = json.loads(ended.out.splitlines()[-1])
        refused = str(self._facts["refused"])
        return Result("failed" if refused else "passed", why=refused, seconds=ended.seconds)

    def _run(self, part: Part, directory: Path) -> Result:
        if self.results[_DEVICE].outcome == "failed":
            return _NO_DEVICE
        place = Place(self._device, directory)
        if missing := part.missing(place):
            return Result("skipped", why=missing)
        left_s = self._ends_s - perf_counter()
        if left_s <= 0:
            return Result("skipped", why=f"the {CHECK_S:g} s of the whole check were over")
        limit_s = min(part.limit_s, left_s)
        ended = run(part.command(place), directory, self._environment(), limit_s)
        if ended.code is None:
            return Result("failed", why=f"it was ended after {limit_s:.0f} s\n{ended.tail}", seconds=ended.seconds)
        found = part.read(place, ended)
        return Result(found.outcome, found.figures, found.why, ended.seconds)

    def _settle(self, name: str, result: Result) -> None:
        self.results[name] = result
        shows = {_DEVICE: "torch computes on it", **{part: PARTS[part].shows for part in self.results if part in PARTS}}
        self._file.write_text(report.markdown(self._facts, self.results, shows, device=self._device), encoding="utf-8")
        if result is _NO_DEVICE:
            return  # what is wrong has been said, in one sentence
        why = f": {result.why}" if result.why else ""
        print(f"{name:<12} {result.outcome} after {result.seconds:.0f} s{why}", file=sys.stderr, flush=True)

    def _environment(self) -> dict[str, str]:
        """Offline, and what is left behind goes with the scratch directory."""
        return {**os.environ, **_OFFLINE, "TMPDIR": str(self._scratch)}


def main(args: Sequence[str]) -> int:
    """Check and say so; 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="make check-gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--report", type=Path, default=Path("gpu_report.md"))
    options = parser.parse_args(args)
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: there is no {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as scratch:
        check = Check(options.device, names, options.report, Path(scratch))
        try:
            check.run()
        finally:  # a run that was killed has left its weights in shared memory
            for file in Path(scratch).rglob(MEMORY_ID):
                remove_segments(file.parent)
    print(f"{options.report}: what ran on what, and the figures")
    print(report.last_line(check.results), flush=True)
    return int(any(result.outcome == "failed" for result in check.results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
