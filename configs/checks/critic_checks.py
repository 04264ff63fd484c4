"""Checks of a critic beyond the schema: its keys in jobs without one, and models that cannot be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from configs.checks.learning_checks import is_set
from configs.checks.model_files import problem_of
from configs.checks.reward_checks import labels_of
from configs.errors import Found
from configs.model_files import ModelFileBroken, read_model_file, text_config
from configs.schema import JobConfig


def check_critic(job: JobConfig) -> list[Found]:
    return _check_ppo(job) if job.algorithm.has_critic else _check_without(job)


def _check_without(job: JobConfig) -> list[Found]:
    wrong = f"is set, but algorithm.name is {job.algorithm.name}, which has no critic"
    given = [f"critic.{key}" for key in type(job.critic).model_fields if is_set(job.critic, key)]
    return [(key, wrong, "Set algorithm.name to ppo, or remove it") for key in given]


def _check_ppo(job: JobConfig) -> list[Found]:
    found: list[Found] = []
    if job.critic.warmup_steps >= job.steps:
        wrong = f"{job.critic.warmup_steps} leaves none of the {job.steps} steps to the policy"
        found.append(("critic.warmup_steps", wrong, "Lower it"))
    return [*found, *_check_path(job), *_check_reward(job)]


def _check_reward(job: JobConfig) -> list[Found]:
    name = job.critic.reward
    if name is None:
        return []
    if job.critic.path is not None:
        return [("critic.reward", f"{name!r}, and critic.path is given, too", "Remove one of them")]
    reward = job.reward.named(name)
    if reward is None or reward.kind != "model":
        return [("critic.reward", f"{name!r} is no reward of this job with kind: model", "Name one that is")]
    return []


def _check_path(job: JobConfig) -> list[Found]:
    given, policy = job.critic.path, Path(job.model.path or "").expanduser()
    if given is None:
        return []
    path = Path(given).expanduser()
    if not (path / "config.json").is_file():
        wrong = f"{given!r} is no Hugging Face model directory: it has no config.json"
        return [("critic.path", wrong, "Name the directory that from_pretrained would load")]
    if problem := problem_of(path, given, weights=job.trainer.backend != "simulated"):
        return [("critic.path", *problem)]
    known = bool(job.model.path) and (policy / "config.json").is_file()  # a tiny or a hub model: once it is there
    problem = why_no_critic(path, policy if known else None)
    return [("critic.path", *problem)] if problem else []


def why_no_critic(critic: Path, policy: Path | None) -> tuple[str, str] | None:
    """Why the model in ``critic`` cannot judge the tokens of the one in ``policy``: (what is wrong, what to do).

    ``policy``: None if it is not there yet; then only the critic itself is checked.
    """
    try:
        config = read_model_file(critic, "config.json")
        if is_classifier(config) and (labels := labels_of(config)) != 1:
            wrong = f"{str(critic)!r} has {labels} labels, and a critic has one value"
            return wrong, "Name a reward model that was trained with num_labels=1, or a causal language model"
        if policy is None:
            return None
        ours, theirs = (int(text_config(path).get("vocab_size") or 0) for path in (critic, policy))
        if ours < theirs:
            wrong = f"{str(critic)!r} knows {ours} tokens, and the policy in {str(policy)!r} has {theirs}"
            return wrong, "Name a model with the policy's tokenizer"
        known = _tokens(critic)
        if token := next((token for token, id_ in _tokens(policy).items() if known and known.get(token) != id_), None):
            wrong = (
                f"{str(critic)!r} has another tokenizer than the policy in {str(policy)!r}: {token!r} is not its token"
            )
            return wrong, "Name a model with the policy's tokenizer; the critic reads the policy's tokens"
    except ModelFileBroken as error:
        return str(error), "Or name another directory"
    except (LookupError, TypeError, ValueError) as error:
        wrong = f"config.json or tokenizer.json of {str(critic)!r}, or of the policy, is not as transformers writes it"
        return f"{wrong} ({error!r})", "Fetch or save it again"
    return None


def is_classifier(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a model that was saved with a classification head."""
    architectures: object = config.get("architectures")
    names = cast("list[object]", architectures) if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _tokens(directory: Path) -> dict[str, int]:
    """Ids by token, from tokenizer.json; empty if that has none, as with a slow tokenizer."""
    content = read_model_file(directory, "tokenizer.json")
    model: object = content.get("model")
    vocabulary: object = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # unigram: [token, score] each
        pairs = enumerate(cast("list[Any]", vocabulary))
        return {str(entry[0]): index for index, entry in pairs}
    if not isinstance(vocabulary, dict):
        return {}
    added: object = content.get("added_tokens")
    entries = cast("list[dict[str, Any]]", added) if isinstance(added, list) else []
    return cast("dict[str, int]", vocabulary) | {str(entry["content"]): int(entry["id"]) for entry in entries}
