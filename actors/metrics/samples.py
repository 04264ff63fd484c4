"""samples.jsonl: some samples of each step as people read them, one line each, in a file that stays small.

    step, chosen (best, worst, random, dropped), prompt, sibling, source, row, reward, reward_parts, finish (ended,
    cut), tokens (the model's), versions (oldest and newest of the weights), reason (why it was dropped), prompt_text,
    turns ─▶ role (model, environment, tool), text, tokens, name, fresh          answer

Invariants
- Lines are whole, and steps ascend.
- The file stays below ``limits.samples_file_bytes``: when it would not, half of its steps go, so that those that stay
  are spread evenly over the whole run, its first and its newest among them.
- It is worth no run: what cannot be written is reported once and left out.
"""

from __future__ import annotations

import json
import os
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.core.terminal_text import shares, shortened
from actors.protocol.metrics import ShownSample

Choice = Literal["best", "worst", "random"]


class SamplesFile:
    """It appends, and thins. It opens the file for each step: one write a second at most is not worth a descriptor."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def add(self, rows: Sequence[ShownSample]) -> None:
        """Write the samples of one step.

        Raises:
            OSError: it cannot be written.
        """
        text = "".join(json.dumps(msgspec.to_builtins(row)) + "\n" for row in rows).encode()  # all of it ASCII
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


def picked(
    rows: Sequence[dict[str, Any]],
    *,
    step: int | None = None,
    prompt: int | None = None,
    choice: Choice | None = None,
    count: int | None = None,
) -> list[dict[str, Any]]:
    """Those of one step, as ``of_step``; with ``prompt`` and no step those of that prompt in all steps.

    ``best`` and ``worst`` put them in the order of their rewards; ``random`` leaves those that were drawn at random.
    """
    if prompt is not None:
        rows = [row for row in rows if row["prompt"] == prompt]
    found = list(rows) if prompt is not None and step is None else of_step(rows, step)
    if choice == "random":
        found = [row for row in found if row["chosen"] == "random"]
    elif choice is not None:
        found = [row for row in found if row["reward"] is not None]
        found.sort(key=lambda row: row["reward"], reverse=choice == "best")
    return found[:count]


def titled(turns: Sequence[Mapping[str, Any]], chars: int = sys.maxsize) -> list[tuple[str, str]]:
    """Title and text of each turn, all in about ``chars`` characters; a single one of the model is the response."""
    fitting = shares([len(turn["text"]) for turn in turns], chars)
    texts = [shortened(turn["text"], share) for turn, share in zip(turns, fitting, strict=True)]
    if [turn["role"] for turn in turns] == ["model"]:
        return [("response", texts[0])]
    titles = [f"{turn['role']} {turn['name']}".rstrip() + ", fresh context" * turn["fresh"] for turn in turns]
    return [
        (f"turn {number}, {title}, {turn['tokens']} tokens", text)
        for number, (title, text, turn) in enumerate(zip(titles, texts, turns, strict=True), 1)
    ]


def columns(row: ShownSample) -> dict[str, float | int | str | None]:
    """A sample as a flat row, for tables that know numbers and text alone."""
    flat = msgspec.to_builtins(row)
    parts, turns = flat.pop("reward_parts"), titled(flat["turns"])
    text = turns[0][1] if len(turns) == 1 else "\n".join(f"[{title}]\n{said}" for title, said in turns)
    flat |= {"versions": "–".join(map(str, row.versions)), "turns": text}
    return flat | {f"reward_{name}": value for name, value in parts.items()}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Step and line, of each line that is a sample."""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = json.loads(line)
            if "turns" in row:  # it is one of this version
                yield int(row["step"]), line
        except (ValueError, KeyError, TypeError):
            continue
