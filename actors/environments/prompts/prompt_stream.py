"""The prompt stream: ordinal → prompt, a function of the job file alone.

Rows whose prompt is longer than ``data.max_prompt_tokens``, or than what ``rollout.max_tokens`` leaves of the model's
positions, are passed over; ordinals count the rows that are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from actors.environments.errors import PromptRefused, SourceUnreadable
from actors.environments.prompts.sources import Row, Source, open_source, stream_index
from actors.environments.prompts.tokenizer import TextCodec
from configs.model_files import positions, prompt_tokens_max
from configs.schema import JobConfig


class PromptStream:
    """Is the stream itself: no actor and no loop, but blocking calls."""

    def __init__(self, job: JobConfig, model_path: Path) -> None:
        self._data, self._seed = job.data, job.seed
        self._source: Source = open_source(job.data, job.seed)
        self._codec = TextCodec(model_path, job.data)
        self._codec.check_vocabulary()
        self._longest = prompt_tokens_max(job, model_path)
        self._model_limit = positions(model_path) if self._longest < job.data.max_prompt_tokens else None
        self._rows: list[int] = []
        """Stream position of every kept ordinal found so far."""
        self._position = 0

    def read(self, start: int, count: int) -> dict[str, Any]:
        """Prompts ``start`` to ``start + count`` as plain values; fewer, and ``exhausted``, where the last epoch ends.

        Raises:
            SourceUnreadable: names the row and the field that cannot be used.
        """
        while len(self._rows) < start + count:
            if not self._advance():
                break
        positions = self._rows[start : start + count]
        prompts = [self._prompt(start + i, position) for i, position in enumerate(positions)]
        return {"prompts": prompts, "exhausted": len(prompts) < count}

    def _advance(self) -> bool:
        """Find the next row that fits; False at the end of the stream, SourceUnreadable if none of an epoch fits."""
        for _ in range(len(self._source)):
            row = self._row(self._position)
            if row is None:
                return False
            self._position += 1
            _, ids = self._encode(row)
            if 0 < len(ids) <= self._longest:
                self._rows.append(self._position - 1)
                return True
        if self._model_limit is not None:
            raise SourceUnreadable(
                f"every prompt of the data set is longer than {self._longest} tokens, which is what rollout.max_tokens "
                f"leaves of the model's {self._model_limit.count} positions ({self._model_limit.key}); lower it"
            )
        raise SourceUnreadable(
            f"data.max_prompt_tokens {self._data.max_prompt_tokens}: every prompt of the data set is longer; raise it"
        )

    def _encode(self, row: Row) -> tuple[str, np.ndarray]:
        try:
            return self._codec.encode(row.prompt)
        except PromptRefused as error:
            where = f"data.path {self._data.path}" if self._data.path else f"data.task {self._data.task}"
            raise PromptRefused(f"{where}, row {row.index}: column {self._data.prompt_key!r}: {error}") from error

    def _row(self, position: int) -> Row | None:
        index = stream_index(self._data, self._seed, len(self._source), position)
        return None if index is None else self._source.row(index)

    def _prompt(self, ordinal: int, position: int) -> list[Any]:
        row = self._row(position)
        assert row is not None
        text, ids = self._encode(row)
        context = msgpack.packb([row.prompt, row.answer, row.index, row.extra], default=str)
        return [ordinal, ids.tobytes(), text, context]
