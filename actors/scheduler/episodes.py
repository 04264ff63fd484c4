"""Episodes of a job: who drives each, and how it ends.

    rows that wait ──BeginEpisodes──▶ environment worker ──▶ EpisodeEnded ─┬─ reward ─────────▶ EpisodesEnded: scored
         ▲  (LeaseEpisode: agents outside)                                 │
         └── another life of its environment ◀── lost, failed, overdue ────┴─ spent ──────────▶ Dropped(reason)

Invariants
- An episode goes on from what the ledger has, whoever drives it: a driver's death costs no token of the model's.
- What is said in the name of an older life changes nothing. A life is durable before its driver hears of it, and an end
  before its driver is answered.
- What infrastructure did, or a failing environment, has no result: it begins again, and is dropped with the reason once
  it has failed ``environment.attempts`` times, or infrastructure ten times as often. The death of its worker, or of
  this scheduler, counts for nothing.
- A pause of the job costs no episode its time: one whose driver has let it pass meanwhile begins again, and goes on.
- After a restart of the scheduler, episodes wait for the workers that drive them, for ``limits.reattach_s``.
- Episodes of an evaluation begin in slots that no episode of a step wants; one that is begun keeps its slot.
- No more episodes are driven than questions may wait (``turns.py``), so that a turn always gets its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from actors.core.lease import LeaseIssuer
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.core.watch import Down
from actors.fleet.fleet import Fleet
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import NotAccepted
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
from actors.protocol.failures import FailureKind
from actors.scheduler.drivers import OUTSIDE, Drive, Driver, Drivers, Failed, WorkingTime
from actors.scheduler.episode_meter import EpisodeMeter
from actors.scheduler.episode_rows import EpisodeRows, Key, Place
from transport.address import PeerId
from transport.transport import SendOutcome

_LEASE_BITS: Final = 32
"""Bits of a lease's number below the term, so that a later life of the scheduler has higher numbers."""
_NEVER: Final = Failed(0, 0, "", -math.inf)
_LOSSES_AN_ATTEMPT: Final = 10
"""Failures of infrastructure that an episode may have for each of its attempts; beyond it, it may be what kills it."""


class Episodes:
    """It keeps the episodes of a job driven. Made after ``Opened``, once for each life of the scheduler."""

    def __init__(self, scope: JobScope, fleet: Fleet, rows: EpisodeRows, settled: Callable[[int], None]) -> None:
        """``settled`` is called after samples of a step were scored or dropped."""
        self._scope, self._fleet, self._rows, self._settled = scope, fleet, rows, settled
        self._ledger, self._config, self._limits = scope.ledger, scope.job.environment, scope.limits
        self._drivers = Drivers(scope.limits.ended_lives)
        self._time = WorkingTime(scope.ctx.now(), paused=scope.ledger.paused)
        self._meter = EpisodeMeter(scope.ledger, scope.limits)
        self._leases = scope.ledger.term << _LEASE_BITS
        self._failures: dict[Key, Failed] = {}
        """Failures of episodes that are not over."""
        self._told_of_drop = False
        begun = any(batch.lives.any() for batch in scope.ledger.batches.values())
        self._grace_s = scope.ctx.now() + scope.limits.reattach_s if begun else -math.inf
        """Time until which workers of an earlier life may come back with what they drive."""
        if self._config.kind == "external":
            self._take_up_outside()

    def _take_up_outside(self) -> None:
        """Agents outside need not notice that the scheduler was away."""
        self._drivers.add(outside := Driver(OUTSIDE, self._limits.episodes_driven_max))
        for batch in self._ledger.batches.values():
            for place in self._rows.open(batch):
                if batch.lives[place.row]:
                    self._drivers.give(outside, self._drive(place.name))

    # ------------------------------------------------------------ environment workers

    def register(self, offer: RegisterEnvironment) -> EnvironmentRegistered:
        """Raises:
        NotAccepted: somebody else offers it, or another life of that name was started in its stead.
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
        self._leases += 1
        driver.lease = LeaseIssuer(lasts_s=self._limits.lease_s, first_term=self._leases)
        driver.lease.issue(str(address.peer), scope.ctx.now())
        scope.ctx.watch(address)
        kept = [name for name in offer.running if self._goes_on(driver, name)]
        for drive in list(driver.driven.values()):
            if drive.name not in kept:  # it has let go of it, or has yet to hear that it is to begin it
                self._abandon(driver, drive.name)
        fields = {"slots": offer.slots, "running": len(offer.running), "kept": len(kept)}
        scope.event("environment_registered", worker=address.name, **fields)
        self.pump()
        return EnvironmentRegistered(scope.ledger.term, self._limits.lease_s, self._leases, kept)

    def _goes_on(self, driver: Driver, name: EpisodeName) -> bool:
        """Whether ``driver`` goes on with what it says it drives."""
        holder = self._drivers.of(Key.of(name))
        if isinstance(self._rows.find(name), str) or holder not in (None, driver):
            return False
        if holder is None:
            self._drivers.give(driver, self._drive(name))
        return True

    def renew(self, question: RenewLease) -> LeaseRenewed | None:
        """None: whoever asks is no environment worker of ours.

        Raises:
            NotAccepted: its lease has lapsed, or is another life's.
        """
        driver, sender = self._drivers.by_name.get(question.holder), self._scope.ctx.sender
        if driver is None or driver.lease is None or sender is None:
            return None
        lease = driver.lease.renew(str(sender.peer), question.lease, self._scope.ctx.now())
        if lease is None:
            raise NotAccepted(f"{question.holder} holds no such lease here: register anew")
        return LeaseRenewed(lease=lease.term, lease_s=lease.lasts_s)

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
        """Do what depends on time alone."""
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
        """Whether an episode has time left for no other reason than that the job was paused meanwhile."""
        driver = self._drivers.of(Key.of(name))
        return driver is not None and self.left_s(name) > 0 and driver.driven[Key.of(name)].stood_s < self._time.stood_s

    def pump(self) -> None:
        """Have begun what may be begun, in the order of steps and prompts, as far as there are slots.

        Called at each pause and its end, too, which the working time has to hear of.
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

    def _give(self, place: Place, driver: Driver) -> EpisodeWork:
        """The next life of its environment is with ``driver``, once the ledger knows of it."""
        name = EpisodeName(*place.key, place.name.attempt + 1)
        self._drivers.give(driver, self._drive(name))
        self._rows.tell(place.key)  # whoever waits in the name of its last life is to hear that it is replaced
        return EpisodeWork(name, place.context, self._config.episode_s)

    async def _tell_to_begin(self, driver: Driver, works: list[EpisodeWork]) -> None:
        """What cannot be said is begun anew."""
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
        """The next episode to an agent outside.

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
        """Batches that some worker may generate now: steps, the oldest first, and then evaluations."""
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

    def _without_driver(self, batch: StepBatch) -> Iterator[Place]:
        """Episodes of ``batch`` that somebody is to drive now."""
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

    # ------------------------------------------------------------ how they end

    async def ended(self, news: EpisodeEnded) -> None:
        """An environment says that it is over; what is said again, or by an older life, changes nothing."""
        self._scope.check_job(news.job)
        name, place = news.episode, self._rows.find(news.episode)
        if isinstance(place, Place):
            driver = self._drivers.of(Key.of(name))
            why, again = _no_result(news, place), news.cause == "time" and self._has_paused(name)
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
        await self._rows.durable()

    def _score(self, place: Place, news: EpisodeEnded) -> None:
        """Raises:
        NotAccepted: its parts are not as many as those of the step's other samples.
        """
        parts = np.array([news.parts], np.float64) if news.parts else None
        rewards = np.array([news.reward], np.float64)
        self._rows.apply(ev.EpisodesEnded(place.batch.step, place.rows, rewards, parts))

    def _over(self, place: Place) -> None:
        self._failures.pop(place.key, None)
        self._rows.tell(place.key)
        self._settled(place.batch.step)

    def _failed(self, name: EpisodeName, why: str, by: str) -> None:
        """This life of its environment has no result: another one, or none any more."""
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
        if not self._told_of_drop:  # at once; how many there are is told with each step
            self._told_of_drop = True
            scope.trouble("first_without_reward", f"an episode got no reward in {times + losses} tries: {why}")
        self._rows.apply(ev.Dropped(name.step, place.rows, why))
        self._over(place)

    def dropped(self, step: int) -> None:
        """Samples of ``step`` were set aside, perhaps ones that are driven."""
        batch = self._ledger.batches.get(step)
        if batch is None or batch.episodes is None:
            return
        for row in np.flatnonzero(batch.state == SampleState.DROPPED).tolist():
            place = Place(batch, row)
            if (driver := self._drivers.of(place.key)) is not None:
                self._abandon(driver, driver.driven[place.key].name)
            self._failures.pop(place.key, None)
            self._rows.tell(place.key)  # whoever asked may wait without a driver, too

    def committed(self, batch: StepBatch) -> dict[str, float]:
        """The columns of a committed step in metrics.jsonl; none where there are no episodes."""
        return {} if batch.episodes is None else self._meter.take(batch)

    def evaluated(self, batch: StepBatch) -> dict[str, float]:
        """What an evaluation says of its episodes; nothing where there are none."""
        return {} if batch.episodes is None else self._meter.take_evaluation(batch)


def _no_result(news: EpisodeEnded, place: Place) -> str | None:
    """Why an episode that has ended has no result; None: it has one."""
    if news.failure is not None:
        return f"{news.failure.kind}: {news.failure.message}"
    if news.reward is None or not math.isfinite(news.reward) or not all(map(math.isfinite, news.parts)):
        return f"{FailureKind.NO_RESULT}: its environment gave no finite number"
    if place.view().whole == 0:
        return f"{FailureKind.NO_RESULT}: its environment ended it before the model had said anything"
    return None
