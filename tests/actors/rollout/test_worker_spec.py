"""What an engine is told, from the job file."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rollout import worker_spec
from actors.rollout.worker_spec import engine_spec
from configs.schema import JobConfig
from tests.smallest_job import smallest_job


def job(mode: str, **rollout: int) -> JobConfig:
    return smallest_job(sync={"mode": mode, "max_staleness": 1}, rollout=rollout)


@pytest.mark.parametrize(
    ("mode", "workers", "threads"), [("sync", 2, 4), ("sync", 16, 1), ("async", 1, 4), ("async", 2, 2), ("async", 8, 1)]
)
def test_workers_share_the_cores_and_in_async_mode_leave_half_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, mode: str, workers: int, threads: int
) -> None:
    monkeypatch.setattr(worker_spec, "_cores", lambda: 8)
    assert engine_spec(job(mode, workers=workers), "m").threads == threads


def test_ranks_of_a_worker_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_spec, "_cores", lambda: 8)
    spec = engine_spec(job("sync", workers=2, tensor_parallel=2), "m")
    assert (spec.threads, spec.tensor_parallel) == (2, 2)


def test_threads_that_the_job_names_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_spec, "_cores", lambda: 8)
    assert engine_spec(job("async", workers=2, threads=3), "m").threads == 3


def test_a_context_is_no_longer_than_the_model(tmp_path: Path) -> None:
    """512 prompt tokens by default and 100 of response, where the model has 300 positions."""
    assert engine_spec(job("sync", max_tokens=100), str(tmp_path)).max_context_tokens == 612
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 300}')
    assert engine_spec(job("sync", max_tokens=100), str(tmp_path)).max_context_tokens == 300
