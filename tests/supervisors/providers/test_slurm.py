"""What the provider makes of a Slurm that answers late, wrongly or not at all, in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.limits import Limits
from supervisors.providers.provider import How
from supervisors.providers.slurm import SlurmProvider
from supervisors.providers.slurm_commands import JobRow, Slurm, SlurmError
from supervisors.providers.slurm_script import MachineJob
from supervisors.tree.errors import ProviderError
from tests.smallest_job import smallest_job
from transport.sim.loop import SimulatedLoop

LIMITS = Limits(stop_timeout_s=5.0, cluster_look_s=1.0, cluster_end_s=10.0, slurm_claim_s=6.0)
MARK = "headrace-j-12345678"
JOB = MachineJob(smallest_job(), "tcp://head:7001?key=ab", MARK, Path("/logs"), Path("/keys"), 7.5, "life")


class Controller(Slurm):
    """It runs what is submitted. ``away``: no command is answered. ``forgets``: answers of sbatch are lost."""

    def __init__(self) -> None:
        super().__init__(1.0, 5)
        self.rows: dict[str, JobRow] = {}
        self.said: list[str] = []
        self.away = self.forgets = False
        self.comments_stay = False
        """Nobody may write the comment of a job."""
        self._claims = 0
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
        number = str(sum(row.name != MARK for row in self.rows.values()) + 1)
        self.rows[number] = JobRow(number, self.queue[0], "n1", self.queue[1], name, comment)
        return number

    def end(self, job: str, state: str) -> None:
        self.rows[job] = replace(self.rows[job], state=state)

    def alive(self) -> list[str]:
        """Names of all but claims."""
        return [row.name for row in self.rows.values() if not row.is_over and row.name != MARK]

    def claims(self) -> list[str]:
        return [row.comment.split()[1] for row in self.rows.values() if not row.is_over and row.name == MARK]

    async def check(self, options: Sequence[str], script: str) -> None:
        self._heard("check")
        if self.refuses:
            raise SlurmError(self.refuses)

    async def submit(self, options: Sequence[str], script: str) -> str:
        given = dict(word.split("=", 1) for word in options if "=" in word)
        name, comment = given["--job-name"], given["--comment"]
        if "--hold" in options:
            self._claims += 1
            number = f"90{self._claims}"
            self.rows[number] = JobRow(number, "PENDING", "", "JobHeldUser", name, comment)
            if self.forgets:
                raise SlurmError("sbatch has not answered within 1 s")
            return number
        self._heard(f"submit {name}")
        if self.refuses:
            raise SlurmError(self.refuses)
        number = self.add(name, comment)
        if self.forgets:
            raise SlurmError("sbatch has not answered within 1 s")
        return number

    async def jobs(self, comment_begins: str) -> list[JobRow]:
        self._heard("look")
        found = [row for row in self.rows.values() if row.comment.startswith(comment_begins)]
        await asyncio.sleep(0.01)  # what is heard is old by then
        return found

    async def details(self, job: str) -> Mapping[str, str]:
        return {"StdOut": f"/logs/{job}", "ExitCode": "0:9"} if self.logs else {}

    async def log_lines(self, file: Path) -> Sequence[str]:
        return self.logs.get(file.name, [])

    async def signal(self, job: str, name: str) -> None:
        self._heard(f"{name} {job}")
        self._say_no([job])
        self.end(job, "COMPLETED" if name == "TERM" else "CANCELLED")

    async def comment(self, job: str, text: str) -> None:
        if self.away:
            raise SlurmError("Unable to contact slurm controller")
        if self.comments_stay:
            raise SlurmError(f"Access/permission denied for job {job}")
        self.rows[job] = replace(self.rows[job], comment=text)

    async def cancel(self, jobs: Sequence[str], *, name: str | None = None) -> None:
        self._heard(f"cancel {' '.join(jobs)}")
        self._say_no(jobs)
        for job in jobs:
            self.end(job, "CANCELLED")


class Place:
    """A provider with its controller, and what it told. ``life``: name of its head."""

    def __init__(self, slurm: Controller | None = None, life: str = "life") -> None:
        self.slurm = slurm or Controller()
        self.provider = SlurmProvider(replace(JOB, life=life), LIMITS, self.slurm)
        self.ends, self.news = list[tuple[str, How]](), list[tuple[str, str]]()
        self.provider.on_end = lambda node, how: self.ends.append((node, how))
        self.provider.on_news = lambda node, words: self.news.append((node, words))


def play(scene: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place()
        await place.provider.open()
        await scene(place)
        await place.provider.close()
        assert place.slurm.alive() == place.slurm.claims() == []

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
        place.slurm.add("j-1", f"{MARK} former")
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


def test_what_the_cluster_refuses_ends_the_start_in_its_own_words_and_leaves_nothing() -> None:
    async def main() -> None:
        place = Place()
        place.slurm.add("j-1", f"{MARK} former")
        place.slurm.refuses = "sbatch: error: invalid partition specified: nope"
        with pytest.raises(ProviderError, match=r"provider.slurm.*invalid partition specified: nope"):
            await place.provider.open()
        assert (place.slurm.said, place.slurm.claims()) == (["check"], [])

    run(main())


def test_of_two_heads_that_start_at_the_same_time_one_is_refused_and_touches_nothing() -> None:
    """They have the same mark: of one run directory, on two hosts whose locks do not meet. Neither has a job."""

    async def main() -> None:
        first = Place()
        second = Place(first.slurm, "other")
        ended = await asyncio.gather(first.provider.open(), second.provider.open(), return_exceptions=True)
        assert ended[0] is None
        assert re.match(
            r"another head owns the machines of this run: the head on \S+ holds the Slurm job 901", str(ended[1])
        )
        first.provider.start("a", "spot")
        await asyncio.sleep(20)
        third = Place(first.slurm, "third")
        with pytest.raises(
            ProviderError, match="and is alive; end that one, or start this one with a run directory of"
        ):
            await third.provider.open()
        await third.provider.close()
        await second.provider.close()
        await asyncio.sleep(20)
        assert (first.slurm.alive(), first.slurm.claims()) == (["a"], ["life"])
        assert first.news == [("a", "the job 1 runs on n1")]
        await first.provider.close()
        assert first.slurm.alive() == first.slurm.claims() == []

    run(main())


def test_what_a_head_that_is_gone_has_left_is_cancelled_first_and_if_it_wakes_up_it_touches_nothing() -> None:
    async def main() -> None:
        first = Place()
        await first.provider.open()
        first.provider.start("a", "spot")
        await asyncio.sleep(3)
        for task in first.provider._lives:
            task.cancel()  # as if its process were stopped
        second = Place(first.slurm, "other")
        await second.provider.open()
        assert (first.slurm.alive(), first.slurm.claims()) == ([], ["other"])
        second.provider.start("b", "spot")
        await asyncio.sleep(3)

        first.provider._lives = [asyncio.create_task(first.provider._run())]  # it wakes up, and does not know yet
        await first.provider._claim.keep(first.provider._lost)
        assert "another head owns the machines of this run now: the head on " in first.news[-1][1]
        with pytest.raises(ProviderError, match="cannot be started: another head owns"):
            first.provider.start("c", "spot")
        await first.provider.close()
        assert (first.slurm.alive(), first.slurm.claims()) == (["b"], ["other"])
        await second.provider.close()

    run(main())


def test_a_claim_that_somebody_cancels_is_made_anew() -> None:
    async def scene(place: Place) -> None:
        place.slurm.end("901", "CANCELLED")
        await asyncio.sleep(3)
        assert place.slurm.claims() == ["life"]

    play(scene)


def test_a_claim_that_could_not_be_renewed_or_was_not_answered_ends_the_start_and_leaves_no_held_job() -> None:
    async def main() -> None:
        place = Place()
        place.slurm.comments_stay = True
        with pytest.raises(ProviderError, match=r"its claim, a job that is held, cannot be had: Access/permission"):
            await place.provider.open()
        assert place.slurm.claims() == []
        place.slurm.forgets, place.slurm.comments_stay = True, False
        with pytest.raises(ProviderError, match="cannot be had: sbatch has not answered"):
            await place.provider.open()
        assert place.slurm.claims() == []

    run(main())


def test_a_claim_that_is_made_anew_unanswered_is_found_and_is_gone_after_the_close() -> None:
    async def scene(place: Place) -> None:
        place.slurm.end("901", "CANCELLED")
        place.slurm.forgets = True
        await asyncio.sleep(20)
        assert place.slurm.claims() == ["life"]

    play(scene)


def test_jobs_that_cannot_be_cancelled_at_the_end_are_named_and_the_claim_goes_all_the_same() -> None:
    async def main() -> None:
        place = Place()
        await place.provider.open()
        place.provider.start("a", "spot")
        await asyncio.sleep(3)
        place.slurm.stuck = {"1"}
        await place.provider.close()
        assert f"jobs of the run may be left: those whose comment begins with {MARK} " in place.news[-1][1]
        assert place.slurm.claims() == []

    run(main())
