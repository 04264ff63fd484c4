"""The worker's bars in the trace: one activity at a time, cut where the version of the weights changes."""

from __future__ import annotations

from actors.protocol.metrics import TraceSpan
from actors.rollout.generation import ActivityLog


def test_a_bar_carries_the_version_with_which_it_was_generated() -> None:
    now_s = 0.0
    log = ActivityLog(clock=lambda: now_s)
    log.begin("generate")
    now_s = 1.0
    log.serve(7)
    now_s = 3.0
    log.add("pull", 0.5)
    log.serve(8)
    now_s = 4.0
    assert log.take() == [
        TraceSpan(name="generate", start_s=0.0, end_s=1.0),
        TraceSpan(name="pull", start_s=2.5, end_s=3.0, args={"version": 7}),
        TraceSpan(name="generate", start_s=1.0, end_s=3.0, args={"version": 7}),
        TraceSpan(name="generate", start_s=3.0, end_s=4.0, args={"version": 8}),
    ]
