"""A job file becomes a JobConfig, or one message that says what to mend.

    file ── read_yaml ──▶ mapping ── --set a.b=c ──▶ mapping ── schema ──▶ JobConfig ── checks ──▶ JobConfig
                                                          └──────── ConfigError (exit code 2) ◀────┘

Types are strict: ``steps: "60"`` and ``steps: true`` are errors, not guesses. Relative paths in the file are taken from
the working directory, else from beside the file, and are absolute afterwards, so that the resolved job can be resumed
from anywhere.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.checks import check_job
from configs.errors import ConfigError, Problem
from configs.schema import JobConfig
from configs.yaml_source import Path_, parse_value, read_yaml


def load_job(path: str | Path, overrides: list[str] | None = None) -> JobConfig:
    """The job in the YAML file at ``path``, with ``overrides`` of the form ``a.b=value`` applied, ready to run here.

    Raises:
        ConfigError: anything is wrong with it, from syntax to a missing data file.
    """
    source = _Source(Path(path), overrides or [])
    job = _resolve_paths(source.job(), Path(path).resolve().parent)
    problems = [Problem(source.where(field), field, wrong, fix) for field, wrong, fix in check_job(job)]
    if problems:
        raise ConfigError(problems)
    return job


def read_job(path: str | Path, overrides: list[str] | None = None) -> JobConfig:
    """As load_job, but without the checks of this machine: for a job that another process will check and run."""
    return _resolve_paths(_Source(Path(path), overrides or []).job(), Path(path).resolve().parent)


def job_from_mapping(values: Mapping[str, Any], where: str = "job") -> JobConfig:
    """A job that came over the control socket as a plain map: schema and machine checks as in load_job.

    Raises:
        ConfigError: as load_job; ``where`` stands in place of the file's name.
    """
    job = _resolve_paths(_validate(dict(values), lambda _: where), Path.cwd())
    problems = [Problem(where, field, wrong, fix) for field, wrong, fix in check_job(job)]
    if problems:
        raise ConfigError(problems)
    return job


def dump_job(job: JobConfig) -> str:
    """The resolved job as YAML; ``load_job`` of it gives ``job`` again."""
    return yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Source:
    """One file with its overrides: knows where each field was written."""

    def __init__(self, path: Path, overrides: list[str]) -> None:
        self._path = path
        self._values, self._lines = read_yaml(path)
        self._overridden: dict[Path_, str] = {}
        for override in overrides:
            self._override(override)

    def job(self) -> JobConfig:
        return _validate(self._values, self.where)

    def where(self, field: str) -> str:
        """The nearest thing that was written: the override, the field's line, its section's line, or the file."""
        at = tuple(field.split("."))
        while at:
            if at in self._overridden:
                return f"--set {self._overridden[at]}"
            if at in self._lines:
                return f"{self._path}:{self._lines[at]}"
            at = at[:-1]
        return str(self._path)

    def _override(self, override: str) -> None:
        name, equals, text = override.partition("=")
        at = tuple(name.strip().split("."))
        if not equals or not all(at):
            raise _bad_override(
                override,
                "",
                "is not of the form a.b=value",
                "Write --set rollout.workers=4",
            )
        try:
            value = parse_value(text)
        except yaml.YAMLError as error:
            raise _bad_override(override, name, f"the value is not YAML: {error}", "Quote the value") from error
        section: dict[str, Any] = self._values
        for depth, key in enumerate(at[:-1]):
            inner = section.setdefault(key, {})
            if not isinstance(inner, dict):
                outer = ".".join(at[: depth + 1])
                raise _bad_override(
                    override,
                    name,
                    f"{outer} is {inner!r}, not a section",
                    f"Set {outer} itself, or mend the file",
                )
            section = cast("dict[str, Any]", inner)
        section[at[-1]] = value
        self._overridden[at] = override


def _bad_override(override: str, field: str, wrong: str, fix: str) -> ConfigError:
    return ConfigError([Problem(f"--set {override}", field, wrong, fix)])


def _validate(values: dict[str, Any], where: Any) -> JobConfig:
    try:
        text = json.dumps(values)  # JSON mode: strict types, yet lists stand for tuples
    except (TypeError, ValueError) as error:
        problem = Problem(
            where(""),
            "",
            f"holds something that JSON cannot carry: {error}",
            "Use plain YAML values and text keys",
        )
        raise ConfigError([problem]) from error
    try:
        return JobConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = [_explain(dict(item), where) for item in error.errors(include_url=False)]
        raise ConfigError(problems) from error


def _explain(error: dict[str, Any], where: Any) -> Problem:
    """Turn one pydantic error into a sentence and a fix."""
    loc: tuple[str, ...] = tuple(str(part) for part in error["loc"])
    field, kind, value = ".".join(loc), str(error["type"]), error.get("input")
    shown = json.dumps(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    context: dict[str, Any] = error.get("ctx") or {}
    if kind == "extra_forbidden":
        return Problem(where(field), field, "there is no such key", _suggest_key(loc))
    if kind == "missing":
        about = _describe(loc)
        return Problem(
            where(field),
            field,
            "is missing, and has no default",
            f"Add it{f': {about}' if about else ''}",
        )
    if kind == "literal_error":
        choices = [str(item) for item in get_args(_annotation(loc))] or [str(context.get("expected"))]
        near = difflib.get_close_matches(str(value), choices, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Use one of: {', '.join(choices)}"
        return Problem(where(field), field, f"{shown} is not one of {', '.join(choices)}", fix)
    expected = str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    return Problem(
        where(field),
        field,
        f"{shown} is not allowed: expected {expected}",
        _suggest_value(kind, value, loc),
    )


def _suggest_value(kind: str, value: object, loc: tuple[str, ...]) -> str:
    if kind == "string_type":
        return f"Put it in quotes: {loc[-1]}: {json.dumps(str(value))}"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "Write the bare value, without quotes or a unit"
    if kind == "int_from_float":
        return f"Write a whole number, such as {round(cast('float', value))}"
    if kind in ("model_type", "dict_type"):
        return "Write it as a section: its keys indented below it"
    if kind == "string_pattern_mismatch":
        return "Use letters, digits, '_', '-' and '.', starting with a letter or digit, 64 at most"
    about = _describe(loc)
    return f"Change it ({about})" if about else "Change it"


def _suggest_key(loc: tuple[str, ...]) -> str:
    section = _model_at(loc[:-1]) or JobConfig
    known = list(section.model_fields)
    near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {'.'.join((*loc[:-1], near[0]))!r}?"
    for path in _all_keys(JobConfig):
        if path[-1] == loc[-1]:  # the right name in the wrong section
            return f"Did you mean {'.'.join(path)!r}?"
    everywhere = {".".join(path): path for path in _all_keys(JobConfig)}
    near = difflib.get_close_matches(".".join(loc), everywhere, n=1, cutoff=0.75)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Remove it; known here: {', '.join(known)}"


def schema_keys() -> list[str]:
    """Every key of a job file, dotted, in the schema's order."""
    return [".".join(path) for path in _all_keys(JobConfig)]


def _all_keys(model: type[BaseModel], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = []
    for name, info in model.model_fields.items():
        inner = _section(info)
        keys += _all_keys(inner, (*at, name)) if inner else [(*at, name)]
    return keys


def _section(info: FieldInfo | None) -> type[BaseModel] | None:
    kind = info.annotation if info else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _model_at(loc: tuple[str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = JobConfig
    for name in loc:
        model = _section(model.model_fields.get(name)) if model else None
    return model


def _field_at(loc: tuple[str, ...]) -> FieldInfo | None:
    model = _model_at(loc[:-1])
    return model.model_fields.get(loc[-1]) if model else None


def _annotation(loc: tuple[str, ...]) -> Any:
    info = _field_at(loc)
    return info.annotation if info else None


def _describe(loc: tuple[str, ...]) -> str:
    info = _field_at(loc)
    text = " ".join((info.description or "").split()) if info else ""
    return text.rstrip(".")


def _resolve_paths(job: JobConfig, beside: Path) -> JobConfig:
    """Make the paths of local files absolute: from the working directory, else from beside the job file."""
    data, model = job.data, job.model
    if data.path is not None:
        data = data.model_copy(update={"path": _resolve(data.path, beside) or data.path})
    if model.path is not None:
        new = str(Path.cwd() / model.path) if model.source == "tiny" else model.path  # a tiny model may be made there
        model = model.model_copy(update={"path": _resolve(model.path, beside) or new})
    return job.model_copy(update={"data": data, "model": model})


def _resolve(path: str, beside: Path) -> str | None:
    written = Path(path).expanduser()
    candidates = (Path.cwd() / written, beside / written)
    return next(
        (str(candidate.resolve()) for candidate in candidates if candidate.exists()),
        None,
    )
