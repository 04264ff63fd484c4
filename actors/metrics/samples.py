"""samples.jsonl: some samples of each step as people read them, one line each, in a file that stays small.

    step, chosen (best, worst, random, dropped), prompt, sibling, row, reward, finish (ended, cut), tokens, reason,
    prompt_text, response, answer

Invariants
- Lines are whole, and steps ascend.
- The file stays below ``limits.samples_file_bytes``: when it would not, every second one of its steps goes. So a long
  run keeps samples of all its time, more of its end than of its beginning.
- It is worth no run: what cannot be written is reported once and left out.
"""

from __future__ import annotations

import json
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
        with self._path.open("ab") as file:
            file.write(text)

    def _thin(self) -> None:
        """Keep every second step; the newest is one of them."""
        lines = list(_lines(self._path))
        steps = sorted({step for step, _ in lines}, reverse=True)
        kept = set(steps[::2]) if len(steps) > 1 else set[int]()
        whole = self._path.with_suffix(".new")
        whole.write_bytes(b"".join(line + b"\n" for step, line in lines if step in kept))
        whole.replace(self._path)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All samples of the file; lines that are not whole are passed over."""
    return [json.loads(line) for _, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Step and line, of each line that is a sample."""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            yield int(json.loads(line)["step"]), line
        except (ValueError, KeyError, TypeError):
            continue
