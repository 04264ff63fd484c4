"""Who generates what in a combined cluster: from the queues to engines, from one engine to another, and back.

    queues, older steps first ──the engine that runs least of those with room──▶ engines ──balance──▶ engines
       ▲                 a machine goes, or hands over: with their tokens                    │
       └─────────────────────────────────────────────────────────────────────────────────────┘

Invariants
- A sample of step s runs on engines that serve version s - k or a newer one, and never goes back to an older one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from actors.policies.assigning import balance, migrate, relieve
from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.moving_engine import ADMIT, MovingEngine, Sample
from benchmarks.papers.cluster.overlapping.pool import Engine
from benchmarks.papers.cluster.overlapping.settings import NEVER_S, Rules
from benchmarks.papers.cluster.overlapping.steps import SAMPLES_MAX, Step, Steps

_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def touch(one: Engine, steps: Steps, now_s: float) -> bool:
    """Bring an engine to now, with what it has finished; returns whether that is anything."""
    one.engine.advance(now_s)
    done = one.engine.take_finished()
    for sample in done:
        del one.booked[sample.number]
        steps.finished(sample)
    one.next_s = one.engine.next_s()
    return bool(done)


def dispatch(steps: Steps, awake: list[Engine], rules: Rules, now_s: float) -> None:
    """Give samples from the queues, older steps first, to the engine that runs least of those with room."""
    for number in sorted(steps.open):
        step, need = steps.open[number], number - rules.staleness
        able = [e for e in awake if e.version >= need]
        for one in able:
            one.engine.advance(now_s)
        while step.queue and able:
            sample = step.queue[0]
            least = step.version.get(sample.number, 0)
            one = _best([e for e in able if e.version >= least], sample, _to_book(steps, sample), rules.pending_cap)
            if one is None:
                break
            _give(steps, one, step.queue.popleft(), now_s)
        if step.queue:
            return


def _best(able: list[Engine], sample: Sample, tokens: float, cap: int) -> Engine | None:
    if not cap:
        open_ = [e for e in able if e.has_room(sample, tokens)]
        return min(open_, key=lambda e: (len(e.engine.running), e.engine.context), default=None)
    return shortest(able, cap)


def shortest(able: Iterable[Engine], cap: int) -> Engine | None:
    """RLBoost's capped join-shortest-queue: of those whose queue is below ``cap`` the shortest; None: hold it back."""
    open_ = [e for e in able if len(e.engine.pending) < cap]
    return min(
        open_, key=lambda e: (len(e.engine.pending), len(e.engine.running) / e.engine.instance.places), default=None
    )


def take_back(steps: Steps, one: Engine, now_s: float, *, keep_tokens: bool = True) -> None:
    """Put all that an engine holds back into the queues, before what waits there."""
    engine = one.engine
    engine.advance(now_s)
    held = {s.number: s for s in engine.held()}
    views = [
        migrate.HeldSample(n, engine.tokens(s) if n in engine.running else int(s.kept), n in engine.running)
        for n, s in held.items()
    ]
    for move in reversed(migrate.decide(views, 0.0)):
        sample = engine.take(held[move.sample])
        sample.kept = move.tokens if keep_tokens else 0
        step = steps.of(sample)
        step.version[sample.number] = one.version
        step.queue.appendleft(sample)
    one.booked.clear()
    one.next_s = NEVER_S


def even_out(steps: Steps, awake: list[Engine], version: int, now_s: float, *, pending: bool) -> bool:
    """Move what waits, or runs too many to an engine, to idle engines; returns whether anything was finished by now."""
    engines = {e.engine.name: e for e in awake if e.version >= version}
    if len(engines) < 2 or all(e.engine.running and not e.engine.pending for e in engines.values()):
        return False
    stirred = [touch(one, steps, now_s) for one in engines.values()]
    step = steps.open[version]
    views = [
        _queue(e, _slots(e.engine) if pending else e.engine.instance.places, _plateau(step, e.engine.instance))
        for e in engines.values()
    ]
    for move in balance.decide(views):
        source, target = engines[move.source], engines[move.target]
        if move.running:
            chosen = sorted(source.engine.running.values(), key=source.engine.tokens)[: move.count]
        else:
            chosen = list(source.engine.pending)[-move.count :]
        for sample in chosen:
            del source.booked[sample.number]
            _give(steps, target, source.engine.take(sample), now_s)
        source.engine.admit()
        source.next_s = source.engine.next_s()
    return any(stirred)


def even_out_last(steps: Steps, awake: list[Engine], version: int, now_s: float) -> bool:
    """With nothing to hand out, move samples of the oldest step to idle engines; returns whether any moved."""
    able = {e.engine.name: e for e in awake if e.version >= version}
    idle = [name for name, e in able.items() if not e.engine.running and not e.engine.pending]
    if not idle or any(step.queue for step in steps.open.values()):
        return False
    stirred = [touch(one, steps, now_s) for one in able.values()]
    at = {number: (one, sample) for one in able.values() for number, sample in one.engine.running.items()}
    numbers = np.array(list(at), np.int64)
    tokens = np.array([one.engine.tokens(sample) for one, sample in at.values()], np.float64)
    names = {name: i for i, name in enumerate(able)}
    sources = np.array([names[one.engine.name] for one, _ in at.values()], np.int64)
    moving = numbers[relieve.decide(relieve.Running(numbers // SAMPLES_MAX, tokens, sources), len(idle), len(able))]
    left: dict[str, Engine] = {}
    for i, number in enumerate(moving.tolist()):
        source, sample = at[number]
        del source.booked[number]
        left[source.engine.name] = source
        _give(steps, able[idle[i % len(idle)]], source.engine.take(sample), now_s)
    for source in left.values():
        source.engine.admit()
        source.next_s = source.engine.next_s()
    return bool(left) or any(stirred)


def _give(steps: Steps, one: Engine, sample: Sample, now_s: float) -> None:
    one.engine.advance(now_s)
    one.booked[sample.number] = _to_book(steps, sample)
    one.engine.pending.append(sample)
    one.engine.admit()
    one.next_s = one.engine.next_s()


def _to_book(steps: Steps, sample: Sample) -> float:
    return steps.left(sample, sample.kept, 0).cache_tokens


def _queue(one: Engine, slots: int, plateau: int | None = None) -> balance.QueueView:
    return balance.QueueView(one.engine.name, len(one.engine.pending), len(one.engine.running), slots, plateau)


def _slots(engine: MovingEngine) -> int:
    """What the KV cache leaves of its places, at the mean context of what it runs."""
    instance, running = engine.instance, len(engine.running)
    if not running:
        return instance.places
    room = ADMIT * instance.kv_tokens - engine.context
    return min(instance.places, running + max(0, int(room / max(engine.context / running, 1.0))))


def _plateau(step: Step, instance: Instance) -> int | None:
    context = step.samples[0].prompt_tokens + float(step.expected.mean()) / 2
    fits = max(1, int(instance.kv_tokens / context))
    return balance.plateau({b: b / instance.pace.step_s(b, context) for b in _BATCHES if b <= fits}, gain=0.1)
