"""The episodes of a job: which worker drives each, and how it ends.

    rows that wait ──BeginEpisodes──▶ environment worker ──▶ EpisodeEnded ─┬─ reward ─────────▶ EpisodesEnded: scored
         ▲  (LeaseEpisode: agents outside)                                 │
         └── another life of its environment ◀── lost, failed, overdue ────┴─ no attempt left ▶ Dropped(reason)

Invariants
- An episode goes on from the turns in the ledger, whichever worker drives it: a driver's death loses no token.
- Messages about an older life of an environment change nothing. A life is on disk before its driver hears of it, and an
  end before its driver gets an answer.
- An episode that fails, by its environment or by infrastructure, has no result: it begins again. It is dropped with the
  reason once its environment has failed ``environment.attempts`` times, or infrastructure ten times as often. The death
  of its worker, or of this scheduler, does not count.
- A pause of the job takes no time from an episode: if its driver has let the time pass meanwhile, it begins again and
  goes on.
- After a restart of the scheduler, episodes wait for the workers that drive them, for ``limits.reattach_s``.
- Episodes of an evaluation begin only in slots that no episode of a step needs; once begun, they keep their slots.
- No more episodes are driven than questions may wait (``turns.py``), so that a turn always gets its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from actors.core.lease import LeaseRoster
from actors.core.tenure import LeaseRenewed, RenewLease, renewed
from actors.core.watch import Down
from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.protocol.episodes import (
    AbandonEpisodes,
    BeginEpisodes,
    EnvironmentRegistered,
    EpisodeEnded,
    EpisodeLeased,
    EpisodeName,
    EpisodeWork,
    LeaseEpisode,
    RegisterEnvironment,
)
from actors.protocol.failures import EndedBefore, FailureKind, NotAccepted
from actors.protocol.rewards import beyond_limit
from actors.scheduler.drivers import OUTSIDE, Drive, Driver, Drivers, Failed, WorkingTime
from actors.scheduler.episode_meter import EpisodeMeter
from actors.scheduler.episode_rows import EpisodePlace, EpisodeRows, Key
from transport.address import PeerId
from transport.transport import SendOutcome

_NEVER: Final = Failed(0, 0, "", -math.inf)
_LOSSES_AN_ATTEMPT: Final = 10
"""Failures of infrastructure that an episode may have per attempt; with more, the episode itself may cause them."""


class Episodes:
    """``Episodes`` has a job's episodes driven by workers. It is made after ``Opened``, once per scheduler's life."""

    def __init__(self, scope: JobScope, fleet: Fleet, rows: EpisodeRows, settled: Callable[[int], None]) -> None:
        """``settled`` is called after samples of a step were scored or dropped."""
        self._scope, self._fleet, self._rows, self._settled = scope, fleet, rows, settled
        self._ledger, self._config, self._limits = scope.ledger, scope.job.environment, scope.limits
        self._drivers = Drivers(scope.limits.ended_lives)
        self._time = WorkingTime(scope.ctx.now(), paused=scope.ledger.paused)
        self._meter = EpisodeMeter(scope.ledger, scope.limits)
        self._leases = LeaseRoster(lasts_s=self._limits.lease_s, leader_term=scope.ledger.term)
        self._failures: dict[Key, Failed] = {}
        """Failures so far of episodes that are not over."""
        self._told_of_drop = False
        begun = any(batch.lives.any() for batch in scope.ledger.batches.values())
        self._grace_s = scope.ctx.now() + scope.limits.reattach_s if begun else -math.inf
        """Time until which workers of an earlier life of the scheduler may come back with their episodes."""
        if self._config.kind == "external":
            self._take_up_outside()

    def _take_up_outside(self) -> None:
        """Let agents outside go on with their episodes, as if the scheduler had not been away."""
        self._drivers.add(outside := Driver(OUTSIDE, self._limits.episodes_driven_max))
        for batch in self._ledger.batches.values():
            for place in self._rows.open(batch):
                if batch.lives[place.row]:
                    self._drivers.give(outside, self._drive(place.name))

    # ------------------------------------------------------------ environment workers

    def register(self, offer: RegisterEnvironment) -> EnvironmentRegistered:
        """Raises:
        NotAccepted: another process makes the offer, or another life of that name was started in its place.
        """
        self._scope.check_job(offer.job)
        scope, address = self._scope, offer.worker
        sender = scope.ctx.sender
        if sender is None or sender.peer != address.peer:
            raise NotAccepted(f"{sender} offers {address}: a worker registers itself")
        if self._drivers.has_replaced(address):
            raise NotAccepted(f"another life of {address.name} has replaced {address}")
        before = self._drivers.by_name.get(address.name)
        if before is not None and before.address is not None:
            scope.ctx.unwatch(before.address)
        driver = self._drivers.next_life(address, offer.slots)
        driver.lease = self._leases.grant(str(address.peer), scope.ctx.now())
        scope.ctx.watch(address)
        kept = [name for name in offer.running if self._goes_on(driver, name)]
        for drive in list(driver.driven.values()):
            if drive.name not in kept:  # the worker has dropped it, or has not been told of it yet
                self._abandon(driver, drive.name)
        fields = {"slots": offer.slots, "running": len(offer.running), "kept": len(kept)}
        scope.event("environment_registered", worker=address.name, **fields)
        self.pump()
        return EnvironmentRegistered(scope.ledger.term, self._leases.lasts_s, self._leases.newest, kept)

    def _goes_on(self, driver: Driver, name: EpisodeName) -> bool:
        """Whether ``driver`` may go on with an episode that it says it drives."""
        holder = self._drivers.of(Key.of(name))
        if isinstance(self._rows.find(name), str) or holder not in (None, driver):
            return False
        if holder is None:
            self._drivers.give(driver, self._drive(name))
        return True

    def renew(self, question: RenewLease) -> LeaseRenewed | None:
        """Renew the lease of an environment worker; None if the asker is none of ours.

        Raises:
            NotAccepted: its lease has lapsed, or belongs to another life.
        """
        driver, sender = self._drivers.by_name.get(question.holder), self._scope.ctx.sender
        if driver is None or driver.lease is None or sender is None:
            return None
        answer = renewed(driver.lease, question, str(sender.peer), self._scope.ctx.now())
        if answer is None:
            raise NotAccepted(f"{question.holder} holds no such lease here: register anew")
        return answer

    def down(self, news: Down) -> None:
        """A link has ended, perhaps that to an environment worker."""
        driver = self._drivers.by_name.get(news.address.name)
        if driver is not None and driver.address is not None and driver.address.peer == news.address.peer:
            self._lose(driver, f"{news.reason} {news.detail}".strip())

    def _lose(self, driver: Driver, why: str) -> None:
        left = self._drivers.lose(driver)
        self._scope.event("environment_lost", worker=driver.name, episodes=len(left), why=why)
        self.pump()

    def tick(self, now: float) -> None:
        """Do everything that depends on time alone."""
        for driver in [driver for driver in self._drivers.by_name.values() if driver.has_lapsed(now)]:
            if driver.address is not None:
                self._scope.ctx.unwatch(driver.address)
            self._lose(driver, "its lease has lapsed")
        for driver, drive in self._drivers.overdue(self._worked_s()):
            self._abandon(driver, drive.name)
            why = f"it has not ended within environment.episode_s={self._config.episode_s:g} s"
            self._failed(drive.name, f"{FailureKind.NO_RESULT}: {why}", driver.name)
        self.pump()

    # ------------------------------------------------------------ who drives what

    def leases(self) -> list[tuple[PeerId, float]]:
        """Each worker's process, and the loop time at which its lease ends unless it is renewed."""
        drivers = self._drivers.by_name.values()
        return [(d.address.peer, d.lease.expires_s) for d in drivers if d.address is not None and d.lease is not None]

    def left_s(self, name: EpisodeName) -> float:
        """Seconds that an episode still has."""
        driver = self._drivers.of(Key.of(name))
        passed_s = 0.0 if driver is None else self._worked_s() - driver.driven[Key.of(name)].begun_s
        return max(0.0, self._config.episode_s - passed_s)

    def _has_paused(self, name: EpisodeName) -> bool:
        """Whether an episode has time left only because the job was paused meanwhile."""
        driver = self._drivers.of(Key.of(name))
        return driver is not None and self.left_s(name) > 0 and driver.driven[Key.of(name)].stood_s < self._time.stood_s

    def pump(self) -> None:
        """Let episodes begin that may, in the order of steps and prompts, as far as there are slots.

        Also to be called when a pause begins or ends, so that ``WorkingTime`` leaves the pause out.
        """
        self._worked_s()
        if self._ledger.paused or not self._room or self._drivers.freest("") is None:
            return
        begun: dict[str, list[EpisodeWork]] = {}
        for batch in self._may_begin():
            rows: list[int] = []
            for place in self._without_driver(batch):
                driver = self._drivers.freest(self._failures.get(place.key, _NEVER).by) if self._room else None
                if driver is None:
                    break
                begun.setdefault(driver.name, []).append(self._give(place, driver))
                rows.append(place.row)
            if rows:
                self._rows.apply(ev.EpisodesBegun(batch.step, np.array(rows, np.int32)))
        for name, works in begun.items():
            self._scope.ctx.start_task(self._tell_to_begin(self._drivers.by_name[name], works), f"begin at {name}")

    @property
    def _room(self) -> bool:
        return len(self._drivers) < self._limits.episodes_driven_max

    def _give(self, place: EpisodePlace, driver: Driver) -> EpisodeWork:
        """Give the next life of an episode's environment to ``driver``; the caller enters it in the ledger."""
        name = EpisodeName(*place.key, place.name.attempt + 1)
        self._drivers.give(driver, self._drive(name))
        self._rows.tell(place.key)  # those who wait for its last life must hear that it is replaced
        return EpisodeWork(name, place.context, self._config.episode_s)

    async def _tell_to_begin(self, driver: Driver, works: list[EpisodeWork]) -> None:
        """Tell ``driver`` to begin episodes, once they are on disk; those that cannot be sent are released."""
        await self._rows.durable()
        still = [work for work in works if self._drivers.drives(driver, work.name)]
        if not still or driver.address is None:
            return
        order = BeginEpisodes(job=self._scope.name, term=self._ledger.term, episodes=still)
        if self._scope.tell(driver.address, order) is not SendOutcome.QUEUED:
            for work in still:
                self._drivers.release(Key.of(work.name))

    def _abandon(self, driver: Driver, name: EpisodeName) -> None:
        self._drivers.release(Key.of(name))
        if driver.address is not None:
            self._scope.tell(driver.address, AbandonEpisodes(self._scope.name, self._ledger.term, [name]))

    async def lease(self, question: LeaseEpisode) -> EpisodeLeased:
        """Give the next episode to an agent outside.

        Raises:
            NotAccepted: the job has environments of its own.
        """
        self._scope.check_job(question.job)
        if self._config.kind != "external":
            raise NotAccepted(f"environment.kind is {self._config.kind}: only an external one is driven from outside")
        found = next((place for batch in self._may_begin() for place in self._without_driver(batch)), None)
        if self._ledger.paused or not self._room or found is None:
            return EpisodeLeased(None, self._limits.scheduler_tick_s)
        work = self._give(found, self._drivers.by_name[OUTSIDE])
        self._rows.apply(ev.EpisodesBegun(found.batch.step, found.rows))
        await self._rows.durable()
        return EpisodeLeased(work)

    def _may_begin(self) -> Iterator[StepBatch]:
        """Batches whose episodes may begin now: steps, the oldest first, and then evaluations."""
        yield from self._steps_that_may_begin()
        yield from (self._ledger.batches[step] for step in self._ledger.evaluations)

    def _steps_that_may_begin(self) -> Iterator[StepBatch]:
        scope, ledger = self._scope, self._ledger
        last = min(ledger.issued_steps - 1, self._fleet.versions.newest + scope.job.staleness)
        for step in range(ledger.committed_steps, last + 1):
            batch = ledger.batches.get(step)
            if batch is not None and batch.episodes is not None and batch.generating:
                yield batch
                if scope.job.sync.mode == "one_step_barrier":
                    return

    def _without_driver(self, batch: StepBatch) -> Iterator[EpisodePlace]:
        """Episodes of ``batch`` that need a driver now."""
        now = self._scope.ctx.now()
        driven_here = self._config.kind != "external"
        awaited = driven_here and now < self._grace_s and self._drivers.workers < self._config.workers
        for place in self._rows.open(batch):
            if place.key in self._drivers or now < self._failures.get(place.key, _NEVER).rests_until_s:
                continue
            if not (awaited and batch.lives[place.row]):
                yield place

    def _drive(self, name: EpisodeName) -> Drive:
        now = self._worked_s()
        return Drive(name, now, now + self._config.episode_s + self._limits.episode_overdue_s, self._time.stood_s)

    def _worked_s(self) -> float:
        return self._time.read(self._scope.ctx.now(), paused=self._ledger.paused)

    async def gateway_moved(self) -> None:
        """End the present life of every episode: its agent has an address that may be somebody else's now.

        Another life begins as soon as there is a driver, and the keys of the old one are good for nothing.
        """
        for batch in self._ledger.batches.values():
            begun = [place for place in self._rows.open(batch) if batch.lives[place.row]] if batch.episodes else []
            for place in begun:
                if (driver := self._drivers.of(place.key)) is not None:
                    self._abandon(driver, place.name)
            if begun:
                self._rows.apply(ev.EpisodesBegun(batch.step, np.array([place.row for place in begun], np.int32)))
                self._scope.event("episodes_moved", step=batch.step, episodes=len(begun))
            for place in begun:
                self._rows.tell(place.key)
        await self._rows.durable()
        self.pump()

    # ------------------------------------------------------------ how they end

    async def ended(self, news: EpisodeEnded) -> None:
        """An environment reports the end of an episode; repetitions, and reports of older lives, change nothing.

        Raises:
            EndedBefore: the episode has ended with another reward.
        """
        self._scope.check_job(news.job)
        name, place = news.episode, self._rows.find(news.episode)
        if isinstance(place, EpisodePlace):
            driver = self._drivers.of(Key.of(name))
            why = _no_result(news, place, self._scope.job.reward.limit)
            again = news.cause == "time" and self._has_paused(name)
            if why is None and not again:
                self._score(place, news)
            drive = self._drivers.release(Key.of(name))
            if again:
                self._scope.ctx.log.info("an episode's time has passed in a pause; it begins again", episode=str(name))
            elif why is not None:
                self._failed(name, why, driver.name if driver is not None else "")
            else:
                self._meter.ended(news, None if drive is None else self._worked_s() - drive.begun_s)
                self._over(place)
            self.pump()
        elif (known := self._rows.reward(name)) is not None and known != news.reward:
            raise EndedBefore(f"it has ended with the reward {known:g}, which stays: end an episode once")
        await self._rows.durable()

    def _score(self, place: EpisodePlace, news: EpisodeEnded) -> None:
        """Raises:
        NotAccepted: the reward has another number of parts than those of the step's other samples.
        """
        parts = np.array([news.parts], np.float64) if news.parts else None
        rewards = np.array([news.reward], np.float64)
        end = ev.EpisodesEnded(place.batch.step, place.rows, rewards, parts, cause=news.cause, keeps_turn=True)
        self._rows.apply(end)

    def _over(self, place: EpisodePlace) -> None:
        self._failures.pop(place.key, None)
        self._rows.tell(place.key)
        self._settled(place.batch.step)

    def _failed(self, name: EpisodeName, why: str, by: str) -> None:
        """A life of an episode's environment has no result: try again later, or drop the episode."""
        scope, place = self._scope, self._rows.find(name)
        if isinstance(place, str):
            return
        before = self._failures.get(place.key, _NEVER)
        lost = why.startswith(FailureKind.INFRASTRUCTURE)
        times, losses = before.times + (not lost), before.losses + lost
        fields = {"step": name.step, "prompt": name.prompt, "sibling": name.sibling, "attempt": name.attempt}
        scope.event("episode_failed", **fields, failures=times, losses=losses, why=why)
        if times < self._config.attempts and losses < _LOSSES_AN_ATTEMPT * self._config.attempts:
            pause_s = self._limits.backoff_first_s * 2 ** min(times + losses - 1, 16)
            rests_until_s = scope.ctx.now() + min(pause_s, self._limits.backoff_max_s)
            self._failures[place.key] = Failed(times, losses, by, rests_until_s)
            return
        scope.event("samples_dropped", step=name.step, samples=1, why=why)
        if not self._told_of_drop:  # report the first at once; each step reports their number
            self._told_of_drop = True
            scope.trouble("first_without_reward", f"an episode got no reward in {times + losses} tries: {why}")
        self._rows.apply(ev.Dropped(name.step, place.rows, why))
        self._over(place)

    def dropped(self, step: int) -> None:
        """Samples of ``step`` were dropped: stop those that are being driven."""
        batch = self._ledger.batches.get(step)
        if batch is None or batch.episodes is None:
            return
        for row in np.flatnonzero(batch.state == SampleState.DROPPED).tolist():
            place = EpisodePlace(batch, row)
            if (driver := self._drivers.of(place.key)) is not None:
                self._abandon(driver, driver.driven[place.key].name)
            self._failures.pop(place.key, None)
            self._rows.tell(place.key)  # a question may wait even without a driver

    def committed(self, batch: StepBatch) -> dict[str, float]:
        """The columns of a committed step in metrics.jsonl; none where there are no episodes."""
        return {} if batch.episodes is None else self._meter.take(batch)

    def evaluated(self, batch: StepBatch) -> dict[str, float]:
        """The metrics of an evaluation's episodes; none where there are no episodes."""
        return {} if batch.episodes is None else self._meter.take_evaluation(batch)


def _no_result(news: EpisodeEnded, place: EpisodePlace, limit: float) -> str | None:
    """Why an episode that has ended has no result; None if it has one. ``limit``: the job's ``reward.limit``."""
    if news.failure is not None:
        return f"{news.failure.kind}: {news.failure.message}"
    if news.reward is None or not math.isfinite(news.reward) or not all(map(math.isfinite, news.parts)):
        return f"{FailureKind.NO_RESULT}: its environment gave no finite number"
    if beyond := beyond_limit([news.reward, *news.parts], limit):
        return f"{FailureKind.NO_RESULT}: its environment gave {beyond}"
    if not (place.view().marks >= 0).any():
        return f"{FailureKind.NO_RESULT}: its environment ended it before the model had said anything"
    return None
