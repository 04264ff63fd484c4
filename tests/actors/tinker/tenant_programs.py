"""Programs of several tenants, drawn by a seed: what each asks of its model, how, and what it must be answered.

drawn ─▶ Program ─┬─▶ Client      asks a service, out of order, with repeats, as long as there is no answer
                  └─▶ expected    the same operations one after another in plain Python: no service, nobody else
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from actors.tinker import operations as op
from actors.tinker.errors import OperationRefused
from actors.tinker.learner import ModelSpec
from actors.tinker.sampling import SamplingParameters
from tests.actors.tinker.tinker_world import (
    NAN_TOKEN,
    REFUSED_RATE,
    REFUSED_TOKEN,
    FakeLearner,
    FakeSampler,
    Faults,
    World,
    call,
    loaded,
    spec,
    step,
)

Told = dict[tuple[object, ...], str]
"""What was answered, as text: to operations by number, to samples, and of what was saved."""
PROMPT = np.arange(3, dtype=np.int32)
PARAMETERS = SamplingParameters(max_tokens=4, seed=3)
END = "end"
"""Name of what is saved and exported at the end."""
PATIENCE_S = 20_000.0
PROBE, STEP_AFTER = call(7, forward_only=True), step(2e-3)
"""What a model that was made from saved weights is asked."""


@dataclass(frozen=True)
class Program:
    """Holds what one tenant asks of one model; in it, ``Load.path`` and ``Export.session`` are names without an id."""

    tenant: str
    seed: int
    operations: dict[int, op.Operation]
    ends: bool
    """Whether the session is ended in the middle, while answers are awaited."""

    @property
    def spec(self) -> ModelSpec:
        return spec(seed=self.seed)


def drawn(rng: random.Random, tenant: str, *, ends: bool = False) -> Program:
    operations = list[op.Operation]()
    saved = list[str]()
    for number in range(rng.randint(2, 3)):
        operations += [_drawn_call(rng) for _ in range(rng.randint(1, 3))]
        operations.append(step(REFUSED_RATE if rng.random() < 0.2 else 1e-3 * (number + 1)))
        if rng.random() < 0.5:
            saved.append(rng.choice(["a", "b"]))
            operations.append(op.Save(saved[-1], overwrite=rng.random() < 0.5))
        if rng.random() < 0.5:
            operations.append(op.Export(session=f"snapshot {number}", in_flight=rng.random() < 0.3))
        if saved and rng.random() < 0.3:
            operations.append(op.Load(rng.choice(saved), "", optimizer=rng.random() < 0.5, creates=False))
    operations += [op.Save(END), op.Export(name=END)]
    return Program(tenant, rng.randrange(99), dict(enumerate(operations, 1)), ends)


def _drawn_call(rng: random.Random) -> op.Operation:
    kind = rng.random()
    if kind < 0.1:
        return op.Refused("loss_fn: it is not served")
    tokens = [rng.randrange(5) for _ in range(rng.randint(1, 3))]
    if kind < 0.2:
        tokens[0] = REFUSED_TOKEN if kind < 0.15 else NAN_TOKEN
    return call(*tokens, forward_only=kind > 0.9)


# ------------------------------------------------------------ what must be answered


async def expected(program: Program, directory: Path) -> Told:
    """The answers, had there been nobody else and no fault. ``directory``: where a snapshot may lie meanwhile."""
    told: Told = {}
    learner = FakeLearner(program.spec, Faults())
    saved, snapshots = dict[str, dict[str, int]](), dict[tuple[str, bool], int]()
    for seq, operation in program.operations.items():
        before = dict(learner.state)
        try:
            answer = await _answer(learner, operation, saved, snapshots)
        except OperationRefused:
            answer = op.Failed("", of_user=True)
            if not isinstance(operation, op.OptimStep):
                learner.state = before
        told[seq,] = as_text(answer)
    newest = [weights for (_, in_flight), weights in snapshots.items() if in_flight]
    for (name, in_flight), weights in snapshots.items():
        told["samples", name] = await _samples(newest[-1] if in_flight else weights, directory)
    for name, state in saved.items():
        learner.state = loaded(state, optimizer=True)
        for place, one in enumerate((PROBE, STEP_AFTER)):
            told["loaded", name, place] = as_text(await _answer(learner, one, {}, {}))
    return told


async def _answer(
    learner: FakeLearner,
    operation: op.Operation,
    saved: dict[str, dict[str, int]],
    snapshots: dict[tuple[str, bool], int],
) -> op.Answer:
    match operation:
        case op.ForwardBackward():
            datums = [one.datum() for one in operation.datums]
            only = operation.forward_only
            logprobs, metrics = await learner.forward_backward(datums, "cross_entropy", {}, forward_only=only)
            if not math.isfinite(metrics["loss:sum"]) and not only:
                raise OperationRefused("the loss is no number")
            return op.Losses.of(logprobs, metrics)
        case op.OptimStep():
            return op.Json({"metrics": await learner.optim_step(operation.adam)})
        case op.Save():
            if operation.name in saved and not operation.overwrite:
                raise OperationRefused("it exists")
            saved[operation.name] = dict(learner.state)
            return op.Json({"path": f"tinker://MODEL/weights/{operation.name}", "type": "save_weights"})
        case op.Export():
            snapshots[operation.name or str(operation.session), operation.in_flight] = learner.state["weights"]
            told = {"sampling_session_id": f"MODEL {operation.session}"}
            if operation.name is not None:
                told = {"path": f"tinker://MODEL/sampler_weights/{operation.name}"}
            return op.Json({"type": "save_weights_for_sampler"} | told)
        case op.Load():
            learner.state = loaded(saved[operation.path], optimizer=operation.optimizer)
            path = f"tinker://MODEL/weights/{operation.path}"
            return op.Json({"path": path, "model_id": "MODEL", "type": "load_weights"})
        case _:
            raise OperationRefused("it is refused")


async def _samples(weights: int, directory: Path) -> str:
    (directory / "adapter.json").write_text(str(weights))
    return as_text(
        op.Samples.of(
            await FakeSampler().sample(directory, PROMPT, 2, PARAMETERS, prompt_logprobs=True, topk_prompt_logprobs=2)
        )
    )


def as_text(answer: op.Answer, model: str = "MODEL") -> str:
    """An answer that can be compared: a failure by whose it was, everything else to the last bit."""
    if isinstance(answer, op.Failed):
        return f"failed, of the user: {answer.of_user}"
    return repr(answer).replace(model, "MODEL")


# ------------------------------------------------------------ who asks


@dataclass
class Client:
    """Plays one program in a world."""

    world: World
    program: Program
    rng: random.Random
    told: Told = field(default_factory=dict[tuple[object, ...], str])
    early: list[str] = field(default_factory=list[str])
    """Operations that were answered before one of a lower number had come."""

    async def play(self) -> None:
        tenant, operations = self.program.tenant, self.program.operations
        self.session = await self.world.session(tenant)
        self.model = await self.world.model(self.session, tenant, seed=self.program.seed)
        self.answered = {seq: asyncio.Event() for seq in operations}
        if self.program.ends:
            await self._play_and_end()
            return
        await asyncio.gather(*(self._one(seq, self._moment_s(seq)) for seq in operations))
        for name in [one.session or one.name for one in operations.values() if isinstance(one, op.Export)]:
            again = await self._sampled(str(name), 1)
            first = self.told.setdefault(("samples", name), again)
            self.told["samples", name] = again if first == again else f"{first}, and later {again}"
        names = [one.name for one in operations.values() if isinstance(one, op.Save)]
        for number, name in enumerate(dict.fromkeys(names), 1):
            await self._load(number, name)

    def _moment_s(self, seq: int) -> float:
        """When a request arrives: in any order, and now and then after the model has gone to rest."""
        late_s = 45.0 if self.rng.random() < 0.05 else 0.0
        return 1e-3 * (seq + 4 * self.rng.random()) + late_s

    async def _play_and_end(self) -> None:
        """Ask everything, and end the session before much is answered; what is told then is nobody's matter."""
        tasks = [asyncio.ensure_future(self._one(seq, 1e-3 * seq)) for seq in self.program.operations]
        await asyncio.sleep(1e-3 * self.rng.randrange(1, 9))
        await self.world.ask(lambda service: service.end_session(self.program.tenant, self.session))
        await asyncio.wait(tasks, timeout=30.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, seq: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        operation = await self._resolved(seq, self.program.operations[seq])
        early = [other for other, event in self.answered.items() if other > seq and event.is_set()]
        self.early += [f"{other} was answered before {seq} had come" for other in early]
        request = await self.world.submit(self.model, seq, operation, self.program.tenant)
        answer = await self.world.answer(request, self.program.tenant)
        self.answered[seq].set()
        if self.rng.random() < 0.2:  # something on the way sends it once more, later
            await asyncio.sleep(1e-3 * self.rng.randrange(9))
            assert await self.world.submit(self.model, seq, operation, self.program.tenant) == request
            assert await self.world.answer(request, self.program.tenant) == answer
        self.told[seq,] = as_text(answer, self.model)
        if isinstance(operation, op.Export) and not operation.in_flight:
            name = operation.name or str(operation.session).partition(" ")[2]
            self.told["samples", name] = await self._sampled(name, 0)

    async def _resolved(self, seq: int, operation: op.Operation) -> op.Operation:
        """The operation as the HTTP side makes it: with ids, and with the directory of saved weights."""
        if isinstance(operation, op.Export) and operation.session is not None:
            return msgspec.structs.replace(operation, session=f"{self.model} {operation.session}")
        if not isinstance(operation, op.Load):
            return operation
        before = [(other, one) for other, one in self.program.operations.items() if other < seq]
        saves = [other for other, one in before if isinstance(one, op.Save) and one.name == operation.path]
        await asyncio.wait_for(self.answered[saves[-1]].wait(), PATIENCE_S)
        path = f"tinker://{self.model}/weights/{operation.path}"
        weights, _ = await self.world.ask(lambda service: service.find_weights(self.program.tenant, path, "weights"))
        return op.Load(path, weights.directory, operation.optimizer, creates=False)

    async def _sampled(self, name: str, seq: int) -> str:
        """What is drawn from a snapshot, by its session or, if it has another name, from a new one."""
        tenant, sampler = self.program.tenant, f"{self.model} {name}"
        if name == END:
            path = f"tinker://{self.model}/sampler_weights/{name}"
            sampler = await self.world.ask(
                lambda service: service.create_sampler(tenant, self.session, 0, path=path, base_model=None)
            )
        body = op.encode(op.Sample(op.Array.of(PROMPT), 2, PARAMETERS, prompt_logprobs=True, topk=2))
        request = await self.world.ask(lambda service: service.sample(service.sampler(tenant, sampler), seq, body))
        return as_text(await self.world.answer(request, tenant))

    async def _load(self, number: int, name: str) -> None:
        """Make a model from saved weights, and ask it what shows its whole state."""
        tenant, path = self.program.tenant, f"tinker://{self.model}/weights/{name}"
        model, request = await self.world.ask(
            lambda service: service.create_model(tenant, self.session, number, None, "", {}, load=(path, True))
        )
        await self.world.answer(request, tenant)
        for place, one in enumerate((PROBE, STEP_AFTER)):
            answer = await self.world.result(model, place + 1, one, tenant)
            self.told["loaded", name, place] = as_text(answer, model)
