"""samples.jsonl: some samples of each step as people read them, one line each, in a file that stays small.

    step, chosen (best, worst, random, dropped), prompt, sibling, source, row, reward, reward_parts, finish (a label of
    ``protocol/endings.py``), tokens (the model's), versions (oldest and newest of the weights), reason (why it was
    dropped), prompt_text, turns ─▶ role (model, environment, tool), text, tokens, name, fresh          answer

Invariants
- Lines are whole, and steps ascend.
- The file stays below ``limits.samples_file_bytes``: when it would not, half of its steps go, so that those that stay
  are spread evenly over the whole run, its first and its newest among them.
- No run ends for it: the first failed write is reported, and all further samples are left out.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.core.strict_json import strict_json
from actors.core.terminal_text import shares, shortened
from actors.host.plain_file import json_object, newest_lines
from actors.host.whole_file import write_whole
from actors.protocol.metrics import ShownSample, ShownTurn
from configs.limits import DEFAULT_LIMITS

Choice = Literal["best", "worst", "random"]


class SamplesFile:
    """Appends samples, and thins them. It opens the file for each step: a write a second is not worth a descriptor."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def add(self, rows: Sequence[ShownSample]) -> None:
        """Write the samples of one step.

        Raises:
            OSError: the file cannot be written.
        """
        text = "".join(strict_json(msgspec.to_builtins(row)) + "\n" for row in rows).encode()  # all of it ASCII
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
        lines = [(row["step"], line) for line, row in _rows(self._path)]
        kept = _spread(sorted({step for step, _ in lines}))
        write_whole(self._path, b"".join(line + b"\n" for step, line in lines if step in kept))


def _spread(steps: list[int]) -> set[int]:
    """At most half of ``steps``: those next to points that divide the span from the first to the last evenly."""
    count = len(steps) // 2
    if count < 2:
        return set(steps[:count])
    apart = (steps[-1] - steps[0]) / (count - 1)
    return {steps[min(bisect_left(steps, steps[0] + i * apart), len(steps) - 1)] for i in range(count)}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All samples of the file; lines that are not whole, or no samples, are passed over.

    Raises:
        ConfigError: ``path`` is no plain file.
    """
    return [row for _, row in _rows(path)]


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
    """The samples of one step, as ``of_step``; with ``prompt`` and no step, those of that prompt in all steps.

    ``best`` and ``worst`` sort them by their rewards; ``random`` keeps only those that were drawn at random.
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
    """Title and text of each turn, all in about ``chars`` characters; a lone turn of the model is the response."""
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
    """A sample as a flat row, for tables that hold only numbers and text."""
    flat = msgspec.to_builtins(row)
    parts, turns = flat.pop("reward_parts"), titled(flat["turns"])
    text = turns[0][1] if len(turns) == 1 else "\n".join(f"[{title}]\n{said}" for title, said in turns)
    flat |= {"versions": "–".join(map(str, row.versions)), "turns": text}
    return flat | {f"reward_{name}": value for name, value in parts.items()}


class _Kept(msgspec.Struct):
    """Describes what is shown of a line; columns that it need not have have a value here."""

    step: int
    prompt: int
    sibling: int
    turns: list[ShownTurn]
    chosen: str = ""
    reward: float | None = None
    reward_parts: dict[str, float | None] = {}
    finish: str = ""
    tokens: int = 0
    reason: str = ""
    prompt_text: str = ""
    answer: str = ""
    source: str | None = None


def sample_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """A line of samples.jsonl with all that is shown of it; None: an older version, or another hand, has written it."""
    try:
        return row | msgspec.to_builtins(msgspec.convert(row, _Kept))
    except msgspec.ValidationError:
        return None


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that is a sample, and what it says."""
    for line in newest_lines(path, DEFAULT_LIMITS.run_record_bytes):
        row = json_object(line)
        if row is not None and (sample := sample_of(row)) is not None:
            yield line, sample
