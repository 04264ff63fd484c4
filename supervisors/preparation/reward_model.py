"""Trains the reward model of a job, in its own process, so that the head never imports torch.

order (stdin): job, key of the reward in it, backbone, directory, report
report (a file, replaced as a whole) ─▶ {done, total} at times, at the end {warnings} or {error}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.host.import_guard import hide_broken_optionals
from actors.host.parent_death import die_with_parent
from actors.host.thread_pool import let_waiting_threads_rest
from actors.host.whole_file import write_whole
from configs.reward_training import ANSWERS, RewardTraining
from configs.schema import JobConfig

if TYPE_CHECKING:
    from actors.reward_training.preferences import Pair
    from actors.reward_training.training import Progress


@dataclass(frozen=True, slots=True)
class RewardOrder:
    """The order names the job, the key ``where`` of its reward, the model to train from, and the output directory."""

    job: str
    where: str
    backbone: str
    directory: str
    report: str


def train(order: RewardOrder) -> None:
    """Train the model; errors in preferences or settings go into the report."""
    let_waiting_threads_rest()
    hide_broken_optionals()
    from actors.environments.errors import SourceUnreadable
    from actors.reward_training.errors import RewardTrainingError

    job = JobConfig.model_validate_json(order.job)
    reward = dict(job.reward.each)[order.where]
    how = reward.train
    assert how is not None, "only a reward with a section train gets here"
    report, every_s, last_s, warnings = Path(order.report), job.limits.model_making_look_s, float("-inf"), list[str]()

    def named(setting: str) -> str:
        beside = {"device": "device", "max_tokens": "max_tokens"}
        if setting == "model" and how.model is None:
            return "model.path"
        return f"{order.where}.{beside.get(setting, f'train.{setting}')}"

    def tell(progress: Progress) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= every_s:
            last_s = now_s
            _write(report, {"done": progress.step, "total": progress.steps})

    try:
        pairs = _pairs(job, how, named)
        from actors.reward_training.train import TrainingOrder, train_reward_model  # and torch, once there are pairs

        whole = TrainingOrder(
            Path(order.backbone), Path(order.directory), how, job.seed, reward.device, reward.max_tokens
        )
        train_reward_model(whole, pairs, named=named, say=warnings.append, tell=tell)
        _write(report, {"warnings": warnings})
    except (RewardTrainingError, SourceUnreadable) as error:
        _write(report, {"error": str(error)})


def _pairs(job: JobConfig, how: RewardTraining, named: Callable[[str], str]) -> list[Pair]:
    from actors.environments.prompts.sources import open_sources
    from actors.reward_training.made_preferences import pairs_of_answers
    from actors.reward_training.preferences import read_preferences

    if how.preferences != ANSWERS:
        return read_preferences(Path(how.preferences), named("preferences"))
    data = job.data.sources
    return pairs_of_answers(
        {name: (data[name], source) for name, source in open_sources(job).items()}, job.seed, how.pairs
    )


def _write(report: Path, content: dict[str, Any]) -> None:
    write_whole(report, json.dumps(content))


def encode_order(order: RewardOrder) -> bytes:
    """The order as bytes for the process's standard input."""
    return json.dumps(asdict(order)).encode()


if __name__ == "__main__":
    die_with_parent()
    train(RewardOrder(**json.load(sys.stdin)))
