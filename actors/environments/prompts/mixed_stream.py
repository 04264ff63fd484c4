"""One stream of several sources: each has a stream of its own, and the weights say which gives the next prompt.

    ordinal ─▶ Mix: which source, and how many of its prompts come before ─▶ that source's stream ─▶ prompt

Invariants
- Ordinal → prompt is a function of the job file and the data, as with one source: no cursor is kept.
- All rows of all sources are checked before the first is used.
- The stream ends before the first prompt that would come from a source whose epochs are over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from actors.environments.prompts.prompt_stream import PromptStream, checked_codec
from actors.environments.prompts.rows import Source
from configs.data_mix import Mix
from configs.schema import JobConfig
from configs.task_schema import DataConfig


class Stream(Protocol):
    """Gives prompts by their ordinals, of one source or of several."""

    def read(self, start: int, count: int, slice_s: float = math.inf) -> dict[str, Any]:
        """As ``PromptStream.read``."""
        ...


def open_stream(
    job: JobConfig,
    model_path: Path,
    run_dir: Path | None,
    sources: Mapping[str, Source],
    named: Mapping[str, DataConfig] | None = None,
) -> Stream:
    """The stream of ``job``, whose ``sources`` are open. ``named``: those to read, if not ``job.data.sources``."""
    codec = checked_codec(model_path, job.data)
    streams = {
        name: PromptStream(
            job.model_copy(update={"data": data}),
            model_path,
            run_dir,
            source=sources[name],
            name=name,
            codec=codec.for_data(data),
        )
        for name, data in (named or job.data.sources).items()
    }
    if not job.data.mix:
        return next(iter(streams.values()))
    return MixedStream(streams, Mix.of(job.data, job.seed), job.limits.message_max_bytes // 4)


class MixedStream:
    """Asks the stream of each source for its part. ``bytes_max``: most bytes of the prompts in one answer."""

    def __init__(self, streams: Mapping[str, PromptStream], mix: Mix, bytes_max: int) -> None:
        self._streams, self._mix, self._bytes_max = dict(streams), mix, bytes_max

    def read(self, start: int, count: int, slice_s: float = math.inf) -> dict[str, Any]:
        """As ``PromptStream.read``; each source that is asked advances by one row at least."""
        until_s, streams = monotonic() + slice_s, list(self._streams.values())
        if not all(stream.check_rows(until_s) for stream in streams):
            return {"prompts": [], "exhausted": False} | self._report()
        order = [self._mix.source_of(ordinal) for ordinal in range(start, start + count)]
        wanted, firsts = Counter(order), self._mix.before(start)
        read = {
            source: streams[source].read(firsts[source], number, max(0.0, until_s - monotonic()))
            for source, number in wanted.items()
        }
        prompts, exhausted = self._in_order(start, order, read)
        return {"prompts": prompts, "exhausted": exhausted} | self._report()

    def _in_order(self, start: int, order: list[int], read: dict[int, dict[str, Any]]) -> tuple[list[list[Any]], bool]:
        """The prompts in the order of the stream, up to the first missing one, and whether that will never come."""
        rest = {source: iter(found["prompts"]) for source, found in read.items()}
        prompts: list[list[Any]] = []
        size_bytes = 0
        for ordinal, source in enumerate(order, start):
            prompt = next(rest[source], None)
            if prompt is None:
                return prompts, bool(read[source]["exhausted"])
            if size_bytes >= self._bytes_max:
                break
            prompts.append([ordinal, *prompt[1:]])
            size_bytes += len(prompt[1]) + len(prompt[2])
        return prompts, False

    def _report(self) -> dict[str, Any]:
        """The reports of all sources, added up."""
        told = {name: stream.report() for name, stream in self._streams.items()}
        passed, first = Counter[str](), dict[str, str]()
        for name, report in told.items():
            passed.update(report["passed"])
            first = {reason: f"{name}, {row}" for reason, row in report["first"].items()} | first
        added = {key: sum(report[key] for report in told.values()) for key in ("rows", "checked", "seen")}
        replaced = any(report["replaced"] for report in told.values())
        return added | {"passed": dict(passed), "first": first, "replaced": replaced}
