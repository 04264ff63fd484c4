"""Turns what a program gives as a job into a JobConfig: a file, a preset's name, a map, or the model itself.

job, settings, reward ─▶ load_job | job_from_mapping ─▶ JobConfig, or a ConfigError that names each field

A reward function may be given as an object. It is called in processes of its own, which import it by its name, so it
has to stand in a module that they can import.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from configs.checks.source_lookup import source_file
from configs.errors import ConfigError
from configs.loader import job_from_mapping, load_job
from configs.python_path import python_path
from configs.schema import JobConfig

Reward = Callable[..., object]
"""Function as ``reward.function`` names one: ``score(prompt, response, answer, **columns)``."""
JobSource = str | Path | Mapping[str, Any] | JobConfig
_INSTALLED: Final = ("site-packages", "dist-packages")
"""Names of folders that every process of this Python has."""
Settings = Mapping[str, Any]
"""Values by key, as after ``--set``: ``{"rollout.workers": 4}``; plain values, as in a job file."""


def job_of(source: JobSource, settings: Settings | None, reward: Reward | None) -> JobConfig:
    """The job, ready to run here.

    Raises:
        ConfigError: anything is wrong with it; the message names field, value, what was expected, and what to do.
    """
    values = dict(settings or {})
    if reward is not None:
        values |= {"reward.kind": "function", "reward.function": reward}
    overrides = overrides_of(values)
    if isinstance(source, str | Path):
        return load_job(source, overrides)
    if isinstance(source, JobConfig):
        return job_from_mapping(source.model_dump(mode="json", exclude_unset=True), "job", overrides)
    return job_from_mapping(_with_names(source), "job", overrides)


def overrides_of(settings: Settings) -> list[str]:
    """The settings as strings, as after ``--set``.

    Raises:
        ConfigError: a job file cannot hold a value.
    """
    return [f"{key}={_written(key, value)}" for key, value in settings.items()]


def _written(key: str, value: Any) -> str:
    value = name_of(value) if key == "reward.function" and callable(value) else value
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    except (TypeError, ValueError):
        what = f"{value!r} is a {type(value).__name__}, which no job file can hold"
        raise ConfigError.of("settings", key, what, "Give a text, a number, true or false, a list or a map") from None


def _with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The map, with a reward function in it replaced by its name."""
    section = values.get("reward")
    if callable(section):
        section = {"kind": "function", "function": section}
    if not isinstance(section, Mapping):
        return dict(values)
    section = dict(cast("Mapping[str, Any]", section))
    if callable(section.get("function")):
        section["function"] = name_of(section["function"])
    return {**values, "reward": section}


def name_of(function: Reward) -> str:
    """``module:name`` of a function.

    Raises:
        ConfigError: no other process could import it.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    shown = name or repr(function)
    if module in (None, "__main__", "builtins"):
        what = f"{shown} is defined in a notebook's cell or in the program itself, where no other process can import it"
    elif not name.isidentifier():
        what = f"{shown} is defined inside something else, so that it cannot be imported by its name"
    else:
        return f"{module}:{name}"
    fix = (
        "Write it into a file beside the notebook, such as rewards.py (a cell that begins with %%writefile rewards.py "
        "does), import it from there, and give rewards.score"
    )
    raise ConfigError.of("job", "reward.function", what, fix)


def folders_of(job: JobConfig) -> str | None:
    """Folders beside the usual ones that hold code which the job names, joined as in ``PYTHONPATH``; None if none does.

    So a run imports what its program could: from the folder of a script that was started elsewhere, say.
    """
    environment = job.environment
    named = [*(reward.function for _, reward in job.reward.each), job.algorithm.advantage, job.algorithm.loss]
    if environment.kind in ("python", "agent"):
        named += [environment.path, *environment.tools, environment.options.get("reward")]
    usual = {os.path.realpath(folder) for folder in (*python_path().split(os.pathsep), sysconfig.get_path("stdlib"))}
    found: list[str] = []
    for name in named:
        if not isinstance(name, str) or name.startswith("mcp:") or (file := source_file(name)) is None:
            continue
        above = name.partition(":")[0].count(".") + (Path(file).name == "__init__.py")
        folder = Path(file).resolve().parents[above]
        if folder.name not in _INSTALLED and str(folder) not in usual:
            found.append(str(folder))
    return os.pathsep.join(dict.fromkeys(found)) or None
