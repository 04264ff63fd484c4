"""The reward models of a job, before any process needs them: where the job says, fetched from a hub, or trained.

    path is a directory ──▶ itself
    path is a hub name ───▶ supervisors.jobs.model_fetch ─▶ Hugging Face cache; its commit ─▶ RUN_DIR/reward_model.json
    train ────────────────▶ the user's cache, else supervisors.jobs.reward_model, a process ─▶ RUN_DIR/reward_model
                            (of several rewards each file and directory has the reward's name behind a hyphen)

Role processes get the job with the directories. A resumed run, and a head that was started again, find what is there:
a directory of that name is whole.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from configs.checks.critic_checks import why_no_critic
from configs.checks.reward_checks import check_reward
from configs.hub_names import is_hub_name
from configs.reward_training import RECORD
from configs.schema import JobConfig
from configs.task_schema import Reward, WeightedReward
from supervisors.jobs.child_wait import child_ended
from supervisors.jobs.model_cache import ModelCache, reward_model_key
from supervisors.jobs.model_fetch import HubModel, fetch_model
from supervisors.jobs.model_preparation import in_time
from supervisors.jobs.phase import Phase, Say, Show
from supervisors.jobs.reward_model import RewardOrder, encode_order
from supervisors.machine.process import Launch, launch
from supervisors.machine.process_log import last_lines
from supervisors.tree.errors import ModelNotFetched, RewardModelNotMade

Trained = dict[str, Any]
"""What came of a training, and ``reward``, the name of the reward; with ``made``: trained, cache or kept."""


async def prepare_rewards(
    job: JobConfig, run_dir: Path, model: Path, say: Say, show: Show
) -> tuple[JobConfig, list[Trained]]:
    """Have every reward model on disk; returns the job with their directories, and what came of each training.

    ``model``: the policy's directory.

    Raises:
        ModelNotFetched: a hub name led to no reward model.
        RewardModelNotMade: one could not be trained; the message says what to mend.
    """
    found: dict[str, Path] = {}
    trained: list[Trained] = []
    for where, reward in job.reward.each:
        name = reward.called if isinstance(reward, WeightedReward) else ""
        directory = run_dir.resolve() / (f"reward_model-{name}" if name else "reward_model")
        if reward.train is not None:
            backbone = await _backbone(job, where, reward, run_dir, directory, model, say, show)
            made = await _train(job, where, reward, run_dir, directory, backbone, say, show)
            trained.append(_tell(directory, name or "model", made, say))
            found[where] = directory
        elif reward.path is not None and _of_hub(reward.path):
            wanted = HubModel(f"{where}.path", reward.path, f"{where}.revision", reward.revision)
            found[where] = await _fetch(job, wanted, run_dir, directory, say, show)
    changes = {where: {"path": str(path), "train": None, "revision": None} for where, path in found.items()}
    prepared = job.model_copy(update={"reward": job.reward.with_each(lambda where, _: changes.get(where, {}))})
    for field, wrong, fix in check_reward(prepared) if found else []:  # what the job file's check could not see yet
        raise ModelNotFetched(f"{field}: {wrong}. {fix}")
    return _with_critic(prepared, model), trained


def _with_critic(job: JobConfig, policy: Path) -> JobConfig:
    """A job whose critic begins as the model of one of its rewards gets that one's directory."""
    reward = None if job.critic.reward is None else job.reward.named(job.critic.reward)
    if reward is None or reward.path is None:
        return job
    if problem := why_no_critic(Path(reward.path).expanduser(), policy):
        raise ModelNotFetched(f"critic.reward: {problem[0]}. {problem[1]}")
    return job.model_copy(update={"critic": job.critic.model_copy(update={"path": reward.path, "reward": None})})


def _of_hub(path: str) -> bool:
    return is_hub_name(path) and not Path(path).expanduser().exists()


async def _fetch(job: JobConfig, wanted: HubModel, run_dir: Path, directory: Path, say: Say, show: Show) -> Path:
    record = directory.with_name(f"{directory.name}.json")
    return await fetch_model(wanted, record, run_dir / "logs" / "reward_model.log", job.limits, say, show)


async def _backbone(
    job: JobConfig, where: str, reward: Reward, run_dir: Path, directory: Path, model: Path, say: Say, show: Show
) -> Path:
    """What the reward model is made of."""
    assert reward.train is not None
    given = reward.train.model
    if given is None:
        return model
    if not _of_hub(given):
        return Path(given).expanduser()
    wanted = HubModel(f"{where}.train.model", given, f"{where}.revision", reward.revision)
    return await _fetch(job, wanted, run_dir, directory, say, show)


async def _train(
    job: JobConfig, where: str, reward: Reward, run_dir: Path, directory: Path, backbone: Path, say: Say, show: Show
) -> str:
    """Have the trained model in ``directory``; returns how it came there."""
    if directory.exists():
        return "kept"
    limits, cache = job.limits, ModelCache.of_user()
    taken = directory.with_name(f"{directory.name}.cached")  # not the trainer's: a home that hung may write it late
    shutil.rmtree(taken, ignore_errors=True)

    def key() -> str:
        return reward_model_key(job, reward, backbone)

    if await in_time(limits.model_cache_s, lambda: cache.take(key(), taken)):
        taken.rename(directory)
        return "cache"
    shutil.rmtree(taken, ignore_errors=True)
    report, log = directory.with_name(f"{directory.name}_training.json"), run_dir / "logs" / "reward_model.log"
    report.unlink(missing_ok=True)
    order = RewardOrder(job.model_dump_json(), where, str(backbone), str(directory), str(report))
    command = [sys.executable, "-P", "-m", "supervisors.jobs.reward_model"]
    say("training the reward model")
    trainer = launch(Launch(command, log, stdin=encode_order(order)))

    def look() -> None:
        if "done" in (told := _read(report)):
            show(Phase("training the reward model", int(told["done"]), int(told["total"]), "steps"))

    limit_s = limits.reward_training_timeout_s
    try:
        end = await child_ended(trainer, limit_s, look, limits.model_making_look_s)
    except TimeoutError as error:
        raise RewardModelNotMade(
            f"{where}.train: the reward model was not trained within limits.reward_training_timeout_s ({limit_s:g} s); "
            "raise it, or train it apart with headrace train-reward and name it in path"
        ) from error
    told = _read(report)
    report.unlink(missing_ok=True)
    if "error" in told:
        raise RewardModelNotMade(str(told["error"]))
    if end.code != 0 or not directory.exists():
        tail = "\n".join(last_lines(log, limits.exit_log_lines))
        raise RewardModelNotMade(f"{where}.train: the training has ended ({end}); last lines of {log}:\n{tail}")
    for warning in told["warnings"]:
        say(f"warning: {warning}")
    if sum(file.stat().st_size for file in directory.iterdir()) <= limits.reward_cache_bytes:
        await in_time(limits.model_cache_s, lambda: cache.keep(key(), directory))
    return "trained"


def _read(report: Path) -> dict[str, Any]:
    return json.loads(report.read_text("utf-8")) if report.exists() else {}


def _tell(directory: Path, name: str, made: str, say: Say) -> Trained:
    facts = _read(directory / RECORD)
    accuracy, held_out, pairs = (facts.get(key) for key in ("accuracy_held_out", "pairs_held_out", "pairs"))
    how = {"trained": f"trained in {facts.get('seconds')} s", "cache": "from the cache", "kept": "trained before"}[made]
    say(f"the reward model {name} ({how}) ranks {accuracy:.1%} of {held_out} held-out pairs right, after {pairs} pairs")
    keys = ("accuracy_held_out", "pairs_held_out", "pairs", "steps", "loss", "reward_mean", "reward_spread", "seconds")
    return {"reward": name, "made": made, **{key: facts[key] for key in keys}}
