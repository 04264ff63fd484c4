"""A service over fakes whose numbers are integers, in a simulated process that can die at any turn of the loop.

client tasks (of the world, they never die) ─▶ service (of a process) ─▶ fake learner, fake sampler
                                                    └─▶ operations.db and directories, which outlive the process
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep
from actors.tinker import operations as op
from actors.tinker.errors import LearnerLost, LogFailed, OperationRefused, Problem
from actors.tinker.learner import ModelSpec
from actors.tinker.sampling import Sampled, SampledSequence, SamplingParameters, TopTokens
from actors.tinker.service import Pending, ServedModel, TinkerService
from configs.limits import DEFAULT_LIMITS, Limits
from configs.tenants import TenantsConfig
from transport.sim.loop import SimulatedLoop
from transport.sim.process import SimProcess

T = TypeVar("T")

BASE = "org/base"
VOCABULARY = 100
CONTEXT = 64


def mixed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


@dataclass
class Faults:
    """What goes wrong in the fakes, by the number of calls that they have had; ``torn_at``: of those that write."""

    calls: int = 0
    writes: int = 0
    lost_at: set[int] = field(default_factory=set)
    broken_at: set[int] = field(default_factory=set)
    nan_at: set[int] = field(default_factory=set)
    torn_at: set[int] = field(default_factory=set)
    lives: int = 0
    gate: asyncio.Event | None = None
    """What samples wait for, once they are begun."""
    given_up: int = 0
    """Number of samples that were ended while they waited."""

    def strike(self) -> int:
        self.calls += 1
        if self.calls in self.lost_at:
            raise LearnerLost("the fake was told to die")
        if self.calls in self.broken_at:
            raise RuntimeError("the fake was told to fail")
        return self.calls

    async def write(self, directory: Path, file: str, text: str) -> None:
        """Write a new directory with one file, or leave half of it behind."""
        self.strike()
        self.writes += 1
        directory.mkdir()
        await asyncio.sleep(0)
        if self.writes in self.torn_at:
            (directory / file).write_text(text[: len(text) // 2])
            raise LearnerLost("the fake was told to die while it wrote")
        (directory / file).write_text(text)
        await asyncio.sleep(0)


REFUSED_TOKEN, NAN_TOKEN = 13, 66
"""Tokens of a datum that the fake refuses, and whose loss is no number."""
REFUSED_RATE = 0.5
"""Learning rate of a step that the fake refuses, as it does a gradient that is not finite."""


class FakeLearner:
    """Folds all calls into one number, so that a lost, doubled or moved one shows in every later answer."""

    def __init__(self, spec: ModelSpec, faults: Faults) -> None:
        self.faults = faults
        self.state: dict[str, int] = {"weights": mixed("new", spec.seed, spec.rank), "moments": 0, "gradient": 0}
        self.state |= {"calls": 0, "steps": 0}

    async def forward_backward(
        self, datums: list[Datum], loss: str, parameters: dict[str, float], *, forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        await asyncio.sleep(0)
        call = self.faults.strike()
        if any(datum.tokens[0] == REFUSED_TOKEN for datum in datums):
            raise OperationRefused("data: the fake takes no token 13")
        logprobs = [
            np.asarray(
                [
                    [
                        -(mixed(self.state["weights"], int(token), int(one)) % 1000) / 100
                        for one in np.atleast_1d(targets)
                    ]
                    for token, targets in zip(datum.tokens, datum.targets, strict=True)
                ],
                np.float32,
            ).reshape(datum.targets.shape)
            for datum in datums
        ]
        total = -sum(
            float((one * datum.columns.get("weights", np.float32(1))).sum())
            for one, datum in zip(logprobs, datums, strict=True)
        )
        if not forward_only:
            said = [
                (d.tokens.tolist(), d.targets.tolist(), {n: c.tolist() for n, c in d.columns.items()}) for d in datums
            ]
            self.state["gradient"] = mixed(self.state["gradient"], said, loss, sorted(parameters.items()))
            self.state["calls"] += 1
        await asyncio.sleep(0)
        spoilt = call in self.faults.nan_at or any(NAN_TOKEN in datum.tokens for datum in datums)
        return logprobs, {"loss:sum": float("nan") if spoilt else total}

    async def optim_step(self, adam: AdamStep) -> dict[str, float]:
        await asyncio.sleep(0)
        self.faults.strike()
        state = self.state
        if adam.learning_rate == REFUSED_RATE:
            state["gradient"] = 0
            raise OperationRefused("the fake takes no step at this rate, and has forgotten the gradient")
        state["moments"] = mixed(state["moments"], state["gradient"], adam.beta1, adam.beta2)
        state["weights"] = mixed(state["weights"], state["moments"], adam.learning_rate)
        state["gradient"] = 0
        state["steps"] += 1
        await asyncio.sleep(0)
        return {"steps": float(state["steps"]), "calls": float(state["calls"])}

    async def save(self, directory: Path) -> None:
        assert self.state["gradient"] == 0 or directory.name.startswith("weights"), "saved between calls and their step"
        await self.faults.write(directory, "state.json", json.dumps(self.state))

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        await asyncio.sleep(0)
        self.state = loaded(json.loads((directory / "state.json").read_text()), optimizer=optimizer)
        await asyncio.sleep(0)

    async def export(self, directory: Path) -> None:
        await self.faults.write(directory, "adapter.json", str(self.state["weights"]))

    async def close(self) -> None:
        self.faults.lives -= 1


def loaded(state: dict[str, int], *, optimizer: bool) -> dict[str, int]:
    """The state of a learner that has loaded ``state``."""
    return state | {"gradient": 0} | ({} if optimizer else {"moments": 0, "steps": 0, "calls": 0})


class FakeFactory:
    """Makes fakes; attention without the rest is refused."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()

    def check(self, spec: ModelSpec) -> None:
        if not spec.train_mlp:
            raise OperationRefused("lora_config.train_mlp: false is not served: train all linear layers")

    async def make(self, spec: ModelSpec, number: int) -> FakeLearner:
        await asyncio.sleep(0)
        self.faults.lives += 1
        return FakeLearner(spec, self.faults)


class FakeSampler:
    """Draws tokens that depend on the snapshot, the prompt, the seed and the place."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()

    async def sample(
        self,
        snapshot: Path | None,
        prompt: np.ndarray,
        n: int,
        parameters: SamplingParameters,
        *,
        prompt_logprobs: bool,
        topk_prompt_logprobs: int,
    ) -> Sampled:
        await asyncio.sleep(0)
        self.faults.strike()
        if self.faults.gate is not None:
            try:
                await self.faults.gate.wait()
            except asyncio.CancelledError:
                self.faults.given_up += 1
                raise
        weights = 0 if snapshot is None else int((snapshot / "adapter.json").read_text())
        count = min(parameters.max_tokens, 5)
        sequences = [
            SampledSequence(
                count < parameters.max_tokens,
                np.asarray(
                    [mixed(weights, prompt.tolist(), parameters.seed, one, at) % VOCABULARY for at in range(count)],
                    np.int32,
                ),
                np.asarray([-(mixed(weights, one, at) % 50) / 10 for at in range(count)], np.float32),
                _likeliest(count, parameters.topk) if parameters.topk else None,
            )
            for one in range(n)
        ]
        await asyncio.sleep(0)
        if not prompt_logprobs and not topk_prompt_logprobs:
            return Sampled(sequences)
        logprobs = np.asarray([np.nan, *(-(mixed(weights, int(one)) % 50) / 10 for one in prompt[1:])], np.float32)
        k = topk_prompt_logprobs
        top = TopTokens(np.zeros((len(prompt), k), np.int32), np.full((len(prompt), k), -1, np.float32)) if k else None
        return Sampled(sequences, logprobs, top)


def _likeliest(count: int, k: int) -> TopTokens:
    tokens = np.broadcast_to(np.arange(k, dtype=np.int32), (count, k))
    return TopTokens(tokens, -1.0 - tokens.astype(np.float32))


def served(sampler: FakeSampler | None = None) -> list[ServedModel]:
    return [ServedModel(BASE, "gpt2", VOCABULARY, CONTEXT, sampler or FakeSampler())]


def spec(rank: int = 8, seed: int = 1) -> ModelSpec:
    return ModelSpec(base_model=BASE, rank=rank, seed=seed)


def call(*tokens: int, forward_only: bool = False) -> op.ForwardBackward:
    array = np.asarray(tokens, np.int32)
    datum = Datum(array, (array + 1) % VOCABULARY, {"weights": np.ones(len(tokens), np.float32)})
    return op.ForwardBackward([op.DatumRecord.of(datum)], "cross_entropy", {}, forward_only)


def step(learning_rate: float = 1e-4) -> op.OptimStep:
    return op.OptimStep(
        AdamStep(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=0.0)
    )


FEW = DEFAULT_LIMITS.model_copy(update={"tinker_replay_operations": 5, "tinker_idle_s": 40.0, "tinker_poll_s": 5.0})
"""Limits with which states are saved often, and models rest soon."""


class World:
    """Runs lives of a service, one after another, over one directory."""

    def __init__(self, loop: SimulatedLoop, directory: Path, limits: Limits = FEW) -> None:
        self.loop, self.directory, self.limits = loop, directory, limits
        self.faults, self.sampler_faults = Faults(), Faults()
        self.lives = 0
        self.process: SimProcess | None = None
        self._service: TinkerService | None = None
        self.ready = asyncio.Event()
        self.tenants = TenantsConfig()
        self.events: list[dict[str, Any]] = []
        """What was told of in all lives."""
        self.is_lost: Callable[[], bool] = lambda: False
        """Draws whether an answer is lost on its way to the client."""

    @property
    def service(self) -> TinkerService:
        assert self._service is not None
        return self._service

    async def begin(self) -> None:
        """Begin the next life."""
        self.lives += 1
        process = self.process = SimProcess(f"server {self.lives}")
        self._service = process.run(
            lambda: TinkerService(
                self.directory, served(FakeSampler(self.sampler_faults)), FakeFactory(self.faults), self.limits,
                server_id="s", tenants=self.tenants,
                record=lambda name, fields: self.events.append({"event": name, **fields}),
            )
        )  # fmt: skip
        try:
            await process.start(self._service.open(), "open")
        except LogFailed:
            self.strike()
        if process.alive:
            self.ready.set()
            process.start(self._end_with(self._service), "the log fails")

    async def _end_with(self, service: TinkerService) -> None:
        """End this life when its log cannot be written, as the command does."""
        await service.failed.wait()
        SimProcess.of_nobody(self._struck(), "the log has failed")

    async def _struck(self) -> None:
        self.strike()

    def kill(self) -> None:
        """End the present life as SIGKILL does; what was not committed is gone with its connection."""
        assert self.process is not None
        self.ready.clear()
        self.loop.kill(self.process)
        if self._service is not None:
            self._service._log._writer._db.close()

    def strike(self) -> None:
        """Kill the present life, and begin the next."""
        if self.process is not None:
            self.kill()
            self._next = SimProcess.of_nobody(self.begin(), "next life")

    async def ask(self, question: Callable[[TinkerService], Awaitable[T]]) -> T:
        """What the service answers, in whichever life it does: as the client does, which asks again for ever."""
        while True:
            while not self.ready.is_set():  # a life may end between its beginning and this task's turn
                await self.ready.wait()
            process = self.process
            assert process is not None

            async def asked() -> T:
                return await question(self.service)

            task = process.start(asked(), "question")
            try:
                async with asyncio.timeout(self.limits.tinker_poll_s + 1.0):
                    answer = await asyncio.shield(task)
                if not self.is_lost():
                    return answer
            except TimeoutError:
                continue  # the process has died, or a poll takes long
            except LogFailed:
                await asyncio.sleep(1.0)  # over HTTP this is a 500
            except Problem as problem:
                if problem.status not in (429, 500, 503):
                    raise
                await asyncio.sleep(1.0)

    # ------------------------------------------------------------ a client

    async def session(self, tenant: str = "alice") -> str:
        return await self.ask(lambda service: service.begin_session(tenant, {}))

    async def model(self, session: str, tenant: str = "alice", number: int = 0, **fields: int) -> str:
        model, request = await self.ask(
            lambda service: service.create_model(tenant, session, number, spec(**fields), BASE, {})
        )
        assert isinstance(await self.answer(request, tenant), op.Json)
        return model

    async def submit(self, model: str, seq: int, operation: op.Operation, tenant: str = "alice") -> str:
        body = op.encode(operation)

        async def question(service: TinkerService) -> str:
            return await service.submit(await service.line(tenant, model), seq, body)

        return await self.ask(question)

    async def answer(self, request: str, tenant: str = "alice") -> op.Answer:
        while True:
            answer = await self.ask(lambda service: service.retrieve(tenant, request))
            if not isinstance(answer, Pending):
                return answer

    async def result(self, model: str, seq: int, operation: op.Operation, tenant: str = "alice") -> op.Answer:
        return await self.answer(await self.submit(model, seq, operation, tenant), tenant)


class CountedLoop(SimulatedLoop):
    """Counts its turns, and calls ``strike`` before those of ``strikes``."""

    turns = 0
    strikes: frozenset[int] = frozenset()
    strike: Callable[[], None] | None = None

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns in self.strikes and self.strike is not None:
            self.strike()
        super()._run_once()


@contextmanager
def simulated(seed: int = 0) -> Iterator[CountedLoop]:
    """A loop in virtual time, for tests that are no coroutines."""
    loop = CountedLoop(seed)
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.dismantle()


def run(
    directory: Path, story: Callable[[World], Awaitable[T]], *, seed: int = 0, limits: Limits = FEW,
    tenants: TenantsConfig | None = None,
) -> T:  # fmt: skip
    """What a story in one world comes to."""

    async def told() -> T:
        world = World(loop, directory, limits)
        world.tenants = tenants or world.tenants
        await world.begin()
        try:
            return await story(world)
        finally:
            world.kill()

    with simulated(seed) as loop:
        return loop.run_until_complete(told())


def value(answer: op.Answer) -> dict[str, Any]:
    assert isinstance(answer, op.Json), answer
    return answer.value
