"""Prompt sources: row ``i`` of the stream is a function of (data config, seed, i), so a restart repeats it exactly.

Rows are made on demand (``reasoning_gym``) or read from what ``data.path`` names, and visited in a seeded order that
is drawn anew for each epoch. Heavy libraries are imported by the one source that needs them.
"""

from __future__ import annotations

import difflib
import random
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np

from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.rows import Row, Source, digest_of
from actors.environments.prompts.tables import LineSource, TableSource, open_table
from actors.environments.prompts.text_rows import TextRows
from configs.data_forms import DataForm, UnknownForm, form_of
from configs.schema import DataConfig, JobConfig, RewardConfig


def open_source(data: DataConfig, seed: int, *, compares: bool = False, tasks: bool = False) -> Source:
    """The source that ``data`` describes. ``compares``: answers are compared with responses, so each row must have one.
    ``tasks``: rows are tasks of an environment, and need no prompt.

    Raises:
        SourceUnreadable: the data set, file, row or column is missing; says which and what to do.
    """
    if data.source == "reasoning_gym":
        return ReasoningGymSource(data, seed)
    path = Path(data.path or "")
    try:
        if not path.exists():
            raise UnknownForm("there is no such file or directory", "Check the path")
        form = form_of(path, data.source)
        if form is DataForm.TEXT:
            return LineSource(TextRows(path), data, compares=compares, tasks=tasks)
        return TableSource(open_table(path, form, data.config, data.split), data, compares=compares, tasks=tasks)
    except UnknownForm as error:
        raise SourceUnreadable(f"data.path {data.path}: {error}. {error.fix}") from error


def open_sources(job: JobConfig) -> dict[str, Source]:
    """Every source of ``job`` by its name, opened for its rewards. Raises as ``open_source``."""
    text, tasks = compares(job.reward), job.has_episodes
    return {name: open_source(data, job.seed, compares=text, tasks=tasks) for name, data in job.data.sources.items()}


def open_all_sources(job: JobConfig) -> dict[str, Source]:
    """``open_sources``, and the evaluation's, whose generated tasks have another seed. Raises as ``open_source``."""
    text, seed = compares(job.reward), job.evaluation.seed
    held_out = job.eval.sources if job.eval is not None else {}
    return open_sources(job) | {name: open_source(data, seed, compares=text) for name, data in held_out.items()}


_orders: dict[tuple[int | None, int, int], np.ndarray] = {}


def epoch_order(data: DataConfig, seed: int, length: int, epoch: int) -> np.ndarray:
    """int64[length] rows in the order in which ``epoch`` visits them."""
    key = (seed if data.shuffle else None, epoch if data.shuffle else 0, length)
    if key not in _orders:
        order = list(range(length))
        if data.shuffle:
            random.Random(f"headrace order {seed} {epoch}").shuffle(order)
        _orders.clear()  # one epoch at a time is enough, and bounds the memory
        _orders[key] = np.array(order, np.int64)
    return _orders[key]


class ReasoningGymSource:
    """Generates the rows of a ``reasoning_gym`` task, and scores answers with the task's own scorer."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        gym = import_reasoning_gym()
        try:
            self._dataset: Any = gym.create_dataset(data.task, seed=seed, size=data.size, **data.task_args)
        except (ValueError, TypeError, AssertionError) as error:
            raise SourceUnreadable(
                f"data.task {data.task!r} with data.task_args {data.task_args}: {error}{_nearest_task(data.task)}"
            ) from error
        self.fingerprint = f"reasoning_gym {data.task} {data.task_args} {data.size} {seed}"
        self._task = data.task

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        entry = self._dataset[index]
        digest = digest_of(repr((entry["question"], entry["answer"])))
        return Row(str(entry["question"]), str(entry["answer"]), index, {}, digest)

    def check(self, index: int) -> None:
        """Check nothing: every row is generated, and cannot be wrong."""

    def where(self, index: int) -> str:
        return f"row {index} of {self._task}"

    def score(self, answer: str, index: int) -> float:
        return float(self._dataset.score_answer(answer, self._dataset[index]))


def import_reasoning_gym() -> Any:
    """The ``reasoning_gym`` module; one of its dependencies warns about its own syntax when first compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym

        return reasoning_gym


def reasoning_gym_tasks() -> list[str]:
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    return sorted(cast("dict[str, object]", DATASETS))


def _nearest_task(task: str | None) -> str:
    names = reasoning_gym_tasks()
    if task in names:
        return ""
    near = difflib.get_close_matches(task or "", names, n=1, cutoff=0)
    return f"; the nearest task is {near[0]!r}" if near else ""


def needs_source(reward: RewardConfig) -> bool:
    """Whether a reward uses the data set's own scorer."""
    return any(one.kind == "reasoning_gym" for _, one in reward.each)


def compares(reward: RewardConfig) -> bool:
    """Whether a reward compares the answer of a row with the response, as text or as mathematics."""
    return any(one.compares for _, one in reward.each)
