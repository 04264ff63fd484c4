"""``headrace run``: one job on this machine, from its file to its end.

JOB.yaml ─▶ load_job ─▶ run directory ─▶ trees.run_job ─▶ summary ─▶ exit code
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from configs.errors import ConfigError
from supervisors.cli.command import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    RUN_ROOT,
    Control,
    ControlKeys,
    Json,
    Keys,
    check_sockets,
    fail,
    finish,
    wrong,
)

_EXIT_OF_STATE: Final = {"finished": EXIT_FINISHED, "interrupted": EXIT_INTERRUPTED}

RESUME_MAY_SET: Final = ("steps", "rollout.workers", "checkpoint.", "metrics.", "limits.", "cluster.")
"""Keys that may differ after a resume; any other would make it another run than the journal tells of."""

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a key of the job file; repeatable."),
]


def run(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml", help="The job file, or the name of a preset: quickstart, …"),
    ] = None,
    set_: Overrides = None,
    dir_: Annotated[Path | None, typer.Option("--dir", help="Run directory. Default: runs/NAME.")] = None,
    control: Control = None,
    json_: Json = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on with an interrupted run."),
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.yaml", help="Do harm on purpose: a fault plan for the run's real processes."),
    ] = None,
    keys: Keys = None,
    control_keys: ControlKeys = None,
) -> None:
    """Run one job on this machine, and wait for its end."""
    from configs.loader import load_job

    overrides = set_ or []
    try:
        if resume is not None:
            _check_resume(job, dir_, resume, overrides)
            run_dir, loaded = resume, load_job(resume / "job.yaml", overrides)
        elif job is None:
            raise wrong(
                "headrace run",
                "no job file was named",
                "Write headrace run quickstart, or headrace new for a job of your own",
            )
        else:
            loaded = load_job(job, overrides)
            run_dir = _new_run_directory(dir_, loaded.name)
        plan = load_faults(faults, loaded)
        check_sockets(keys, control_keys, listen=loaded.cluster.listen if loaded.cluster.nodes else None, at=control)
        _write_job(run_dir, loaded)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)

    from supervisors.cli.live_view import ProgressView
    from supervisors.trees import run_job

    console = Console(stderr=json_, highlight=False)
    console.print(f"{loaded.name}: {loaded.steps} steps, run directory {run_dir}", soft_wrap=True)
    with ProgressView(console) as view:
        summary = finish(
            lambda: run_job(
                loaded,
                run_dir,
                resume=resume is not None,
                control=control,
                on_progress=view.update,
                keys=keys,
                control_keys=control_keys,
                faults=plan,
            )
        )
    _report(console, summary, run_dir)
    if json_:
        print(json.dumps(summary), flush=True)
    raise typer.Exit(_EXIT_OF_STATE.get(str(summary.get("state")), EXIT_FAILED))


def _check_resume(job: Path | None, dir_: Path | None, resume: Path, overrides: list[str]) -> None:
    where = f"--resume {resume}"
    if job is not None or dir_ is not None:
        fix = "The run directory holds its job; leave the other out"
        raise wrong(where, "neither a job file nor --dir goes with it", fix)
    if not (resume / "job.yaml").is_file():
        fix = "Name the directory that the run printed at its start"
        raise wrong(where, "is no run directory: it has no job.yaml", fix)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == may or (may.endswith(".") and key.startswith(may)) for may in RESUME_MAY_SET):
            raise wrong(where, f"{key} cannot change in mid-run", f"Only these can: {', '.join(RESUME_MAY_SET)}")


def load_faults(path: Path | None, job: Any) -> Any:
    """The plan at ``path``, as far as it can be checked before the run; None without one."""
    if path is None:
        return None
    from configs.fault_plan import load_fault_plan
    from supervisors.nemesis.fault_schedule import check_plan

    plan = load_fault_plan(path)
    check_plan(plan, job, str(path))
    return plan


def _new_run_directory(chosen: Path | None, name: str) -> Path:
    from configs.schema import run_directory

    run_dir = chosen or run_directory(RUN_ROOT, name)
    if (run_dir / "journal.db").exists() or (run_dir / "job.yaml").exists():
        fix = f"Go on with headrace run --resume {run_dir}, or choose another directory"
        raise wrong(f"--dir {run_dir}", "holds a run already", fix)
    return run_dir


def _write_job(run_dir: Path, job: Any) -> None:
    from configs.loader import dump_job

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "job.yaml").write_text(dump_job(job), encoding="utf-8")
    except OSError as error:
        fix = "Choose a directory that you may write"
        raise wrong(f"--dir {run_dir}", f"cannot be written: {error}", fix) from error


def _report(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    first, last = summary.get("reward_first"), summary.get("reward_last")
    console.print(
        f"{summary.get('job')} {summary.get('state')} after {summary.get('steps')} steps and "
        f"{_figure(summary.get('seconds'))} s: reward {_figure(first)} → {_figure(last)}, "
        f"{summary.get('restarts', 0)} restarts, {summary.get('prompts_lost', 0)} prompts lost",
        soft_wrap=True,
    )
    rows = [
        ("checkpoint", summary.get("checkpoint")),
        ("metrics", run_dir / "metrics.jsonl"),
        ("trace", run_dir / "trace.json"),
    ]
    for name, path in rows:
        console.print(f"  {name:<10} {path or 'none'}", soft_wrap=True)
    if summary.get("state") == "interrupted":
        console.print(f"  go on with  headrace run --resume {run_dir}", soft_wrap=True)
    if summary.get("error"):
        console.print(f"  error      {summary['error']}", soft_wrap=True, markup=False)


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"
