"""A task whose answers are short, but for a few: capital letters for small ones, as many as there are.

    prompt  "kvqa" and dots up to ``WIDTH``      answer  "KVQA"

The number of letters is log-normal: half of the answers have at most 8 letters, one in twenty more than 25, the
longest ``WIDTH``. Prompts are of one length, so that a tiny model learns the task in a minute and the tail is all
in the answers.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Final

WIDTH: Final = 60
_SHORTEST: Final = 3
_LOG_MEAN: Final = 1.6
_LOG_DEVIATION: Final = 0.9


def write_rows(path: Path, *, rows: int = 5_000, seed: int = 0) -> None:
    """Write the data set as JSONL with the keys ``prompt`` and ``answer``. Equal seeds give equal rows."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            letters = min(WIDTH, _SHORTEST + int(draw.lognormvariate(_LOG_MEAN, _LOG_DEVIATION)))
            text = "".join(draw.choices(string.ascii_lowercase, k=letters))
            file.write(json.dumps({"prompt": text.ljust(WIDTH, "."), "answer": text.upper()}) + "\n")
