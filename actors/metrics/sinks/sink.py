"""What a sink is: a place where the rows of a run go besides the run's own files, such as TensorBoard.

Invariants
- No run waits for a sink, and none ends for one: ``feeds.py`` gives each a thread, and leaves it out when it fails.
- A sink is told with which step this life of the run begins, so that charts do not mix it with steps that were undone.
- Each kind imports its library when it is made, since most processes need none of them, and uses its public names only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from actors.protocol.metrics import ShownSample
from configs.limits import Limits
from configs.run_files import EVALUATIONS, METRICS
from configs.schema import MetricsConfig
from transport.errors import HeadraceError

Row = Mapping[str, float | int | str | None]
"""Columns of a step; None: a mean of nothing, which no chart shows as a number."""

EvalRow = Mapping[str, float | int | dict[str, float | None] | None]
"""Columns of a line of eval.jsonl."""


_END_BYTES: Final = 1 << 18
"""Read of the end of metrics.jsonl to find its last row; a row has some 2 KB."""


class SinkUnavailable(HeadraceError):
    """A sink that the job asks for cannot be had (configuration); the text says why and what to do.

    The run goes on without it.
    """

    permanent = True


class Sink(Protocol):
    """Takes one row a step. It may block for file or network writes: it has a thread of its own."""

    def write(self, step: int, row: Row) -> None: ...
    def evaluation(self, row: EvalRow) -> None: ...
    def samples(self, step: int, rows: Sequence[ShownSample]) -> None: ...
    def observe(self, process: str, gauges: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkSetup:
    """Describes the run that a sink is made for."""

    job: str
    run_dir: Path
    config: MetricsConfig
    limits: Limits
    first_step: int
    """First step of which this life of the run gives a row; what a sink has of it or later ones was undone."""
    evaluations: Mapping[int, EvalRow]
    """Rows of eval.jsonl before this life, by version."""

    @classmethod
    def of(cls, job: str, run_dir: Path, config: MetricsConfig, limits: Limits) -> SinkSetup:
        """Read from the files of ``run_dir`` how far the run has come. To be called before they grow."""
        steps = _numbered(_end_of(run_dir / METRICS), "step")
        evaluations = dict(_numbered(_end_of(run_dir / EVALUATIONS, whole=True), "version"))
        return cls(job, run_dir, config, limits, max((step + 1 for step, _ in steps), default=0), evaluations)

    def repeat(self, sink: Sink) -> None:
        """Give a sink that has nothing of the run all rows before ``first_step``, with their evaluations."""
        if 0 in self.evaluations:
            sink.evaluation(self.evaluations[0])
        if self.first_step == 0:
            return
        with (self.run_dir / METRICS).open("rb") as lines:
            for step, row in _numbered(lines, "step"):
                if step >= self.first_step:
                    return
                sink.write(step, row)
                if step + 1 in self.evaluations:
                    sink.evaluation(self.evaluations[step + 1])


def _end_of(path: Path, *, whole: bool = False) -> list[bytes]:
    """Lines at the end of a file, or all; the first may be cut off. None if there is no file."""
    if not path.exists():
        return []
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.seek(0 if whole else max(0, size - _END_BYTES))
        return file.read(size - begin).split(b"\n")


def _numbered(lines: Iterable[bytes], key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of JSON lines, each with its number ``key``; what is no whole row is left out."""
    for line in lines:
        try:
            row = json.loads(line)
            number = int(row[key])
        except (ValueError, KeyError, TypeError):
            continue
        yield number, row


def evaluation_columns(row: EvalRow) -> dict[str, float]:
    """The numbers of a row of eval.jsonl under the names that charts show, such as ``eval/pass_at_4``."""
    passes = cast("dict[str, float | None]", row["pass_at_k"])
    named = {name: value for name, value in row.items() if name != "pass_at_k"}
    named |= {f"pass_at_{k}": value for k, value in passes.items()}
    return {f"eval/{name}": value for name, value in named.items() if isinstance(value, int | float)}
