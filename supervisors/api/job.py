"""What a program calls a job becomes a JobConfig: a file, a preset's name, a map, or the model itself.

job, settings, reward ─▶ load_job | job_from_mapping ─▶ JobConfig, or a ConfigError that names each field

A reward function may be given as an object. It is called in processes of its own, which import it by its name, so it
has to stand in a module that they can import.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from configs.errors import ConfigError
from configs.loader import job_from_mapping, load_job
from configs.schema import JobConfig

Reward = Callable[..., object]
"""Function as ``reward.function`` names one: ``score(prompt, response, answer, **columns)``."""
JobSource = str | Path | Mapping[str, Any] | JobConfig
Settings = Mapping[str, Any]
"""Values by key, as after ``--set``: ``{"rollout.workers": 4}``. Plain ones, as in a job file."""


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
    """As after ``--set``.

    Raises:
        ConfigError: a value is none that a job file can hold.
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
    """The map, with the name of a reward function that it may hold."""
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


def folder_of(job: JobConfig) -> str | None:
    """The folder from which this program has imported the job's reward function; None if it has not."""
    module = (job.reward.function or "").partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    return str(Path(file).resolve().parents[module.count(".")]) if file and module else None
