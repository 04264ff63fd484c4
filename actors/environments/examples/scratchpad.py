"""A task for tools: keep several notes in files, and say what stood in one of them.

Each episode has a working directory of its own, so episodes that run at once do not see each other's notes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Scratchpad:
    """It is one task: the row's prompt says what to note and what is asked, its answer what is right."""

    def __init__(self) -> None:
        self.tools = [self.write, self.read]
        self._answer = ""

    def write(self, name: str, text: str) -> str:
        """Write a note. An older one of the same name is replaced."""
        Path(f"{_plain(name)}.txt").write_text(text, "utf-8")
        return "written"

    def read(self, name: str) -> str:
        """Read a note."""
        note = Path(f"{_plain(name)}.txt")
        return note.read_text("utf-8") if note.exists() else f"there is no note {name!r}"

    def reset(self, row: dict[str, Any]) -> str:
        self._answer = str(row["answer"])
        return str(row["prompt"])

    def step(self, answer: str) -> tuple[None, float, bool]:
        return None, float(answer.strip() == self._answer), True


def _plain(name: str) -> str:
    return "".join(letter for letter in name if letter.isalnum()) or "note"
