"""Models from Python, without HTTP: a loop of your own creates, trains, saves and samples them.

    with serve({"base": "models/Qwen3-0.6B"}) as server:
        model = server.create_model("base", rank=8)
        model.forward_backward([datum(tokens, targets)], "cross_entropy")
        model.optim_step(1e-4)
        model.sampler().sample(prompt, max_tokens=16)

    caller ── blocks ─▶ the thread with the loop ─▶ TinkerService ─▶ learners and engines, on threads of their own

Always true
- A call is the operation that a client of ``headrace serve`` asks for, and goes through the same log: its numbers are
  the same, bit for bit.
- A call whose waiting was interrupted is computed all the same, and the next one comes after it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike

from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep
from actors.tinker import operations as op
from actors.tinker.errors import OperationRefused, Problem
from actors.tinker.learner import ModelSpec
from actors.tinker.paths import checked_name
from actors.tinker.sampling import SampledSequence, SamplingParameters
from actors.tinker.service import Pending, TinkerService
from actors.trainer.learning.learner import LearnedDatums
from configs.limits import DEFAULT_LIMITS
from supervisors.api.errors import ModelLost, ModelRefused
from supervisors.api.loop_thread import block

T = TypeVar("T")

_TENANT: Final = "me"
_HEARD_TIMES: Final = 4
"""Signs of life within the time after which a silent session ends."""


def datum(tokens: ArrayLike, targets: ArrayLike, **columns: ArrayLike) -> Datum:
    """One sequence of n tokens: after token i, target i should follow.

    Args:
        tokens: integers [n].
        targets: integers [n], for ``cross_entropy`` also [n, K].
        columns: numbers in the shape of ``targets``, as the loss needs them: ``weights``, or ``logprobs`` and
            ``advantages``. With none of them, all weights are 1.
    """
    aims = np.asarray(targets)
    numbers = {name: np.asarray(column, np.float32) for name, column in columns.items()}
    return Datum(np.asarray(tokens), aims, numbers or {"weights": np.ones(aims.shape, np.float32)})


def serve(models: Mapping[str, str | Path], directory: str | Path | None = None) -> LocalServer:
    """Serve base models to this program alone, until the result is closed.

    Args:
        models: Hugging Face directories by the names that they are to have.
        directory: where operations and saved models are kept, for later servers, too; by default they go with this
            one. Nobody else may use it at the same time.

    Raises:
        ConfigError, EngineUnavailable, ModelUnreadable: a directory holds no model that can be served.
        LogUnreadable: ``directory`` is another version's, or damaged.
    """
    return block(_opened(models, None if directory is None else Path(directory)))


async def _opened(models: Mapping[str, str | Path], directory: Path | None) -> LocalServer:
    from supervisors.serving.in_process import computed_here  # heavy, as torch comes with it

    limits, closing = DEFAULT_LIMITS, AsyncExitStack()
    try:
        root = directory or Path(closing.enter_context(TemporaryDirectory(prefix="headrace-models-")))
        root.mkdir(parents=True, exist_ok=True)
        async with asyncio.timeout(limits.ready_timeout_s):
            served, factory = await computed_here(models, closing, limits)
            service = await asyncio.to_thread(TinkerService, root, served, factory, limits)
        closing.push_async_callback(service.close)
        await service.open()
        session = await service.begin_session(_TENANT, {})
        closing.push_async_callback(service.end_session, _TENANT, session)
        closing.callback(asyncio.create_task(_live(service, session), name="the session lives").cancel)
    except BaseException:
        await _close(closing)
        raise
    return LocalServer(service, session, root, closing)


async def _close(closing: AsyncExitStack) -> None:
    async with asyncio.timeout(DEFAULT_LIMITS.held_end_s):
        await closing.aclose()


async def _live(service: TinkerService, session: str) -> None:
    while True:
        await asyncio.sleep(service.limits.tinker_session_s / _HEARD_TIMES)
        await service.sessions.require(_TENANT, session)


class LocalServer:
    """Makes models and samplers of the base models that ``serve`` was given."""

    def __init__(self, service: TinkerService, session: str, root: Path, closing: AsyncExitStack) -> None:
        self._service, self._session, self._root, self._closing = service, session, root, closing
        self._numbers = itertools.count()

    def create_model(
        self, base: str, *, rank: int = 32, seed: int = 0,
        train_mlp: bool = True, train_attn: bool = True, train_unembed: bool = True,
    ) -> Model:  # fmt: skip
        """A new adapter of ``rank`` on a base model; with rank 0 the whole model is trained.

        Raises:
            ModelRefused: there is no such base model, or it cannot be trained so.
            ModelLost: it could not be made.
        """
        flags = {"train_mlp": train_mlp, "train_attn": train_attn, "train_unembed": train_unembed}
        return self._made(ModelSpec(base_model=base, rank=rank, seed=seed, **flags), base)

    def load_model(self, path: str, *, optimizer: bool = True) -> Model:
        """A new model from what ``Model.save`` has saved; without ``optimizer`` as if no step had been taken.

        Raises:
            ModelRefused: nothing is saved at ``path``.
            ModelLost: it could not be made.
        """
        return self._made(None, "", load=(path, optimizer))

    def _made(self, spec: ModelSpec | None, base: str, *, load: tuple[str, bool] | None = None) -> Model:
        number, session = next(self._numbers), self._session
        model, request = _done(self._service.create_model(_TENANT, session, number, spec, base, {}, load=load))
        _done(_answer(self._service, request))
        return Model(self._service, model, self._root)

    def sampler(self, base: str) -> ModelSampler:
        """Samples from an untouched base model. Raises ModelRefused: there is none of that name."""
        number, session = next(self._numbers), self._session
        made = _done(self._service.create_sampler(_TENANT, session, number, path=None, base_model=base))
        return ModelSampler(self._service, made)

    def close(self) -> None:
        """End all models and samplers. What was saved stays, if ``serve`` was given a directory."""
        block(_close(self._closing))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Model:
    """Trains one model. Calls come one after another; each returns when it is computed and stored.

    Every call raises ModelRefused if it is wrong in itself, and has then changed nothing; and ModelLost if what
    computes failed again and again.
    """

    def __init__(self, service: TinkerService, id_: str, root: Path) -> None:
        self.id = id_
        self._service, self._root = service, root
        self._snapshots = itertools.count()

    def forward_backward(
        self, datums: Sequence[Datum], loss: str, parameters: Mapping[str, float] | None = None, *,
        forward_only: bool = False,
    ) -> LearnedDatums:  # fmt: skip
        """Compute the sum of a loss over all tokens, and unless ``forward_only`` add its gradient to what is there.

        Args:
            loss: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro`` or ``gspo``.
            parameters: of the loss, such as ``clip_low_threshold``.

        Returns: ``logprobs`` of the targets, float32 in their shapes, and ``metrics``, among them ``loss:sum``.
        """
        records = [op.DatumRecord.of(one) for one in datums]
        answer = self._ask(op.ForwardBackward(records, loss, dict(parameters or {}), forward_only))
        assert isinstance(answer, op.Losses), answer
        return LearnedDatums(logprobs=[one.array() for one in answer.logprobs], metrics=answer.metrics)

    def optim_step(
        self, learning_rate: float, *, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-12,
        weight_decay: float = 0.0, max_grad_norm: float = 0.0,
    ) -> dict[str, float]:  # fmt: skip
        """Take one step of AdamW with the gradient there is, and forget it; returns metrics.

        ``max_grad_norm``: 0 for none. A gradient that is not finite is refused, and forgotten, too.
        """
        adam = AdamStep(
            learning_rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, max_grad_norm=max_grad_norm,
        )  # fmt: skip
        return self._told(op.OptimStep(adam))["metrics"]

    def save(self, name: str, *, overwrite: bool = False) -> str:
        """Save weights and optimizer; returns the path that ``LocalServer.load_model`` takes."""
        return self._told(op.Save(_name(name), overwrite))["path"]

    def export(self, name: str) -> Path:
        """Save the weights alone, for other programs; returns a PEFT directory, of a whole model a Hugging Face one."""
        path = self._told(op.Export(name=_name(name)))["path"]
        weights, _ = _done(self._service.find_weights(_TENANT, path, "sampler_weights"))
        return self._root / weights.directory

    def sampler(self) -> ModelSampler:
        """Samples from the weights as they are now, whatever the model learns later."""
        snapshot = f"{self.id}:snapshot:{next(self._snapshots)}"
        return ModelSampler(self._service, self._told(op.Export(session=snapshot))["sampling_session_id"])

    def _told(self, operation: op.Operation) -> dict[str, Any]:
        answer = self._ask(operation)
        assert isinstance(answer, op.Json), answer
        return answer.value

    def _ask(self, operation: op.Operation) -> op.Answer:
        body = op.encode(operation)

        async def asked() -> op.Answer:
            line = await self._service.line(_TENANT, self.id)
            return await _answer(self._service, await self._service.submit(line, line.missing(), body))

        return _done(asked())


class ModelSampler:
    """Samples from weights that do not change.

    Every call raises ModelRefused if its tokens or a parameter cannot be served; and ModelLost if what samples failed
    again and again.
    """

    def __init__(self, service: TinkerService, id_: str) -> None:
        self.id = id_
        self._service = service
        self._numbers = itertools.count()

    def sample(
        self, prompt: ArrayLike, n: int = 1, *, max_tokens: int, temperature: float = 1.0, top_k: int = -1,
        top_p: float = 1.0, seed: int | None = None, stop: Sequence[str | int] | None = None,
    ) -> list[SampledSequence]:  # fmt: skip
        """Draw ``n`` sequences after ``prompt``, int[p].

        ``stop``: texts or tokens that end a sequence, and are its last; None: the model's end tokens. Without a
        ``seed``, each call of each sampler has one of its own.
        """
        number = next(self._numbers)
        parameters = SamplingParameters(
            max_tokens=max_tokens, seed=crc32(f"{self.id}/{number}".encode()) if seed is None else seed,
            temperature=temperature, top_k=top_k, top_p=top_p,
            stop_texts=tuple(one for one in stop or () if isinstance(one, str)),
            stop_tokens=tuple(one for one in stop or () if not isinstance(one, str)), stops_at_eos=stop is None,
        )  # fmt: skip
        answer = self._ask(number, op.Sample(op.Array.of(np.asarray(prompt)), n, parameters))
        return answer.sampled().sequences

    def logprobs(self, tokens: ArrayLike) -> np.ndarray:
        """Log-probability of each of n tokens after those before it, float32[n]; NaN at the first."""
        one = SamplingParameters(max_tokens=1, seed=0)
        asked = op.Sample(op.Array.of(np.asarray(tokens)), 1, one, prompt_logprobs=True)
        told = self._ask(next(self._numbers), asked).prompt_logprobs
        assert told is not None, "they were asked for"
        return told.array()

    def _ask(self, number: int, sample: op.Sample) -> op.Samples:
        body = op.encode(sample)

        async def asked() -> op.Answer:
            row = self._service.sampler(_TENANT, self.id)
            return await _answer(self._service, await self._service.sample(row, number, body))

        answer = _done(asked())
        assert isinstance(answer, op.Samples), answer
        return answer


async def _answer(service: TinkerService, request: str) -> op.Answer:
    while isinstance(answer := await service.retrieve(_TENANT, request), Pending):
        if service.failed.is_set():
            raise ModelLost("the log of operations cannot be written: make room on its disk, and serve again")
    if isinstance(answer, op.Failed):
        raise (ModelRefused if answer.of_user else ModelLost)(answer.error)
    return answer


def _done(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` comes to, with refusals as errors of this api."""
    try:
        return block(work)
    except (Problem, OperationRefused) as refused:
        raise ModelRefused(str(refused)) from refused


def _name(name: str) -> str:
    try:
        return checked_name(name)
    except OperationRefused as refused:
        raise ModelRefused(str(refused)) from refused
