"""A further rank of a tensor parallel vLLM engine: a copy of the leader's engine that gets the same calls in turn.

    order ─▶ added and aborted requests ─▶ step, load, sleep or wake ─▶ answer

It makes the same columns as the leader and throws them away; their hash shows whether both have drawn the same tokens.
"""

from __future__ import annotations

from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.engine import VllmEngine
from actors.rollout.engines.vllm.orders import (
    AddRequests,
    EngineAnswer,
    EngineBegin,
    EngineLoad,
    EngineOrder,
    EngineSleep,
    EngineStep,
    decoded_order,
    encoded,
    hash_of,
    read,
)
from actors.rollout.errors import EngineError


class VllmFollower:
    """Implements ``Follower`` with a vLLM engine."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._engine = FollowingEngine()

    async def serve(self, order: bytes) -> bytes:
        """Obey ``order``. An EngineError is answered, since the leader's engine raises it too; others end this rank."""
        try:
            return encoded(await self._obey(decoded_order(order)))
        except EngineError as error:
            return encoded(EngineAnswer(refusal=f"rank {self._rank}: {error}", error=type(error).__name__))

    async def _obey(self, order: EngineOrder) -> EngineAnswer:
        engine, call = self._engine, order.call
        for command in order.commands:
            engine.add(command.requests) if isinstance(command, AddRequests) else engine.abort(command.requests)
        if isinstance(call, EngineBegin):
            place = ranks.RankPlace(
                rank=self._rank, size=self._size, directory=call.directory, silence_s=call.silence_s
            )
            engine.take_place(place)
            await engine.start(call.spec)
        elif isinstance(call, EngineStep):
            return EngineAnswer(drawn=hash_of(await engine.step()))
        elif isinstance(call, EngineLoad):
            dtypes = {entry.name: entry.dtype for entry in call.entries}
            with read(call) as tensors:
                await engine.load_weights(tensors, dtypes, call.policy_version, in_flight=call.in_flight)
        elif isinstance(call, EngineSleep):
            await engine.sleep(call.level)
        else:
            engine.meet_at(call.directory)
            await engine.wake()
        return EngineAnswer()

    async def close(self) -> None:
        await self._engine.close()


class FollowingEngine(VllmEngine):
    """Makes as many steps of vLLM in a step as the leader says."""

    def _goes_on(self, ended: bool, seconds: float) -> bool:
        return ranks.goes_on(None)
