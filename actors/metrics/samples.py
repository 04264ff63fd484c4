"""samples.jsonl: some samples of each step as people read them, one line each, in a file that stays small.

    step, chosen (best, worst, random, dropped), prompt, sibling, row, reward, finish (ended, cut), tokens, reason,
    prompt_text, response, answer

Invariants
- Lines are whole, and steps ascend.
- The file stays below ``limits.samples_file_bytes``: when it would not, half of its steps go, so that those that stay
  are spread evenly over the whole run, its first and its newest among them.
- It is worth no run: what cannot be written is reported once and left out.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Sample = Mapping[str, float | int | str | None]


class SamplesFile:
    """It appends, and thins. It opens the file for each step: one write a second at most is not worth a descriptor."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def add(self, rows: Sequence[Sample]) -> None:
        """Write the samples of one step.

        Raises:
            OSError: it cannot be written.
        """
        text = "".join(json.dumps(row, separators=(", ", ": ")) + "\n" for row in rows).encode()
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and size + len(text) > self._max_bytes:
            self._thin()
        with self._path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else b"\n" + text  # a crash has cut the last line off
            file.write(text)

    def _thin(self) -> None:
        """Keep half of the steps, spread evenly."""
        lines = list(_lines(self._path))
        kept = _spread(sorted({step for step, _ in lines}))
        whole = self._path.with_suffix(".new")
        whole.write_bytes(b"".join(line + b"\n" for step, line in lines if step in kept))
        whole.replace(self._path)


def _spread(steps: list[int]) -> set[int]:
    """Half of ``steps``: those next to points that divide the time from the first to the last evenly."""
    count = len(steps) // 2
    if count < 2:
        return set(steps[:count])
    apart = (steps[-1] - steps[0]) / (count - 1)
    return {steps[min(bisect_left(steps, steps[0] + i * apart), len(steps) - 1)] for i in range(count)}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All samples of the file; lines that are not whole are passed over."""
    return [json.loads(line) for _, line in _lines(path)]


def of_step(rows: Sequence[dict[str, Any]], step: int | None) -> list[dict[str, Any]]:
    """The samples of the newest step that is not after ``step``; empty if there is none."""
    steps = [row["step"] for row in rows if step is None or row["step"] <= step]
    return [row for row in rows if steps and row["step"] == max(steps)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Step and line, of each line that is a sample."""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            yield int(json.loads(line)["step"]), line
        except (ValueError, KeyError, TypeError):
            continue
