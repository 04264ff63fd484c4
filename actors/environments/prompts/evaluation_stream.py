"""The prompts of the evaluation: read like those of training, each once, after a comparison with the training data.

    prompts of the evaluation ─▶ digests ─┐
    rows of the training data, one by one ┴─▶ equal ones, counted: a policy is not measured on what it learns

Prompts are compared as the data hold them, without template and tokenizer. Where an environment makes tasks of rows,
whole rows are compared, since their prompts may all be equal. The number of rows compared is bounded, and one ``look``
lasts about as long as its caller allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from actors.environments.prompts.mixed_stream import open_stream
from actors.environments.prompts.rows import Row, Source, digest_of
from configs.schema import JobConfig


class EvaluationStream:
    """Reads the prompts of ``job.eval``. ``sources``: all sources of the job, opened."""

    def __init__(self, job: JobConfig, model_path: Path, run_dir: Path | None, sources: Mapping[str, Source]) -> None:
        assert job.eval is not None, "a job without evaluation has no such stream"
        named = job.eval.sources
        held_out = {name: sources[name] for name in named}
        self._stream = open_stream(job.evaluation, model_path, run_dir, held_out, named)
        training = {} if job.only_evaluates else {name: sources[name] for name in job.data.sources}
        self._overlap = Overlap(training, held_out, job.limits.overlap_rows, whole_rows=job.has_episodes)

    def read(self, start: int, count: int, slice_s: float = math.inf) -> dict[str, Any]:
        """As ``PromptStream.read``, with the number of evaluation prompts that are also in the training data."""
        if not self._overlap.look(monotonic() + slice_s):
            return {"prompts": [], "exhausted": False}
        return self._stream.read(start, count, slice_s) | {"overlap": self._overlap.equal}


class Overlap:
    """Compares training and evaluation data once. ``rows_max``: most rows that are read of each source.

    ``whole_rows``: prompt, answer and all other columns of a row are compared; else its prompt alone.
    """

    def __init__(
        self,
        training: Mapping[str, Source],
        evaluation: Mapping[str, Source],
        rows_max: int,
        *,
        whole_rows: bool = False,
    ) -> None:
        self._whole_rows = whole_rows
        self._held_out: dict[int, bool] = {}
        """Digest of a prompt of the evaluation → whether it was found in the training data."""
        self._look = self._compare(training, evaluation, rows_max)

    @property
    def equal(self) -> int:
        """Number of prompts of the evaluation found in the training data so far."""
        return sum(self._held_out.values())

    def look(self, until_s: float) -> bool:
        """Compare until ``until_s`` (of ``monotonic``), one row at least; False: there is more to compare."""
        return all(monotonic() < until_s for _ in self._look)

    def _compare(
        self, training: Mapping[str, Source], evaluation: Mapping[str, Source], rows_max: int
    ) -> Iterator[None]:
        for row in _rows(evaluation, rows_max):
            self._held_out[self._digest(row)] = False
            yield
        for row in _rows(training, rows_max):
            if (digest := self._digest(row)) in self._held_out:
                self._held_out[digest] = True
            yield

    def _digest(self, row: Row) -> int:
        if self._whole_rows:
            return digest_of(repr((row.prompt, row.answer, sorted(row.extra.items()))))
        return digest_of(row.prompt if isinstance(row.prompt, str) else repr(row.prompt))


def _rows(sources: Mapping[str, Source], rows_max: int) -> Iterator[Row]:
    for source in sources.values():
        for index in range(min(len(source), rows_max)):
            yield source.row(index)
