"""What ``headrace bench serve`` measures: programs alone and together, one call, and tenants that do nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from actors.models.adapter import AdapterSpec
from actors.protocol.datums import Datum
from actors.trainer.backend import BackendSpec
from actors.trainer.learning.learner import Learner
from actors.trainer.setup import make_backend
from benchmarks._command import Result
from benchmarks._processes import cpu_s
from benchmarks.serving._programs import Served, Told, Work, datums, model_of, rows, service_of, trained

CONTEXT_TOKENS: Final = 512
VOCABULARY: Final = 200
WORK: Final = Work(rank=8, seed=1, steps=4, calls=2, datums=4, tokens=64, vocabulary=VOCABULARY)
TENANTS: Final = {
    "first": WORK,
    "second": dataclasses.replace(WORK, seed=2),
    "whole": dataclasses.replace(WORK, seed=3, rank=0),
}
_IDLE_WORK: Final = dataclasses.replace(WORK, datums=1, tokens=8)
_WARM: Final = 8
"""Models that come and rest before memory is measured for the first time."""
_RESTS_S: Final = 300.0
"""How long programs wait for each other, and models may take to go to rest."""
_MIB: Final = 1 << 20


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
        ready, ends = (
            threading.Barrier(len(works), action=lambda: used.append(server.cpu_s()), timeout=_RESTS_S) for _ in "be"
        )

        def program(name: str) -> Told:
            try:
                return trained(server.url, server.keys[name], works[name], ready.wait, ends.wait)
            except BaseException as error:
                say(f"{name}: {error!r}")
                ready.abort()
                ends.abort()
                raise

        running = {name: threads.submit(program, name) for name in works}
        told = {name: future.result() for name, future in running.items()}
    return told, used[1] - used[0]


def tenants(model: Path, directory: Path, cores: int) -> Result:
    alone, alone_cpu_s = dict[str, Told](), 0.0
    for name, work in TENANTS.items():
        say(f"{name} alone")
        told, spent_s = _together(model, directory / name, {name: work})
        alone[name], alone_cpu_s = told[name], alone_cpu_s + spent_s
    say("all together")
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
        self._runner = asyncio.Runner()
        backend = make_backend("torch")
        adapter = AdapterSpec(rank=work.rank, alpha=32.0)
        self._runner.run(backend.start(BackendSpec(model_path=model, threads=1, seed=work.seed, adapter=adapter)))
        self._learner = Learner(backend, vocabulary=work.vocabulary, context_tokens=CONTEXT_TOKENS, budget_tokens=4096)
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
    weights = np.ones(work.tokens, np.float32)
    return [
        Datum(np.asarray(row[:-1], np.int32), np.asarray(row[1:], np.int32), {"weights": weights})
        for row in rows(work, 0)
    ]


def overhead(model: Path, directory: Path, calls: int) -> Result:
    """Both sides call by call in turns; the first two calls of each do not count."""
    say("overhead of a call")
    bare, served = list[tuple[float, float]](), list[tuple[float, float]]()
    beside = _Bare(model, WORK)
    with Served(model, directory, ["a"]) as server, service_of(server.url, server.keys["a"]) as service:
        training, batch = model_of(service, WORK), datums(WORK, 0)
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

    say(f"{count} idle tenants")
    names = [f"t{number}" for number in range(count)]
    command = (sys.executable, "-m", "benchmarks.serving._resting_server")
    kept = list[Any]()
    with Served(model, directory, ["warm", *names], command) as server:

        def trained_once(tenant: str) -> None:
            service = tinker.ServiceClient(base_url=server.url, api_key=server.keys[tenant])
            training = model_of(service, _IDLE_WORK)
            kept.append((service, training))
            training.forward_backward(datums(_IDLE_WORK, 0), "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()

        for _ in range(_WARM):
            trained_once("warm")
        _until_all_rest(directory, _WARM)
        before = server.resident_bytes()
        for tenant in names:
            trained_once(tenant)
        _until_all_rest(directory, _WARM + count)
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
