"""The prompts of the evaluation: read like those of training, each once, after they were held against the latter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from actors.environments.prompts.mixed_stream import open_stream
from actors.environments.prompts.overlap import Overlap
from actors.environments.prompts.rows import Source
from configs.schema import JobConfig


class EvaluationStream:
    """It reads ``job.eval.data``. ``sources``: all of the job's, open."""

    def __init__(self, job: JobConfig, model_path: Path, run_dir: Path | None, sources: Mapping[str, Source]) -> None:
        assert job.eval is not None, "a job without evaluation has no such stream"
        named = job.eval.sources
        held_out = {name: sources[name] for name in named}
        self._stream = open_stream(job.evaluation, model_path, run_dir, held_out, named)
        training = {} if job.only_evaluates else {name: sources[name] for name in job.data.sources}
        self._overlap = Overlap(training, held_out, job.limits.overlap_rows, whole_rows=job.has_episodes)

    def read(self, start: int, count: int, slice_s: float = math.inf) -> dict[str, Any]:
        """As ``PromptStream.read``, with the number of prompts that are prompts of training, too."""
        if not self._overlap.look(monotonic() + slice_s):
            return {"prompts": [], "exhausted": False}
        return self._stream.read(start, count, slice_s) | {"overlap": self._overlap.equal}
