"""A real run whose machines are jobs of a real Slurm: taken away, given back, and none left when it is over."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_job import simulated_job, simulated_rollout

from configs.limits import Limits
from supervisors.providers.keeper import Keeper
from supervisors.providers.slurm import SlurmProvider
from supervisors.providers.slurm_script import MachineJob
from supervisors.testing.run_under_test import HeadraceRun, RunRecord
from supervisors.tree.errors import ProviderError
from tests.free_ports import free_ports
from tests.slurm_cluster import GRACE_S, SlurmCluster, slurm_cluster
from tests.smallest_job import smallest_job
from transport.zmq.security import generate_keys, write_keys

StartRun = Callable[..., HeadraceRun]
MakeJob = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "slurm", 4) as cluster:
        yield cluster


@pytest.fixture
def job(small_model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The preset with simulated engines, ``nodes`` machines and what ``slurm`` says; its keys lie in the directory."""
    write_keys(generate_keys(), tmp_path / "keys")
    preset = yaml.safe_load((ROOT / "configs" / "slurm.yaml").read_text())

    def made(*, nodes: int, steps: int = 100_000, notice_s: float = GRACE_S - 2.0, **slurm: Any) -> dict[str, Any]:
        return preset | simulated_job(
            small_model,
            steps=steps,
            rollout=simulated_rollout(small_model, workers=1),
            cluster=preset["cluster"] | {"listen": f"tcp://0.0.0.0:{free_ports()}"},
            provider=preset["provider"] | {"nodes_max": nodes, "notice_s": notice_s, "slurm": slurm},
            limits={
                "cluster_look_s": 0.5,
                "machine_retry_s": 1.0,
                "hand_over_s": 0.5,
                "machine_join_s": 20.0,
                "slurm_claim_s": 3.0,
            },
        )

    return made


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def running(slurm: SlurmCluster) -> set[str]:
    return {name for name, state in slurm.jobs().items() if state == "RUNNING" and name.startswith("small-")}


def working(run: HeadraceRun) -> set[str]:
    """Machines of the cluster with a worker."""
    return {node for node in run.workers().values() if node.startswith("small-")}


@pytest.mark.timeout(400)
def test_machines_are_preempted_lost_and_unheard_of_and_nothing_is_lost_or_trained_twice_or_left(
    headrace_run: StartRun, job: MakeJob, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """It grows to four nodes. Two are preempted with a notice and come back, one goes down, the controller is killed
    and comes back, at last the run itself is killed. Its next life ends the jobs that were left, and finishes the run.
    """
    keys = ["--keys", str(tmp_path / "keys")]
    run = headrace_run(job(nodes=4, partition="spot"), arguments=keys)
    run.wait_until("four machines", lambda: len(working(run)) == 4)
    first = working(run)

    slurm.occupy("others", 2)
    run.wait_until("preemption", lambda: slurm.jobs().get("others") == "RUNNING")
    gone = first - running(slurm)
    assert len(gone) == 2
    told_s, left_s = (
        {row["node"]: row["time_s"] for row in run.events(f"node_{what}")} for what in ("draining", "left")
    )
    assert all(left_s[node] - told_s[node] < GRACE_S for node in gone), "they have left in good order, and in time"
    slurm.until("two that wait, and the head's claim", lambda: list(slurm.jobs().values()).count("PENDING") == 3)
    run.wait_until("its reason", lambda: "waits: " in run.last_words())
    slurm.command("scancel", "--name", "others")
    run.wait_until("four again", lambda: len(working(run)) == 4)
    assert not working(run) & gone, "a name is used once"

    lost = min(working(run))
    slurm.take_down(slurm.node_of(lost))
    run.wait_until("its replacement", lambda: lost not in slurm.jobs() and len(working(run) - {lost}) == 4)

    before = running(slurm)
    slurm.kill_controller()
    run.wait_for_step(len(run.rows()) + 10)
    slurm.start_controller()
    run.wait_for_step(len(run.rows()) + 10)
    assert working(run) == before == running(slurm), "nobody was started or ended meanwhile"

    run.kill()
    assert running(slurm) == before, "they outlive it for a while"
    begun = slurm.all_jobs().keys()
    run.resume(settings=[f"steps={len(run.rows()) + 15}"], arguments=keys)
    run.wait_until("others", lambda: len(slurm.all_jobs().keys() - begun) == 4)
    assert not running(slurm) & before
    summary = run.finish()
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert slurm.jobs() == {}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("slurm_section", "says"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope"),
        ({"partition": "closed", "account": "mine"}, "Invalid account or account/partition combination specified"),
        ({"partition": "brief", "time_limit": "10:00"}, "Requested time limit is invalid"),
    ],
)
def test_what_the_cluster_would_refuse_ends_the_run_before_it_begins_in_the_clusters_own_words(
    job: MakeJob, slurm: SlurmCluster, tmp_path: Path, slurm_section: dict[str, Any], says: str
) -> None:
    """Nothing is left but the run directory, from which the run can be resumed once that is mended."""
    file, run_dir = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(job(nodes=2, **slurm_section)))
    done = headrace("run", str(file), "--dir", str(run_dir), "--keys", str(tmp_path / "keys"))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
    assert len(lines) == 1
    assert says in lines[0]
    assert "provider.slurm" in lines[0]
    assert slurm.jobs() == {}
    assert not (run_dir / "metrics.jsonl").exists()


@pytest.mark.timeout(100)
def test_a_machine_whose_environment_hangs_is_ended_with_what_it_has_said_last(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Its job runs, and has no step that could be signalled."""
    limits = Limits(stop_timeout_s=2.0, cluster_look_s=0.4, machine_join_s=1.0, machine_retry_s=60.0)
    environment = "echo 'pulling image' >&2\nsleep 600"
    job = smallest_job(provider={"slurm": {"partition": "spot", "environment": environment}})
    told, numbers = list[str](), itertools.count(1)

    async def main() -> None:
        provider = SlurmProvider(MachineJob(job, "tcp://head:1", "headrace-hangs", tmp_path, None, 5.0, "life"), limits)
        await provider.open()
        keeper = Keeper(
            provider, lambda: f"hangs-{next(numbers)}", "spot", target=1, window_s=2.0, limits=limits, tell=told.append
        )
        keeper.begin()
        async with asyncio.timeout(30):
            while not any("failed" in said for said in told):
                await asyncio.sleep(0.05)
        assert set(slurm.jobs()) == {"headrace-hangs"}, "the head's claim"
        await keeper.close()
        assert not slurm.jobs()

    asyncio.run(main())
    assert told[-1].startswith("hangs-1 failed (it has run for 1 s and not joined the head; the job ")
    assert f"its log {tmp_path}/hangs-1.log ends: pulling image" in told[-1]
    assert "the next one is tried in" in told[-1]


@pytest.mark.timeout(100)
def test_of_two_heads_of_one_run_that_start_at_the_same_time_one_is_refused_and_the_other_keeps_its_machine(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """They run on two hosts and do not see each other's locks; both begin before either has a job."""
    limits = Limits(stop_timeout_s=2.0, cluster_look_s=0.4, slurm_claim_s=1.5)
    job = smallest_job(provider={"slurm": {"partition": "spot", "environment": "sleep 600"}})

    def head(life: str) -> SlurmProvider:
        return SlurmProvider(MachineJob(job, "tcp://head:1", "headrace-two", tmp_path, None, 5.0, life), limits)

    async def main() -> None:
        heads = [head("aaaa"), head("bbbb")]
        ended = await asyncio.gather(*(one.open() for one in heads), return_exceptions=True)
        (owner,) = [one for one, error in zip(heads, ended, strict=True) if error is None]
        (refusal,) = [str(error) for error in ended if error is not None]
        assert refusal.startswith("another head owns the machines of this run: the head on ")
        ran = asyncio.Event()
        owner.on_runs = lambda node: ran.set()
        owner.start("two-1", "spot")
        await asyncio.wait_for(ran.wait(), 30)
        with pytest.raises(ProviderError, match="and is alive"):
            await head("cccc").open()
        assert set(slurm.jobs()) == {"headrace-two", "two-1"}
        await owner.close()
        assert not slurm.jobs()

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_machine_whose_time_is_nearly_over_leaves_in_good_order_and_another_job_takes_its_place(
    headrace_run: StartRun, job: MakeJob, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm tells a job with a limit of a minute within that minute; the next one is asked for without a pause."""
    run = headrace_run(job(nodes=1, partition="brief", time_limit="1"), arguments=["--keys", str(tmp_path / "keys")])
    run.wait_until("a machine", lambda: "small-1" in working(run))
    run.wait_until("the next one", lambda: "small-2" in working(run), timeout_s=150)
    assert slurm.all_jobs()["small-1"] == "COMPLETED"
    said = run.directory.with_name("run.err").read_text()
    assert "small-1: the job" in said
    assert "has left before its time limit of 00:01:00" in said
    run.interrupt()
    summary = run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert slurm.jobs() == {}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_functions_are_jobs_of_the_cluster_that_sleep_and_are_given_back(
    headrace_run: StartRun, job: MakeJob, slurm: SlurmCluster, small_model: Path, tmp_path: Path
) -> None:
    """All workers are functions, two at most; one of their jobs is ended. At the end nothing is left."""
    functions = job(nodes=1, steps=30, partition="spot") | {
        "rollout": simulated_rollout(small_model, workers=0, length_ranking="history"),
        "scheduling": {"policy": "planned", "workers_max": 2},
        "sync": {"mode": "sync"},
    }
    functions["provider"] = {"kind": "functions", "machines": "slurm", "slurm": {"partition": "spot"}}
    run = headrace_run(functions, arguments=["--keys", str(tmp_path / "keys")])
    run.wait_until("two functions", lambda: {row["node"] for row in run.events("function_ready")} >= {"f0", "f1"})
    slurm.command("scancel", "-s", "KILL", slurm.id_of("f0"))
    run.wait_until("its end", lambda: "f0" in {row["node"] for row in run.events("function_ended")})
    summary = run.finish()
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["functions_started"] == len(run.events("function_ordered")) >= 2
    assert slurm.jobs() == {}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_printed_sbatch_file_runs_the_head_as_a_job_and_submitted_again_goes_on_with_the_run(
    job: MakeJob, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The head's own job is told to end in mid-run; its machines are gone with it, and come again with the next."""
    file, run_dir = tmp_path / "job.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(job(nodes=1, steps=120, partition="spot")))
    printed = headrace("slurm", "template", str(file), "--dir", str(run_dir), "--keys", str(tmp_path / "keys"))
    assert printed.returncode == 0, printed.stderr
    record = RunRecord(run_dir)

    def submit() -> None:
        slurm.command("sbatch", "-p", "high", f"--output={tmp_path / 'head.log'}", stdin=printed.stdout)

    submit()
    slurm.until("steps", lambda: len(record.rows()) > 10 and "small-1" in running(slurm), 120)
    slurm.command("scancel", "-s", "TERM", slurm.id_of("headrace-small"))
    slurm.until("its end", lambda: not slurm.jobs())
    stopped = len(record.rows())
    assert stopped < 120
    submit()
    slurm.until("the end of the run", lambda: len(record.rows()) == 120 and not slurm.jobs(), 180)
    assert "small-2" in slurm.all_jobs()
    assert record.report(must_finish=True).clean
