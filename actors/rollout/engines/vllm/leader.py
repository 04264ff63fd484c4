"""The first rank of a tensor parallel vLLM engine: it decides, and the other ranks do what it does.

    add, abort ──▶ noted, and done in this rank
    step, load_weights, sleep, wake ──▶ order to the followers ─┬─▶ answers ─┬─▶ compared ─▶ result
                                                                └─▶ own part ┘

Invariants beyond the engine's
- The followers make its calls in its order. What reads a clock is decided here alone, and told behind each of vLLM's
  steps (``ranks.goes_on``).
- What it refuses is refused by every rank, and a load that fails in one is undone in all.
- A rank that fails, vanishes, is silent for too long, or has drawn other tokens ends the engine with RankLost.
  From then on no call succeeds: whoever has started the ranks starts all of them anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NoReturn, TypeVar

from actors.ranks.errors import RankLost
from actors.ranks.followers import Followers
from actors.rollout import errors
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput, WeightTensors
from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.orders import (
    Abort,
    Add,
    Answer,
    Begin,
    Load,
    Order,
    Sleep,
    Step,
    Wake,
    as_file,
    decoded_answer,
    encoded,
    hash_of,
    is_refusal,
)
from actors.rollout.engines.vllm.ranked_engine import RankedEngine
from actors.rollout.errors import EngineError, EngineUnavailable
from configs.limits import Limits

T = TypeVar("T")


class LeadingEngine(RankedEngine):
    """Implements ``RolloutEngine`` over this rank and ``followers``."""

    def __init__(self, followers: Followers, limits: Limits) -> None:
        super().__init__()
        self._followers = followers
        self._limits = limits
        self._commands: list[Add | Abort] = []
        """What was added and aborted since the last order."""
        self._lost = ""

    # ------------------------------------------------------------ life

    async def start(self, spec: EngineSpec) -> None:
        size = self._followers.count + 1
        if spec.tensor_parallel != size:
            raise EngineUnavailable(f"rollout.tensor_parallel is {spec.tensor_parallel}, and {size} ranks are there")
        with ranks.rendezvous(size) as directory:
            silence_s = max(self._limits.engine_step_s, self._limits.ready_timeout_s)
            self.take_place(ranks.Place(rank=ranks.LEADER, size=size, directory=directory, silence_s=silence_s))
            begin = Begin(spec=spec, directory=directory, silence_s=silence_s)
            await self._built(begin, super().start(spec))

    async def wake(self) -> None:
        self._check_whole()
        if self._asleep:
            with ranks.rendezvous(self._followers.count + 1) as directory:
                self.meet_at(directory)
                await self._built(Wake(directory=directory), super().wake())

    async def close(self) -> None:
        if self._lost:  # its thread may wait for a rank that is gone, until that one's silence is over
            self._core = None
        await super().close()
        await self._followers.close()

    # ------------------------------------------------------------ calls

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        super().add(requests)
        self._commands.append(Add(requests=list(requests)))

    def abort(self, requests: Sequence[int]) -> None:
        super().abort(requests)
        self._commands.append(Abort(requests=[int(number) for number in requests]))

    async def step(self) -> StepOutput:
        self._check_whole()
        self._check_step()
        answers, output = await self._together(Step(), super().step(), self._limits.engine_step_s)
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
            order = Load(file=file, entries=entries, policy_version=policy_version, in_flight=in_flight)
            own = super().load_weights(tensors, dtypes, policy_version, in_flight=in_flight)
            await self._together(order, own, self._limits.pull_timeout_s)
        finally:
            shared.__exit__(None, None, None)

    async def sleep(self, level: int) -> None:
        self._check_whole()
        self._check_level(level)
        if not self._asleep:
            await self._together(Sleep(level=level), super().sleep(level), self._limits.pull_timeout_s)

    # ------------------------------------------------------------ all ranks together

    async def _together(self, call: Step | Load | Sleep, own: Awaitable[T], timeout_s: float) -> tuple[list[Answer], T]:
        """What the followers answer to ``call`` and what this rank's ``own`` part of it gives.

        Raises:
            RankLost: a follower has failed, or not done what this rank has done.
            EngineError: all ranks alike have refused it.
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

    async def _built(self, call: Begin | Wake, own: Awaitable[None]) -> None:
        """Build this rank's engine and the followers'. Each waits for all: the first that cannot says why."""
        try:
            await asyncio.gather(self._whether_built(call), own)
        except EngineError:
            self._lost = "it could not be built"
            raise
        except Exception as error:  # noqa: BLE001 - torch's, when a rank is gone
            self._lose(f"a rank is gone: {type(error).__name__}: {error}", error)

    async def _whether_built(self, call: Begin | Wake) -> None:
        for answer in await self._call(call, self._limits.ready_timeout_s, is_refusal):
            if answer.refusal:
                raise getattr(errors, answer.error, EngineError)(answer.refusal)

    async def _call(
        self,
        call: Begin | Step | Load | Sleep | Wake,
        timeout_s: float,
        ends: Callable[[bytes], bool] | None = None,
    ) -> list[Answer]:
        order = encoded(Order(commands=self._commands, call=call))
        self._commands = []
        answers = await self._followers.call([order] * self._followers.count, timeout_s=timeout_s, ends=ends)
        return [decoded_answer(answer) for answer in answers]

    def _check_whole(self) -> None:
        """Before a call: once a rank is lost, this one does nothing more either."""
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
