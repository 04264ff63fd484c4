"""The first rank of a tensor parallel vLLM engine: it decides, and the other ranks do the same.

    add, abort ──▶ done in this rank, and noted for the next order
    step, load_weights, sleep, wake ──▶ order to the followers ─┬─▶ answers ─┬─▶ compared ─▶ result
                                                                └─▶ own part ┘

Invariants beyond the engine's
- The followers get the leader's calls in the leader's order. Decisions that depend on a clock are made by the leader
  alone, and told after each step of vLLM (``ranks.goes_on``).
- A call that the leader refuses is refused by every rank, and a load that fails in one is undone in all.
- A rank that fails, vanishes, is silent for too long, or has drawn other tokens ends the engine with RankLost.
  From then on no call succeeds, and all ranks must be started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NoReturn, TypeVar

from actors.core.errors import error_named
from actors.ranks.errors import RankLost
from actors.ranks.followers import Followers
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput, WeightTensors
from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.engine import VllmEngine
from actors.rollout.engines.vllm.orders import (
    AbortRequests,
    AddRequests,
    EngineAnswer,
    EngineBegin,
    EngineLoad,
    EngineOrder,
    EngineSleep,
    EngineStep,
    EngineWake,
    as_file,
    decoded_answer,
    encoded,
    hash_of,
    is_refusal,
)
from actors.rollout.errors import EngineError, EngineUnavailable
from configs.limits import Limits

T = TypeVar("T")


class LeadingEngine(VllmEngine):
    """Implements ``RolloutEngine`` over this rank and ``followers``."""

    def __init__(self, followers: Followers, limits: Limits) -> None:
        super().__init__()
        self._followers = followers
        self._limits = limits
        self._commands: list[AddRequests | AbortRequests] = []
        """Additions and aborts of requests since the last order."""
        self._lost = ""

    # ------------------------------------------------------------ life

    async def start(self, spec: EngineSpec) -> None:
        size = self._followers.count + 1
        if spec.tensor_parallel != size:
            raise EngineUnavailable(f"rollout.tensor_parallel is {spec.tensor_parallel}, and {size} ranks are there")
        with ranks.rendezvous(size) as directory:
            silence_s = max(self._limits.engine_step_s, self._limits.ready_timeout_s)
            self.take_place(ranks.RankPlace(rank=ranks.LEADER, size=size, directory=directory, silence_s=silence_s))
            begin = EngineBegin(spec=spec, directory=directory, silence_s=silence_s)
            await self._built(begin, super().start(spec))

    async def wake(self) -> None:
        self._check_whole()
        if self._asleep:
            with ranks.rendezvous(self._followers.count + 1) as directory:
                self.meet_at(directory)
                await self._built(EngineWake(directory=directory), super().wake())

    async def close(self) -> None:
        if self._lost:  # the engine's thread may wait for a rank that is gone, for up to ``silence_s``
            self._core = None
        await super().close()
        await self._followers.close()

    # ------------------------------------------------------------ calls

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        super().add(requests)
        self._commands.append(AddRequests(requests=list(requests)))

    def abort(self, requests: Sequence[int]) -> None:
        super().abort(requests)
        self._commands.append(AbortRequests(requests=[int(number) for number in requests]))

    async def step(self) -> StepOutput:
        self._check_whole()
        self._check_step()
        answers, output = await self._together(EngineStep(), super().step(), self._limits.engine_step_s)
        drawn = hash_of(output)
        for rank, answer in enumerate(answers, 1):
            if answer.drawn != drawn:
                self._lose(f"rank {rank} has drawn other tokens than the leader")
        return output

    def _goes_on(self, ended: bool, seconds: float) -> bool:
        return ranks.goes_on(super()._goes_on(ended, seconds))

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        self._check_whole()
        self._check_load(tensors, dtypes)
        shared = as_file(tensors, dtypes)
        file, entries = await self._run(shared.__enter__)
        try:
            order = EngineLoad(file=file, entries=entries, policy_version=policy_version, in_flight=in_flight)
            own = super().load_weights(tensors, dtypes, policy_version, in_flight=in_flight)
            await self._together(order, own, self._limits.pull_timeout_s)
        finally:
            shared.__exit__(None, None, None)

    async def sleep(self, level: int) -> None:
        self._check_whole()
        self._check_level(level)
        if not self._asleep:
            await self._together(EngineSleep(level=level), super().sleep(level), self._limits.pull_timeout_s)

    # ------------------------------------------------------------ all ranks together

    async def _together(
        self, call: EngineStep | EngineLoad | EngineSleep, own: Awaitable[T], timeout_s: float
    ) -> tuple[list[EngineAnswer], T]:
        """Make ``call`` in all ranks; returns the followers' answers and the result of this rank's ``own`` part.

        Raises:
            RankLost: a follower has failed, or has refused what another rank has done.
            EngineError: all ranks have refused the call.
        """
        try:
            answers, result = await asyncio.gather(self._call(call, timeout_s), _or_refusal(own))
        except Exception as error:  # noqa: BLE001 - torch's, when a rank is gone
            self._lose(f"a rank is gone: {type(error).__name__}: {error}", error)
        refused = [answer.refusal for answer in answers]
        if isinstance(result, EngineError):
            if all(refused):
                raise result
            self._lose(f"some ranks have done what others refuse: {result}", result)
        if any(refused):
            self._lose(f"some ranks have done what others refuse: {next(text for text in refused if text)}")
        return answers, result

    async def _built(self, call: EngineBegin | EngineWake, own: Awaitable[None]) -> None:
        """Build the engines of all ranks. Each waits for the others; the first that fails says why."""
        try:
            await asyncio.gather(self._whether_built(call), own)
        except EngineError:
            self._lost = "it could not be built"
            raise
        except Exception as error:  # noqa: BLE001 - torch's, when a rank is gone
            self._lose(f"a rank is gone: {type(error).__name__}: {error}", error)

    async def _whether_built(self, call: EngineBegin | EngineWake) -> None:
        for answer in await self._call(call, self._limits.ready_timeout_s, is_refusal):
            if answer.refusal:
                raise error_named(answer.error, answer.refusal, EngineError) or EngineError(answer.refusal)

    async def _call(
        self,
        call: EngineBegin | EngineStep | EngineLoad | EngineSleep | EngineWake,
        timeout_s: float,
        ends: Callable[[bytes], bool] | None = None,
    ) -> list[EngineAnswer]:
        order = encoded(EngineOrder(commands=self._commands, call=call))
        self._commands = []
        answers = await self._followers.call([order] * self._followers.count, timeout_s=timeout_s, ends=ends)
        return [decoded_answer(answer) for answer in answers]

    def _check_whole(self) -> None:
        """Raise RankLost if a rank has been lost: then this rank does nothing more either."""
        if self._lost:
            raise RankLost(self._lost)

    def _lose(self, why: str, error: Exception | None = None) -> NoReturn:
        self._lost = why
        if isinstance(error, RankLost):
            raise error
        raise RankLost(why) from error


async def _or_refusal(own: Awaitable[T]) -> T | EngineError:
    try:
        return await own
    except EngineError as error:
        return error
