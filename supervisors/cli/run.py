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
from actors.host.room import NoSpaceLeft, no_space, require_room
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
from supervisors.cli.resume import check_options, check_run

if TYPE_CHECKING:
    from configs.fault_plan import FaultPlan
    from configs.schema import JobConfig
    from supervisors.machine.run_directory import RunLock

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
        lock, news = _own_run_directory(resume, dir_, loaded)
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


def _own_run_directory(resume: Path | None, chosen: Path | None, job: JobConfig) -> tuple[RunLock, str]:
    """The run's directory with its job in it, which nobody else may use until the lock is released.

    And what there is to say of a run that is gone on with.

    Raises:
        ConfigError: it cannot be written, holds a run that should not be begun anew, or one that cannot go on.
        DirectoryInUse: a run lives in it.
        NoSpaceLeft: there is no room for a run.
    """
    from supervisors.checkers.condition import check_can_go_on
    from supervisors.jobs.run_record import data_news, model_news, write_record
    from supervisors.machine.run_directory import RunLock, make_run_directory

    where = f"--resume {resume}" if resume is not None else f"--dir {chosen or RUN_ROOT}"
    try:
        run_dir = resume or chosen or make_run_directory(RUN_ROOT, job.name)
        lock = RunLock.take(run_dir)
    except OSError as error:
        fix = "Choose a directory that you may write"
        raise wrong(where, f"cannot be written: {error}", fix) from error
    try:
        require_room(run_dir, job.limits.disk_reserve_bytes, "a run")
        if resume is not None:
            check_can_go_on(run_dir)
        elif (run_dir / "journal.db").exists() or (run_dir / "job.yaml").exists():
            fix = f"Go on with headrace run --resume {run_dir}, or choose another directory"
            raise wrong(where, "holds a run already", fix)
        _write_job(run_dir, job, where)
        if resume is None:
            write_record(run_dir, job)
        news = [] if resume is None else [model_news(run_dir, job), data_news(run_dir, job)]
    except BaseException:
        lock.release()
        raise
    return lock, "\n".join(filter(None, news))


def _write_job(run_dir: Path, job: JobConfig, where: str) -> None:
    """All of it or nothing: what a resume cannot write must not cost it the file that it has."""
    from configs.loader import dump_job

    partial = run_dir / ".job.yaml.partial"
    try:
        partial.write_text(dump_job(job), encoding="utf-8")
        partial.replace(run_dir / "job.yaml")
    except OSError as error:
        partial.unlink(missing_ok=True)
        fix = "Choose a directory that you may write"
        raise no_space(error, run_dir, "job.yaml") or wrong(where, f"cannot be written: {error}", fix) from error


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
