"""Prepares a job's reward models before any process needs them: a given path, fetched from a hub, or trained.

    path is a directory ──▶ itself
    path is a hub name ───▶ model_fetch ─▶ Hugging Face cache; its commit ─▶ RUN_DIR/reward_model.json
    train ────────────────▶ the user's cache, else reward_model, a process ─▶ RUN_DIR/reward_model
                            (with several rewards, names of files and directories end in a hyphen and the reward's name)

Role processes get the job with the directories. A resumed run, and a restarted head, find the directories, which are
always complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from configs.checks.critic_checks import why_no_critic
from configs.checks.reward_checks import check_reward
from configs.hub_names import is_hub_name
from configs.reward_training import RECORD
from configs.run_files import LOGS
from configs.schema import JobConfig
from configs.task_schema import Reward, WeightedReward
from supervisors.machine.processes.helper_process import run_helper
from supervisors.preparation.model_cache import ModelCache, reward_model_key
from supervisors.preparation.model_fetch import HubModel, fetch_model
from supervisors.preparation.model_preparation import in_time
from supervisors.preparation.phase import Phase, Say, Show
from supervisors.preparation.reward_model import RewardOrder, encode_order
from supervisors.tree.errors import ModelNotFetched, RewardModelNotMade

Trained = dict[str, Any]
"""Facts about a trained reward model, with ``reward``, the reward's name, and ``made``: trained, cache or kept."""


async def prepare_rewards(
    job: JobConfig, run_dir: Path, model: Path, say: Say, show: Show
) -> tuple[JobConfig, list[Trained]]:
    """Fetch or train every reward model; returns the job with their directories, and facts about each training.

    ``model``: the policy's directory.

    Raises:
        ModelNotFetched: a hub name led to no reward model.
        RewardModelNotMade: a reward model could not be trained; the message says what to do.
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
    for field, wrong, fix in check_reward(prepared) if found else []:  # the job file's check could not see it
        raise ModelNotFetched(f"{field}: {wrong}. {fix}")
    return _with_critic(prepared, model), trained


def _with_critic(job: JobConfig, policy: Path) -> JobConfig:
    """The job with the critic's path set, if the critic begins as the model of one of the rewards."""
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
    return await fetch_model(wanted, record, run_dir / LOGS / "reward_model.log", job.limits, say, show)


async def _backbone(
    job: JobConfig, where: str, reward: Reward, run_dir: Path, directory: Path, model: Path, say: Say, show: Show
) -> Path:
    """The directory of the model that the reward model is trained from."""
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
    """Have the trained model in ``directory``; returns whether it was kept, from the cache, or trained now."""
    if directory.exists():
        return "kept"
    limits, cache = job.limits, ModelCache.of_user()
    taken = directory.with_name(f"{directory.name}.cached")  # not ``directory``: a hung copy may write here late
    shutil.rmtree(taken, ignore_errors=True)

    def key() -> str:
        return reward_model_key(job, reward, backbone)

    if await in_time(limits.model_cache_s, lambda: cache.take(key(), taken)):
        taken.rename(directory)
        return "cache"
    shutil.rmtree(taken, ignore_errors=True)
    report, log = directory.with_name(f"{directory.name}_training.json"), run_dir / LOGS / "reward_model.log"
    report.unlink(missing_ok=True)
    order = RewardOrder(job.model_dump_json(), where, str(backbone), str(directory), str(report))
    say("training the reward model")

    def look() -> None:
        if "done" in (told := _read(report)):
            show(Phase("training the reward model", int(told["done"]), int(told["total"]), "steps"))

    limit_s = limits.reward_training_timeout_s
    try:
        end = await run_helper(
            "supervisors.preparation.reward_model", log, limits, limit_s,
            stdin=encode_order(order), look=look, every_s=limits.model_making_look_s,
        )  # fmt: skip
    except TimeoutError as error:
        raise RewardModelNotMade(
            f"{where}.train: the reward model was not trained within limits.reward_training_timeout_s ({limit_s:g} s); "
            "raise it, or train it apart with headrace train-reward and name it in path"
        ) from error
    told = _read(report)
    report.unlink(missing_ok=True)
    if "error" in told:
        raise RewardModelNotMade(str(told["error"]))
    if end.exit.code != 0 or not directory.exists():
        raise RewardModelNotMade(f"{where}.train: the training has ended {end}")
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
