"""Whether the prompts can be read: the file is there, its first rows parse, and they have the columns."""

from __future__ import annotations

import ast
import difflib
import json
from itertools import islice
from pathlib import Path
from typing import Any

from configs.checks.source_lookup import definition_of
from configs.schema import JobConfig

ROWS_CHECKED = 20
"""Enough to catch a wrong file or column; the rest is checked while it is read."""

Found = tuple[str, str, str]


def check_data(job: JobConfig) -> list[Found]:
    """Problems of ``data.path`` and the columns in it, as (field, what is wrong, what to do)."""
    data = job.data
    if data.source == "reasoning_gym":
        function = job.reward.function if job.reward.kind == "function" else None
        return _check_call(function, [], "a reasoning_gym task") if function else []
    if not data.path:
        return [
            ("data.path", f"is missing, and data.source is {data.source}", "Name the file or directory of the prompts")
        ]
    path = Path(data.path)
    if not path.exists():
        return [
            ("data.path", f"{data.path!r} does not exist", "Check the path; it is taken from the working directory")
        ]
    return _check_jsonl(job, path) if data.source == "jsonl" else _check_dataset(job, path)


def _check_jsonl(job: JobConfig, path: Path) -> list[Found]:
    if path.is_dir():
        fix = "Name the .jsonl file, or set data.source to hf_dataset"
        return [("data.path", f"{job.data.path!r} is a directory, expected a JSON Lines file", fix)]
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [(number, line) for number, line in enumerate(islice(lines, ROWS_CHECKED), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        return [("data.path", f"{job.data.path!r} cannot be read: {error}", "Name a UTF-8 text file that you may read")]
    if not rows:
        return [("data.path", f"{job.data.path!r} holds no prompts", "Name a file with one JSON object a line")]
    for number, line in rows:
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            return [
                (
                    "data.path",
                    f"line {number} of {job.data.path!r} is not JSON: {error}",
                    "Write one JSON object a line",
                )
            ]
        if not isinstance(row, dict):
            wrong = f"line {number} of {job.data.path!r} is a {type(row).__name__}, expected an object"
            return [("data.path", wrong, 'Write rows such as {"prompt": "2+2=", "answer": "4"}')]
        if problems := _check_columns(job, list(row), f"line {number}"):
            return problems
        if problem := _check_prompt(row[job.data.prompt_key], number):
            return [("data.prompt_key", *problem)]
    return []


def _check_prompt(prompt: object, number: int) -> tuple[str, str] | None:
    if isinstance(prompt, str) and prompt:
        return None
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in prompt)
    ):
        return None
    shown = repr(prompt)[:60]
    return (
        f"line {number} holds {shown}, expected text or a list of chat messages",
        "Name the column of the prompt, or mend the row",
    )


def _check_dataset(job: JobConfig, path: Path) -> list[Found]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        fix = f"Name one of its splits: {', '.join(str(path / split) for split in splits)}"
        return [("data.path", f"{job.data.path!r} holds several splits", fix)]
    info = path / "dataset_info.json"
    if not info.is_file():
        wrong = f"{job.data.path!r} is no data set directory: it has no dataset_info.json"
        return [("data.path", wrong, "Name a directory written by Dataset.save_to_disk, or use source: jsonl")]
    try:
        features = json.loads(info.read_text(encoding="utf-8")).get("features") or {}
    except (OSError, ValueError, AttributeError) as error:
        return [("data.path", f"{info} cannot be read: {error}", "Write the data set anew with save_to_disk")]
    return _check_columns(job, list(features), "the data set") if features else []


def _check_columns(job: JobConfig, columns: list[str], where: str) -> list[Found]:
    wanted = [("data.prompt_key", job.data.prompt_key)]
    if job.reward.kind != "function":  # a function may do without an answer
        wanted.append(("data.answer_key", job.data.answer_key))
    for field, key in wanted:
        if key not in columns:
            near = difflib.get_close_matches(key, columns, n=1)
            have = ", ".join(columns) or "none"
            fix = f"Did you mean {near[0]!r}?" if near else f"Use one of its columns: {have}"
            return [(field, f"{where} has no column {key!r} (it has: {have})", fix)]
    further = [column for column in columns if column not in (job.data.prompt_key, job.data.answer_key)]
    function = job.reward.function if job.reward.kind == "function" else None
    return _check_call(function, further, where) if function else []


def _check_call(function: str, further: list[str], where: str) -> list[Found]:
    """Whether the call ``function(prompt, response, answer, **further)`` would be refused, for every sample."""
    definition = definition_of(function)
    if definition is None:
        own, takes, takes_any = ["prompt", "response", "answer"], set[str](), True
    else:
        if problem := _check_signature(function, definition, further, where):
            return [("reward.function", *problem)]
        arguments = definition.args
        by_position = len(arguments.posonlyargs)
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        own = names[by_position:3]
        takes = {*names[max(by_position, 3) :], *(argument.arg for argument in arguments.kwonlyargs)}
        takes_any = arguments.kwarg is not None
    for column in further:
        if column in own:
            wrong = f"{where} has a column {column!r}, and {function} has a parameter of that name"
            return [("data.path", wrong, "Rename one of them: further columns come as keyword arguments")]
        if column not in takes and not takes_any:
            wrong = f"{function} does not take the column {column!r}, which {where} has"
            return [("reward.function", wrong, "Add **columns to its parameters, or one of that name")]
    return []


_FORM = "Write it as def score(prompt, response, answer, **columns), returning one number for one response"


def _check_signature(
    function: str, definition: ast.FunctionDef | ast.AsyncFunctionDef, further: list[str], where: str
) -> tuple[str, str] | None:
    """What the definition alone says against the call: a coroutine, too few parameters, one that no column gives."""
    at = f"{function} (line {definition.lineno})"
    if isinstance(definition, ast.AsyncFunctionDef):
        return f"{at} is a coroutine function, and nobody would await it", "Write def instead of async def"
    arguments = definition.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if len(positional) < 3 and arguments.vararg is None:
        if "completions" in positional:
            wrong = f"{at} takes lists of completions, as TRL calls it; here each call scores one response"
        else:
            wrong = f"{at} takes {_listed(positional)}, and is called with the prompt, the response and the answer"
        return wrong, _FORM
    needed = positional[3 : len(positional) - len(arguments.defaults)]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed += [argument.arg for argument, default in by_name if default is None]
    for name in needed:
        if name not in further:
            near = difflib.get_close_matches(name, further, n=1)
            have = f"its further columns are {', '.join(further)}" if further else "it has no further columns"
            fix = f"Did you mean {near[0]!r}?" if near else f"Give {name} a default value, or the data such a column"
            return f"{at} needs {name!r}, and {where} has no such column ({have})", fix
    return None


def _listed(names: list[str]) -> str:
    if not names:
        return "no parameter by position"
    return f"{' and '.join(names)} only" if len(names) < 3 else ", ".join(names)
