"""The command line: parses, loads the job, hands over to ``trees``, and turns the end into an exit code.

    headrace run JOB.yaml ─▶ load_job ─▶ run directory ─▶ trees.run_job ─▶ summary ─▶ exit code

Exit codes: 0 finished; 1 failed; 2 bad configuration or usage; 130 interrupted, after a checkpoint.
With ``--json`` stdout carries JSON only; progress and logs go to stderr and to files. Everything heavy is imported by
the command that needs it, so that ``--help`` is fast.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console

from configs.errors import ConfigError, Problem
from supervisors.cli import keys_command
from supervisors.cli.ctl import ctl
from supervisors.cli.plot.command import plot
from supervisors.simulation.command import simulate
from transport.errors import HeadraceError

EXIT_FINISHED: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_INTERRUPTED: Final = 130
_EXIT_OF_STATE: Final = {"finished": EXIT_FINISHED, "interrupted": EXIT_INTERRUPTED}

RUN_ROOT: Final = Path("runs")
RESUME_MAY_SET: Final = (
    "steps",
    "rollout.workers",
    "checkpoint.",
    "metrics.",
    "limits.",
    "cluster.",
)
"""What may differ after a resume; anything else would make the run another one than its journal tells of."""

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(ctl, name="ctl")

T = TypeVar("T")
Json = Annotated[
    bool,
    typer.Option("--json", help="JSON only on stdout; the last line is the result."),
]
Control = Annotated[
    str | None,
    typer.Option(help="Control endpoint, such as tcp://127.0.0.1:7000. Default: in the run directory."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a key of the job file; repeatable."),
]
Keys = Annotated[
    Path | None,
    typer.Option(help="Key directory of this node, made with headrace keys; needed beyond this machine."),
]
ControlKeys = Annotated[
    Path | None,
    typer.Option(help="Key directory of the control socket, not the nodes' one; needed beyond this machine."),
]


@app.callback()
def headrace() -> None:
    """Generate, score and train on LLM rollouts, on machines that come and go."""


@app.command()
def run(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml", help="The job file; presets lie in configs/."),
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
            raise ConfigError(
                [
                    Problem(
                        "headrace run",
                        "",
                        "no job file was named",
                        "Write headrace run configs/quickstart.yaml",
                    )
                ]
            )
        else:
            loaded = load_job(job, overrides)
            run_dir = _new_run_directory(dir_, loaded.name)
        plan = _load_faults(faults, loaded)
        _check_sockets(keys, control_keys, listen=loaded.cluster.listen if loaded.cluster.nodes else None, at=control)
        _write_job(run_dir, loaded)
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_CONFIG)

    from supervisors.cli.live_view import ProgressView
    from supervisors.trees import run_job

    console = Console(stderr=json_, highlight=False)
    console.print(f"{loaded.name}: {loaded.steps} steps, run directory {run_dir}", soft_wrap=True)
    with ProgressView(console) as view:
        summary = _finish(
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
    def wrong(what: str, fix: str) -> ConfigError:
        return ConfigError([Problem(f"--resume {resume}", "", what, fix)])

    if job is not None or dir_ is not None:
        raise wrong(
            "neither a job file nor --dir goes with it",
            "The run directory holds its job; leave the other out",
        )
    if not (resume / "job.yaml").is_file():
        raise wrong(
            "is no run directory: it has no job.yaml",
            "Name the directory that the run printed at its start",
        )
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == may or (may.endswith(".") and key.startswith(may)) for may in RESUME_MAY_SET):
            raise wrong(
                f"{key} cannot change in mid-run",
                f"Only these can: {', '.join(RESUME_MAY_SET)}",
            )


def _check_sockets(keys: Path | None, control_keys: Path | None, *, listen: str | None, at: str | None) -> None:
    from supervisors.head.head_keys import check_sockets, load_head_keys

    _refuse_bad_sockets(lambda: check_sockets(load_head_keys(keys, control_keys), listen=listen, control=at))


def _refuse_bad_sockets(check: Callable[[], None]) -> None:
    """Exit code 2 for keys that cannot be used, for what is no address, and for a socket that would be open."""
    from transport.errors import HandshakeRefused, InsecureBind
    from transport.zmq.security import KeyFileError

    try:
        check()
    except (KeyFileError, InsecureBind, HandshakeRefused, ValueError) as error:
        _fail(str(error), EXIT_BAD_CONFIG)


def _load_faults(path: Path | None, job: Any) -> Any:
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
        raise ConfigError([Problem(f"--dir {run_dir}", "", "holds a run already", fix)])
    return run_dir


def _write_job(run_dir: Path, job: Any) -> None:
    from configs.loader import dump_job

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "job.yaml").write_text(dump_job(job), encoding="utf-8")
    except OSError as error:
        problem = Problem(
            f"--dir {run_dir}",
            "",
            f"cannot be written: {error}",
            "Choose a directory that you may write",
        )
        raise ConfigError([problem]) from error


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


@app.command()
def head(
    listen: Annotated[str, typer.Option(help="Where nodes join.")] = "tcp://127.0.0.1:7001",
    control: Control = None,
    dir_: Annotated[Path, typer.Option("--dir", help="Where run directories are made.")] = RUN_ROOT,
    keys: Keys = None,
    control_keys: ControlKeys = None,
) -> None:
    """Serve jobs that come over the control socket, on nodes that join, until stopped."""
    _check_sockets(keys, control_keys, listen=listen, at=control)
    from supervisors.trees import run_head

    _finish(lambda: run_head(listen=listen, control=control, run_root=dir_, keys=keys, control_keys=control_keys))


@app.command()
def node(
    join: Annotated[str, typer.Option(metavar="ADDR", help="The head's address, as it printed it.")],
    name: Annotated[
        str | None,
        typer.Option(help="This node's name. Default: the host's name and a number."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Rollout workers at most. Default: cores or GPUs."),
    ] = None,
    kind: Annotated[str, typer.Option(help="What it is priced as: a key of cluster.prices.")] = "reserved",
    site: Annotated[
        str, typer.Option(help="Its data centre, if that is not the head's: weights enter each once.")
    ] = "",
    notice: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="How long it is still there after SIGTERM: workers go on meanwhile."
        ),
    ] = 0.0,
    keys: Keys = None,
) -> None:
    """Lend this machine to a head, until stopped."""
    from supervisors.machine.node import check_join

    _refuse_bad_sockets(lambda: check_join(join, keys))
    from supervisors.trees import run_node

    _finish(lambda: run_node(join=join, name=name, slots=slots, keys=keys, kind=kind, site=site, notice_s=notice))


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN_DIR", help="Check a run instead: what it recorded against the promises."),
    ] = None,
    json_: Json = False,
) -> None:
    """Say what is installed, what is missing, and how to get it; or whether a run has kept its promises."""
    if run is not None:
        _doctor_run(run, json_)
    from supervisors.cli.doctor import report

    found = report()
    if json_:
        print(json.dumps(found, default=str), flush=True)
    else:
        Console().print(found)
    raise typer.Exit(EXIT_FINISHED if found.healthy else EXIT_FAILED)


def _doctor_run(run_dir: Path, json_: bool) -> NoReturn:
    from supervisors.cli.run_report import doctor_run

    try:
        raise typer.Exit(doctor_run(run_dir, as_json=json_))
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_CONFIG)
    except HeadraceError as error:
        _fail(f"{type(error).__name__}: {error}", EXIT_FAILED)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="loop, …: a module of benchmarks/. Left out: what there is.")
    ] = None,
) -> None:
    """Measure. Everything after NAME goes to the benchmark."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    files = {file.stem: file for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")}
    known = list(files)
    if name is None and known:
        lines = [f"  {stem:12} {_first_line(file)}" for stem, file in files.items()]
        _fail("\n".join(["name a benchmark:", *lines]), EXIT_BAD_CONFIG)
    if name not in known:
        have = (
            f"there are: {', '.join(known)}"
            if known
            else "benchmarks/ is not here: run it in a clone of the repository"
        )
        _fail(f"there is no benchmark {name!r}; {have}", EXIT_BAD_CONFIG)
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    code = importlib.import_module(f"benchmarks.{name}").main(context.args)
    raise typer.Exit(int(code or EXIT_FINISHED))


def _first_line(file: Path) -> str:
    """Of the module's docstring, without importing it."""
    return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]


keys_command.register(app)


app.command()(simulate)
app.command()(plot)


@app.command(hidden=True)
def actor() -> None:
    """Be a role process; node agents start it and write its orders to its standard input."""
    from supervisors.machine.child import run_child

    run_child()


@app.command(hidden=True)
def lead() -> None:
    """Be the head's process; headrace run and headrace head start it and write its orders to its standard input."""
    from supervisors.head.head_process import run_head_process

    run_head_process()


def _finish(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end; errors become messages and exit codes.

    The first Ctrl-C cancels the main task, which is to take its checkpoint and return; a second one ends the process.
    """
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(start())
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_CONFIG)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail("interrupted", EXIT_INTERRUPTED)
    except (HeadraceError, OSError) as error:
        _fail(f"{type(error).__name__}: {error}", EXIT_FAILED)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _fail(message: str, code: int) -> NoReturn:
    print(f"headrace: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(code)
