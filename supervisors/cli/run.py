"""``headrace run``: one job on this machine, from its file to its end.

JOB.yaml ─▶ load_job ─▶ run directory ─▶ trees.run_job ─▶ summary ─▶ exit code
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from rich.console import Console

from actors.core.terminal_text import harmless
from actors.host.open_files import TooFewDescriptors, check_enough_for
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from supervisors.cli.command import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    Control,
    ControlKeys,
    Json,
    Keys,
    check_sockets,
    fail,
    finish,
    wrong,
)

if TYPE_CHECKING:
    from configs.fault_plan import FaultPlan
    from configs.schema import JobConfig

_EXIT_OF_STATE: Final = {"finished": EXIT_FINISHED, "interrupted": EXIT_INTERRUPTED}

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
    from supervisors.api.own_directory import own_run_directory
    from supervisors.api.resume import check_options, check_run
    from supervisors.tree.errors import DirectoryInUse

    overrides = set_ or []
    try:
        if resume is not None:
            check_options(job, dir_, resume, overrides)
            loaded = load_job(resume / "job.yaml", overrides)
            check_run(resume, loaded)
        elif job is None:
            raise wrong(
                "headrace run",
                "no job file was named",
                "Write headrace run quickstart, or headrace new for a job of your own",
            )
        else:
            loaded = load_job(job, overrides)
        plan = load_faults(faults, loaded)
        check_sockets(keys, control_keys, listen=loaded.cluster.listen if loaded.cluster.nodes else None, at=control)
        check_enough_for(loaded.rollout.workers)
        where = f"--resume {resume}" if resume is not None else f"--dir {dir_ or RUN_ROOT}"
        lock, news = own_run_directory(resume or dir_, loaded, resume=resume is not None, where=where)
    except (ConfigError, DirectoryInUse) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (NoSpaceLeft, TooFewDescriptors) as error:
        fail(str(error), EXIT_FAILED)
    with lock:
        if news:
            Console(stderr=json_, highlight=False).print(harmless(news), soft_wrap=True, markup=False)
        _run_in(lock.run_dir, loaded, resume=resume is not None, plan=plan, control=control, keys=keys,
                control_keys=control_keys, json_=json_)  # fmt: skip


def _run_in(
    run_dir: Path,
    loaded: JobConfig,
    *,
    resume: bool,
    plan: FaultPlan | None,
    control: str | None,
    keys: Path | None,
    control_keys: Path | None,
    json_: bool,
) -> NoReturn:
    """Run the job in a directory that is ours, to the command's end."""
    from supervisors.cli.live_view import ProgressView
    from supervisors.trees import run_job

    console = Console(stderr=json_, highlight=False)
    about = f"{loaded.name}: {loaded.steps} steps, run directory {run_dir}"
    console.print(harmless(about), soft_wrap=True, markup=False)
    with ProgressView(console) as view:
        summary = finish(
            lambda: run_job(
                loaded,
                run_dir,
                resume=resume,
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


def load_faults(path: Path | None, job: Any) -> Any:
    """The plan at ``path``, as far as it can be checked before the run; None without one."""
    if path is None:
        return None
    from configs.fault_plan import load_fault_plan
    from supervisors.nemesis.fault_schedule import check_plan

    plan = load_fault_plan(path)
    check_plan(plan, job, str(path))
    return plan


def _report(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    first, last = summary.get("reward_first"), summary.get("reward_last")
    console.print(
        f"{summary.get('job')} {summary.get('state')} after {summary.get('steps')} steps and "
        f"{_figure(summary.get('seconds'))} s: reward {_figure(first)} → {_figure(last)}, "
        f"{summary.get('restarts', 0)} restarts, {summary.get('prompts_lost', 0)} prompts lost{_dropped(summary)}",
        soft_wrap=True,
        markup=False,
    )
    rows = [
        ("checkpoint", summary.get("checkpoint")),
        ("metrics", run_dir / "metrics.jsonl"),
        ("trace", run_dir / "trace.json"),
    ]
    for name, path in rows:
        console.print(harmless(f"  {name:<10} {path or 'none'}"), soft_wrap=True, markup=False)
    if summary.get("state") == "interrupted" or (summary.get("error") and (run_dir / "journal.db").exists()):
        console.print(harmless(f"  go on with  headrace run --resume {run_dir}"), soft_wrap=True, markup=False)
    if summary.get("error"):
        console.print(harmless(f"  error      {summary['error']}"), soft_wrap=True, markup=False)


def _dropped(summary: dict[str, Any]) -> str:
    """``, 24 of 24 samples dropped``, if any was."""
    dropped = int(summary.get("samples_dropped") or 0)
    return f", {dropped} of {dropped + int(summary.get('samples') or 0)} samples dropped" if dropped else ""


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"
