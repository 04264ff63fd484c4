"""The prompt stream: ordinal → prompt, a function of the job file and the data alone.

    all rows checked, once a run ─▶ rows looked at in the first epoch's order ─┬─ used: the next ordinal's prompt
                                                                               └─ passed over, counted, first one named

Invariants
- A row whose prompt is longer than ``data.max_prompt_tokens``, leaves ``rollout.max_tokens`` no room in the model's
  positions, has no tokens, or is refused by template or tokenizer, is passed over; ordinals count the rows that are
  used. If no row of an epoch can be used, reading fails for good.
- Where an environment speaks first, a row is its task: every row is used, none is tokenised, and its prompt is empty.
- One ``read`` lasts about ``slice_s``, however many rows it has to look at, and advances by one row at least: it
  returns what it has found, and the next ``read`` goes on from there. What was seen is kept (``seen_rows.py``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import monotonic
from typing import Any

import msgpack
import numpy as np
import xxhash

from actors.environments.errors import PromptRefused, SourceUnreadable
from actors.environments.prompts.rows import Row, Source
from actors.environments.prompts.seen_rows import SeenRows
from actors.environments.prompts.sources import compares, epoch_order, open_source
from actors.environments.prompts.tokenizer import TextCodec
from configs.model_files import prompt_tokens_max
from configs.run_files import PROMPT_ROWS
from configs.schema import DataConfig, JobConfig

_CHECKED_TOGETHER = 256
TOO_LONG, NO_ROOM = "longer than data.max_prompt_tokens", "without room for rollout.max_tokens in the model's positions"
EMPTY, REFUSED = "without tokens", "refused by template or tokenizer"
_REFUSAL_SHOWN = 300
_NOT_THE_SETTINGS = {"path", "config", "split", "revision", "mix", "epochs"}
"""Keys of ``data`` left out of ``_settings``: they name the data (see ``fingerprint``), or do not change the order."""
_NOTHING = np.empty(0, np.int32)
_TOKENIZER_FILES = ("*token*", "*.jinja", "vocab*", "merges*")


class PromptStream:
    """Reads the stream by blocking calls, without an actor or a loop. ``run_dir``: directory that keeps what was seen.

    ``name``: name of the source among several; ``codec``: the tokenizer, if it is loaded already.
    """

    def __init__(
        self,
        job: JobConfig,
        model_path: Path,
        run_dir: Path | None = None,
        *,
        source: Source | None = None,
        name: str = "",
        codec: TextCodec | None = None,
    ) -> None:
        self._data, self._seed, self._name = job.data, job.seed, name
        self._bytes_max = job.limits.message_max_bytes // 4
        """Bytes of prompts in one answer, a message that holds other things too; one more prompt may exceed them."""
        self._tasks = job.has_episodes
        """Whether rows are tasks of an environment, which makes the prompts."""
        self._source = source or open_source(job.data, job.seed, compares=compares(job.reward), tasks=self._tasks)
        self._codec = codec or checked_codec(model_path, job.data)
        self._longest = prompt_tokens_max(job, model_path)
        self._counts_answers = job.scheduling.policy == "planned"
        path = run_dir / seen_file(name) if run_dir is not None else None
        self._seen = SeenRows(self._source.fingerprint, _settings(job, model_path), len(self._source), path)
        self._later_order: tuple[int, np.ndarray] | None = None

    def read(self, start: int, count: int, slice_s: float = math.inf) -> dict[str, Any]:
        """Prompts from ``start`` on as plain values, at most ``count``, and the report of how far reading has come.

        If fewer than ``count`` come, the stream has ended if ``exhausted``; else ask again for the rest.

        Raises:
            SourceUnreadable: names the row and the field that cannot be used.
        """
        until_s = monotonic() + slice_s
        prompts: list[list[Any]] = []
        exhausted, size_bytes = False, 0
        try:
            if self.check_rows(until_s):
                while len(prompts) < count and size_bytes < self._bytes_max:
                    ordinal = start + len(prompts)
                    if self._ended(ordinal):
                        exhausted = True
                        break
                    prompt = self._prompt(ordinal)
                    if prompt is not None:
                        prompts.append(prompt)
                        size_bytes += len(prompt[1]) + len(prompt[2])
                    if monotonic() >= until_s:
                        break
        finally:
            self._seen.save()
        return {"prompts": prompts, "exhausted": exhausted} | self.report()

    def report(self) -> dict[str, Any]:
        """The fields of ``PromptsRead`` besides the prompts and ``exhausted``."""
        seen = self._seen
        return {
            "rows": seen.rows,
            "checked": seen.checked,
            "seen": seen.seen,
            "passed": seen.why,
            "first": seen.first,
            "replaced": seen.replaced,
        }

    def check_rows(self, until_s: float) -> bool:
        """Check rows until ``until_s``; True once all have prompt and answer, since no row is used before that."""
        seen = self._seen
        seen.catch_up()
        while seen.checked < seen.rows:
            last = min(seen.rows, seen.checked + _CHECKED_TOGETHER)
            for index in range(seen.checked, last):
                self._source.check(index)
            seen.checked = last
            if last < seen.rows and monotonic() >= until_s:
                seen.check_done(last)
                return False
            if last == seen.rows:
                seen.check_done(last)
        return True

    def _ended(self, ordinal: int) -> bool:
        seen = self._seen
        if not seen.whole:
            return False
        if seen.kept == 0:
            key = "eval.data" if self._name.startswith("eval.") else "data"
            told = ", ".join(f"{count} {reason}" for reason, count in seen.why.items()).replace("data.", f"{key}.")
            first = f"; the first: {next(iter(seen.first.values()), '?')}"
            raise SourceUnreadable(
                f"{key}.path {self._data.path or self._data.task}: none of the {seen.rows} prompts can be used "
                f"({told}; at most {self._longest} tokens){first}"
            )
        return self._data.epochs is not None and ordinal >= self._data.epochs * seen.kept

    def _prompt(self, ordinal: int) -> list[Any] | None:
        """The prompt of ``ordinal``, perhaps with the length of its answer.

        None if one more row was looked at and the prompt is still not known.
        """
        index = self._index(ordinal)
        if index is not None:
            row = self._source.row(index)
            text, ids = self._encode_again(row)
        else:
            place, expected = self._seen.seen, self._seen.kept
            row = self._source.row(int(epoch_order(self._data, self._seed, self._seen.rows, 0)[place]))
            encoded = self._look_at(row)
            if encoded is None or expected != ordinal:
                return None
            text, ids = encoded
        named = [row.index, row.digest, self._name] if self._name else [row.index, row.digest]
        return [ordinal, ids.tobytes(), text, msgpack.packb(named), *self._answer_tokens(row)]

    def _answer_tokens(self, row: Row) -> list[int]:
        """Tokens of the row's answer, if a plan needs them and there is an answer: until a prompt has been answered,
        this is the best guess of how long that takes.
        """
        if not self._counts_answers or row.answer is None:
            return []
        return [len(self._codec.tokenizer(str(row.answer), add_special_tokens=False, verbose=False)["input_ids"])]

    def _index(self, ordinal: int) -> int | None:
        """Index of the row of ``ordinal``; None if too few rows have been looked at to know it."""
        seen, data = self._seen, self._data
        if not seen.whole or ordinal < seen.kept:
            place = seen.place_of(ordinal)
            return None if place is None else int(epoch_order(data, self._seed, seen.rows, 0)[place])
        epoch, kept = divmod(ordinal, seen.kept)
        if self._later_order is None or self._later_order[0] != epoch:
            used = np.ones(seen.rows, np.bool_)
            used[seen.passed_rows(epoch_order(data, self._seed, seen.rows, 0))] = False
            order = epoch_order(data, self._seed, seen.rows, epoch)
            self._later_order = (epoch, order[used[order]])
        return int(self._later_order[1][kept])

    def _look_at(self, row: Row) -> tuple[str, np.ndarray] | None:
        """Encode a row that is looked at for the first time; None if the row is passed over."""
        if self._tasks:
            self._seen.keep()
            return "", _NOTHING
        try:
            text, ids = self._codec.encode(row.prompt)
        except Exception as error:  # noqa: BLE001 (templates and tokenizers are the user's, and raise what they like)
            self._seen.pass_over(REFUSED, f"{self._source.where(row.index)}: {_refusal(row, error)}")
            return None
        if len(ids) == 0:
            self._seen.pass_over(EMPTY, f"{self._source.where(row.index)}: its prompt has no tokens")
        elif len(ids) > self._longest:
            reason = TOO_LONG if len(ids) > self._data.max_prompt_tokens else NO_ROOM
            self._seen.pass_over(reason, f"{self._source.where(row.index)}: {len(ids)} tokens")
        else:
            self._seen.keep()
            return text, ids
        return None

    def _encode_again(self, row: Row) -> tuple[str, np.ndarray]:
        if self._tasks:
            return "", _NOTHING
        try:
            text, ids = self._codec.encode(row.prompt)
        except Exception as error:
            raise self._changed(row, f"{type(error).__name__}: {error}") from error
        if not 0 < len(ids) <= self._longest:
            raise self._changed(row, f"{len(ids)} tokens")
        return text, ids

    def _changed(self, row: Row, what: str) -> SourceUnreadable:
        return SourceUnreadable(
            f"data.path {self._data.path or self._data.task}, {self._source.where(row.index)}: its prompt could be used"
            f" before, and now cannot ({what}): the template is no function of the row"
        )


def checked_codec(model_path: Path, data: DataConfig) -> TextCodec:
    """The model's tokenizer. Raises SourceUnreadable if it belongs to another model."""
    codec = TextCodec(model_path, data)
    codec.check_vocabulary()
    return codec


def seen_file(name: str) -> str:
    """Name of the file in the run directory that keeps which rows of the source ``name`` were seen."""
    return f"prompt_rows.{name}.jsonl" if name else PROMPT_ROWS


def _refusal(row: Row, error: Exception) -> str:
    """Why a prompt cannot be encoded, as a line of text."""
    try:
        json.dumps(row.prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair stands in it, which is no character"
    except (TypeError, ValueError):
        pass  # the error itself says more
    told = str(error) if isinstance(error, PromptRefused) else f"{type(error).__name__}: {error}"
    line = told.replace("\n", " ")[:_REFUSAL_SHOWN]
    return line.encode("utf-8", "backslashreplace").decode()


def _settings(job: JobConfig, model_path: Path) -> str:
    """A hash of everything but the data that decides which rows are used, and in which order."""
    digest = xxhash.xxh3_128()
    digest.update(job.data.model_dump_json(exclude=_NOT_THE_SETTINGS).encode() + str(job.seed).encode())
    digest.update(str(prompt_tokens_max(job, model_path)).encode())
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in model_path.glob(pattern) if file.is_file()}):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
