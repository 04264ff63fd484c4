"""``headrace new``: asks for model, data and reward, and writes a job file that runs.

options, else questions ─▶ columns of the first row ─▶ the checks of headrace run ─▶ JOB.yaml, or what to mend
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from configs.errors import ConfigError
from configs.hub_names import is_hub_data, is_hub_name
from supervisors.cli.command import EXIT_BAD_CONFIG, fail

_PROMPTS: Final = ("prompt", "question", "problem", "instruction", "input", "messages")
_ANSWERS: Final = ("answer", "solution", "final_answer", "label", "target", "output")
"""Usual names of the answer's column, as ``_PROMPTS`` of the prompt's; the likeliest first."""
_SCORERS: Final = ("exact_match", "math_verify", "reasoning_gym")
_QUESTIONS: Final = {
    "model": ("Model: a directory, a hub name, or tiny for one that is made on the spot", "tiny"),
    "data": ("Data: a file, a data set's directory or hub name, or a task of reasoning-gym", "spell_backward"),
    "reward": (
        "Reward: exact_match, math_verify, reasoning_gym, your module:function, a reward model, or a scorer's URL",
        "",
    ),
}


def new(
    file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="What to write.")] = Path("job.yaml"),
    model: Annotated[str | None, typer.Option(help="A directory, a hub name, or tiny. Left out: asked.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A file, a data set's directory or hub name, or a task of reasoning-gym.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="exact_match, math_verify, reasoning_gym, module:function, a reward model (directory or hub name), "
            "or the URL of a scorer."
        ),
    ] = None,
) -> None:
    """Write a job file that runs, from three answers."""
    from configs.loader import job_from_mapping

    if file.exists():
        fail(f"{file} exists already: name another file, or remove it", EXIT_BAD_CONFIG)
    chosen_model, chosen_data = _answer("model", model), _answer("data", data)
    source = _data(chosen_data)
    proposal = "reasoning_gym" if source["source"] == "reasoning_gym" else "exact_match"
    scorer = _answer("reward", reward, proposal)
    job = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-.") or "job",
        "steps": 100,
        "model": {"source": "tiny"} if chosen_model == "tiny" else {"path": chosen_model},
        "data": source,
        "reward": _reward(scorer),
        "algorithm": {"name": "grpo", "group_size": 8, "prompts_per_step": 32},
        "rollout": {"workers": 2, "max_tokens": 24 if chosen_model == "tiny" else 256},
        "trainer": {"lr": 3e-4 if chosen_model == "tiny" else 1e-6},
        "checkpoint": {"every": 25},
    }
    try:
        job_from_mapping(cast("dict[str, Any]", job), "headrace new")
        import yaml

        file.write_text(_HEAD + yaml.safe_dump(job, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except OSError as error:
        fail(f"{file} cannot be written: {error}", EXIT_BAD_CONFIG)
    print(f"{file} is written. Look at it, then:  headrace check {file}  ·  headrace run {file}")


_HEAD: Final = """\
# Written by headrace new. All keys: docs/reference/job_file.md; for an editor's help: headrace schema > job.schema.json
"""


def _answer(name: str, given: str | None, proposal: str | None = None) -> str:
    if given is not None:
        return given
    question, usual = _QUESTIONS[name]
    if not sys.stdin.isatty():
        fail(f"--{name} is missing, and there is no terminal to ask on. {question}", EXIT_BAD_CONFIG)
    return str(typer.prompt(question, default=proposal or usual))


def _data(text: str) -> dict[str, Any]:
    """The section ``data``: what ``text`` names, with the columns that its first row has."""
    path = Path(text).expanduser()
    if path.is_dir():
        return {"source": "hf_dataset", "path": text} | _columns(_features(path))
    if is_hub_data(text, "file"):
        return {"path": text}
    if path.exists() or path.suffix in (".jsonl", ".json") or "/" in text:
        return {"source": "jsonl", "path": text} | _columns(_first_row(path))
    return {"source": "reasoning_gym", "task": text}


def _reward(text: str) -> dict[str, Any]:
    """The section ``reward``: a kind by its name, or what ``text`` names."""
    if text in _SCORERS:
        return {"kind": text}
    if text.startswith(("http://", "https://")):
        return {"kind": "http", "url": text}
    if Path(text).expanduser().is_dir() or is_hub_name(text):
        return {"kind": "model", "path": text}
    return {"kind": "function", "function": text}


def _first_row(path: Path) -> list[str]:
    """Columns of the first row; none if it cannot be read, which the check of the job reports better."""
    try:
        with path.open(encoding="utf-8") as lines:
            return list(json.loads(next(line for line in lines if line.strip())))
    except (OSError, ValueError, StopIteration, TypeError):
        return []


def _features(directory: Path) -> list[str]:
    try:
        return list(json.loads((directory / "dataset_info.json").read_text("utf-8"))["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _columns(columns: list[str]) -> dict[str, Any]:
    prompt = next((name for name in _PROMPTS if name in columns), "prompt")
    answer = next((name for name in _ANSWERS if name in columns and name != prompt), "answer")
    usual = {"prompt_key": "prompt", "answer_key": "answer"}
    found = {"prompt_key": prompt, "answer_key": answer}
    return {key: column for key, column in found.items() if column != usual[key]}
