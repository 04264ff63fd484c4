"""``headrace eval``: one model, evaluated as a job says, without training.

CHECKPOINT, JOB.yaml ─▶ the job with ``eval.only`` ─▶ rollout workers and rewards, no trainer ─▶ the row of eval.jsonl
     └─ of an adapter ─▶ merged into RUN/merged, a whole model
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless
from actors.host.open_files import TooFewDescriptors, check_enough_for
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.run_files import JOB_FILE
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, Json, devices_of_this_machine, fail, finish, wrong
from supervisors.cli.running.run import Overrides, exit_code

RESULT: Final = ("avg_at_k", "pass_at_k", "samples", "response_tokens_mean")
"""Keys of the object that ``--json`` prints last."""
_NOT_OF_TRAINING: Final = (
    *("scheduling={}", "provider={}", "trainer.service=null", "checkpoint={}", "eval.only=true", "model.adapter=null"),
    *("rollout.servers=[]", "trainer.router_replay=false"),
)
"""Overrides that remove what a job says of training, of machines that come and go with its steps, and of servers, which
serve its training."""
_NAME_CHARS: Final = 59


def eval_(
    model: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of a run, or a Hugging Face directory.")
    ],
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file: its eval, reward and rollout count.")],
    set_: Overrides = None,
    dir_: Annotated[Path | None, typer.Option("--dir", help="Run directory. Default: runs/NAME-eval.")] = None,
    json_: Json = False,
) -> None:
    """Evaluate a checkpoint as the eval section of a job says; nothing is trained."""
    from actors.trainer.errors import CannotMerge, TrainerError
    from configs.loader import load_job, read_job
    from configs.local_paths import RUN_ROOT
    from supervisors.api.own_directory import own_run_directory
    from supervisors.machine.run_directory import make_run_directory
    from supervisors.tree.errors import DirectoryInUse

    try:
        given = read_job(job, set_ or [])
        if given.eval is None:
            raise wrong(str(job), "it has no section eval", "Add eval: {data: …}, as docs/guides/evaluate.md shows")
        if not model.is_dir():
            raise wrong(str(model), "there is no such directory", "Name a checkpoint, or a Hugging Face directory")
        base = _base_of(model)
        chosen = ["model.source=hf", f"model.path={json.dumps(str(base or model))}", "model.revision=null"]
        name = f"name={json.dumps(given.name[:_NAME_CHARS] + '-eval')}"
        loaded = load_job(job, [*(set_ or []), name, *chosen, *_NOT_OF_TRAINING])
        check_enough_for(loaded.rollout.workers)
        if base is not None:
            dir_ = dir_ or make_run_directory(RUN_ROOT, loaded.name)
            loaded = _merged(loaded, model, dir_ / "merged")
        lock, news = own_run_directory(dir_, loaded, resume=False, where=f"--dir {dir_ or 'runs'}")
    except (ConfigError, DirectoryInUse, CannotMerge) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (NoSpaceLeft, TooFewDescriptors, TrainerError) as error:
        fail(str(error), EXIT_FAILED)
    console = Console(stderr=json_, highlight=False)
    with lock:
        if news:
            console.print(harmless(news), soft_wrap=True, markup=False)
        summary, row = _evaluate(loaded, lock.run_dir, console)
    if row is not None and json_:
        print(strict_json({key: row.get(key) for key in RESULT}), flush=True)
    if summary.get("error"):
        fail(str(summary["error"]), EXIT_FAILED)
    raise typer.Exit(exit_code([summary]))


def _base_of(model: Path) -> Path | None:
    """The model that the adapter in ``model`` was trained on; None: the directory holds a whole model.

    Raises:
        ConfigError: it holds an adapter without its base.
    """
    from actors.models.adapter import CONFIG_FILE

    if not (model / CONFIG_FILE).is_file() or (model / "config.json").is_file():
        return None
    try:
        base = Path(json.loads((model / CONFIG_FILE).read_text("utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise wrong(str(model / CONFIG_FILE), f"is no description of an adapter: {error!r}", "Name another") from error
    if not (base / "config.json").is_file():
        fix = f"Make a whole model with headrace merge {model} OUT --base DIRECTORY, and name OUT"
        raise wrong(str(model), f"is an adapter of {base}, where no model is", fix)
    return base


def _merged(job: Any, adapter: Path, out: Path) -> Any:
    """``job`` with the model that ``adapter`` makes of its base, written to ``out``.

    Raises:
        CannotMerge, ConfigError: the model cannot be made.
    """
    from actors.host.import_guard import hide_broken_optionals

    hide_broken_optionals()
    from actors.trainer.backends.torch.merging import merge

    if out.exists() or (out.parent / JOB_FILE).exists():
        raise wrong(f"--dir {out.parent}", "holds a run already", "Choose another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    merge(adapter, out, None)
    return job.model_copy(update={"model": job.model.model_copy(update={"path": str(out.resolve())})})


def _evaluate(job: Any, run_dir: Path, console: Console) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The run's summary, and the row of the evaluation; None if the evaluation did not finish."""
    from actors.jobs.evaluation_rows import read_rows
    from configs.run_files import EVALUATIONS
    from supervisors.cli.running.live_view import ProgressView
    from supervisors.trees import run_head

    console.print(harmless(f"{job.name}: run directory {run_dir}"), soft_wrap=True, markup=False)
    found = devices_of_this_machine(None, job)
    with ProgressView(console) as view:
        summaries = finish(lambda: run_head(run_dir, {run_dir: job}, on_progress=view.update, devices=found))
    rows = read_rows(run_dir / EVALUATIONS)
    return summaries[job.name], dict(rows[0]) if rows else None
