"""The row of a step: what sharing a training service adds to it."""

from __future__ import annotations

import numpy as np
import pytest

from actors.fleet.workers import WorkerTable
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.protocol.work import SamplingParams
from actors.scheduler.meter import StepMeter


def row_of(from_trainer: dict[str, float], seconds: float = 10.0) -> dict[str, float]:
    ledger = Ledger()
    one = np.ones(1, np.int32)
    ledger.apply(ev.BatchIssued(0, 1, SamplingParams(max_tokens=4), np.zeros(1, np.int64), one, one, [b""]))
    return StepMeter(ledger, WorkerTable(), 0.0).take(ledger.batches[0], 1, from_trainer, seconds)


@pytest.mark.parametrize(
    ("waited_s", "switch_s", "compute_s", "slowdown"),
    [(0.0, 0.0, 3.0, 1.0), (1.5, 0.5, 3.0, 1.25), (9.0, 1.0, 4.0, 2.5), (11.0, 0.0, 0.0, 1.0)],
)
def test_a_step_on_a_service_says_how_many_times_as_long_it_took_as_alone(
    waited_s: float, switch_s: float, compute_s: float, slowdown: float
) -> None:
    shared = {"service_wait_s": waited_s, "switch_s": switch_s, "compute_s": compute_s}
    assert row_of(shared)["slowdown"] == slowdown


def test_a_step_of_a_job_that_shares_nothing_says_nothing_of_it() -> None:
    assert "slowdown" not in row_of({})
