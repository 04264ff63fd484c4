"""A hybrid cluster, step by step: reserved machines that generate and train, and remote workers that come and go.

    begin ─▶ weights: local engines at once, remote ones pull ─▶ all generate ─▶ window over: local ones hand over
          ─▶ trainer takes micro-batches of whole groups as they arrive ─▶ all trained ─▶ optimizer ─▶ next step
    without a remote worker the window has no end; when all are lost after it, the local engines go on

Decisions are those of the live policies: ``offload`` (window, target), ``balance`` (who gets what, who gives up what),
``migrate`` (what becomes of the samples of a worker that goes). What is simulated is time. One version a step: strictly
on-policy. Spot machines come and go by a trace of events; more than the target are never taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.policies import balance, migrate, offload
from actors.policies.generation_time import Instance
from benchmarks.papers.cluster.costs import MACHINE_DEVICES, rollout_instance, train_token_s
from benchmarks.papers.cluster.moving_engine import MovingEngine, Sample
from benchmarks.papers.setups.rlboost import H100, HybridModel, HybridSetup
from supervisors.providers.traces import TraceEvent

HOUR_S = 3600.0
_TICKS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step came to."""

    began_s: float
    seconds: float
    tokens: int
    seed_s: float
    """The window that it was given."""
    target: int
    """N_prem after it."""
    remote_mean: float
    remote_next: int
    cost: float
    """Of all machines in that time."""


@dataclass(slots=True)
class Options:
    """What is compared."""

    seeding: bool = True
    remember: bool = True
    keep_tokens: bool = True
    target: int | None = None
    """Remote workers taken at most; None: as the policy says."""
    fixed_seed_s: float | None = None
    """A window that does not adapt."""


@dataclass(slots=True, eq=False)
class Remote:
    """A remote worker."""

    engine: MovingEngine
    booted_s: float
    ready_s: float = math.inf
    """When it serves this step's version."""


class HybridCluster:
    """One job. ``events`` must be in order; ``step`` goes on from where the last one ended."""

    def __init__(
        self, model: HybridModel, setup: HybridSetup, options: Options, events: Iterable[TraceEvent] = (), seed: int = 0
    ) -> None:
        self.model, self.setup, self.options = model, setup, options
        self.now_s = 0.0
        self._events = deque(events)
        self._rng = np.random.default_rng(seed)
        transformer = model.transformer
        devices = model.machines * MACHINE_DEVICES
        self._device, self._devices = H100, devices
        self._instance: Instance = rollout_instance(
            transformer, H100, setup.decode, places=setup.places, reserve_tokens=0
        )
        self._train_cost = setup.train.model_copy(update={"flops_use": model.train_flops_use})
        alone = setup.decode.model_copy(update={"memory_use": setup.remote_memory_use})
        self._remote_instance = rollout_instance(transformer, H100, alone, places=setup.places, reserve_tokens=0)
        self.local = [MovingEngine(f"local-{i}", self._instance) for i in range(devices // transformer.tensor_parallel)]
        self.remote: dict[str, Remote] = {}
        self._offered: dict[str, str] = {}
        self._rules = offload.OffloadRules(
            len(self.local), setup.first_seed_s, setup.damping, remember=options.remember
        )
        self.known = offload.first(self._rules)
        self._plateau: int | None = None

    # ------------------------------------------------------------ workload

    def draw(self) -> list[Sample]:
        """A step's samples, group by group."""
        setup, lengths = self.setup, self.model.lengths
        groups = self._rng.standard_normal(setup.prompts)
        count = setup.prompts * setup.group_size
        own = self._rng.standard_normal(count)
        shared = np.repeat(groups, setup.group_size)
        normal = math.sqrt(lengths.of_prompt) * shared + math.sqrt(1 - lengths.of_prompt) * own
        tokens = np.clip(lengths.median_tokens * np.exp(lengths.sigma * normal), 16, lengths.max_tokens).astype(int)
        return [Sample(i, i // setup.group_size, setup.prompt_tokens, int(length)) for i, length in enumerate(tokens)]

    def train_s(self, samples: Sequence[Sample]) -> float:
        """Of one micro-batch, on all reserved devices."""
        tokens = np.array([s.prompt_tokens + s.length for s in samples])
        return float(train_token_s(self.model.transformer, self._device, self._train_cost, self._devices, tokens).sum())

    def colocated_step_s(self, samples: Sequence[Sample]) -> float:
        """A step of the reserved machines alone, as colocated trainers do it: shares fixed beforehand, stages apart."""
        engines = [MovingEngine(f"{i}", self._instance) for i in range(len(self.local))]
        for i, engine in enumerate(engines):
            engine.pending.extend(samples[i * len(samples) // len(engines) : (i + 1) * len(samples) // len(engines)])
            engine.admit()
        ends: list[float] = []
        for engine in engines:
            while engine.running:
                engine.advance(engine.next_s())
                engine.take_finished()
            ends.append(engine.now_s)
        return max(ends) + 2 * self.setup.switch_s + self.train_s(samples) + self.setup.train.step_s

    # ------------------------------------------------------------ one step

    def step(self, samples: list[Sample]) -> StepFigures:
        """Generate and train ``samples``; the clock goes on by as much as that takes."""
        run = _Step(self, samples)
        run.go()
        return run.figures()

    def follow_events(self, on_gone: Callable[[Remote], None], on_up: Callable[[Remote], None]) -> None:
        """All that the trace says of the time up to now."""
        while self._events and self._events[0].at_s <= self.now_s + 1e-9:
            event = self._events.popleft()
            if event.what == "up":
                self._offered[event.node] = event.kind
            elif event.what == "kill":
                self._offered.pop(event.node, None)
                gone = self.remote.pop(event.node, None)
                if gone is not None:
                    on_gone(gone)
            self.take_offered(on_up)
        self.take_offered(on_up)

    def take_offered(self, on_up: Callable[[Remote], None]) -> None:
        """Machines up to the target."""
        target = self.known.target if self.options.target is None else self.options.target
        wanted = offload.to_start(offload.Offload(0.0, target), available=len(self._offered), running=len(self.remote))
        for node in list(self._offered)[:wanted]:
            del self._offered[node]
            engine = MovingEngine(node, self._remote_instance, now_s=self.now_s)
            self.remote[node] = Remote(engine, self.now_s + self.setup.boot_s)
            on_up(self.remote[node])

    def expect(self, events: Iterable[TraceEvent]) -> None:
        """More of the trace, in order and later than what it has said so far."""
        self._events.extend(events)

    def window_s(self) -> float:
        """For a step that begins now; with no remote worker, for the case that one comes before all is generated."""
        options = self.options
        if not options.seeding:
            return 0.0
        if options.fixed_seed_s is not None:
            return options.fixed_seed_s
        return offload.window_s(self._rules, self.known, len(self.remote)) if self.remote else self.known.seed_s

    @property
    def next_event_s(self) -> float:
        return self._events[0].at_s if self._events else math.inf

    def place_now(self, count: int) -> None:
        """``count`` remote workers are there from the beginning, booted."""
        for i in range(count):
            engine = MovingEngine(f"fixed-{i}", self._remote_instance, now_s=self.now_s)
            self.remote[engine.name] = Remote(engine, self.now_s)

    def pull_s(self, pulling: int) -> float:
        """A version, to each of so many at once."""
        senders = self.model.machines * self.setup.reserved_network_bytes_s
        rate = min(self.setup.remote_network_bytes_s, senders / max(1, pulling))
        return self.model.transformer.weight_bytes / rate + self.setup.load_s

    def measured_plateau(self) -> int | None:
        return self._plateau

    def learn_plateau(self, context_tokens: float) -> None:
        """The table that workers have filled in during a step: throughput by batch, at its mean context."""
        pace = self._instance.pace
        fits = max(1, int(self._instance.kv_tokens / max(1.0, context_tokens)))
        batches = [b for b in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if b <= fits]
        self._plateau = balance.plateau({b: b / pace.step_s(b, context_tokens) for b in batches}, gain=0.1)


@dataclass(slots=True, eq=False)
class _Trainer:
    """Takes whole groups."""

    missing: dict[int, int]
    arrived: list[Sample] = field(default_factory=list[Sample])
    """Whose group is complete."""
    waiting: dict[int, list[Sample]] = field(default_factory=dict[int, list[Sample]])
    on: bool = False
    free_s: float = math.inf
    busy_s: float = 0.0
    began_s: float = math.nan
    left: int = 0

    def receive(self, sample: Sample) -> None:
        group = self.waiting.setdefault(sample.group, [])
        group.append(sample)
        self.missing[sample.group] -= 1
        if not self.missing[sample.group]:
            self.arrived += self.waiting.pop(sample.group)


class _Step:
    """One step of a HybridCluster, event by event."""

    def __init__(self, cluster: HybridCluster, samples: list[Sample]) -> None:
        self.c = cluster
        self.began_s = cluster.now_s
        self.samples = samples
        self.queue: deque[Sample] = deque(samples)
        missing: dict[int, int] = {}
        for sample in samples:
            missing[sample.group] = missing.get(sample.group, 0) + 1
        self.trainer = _Trainer(missing, left=len(samples))
        self.generating_locally = True
        self.switch_done_s = math.inf
        self.window_from_s = self.began_s + cluster.setup.switch_s
        self.last_response_s = self.began_s
        self.unfinished = len(samples)
        self.remote_s = 0.0  # machines · seconds
        self.cost = 0.0
        self.remote_busy_s = 0.0
        self.next_look_s = self.began_s
        self.seed_s = 0.0

    # ------------------------------------------------------------ the loop

    def go(self) -> None:
        c = self.c
        for engine in c.local:
            engine.now_s, engine.busy_s = self.window_from_s, 0.0
        c.follow_events(lambda _: None, lambda _: None)
        self.seed_s = c.window_s()
        for remote in c.remote.values():
            remote.engine.busy_s = 0.0
            remote.ready_s = math.inf
        self._order_pulls()
        for _ in range(_TICKS_MAX):
            self._act()
            if self.trainer.left == 0 and self.trainer.free_s <= c.now_s:
                break
            self._advance(self._next_s())
        else:
            raise RuntimeError("a step of the simulated cluster does not end: a bug of the model")
        self._advance(c.now_s + c.setup.train.step_s)

    def _order_pulls(self) -> None:
        """Each remote worker pulls the new version as soon as it can; those that pull at once share the senders."""
        c = self.c
        waiting = [r for r in c.remote.values() if math.isinf(r.ready_s)]
        pull_s = c.pull_s(len(waiting))
        for remote in waiting:
            remote.ready_s = max(c.now_s, remote.booted_s, self.began_s) + pull_s

    def _next_s(self) -> float:
        c, now_s = self.c, self.c.now_s
        times = [e.next_s() for e in self._engines()]
        times += [r.ready_s for r in c.remote.values() if r.ready_s > now_s]
        times += [c.next_event_s, self.trainer.free_s if self.trainer.free_s > now_s else math.inf]
        if self.generating_locally:
            times.append(self.window_from_s if self.window_from_s > now_s else math.inf)
            window_ends_s = self.window_from_s + self.seed_s
            times.append(window_ends_s if window_ends_s > now_s else math.inf)
        if self.switch_done_s > now_s:
            times.append(self.switch_done_s)
        if self._serving_remotes() and self.unfinished:
            times.append(max(self.next_look_s, now_s + 1e-9))
        return min(times)

    def _engines(self) -> list[MovingEngine]:
        remote = [r.engine for r in self._serving_remotes()]
        return [*self._serving_locals(), *remote]

    def _serving_locals(self) -> list[MovingEngine]:
        return self.c.local if self.generating_locally and self.window_from_s <= self.c.now_s else []

    def _serving_remotes(self) -> list[Remote]:
        return [r for r in self.c.remote.values() if r.ready_s <= self.c.now_s]

    def _advance(self, to_s: float) -> None:
        c = self.c
        lasts_s = to_s - c.now_s
        present = len(c.remote)
        self.remote_s += present * lasts_s
        hourly = c.model.machines * c.setup.reserved_price + present * c.setup.spot_price
        self.cost += hourly * lasts_s / HOUR_S
        for engine in self._engines():
            engine.advance(to_s)
        c.now_s = to_s
        for engine in (*c.local, *(r.engine for r in c.remote.values())):
            engine.now_s = max(engine.now_s, to_s)  # it stood still

    def _act(self) -> None:
        """All that is due now."""
        c = self.c
        for engine in self._engines():
            for sample in engine.take_finished():
                self.unfinished -= 1
                self.last_response_s = c.now_s
                self.trainer.receive(sample)
        c.follow_events(self._lost, lambda _: None)
        self._order_pulls()
        self._window()
        self._dispatch()
        if c.now_s >= self.next_look_s:
            self.next_look_s = c.now_s + c.setup.balance_every_s
            self._balance()
        self._train()

    # ------------------------------------------------------------ who generates

    def _window(self) -> None:
        """Hand over, or take up generation again."""
        c, now_s, trainer = self.c, self.c.now_s, self.trainer
        there = bool(self._serving_remotes()) or (not c.options.seeding and bool(c.remote))
        over = self.unfinished == 0 or (there and now_s >= self.window_from_s + self.seed_s)
        if self.generating_locally and over:
            self.generating_locally = False
            for engine in c.local:
                self._hand_over(engine, keep=True)
            self.switch_done_s = now_s + c.setup.switch_s
        if not trainer.on and not self.generating_locally and now_s >= self.switch_done_s:
            trainer.on, trainer.began_s, trainer.free_s = True, now_s, now_s
        idle = trainer.on and trainer.free_s <= now_s and not self._can_train()
        if idle and self.unfinished and not c.remote:  # all remote workers are lost: fall back to colocation
            trainer.on = False
            self.generating_locally, self.window_from_s = True, now_s + c.setup.switch_s
            self.seed_s = max(self.seed_s, 1.0)

    def _hand_over(self, engine: MovingEngine, *, keep: bool) -> None:
        held = {sample.number: sample for sample in engine.held()}
        views = [
            migrate.HeldSample(s.number, self._tokens(engine, s), s.number in engine.running, s.length)
            for s in held.values()
        ]
        moves = migrate.decide(views, 0.0, keep_tokens=keep)
        for move in reversed(moves):
            sample = engine.take(held[move.sample])
            sample.kept = move.keep
            self.queue.appendleft(sample)

    @staticmethod
    def _tokens(engine: MovingEngine, sample: Sample) -> int:
        return engine.tokens(sample) if sample.number in engine.running else int(sample.kept)

    def _lost(self, remote: Remote) -> None:
        remote.engine.advance(self.c.now_s)
        self.remote_busy_s += remote.engine.busy_s
        self._hand_over(remote.engine, keep=self.c.options.keep_tokens)

    # ------------------------------------------------------------ who gets what

    def _views(self) -> list[balance.QueueView]:
        plateau = self.c.measured_plateau()
        return [
            balance.QueueView(e.name, len(e.pending), len(e.running), self._slots(e), plateau) for e in self._engines()
        ]

    def _slots(self, engine: MovingEngine) -> int:
        """What the KV cache leaves of its places, at the mean context of what it runs."""
        instance = engine.instance
        if not engine.running:
            return instance.places
        room = 0.95 * instance.kv_tokens - engine.context
        mean = engine.context / len(engine.running)
        return min(instance.places, len(engine.running) + max(0, int(room / max(mean, 1.0))))

    def _dispatch(self) -> None:
        """Capped join-shortest-queue; the rest is held back."""
        engines = {e.name: e for e in self._engines()}
        while self.queue and engines:
            views = [
                balance.QueueView(e.name, len(e.pending), len(e.running), e.instance.places) for e in engines.values()
            ]
            name = balance.shortest(views, self.c.setup.pending_cap)
            if name is None:
                break
            engines[name].pending.append(self.queue.popleft())
            engines[name].admit()

    def _balance(self) -> None:
        views = self._views()
        if len(views) < 2:
            return
        engines = {e.name: e for e in self._engines()}
        for move in balance.decide(views):
            source, target = engines[move.source], engines[move.target]
            if move.running:
                chosen = sorted(source.running.values(), key=source.tokens)[: move.count]
            else:
                chosen = list(source.pending)[-move.count :]
            for sample in chosen:
                target.pending.append(source.take(sample))
            source.admit()
            target.admit()

    # ------------------------------------------------------------ training

    def _can_train(self) -> bool:
        enough = len(self.trainer.arrived) >= self.c.setup.micro_batch_responses
        return enough or (bool(self.trainer.arrived) and self.unfinished == 0)

    def _train(self) -> None:
        trainer, now_s = self.trainer, self.c.now_s
        if not trainer.on or trainer.free_s > now_s or not self._can_train():
            return
        batch, trainer.arrived = trainer.arrived, []
        batch_s = self.c.train_s(batch)
        trainer.free_s = now_s + batch_s
        trainer.busy_s += batch_s
        trainer.left -= len(batch)

    # ------------------------------------------------------------ what it came to

    def figures(self) -> StepFigures:
        c = self.c
        seconds = c.now_s - self.began_s
        used_s = self.seed_s
        remote_mean = self.remote_s / seconds
        remote_mean = round(remote_mean) if abs(remote_mean - round(remote_mean)) < 1e-6 else remote_mean
        busy = self.remote_busy_s + sum(r.engine.busy_s for r in c.remote.values())
        report = offload.StepReport(
            remote_mean=remote_mean,
            remote_next=len(c.remote),
            train_idle_s=max(0.0, c.now_s - c.setup.train.step_s - self.trainer.began_s - self.trainer.busy_s),
            remote_idle_s=c.now_s - self.last_response_s,
            train_s=self.trainer.busy_s,
            remote_s=busy / remote_mean if remote_mean else 0.0,
            seed_s=used_s,
        )
        if c.options.seeding and c.options.fixed_seed_s is None:
            c.known = offload.after_step(c._rules, c.known, report)  # noqa: SLF001  a step is the cluster's own
        tokens = sum(s.prompt_tokens + s.length for s in self.samples)
        c.learn_plateau(c.setup.prompt_tokens + tokens / len(self.samples) / 2)
        return StepFigures(self.began_s, seconds, tokens, used_s, c.known.target, remote_mean, len(c.remote), self.cost)
