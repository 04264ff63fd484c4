"""Servers that a user started by hand are killed in the middle of a run, and come back with the first weights.

Every token's version is true if the trainer, under the weights of that version, finds the log-probabilities that came
with the tokens: ``engine_mismatch`` of each step is rounding. A token of the old weights would show there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_job import SMALL_JOB

from configs.schema import JobConfig
from supervisors.preparation.tiny_model import make_tiny_model
from supervisors.testing.run_under_test import HeadraceRun
from tests.free_ports import free_ports
from tests.vllm_server import SmallServer, VllmServe

pytestmark = pytest.mark.timeout(400)

MODEL: dict[str, Any] = {"source": "tiny", "layers": 2, "warm_start_steps": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "small"
    make_tiny_model(JobConfig.model_validate(SMALL_JOB | {"model": MODEL}), directory)
    return directory


def job_on(model: Path, *servers: str, workers: int, **sections: Any) -> dict[str, Any]:
    rollout = SMALL_JOB["rollout"] | {"workers": workers, "servers": list(servers)}
    return SMALL_JOB | {"model": {"source": "hf", "path": str(model)}, "rollout": rollout} | sections


def assert_true_and_whole(run: HeadraceRun) -> None:
    last = run.rows()[-1]
    assert (last["prompts_lost"], last["samples_trained_twice"]) == (0, 0)
    assert not run.events("samples_dropped")
    apart = [row["engine_mismatch"] for row in run.rows() if row["engine_mismatch"] is not None]
    assert len(apart) > len(run.rows()) / 2, "of a step that teaches nothing it is not known"
    assert max(apart) < 1e-4


def makers(run: HeadraceRun, since: int = 0) -> set[str]:
    """Workers that have loaded a version of step ``since`` or later."""
    return {row["worker"] for row in run.events("worker_version") if row["version"] >= since}


class InAThread:
    """Runs a SmallServer on a loop of its own, as another process would."""

    def __init__(self, server: SmallServer) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.do(server.start)

    def do(self, act: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(act(), self._loop).result(60)

    def close(self) -> None:
        self.do(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def small_server(model: Path) -> Iterator[InAThread]:
    server = InAThread(SmallServer(model))
    yield server
    server.close()


def test_a_server_that_is_started_again_with_the_first_weights_costs_no_sample_and_none_of_its_old_tokens_is_trained(
    headrace_run: Callable[..., HeadraceRun], model: Path, small_server: InAThread
) -> None:
    server = small_server.server
    run = headrace_run(job_on(model, server.url, workers=2, steps=1000))
    run.wait_for_step(1)
    small_server.do(server.restart)
    run.wait_until("weights for the server again", lambda: server.label.startswith("headrace-"))
    run.wait_for_step(len(run.rows()) + 2)
    run.interrupt()
    run.finish(state="interrupted")
    assert_true_and_whole(run)
    causes = {row["cause"] for row in run.events("child_restarting")}
    assert causes <= {"preempted"}, "none at all if it came between two versions, and was given the next one"


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make vllm` adds it")
def test_two_vllm_servers_are_killed_and_started_again_beside_a_worker_and_every_sample_is_trained_once(
    headrace_run: Callable[..., HeadraceRun], model: Path, tmp_path: Path
) -> None:
    first = free_ports(2)
    servers = [VllmServe(tmp_path, model, first + number) for number in range(2)]
    for server in servers:
        server.start()
    try:
        for server in servers:
            asyncio.run(server.ready())
        job = job_on(model, *(server.url for server in servers), workers=3, steps=100_000)
        run = headrace_run(job)  # one worker goes on while the servers load their model again
        for server in servers:
            run.wait_for_step(len(run.rows()) + 2)
            run.wait_until("tokens of all", lambda: len(makers(run, len(run.rows()) - 3)) == 3)
            server.kill()
            server.start()
        for server in servers:
            asyncio.run(server.ready())
        back = len(run.rows())
        run.wait_until("all of them at work again", lambda: len(makers(run, back)) == 3, timeout_s=120)
        run.wait_for_step(len(run.rows()) + 3)
        run.interrupt()
        run.finish(state="interrupted")
        assert_true_and_whole(run)
    finally:
        for server in servers:
            server.kill()
