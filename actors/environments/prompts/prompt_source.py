"""The prompt source: reads and tokenises the job's prompt stream for whoever asks, by ordinal.

    job ──ReadPrompts(start, count)──▶ prompts ──▶ task process (data set, tokenizer) ──▶ PromptsRead ──▶ job

It keeps no cursor. Ordinal → prompt is a function of the job file, so a restarted source goes on where anyone asks.
"""

from __future__ import annotations

import numpy as np

from actors.core.actor import concurrent, handles
from actors.core.errors import ReplyError
from actors.core.registered import RegisteredActor
from actors.environments.errors import RewardError
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.protocol.failures import Acknowledged
from actors.protocol.rewards import PromptsRead, ReadPrompts, SourcedPrompt
from actors.protocol.services import RegisterService
from actors.roles import RoleArgs


class PromptsUnreadable(ReplyError):
    """The data set cannot be read; the message names file, row and field. Configuration: do not retry."""


class PromptSource(RegisteredActor):
    """Answers ReadPrompts from a pool that somebody else has started."""

    def __init__(self, args: RoleArgs, pool: ScorerPool) -> None:
        self._args = args
        self._pool = pool

    async def on_start(self) -> None:
        service = RegisterService(job=self._args.name_of_job, role="prompts", address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)

    @handles(ReadPrompts)
    @concurrent
    async def read(self, message: ReadPrompts) -> PromptsRead:
        try:
            read = await self._pool.read(message.start, message.count)
        except RewardError as error:
            raise PromptsUnreadable(str(error)) from error
        prompts = [
            SourcedPrompt(prompt=ordinal, token_ids=np.frombuffer(ids, np.int32), text=text, context=context)
            for ordinal, ids, text, context in read["prompts"]
        ]
        return PromptsRead(prompts=prompts, exhausted=read["exhausted"])
