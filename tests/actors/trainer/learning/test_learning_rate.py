"""The learning rate by step, against the formulas of transformers, and over a resume."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from actors.roles import RoleArgs
from actors.trainer.backend import BackendSpec
from actors.trainer.learning.learning_rate import learning_rate
from actors.trainer.setup import backend_spec
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId

PEAK, TOTAL = 3e-4, 40
THEIRS = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}


def rates(schedule: str, warmup: int, total: int = TOTAL) -> list[float]:
    return [
        learning_rate(step, peak=PEAK, schedule=schedule, warmup_steps=warmup, total_steps=total)  # type: ignore[arg-type]
        for step in range(total)
    ]


@pytest.mark.parametrize(("schedule", "warmup"), [*itertools.product(THEIRS, (0, 1, 7))])
def test_the_decay_is_that_of_transformers_and_the_rise_is_theirs_one_step_earlier(schedule: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = THEIRS[schedule](optimizer, warmup, TOTAL).lr_lambdas[0]
    expected = [PEAK * theirs(step + 1 if step < warmup else step) for step in range(TOTAL)]
    assert rates(schedule, warmup) == pytest.approx(expected, rel=1e-12)


def test_no_step_is_taken_with_a_rate_of_zero_and_a_constant_one_stays() -> None:
    assert all(rate > 0 for schedule in THEIRS for rate in rates(schedule, 5))
    assert rates("constant", 4) == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, *[PEAK] * 37])
    assert rates("linear", 0, total=1) == [PEAK]
    beyond = learning_rate(99, peak=PEAK, schedule="linear", warmup_steps=0, total_steps=TOTAL)
    assert beyond == rates("linear", 0)[-1]


def test_the_schedule_of_a_job_reaches_its_backend(tmp_path: Path) -> None:
    trainer = {"lr": PEAK, "lr_schedule": "cosine", "warmup_steps": 3, "backend": "simulated", "threads": 1}
    job = smallest_job(steps=TOTAL, trainer=trainer)
    nobody = ActorAddress("nobody", PeerId("nowhere", 1))
    args = RoleArgs(
        role="trainer", name="trainer", node="head", job=job.model_dump_json(), model_path=str(tmp_path),
        run_dir=str(tmp_path), scheduler=nobody, metrics=nobody,
    )  # fmt: skip
    spec = backend_spec(args, job)
    assert [spec.learning_rate_of(step) for step in range(TOTAL)] == rates("cosine", 3)


def test_with_more_steps_a_run_goes_on_along_the_longer_schedule() -> None:
    spec = BackendSpec(model_path=Path(), learning_rate=PEAK, lr_schedule="linear", total_steps=TOTAL)
    longer = BackendSpec(model_path=Path(), learning_rate=PEAK, lr_schedule="linear", total_steps=2 * TOTAL)
    assert longer.learning_rate_of(TOTAL) == pytest.approx(PEAK / 2)
    assert spec.learning_rate_of(TOTAL - 1) == pytest.approx(PEAK / TOTAL)
