"""The lane of a service: what it did when, as the trace gets it."""

from __future__ import annotations

from typing import Any, cast

from actors.protocol.work_track import WorkTrack


def _track(now: list[float]) -> WorkTrack:
    nobody = cast("Any", None)
    return WorkTrack("demo", "rewards", "score", lambda: nobody, clock=lambda: now[0])


def test_work_that_overlaps_is_one_bar_and_the_rest_is_idle() -> None:
    now = [0.0]
    track = _track(now)
    first, second = track.work(), track.work()
    now[0] = 1.0
    with first:
        now[0] = 2.0
        with second:
            now[0] = 3.0
        now[0] = 4.0
    now[0] = 6.0
    bars = [(span.name, span.start_s, span.end_s, span.args) for span in track.take()]
    assert bars == [("idle", 0.0, 1.0, {}), ("score", 1.0, 4.0, {"running": 2}), ("idle", 4.0, 6.0, {})]
    assert track.take() == []


def test_work_that_goes_on_is_told_of_before_it_ends() -> None:
    """Or a reward model that hangs would look as if nobody had asked it."""
    now = [0.0]
    track = _track(now)
    with track.work():
        now[0] = 1.0
        assert [span.name for span in track.take()] == ["score"]
        now[0] = 2.0
        assert [(span.name, span.start_s) for span in track.take()] == [("score", 1.0)]
