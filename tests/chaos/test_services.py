"""Jobs that share a training service, on real processes: its death, the head's, one that waits, what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_job import SMALL_JOB, simulated_job, simulated_rollout

from actors.control.errors import BadConfig, NotNow
from actors.ledger.journal import committed_samples
from actors.train_service.sizes import state_bytes
from benchmarks.jobs._shared_runs import came_to
from configs.limits import DEFAULT_LIMITS
from supervisors.testing.run_under_test import HeadraceCluster, HeadraceJobs
from tests.free_ports import free_ports

SERVICES = {"services": [{"name": "train-0", "backend": "simulated", "memory_bytes": 10**9, "jobs_max": 2}]}
LONG, SHORT = 400, 4


@pytest.fixture
def cluster(headrace_cluster: Callable[..., HeadraceCluster], tmp_path: Path) -> HeadraceCluster:
    file = tmp_path / "services.yaml"
    file.write_text(yaml.safe_dump(SERVICES), encoding="utf-8")
    port = free_ports()
    return headrace_cluster(f"tcp://127.0.0.1:{port}", arguments=["--services", str(file)])


class Jobs:
    """The jobs of this head, by name."""

    def __init__(self, cluster: HeadraceCluster, model: Path) -> None:
        self.cluster, self._model = cluster, model
        self.directories: dict[str, Path] = {}

    def submit(self, name: str, steps: int, **trainer: Any) -> None:
        shared = {"backend": "simulated", "service": "train-0"} | trainer
        job = simulated_job(self._model, name=name, steps=steps, trainer=shared)
        job["rollout"] = job["rollout"] | {"workers": 1}
        answer = self.cluster.wait_until("an answer", lambda: self.cluster.call("submit", {"job": job}))
        self.directories[name] = Path(answer["run_dir"])

    def rows(self, name: str) -> int:
        file = self.directories[name] / "metrics.jsonl"
        return file.read_text("utf-8").count("\n") if file.exists() else 0

    def go_on(self, *names: str) -> None:
        """Wait until each has committed two steps more than now."""
        for name in names:
            self._goes_on(name, self.rows(name))

    def _goes_on(self, name: str, before: int) -> None:
        self.cluster.wait_until(f"progress of {name}", lambda: self.rows(name) > before + 1)

    def state(self, name: str) -> str:
        return next(row["state"] for row in self.cluster.call("jobs") if row["job"] == name)

    def every_sample_once(self, name: str) -> None:
        rows = committed_samples(self.directories[name] / "journal.db")
        names = [(row.step, row.prompt, row.sibling) for row in rows]
        assert names and len(names) == len(set(names))


def pid_of(cluster: HeadraceCluster, name: str) -> int:
    def look() -> int | None:
        return next((r["pid"] for r in cluster.call("tree") if r["name"] == name and r["state"] == "running"), None)

    return cluster.wait_until(f"{name} running", look)


@pytest.mark.timeout(300)
def test_jobs_share_a_service_through_its_death_and_the_heads_and_the_one_that_waits_gets_its_turn(
    cluster: HeadraceCluster, small_model: Path
) -> None:
    jobs = Jobs(cluster, small_model)
    jobs.submit("first", LONG)
    jobs.submit("second", LONG)
    jobs.go_on("first", "second")
    jobs.submit("third", SHORT)

    def waits() -> list[str]:
        return [row["why"] for row in cluster.call("queue") if row["job"] == "third"]

    why = "queued: waits for a place on train-0, which serves 2 jobs of 2"
    assert cluster.wait_until("third queued", waits) == [why]
    assert jobs.state("third") == "queued"
    with pytest.raises(NotNow, match="train-0 is in use by first, second"):
        cluster.call("service_remove", {"service": "train-0"})
    with pytest.raises(BadConfig, match="'train-9' is no service of this head"):
        cluster.call("submit", {"job": simulated_job(small_model, name="x", trainer={"service": "train-9"})})

    os.kill(pid_of(cluster, "train-0"), signal.SIGKILL)
    jobs.go_on("first", "second")
    service = pid_of(cluster, "train-0")
    os.kill(pid_of(cluster, "head"), signal.SIGKILL)
    jobs.go_on("first", "second")
    assert cluster.wait_until("third queued again", waits) == [why]
    assert pid_of(cluster, "train-0") == service, "the next head takes it over"

    (row,) = cluster.call("services")
    assert (row["state"], row["serves"], row["steps"] > 0) == ("ready", "first, second", True)
    assert row["saving"] is not None and row["bubble"] is not None
    cluster.call("cancel", {"job": "first"})
    cluster.wait_until("third done", lambda: jobs.state("third") == "finished")
    cluster.call("cancel", {"job": "second"})
    cluster.wait_until("second over", lambda: jobs.state("second") == "interrupted")
    for name in ("first", "second", "third"):
        jobs.every_sample_once(name)
    cluster.wait_until("nobody there", lambda: cluster.call("services")[0]["serves"] == "")
    assert cluster.call("services")[0]["residency"] == "", "cancelled or finished: the service has dropped its state"
    assert cluster.call("service_remove", {"service": "train-0"})["state"] == "removed"
    assert cluster.call("services") == []


# ------------------------------------------------------------ what jobs that share come to, with a real trainer

STEPS = 14


SEEDS = {"first": 7, "second": 8, "third": 9}
PPO_SEEDS = {"left": 10, "right": 11}


def torch_job(model: Path, name: str, **trainer: Any) -> dict[str, Any]:
    """SMALL_JOB with one worker, and answers that are long enough for the job to be harmed in its middle.

    The third one trains in windows.
    """
    mode, window = ("minibatch", {"window_prompts": 2}) if name == "third" else ("sync", {})
    long_answers = {"workers": 1, "max_tokens": 48, "engine_options": {"tokens_per_step": 1}}
    return SMALL_JOB | {
        "name": name,
        "seed": SEEDS.get(name, 0),
        "steps": STEPS,
        "model": {"source": "hf", "path": str(model)},
        "sync": {"mode": mode},
        "rollout": SMALL_JOB["rollout"] | long_answers,
        "trainer": SMALL_JOB["trainer"] | window | trainer,
        "checkpoint": {"every": 5},
    }


def ppo_job(model: Path, name: str, **trainer: Any) -> dict[str, Any]:
    """As ``torch_job``, with a critic and a reference; the critic learns alone for three steps."""
    rule = {"name": "ppo", "group_size": 1, "prompts_per_step": 24, "kl_coefficient": 0.05}
    rest = {"seed": PPO_SEEDS[name], "algorithm": rule, "critic": {"lr": 1e-3, "warmup_steps": 3}}
    return torch_job(model, name, **trainer) | rest


def torch_jobs(model: Path, names: Iterable[str], *, simulated: bool = False, **trainer: Any) -> list[dict[str, Any]]:
    """``simulated``: engines that say the same whatever the weights."""
    jobs = [(ppo_job if name in PPO_SEEDS else torch_job)(model, name, **trainer) for name in names]
    engines = {"rollout": simulated_rollout(model, step_s=0.02, workers=1, max_tokens=48)} if simulated else {}
    return [job | engines for job in jobs]


def room_for_one(model: Path, *, trained: int = 1, **keys: Any) -> dict[str, Any]:
    """A service, with those ``keys``, that parks the state of one job whenever it is another one's turn.

    ``trained``: models of which a job has state.
    """
    each = trained * state_bytes(model, dtype="float32", replicas=1)
    budget, host = int(1.5 * each), (len(SEEDS) + 2) * each + (1 << 26)
    return {"services": [{"name": "train-0", "threads": 1, "memory_bytes": budget, "host_bytes": host} | keys]}


class Unshared:
    """What each job comes to with a trainer of its own: run when it is asked for first."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._known: dict[str, tuple[Any, ...]] = {}

    def come_to(self, *names: str, simulated: bool = False, **trainer: Any) -> dict[str, tuple[Any, ...]]:
        told = {name: f"{name} {'simulated' * simulated} {trainer or ''}" for name in names}
        if not set(told.values()) <= self._known.keys():
            jobs = torch_jobs(self._model, names, simulated=simulated, **trainer)
            run = HeadraceJobs(self._directory / f"{len(self._known)}", jobs)
            try:
                summaries = run.finish()
            finally:
                run.close()
            self._known |= {told[name]: came_to(job, summaries[name]) for name, job in run.jobs.items()}
        return {name: self._known[told[name]] for name in names}


@pytest.fixture(scope="module")
def unshared(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Unshared:
    return Unshared(small_model, tmp_path_factory.mktemp("unshared"))


def kill_while_it_computes(run: HeadraceJobs, pid: int) -> str:
    """SIGKILL to the service while a call is under way; whose it is. It stands still while that is made sure of."""
    note = run.directory / "services" / "train-0" / "computing"
    until_s = time.monotonic() + DEFAULT_LIMITS.run_patience_s
    while time.monotonic() < until_s:
        if note.read_text("utf-8"):
            os.kill(pid, signal.SIGSTOP)
            if job := note.read_text("utf-8"):
                os.kill(pid, signal.SIGKILL)
                return job
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError(f"the service never computed\n{run.last_words()}")


def lives(run: HeadraceJobs, job: str, child: str) -> int:
    return sum(event["child"] == child for event in run.jobs[job].events("child_started"))


def go_on(run: HeadraceJobs, steps: int) -> None:
    """Wait until each job has committed so many steps."""
    jobs = run.jobs.values()
    run.wait_until(f"{steps} steps of each", lambda: min(len(job.rows()) for job in jobs) >= steps)


def finish_as_unshared(
    run: HeadraceJobs, unshared: Unshared, *more_files: str, simulated: bool = False, **trainer: Any
) -> None:
    """Samples with their rewards, losses, and the hash of each file of the last checkpoint."""
    summaries, alone = run.finish(), unshared.come_to(*run.jobs, simulated=simulated, **trainer)
    state = "shard-" if "ranks" in trainer else "weights.safetensors"
    for name, job in run.jobs.items():
        samples, losses, files = came_to(job, summaries[name])
        assert samples == alone[name][0]
        assert losses == alone[name][1]
        assert {"model.safetensors", *more_files} <= set(files)
        assert [name for name in files if name.startswith(f"trainer/{state}")]
        assert files == alone[name][2]
        assert (summaries[name]["prompts_lost"], summaries[name]["samples_trained_twice"]) == (0, 0)
    moved = [row for job in run.jobs.values() for row in job.rows() if row["switch_s"] > 0]
    assert moved, "nobody's state was ever moved"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "harm",
    ["service", "nobody", "twice", "head", "trainer"],
)
def test_jobs_that_share_a_service_come_to_what_they_do_without_whoever_is_killed(
    headrace_jobs: Callable[..., HeadraceJobs], small_model: Path, unshared: Unshared, harm: str
) -> None:
    """On torch, with room for one; engines are simulated where it is the service alone that is killed."""
    simulated = harm == "service"
    jobs = torch_jobs(small_model, ("first", "second"), simulated=simulated, service="train-0")
    run = headrace_jobs(jobs, services=room_for_one(small_model))
    first = run.jobs["first"]

    def pid(name: str, job: str | None = None) -> int:
        return run.wait_until(f"{name} running", lambda: run.pid_of(name, job))

    go_on(run, 2)
    service, steps = pid("train-0"), len(first.rows())
    if harm == "trainer":
        os.kill(pid("trainer", "first"), signal.SIGKILL)
    elif harm == "head":
        os.kill(pid("head"), signal.SIGKILL)
        run.wait_until("the next head", lambda: first.events("head_restarted"))
        assert pid("train-0") == service, "the next head takes the service over"
    elif harm != "nobody":
        kill_while_it_computes(run, service)
    if harm == "twice":
        run.wait_until("progress", lambda: len(first.rows()) > steps)
        kill_while_it_computes(run, pid("train-0"))
    finish_as_unshared(run, unshared, simulated=simulated)

    lived = (lives(run, "first", "trainer"), lives(run, "second", "trainer"))
    if harm == "twice":  # it can die again before both are served by its next life
        assert 4 < sum(lived) <= 6
    else:
        assert lived == {"service": (2, 2), "trainer": (2, 1)}.get(harm, (1, 1))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", ["nobody", "service", "rank", "head"])
def test_jobs_that_share_the_ranks_of_a_service_come_to_what_each_does_on_as_many_of_its_own(
    headrace_jobs: Callable[..., HeadraceJobs], small_model: Path, unshared: Unshared, harm: str
) -> None:
    ranks = {"backend": "fsdp", "ranks": 2}
    jobs = torch_jobs(small_model, ("first", "second"), simulated=True, service="train-0", **ranks)
    run = headrace_jobs(jobs, services=room_for_one(small_model, **ranks))
    go_on(run, 2)
    pids = [run.wait_until(name, lambda name=name: run.pid_of(name)) for name in ("train-0", "train-0.rank1")]
    if harm == "service":
        kill_while_it_computes(run, pids[0])
    elif harm == "rank":
        os.kill(pids[1], signal.SIGKILL)
    elif harm == "head":
        os.kill(run.wait_until("head", lambda: run.pid_of("head")), signal.SIGKILL)
        run.wait_until("the next head", lambda: run.jobs["first"].events("head_restarted"))
        assert [run.pid_of(name) for name in ("train-0", "train-0.rank1")] == pids, "both are adopted"
    finish_as_unshared(run, unshared, simulated=True, **ranks)
    lived = [lives(run, name, "trainer") for name in ("first", "second")]
    assert lived == ([2, 2] if harm in ("service", "rank") else [1, 1])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("harm", ["nobody", "service"])
def test_three_jobs_that_share_a_service_come_to_what_they_do_alone(
    headrace_jobs: Callable[..., HeadraceJobs], small_model: Path, unshared: Unshared, harm: str
) -> None:
    """On torch, with room for one, two modes; the service is killed in mid-burst."""
    jobs = torch_jobs(small_model, SEEDS, service="train-0")
    run = headrace_jobs(jobs, services=room_for_one(small_model))
    go_on(run, 2)
    if harm == "service":
        kill_while_it_computes(run, run.wait_until("the service", lambda: run.pid_of("train-0")))
    finish_as_unshared(run, unshared)
    assert [lives(run, name, "trainer") for name in SEEDS] == [1 if harm == "nobody" else 2] * len(SEEDS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ppo_jobs_that_share_a_service_come_to_what_they_do_alone_if_it_is_killed_as_it_computes(
    headrace_jobs: Callable[..., HeadraceJobs], small_model: Path, unshared: Unshared
) -> None:
    """Policy, critic and reference of each are one bundle; killed in the critic's warm-up and after it."""
    jobs = torch_jobs(small_model, PPO_SEEDS, service="train-0")
    run = headrace_jobs(jobs, services=room_for_one(small_model, trained=2))
    for steps in (2, 6):
        go_on(run, steps)
        kill_while_it_computes(run, run.wait_until("the service", lambda: run.pid_of("train-0")))
    finish_as_unshared(run, unshared, "trainer/critic.safetensors")
    assert 2 * len(PPO_SEEDS) < sum(lives(run, name, "trainer") for name in PPO_SEEDS) <= 3 * len(PPO_SEEDS)
