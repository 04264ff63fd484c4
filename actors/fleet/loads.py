"""What it cost the workers to get a new version: the part of a step's metrics that speaks of weights."""

from __future__ import annotations

from actors.protocol.workers import WorkerVersion


class Loads:
    """It adds up the versions that workers have loaded since the sums were last taken."""

    def __init__(self) -> None:
        self._news: list[WorkerVersion] = []

    def note(self, news: WorkerVersion) -> None:
        """A worker serves a version. What it had at its start it has not pulled, and that is not counted."""
        if news.pull_bytes > 0:
            self._news.append(news)

    def take(self) -> dict[str, float]:
        """The columns of metrics.jsonl for a step; the next one begins. Seconds are those of the slowest worker."""
        news, self._news = self._news, []
        return {
            "weights_loaded": len(news),
            "pull_seconds_max": max((one.pull_s for one in news), default=0.0),
            "load_seconds_max": max((one.load_s for one in news), default=0.0),
            "pull_bytes": sum(one.pull_bytes for one in news),
            "pull_wire_bytes": sum(one.wire_bytes for one in news),
        }
