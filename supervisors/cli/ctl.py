"""``headrace ctl``: each verb of the control protocol as a command.

Exit codes: 0 done; 1 the server said no, or cannot be reached; 2 the request itself is wrong.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from actors.core.terminal_text import harmless
from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from transport.errors import HeadraceError

EXIT_REFUSED = 1
EXIT_BAD_REQUEST = 2
_KEPT = ("jobs", "metrics", "logs")
"""Verbs that a run's files answer when nobody else does."""

ctl = typer.Typer(no_args_is_help=True, help="Look at and steer a run through its control socket.")

service = typer.Typer(no_args_is_help=True, help="Add, drain and remove training services.")
ctl.add_typer(service, name="service")

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]
Job = Annotated[str | None, typer.Argument(help="The job's name; not needed if there is only one.")]
JobOption = Annotated[
    str | None,
    typer.Option("--job", help="The job's name; not needed if there is only one."),
]

ServiceName = Annotated[str, typer.Argument(help="The training service's name.")]


@dataclass
class _Options:
    control: str | None
    json: bool
    timeout_s: float | None
    keys: Path | None = None


_options = _Options(None, False, None)


@ctl.callback()
def options(
    control: Annotated[
        str | None,
        typer.Option(
            envvar="HEADRACE_CONTROL",
            help="Endpoint, or run directory. Default: the newest of runs/.",
        ),
    ] = None,
    json_: Json = False,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds to wait for an answer.")] = None,
    keys: Annotated[
        Path | None, typer.Option(envvar="HEADRACE_CONTROL_KEYS", help="Directory of this client's keys.")
    ] = None,
) -> None:
    """Look at and steer a run through its control socket."""
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
        _fail(f"--timeout is {timeout_s}, expected seconds from 0", EXIT_BAD_REQUEST)
    _options.control, _options.json, _options.timeout_s, _options.keys = control, json_, timeout_s, keys


@ctl.command()
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c")] = None,
    json_: Json = False,
) -> None:
    """Start a job on a head."""
    from configs.loader import read_job

    try:
        content = read_job(job, set_ or []).model_dump(mode="json", exclude_unset=True)
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_REQUEST)
    _call("submit", {"job": content}, json_)


@ctl.command()
def jobs(json_: Json = False) -> None:
    """Every job with its state and step."""
    _call("jobs", {}, json_)


@ctl.command()
def watch(job: Job = None, json_: Json = False) -> None:
    """Events as they happen, until the job ends."""
    _run(_watch(job, json_ or _options.json))


@ctl.command()
def pause(job: Job = None, json_: Json = False) -> None:
    """Stop generating and training; nothing is lost."""
    _call("pause", {"job": job}, json_)


@ctl.command()
def resume(job: Job = None, json_: Json = False) -> None:
    """Go on after a pause."""
    _call("resume", {"job": job}, json_)


@ctl.command()
def cancel(job: Job = None, json_: Json = False) -> None:
    """End a job for good, after a checkpoint."""
    _call("cancel", {"job": job}, json_)


@ctl.command()
def scale(
    workers: Annotated[int, typer.Argument(min=0, help="Rollout workers.")],
    job: JobOption = None,
    json_: Json = False,
) -> None:
    """Set how many rollout workers a job has."""
    _call("scale", {"workers": workers, "job": job}, json_)


@ctl.command()
def drain(
    target: Annotated[str, typer.Argument(help="A node or a worker, by name.")],
    json_: Json = False,
) -> None:
    """Take a node or a worker out of service in good order."""
    _call("drain", {"target": target}, json_)


@ctl.command()
def undrain(
    target: Annotated[str, typer.Argument(help="A node or a training service, by name.")],
    json_: Json = False,
) -> None:
    """Take a drained node or training service back."""
    _call("undrain", {"target": target}, json_)


@ctl.command()
def services(json_: Json = False) -> None:
    """Training services: whom each serves, where states lie, how much of its time it computes, and what it saves."""
    _call("services", {}, json_)


@ctl.command()
def queue(json_: Json = False) -> None:
    """Jobs that wait for a training service, and for what."""
    _call("queue", {}, json_)


@service.command("add")
def service_add(
    file: Annotated[Path, typer.Argument(metavar="SERVICES.yaml")],
    name: Annotated[str | None, typer.Argument(help="One of the file's services; all if left out.")] = None,
    json_: Json = False,
) -> None:
    """Start the training services of a file; its rules for all of them stay as they were at the head's start."""
    from configs.services import load_services

    try:
        found = [service for service in load_services(file).services if name in (None, service.name)]
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_REQUEST)
    if not found:
        _fail(f"{file} has no service named {name!r}", EXIT_BAD_REQUEST)
    for config in found:
        _call("service_add", {"service": config.model_dump(mode="json")}, json_)


@service.command("drain")
def service_drain(name: ServiceName, json_: Json = False) -> None:
    """Let a training service take no further job; ``undrain`` takes it back."""
    _call("service_drain", {"service": name}, json_)


@service.command("remove")
def service_remove(name: ServiceName, json_: Json = False) -> None:
    """End a training service that serves no job."""
    _call("service_remove", {"service": name}, json_)


@ctl.command()
def tree(job: JobOption = None, json_: Json = False) -> None:
    """Every actor: name, role, node, pid, state, incarnation, restarts."""
    _call("tree", {"job": job}, json_)


@ctl.command()
def nodes(json_: Json = False) -> None:
    """Every machine: its slots, its devices, and who has which."""
    _call("nodes", {}, json_)


@ctl.command()
def stalls(
    longer_than_s: Annotated[
        float, typer.Option("--longer-than", min=0.0, help="Seconds that a wait has lasted.")
    ] = 1.0,
    json_: Json = False,
) -> None:
    """Who waits for whom in every process, oldest first; and which process does not answer."""
    _call("stalls", {"longer_than_s": longer_than_s}, json_)


@ctl.command()
def dead_letters(json_: Json = False) -> None:
    """Messages that found no receiver: counted by reason, and the newest of each process."""
    _call("dead_letters", {}, json_)


@ctl.command()
def metrics(
    job: JobOption = None,
    last: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    json_: Json = False,
) -> None:
    """The last rows of metrics.jsonl."""
    _call("metrics", {"job": job, "last": last}, json_)


@ctl.command()
def logs(
    actor: Annotated[str | None, typer.Argument(help="An actor's name; all if left out.")] = None,
    job: JobOption = None,
    lines: Annotated[int, typer.Option(min=1, help="Lines.")] = 100,
    json_: Json = False,
) -> None:
    """The last log lines of an actor."""
    _call("logs", {"job": job, "actor": actor, "lines": lines}, json_)


@ctl.command()
def checkpoint(job: Job = None, json_: Json = False) -> None:
    """Write a checkpoint after the step under way."""
    _call("checkpoint", {"job": job}, json_)


@ctl.command()
def inject(
    kind: Annotated[
        str, typer.Argument(help="kill, hang, slow, partition, drop, delay, … : docs/guides/fault_injection.md")
    ],
    target: Annotated[
        str | None,
        typer.Argument(help="A process by name, or role=rollout, node=NAME, link=A,B, chunk=newest."),
    ] = None,
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds that it lasts. Default: for good.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Another key of the fault; repeatable.")
    ] = None,
    job: JobOption = None,
    json_: Json = False,
) -> None:
    """Do harm on purpose: commit one fault on the run's real processes, now."""
    from configs.fault_words import fault_from_words

    try:
        fault = fault_from_words(kind, target, for_s, set_ or [])
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_REQUEST)
    _call("inject", {"fault": fault, "job": job}, json_)


def _call(op: str, args: dict[str, Any], json_: bool) -> None:
    result = _from_files(op, args) if op in _KEPT else None
    if result is None:
        result = _run(_ask(op, args))
    if json_ or _options.json:
        print(json.dumps(result), flush=True)
    else:
        from supervisors.cli.tables import console, print_result

        print_result(console(), op, result)


def _from_files(op: str, args: dict[str, Any]) -> Any:
    """What the files of a run say that is over or whose head is gone; None if there is a head to ask, or no run."""
    from supervisors.api.run_files import runs_of_command

    where = _options.control
    if where is not None and "://" in where:
        return None
    found = runs_of_command(Path(where) if where is not None else None, RUN_ROOT)
    if not found or any(not run.is_run or run.goes_on for run in found):
        return None
    if op == "jobs":
        return [row for run in found for row in run.jobs()]
    wanted = args.get("job")
    if len(found) > 1 and (found := [run for run in found if run.name == wanted][:1]) == []:
        _fail(f"several jobs were run there, and {wanted!r} is none of them: name one with --job", EXIT_BAD_REQUEST)
    try:
        return found[0].answer(op, args)
    except FileNotFoundError as error:
        _fail(str(error), EXIT_BAD_REQUEST)


async def _ask(op: str, args: dict[str, Any]) -> Any:
    from actors.control.client import ControlClient

    async with ControlClient(_endpoint(), keys=_keys()) as client:
        return await client.call(op, args, timeout_s=_options.timeout_s)


async def _watch(job: str | None, json_: bool) -> None:
    from actors.control.client import ControlClient
    from supervisors.cli.outlook import PhaseProgress
    from supervisors.cli.tables import line

    phase, loop = PhaseProgress(), asyncio.get_running_loop()
    async with ControlClient(_endpoint(), keys=_keys()) as client:
        async for event in client.watch({"job": job}):
            if json_:
                print(json.dumps(event), flush=True)
            elif event["kind"] == "phase":
                phase.update(event, loop.time())
                if (text := phase.line()) is not None:
                    print(text, flush=True)
            else:
                print(line(event), flush=True)


def _endpoint() -> str:
    """The endpoint asked for, else that of the newest run under ``runs/``."""
    from actors.control.socket import ENDPOINT_FILE, read_endpoint

    where = _options.control
    if where is None:
        stored = sorted(Path("runs").glob(f"*/{ENDPOINT_FILE}"), key=os.path.getmtime)
        if not stored:
            raise FileNotFoundError("no run was found under runs/: name its endpoint or run directory with --control")
        where = str(stored[-1])
    return read_endpoint(where)


def _keys() -> Any:
    from transport.zmq.security import load_keys

    return load_keys(_options.keys) if _options.keys is not None else None


def _run(work: Any) -> Any:
    from actors.control.errors import BadRequest, ControlError

    try:
        return asyncio.run(work)
    except BadRequest as error:
        _fail(_sentence(error), EXIT_BAD_REQUEST)
    except ControlError as error:
        _fail(_sentence(error), EXIT_REFUSED)
    except (FileNotFoundError, ValueError, HeadraceError) as error:
        _fail(str(error), EXIT_BAD_REQUEST)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _sentence(error: Any) -> str:
    return f"{error.message}. {error.hint}" if error.hint else str(error.message)


def _fail(message: str, code: int) -> NoReturn:
    print(f"headrace ctl: {harmless(message)}", file=sys.stderr, flush=True)
    raise typer.Exit(code)
