"""Checks that the prompts can be read: the file is there, its first rows parse, and they have the needed columns.

    data.path ─▶ form_of ─▶ its first rows (text, Parquet) or the names of its columns (a saved data set) ─▶ problems

All other rows are checked by the process that reads the prompts, before the first step.
"""

from __future__ import annotations

import ast
import difflib
import gzip
import io
import json
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, cast

from configs.checks.definitions import Definition, definition_of, gives_no_value
from configs.checks.source_lookup import reasoning_gym_tasks
from configs.data_forms import DataForm, UnknownForm, chosen_split, data_files, form_of, wrong_answer, wrong_prompt
from configs.errors import Found
from configs.hub_names import is_hub_data
from configs.schema import JobConfig
from configs.task_schema import DataConfig, SourceConfig

ROWS_CHECKED = 20
"""Rows checked at the beginning of a file: enough to notice a wrong file or column."""
_ARRAY_MAX_BYTES = 16 << 20
"""Length from which a JSON array is not parsed here: that takes seconds, and the prompt reader does it anyway."""

Rows = list[tuple[str, dict[str, Any]]]
"""Rows, each after its place in the file, such as ``line 3``."""


def check_data(job: JobConfig) -> list[Found]:
    """Problems of each source of prompts and the columns in it, as (field, what is wrong, what to do)."""
    found = _check_mix(job.data)
    for name, data in job.data.sources.items():
        at = job.data.key_of(name)
        for field, wrong, fix in _check_source(job.model_copy(update={"data": data})):
            found.append((f"{at}.{field.removeprefix('data.')}" if field.startswith("data.") else field, wrong, fix))
    return found


def _check_mix(data: DataConfig) -> list[Found]:
    """Keys set in ``data`` although each source of ``data.mix`` has its own; names given twice."""
    if not data.mix:
        return []
    usual = SourceConfig()
    found = [
        (f"data.{key}", "is set, and so is data.mix, whose items have each their own", "Move it into them")
        for key in SourceConfig.model_fields
        if getattr(data, key) != getattr(usual, key)
    ]
    for name, count in Counter(source.name for source in data.mix).items():
        if count > 1:
            wrong = f"{count} of them are called {name!r}, and each has metrics and a file of that name"
            found.append(("data.mix", wrong, "Give each a name of its own"))
    return found


def _check_source(job: JobConfig) -> list[Found]:
    """Problems of ``job.data``, which is one source."""
    data = job.data
    if "{prompt}" not in data.template:
        wrong = f"{data.template!r} has no place for the prompt"
        return [("data.template", wrong, "Write {prompt} where it belongs")]
    if data.source == "reasoning_gym":
        return _check_task(data) or _check_calls(job, [], "a reasoning_gym task")
    if not data.path:
        return [
            ("data.path", f"is missing, and data.source is {data.source}", "Name the file or directory of the prompts")
        ]
    if is_hub_data(data.path, data.source):
        return []  # the process that fetches it reports what is wrong with it
    path = Path(data.path)
    if not path.exists():
        return [
            ("data.path", f"{data.path!r} does not exist", "Check the path; it is taken from the working directory")
        ]
    try:
        form = form_of(path, data.source)
        if unused := _unused_keys(data, form):
            return unused
        if form is DataForm.SAVED:
            return _check_saved(job, path)
        return _check_rows(job, _first_rows(path, form, data.split))
    except UnknownForm as error:
        return [("data.path", str(error), error.fix)]


def _unused_keys(data: DataConfig, form: DataForm) -> list[Found]:
    """Keys that choose a configuration, split or revision of data that has none."""
    directory = form in (DataForm.SAVED, DataForm.FOLDER)
    takes = {"config": form is DataForm.FOLDER, "split": directory, "revision": False}
    has = {"config": "configurations", "split": "splits", "revision": "revisions"}
    return [
        (f"data.{key}", f"is set, and {data.path!r} has no {has[key]}", "Remove it, or name a data set of the hub")
        for key, taken in takes.items()
        if getattr(data, key) is not None and not taken
    ]


def _check_task(data: DataConfig) -> list[Found]:
    if not data.task:
        return [
            ("data.task", "is missing, and data.source is reasoning_gym", "Name a data set, such as spell_backward")
        ]
    tasks = reasoning_gym_tasks()
    if not tasks or data.task in tasks:  # not installed: checks.py reports that
        return []
    near = difflib.get_close_matches(data.task, tasks, n=1)
    fix = f"Did you mean {near[0]!r}?" if near else f"Use one of its {len(tasks)} data sets, such as spell_backward"
    return [("data.task", f"reasoning_gym has no data set {data.task!r}", fix)]


def _first_rows(path: Path, form: DataForm, split: str | None) -> Rows:
    """The first ``ROWS_CHECKED`` rows; none of a form that only the datasets library can read.

    Raises:
        UnknownForm: they cannot be read.
    """
    if form is DataForm.TEXT:
        return _text_rows(path)
    files = [path] if form is DataForm.PARQUET else [file for file in data_files(path) if file.suffix == ".parquet"]
    files = [file for file in files if (split or "train") in file.name] or files
    return _parquet_rows(files[0]) if files else []


def _text_rows(path: Path) -> Rows:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            text = io.TextIOWrapper(cast("io.BufferedReader", file), encoding="utf-8-sig", newline="\n")
            lines = [(number, line) for number, line in enumerate(islice(text, ROWS_CHECKED), 1) if line.strip()]
            if lines and lines[0][1].lstrip().startswith("["):
                return _array_rows(path, "".join(line for _, line in lines) + text.read(_ARRAY_MAX_BYTES))
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        wrong = f"{str(path)!r} cannot be read: {error}"
        raise UnknownForm(wrong, "Name a UTF-8 text file that you may read") from error
    if not lines:
        raise UnknownForm(f"{str(path)!r} holds no prompts", "Name a file with one JSON object a line")
    return [_parsed(path, number, line) for number, line in lines]


def _parsed(path: Path, number: int, line: str) -> tuple[str, dict[str, Any]]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        wrong = f"line {number} of {str(path)!r} is not JSON: {error}"
        raise UnknownForm(wrong, "Write one JSON object a line") from error
    return f"line {number}", _object(path, f"line {number}", row)


def _object(path: Path, where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        wrong = f"{where} of {str(path)!r} is a {type(row).__name__}, expected an object"
        raise UnknownForm(wrong, 'Write rows such as {"prompt": "2+2=", "answer": "4"}')
    return cast("dict[str, Any]", row)


def _array_rows(path: Path, text: str) -> Rows:
    if len(text) >= _ARRAY_MAX_BYTES:
        return []
    try:
        rows: list[Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "Write one array of objects, or one JSON object a line"
        raise UnknownForm(f"{str(path)!r} is not JSON: {error}", fix) from error
    if not rows:
        raise UnknownForm(f"{str(path)!r} holds no prompts", "Name a file with one JSON object a line")
    return [(f"row {index}", _object(path, f"row {index}", row)) for index, row in enumerate(rows[:ROWS_CHECKED])]


def _parquet_rows(path: Path) -> Rows:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=ROWS_CHECKED), None)
    except (OSError, pa.ArrowException) as error:
        raise UnknownForm(f"{str(path)!r} cannot be read: {error}", "Write the file anew") from error
    if batch is None or not batch.num_rows:
        raise UnknownForm(f"{str(path)!r} holds no prompts", "Name a file with rows")
    return [(f"row {index}", row) for index, row in enumerate(batch.to_pylist())]


def _check_rows(job: JobConfig, rows: Rows) -> list[Found]:
    compares = next((reward.kind for _, reward in job.reward.each if reward.compares), None)
    for where, row in rows:
        if problems := _check_columns(job, list(row), where):
            return problems
        if job.has_episodes:
            continue  # the environment decides what a task is
        if wrong := wrong_prompt(row[job.data.prompt_key]):
            return [("data.prompt_key", f"{where} {wrong}", "Name the column of the prompt, or mend the row")]
        if compares and (wrong := wrong_answer(row[job.data.answer_key])):
            fix = f"Name the column of the answer, mend the row, or use a reward.function: {compares} compares"
            return [("data.answer_key", f"{where} {wrong}", f"{fix} text")]
    return []


def _check_saved(job: JobConfig, path: Path) -> list[Found]:
    if (path / "dataset_dict.json").is_file():
        path /= chosen_split(sorted(child.name for child in path.iterdir() if child.is_dir()), path, job.data.split)
    info = path / "dataset_info.json"
    try:
        features = json.loads(info.read_text(encoding="utf-8")).get("features") or {}
    except (OSError, ValueError, AttributeError) as error:
        return [("data.path", f"{info} cannot be read: {error}", "Write the data set anew with save_to_disk")]
    return _check_columns(job, list(features), "the data set") if features else []


def _check_columns(job: JobConfig, columns: list[str], where: str) -> list[Found]:
    wanted = [] if job.has_episodes else [("data.prompt_key", job.data.prompt_key)]
    if any(reward.kind != "function" for _, reward in job.reward.each):  # a function may do without an answer
        wanted.append(("data.answer_key", job.data.answer_key))
    for field, key in wanted:
        if key not in columns:
            near = difflib.get_close_matches(key, columns, n=1)
            have = ", ".join(columns) or "none"
            fix = f"Did you mean {near[0]!r}?" if near else f"Use one of its columns: {have}"
            return [(field, f"{where} has no column {key!r} (it has: {have})", fix)]
    further = [column for column in columns if column not in (job.data.prompt_key, job.data.answer_key)]
    return _check_calls(job, further, where)


def _check_calls(job: JobConfig, further: list[str], where: str) -> list[Found]:
    """Problems of calling each reward function with these columns."""
    functions = [(f"{key}.function", reward.function) for key, reward in job.reward.each if reward.kind == "function"]
    if job.environment.kind == "python" and job.environment.path is None:
        functions.append(("environment.options.reward", job.environment.options.get("reward")))
    return [
        (key if field == "reward.function" else field, wrong, fix)
        for key, function in functions
        if isinstance(function, str) and function
        for field, wrong, fix in _check_call(function, further, where)
    ]


def _check_call(function: str, further: list[str], where: str) -> list[Found]:
    """Why the call ``function(prompt, response, answer, **further)`` would fail for every sample; empty: it works."""
    definition = definition_of(function)
    if definition is None or (isinstance(definition.node, ast.ClassDef) and not gives_no_value(definition)):
        own, takes, takes_any = ["prompt", "response", "answer"], set[str](), True
    else:
        if problem := _check_signature(definition, further, where):
            return [("reward.function", *problem)]
        assert not isinstance(definition.node, ast.ClassDef), "refused above"
        arguments = definition.node.args
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


def _check_signature(definition: Definition, further: list[str], where: str) -> tuple[str, str] | None:
    """Why the call cannot match the definition: no plain function, too few parameters, or one that no column gives."""
    at = definition.shown
    if isinstance(definition.node, ast.ClassDef):
        return f"{at} is a class, and calling it gives an object, not a number", _FORM
    if isinstance(definition.node, ast.AsyncFunctionDef):
        return f"{at} is a coroutine function, and nobody would await it", "Write def instead of async def"
    arguments = definition.node.args
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


def check_evaluation(job: JobConfig) -> list[Found]:
    """Every problem of the section ``eval``, as (field, what is wrong, what to do)."""
    config, found = job.eval, list[Found]()
    if config is None:
        if job.checkpoint.keep_best:
            fix = "Add eval, which measures it, or remove keep_best"
            found.append(("checkpoint.keep_best", "true, but nothing says which checkpoint is best", fix))
        return found
    if config.samples > 1 and config.temperature == 0:
        wrong = f"0 makes all {config.samples} samples of a prompt equal"
        found.append(("eval.temperature", wrong, "Set it above 0, or eval.samples to 1"))
    if config.data.epochs is not None:
        found.append(("eval.data.epochs", "is set, but an evaluation reads its data once", "Remove it"))
    if job.has_episodes and job.evaluation.episode_tokens <= job.evaluation.rollout.max_tokens:
        wrong = f"leaves the environment nothing of environment.episode_tokens, {job.episode_tokens}"
        found.append(("eval.max_tokens", f"{config.max_tokens} {wrong}", "Lower it, or raise episode_tokens"))
    policy, seeding = job.scheduling.policy, job.scheduling.seeding
    if policy == "planned" or seeding:
        which = "policy: planned" if policy == "planned" else "seeding"
        wrong = f"is set, and so is scheduling.{which}, whose workers sleep while they would evaluate: not built yet"
        found.append(("eval", wrong, "Leave one of the two out"))
    text = check_data(job.evaluation)
    return found + [(f"eval.{field}" if field.startswith("data.") else field, wrong, fix) for field, wrong, fix in text]
