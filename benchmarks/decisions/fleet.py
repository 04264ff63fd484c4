"""A thousand workers: what a round of the scheduler takes, rules alone and live, and how long a simulated hour.

1,000 workers with 20 places, 20,000 samples in flight, lengths of StreamRL's Fig. 7, 7B on H800
    ├─ policies.assign.decide: the round that fills them all, and a round that fills what a second has freed
    ├─ policies.dispatch_long.decide for a step's 20,000 samples, policies.balance.decide, policies.offload.after_step
    ├─ the live Dispatcher, Balanced and SeedingEstimate over a real ledger of as many samples (_live_fleet.py)
    └─ cluster/fleet.py for a virtual hour, a round every two seconds
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from actors.fleet.length_ranking import REMEMBERED
from actors.policies.assigning import assign, balance, dispatch_long
from actors.policies.assigning.balance import QueueView
from actors.policies.assigning.dispatch_long import Past
from actors.policies.assigning.generation_time import Instance
from actors.policies.assigning.view import AssignView, GroupView, WorkerView
from actors.policies.seeding import offload
from benchmarks._command import Result, command_line, show
from benchmarks._jobs import hardware
from benchmarks.decisions._fleet_model import Fleet, FleetRules
from benchmarks.decisions._live_fleet import LiveFleet
from benchmarks.papers.cluster.costs import decode_pace
from benchmarks.papers.cluster.lengths import draw_lengths
from benchmarks.papers.setups.hardware import DecodeCost
from benchmarks.papers.setups.streamrl import H800, MODELS, LengthHistogram

PLACES: Final = 20
GROUP: Final = 4
LIVE: Final = (
    "live_usual_ms", "live_siblings_ms", "live_learned_ms",
    "live_balance_ms", "live_balance_half_idle_ms", "live_relief_ms", "live_hand_over_ms",
)  # fmt: skip
GOALS: Final = {"round_ms": 50.0, "hour_s": 60.0, "live_round_ms": 50.0}


def main(arguments: Sequence[str]) -> int:
    parser = command_line("fleet", __doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--virtual-s", type=float, default=3600.0, help="how long the fleet is simulated")
    options = parser.parse_args(arguments)
    figures = rounds(options.workers) | live(options.workers) | hour(options.workers, options.virtual_s)
    result: Result = {"benchmark": "fleet", "hardware": hardware(), "goals": GOALS} | figures
    show(result, options, lambda _: _print_table(figures))
    return 0


def _print_table(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        print(f"{name:24} {value:12.4g}" + (f"   goal {GOALS[name]:g}" if name in GOALS else ""))


def rounds(workers: int) -> dict[str, float]:
    """Milliseconds of a decision; ``round_ms`` is the larger of the two."""
    samples = workers * PLACES
    full = _view(workers, in_flight=0, queued=samples)
    usual = _view(workers, in_flight=PLACES - 1, queued=max(GROUP, workers // 5))
    estimates = draw_lengths(LengthHistogram(), samples, np.random.default_rng(0)).astype(float)
    past = [_past_step(samples, seed) for seed in range(1, 1 + REMEMBERED)]
    pool = [Instance(decode_pace(MODELS["7B"].transformer, H800, DecodeCost()), PLACES)] * workers
    rules = offload.OffloadRules(local_engines=8)
    report = offload.StepReport(
        remote_mean=workers, remote_next=workers, train_idle_s=3.0, remote_idle_s=1.0, train_s=90.0, remote_s=80.0
    )
    fill_ms = _best_ms(lambda: assign.decide(full, 0.0))
    usual_ms = _best_ms(lambda: assign.decide(usual, 0.0))
    return {
        "round_ms": max(fill_ms, usual_ms),
        "fill_round_ms": fill_ms,
        "usual_round_ms": usual_ms,
        "dispatch_long_ms": _best_ms(lambda: dispatch_long.decide(estimates, pool, prompt_tokens=400, past=past)),
        "balance_ms": _best_ms(lambda: balance.decide(_half_idle(workers))),
        "offload_ms": _best_ms(lambda: offload.after_step(rules, offload.first(rules), report)),
    }


def _past_step(samples: int, seed: int) -> Past:
    """Lengths as in the paper, that were expected to within a third or so."""
    draws = np.random.default_rng(seed)
    lengths = draw_lengths(LengthHistogram(), samples, draws).astype(float)
    return Past(lengths * draws.lognormal(0.0, 0.3, samples), lengths)


def _half_idle(workers: int) -> list[QueueView]:
    """Half of them hold everything, and the other half has just come."""
    busy = [QueueView(f"b{i}", PLACES, PLACES, PLACES, PLACES // 2) for i in range(workers // 2)]
    return busy + [QueueView(f"i{i}", 0, 0, PLACES) for i in range(workers - workers // 2)]


def live(workers: int) -> dict[str, float]:
    """Milliseconds of a live scheduler's rounds, orders and events of the ledger included.

    A full step is with the workers and the next one is queued; then one sample in a hundred ends. ``live_round_ms`` is
    the largest of the rounds that come again and again. ``live_fill_ms``: a whole step at once, at its beginning.
    """
    found: dict[str, float] = {}
    for name, ranking in (("usual", "none"), ("siblings", "siblings"), ("learned", "learned")):
        fleet = LiveFleet(workers, PLACES, GROUP, ranking=ranking)
        fill_ms = _once_ms(fleet.assign)
        found |= {} if found else {"live_fill_ms": fill_ms}
        fleet.issue()
        found[f"live_{name}_ms"] = statistics.median(_after_ends_ms(fleet) for _ in range(5))
    fleet = LiveFleet(workers, PLACES, GROUP)
    fleet.assign()
    balancing = fleet.balancing()
    found["live_balance_ms"] = _once_ms(lambda: balancing.handed_out(1.0))
    fleet.runs(PLACES // 2)
    fleet.empty(workers // 2)
    found["live_balance_half_idle_ms"] = _once_ms(lambda: balancing.handed_out(2.0))
    found["live_relief_ms"] = _relief_ms(workers)
    found["live_hand_over_ms"] = _hand_over_ms(workers)
    return found | {"live_round_ms": max(found[name] for name in LIVE)}


def _relief_ms(workers: int) -> float:
    """Half of them run all of theirs, nothing waits, and the other half may take as many as makes all equally full."""
    fleet = LiveFleet(workers, PLACES, GROUP)
    fleet.assign()
    fleet.empty(workers // 2)
    fleet.say(ending=0)
    fleet.runs(PLACES)
    balancing = fleet.balancing(relief=True)
    taken_ms = _once_ms(lambda: balancing.handed_out(1.0))
    if not fleet.moved:
        raise RuntimeError("nobody was relieved: there is nothing to measure")
    return taken_ms


def _hand_over_ms(workers: int) -> float:
    """Whether the trainer would wait, while the first step is with all workers and as much of the next one waits."""
    fleet = LiveFleet(workers, PLACES, GROUP, ranking="learned")
    fleet.assign()
    fleet.issue()
    lengths = np.random.default_rng(0).integers(64, 1024, size=workers * PLACES // GROUP)
    estimate, remote = fleet.estimate(lengths), list(fleet.workers.by_name.values())
    taken_ms = _once_ms(lambda: estimate.would_not_wait(fleet.ledger.batches[0], remote, 1.0))
    if estimate.would_not_wait(fleet.ledger.batches[0], remote, 1.0) is None:
        raise RuntimeError("nothing was estimated: there is nothing to measure")
    return taken_ms


def _after_ends_ms(fleet: LiveFleet) -> float:
    fleet.say(ending=len(fleet.workers.by_name) * PLACES // 100)
    return _once_ms(fleet.assign)


def _once_ms(act: Callable[[], object]) -> float:
    """Without a full collection that is due to what came before: of all that is imported, one takes 40 ms."""
    gc.collect()
    began_s = time.process_time()
    act()
    return 1e3 * (time.process_time() - began_s)


def hour(workers: int, virtual_s: float) -> dict[str, float]:
    """Processor seconds of a simulated stretch of time."""
    rules = FleetRules(
        max_staleness=1, streaming=True, group_size=GROUP, prompt_tokens=400,
        train_sample_s=lambda lengths: lengths * (100.0 / (workers * PLACES * 4975)), step_s=1.0, transfer_s=1.0,
        round_s=2.0,
    )  # fmt: skip
    pace = decode_pace(MODELS["7B"].transformer, H800, DecodeCost())

    def lengths(step: int) -> np.ndarray:
        return draw_lengths(LengthHistogram(), workers * PLACES, np.random.default_rng(step))

    fleet = Fleet([(pace, PLACES)] * workers, lengths, rules)
    began_s = time.process_time()
    fleet.run(until_s=virtual_s)
    spent_s = time.process_time() - began_s
    return {
        "hour_s": spent_s * 3600.0 / virtual_s, "rounds": float(fleet.rounds),
        "samples_finished": float(fleet.finished), "steps_trained": float(len(fleet.trained_s)),
    }  # fmt: skip


def _view(workers: int, *, in_flight: int, queued: int) -> AssignView:
    views = [WorkerView(f"w{i}", 0, PLACES, in_flight) for i in range(workers)]
    rows = np.arange(queued, dtype=np.int32)
    groups = [GroupView(0, i, part) for i, part in enumerate(np.split(rows, range(GROUP, queued, GROUP)))]
    return AssignView(views, groups, 0, 0.0, 4096)


def _best_ms(act: Callable[[], object], times: int = 5) -> float:
    taken: list[float] = []
    for _ in range(times):
        began_s = time.process_time()
        act()
        taken.append(1e3 * (time.process_time() - began_s))
    return statistics.median(taken)
