"""The environment worker: drives episodes for one job, each in a process of its own.

    scheduler ── BeginEpisodes, AbandonEpisodes ──▶ a task per episode ──▶ zygote ──▶ child ──HTTP──▶ gateway
        ▲                                                                      │
        └── RegisterEnvironment, EpisodeEnded (until it is acknowledged) ◀── verdict

    RUN/episodes/<worker>/<step>-<prompt>-<sibling>-<attempt>/    work: where it runs   output.log: what it prints

Invariants
- The worker acts under a lease (``actors/core/tenure.py``). If that lapses, it kills its episodes and registers again.
- Without its scheduler it goes on until its lease lapses. Meanwhile it offers itself to the scheduler's next life,
  naming the episodes that it runs, and kills those that the answer does not let it keep.
- An episode counts as running until its end is acknowledged, so that no end is lost with a scheduler. Its slot is free
  before that, since the scheduler may have heard of the end already, and begin another episode.
- Commands of an older term are refused. Those that overtake the answer to its offer wait for it, a bounded number.
- A directory is removed at the end of its episode, except those of the newest episodes that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from actors.core.actor import Actor, handles
from actors.core.errors import AskError, RemoteError
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.tenure import RenewLease
from actors.core.terms import TermGuard
from actors.core.watch import Down
from actors.environments.episodes.child import EpisodeOrder
from actors.environments.episodes.errors import EnvironmentRefused, GatewayAway
from actors.environments.episodes.zygote_handle import Verdict, ZygoteDied, ZygoteHandle, failed, late, verdict_on
from actors.host.bounded_file import trim
from actors.protocol.episodes import (
    AbandonEpisodes,
    BeginEpisodes,
    EnvironmentRegistered,
    EpisodeEnded,
    EpisodeName,
    EpisodeWork,
    RegisterEnvironment,
)
from actors.protocol.evaluations import is_evaluation, short_name
from actors.protocol.failures import Acknowledged, FailureKind
from actors.protocol.job_news import Trouble
from actors.protocol.session_keys import SessionKeys, admin_key
from actors.protocol.work_track import WorkTrack
from actors.roles import RoleArgs
from configs.run_files import GATEWAY_ENDPOINT, LOGS
from configs.schema import JobConfig

Command = BeginEpisodes | AbandonEpisodes


def build(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: EnvironmentWorker(args)}


class EnvironmentWorker(RegisteredActor):
    """The worker drives episodes for one job, as the module's docstring says."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.job_config
        self._directory = Path(args.run_dir) / "episodes" / args.name
        self._terms = TermGuard()
        self._early: deque[Command] = deque()
        """Commands of a scheduler whose answer to our offer is still on its way."""
        self._running: dict[EpisodeName, asyncio.Task[object]] = {}
        """Episodes whose end has not been acknowledged."""
        self._driven: set[EpisodeName] = set()
        """Episodes of ``_running`` that have not ended; at most one per slot."""
        self._track = WorkTrack(
            self._job.name, args.name, "episode", lambda: self.ctx.ref(self.scheduler.beside(args.metrics))
        )

    @property
    def running(self) -> list[EpisodeName]:
        """Episodes whose end nobody has acknowledged yet."""
        return list(self._running)

    @property
    def zygote_pid(self) -> int | None:
        """Process id of the zygote that runs now."""
        return self._zygote.pid

    # ------------------------------------------------------------------ life

    async def on_start(self) -> None:
        self.obey(self._args.scheduler)
        run_dir = Path(self._args.run_dir)
        self._keys = SessionKeys(await self.ctx.run_blocking(admin_key, run_dir), self._job.name)
        log = run_dir / LOGS / f"{self._args.name}-zygote.log"
        self._zygote = ZygoteHandle(self._job, log, lambda reads: self.ctx.start_task(reads, "hear the zygote"))
        await self.ctx.run_blocking(_prune, self._directory, self._job.limits.episodes_kept)
        await self._try()
        self.ctx.start_task(self._trim_logs(), "trim logs")
        await self.register()
        self._track.start(self.ctx)

    async def _try(self) -> None:
        """Try the environment once before the first episode, to find what would make every episode fail.

        Raises:
            EnvironmentRefused: the environment can never work; the message says why.
        """
        order = self._order("trial")
        await self.ctx.run_blocking(_make, order)
        try:
            said = (await self._zygote.run(order, self._job.limits.ready_timeout_s)).said or {}
        except TimeoutError:
            said = {"failed": "it took too long", "broken": False}
        if said.get("broken"):
            raise EnvironmentRefused(str(said["failed"]))
        if "failed" in said:
            self._trouble("environment_trial", f"the environment, tried before the first step: {said['failed']}")
        await self.ctx.run_blocking(_remove, order)

    async def on_stop(self) -> None:
        await self._zygote.close()

    async def introduce(self, scheduler: ActorRef) -> None:
        asked_at_s = self.ctx.now()
        offer = RegisterEnvironment(
            job=self._job.name,
            worker=self.ctx.self_address,
            slots=self._job.environment.slots,
            running=self.running,
        )
        answer = await scheduler.ask(offer, EnvironmentRegistered)
        self._granted = answer
        renewal = RenewLease(job=self._job.name, holder=self._args.name, lease=answer.lease)
        self.tenure.begin(scheduler, renewal, answer.lease_s, asked_at_s=asked_at_s)

    async def registered(self) -> None:
        self._terms.admit(self._granted.term)
        kept = set(self._granted.kept)
        self._forget(name for name in list(self._running) if name not in kept)
        while self._early:
            command = self._early.popleft()
            if not self._terms.is_stale(command.term):  # else an older life of the scheduler has sent it
                self._obey(command)

    def scheduler_lost(self, message: Down) -> None:
        self.ctx.log.warning("the scheduler is gone; going on without it", reason=message.reason)
        self.register_again()

    def lease_lapsed(self) -> None:
        """The lease was not renewed in time, or was refused: other workers may have our episodes by now."""
        self.ctx.log.warning("the lease has lapsed; what runs is ended", episodes=len(self._running))
        self._forget(list(self._running))
        if self.is_registered:
            self.register_again()

    # ------------------------------------------------------------------ commands

    @handles(BeginEpisodes, AbandonEpisodes)
    async def command(self, message: Command) -> None:
        if message.job != self._job.name:
            self.ctx.log.warning("a command of another job", job=message.job)
        elif not self.is_registered and not self._terms.is_stale(message.term):
            self._early.append(message)
            if len(self._early) > self.ctx.limits.early_commands:
                self.ctx.log.error("too many commands come before the answer to an offer; the oldest is dropped")
                self._early.popleft()
        else:
            if self._terms.admit(message.term):
                self._forget(list(self._running))
            self._obey(message)

    def _obey(self, command: Command) -> None:
        if isinstance(command, AbandonEpisodes):
            self._forget(command.episodes)
            return
        for work in command.episodes:
            if work.name not in self._running:
                task = self.ctx.start_task(self._live(work), f"episode {_key(work.name)}")
                self._running[work.name] = task

    def _forget(self, episodes: Iterable[EpisodeName]) -> None:
        """Kill these episodes, and do not report their ends."""
        for name in episodes:
            if (task := self._running.pop(name, None)) is not None:
                task.cancel()

    # ------------------------------------------------------------------ an episode

    async def _live(self, work: EpisodeWork) -> None:
        try:
            await self._tell(work.name, await self._in_a_slot(work))
        finally:
            if self._running.get(work.name) is asyncio.current_task():
                del self._running[work.name]

    async def _in_a_slot(self, work: EpisodeWork) -> Verdict:
        slots = self._job.environment.slots
        if len(self._driven & self._running.keys()) >= slots:  # abandoned ones are about to be killed
            return failed(FailureKind.INFRASTRUCTURE, f"the worker's slots, {slots}, are all taken")
        self._driven.add(work.name)
        try:
            with self._track.work():
                return await self._drive(work)
        finally:
            self._driven.discard(work.name)

    async def _drive(self, work: EpisodeWork) -> Verdict:
        ends_s = self.ctx.now() + work.left_s
        order = self._order(_key(work.name), work)
        try:
            await self.ctx.run_blocking(_make, order)
        except OSError as error:
            return failed(FailureKind.INFRASTRUCTURE, f"no directory can be made for it: {error}")
        keep = False
        try:
            verdict = await self._verdict(order, ends_s)
            keep = verdict.failure is not None and verdict.failure.kind is not FailureKind.INFRASTRUCTURE
        finally:
            if not keep:
                await self.ctx.run_blocking(_remove, order)
        if verdict.failure is not None and keep:
            live = self._live_keys() - {order.key}
            await self.ctx.run_blocking(_prune, self._directory, self._job.limits.episodes_kept, live)
            again = f"an episode is begun {self._job.environment.attempts} times at most; its output: {order.log}"
            self._trouble("episode_failed", f"an episode has no result: {verdict.failure.message}; {again}")
        return verdict

    async def _verdict(self, order: EpisodeOrder, ends_s: float) -> Verdict:
        grace_s = self._job.limits.episode_grace_s
        try:
            base_url = await self._base_url(ends_s)
            order = msgspec.structs.replace(order, base_url=base_url, left_s=ends_s - self.ctx.now())
            return verdict_on(await self._zygote.run(order, order.left_s + grace_s))
        except TimeoutError:
            return late(grace_s)
        except (ZygoteDied, GatewayAway) as error:
            return failed(FailureKind.INFRASTRUCTURE, str(error))

    async def _base_url(self, ends_s: float) -> str:
        """The URL where the gateway listens; waits for a gateway that is about to start.

        Raises:
            GatewayAway: it does not listen by ``ends_s``.
        """
        while self.ctx.now() < ends_s:
            with contextlib.suppress(OSError):  # it is not there yet, or a network file system hiccups
                if base_url := (Path(self._args.run_dir) / GATEWAY_ENDPOINT).read_text("utf-8").strip():
                    return base_url
            await self.ctx.sleep(self._job.limits.gateway_look_s)
        raise GatewayAway("the gateway did not listen within the episode's time")

    async def _tell(self, name: EpisodeName, verdict: Verdict) -> None:
        """Report the end of an episode until it is acknowledged; abandoning the episode cancels this."""
        reward, cause, metrics, failure = verdict
        ended = EpisodeEnded(
            job=self._job.name, episode=name, reward=reward, failure=failure, cause=cause, metrics=dict(metrics)
        )
        while True:
            if (scheduler := self.known_to) is not None:
                try:
                    await self.ctx.ref(scheduler).ask(ended, Acknowledged)
                    return
                except RemoteError as error:
                    self.ctx.log.warning("the end of an episode is refused", episode=_key(name), error=str(error))
                    return
                except AskError as error:
                    self.ctx.log.info("the end of an episode is told again", episode=_key(name), after=str(error))
            await self.ctx.sleep(self.ctx.limits.backoff_first_s)

    def _order(self, key: str, work: EpisodeWork | None = None) -> EpisodeOrder:
        place = self._directory / key
        order = EpisodeOrder(key=key, directory=str(place / "work"), log=str(place / "output.log"))
        if work is None:
            return order
        _, prompt, sibling, attempt = msgspec.structs.astuple(work.name)
        return msgspec.structs.replace(
            order,
            context=work.context,
            seed=f"headrace episode {_stream(self._job, work.name)} {prompt} {sibling}",
            session=self._keys.sign(work.name),
            again=attempt > 1,
        )

    # ------------------------------------------------------------------ beside

    def _trouble(self, kind: str, text: str) -> None:
        self.ctx.ref(self.scheduler.address).tell(Trouble(job=self._job.name, kind=kind, text=text))

    def _live_keys(self) -> frozenset[str]:
        return frozenset(map(_key, self._running))

    async def _trim_logs(self) -> None:
        """Keep what episodes print within bounds: a loop of prints fills a disk in seconds."""
        while True:
            await self.ctx.sleep(self._job.limits.episode_look_s)
            for key in self._live_keys():
                with contextlib.suppress(OSError):
                    log = self._directory / key / "output.log"
                    await self.ctx.run_blocking(trim, log, self._job.limits.episode_log_bytes)


def _stream(job: JobConfig, name: EpisodeName) -> str:
    """Name of the episode's random stream: the evaluations of all versions draw the same numbers."""
    return f"{job.evaluation.seed} evaluation" if is_evaluation(name.step) else f"{job.seed} {name.step}"


def _key(name: EpisodeName) -> str:
    return f"{short_name(name.step)}-{name.prompt}-{name.sibling}-{name.attempt}"


def _make(order: EpisodeOrder) -> None:
    _remove(order)  # of a former life of this worker
    Path(order.directory).parent.mkdir(parents=True, mode=0o700)
    Path(order.directory).mkdir(mode=0o700)


def _remove(order: EpisodeOrder) -> None:
    shutil.rmtree(Path(order.directory).parent, ignore_errors=True)


def _prune(directory: Path, keep: int, live: frozenset[str] = frozenset()) -> None:
    """Remove the directories of episodes that are over, but for the newest ``keep``."""
    if not directory.exists():
        return
    over = sorted((place for place in directory.iterdir() if place.name not in live), key=_age)
    for place in over[: len(over) - keep] if len(over) > keep else []:
        shutil.rmtree(place, ignore_errors=True)


def _age(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except OSError:
        return 0.0
