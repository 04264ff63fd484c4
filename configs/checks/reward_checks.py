"""Checks that each reward has a kind and the keys of that kind, and that several rewards have different names."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

from configs.checks.model_checks import hub_problem
from configs.checks.model_files import scorer_weights_problem
from configs.checks.source_lookup import find_function
from configs.data_forms import UnknownForm, form_of
from configs.errors import Found
from configs.hub_names import is_hub_name
from configs.reward_training import ANSWERS, RewardTraining
from configs.schema import JobConfig
from configs.task_schema import Reward

_KIND_OF: Final = {
    "function": "function",
    "url": "http",
    "key_env": "http",
    "batch_samples": "http",
    "path": "model",
    "revision": "model",
    "train": "model",
    "device": "model",
    "batch_tokens": "model",
    "max_tokens": "model",
}
"""Key of a reward → the kind that it belongs to."""
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
"""Files of which a tokenizer has at least one."""


def check_reward(job: JobConfig) -> list[Found]:
    """Problems of ``reward``, or of each of several."""
    if job.has_episodes or not job.reward.each:
        return _check_source(job)
    found = [problem for where, reward in job.reward.each for problem in _check_one(job, where, reward)]
    return [*found, *_check_parts(job)]


def _check_source(job: JobConfig) -> list[Found]:
    """Check that rewards come from exactly one of the environment and ``reward``."""
    if not job.has_episodes:
        fix = "Use one of: exact_match, math_verify, reasoning_gym, function, http, model"
        return [("reward.kind", "is missing, and has no default", fix)]
    if job.reward.each:
        wrong = f"is set, and environment.kind is {job.environment.kind}: the reward comes from the environment"
        return [("reward", wrong, "Remove it, and let the environment return the reward")]
    return []


def _check_one(job: JobConfig, where: str, reward: Reward) -> list[Found]:
    if reward.kind is None:
        fix = "Use one of: exact_match, math_verify, reasoning_gym, function, http, model"
        return [(f"{where}.kind", "is missing, and has no default", fix)]
    pattern = [*_check_pattern(where, reward), *_check_keys(where, reward)]
    if reward.kind == "http":
        return [*pattern, *_check_url(where, reward)]
    if reward.kind == "model":
        return [*pattern, *_check_reward_model(where, reward)]
    if reward.kind == "function" and not reward.function:
        fix = "Name it as package.module:name"
        return [*pattern, (f"{where}.function", f"is missing, and {where}.kind is function", fix)]
    others = [source for source in job.data.sources.values() if source.source != "reasoning_gym"]
    if reward.kind == "reasoning_gym" and others:
        key = "a data.source" if job.data.mix else "data.source"
        wrong = f"reasoning_gym scores its own tasks only, and {key} is {others[0].source}"
        fix = "Set data.source to reasoning_gym, or use exact_match, math_verify or function"
        return [*pattern, (f"{where}.kind", wrong, fix)]
    problem = find_function(reward.function) if reward.function else None
    return [*pattern, *([(f"{where}.function", *problem)] if problem else [])]


def _check_keys(where: str, reward: Reward) -> list[Found]:
    """Keys that are set, and belong to another kind."""
    found: list[Found] = []
    for key, kind in _KIND_OF.items():
        if kind != reward.kind and getattr(reward, key) != Reward.model_fields[key].default:
            wrong = f"is set, but {where}.kind is {reward.kind}"
            found.append((f"{where}.{key}", wrong, f"Set {where}.kind to {kind}, or remove it"))
    if reward.batched and reward.answer_pattern is not None:
        wrong = f"is set, but {where}.kind {reward.kind} scores whole responses"
        found.append((f"{where}.answer_pattern", wrong, "Remove it"))
    return found


def _check_url(where: str, reward: Reward) -> list[Found]:
    fix = "Write it as https://host:port/path"
    if not reward.url:
        return [(f"{where}.url", f"is missing, and {where}.kind is http", fix)]
    try:
        parts = urlsplit(reward.url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return [(f"{where}.url", "is no web address", fix)]
    if parts.username is not None or parts.password is not None:
        wrong = "holds a name or a password, and job files are copied into runs"
        return [(f"{where}.url", wrong, f"Put the key into an environment variable, and name that in {where}.key_env")]
    if not good or not reward.url.isascii() or not reward.url.isprintable():
        return [(f"{where}.url", f"{reward.url!r} is no web address of http or https", fix)]
    if reward.key_env is not None and not os.environ.get(reward.key_env, "").strip():
        wrong = f"the environment variable {reward.key_env!r} is not set, or empty"
        return [(f"{where}.key_env", wrong, "Export the key in it, or remove key_env if the scorer wants none")]
    return []


def _check_reward_model(where: str, reward: Reward) -> list[Found]:
    """Problems of a reward model's files, without loading them, or of the settings of its training."""
    fix = "Name the directory that from_pretrained would load"
    if reward.train is not None:
        if reward.path:
            wrong = f"is set, and so is {where}.path: a model that is there already is not trained"
            return [
                (
                    f"{where}.train",
                    wrong,
                    f"Remove one of them; to train on from a model, name it in {where}.train.model",
                )
            ]
        return [*_check_training(where, reward.train), *_check_revision(where, reward, reward.train.model)]
    if not reward.path:
        fix = f"{fix}, or say in {where}.train what to train one on"
        return [(f"{where}.path", f"is missing, and {where}.kind is model", fix)]
    revision = _check_revision(where, reward, reward.path)
    if _of_hub(reward.path):
        problem = hub_problem(reward.path)
        return [*revision, *([(f"{where}.path", *problem)] if problem else [])]
    path = Path(reward.path).expanduser()
    try:
        config: object = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        wrong = f"{reward.path!r} is no Hugging Face model directory: it has no config.json that can be read"
        return [(f"{where}.path", wrong, f"{fix}, or a hub name")]
    if not any((path / name).is_file() for name in _TOKENIZERS):
        wrong = f"{reward.path!r} has no tokenizer, and responses are read with the reward model's own"
        return [(f"{where}.path", wrong, "Save its tokenizer there (tokenizer.save_pretrained)")]
    if (labels := labels_of(config)) != 1:
        wrong = f"{reward.path!r} has {labels} labels, and a reward model has one"
        return [(f"{where}.path", wrong, "Name a model that was trained with num_labels=1")]
    if problem := scorer_weights_problem(path, reward.path):
        return [(f"{where}.path", *problem)]
    return revision


def _of_hub(path: str) -> bool:
    return is_hub_name(path) and not Path(path).expanduser().exists()


def _check_revision(where: str, reward: Reward, path: str | None) -> list[Found]:
    if reward.revision is None or (path is not None and _of_hub(path)):
        return []
    wrong = f"{reward.revision!r} is set, but only a hub name has revisions, and the model is none"
    return [(f"{where}.revision", wrong, "Remove it, or name a model of the hub")]


def _check_training(where: str, train: RewardTraining) -> list[Found]:
    found: list[Found] = []
    preferences, model = Path(train.preferences).expanduser(), train.model
    if train.preferences != ANSWERS:
        try:
            if not preferences.exists():
                raise UnknownForm("does not exist", f"Name a file with the columns chosen and rejected, or {ANSWERS}")
            form_of(preferences, "file")
        except UnknownForm as error:
            found.append((f"{where}.train.preferences", f"{train.preferences!r}: {error}", error.fix))
    if model is not None and _of_hub(model):
        if problem := hub_problem(model):
            found.append((f"{where}.train.model", *problem))
    elif model is not None and not (Path(model).expanduser() / "config.json").is_file():
        wrong = f"{model!r} is no Hugging Face model directory: it has no config.json"
        found.append(
            (f"{where}.train.model", wrong, "Name one, or a hub name, or leave it out to begin with the policy")
        )
    elif model is not None and (problem := scorer_weights_problem(Path(model).expanduser(), model)):
        found.append((f"{where}.train.model", *problem))
    return found


def labels_of(config: object) -> int:
    """Number of labels that transformers finds in a config.json; 2 if it names none, as that of a language model."""
    named = cast("dict[str, object]", config) if isinstance(config, dict) else {}
    labels = named.get("id2label")
    if isinstance(labels, dict):
        return len(cast("dict[str, object]", labels))
    count = named.get("num_labels")
    return count if isinstance(count, int) else 2


def _check_pattern(where: str, reward: Reward) -> list[Found]:
    if reward.answer_pattern is None:
        return []
    try:
        groups = re.compile(reward.answer_pattern).groups
        wrong = "" if groups == 1 else f"has {groups} groups, expected 1"
    except re.error as error:
        wrong = f"is no regular expression: {error}"
    fix = r"Put one pair of parentheses around the answer, such as '####\s*(\S+)'"
    return [(f"{where}.answer_pattern", f"{reward.answer_pattern!r} {wrong}", fix)] if wrong else []


def _check_parts(job: JobConfig) -> list[Found]:
    reward = job.reward
    if not reward.parts:
        return []
    found: list[Found] = []
    for key, field in Reward.model_fields.items():
        if getattr(reward, key) != field.default:
            wrong = "is set, and so is reward.parts, whose items have each their own"
            found.append((f"reward.{key}", wrong, "Move it into one of them, or remove reward.parts"))
    for name, count in Counter(reward.names).items():
        if count > 1:
            wrong = f"{count} of them are called {name!r}, and each is a metric of that name"
            found.append(("reward.parts", wrong, "Give each a name of its own"))
    if not any(part.weight for part in reward.parts):
        fix = "Give at least one a weight other than 0"
        found.append(("reward.parts", "all weights are 0: every reward would be 0, and nothing be learnt", fix))
    return found
