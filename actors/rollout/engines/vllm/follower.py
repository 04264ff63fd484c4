"""A further rank of a tensor parallel vLLM engine: the leader's engine once more, which makes its calls in its order.

    order ─▶ what was added and aborted ─▶ step, load, sleep or wake ─▶ answer

Its own columns are made as the leader's are, and thrown away: from them it is told whether both have drawn the same.
"""

from __future__ import annotations

from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.orders import (
    Add,
    Answer,
    Begin,
    Load,
    Order,
    Sleep,
    Step,
    decoded_order,
    encoded,
    hash_of,
    read,
)
from actors.rollout.engines.vllm.ranked_engine import RankedEngine
from actors.rollout.errors import EngineError


class VllmFollower:
    """Implements ``Follower``."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._engine = FollowingEngine()

    async def serve(self, order: bytes) -> bytes:
        """Obey. What the engine refuses is answered: the leader's refuses it too. Any other error ends this rank."""
        try:
            return encoded(await self._obey(decoded_order(order)))
        except EngineError as error:
            return encoded(Answer(refusal=f"rank {self._rank}: {error}", error=type(error).__name__))

    async def _obey(self, order: Order) -> Answer:
        engine, call = self._engine, order.call
        for command in order.commands:
            engine.add(command.requests) if isinstance(command, Add) else engine.abort(command.requests)
        if isinstance(call, Begin):
            place = ranks.Place(rank=self._rank, size=self._size, directory=call.directory, silence_s=call.silence_s)
            engine.take_place(place)
            await engine.start(call.spec)
        elif isinstance(call, Step):
            return Answer(drawn=hash_of(await engine.step()))
        elif isinstance(call, Load):
            dtypes = {entry.name: entry.dtype for entry in call.entries}
            with read(call) as tensors:
                await engine.load_weights(tensors, dtypes, call.policy_version, in_flight=call.in_flight)
        elif isinstance(call, Sleep):
            await engine.sleep(call.level)
        else:
            engine.meet_at(call.directory)
            await engine.wake()
        return Answer()

    async def close(self) -> None:
        await self._engine.close()


class FollowingEngine(RankedEngine):
    """Is one rank's part, which goes on for as long as the leader says."""

    def _goes_on(self, ended: bool, seconds: float) -> bool:
        return ranks.goes_on(None)
