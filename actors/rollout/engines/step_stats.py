"""The account of an engine whose process does nothing between two steps: busy in a step, idle from one to the next."""

from __future__ import annotations

from actors.protocol.work import EngineStats


class StepStats:
    """Counts steps, each from ``began_s`` to ``ended_s``. ``kv_used_fraction``: as ``EngineStats`` has it."""

    def __init__(self) -> None:
        self.now = EngineStats()
        """Account up to the last step."""
        self.last_end_s: float | None = None
        """End of the last step, or the engine's start; None: neither has been."""

    def count(
        self,
        began_s: float,
        ended_s: float,
        *,
        running: int,
        queued: int,
        kv_used_fraction: float,
        tokens: int,
        prefilled_tokens: int,
        prefix_hit_tokens: int = 0,
        preemptions: int = 0,
    ) -> None:
        """Add a step that has made ``tokens`` tokens and prefilled others, or found them in a cache.

        ``preemptions``: sequences that were set aside in it.
        """
        before, idle_from_s = self.now, began_s if self.last_end_s is None else self.last_end_s
        self.now = EngineStats(
            running=running,
            queued=queued,
            kv_used_fraction=kv_used_fraction,
            step_s=ended_s - began_s,
            busy_s_total=before.busy_s_total + ended_s - began_s,
            idle_s_total=before.idle_s_total + max(0.0, began_s - idle_from_s),
            tokens_total=before.tokens_total + tokens,
            prefilled_tokens_total=before.prefilled_tokens_total + prefilled_tokens,
            prefix_hit_tokens_total=before.prefix_hit_tokens_total + prefix_hit_tokens,
            preemptions_total=before.preemptions_total + preemptions,
        )
        self.last_end_s = ended_s
