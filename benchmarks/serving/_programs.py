"""``headrace serve`` as a process, and programs that the unmodified client ``tinker`` runs against it.

    with Served(model, directory, ["a"]) as server:      ready when it has printed its address and keys
        trained(server.url, server.keys["a"], Work(…))   what the program was told, as one digest

All of the server's processes count: what it costs, and whom a kill hits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil

from benchmarks._jobs import BenchmarkFailed
from benchmarks._processes import ROOT
from configs.limits import DEFAULT_LIMITS
from tests.free_ports import free_ports

BASE: Final = "base"
_LOOK_S: Final = 0.05
_END_S: Final = 60.0
_COMMAND: Final = (sys.executable, str(ROOT / "main.py"), "serve")


class Served:
    """A server of one model, at one port in all of its lives."""

    def __init__(self, model: Path, directory: Path, tenants: Sequence[str], command: Sequence[str] = _COMMAND) -> None:
        self.directory = directory
        self._words = [
            *command, "--model", f"{BASE}={model}", "--dir", str(directory), "--listen", f"127.0.0.1:{free_ports(1)}",
            *(word for tenant in tenants for word in ("--tenant", tenant)),
        ]  # fmt: skip
        self._log = directory.with_suffix(".log")
        self.url, self.keys = "", dict[str, str]()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Start it, and wait until it says where it listens.

        Raises:
            BenchmarkFailed: it ended, or took too long.
        """
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        until_s = time.monotonic() + DEFAULT_LIMITS.run_patience_s
        while "TINKER_API_KEY" not in (said := self._log.read_text()):
            if self._process.poll() is not None or time.monotonic() > until_s:
                self._process.kill()
                raise BenchmarkFailed(f"headrace serve does not begin:\n{said[-2000:]}")
            time.sleep(_LOOK_S)
        time.sleep(_LOOK_S)  # the last keys are on their way
        said = self._log.read_text()
        self.url = re.findall(r"TINKER_BASE_URL=(\S+)", said)[0]
        self.keys = {tenant: key for key, tenant in re.findall(r"TINKER_API_KEY=(\S+)\s+for (\S+)", said)}

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_END_S)

    def processes(self) -> list[psutil.Process]:
        """Its own process, and those below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def kill(self, turn: int) -> None:
        """``kill -9`` one of its processes, in turn, and start it again if it was its own.

        Raises:
            BenchmarkFailed: it does not begin again.
        """
        processes = self.processes()
        victim = processes[turn % len(processes)]
        victim.kill()
        if victim.pid == self._process.pid:
            self._process.wait(timeout=_END_S)
            self.begin()

    def cpu_s(self) -> float:
        """Processor seconds of all its processes."""
        total_s = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                total_s += used.user + used.system + used.children_user + used.children_system
        return total_s

    def resident_bytes(self) -> int:
        """Memory of all its processes, what they share counted once."""
        return sum(process.memory_full_info().pss for process in self.processes())


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a program asks: steps of some calls each, with as many datums of as many tokens, and then it samples."""

    rank: int
    seed: int
    steps: int
    calls: int
    datums: int
    tokens: int
    vocabulary: int


@dataclass
class Told:
    """What a program was told."""

    digest: str
    """A hash of all losses, all log-probabilities in training, and those of a prompt under the last snapshot."""
    seconds: float
    """From its first call to its last answer; making the model and ending the session are outside."""


@contextlib.contextmanager
def service_of(url: str, key: str) -> Iterator[Any]:
    """A client's session, which ends with the block."""
    import tinker

    os.environ["TINKER_TELEMETRY"] = "0"
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        yield service
    finally:
        service.close("success").result()


def rows(work: Work, number: int) -> list[list[int]]:
    """Token ids of the datums of a call, the same for each call of that number."""
    draw = _numbers(f"{work.seed}/{number}", work.datums * (work.tokens + 1), work.vocabulary)
    return [draw[place : place + work.tokens + 1] for place in range(0, len(draw), work.tokens + 1)]


def _numbers(name: str, count: int, below: int) -> list[int]:
    data = hashlib.shake_128(name.encode()).digest(2 * count)
    return [int.from_bytes(data[place : place + 2], "little") % below for place in range(0, len(data), 2)]


def datums(work: Work, number: int) -> list[Any]:
    """The same as the client's datums."""
    import tinker

    found: list[Any] = []
    for row in rows(work, number):
        inputs: Any = {"target_tokens": row[1:], "weights": [1.0] * work.tokens}  # the client takes lists, untold
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs))
    return found


def model_of(service: Any, work: Work) -> Any:
    """A training client for a new model."""
    return service.create_lora_training_client(
        base_model=BASE, rank=work.rank, seed=work.seed, train_unembed=False
    ).result()


def nothing() -> None:
    """Do nothing."""


def trained(
    url: str, key: str, work: Work, ready: Callable[[], object] = nothing, ending: Callable[[], object] = nothing
) -> Told:
    """Run the program, with all of its requests under way at once.

    ``ready`` is called when its model is there, ``ending`` when all is answered and before the session ends.
    """
    import tinker

    with service_of(url, key) as service:
        training = model_of(service, work)
        batches = [datums(work, number) for number in range(work.calls)]
        ready()
        began_s, asked = time.monotonic(), list[Any]()
        for _ in range(work.steps):
            asked += [training.forward_backward(batch, "cross_entropy") for batch in batches]
            asked.append(training.optim_step(tinker.AdamParams(learning_rate=1e-3)))
        training.save_state("end").result()
        sampling = training.save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints(rows(work, 0)[0])
        digest = hashlib.sha256(repr(sampling.compute_logprobs(prompt).result()).encode())
        for answer in asked:
            told = answer.result()
            digest.update(repr(sorted((told.metrics or {}).items())).encode())
            for output in getattr(told, "loss_fn_outputs", []):
                digest.update(output["logprobs"].to_numpy().tobytes())
        seconds = time.monotonic() - began_s
        ending()
        return Told(digest.hexdigest(), seconds)
