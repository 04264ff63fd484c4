"""What the provider makes of a Slurm that answers late, wrongly or not at all, in virtual time; its jobs as text."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.limits import Limits
from supervisors.providers.provider import How
from supervisors.providers.slurm import SlurmProvider, judged
from supervisors.providers.slurm_commands import JobRow, Slurm, SlurmError, seconds
from supervisors.providers.slurm_script import MachineJob
from supervisors.tree.errors import ProviderError
from tests.smallest_job import smallest_job
from transport.sim.loop import SimulatedLoop

LIMITS = Limits(stop_timeout_s=5.0, cluster_look_s=1.0, cluster_end_s=10.0)
MARK = "headrace-j-12345678"
JOB = MachineJob(smallest_job(), "tcp://head:7001?key=ab", MARK, Path("/logs"), Path("/keys"), 7.5)


class Controller(Slurm):
    """It runs what is submitted. ``away``: no command is answered. ``forgets``: answers of sbatch are lost."""

    def __init__(self) -> None:
        super().__init__(1.0, 5)
        self.rows: dict[str, JobRow] = {}
        self.said: list[str] = []
        self.away = self.forgets = False
        self.refuses = ""
        self.logs: dict[str, list[str]] = {}
        """Job → what it has said; none: nobody knows of logs."""
        self.stuck = set[str]()
        """Jobs that take no order."""
        self.queue: tuple[str, str] = ("RUNNING", "None")

    def _heard(self, what: str) -> None:
        if self.away:
            raise SlurmError("Unable to contact slurm controller")
        self.said.append(what)

    def _say_no(self, jobs: Sequence[str]) -> None:
        if stuck := self.stuck.intersection(jobs):
            raise SlurmError(f"Kill job error on job id {min(stuck)}: Job/step already completing or completed")

    def add(self, name: str, comment: str = JOB.comment) -> str:
        number = str(len(self.rows) + 1)
        self.rows[number] = JobRow(number, self.queue[0], "n1", self.queue[1], name, comment)
        return number

    def end(self, job: str, state: str) -> None:
        self.rows[job] = replace(self.rows[job], state=state)

    def alive(self) -> list[str]:
        return [row.name for row in self.rows.values() if not row.is_over]

    async def check(self, options: Sequence[str], script: str) -> None:
        self._heard("check")
        if self.refuses:
            raise SlurmError(self.refuses)

    async def submit(self, options: Sequence[str], script: str) -> str:
        name = next(word.partition("=")[2] for word in options if word.startswith("--job-name="))
        self._heard(f"submit {name}")
        if self.refuses:
            raise SlurmError(self.refuses)
        number = self.add(name)
        if self.forgets:
            raise SlurmError("sbatch has not answered within 1 s")
        return number

    async def jobs(self, comment_begins: str) -> list[JobRow]:
        self._heard("look")
        return [row for row in self.rows.values() if row.comment.startswith(comment_begins)]

    async def details(self, job: str) -> Mapping[str, str]:
        return {"StdOut": f"/logs/{job}", "ExitCode": "0:9"} if self.logs else {}

    async def log_lines(self, file: Path) -> Sequence[str]:
        return self.logs.get(file.name, [])

    async def signal(self, job: str, name: str) -> None:
        self._heard(f"{name} {job}")
        self._say_no([job])
        self.end(job, "COMPLETED" if name == "TERM" else "CANCELLED")

    async def cancel(self, jobs: Sequence[str], *, name: str | None = None) -> None:
        self._heard(f"cancel {' '.join(jobs)}")
        self._say_no(jobs)
        for job in jobs:
            self.end(job, "CANCELLED")


class Place:
    """A provider with its controller, and what it told."""

    def __init__(self) -> None:
        self.slurm = Controller()
        self.provider = SlurmProvider(JOB, LIMITS, self.slurm)
        self.ends, self.news = list[tuple[str, How]](), list[tuple[str, str]]()
        self.provider.on_end = lambda node, how: self.ends.append((node, how))
        self.provider.on_news = lambda node, words: self.news.append((node, words))


def play(scene: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place()
        await place.provider.open()
        await scene(place)
        await place.provider.close()
        assert place.slurm.alive() == []

    run(main())


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = SimulatedLoop(0)
    try:
        loop.run_until_complete(work)
    finally:
        loop.dismantle()


def test_a_controller_that_is_away_is_no_news_and_orders_wait_for_it() -> None:
    async def scene(place: Place) -> None:
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        assert place.news == [("a", "the job 1 runs on n1")]
        place.slurm.away = True
        place.provider.start("b", "spot")
        place.provider.notice("a", 100.0)
        await asyncio.sleep(30)
        assert (place.ends, place.slurm.alive()) == ([], ["a"])
        place.slurm.away = False
        await asyncio.sleep(3)
        assert sorted(place.ends) == [("a", "notice"), ("b", "failed")]
        assert place.news[1:] == [("b", "Unable to contact slurm controller")], "it is said once it is known"

    play(scene)


def test_a_job_whose_sbatch_was_not_answered_is_found_by_its_name() -> None:
    async def scene(place: Place) -> None:
        place.slurm.forgets = True
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        assert dict(place.provider.running) == {"a": "spot"}
        assert place.news == [("a", "the job 1 runs on n1")]
        place.slurm.end("1", "NODE_FAIL")
        await asyncio.sleep(3)
        assert place.ends == [("a", "taken")]

    play(scene)


def test_jobs_with_the_runs_mark_that_are_nobodys_are_cancelled_and_those_of_others_are_left_alone() -> None:
    async def scene(place: Place) -> None:
        place.slurm.add("theirs", "headrace-k-1 tcp://elsewhere:1")
        place.slurm.add("ghost")
        await asyncio.sleep(3)
        assert place.slurm.alive() == ["theirs"]
        place.slurm.end("1", "COMPLETED")

    play(scene)


def test_a_job_that_waits_says_why_once_and_is_cancelled_when_it_is_told_to_go() -> None:
    async def scene(place: Place) -> None:
        place.slurm.queue = ("PENDING", "Resources")
        place.provider.start("a", "spot")
        await asyncio.sleep(10)
        assert place.news == [("a", "the job 1 waits: Resources")]
        place.provider.notice("a", 60.0)
        await asyncio.sleep(2)
        assert place.ends == [("a", "notice")]
        assert "TERM 1" not in place.slurm.said

    play(scene)


def test_jobs_that_wait_or_were_never_heard_of_are_gone_after_the_close() -> None:
    """``play`` looks: nothing of ours is alive then."""

    async def scene(place: Place) -> None:
        place.slurm.queue = ("PENDING", "Priority")
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        place.slurm.forgets = True
        place.provider.start("b", "spot")
        await asyncio.sleep(0)

    async def unheard_of(place: Place) -> None:
        await asyncio.sleep(3)
        place.slurm.add("ghost")

    play(unheard_of)
    play(scene)


def test_one_that_sbatch_refuses_ends_as_failed_with_its_words() -> None:
    async def scene(place: Place) -> None:
        place.slurm.refuses = "Batch job submission failed: Job violates accounting policy"
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        assert (place.ends, place.news) == ([("a", "failed")], [("a", place.slurm.refuses)])

    play(scene)


def test_one_that_is_given_up_has_failed_with_the_reason_and_the_end_of_its_log() -> None:
    """What a machine says that hangs before it joins; that its log is not here is said, too."""

    async def scene(place: Place) -> None:
        ran = list[str]()
        place.provider.on_runs = ran.append
        place.slurm.logs = {"1": ["  pulling", "", "retrying in 5 s"], "2": []}
        for node in ("a", "b", "c"):
            place.provider.start(node, "spot")
        await asyncio.sleep(3)
        assert ran == ["a", "b", "c"]
        place.provider.give_up("a", "it does nothing")
        place.provider.give_up("b", "it does nothing")
        place.provider.notice("c", 60.0)
        place.provider.give_up("c", "it goes")
        await asyncio.sleep(3)
        assert sorted(place.ends) == [("a", "failed"), ("b", "failed"), ("c", "notice")]
        over = "it does nothing; the job {0} is over: CANCELLED, exit code 0:9, on n1; its log /logs/{0} "
        assert place.news[-2:] == [
            ("a", over.format(1) + "ends: pulling | retrying in 5 s"), ("b", over.format(2) + "says nothing"),
        ]  # fmt: skip

    play(scene)


def test_a_job_id_that_is_given_again_after_a_crash_is_not_taken_for_the_old_one() -> None:
    async def scene(place: Place) -> None:
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        place.slurm.rows["1"] = replace(place.slurm.rows["1"], name="other")
        await asyncio.sleep(3)
        assert place.ends == [("a", "failed")]

    play(scene)


def test_a_job_that_takes_no_order_does_not_hold_up_the_orders_to_others() -> None:
    async def scene(place: Place) -> None:
        for node in ("a", "b"):
            place.provider.start(node, "spot")
        await asyncio.sleep(3)
        place.slurm.stuck = {"1"}
        for node in ("a", "b"):
            place.provider.notice(node, 60.0)
        await asyncio.sleep(3)
        assert place.ends == [("b", "notice")]
        place.slurm.stuck = set()

    play(scene)


def test_a_job_that_completes_for_ever_gets_no_orders_and_is_replaced() -> None:
    """Its node does not answer, or hangs as it cleans up."""

    async def scene(place: Place) -> None:
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        place.slurm.end("1", "COMPLETING")
        place.slurm.stuck = {"1"}
        await asyncio.sleep(LIMITS.cluster_end_s - 2)
        assert place.ends == []
        await asyncio.sleep(4)
        assert place.ends == [("a", "taken")]
        await asyncio.sleep(10)
        assert "cancel 1" not in place.slurm.said
        place.slurm.end("1", "COMPLETED")

    play(scene)


def test_a_former_life_whose_job_completes_for_ever_does_not_keep_the_run_from_going_on() -> None:
    async def main() -> None:
        place = Place()
        place.slurm.add("j-1")
        cancel = place.slurm.cancel

        async def begins_to_end(jobs: Sequence[str], *, name: str | None = None) -> None:
            await cancel(jobs, name=name)
            place.slurm.end("1", "COMPLETING")

        place.slurm.cancel = begins_to_end  # type: ignore[method-assign]
        await place.provider.open()
        place.slurm.end("1", "COMPLETED")
        await place.provider.close()

    run(main())


def test_a_job_whose_comment_is_not_ours_any_more_is_cancelled() -> None:
    """A plugin of the site's writes comments: we would never find such a job again."""

    async def scene(place: Place) -> None:
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        place.slurm.rows["1"] = replace(place.slurm.rows["1"], comment="project 7")
        await asyncio.sleep(3)
        assert place.ends == [("a", "failed")]
        assert place.slurm.alive() == []

    play(scene)


def test_what_a_former_life_left_is_cancelled_first_and_what_the_cluster_refuses_ends_the_start() -> None:
    async def main() -> None:
        place = Place()
        place.slurm.add("j-1")
        place.slurm.refuses = "sbatch: error: invalid partition specified: nope"
        with pytest.raises(ProviderError, match=r"provider.slurm.*invalid partition specified: nope"):
            await place.provider.open()
        assert place.slurm.said == ["look", "cancel 1", "look", "check"]

    run(main())


def test_another_head_that_answers_keeps_its_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads with the same mark: of one run directory, on two hosts whose locks do not meet."""

    async def answers(endpoint: str, timeout_s: float) -> bool:
        return endpoint == "tcp://other:7001"

    monkeypatch.setattr("supervisors.providers.slurm.answers", answers)

    async def main() -> None:
        place = Place()
        place.slurm.add("j-1", f"{MARK} tcp://other:7001")
        with pytest.raises(ProviderError, match=r"answers at tcp://other:7001, and the Slurm jobs 1 are"):
            await place.provider.open()
        assert place.slurm.alive() == ["j-1"]

    run(main())


@pytest.mark.parametrize(
    ("state", "details", "how", "says"),
    [
        ("PREEMPTED", {}, "taken", "the job 7 was preempted on n1"),
        ("COMPLETED", {"PreemptTime": "2026-01-01T00:00:00"}, "taken", "was preempted"),
        ("TIMEOUT", {}, "taken", "reached its time limit"),
        ("NODE_FAIL", {}, "taken", "lost its node on n1"),
        ("COMPLETED", {"RunTime": "03:59:00", "TimeLimit": "04:00:00"}, "taken", "before its time limit of 04:00:00"),
        ("COMPLETED", {"RunTime": "00:01:00", "TimeLimit": "04:00:00", "ExitCode": "0:0"}, "failed", "exit code 0:0"),
        ("COMPLETED", {"RunTime": "00:01:00", "TimeLimit": "UNLIMITED"}, "failed", "COMPLETED"),
        ("FAILED", {"ExitCode": "127:0", "PreemptTime": "None"}, "failed", "is over: FAILED, exit code 127:0, on n1"),
        ("CANCELLED", {}, "failed", "the job 7 is over: CANCELLED"),
    ],
)  # fmt: skip
def test_what_the_cluster_took_is_told_from_what_failed(
    state: str, details: dict[str, str], how: How, says: str
) -> None:
    row = JobRow("7", state, "n1", "None", "a", MARK)
    found = judged(row, details, 67.5)
    assert found[0] == how
    assert says in found[1]


def test_a_job_is_one_step_of_one_node_and_what_users_add_cannot_change_that() -> None:
    slurm = {
        "partition": "spot", "account": "lab", "time_limit": "4:00:00", "sbatch": ["--gres=gpu:4 -C h100"],
        "environment": "module load cuda\nsource venv/bin/activate", "command": "apptainer exec img headrace",
    }  # fmt: skip
    job = smallest_job(provider={"kind": "slurm", "nodes_max": 2, "slots": 2, "notice_s": 60, "slurm": slurm})
    machine = replace(JOB, job=job)
    options = machine.options("j-1")
    for option in ("--partition=spot", "--account=lab", "--time=4:00:00", "--gres=gpu:4", "--exclusive", "h100"):
        assert option in options
    assert options[-6:] == ["--job-name=j-1", f"--comment={MARK} tcp://head:7001", "--nodes=1", "--ntasks=1",
                            "--no-requeue", "--signal=TERM@8"]  # fmt: skip
    lines = machine.script("j-1", "spot").splitlines()
    assert lines[:3] == ["#!/bin/bash", "module load cuda", "source venv/bin/activate"]
    words = shlex.split(lines[3])
    assert words[:8] == ["exec", "srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "apptainer", "exec", "img"]
    assert words[8:] == ["headrace", "node", "--join", "tcp://head:7001?key=ab", "--name", "j-1", "--kind", "spot",
                         "--slots", "2", "--notice", "60", "--keys", "/keys"]  # fmt: skip
    shared = smallest_job(provider={"slurm": {"exclusive": False, "keys": "/local/keys"}})
    assert "--exclusive" not in replace(JOB, job=shared).options("j-1")
    assert "/local/keys" in replace(JOB, job=shared).script("j-1", "spot")


def test_times_are_read_as_slurm_writes_them() -> None:
    assert [seconds(text) for text in ("00:00:09", "04:00:00", "2-01:00:00")] == [9, 14400, 176400]
    assert seconds("UNLIMITED") == seconds("Partition_Limit") == float("inf")


def test_commands_have_a_deadline_and_say_in_their_own_words_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fakes on the PATH; a head that is a job itself does not hand its own variables on."""
    row, foreign = f"1|RUNNING|n1|None|a|{MARK} x|y", "$SLURM_JOB_ID$SQUEUE_PARTITION$CUDA_VISIBLE_DEVICES$SBATCH_WAIT"
    for name, line in {
        "sbatch": "echo 'sbatch: error: Invalid account' >&2; exit 1",
        "squeue": f'[ -z "{foreign}" ] && echo "{row}"; echo "2|RUNNING|n1|None|b|other"',
        "scancel": "exec sleep 100",
        "scontrol": "echo JobId=1 JobState=COMPLETED RunTime=00:00:09",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for name in ("SQUEUE_PARTITION", "CUDA_VISIBLE_DEVICES", "SBATCH_WAIT"):
        monkeypatch.setenv(name, "0")

    async def main() -> None:
        slurm = Slurm(2.0, 5)
        assert await slurm.jobs(MARK) == [JobRow("1", "RUNNING", "n1", "None", "a", f"{MARK} x|y")]
        assert (await slurm.details("1"))["RunTime"] == "00:00:09"
        with pytest.raises(SlurmError, match="sbatch: error: Invalid account"):
            await slurm.submit([], "#!/bin/sh\n")
        with pytest.raises(SlurmError, match=r"scancel has not answered within 0.3 s"):
            await Slurm(0.3, 5).cancel(["1"])
        monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
        with pytest.raises(SlurmError, match=r"sbatch cannot be run.*on its PATH"):
            await slurm.check([], "#!/bin/sh\n")

    asyncio.run(main())
