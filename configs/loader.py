"""Turns a job file into a JobConfig, or into one message that says what to correct.

    file ── read_yaml ──▶ mapping ── --set a.b=c ──▶ mapping ── schema ──▶ JobConfig ── checks ──▶ JobConfig
                                                          └──────── ConfigError (exit code 2) ◀────┘

Types are strict: ``steps: "60"`` and ``steps: true`` are errors, not guesses. Relative paths in the file are taken from
the working directory, else from beside the file, and are absolute afterwards, so that the resolved job can be resumed
from anywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml

from configs.checks.checks import check_job
from configs.errors import ConfigError, Problem
from configs.local_paths import found
from configs.presets import file_or_preset, preset_names
from configs.reward_training import ANSWERS
from configs.schema import JobConfig
from configs.task_schema import DataConfig, Reward
from configs.validation import dotted_keys, validate
from configs.yaml_source import Path_, parse_value, read_yaml

_FORMER: Final[dict[tuple[str, str], float | None]] = {
    ("rollout", "top_p"): 1.0,
    ("rollout", "top_k"): 0,
    ("limits", "result_cache_entries"): None,
    ("limits", "result_cache_s"): None,
    ("limits", "loop_lag_warn_s"): None,
}
"""Removed keys of older job files, each with the one value still accepted; None: any, as the key had no effect."""
_RENAMED: Final[dict[tuple[str, str], str]] = {
    ("limits", "deltas_under_way"): "reports_under_way",
    ("limits", "delta_patience_s"): "report_patience_s",
    ("limits", "delta_interval_s"): "report_interval_s",
    ("trainer", "gradient_checkpointing"): "recompute",
}
"""Renamed keys of older job files → their names now."""
_REVALUED: Final[dict[tuple[str, str], dict[Any, str]]] = {("trainer", "recompute"): {True: "whole", False: "none"}}
"""Values that keys had under their former names → those that mean the same now."""


def load_job(path: str | Path, overrides: list[str] | None = None) -> JobConfig:
    """The job in the YAML file at ``path``, or in the preset of that name, ready to run here.

    ``overrides`` have the form ``a.b=value``.

    Raises:
        ConfigError: anything is wrong with it, from syntax to a missing data file.
    """
    file, source = _read(path, overrides)
    return _checked(source, file.resolve().parent)


def _read(path: str | Path, overrides: list[str] | None) -> tuple[Path, _Source]:
    """The job file at ``path``, or the preset of that name. Raises ConfigError."""
    file = file_or_preset(path)
    values, lines = read_yaml(file, presets=preset_names)
    if "jobs" in values:
        fix = f"Run `headrace simulate {path}`, or name a job: {', '.join(preset_names())}"
        raise ConfigError.of(str(file), "jobs", "this is a scenario for simulation, no job", fix)
    return file, _Source(file, values, lines, overrides or [])


def _checked(source: _Source, beside: Path) -> JobConfig:
    job = _resolve_paths(source.job(), beside)
    problems = [Problem(source.where(field), field, wrong, fix) for field, wrong, fix in check_job(job)]
    if problems:
        raise ConfigError(problems)
    return job


def read_job(path: str | Path, overrides: list[str] | None = None) -> JobConfig:
    """Read a job without the checks of this machine: for a job that another process will check and run."""
    file, source = _read(path, overrides)
    return _resolve_paths(source.job(), file.resolve().parent)


def job_from_mapping(values: Mapping[str, Any], where: str = "job", overrides: list[str] | None = None) -> JobConfig:
    """A job that came as a plain map, over the control socket or from a program: checked as in load_job.

    Raises:
        ConfigError: as load_job; ``where`` stands in place of the file's name.
    """
    return _checked(_Source(where, copy.deepcopy(dict(values)), {}, overrides or []), Path.cwd())


def dump_job(job: JobConfig) -> str:
    """The resolved job as YAML; ``load_job`` of it gives ``job`` again."""
    return yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Source:
    """Holds one job as it was written, with its overrides, and knows where each field stands."""

    def __init__(
        self, path: str | Path, values: dict[str, Any], lines: Mapping[Path_, int], overrides: list[str]
    ) -> None:
        self._path, self._values, self._lines = path, values, lines
        self._overridden: dict[Path_, str] = {}
        for override in overrides:
            self._override(override)

    def job(self) -> JobConfig:
        return _validate(self._values, self.where)

    def where(self, field: str) -> str:
        """The nearest thing that was written: the override, the field's line, its section's line, or the file."""
        at = tuple(field.split("."))
        at = self._as_written(at)
        while at:
            if at in self._overridden:
                return f"--set {self._overridden[at]}"
            if at in self._lines:
                return f"{self._path}:{self._lines[at]}"
            at = at[:-1]
        return str(self._path)

    def _as_written(self, at: Path_) -> Path_:
        """Messages name the items of ``reward`` as those of ``reward.parts``, and it may be written as a list."""
        is_list = at[:2] == ("reward", "parts") and isinstance(self._values.get("reward"), list)
        return (at[0], *at[2:]) if is_list else at

    def _override(self, override: str) -> None:
        name, equals, text = override.partition("=")
        at = tuple(name.strip().split("."))
        if not equals or not all(at):
            raise _bad_override(override, "", "is not of the form a.b=value", "Write --set rollout.workers=4")
        try:
            value = parse_value(text)
        except yaml.YAMLError as error:
            raise _bad_override(override, name, f"the value is not YAML: {error}", "Quote the value") from error
        at = self._as_written(at)
        section: Any = self._values
        for depth, key in enumerate(at):
            place = _place(section, key, override, name, ".".join(at[:depth]))
            if depth == len(at) - 1:
                section[place] = value
            elif isinstance(section, dict):
                section = cast("dict[str, Any]", section).setdefault(key, {})
            else:
                section = section[place]
        self._overridden[at] = override


def _place(section: object, key: str, override: str, name: str, outer: str) -> str | int:
    """``key`` as what a section, or a list, is indexed with. Raises ConfigError if ``section`` has no such place."""
    if isinstance(section, dict) and key.isdecimal() and key not in section:
        fix = f"Name a key below {outer}, or set {outer} itself to a list"
        raise _bad_override(override, name, f"{outer or 'the job'} is no list here", fix)
    if isinstance(section, dict):
        return key
    if not isinstance(section, list):
        fix = f"Set {outer} itself, or mend the file"
        raise _bad_override(override, name, f"{outer} is {section!r}, not a section", fix)
    count = len(cast("list[object]", section))
    if not key.isdecimal() or int(key) >= count:
        numbers = f"0 to {count - 1}" if count else "none: set the list itself"
        fix = f"Write the number of an item, counted from 0: {outer}.0"
        raise _bad_override(override, name, f"{outer} is a list, and its items are {numbers}", fix)
    return int(key)


def _bad_override(override: str, field: str, wrong: str, fix: str) -> ConfigError:
    return ConfigError.of(f"--set {override}", field, wrong, fix)


def _validate(values: dict[str, Any], where: Callable[[str], str]) -> JobConfig:
    return validate(JobConfig, _in_todays_keys(values, where), where)


def _in_todays_keys(values: dict[str, Any], where: Callable[[str], str]) -> dict[str, Any]:
    """``values`` with today's keys: the job files of older runs may have keys that were removed or renamed."""
    for (section, key), only in _FORMER.items():
        given = values.get(section)
        if not isinstance(given, dict) or key not in given:
            continue
        value, field = cast("dict[str, Any]", given)[key], f"{section}.{key}"
        if only is not None and value != only:
            wrong = f"{value}, but there is no such key any more: the trainer computes with the whole distribution"
            raise ConfigError.of(where(field), field, wrong, "Remove it")
        values = values | {section: {name: item for name, item in given.items() if name != key}}
    for (section, key), now in _RENAMED.items():
        given = values.get(section)
        if isinstance(given, dict) and key in given:
            if now in given:
                field, wrong = f"{section}.{key}", f"given beside {now}, which is its name now"
                raise ConfigError.of(where(field), field, wrong, "Remove it")
            item: Any = cast("dict[str, Any]", given)[key]
            item = _REVALUED.get((section, now), {}).get(item, item) if isinstance(item, bool) else item
            values = values | {section: {n: v for n, v in given.items() if n != key} | {now: item}}
    return values


def schema_keys() -> list[str]:
    """Every key of a job file, dotted, in the schema's order."""
    return dotted_keys(JobConfig)


def _resolve_paths(job: JobConfig, beside: Path) -> JobConfig:
    """Make the paths of local files absolute: from the working directory, else from beside the job file."""
    model = job.model
    data, evaluation = _data_paths(job.data, beside), job.eval
    if evaluation is not None:
        evaluation = evaluation.model_copy(update={"data": _data_paths(evaluation.data, beside)})
    if model.path is not None:
        new = str(Path.cwd() / model.path) if model.source == "tiny" else model.path  # a tiny model may be made there
        model = model.model_copy(update={"path": found(model.path, beside, otherwise=new)})
    provider = job.provider
    if provider.trace is not None:
        provider = provider.model_copy(update={"trace": found(provider.trace, beside)})
    rollout = job.rollout
    if rollout.ranker_model is not None:
        rollout = rollout.model_copy(update={"ranker_model": found(rollout.ranker_model, beside)})
    critic = job.critic
    if critic.path is not None:
        critic = critic.model_copy(update={"path": found(critic.path, beside)})
    reward = job.reward.with_each(lambda _, one: _reward_paths(one, beside))
    changed = {
        "critic": critic,
        "data": data,
        "eval": evaluation,
        "model": model,
        "provider": provider,
        "reward": reward,
    }
    return job.model_copy(update=changed | {"rollout": rollout})


def _data_paths(data: DataConfig, beside: Path) -> DataConfig:
    return data.with_sources(
        {
            name: source if source.path is None else source.model_copy(update={"path": found(source.path, beside)})
            for name, source in data.sources.items()
        }
    )


def _reward_paths(reward: Reward, beside: Path) -> dict[str, Any]:
    if (train := reward.train) is not None:
        files = {"preferences": train.preferences, "model": train.model}
        files = {key: path for key, path in files.items() if path and (key, path) != ("preferences", ANSWERS)}
        train = train.model_copy(update={key: found(path, beside) for key, path in files.items()})
    return {"path": found(reward.path, beside) if reward.path else reward.path, "train": train}
