"""The prompt source: reads and tokenises the job's prompt stream for whoever asks, by ordinal.

It keeps no cursor. Ordinal → prompt is a function of the job file, so a restarted source goes on where anyone asks.
Rows whose prompt is longer than ``data.max_prompt_tokens`` are passed over; ordinals count the rows that are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgpack

from actors.core.actor import Actor, handles, idempotent
from actors.core.errors import ReplyError
from actors.rewards.errors import SourceUnreadable
from actors.rewards.messages import PromptsRead, ReadPrompts, SourcedPrompt
from actors.rewards.sources import Row, Source, open_source, stream_index
from actors.rewards.tokenizer import TextCodec
from actors.roles import RoleArgs
from actors.scheduler.messages import Acknowledged, RegisterService
from configs.schema import JobConfig


class PromptsUnreadable(ReplyError):
    """The data set cannot be read; the message names file, row and field. Configuration: do not retry."""


class PromptStream:
    """The stream itself: no actor, no loop; blocking calls."""

    def __init__(self, job: JobConfig, model_path: Path) -> None:
        self._data, self._seed = job.data, job.seed
        self._source: Source = open_source(job.data, job.seed)
        self._codec = TextCodec(model_path, job.data)
        self._rows: list[int] = []
        """Stream position of every kept ordinal found so far."""
        self._position = 0

    def read(self, start: int, count: int) -> PromptsRead:
        """Prompts ``start`` to ``start + count``; fewer, and ``exhausted``, where the last epoch ends."""
        while len(self._rows) < start + count:
            if not self._advance():
                break
        positions = self._rows[start : start + count]
        prompts = [self._prompt(start + i, position) for i, position in enumerate(positions)]
        return PromptsRead(prompts=prompts, exhausted=len(prompts) < count)

    def _advance(self) -> bool:
        """Find the next row that fits; False at the end of the stream, SourceUnreadable if a whole epoch fits nowhere."""
        for _ in range(len(self._source)):
            row = self._row(self._position)
            if row is None:
                return False
            self._position += 1
            _, ids = self._codec.encode(row.prompt)
            if 0 < len(ids) <= self._data.max_prompt_tokens:
                self._rows.append(self._position - 1)
                return True
        raise SourceUnreadable(
            f"data.max_prompt_tokens {self._data.max_prompt_tokens}: every prompt of the data set is longer; raise it"
        )

    def _row(self, position: int) -> Row | None:
        index = stream_index(self._data, self._seed, len(self._source), position)
        return None if index is None else self._source.row(index)

    def _prompt(self, ordinal: int, position: int) -> SourcedPrompt:
        row = self._row(position)
        assert row is not None
        text, ids = self._codec.encode(row.prompt)
        context = cast("bytes", msgpack.packb([row.prompt, row.answer, row.index, row.extra], default=str))
        return SourcedPrompt(prompt=ordinal, token_ids=ids, text=text, context=context)


class PromptSource(Actor):
    """Answers ReadPrompts. Reading is blocking work and runs on the actor's own thread."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.job_config
        self._stream: PromptStream | None = None

    async def on_start(self) -> None:
        self._stream = await self.ctx.run_blocking(PromptStream, self._job, Path(self._args.model_path))
        service = RegisterService(job=self._job.name, role="prompts", address=self.ctx.self_address)
        await self.ctx.ref(self._args.scheduler).ask(service, Acknowledged)

    @handles(ReadPrompts)
    @idempotent
    async def read(self, message: ReadPrompts) -> PromptsRead:
        assert self._stream is not None
        try:
            return await self.ctx.run_blocking(self._stream.read, message.start, message.count)
        except SourceUnreadable as error:
            raise PromptsUnreadable(str(error)) from error
