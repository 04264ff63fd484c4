"""What strangers' programs cost on one server (``headrace serve``), and what becomes of them when everything fails.

    tenants    two adapters on one base and a whole model: each by itself on a server of its own, then all three on one
                   fair      when each would end if cores were shared evenly, a thread for each; slowdown = together / fair
                   cpu       processor seconds of the server, all three together / the sum of the three alone
    overhead   forward_backward through the client and the server / the bare learner and torch backend in this process
    idle       memory of the server after so many tenants have each trained a step of an adapter, and rest; and how soon
               one of them is back

    --faults   one program, all of its requests in flight: answers dropped (20 %), turned into 500 (10 %), the server's
               processes killed with SIGKILL in turn; beside the same program undisturbed. Exit code 1 if a bit differs

The client is the unmodified ``tinker``; models are random, made on the spot, and train in float32 on one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, command_line, measured, show, show_and_check
from benchmarks._jobs import hardware, use_cores
from benchmarks._processes import ROOT, cpu_s
from benchmarks.jobs._served import Served, Told, Work, datums, model_of, service_of, trained
from benchmarks.jobs._served_survival import asked_operations, struck, undisturbed

_CONTEXT_TOKENS: Final = 512
_VOCABULARY: Final = 200
LARGE: Final = {"hidden": 512, "layers": 8, "heads": 8}
"""18 million parameters: a call takes some tenths of a second, beside which what the server adds can be measured."""
SMALL: Final = {"hidden": 64, "layers": 2, "heads": 4}
_WORK: Final = Work(rank=8, seed=1, steps=4, calls=2, datums=4, tokens=64, vocabulary=_VOCABULARY)
TENANTS: Final = {
    "first": _WORK,
    "second": dataclasses.replace(_WORK, seed=2),
    "whole": dataclasses.replace(_WORK, seed=3, rank=0),
}
_IDLE_WORK: Final = dataclasses.replace(_WORK, datums=1, tokens=8)
FAULT_WORK: Final = dataclasses.replace(_WORK, calls=1, datums=2 * 1024 + 64, tokens=4)
"""The client cuts each call in three, which arrive out of order."""
GOAL_SLOWDOWN, GOAL_OVERHEAD, GOAL_IDLE_BYTES = 1.2, 1.05, 50_000_000
_RESTS_S: Final = 60.0
_MIB: Final = 1 << 20


def make_base(directory: Path, size: dict[str, int]) -> Path:
    from tests.tiny_checkpoint import make_tiny_checkpoint

    return make_tiny_checkpoint(directory, vocab=_VOCABULARY, max_position=_CONTEXT_TOKENS, **size)


# ------------------------------------------------------------ tenants


def fair_s(alone_s: dict[str, float], cores: int) -> dict[str, float]:
    """When each ends if all begin at once and share ``cores`` evenly, each with one thread."""
    left, ends, now_s = dict(alone_s), dict[str, float](), 0.0
    while left:
        speed = min(1.0, cores / len(left))
        name = min(left, key=lambda one: left[one])
        now_s += left[name] / speed
        left = {one: rest - left[name] for one, rest in left.items() if one != name}
        ends[name] = now_s
    return ends


def _together(model: Path, directory: Path, works: dict[str, Work]) -> tuple[dict[str, Told], float]:
    """Programs on one server, which all begin when each has its model; with the server's processor seconds of it."""
    used = list[float]()
    with Served(model, directory, list(works)) as server, ThreadPoolExecutor(len(works)) as threads:
        ready = threading.Barrier(len(works), action=lambda: used.append(server.cpu_s()))
        ends = threading.Barrier(len(works), action=lambda: used.append(server.cpu_s()))
        running = {
            name: threads.submit(trained, server.url, server.keys[name], work, ready.wait, ends.wait)
            for name, work in works.items()
        }
        told = {name: future.result() for name, future in running.items()}
    return told, used[1] - used[0]


def tenants(model: Path, directory: Path, cores: int) -> Result:
    alone, alone_cpu_s = dict[str, Told](), 0.0
    for name, work in TENANTS.items():
        _say(f"{name} alone")
        told, spent_s = _together(model, directory / name, {name: work})
        alone[name], alone_cpu_s = told[name], alone_cpu_s + spent_s
    _say("all together")
    together, cpu = _together(model, directory / "together", TENANTS)
    fair = fair_s({name: told.seconds for name, told in alone.items()}, cores)
    rows = {
        name: {
            "alone_s": round(alone[name].seconds, 2),
            "together_s": round(told.seconds, 2),
            "fair_s": round(fair[name], 2),
            "slowdown": round(told.seconds / fair[name], 3),
            "same_bits": told.digest == alone[name].digest,
        }
        for name, told in together.items()
    }
    return {
        "tenants": rows,
        "cores": cores,
        "cpu": _compared(cpu, alone_cpu_s, "s"),
        "slowdown_max": max(row["slowdown"] for row in rows.values()),
        "bit_identical": all(row["same_bits"] for row in rows.values()),
    }


def _compared(ours: float, limit: float, unit: str) -> Result:
    return {f"ours_{unit}": round(ours, 3), f"limit_{unit}": round(limit, 3), "ratio": round(ours / limit, 4)}


# ------------------------------------------------------------ overhead


class _Bare:
    """Computes the same calls with the learner and its backend alone, in this process."""

    def __init__(self, model: Path, work: Work) -> None:
        from actors.models.adapter import AdapterSpec
        from actors.trainer.backend import BackendSpec
        from actors.trainer.learning.learner import Learner
        from actors.trainer.setup import make_backend

        self._runner = asyncio.Runner()
        backend = make_backend("torch")
        adapter = AdapterSpec(rank=work.rank, alpha=32.0)
        self._runner.run(backend.start(BackendSpec(model_path=model, threads=1, seed=work.seed, adapter=adapter)))
        self._learner = Learner(
            backend, vocabulary=work.vocabulary, context_tokens=_CONTEXT_TOKENS, budget_tokens=4096
        )
        self._backend, self._datums = backend, _plain_datums(work)

    def call(self) -> tuple[float, float]:
        """Wall and processor seconds of one call."""
        began_s, began_cpu_s = time.monotonic(), cpu_s()
        self._runner.run(self._learner.forward_backward(self._datums, "cross_entropy"))
        return time.monotonic() - began_s, cpu_s() - began_cpu_s

    def close(self) -> None:
        self._runner.run(self._backend.close())
        self._runner.close()


def _plain_datums(work: Work) -> list[Any]:
    import numpy as np

    from actors.protocol.datums import Datum
    from benchmarks.jobs._served import rows

    weights = np.ones(work.tokens, np.float32)
    return [
        Datum(np.asarray(row[:-1], np.int32), np.asarray(row[1:], np.int32), {"weights": weights})
        for row in rows(work, 0)
    ]


def overhead(model: Path, directory: Path, calls: int) -> Result:
    """Both sides call by call in turns; the first two calls of each do not count."""
    _say("overhead of a call")
    bare, served = list[tuple[float, float]](), list[tuple[float, float]]()
    beside = _Bare(model, _WORK)
    with Served(model, directory, ["a"]) as server, service_of(server.url, server.keys["a"]) as service:
        training, batch = model_of(service, _WORK), datums(_WORK, 0)
        for _ in range(calls + 2):
            bare.append(beside.call())
            began_s, began_cpu_s = time.monotonic(), server.cpu_s()
            training.forward_backward(batch, "cross_entropy").result()
            served.append((time.monotonic() - began_s, server.cpu_s() - began_cpu_s))
    beside.close()
    wall, limit = (1e3 * statistics.median(one[0] for one in side[2:]) for side in (served, bare))
    cpu, cpu_limit = (1e3 * statistics.fmean(one[1] for one in side[2:]) for side in (served, bare))
    return {"wall": _compared(wall, limit, "ms"), "cpu": _compared(cpu, cpu_limit, "ms"), "calls": calls}


# ------------------------------------------------------------ idle tenants


def idle(model: Path, directory: Path, count: int) -> Result:
    """Memory of tenants whose models rest; some that come before all others are not counted."""
    import tinker

    _say(f"{count} idle tenants")
    names = [f"t{number}" for number in range(count)]
    command = (sys.executable, "-m", "benchmarks.jobs._resting_server")
    kept = list[Any]()
    with Served(model, directory, ["warm", *names], command) as server:

        def trained_once(tenant: str) -> None:
            service = tinker.ServiceClient(base_url=server.url, api_key=server.keys[tenant])
            training = model_of(service, _IDLE_WORK)
            kept.append((service, training))
            training.forward_backward(datums(_IDLE_WORK, 0), "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()

        for _ in range(8):
            trained_once("warm")
        _until_all_rest(directory, 8)
        before = server.resident_bytes()
        for tenant in names:
            trained_once(tenant)
        _until_all_rest(directory, 8 + count)
        after = server.resident_bytes()
        began_s = time.monotonic()
        kept[-1][1].forward_backward(datums(_IDLE_WORK, 0), "cross_entropy").result()
        woken_s = time.monotonic() - began_s
        for service, _ in kept:
            service.close("success")
    return {
        "tenants": count, "bytes": after - before, "mib": round((after - before) / _MIB, 1),
        "server_mib": round(before / _MIB), "woken_s": round(woken_s, 3),
    }  # fmt: skip


def _until_all_rest(directory: Path, models: int) -> None:
    """A model that rests has saved its state. Raises AssertionError."""
    until_s = time.monotonic() + _RESTS_S
    while (resting := len(list(directory.glob("models/*/state-*")))) < models:
        assert time.monotonic() < until_s, f"{resting} of {models} models have gone to rest"
        time.sleep(0.2)
    time.sleep(1.0)


# ------------------------------------------------------------ the command


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    found = [
        f"{name} differs from the same program alone"
        for name, row in result["together"]["tenants"].items() if not row["same_bits"]
    ]  # fmt: skip
    for what, ours, goal in (
        ("slowdown_max", result["together"]["slowdown_max"], GOAL_SLOWDOWN),
        ("overhead.wall", result["overhead"]["wall"]["ratio"], GOAL_OVERHEAD),
        ("overhead.cpu", result["overhead"]["cpu"]["ratio"], GOAL_OVERHEAD),
        ("idle.bytes", result["idle"]["bytes"], GOAL_IDLE_BYTES),
    ):
        if ours > goal:
            found.append(f"{what}: {ours}, the goal is {goal}")
    return found


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """All three parts, each on servers of its own."""
    cores = len(use_cores(options.cores))
    result: Result = {"benchmark": "serve", "hardware": hardware()}
    large = make_base(directory / "large", SMALL if options.small else LARGE)
    small = make_base(directory / "small", SMALL)
    for part in ("alone", "overhead", "idle"):
        (directory / part).mkdir()
    result |= {
        "together": tenants(large, directory / "alone", cores),
        "overhead": overhead(large, directory / "overhead" / "served", options.calls),
        "idle": idle(small, directory / "idle" / "served", options.idle),
    }
    return result | {"missed": missed(result)}


def measure_faults(options: argparse.Namespace, directory: Path) -> Result:
    """The program undisturbed, and struck."""
    use_cores(options.cores)
    result: Result = {"benchmark": "serve --faults", "hardware": hardware()}
    model = make_base(directory / "model", SMALL)
    work = dataclasses.replace(FAULT_WORK, steps=options.steps)
    _say("undisturbed")
    calm = undisturbed(model, directory / "undisturbed", work)
    _say(f"struck: {options.kills} kills")
    hard = struck(model, directory / "struck", work, options.kills, options.seed)
    asked = asked_operations(work)
    equal = (calm.losses, calm.weights) == (hard.losses, hard.weights) and calm.executed == hard.executed == asked
    return result | {
        "equal": equal, "asked": asked, "undisturbed": dataclasses.asdict(calm), "struck": dataclasses.asdict(hard)
    }  # fmt: skip


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("serve", __doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--calls", type=int, default=20, help="calls whose overhead is measured")
    parser.add_argument("--idle", type=int, default=300, help="idle tenants")
    parser.add_argument("--small", action="store_true", help="a tiny model in all parts: only bits can be compared")
    parser.add_argument("--faults", action="store_true", help="strike one program instead, and compare bits")
    parser.add_argument("--steps", type=int, default=20, help="of the program that is struck")
    parser.add_argument("--kills", type=int, default=10, help="with SIGKILL, each at a drawn number of operations")
    parser.add_argument("--seed", type=int, default=0, help="which answers are lost, and when it is killed")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print. With ``--faults`` the exit code says whether all is equal."""
    options = parse(args)
    if not options.faults:
        return show_and_check(measured(measure, options), options, _print_table)
    result = measured(measure_faults, options)
    show(result, options, _print_faults)
    return 0 if result["equal"] else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_table(result: Result) -> None:
    together, overhead_, idle_ = result["together"], result["overhead"], result["idle"]
    print(f"{len(together['tenants'])} tenants on {together['cores']} cores; {result['hardware']['class']}")
    for name, row in together["tenants"].items():
        same = "the same bits" if row["same_bits"] else "OTHER BITS"
        print(
            f"  {name:<8} alone {row['alone_s']:>6} s  together {row['together_s']:>6} s  fair {row['fair_s']:>6} s"
            f"  slowdown {row['slowdown']:.2f}  {same}"
        )
    for what, unit, row in (
        ("server's processor, together / alone", "s", together["cpu"]),
        ("forward_backward, wall, served / bare", "ms", overhead_["wall"]),
        ("forward_backward, processor", "ms", overhead_["cpu"]),
    ):
        print(f"  {what:<38} {row[f'ours_{unit}']:>8} {unit:<2} {row[f'limit_{unit}']:>8} {unit:<2} {row['ratio']:.3f}")
    print(f"  {idle_['tenants']} idle tenants: {idle_['mib']} MiB; one is back within {idle_['woken_s']} s")


def _print_faults(result: Result) -> None:
    print(f"{result['asked']} operations; {result['hardware']['class']}")
    for way in ("undisturbed", "struck"):
        row = result[way]
        print(
            f"  {way:<12} executed {row['executed']:>4}  losses {row['losses']}  weights {row['weights']}"
            f"  {row['seconds']:>6} s  {row['faults'] or ''}"
        )
    print("  equal, bit for bit" if result["equal"] else "  NOT equal")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
