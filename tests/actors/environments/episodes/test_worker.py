"""The environment worker with its zygote and real children, against a gateway and a scheduler that are played."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import msgpack
import psutil
import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import StartFailed
from actors.core.reason import is_permanent, reason_of
from actors.core.system import ActorSystem
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.environments.episodes.worker import EnvironmentWorker
from actors.environments.prompts.sources import open_source
from actors.protocol.episodes import (
    AbandonEpisodes,
    BeginEpisodes,
    EnvironmentRegistered,
    EpisodeEnded,
    EpisodeName,
    EpisodeWork,
    RegisterEnvironment,
)
from actors.protocol.failures import Acknowledged, FailureKind, NotAccepted
from actors.protocol.job_news import Trouble
from actors.protocol.session_keys import SessionKeys, admin_key
from actors.roles import RoleArgs
from tests.actors.environments.episodes.played_gateway import SPENT, PlayedGateway, Refusal
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

HERE = "tests.actors.environments.episodes"
GAMES = "played_environments"


class Scheduler(Actor):
    """Hears of ends; ``deaf`` to so many of them."""

    def __init__(self) -> None:
        self.term, self.lease, self.deaf, self.keeps = 1, 0, 0, True
        self.offers: list[RegisterEnvironment] = []
        self.ends: list[EpisodeEnded] = []
        self.troubles: list[Trouble] = []
        self.heard = asyncio.Condition()

    @handles(RegisterEnvironment)
    async def register(self, message: RegisterEnvironment) -> EnvironmentRegistered:
        self.offers.append(message)
        self.lease += 1
        kept = message.running if self.keeps else []
        return EnvironmentRegistered(term=self.term, lease_s=10.0, lease=self.lease, kept=kept)

    @handles(RenewLease)
    async def renew(self, message: RenewLease) -> LeaseRenewed:
        if message.lease != self.lease:
            raise NotAccepted("another lease")
        return LeaseRenewed(lease=message.lease, lease_s=10.0)

    @handles(EpisodeEnded)
    @concurrent
    async def ended(self, message: EpisodeEnded) -> Acknowledged:
        if self.deaf:
            self.deaf -= 1
            await self.ctx.sleep(60.0)
        self.ends.append(message)
        async with self.heard:
            self.heard.notify_all()
        return Acknowledged()

    @handles(Trouble)
    async def trouble(self, message: Trouble) -> None:
        self.troubles.append(message)


class Stage:
    """A worker, its scheduler, and the run's directory."""

    def __init__(
        self,
        run_dir: Path,
        base_url: str,
        environment: dict[str, Any],
        limits: dict[str, Any] | None = None,
        questions: Sequence[str] = ("task 0", "task 1", "task 2", "task 3"),
        *,
        held_out: dict[str, Any] | None = None,
    ) -> None:
        """``held_out``: keys of the same rows, where they are of an evaluation."""
        rows = [{"question": question, "answer": question} for question in questions]
        data = run_dir / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run_dir / "gateway.endpoint").write_text(base_url)
        self.run_dir = run_dir
        keys = {"prompt_key": "question", "answer_key": "answer"}
        source = {"source": "jsonl", "path": str(data), **keys}
        evaluation = {} if held_out is None else {"eval": {"data": source | held_out}}
        self.job = smallest_job(data=source, reward={}, environment=environment, limits=limits or {}, **evaluation)
        self.scheduler = Scheduler()

    async def __aenter__(self) -> Self:
        self.system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)), limits=self.job.limits)
        await self.system.start()
        self.at = (await self.system.spawn("scheduler", self.scheduler)).address
        await self.spawn()
        return self

    async def spawn(self) -> None:
        args = RoleArgs(role="environments", name="environments-0", node="n", job=self.job.model_dump_json(),
                        model_path="", run_dir=str(self.run_dir), scheduler=self.at, metrics=self.at)  # fmt: skip
        self.worker = EnvironmentWorker(args)
        self.ref = await self.system.spawn("environments-0", self.worker)

    async def __aexit__(self, *_: object) -> None:
        await self.system.stop()

    def begin(self, *names: EpisodeName, left_s: float = 20.0, source_name: str = "") -> None:
        source = open_source(self.job.data, 0)
        of = [source_name] if source_name else []
        works = [
            EpisodeWork(name, cast(bytes, msgpack.packb([name.prompt, source.row(name.prompt).digest, *of])), left_s)
            for name in names
        ]
        self.ref.tell(BeginEpisodes(job="j", term=self.scheduler.term, episodes=works))

    async def until(self, happened: Callable[[], bool], within_s: float = 15.0) -> None:
        async with asyncio.timeout(within_s):
            while not happened():
                await asyncio.sleep(0.01)

    async def ends(self, count: int) -> list[EpisodeEnded]:
        await self.until(lambda: len(self.scheduler.ends) >= count)
        return self.scheduler.ends

    @property
    def directory(self) -> Path:
        return self.run_dir / "episodes" / "environments-0"

    def places(self) -> list[str]:
        """Directories of episodes."""
        return sorted(place.name for place in self.directory.iterdir())


def named(prompt: int = 0, sibling: int = 0, attempt: int = 1) -> EpisodeName:
    return EpisodeName(0, prompt, sibling, attempt)


@contextlib.asynccontextmanager
async def staged(
    run_dir: Path, say: Any, path: str, *questions: str, limits: dict[str, Any] | None = None, **environment: Any
) -> AsyncIterator[tuple[Stage, PlayedGateway]]:
    with PlayedGateway(say) as gateway:
        told = {"kind": "python", "path": f"{HERE}.{path}", **environment}
        if path.endswith(":Noted"):
            told["options"] = {"note": str(run_dir / "note")}
        args = [questions] if questions else []
        async with Stage(run_dir, gateway.base_url, told, limits, *args) as stage:
            yield stage, gateway


def count_down(question: dict[str, Any]) -> str:
    return str(int(question["messages"][-1]["content"].rstrip("?").split()[-1]) - 1)


async def test_an_episode_of_reset_and_step_runs_in_turns_and_its_reward_is_heard(tmp_path: Path) -> None:
    async with staged(tmp_path, count_down, f"{GAMES}:Countdown", options={"start": 3}) as (stage, gateway):
        stage.begin(named(prompt=2))
        (ended,) = await stage.ends(1)
        assert (ended.reward, ended.cause, ended.failure, ended.episode) == (3.0, "ended", None, named(prompt=2))
        assert [len(question["messages"]) for _, question in gateway.asked] == [1, 3, 5]
        assert gateway.asked[0][1]["messages"][0]["content"] == "task 2: 3?"
        keys = SessionKeys(admin_key(tmp_path), "j")
        assert {keys.read(key) for key, _ in gateway.asked} == {named(prompt=2)}
        assert stage.places() == []


async def test_the_ready_made_environment_shows_each_row_as_its_source_says(tmp_path: Path) -> None:
    told = {"kind": "python", "options": {"reward": f"{HERE}.played_environments:right"}}
    with PlayedGateway(lambda _: "task 1") as gateway:
        async with Stage(tmp_path, gateway.base_url, told, held_out={"system_prompt": "Held out."}) as stage:
            stage.begin(named(prompt=1))
            await stage.ends(1)
            stage.begin(named(prompt=1, attempt=2), source_name="eval.data")
            ends = await stage.ends(2)
        asked = [[message["content"] for message in question["messages"]] for _, question in gateway.asked]
        assert asked == [["task 1"], ["Held out.", "task 1"]]
        assert [ended.reward for ended in ends] == [1.0, 1.0]


async def test_an_agent_calls_the_endpoint_by_any_client(tmp_path: Path) -> None:
    """It may end with its budget, whatever its framework makes of that: then the reward is 0."""

    def say(question: dict[str, Any]) -> Any:
        asked.append(question)
        spent = Refusal(400, "budget_spent", "tokens" if len(asked) % 2 else "turns")
        return spent if question["messages"][0]["content"] == "wrapping" else "hello"

    asked: list[dict[str, Any]] = []
    questions = ("greeting", "sdk", "wrapping")
    async with staged(tmp_path, say, "played_agents:agent", *questions, kind="agent") as (stage, _):
        ends: dict[int, EpisodeEnded] = {}
        for prompt in range(3):  # one after the other
            stage.begin(named(prompt))
            ends[prompt] = (await stage.ends(prompt + 1))[-1]
        assert (ends[0].reward, ends[0].cause, ends[0].metrics) == (1.0, "ended", {})
        assert (ends[1].reward, ends[1].cause, ends[1].metrics) == (1.0, "ended", {"answers": 1.0})
        assert (ends[2].reward, ends[2].cause, ends[2].failure) == (0.0, "tokens", None)
        stage.begin(named(2, sibling=1))
        assert (await stage.ends(4))[3].cause == "turns"


FAULTS = {
    "raise": (FailureKind.NO_RESULT, "ValueError: the map is upside down (played_environments.py:"),
    "exit": (FailureKind.NO_RESULT, "exit code 3"),
    "segv": (FailureKind.NO_RESULT, "crashed (SIGSEGV)"),
    "nan": (FailureKind.NO_RESULT, "the reward nan"),
    "killed": (FailureKind.INFRASTRUCTURE, "ended from outside (SIGKILL)"),
}


async def test_what_fails_is_typed_by_whose_fault_it_is(tmp_path: Path) -> None:
    """And the newest that failed by their own fault stay for people to look at; the others' directories go."""
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", *FAULTS, limits={"episodes_kept": 3}) as (stage, _):
        for prompt, (how, (kind, text)) in enumerate(FAULTS.items()):
            stage.begin(named(prompt))
            ended = (await stage.ends(prompt + 1))[prompt]
            assert ended.reward is None and ended.failure is not None and ended.failure.kind is kind, how
            assert text in ended.failure.message
            await stage.until(lambda: not stage.worker.running)
            told = [trouble.text for trouble in stage.scheduler.troubles if trouble.kind == "episode_failed"]
            assert any(text in said for said in told) == (kind is FailureKind.NO_RESULT)
            if how == "raise":
                assert "Traceback" in (stage.directory / "0-0-0-1" / "output.log").read_text()
        assert stage.places() == ["0-1-0-1", "0-2-0-1", "0-3-0-1"]


async def test_one_that_hangs_is_killed_at_the_end_of_its_time_with_all_that_it_has_started(tmp_path: Path) -> None:
    """What has left its group, too; and if it ends by itself, what it leaves behind."""
    limits = {"episode_grace_s": 0.3}
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", "hang", "orphan", limits=limits) as (stage, _):
        stage.begin(named(), left_s=1.0)
        (ended,) = await stage.ends(1)
        assert (ended.cause, ended.failure and ended.failure.kind) == ("time", FailureKind.NO_RESULT)
        assert not sleepers("600") and not sleepers("601")
        stage.begin(named(1))
        assert (await stage.ends(2))[1].reward == 1.0
        assert not psutil.pid_exists(int((tmp_path / "orphan").read_text()))


def sleepers(seconds: str) -> list[psutil.Process]:
    """Processes that the played environments have started."""
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", seconds]]


async def test_abandoned_episodes_are_killed_and_nothing_is_said_of_them(tmp_path: Path) -> None:
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", "hang") as (stage, _):
        stage.begin(named())
        await stage.until(lambda: len(sleepers("601")) == 1)
        stage.ref.tell(AbandonEpisodes(job="j", term=1, episodes=[named()]))
        await stage.until(lambda: not sleepers("600") and not sleepers("601"))
        await stage.until(lambda: stage.places() == [])
        assert not stage.scheduler.ends


async def test_a_zygote_that_dies_fails_its_episodes_as_infrastructure_and_is_started_again(tmp_path: Path) -> None:
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", "hang") as (stage, _):
        stage.begin(named())
        await stage.until(lambda: len(sleepers("601")) == 1)
        former = stage.worker.zygote_pid
        assert former is not None
        os.kill(former, signal.SIGKILL)
        (ended,) = await stage.ends(1)
        assert ended.failure is not None and ended.failure.kind is FailureKind.INFRASTRUCTURE
        await stage.until(lambda: not sleepers("600") and not sleepers("601"))
        stage.begin(named(attempt=2))
        await stage.until(lambda: len(sleepers("601")) == 1)
        assert stage.worker.zygote_pid not in (None, former)
    await stage.until(lambda: not sleepers("601"))  # its guard ends with the zygote, a moment later


async def test_attempts_draw_alike_and_episodes_do_not_and_each_has_a_directory(tmp_path: Path) -> None:
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted") as (stage, _):
        names = [named(), named(attempt=2), named(sibling=1)]
        stage.begin(*names)
        await stage.ends(3)
    lines = [line.split() for line in (tmp_path / "note").read_text().splitlines()]
    drawn = {Path(directory).parent.name: number for _, directory, number in lines}
    assert drawn["0-0-0-1"] == drawn["0-0-0-2"] != drawn["0-0-1-1"]
    assert len({pid for pid, *_ in lines}) == 3


async def test_a_gateway_that_is_away_for_a_while_costs_an_episode_nothing(tmp_path: Path) -> None:
    with PlayedGateway(count_down) as first:
        stage = Stage(tmp_path, first.base_url, {"kind": "python", "path": f"{HERE}.{GAMES}:Countdown"}, {})
        away = [True, True]

        def say(question: dict[str, Any]) -> Any:
            return Refusal(503) if away and away.pop() else count_down(question)

        async with stage:
            first.__exit__()
            stage.begin(named())
            await asyncio.sleep(0.3)
            with PlayedGateway(say, port=first.port):
                (ended,) = await stage.ends(1)
        assert (ended.reward, ended.failure) == (2.0, None)


async def test_a_gateway_that_stays_away_is_infrastructure_and_time_that_is_over_is_scored(tmp_path: Path) -> None:
    def slow(question: dict[str, Any]) -> str:
        if len(question["messages"]) > 1:
            stop.wait(3.0)
        return count_down(question)

    stop = threading.Event()
    async with staged(tmp_path, slow, f"{GAMES}:Countdown") as (stage, gateway):
        stage.begin(named(), left_s=1.0)
        (ended,) = await stage.ends(1)
        assert (ended.reward, ended.cause) == (1.0, "time")
        stop.set()
        gateway.__exit__()
        stage.begin(named(1), left_s=0.5)
        ended = (await stage.ends(2))[1]
        assert ended.failure is not None and ended.failure.kind is FailureKind.INFRASTRUCTURE


async def test_a_budget_that_is_spent_ends_an_episode_and_what_there_is_is_scored(tmp_path: Path) -> None:
    def say(question: dict[str, Any]) -> Any:
        return count_down(question) if len(question["messages"]) == 1 else SPENT

    async with staged(tmp_path, say, f"{GAMES}:Countdown") as (stage, _):
        stage.begin(named())
        (ended,) = await stage.ends(1)
        assert (ended.reward, ended.cause) == (1.0, "turns")


async def test_coroutines_scores_and_metrics_are_understood(tmp_path: Path) -> None:
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Async") as (stage, gateway):
        stage.begin(named())
        (ended,) = await stage.ends(1)
        assert (ended.reward, ended.metrics) == (0.5, {"luck": 3.0})
        assert gateway.asked[0][1]["messages"][0]["role"] == "system"


async def test_output_that_floods_is_cut_and_the_episode_goes_on(tmp_path: Path) -> None:
    limits = {"episode_log_bytes": 10_000, "episode_look_s": 0.05}
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", "flood", limits=limits) as (stage, _):
        stage.begin(named())
        assert (await stage.ends(1))[0].reward == 1.0


async def test_an_end_is_told_until_it_is_heard_and_its_episode_is_among_those_that_run(tmp_path: Path) -> None:
    async with staged(tmp_path, count_down, f"{GAMES}:Countdown", limits={"ask_timeout_s": 0.3}) as (stage, _):
        stage.scheduler.deaf = 2
        stage.begin(named())
        (ended,) = await stage.ends(1)
        assert ended.reward == 2.0
        await stage.until(lambda: not stage.worker.running)


async def test_more_than_there_are_slots_is_given_back(tmp_path: Path) -> None:
    async with staged(tmp_path, count_down, f"{GAMES}:Countdown", slots=1) as (stage, _):
        stage.begin(named(), named(1))
        ends = {end.episode: end for end in await stage.ends(2)}
        assert ends[named()].reward == 2.0
        refused = ends[named(1)].failure
        assert refused is not None and refused.kind is FailureKind.INFRASTRUCTURE and "slots" in refused.message


@pytest.mark.parametrize("keeps", [True, False])
async def test_the_next_life_of_the_scheduler_hears_what_runs_and_says_what_to_keep(
    tmp_path: Path, keeps: bool
) -> None:
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", "hang") as (stage, _):
        stage.begin(named())
        await stage.until(lambda: len(sleepers("601")) == 1)
        former = stage.scheduler
        stage.scheduler = Scheduler()
        stage.scheduler.term, stage.scheduler.keeps = 2, keeps
        await stage.system.stop_actor("scheduler")
        await stage.system.spawn("scheduler", stage.scheduler)
        await stage.until(lambda: bool(stage.scheduler.offers))
        assert stage.scheduler.offers[0].running == [named()] and not former.ends
        if keeps:
            await asyncio.sleep(0.2)
            assert len(sleepers("601")) == 1
        else:
            await stage.until(lambda: not sleepers("601"))


async def test_what_can_never_work_ends_the_worker_with_a_sentence(tmp_path: Path) -> None:
    environment = {"kind": "python", "path": f"{HERE}.{GAMES}:Countdown", "options": {"begin": 3}}
    stage = Stage(tmp_path, "http://127.0.0.1:1/v1", environment)
    with pytest.raises(StartFailed) as caught:
        async with stage:
            pass
    await stage.system.stop()
    assert is_permanent(caught.value) and "cannot be made with environment.options" in str(reason_of(caught.value))
