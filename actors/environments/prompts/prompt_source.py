"""The prompt source: reads and tokenises the job's prompt stream by ordinal, for any asker.

    job ──ReadPrompts(start, count)──▶ prompts ──▶ task process (data set, tokenizer) ──▶ PromptsRead ──▶ job

Invariants
- It keeps no cursor. Ordinal → prompt is a function of the job file, so a restarted source answers at any ordinal.
- One question is read at a time: two would tokenise the same rows.
- A permanent failure is answered with PromptsUnreadable, one that may pass with PromptsNotRead. A process that fails
  ``limits.read_attempts_max`` times in a row fails for good: something in the data kills it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from actors.core.actor import concurrent, handles
from actors.core.errors import ReplyError
from actors.core.registered import RegisteredActor
from actors.environments.errors import RewardError, SourceUnreadable
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.protocol.failures import Acknowledged
from actors.protocol.rewards import PromptsRead, ReadPrompts, SourcedPrompt
from actors.protocol.services import RegisterService
from actors.roles import RoleArgs


class PromptsUnreadable(ReplyError):
    """The data set cannot be read; the message names file, row and field. Configuration: do not retry."""

    permanent = True


class PromptsNotRead(ReplyError):
    """The process that reads prompts, or its machine, has failed. Infrastructure: ask again."""


class PromptSource(RegisteredActor):
    """Answers ReadPrompts from a pool that the reward worker has started."""

    def __init__(self, args: RoleArgs, pool: ScorerPool) -> None:
        self._args = args
        self._pool = pool
        self._reading = asyncio.Lock()
        self._failures = 0

    async def on_start(self) -> None:
        service = RegisterService(job=self._args.name_of_job, role="prompts", address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)

    @handles(ReadPrompts)
    @concurrent
    async def read(self, message: ReadPrompts) -> PromptsRead:
        read = await self._read(message)
        read["prompts"] = [
            SourcedPrompt(ordinal, np.frombuffer(ids, np.int32), text, context, *answer_tokens)
            for ordinal, ids, text, context, *answer_tokens in read["prompts"]
        ]
        return PromptsRead(**read)

    async def _read(self, message: ReadPrompts) -> dict[str, Any]:
        limits = self.ctx.limits
        try:  # the pool gives up first, unless all of its processes score
            async with asyncio.timeout(limits.read_timeout_s + limits.ask_timeout_s / 2), self._reading:
                read = await self._pool.read(message.start, message.count, evaluation=message.evaluation)
        except SourceUnreadable as error:
            raise PromptsUnreadable(str(error)) from error
        except TimeoutError as error:
            raise PromptsNotRead("a process that is free to read them: all of them score responses") from error
        except RewardError as error:
            self._failures += 1
            if self._failures < limits.read_attempts_max:
                raise PromptsNotRead(str(error)) from error
            failed = f"the process that reads prompts has failed {self._failures} times in a row"
            raise PromptsUnreadable(f"{failed}, at prompt {message.start}: {error}") from error
        self._failures = 0
        return read
