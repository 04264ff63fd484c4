"""Agents and environments of the real runs: imported by the processes of a run, as a user's would be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

WAIT_S = 60.0


def streaming(row: dict[str, Any], client: Any) -> tuple[float, dict[str, float]]:
    """OpenAI's SDK as it is, which gives a read up after a second."""
    from openai import OpenAI

    begun = time.monotonic()
    messages: Any = [{"role": "user", "content": row["prompt"]}]
    stream = OpenAI(timeout=1.0).chat.completions.create(model=client.model, messages=messages, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    return sum(map(ord, said)) % 7 / 7, {"seconds": time.monotonic() - begun, "characters": float(len(said))}


class Scratchpad:
    """Eight of them meet, and each writes to a file of one name in its working directory, turn by turn."""

    def __init__(self, meeting: str) -> None:
        self._meeting = Path(meeting)
        self._said: list[str] = []

    def reset(self, row: dict[str, Any]) -> str:
        (self._meeting / Path.cwd().parent.name).touch()
        ends_s = time.monotonic() + WAIT_S
        while len(list(self._meeting.iterdir())) < 8:  # a step's episodes: they all run at once
            assert time.monotonic() < ends_s, "fewer than eight episodes run at once"
            time.sleep(0.02)
        return self._note(f"pad {row['answer']}")

    def step(self, answer: str) -> tuple[str, float, bool]:
        said = self._note(answer.replace("\n", " "))
        return said, 0.0, len(self._said) == 4

    def _note(self, line: str) -> str:
        self._said.append(line)
        with Path("pad.txt").open("a", encoding="utf-8", newline="") as pad:
            pad.write(line + "\n")
        return "Noted. And?"

    def score(self) -> float:
        return float(Path("pad.txt").read_bytes().decode() == "".join(f"{line}\n" for line in self._said))


class Thinks:
    """Three questions, each of which an answer with a thought before it is given to, by whom it is learned from."""

    def __init__(self) -> None:
        self._turn = 0
        self._said = 0

    def reset(self, row: dict[str, Any]) -> str:
        return "Go on."

    def step(self, answer: str) -> tuple[str, float, bool]:
        self._turn += 1
        self._said += sum(map(ord, answer))
        return "Go on.", self._said % 5 / 5, self._turn == 3

    def example(self, row: dict[str, Any], draw: Any) -> list[dict[str, str]]:
        thought = {"role": "assistant", "content": f"<think>\n{draw.randint(1, 3)}\n</think>\n\n{draw.randint(4, 6)}"}
        return [one for _ in range(3) for one in ({"role": "user", "content": "Go on."}, thought)]
