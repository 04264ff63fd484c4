"""What workers say of the versions that they loaded becomes a part of the step's row."""

from __future__ import annotations

from actors.fleet.workers import Loads
from actors.protocol.workers import WorkerVersion


def news(worker: str, *, pull_s: float, load_s: float, pull_bytes: int = 100, wire_bytes: int = 0) -> WorkerVersion:
    return WorkerVersion(
        job="j", worker=worker, policy_version=1, pull_s=pull_s, load_s=load_s, pull_bytes=pull_bytes,
        wire_bytes=wire_bytes,
    )  # fmt: skip


def test_seconds_are_the_slowest_workers_and_bytes_are_everybodys() -> None:
    loads = Loads()
    loads.note(news("a", pull_s=0.5, load_s=0.01))
    loads.note(news("b", pull_s=0.1, load_s=0.03, wire_bytes=5))
    assert loads.take() == {
        "weights_loaded": 2,
        "pull_seconds_max": 0.5,
        "load_seconds_max": 0.03,
        "pull_bytes": 200,
        "pull_wire_bytes": 5,
    }


def test_what_was_taken_belongs_to_that_step_alone() -> None:
    loads = Loads()
    loads.note(news("a", pull_s=0.5, load_s=0.01))
    loads.take()
    assert set(loads.take().values()) == {0}


def test_a_version_that_a_worker_had_at_its_start_is_no_pull() -> None:
    loads = Loads()
    loads.note(news("a", pull_s=0.0, load_s=0.0, pull_bytes=0))
    assert loads.take()["weights_loaded"] == 0
