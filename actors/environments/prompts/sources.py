"""Prompt sources: row ``i`` of the stream is a function of (data config, seed, i), so a restart repeats it exactly.

Kinds: ``reasoning_gym`` (rows made on demand), ``jsonl`` and ``hf_dataset`` (rows read once, visited in a seeded order
that is drawn anew for each epoch). Heavy libraries are imported by the one source that needs them.
"""

from __future__ import annotations

import difflib
import json
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from actors.environments.errors import SourceUnreadable
from configs.schema import DataConfig, RewardConfig

Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one example: what to ask, what is right, and its index in the underlying data set."""

    prompt: str | Chat
    answer: str
    index: int
    extra: dict[str, Any]
    """Further columns, handed to a reward function as keyword arguments."""


class Source(Protocol):
    """Is a data set of known length."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Row: ...
    def score(self, answer: str, index: int) -> float:
        """The data set's own scorer, where it has one; else SourceUnreadable."""
        ...


def open_source(data: DataConfig, seed: int) -> Source:
    """The source that ``data`` describes.

    Raises:
        SourceUnreadable: the data set, file, row or column is missing; says which and what to do.
    """
    return _KINDS[data.source](data, seed)


def stream_index(data: DataConfig, seed: int, length: int, ordinal: int) -> int | None:
    """Which row the ``ordinal``-th prompt of the stream is; None after the last epoch."""
    epoch, position = divmod(ordinal, length)
    if data.epochs is not None and epoch >= data.epochs:
        return None
    if not data.shuffle:
        return position
    return _epoch_order(seed, epoch, length)[position]


_orders: dict[tuple[int, int, int], Sequence[int]] = {}


def _epoch_order(seed: int, epoch: int, length: int) -> Sequence[int]:
    key = (seed, epoch, length)
    if key not in _orders:
        order = list(range(length))
        random.Random(f"headrace order {seed} {epoch}").shuffle(order)
        _orders.clear()  # one epoch at a time is enough, and bounds the memory
        _orders[key] = order
    return _orders[key]


class ReasoningGymSource:
    """Reads a ``reasoning_gym`` task; its own scorer belongs to it."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        gym = import_reasoning_gym()
        try:
            self._dataset: Any = gym.create_dataset(data.task, seed=seed, size=data.size, **data.task_args)
        except (ValueError, TypeError, AssertionError) as error:
            raise SourceUnreadable(
                f"data.task {data.task!r} with data.task_args {data.task_args}: {error}{_nearest_task(data.task)}"
            ) from error

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        entry = self._dataset[index]
        return Row(prompt=str(entry["question"]), answer=str(entry["answer"]), index=index, extra={})

    def score(self, answer: str, index: int) -> float:
        return float(self._dataset.score_answer(answer, self._dataset[index]))


def import_reasoning_gym() -> Any:
    """The ``reasoning_gym`` module; one of its dependencies warns about its own syntax when first compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym

        return reasoning_gym


def reasoning_gym_tasks() -> list[str]:
    """Names of all tasks."""
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    return sorted(cast("dict[str, object]", DATASETS))


def _nearest_task(task: str | None) -> str:
    names = reasoning_gym_tasks()
    if task in names:
        return ""
    near = difflib.get_close_matches(task or "", names, n=1, cutoff=0)
    return f"; the nearest task is {near[0]!r}" if near else ""


class TableSource:
    """Reads rows with a prompt and an answer column."""

    def __init__(self, rows: Sequence[dict[str, Any]], data: DataConfig, where: str) -> None:
        if not rows:
            raise SourceUnreadable(f"data.path {where}: no rows; expected at least one with {data.prompt_key!r}")
        self._rows, self._data, self._where = rows, data, where

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        record = dict(self._rows[index])
        prompt, answer = self._take(record, self._data.prompt_key, index), record.pop(self._data.answer_key, "")
        if not isinstance(prompt, str | list):
            raise SourceUnreadable(
                f"data.path {self._where}, row {index}: column {self._data.prompt_key!r} is a {type(prompt).__name__}; "
                "expected a string or a list of chat messages"
            )
        return Row(prompt=cast("str | Chat", prompt), answer=str(answer), index=index, extra=record)

    def _take(self, record: dict[str, Any], key: str, index: int) -> object:
        if key not in record:
            raise SourceUnreadable(
                f"data.path {self._where}, row {index}: no column {key!r} (data.prompt_key); "
                f"the row has {sorted(record)}"
            )
        return record.pop(key)

    def score(self, answer: str, index: int) -> float:
        raise SourceUnreadable(
            "reward.kind reasoning_gym needs data.source reasoning_gym: a table has no scorer of its own"
        )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON-lines file.

    Raises:
        SourceUnreadable: names the file and the line that is no JSON object.
    """
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a string
    except (OSError, UnicodeDecodeError) as error:
        raise SourceUnreadable(f"data.path {path}: {error}; expected a readable JSON-lines file in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SourceUnreadable(
                f"data.path {path}, line {number}: {error}; expected one JSON object a line"
            ) from error
        if not isinstance(row, dict):
            raise SourceUnreadable(f"data.path {path}, line {number}: a {type(row).__name__}; expected a JSON object")
        rows.append(cast("dict[str, Any]", row))
    return rows


def _jsonl(data: DataConfig, seed: int) -> Source:
    path = Path(data.path or "")
    return TableSource(read_jsonl(path), data, str(path))


def _hf_dataset(data: DataConfig, seed: int) -> Source:
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(data.path or "")
    except (OSError, ValueError) as error:
        raise SourceUnreadable(
            f"data.path {data.path}: {error}; expected a directory written by Dataset.save_to_disk"
        ) from error
    table = loaded if isinstance(loaded, Dataset) else loaded.get("train")
    if table is None:
        raise SourceUnreadable(
            f"data.path {data.path}: splits {sorted(cast('dict[str, object]', loaded))}; expected a 'train' split"
        )
    return TableSource(cast("Sequence[dict[str, Any]]", table), data, str(data.path))


_KINDS: dict[str, Callable[[DataConfig, int], Source]] = {
    "reasoning_gym": ReasoningGymSource,
    "jsonl": _jsonl,
    "hf_dataset": _hf_dataset,
}


def needs_source(reward: RewardConfig) -> bool:
    """Whether scoring asks the data set itself."""
    return reward.kind == "reasoning_gym"
