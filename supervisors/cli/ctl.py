"""``headrace ctl``: each verb of the control protocol as a command.

verbs.VERBS ─▶ commands, their options and help ─▶ ControlClient, or the files of a run that is over ─▶ table, JSON

Exit codes: 0 done; 1 the server said no, or cannot be reached; 2 the request itself is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import msgspec
import typer
from msgspec.structs import FieldInfo

from actors.control.verbs import VERBS, Args
from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless
from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from transport.errors import HeadraceError

EXIT_REFUSED = 1
EXIT_BAD_REQUEST = 2
_KEPT = ("jobs", "metrics", "logs")
"""Verbs that a run's files can answer once its head is gone."""

ctl = typer.Typer(no_args_is_help=True, help="Look at and steer a run through its control socket.")

service = typer.Typer(no_args_is_help=True, help="Add, drain and remove training services.")
ctl.add_typer(service, name="service")

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]


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


def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c")] = None,
    json_: Json = False,
) -> None:
    from configs.loader import read_job

    with _requests():
        content = read_job(job, set_ or []).model_dump(mode="json", exclude_unset=True)
    _call("submit", {"job": content}, json_)


def watch(
    job: Annotated[str | None, typer.Argument(help="The job's name; not needed if there is only one.")] = None,
    json_: Json = False,
) -> None:
    _run(_watch(job, json_ or _options.json))


def service_add(
    file: Annotated[Path, typer.Argument(metavar="SERVICES.yaml")],
    name: Annotated[str | None, typer.Argument(help="One of the file's services; all if left out.")] = None,
    json_: Json = False,
) -> None:
    """Start the training services of a file; its rules for all of them stay as they were at the head's start."""
    from configs.services import load_services

    with _requests():
        found = [service for service in load_services(file).services if name in (None, service.name)]
    if not found:
        _fail(f"{file} has no service named {name!r}", EXIT_BAD_REQUEST)
    for config in found:
        _call("service_add", {"service": config.model_dump(mode="json")}, json_)


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
    job: Annotated[str | None, typer.Option("--job", help="The job's name; not needed if there is only one.")] = None,
    json_: Json = False,
) -> None:
    from configs.fault_words import fault_from_words

    with _requests():
        fault = fault_from_words(kind, target, for_s, set_ or [])
    _call("inject", {"fault": fault, "job": job}, json_)


_OWN: Final[dict[str, Callable[..., None]]] = {
    "submit": submit, "watch": watch, "service_add": service_add, "inject": inject,
}  # fmt: skip
"""Commands whose words are not the verb's arguments; all others are made from the verbs' declarations."""


def _made_from(op: str, verb: type[Args]) -> Callable[..., None]:
    """A command that takes the arguments of a verb."""
    fields = {_word_of(field): field for field in msgspec.structs.fields(verb)}

    def command(json_: bool, **given: Any) -> None:
        _call(op, {fields[word].name: value for word, value in given.items()}, json_)

    options = [_parameter(word, field) for word, field in fields.items()]
    options.append(inspect.Parameter("json_", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))
    command.__annotations__ = {option.name: option.annotation for option in options}
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command


def _word_of(field: FieldInfo) -> str:
    return _said_of(field)["word"] or field.name


def _said_of(field: FieldInfo) -> dict[str, Any]:
    """What ``verbs.py`` declares of an argument for the command line."""
    return {"help": field.type.__metadata__[0].description, **field.type.__metadata__[0].extra}


def _parameter(word: str, field: FieldInfo) -> inspect.Parameter:
    said = _said_of(field)
    bounds = {"help": said["help"], "min": said["least"]}
    shown = typer.Option(said["option"], **bounds) if said["option"] else typer.Argument(**bounds)
    default = inspect.Parameter.empty if field.default is msgspec.NODEFAULT else field.default
    kind, type_ = inspect.Parameter.KEYWORD_ONLY, field.type.__origin__
    return inspect.Parameter(word, kind, default=default, annotation=Annotated[type_, shown])


for _op, _verb in VERBS.items():
    if not _verb.of_server:
        _group, _name = (service, _op.removeprefix("service_")) if _op.startswith("service_") else (ctl, _op)
        _command = _OWN.get(_op) or _made_from(_op, _verb)
        _group.command(_name.replace("_", "-"), help=_command.__doc__ or _verb.__doc__)(_command)


@contextlib.contextmanager
def _requests() -> Iterator[None]:
    """Wrap code that makes a request of arguments and files; a ConfigError in it ends the command."""
    try:
        yield
    except ConfigError as error:
        _fail(str(error), EXIT_BAD_REQUEST)


def _call(op: str, args: dict[str, Any], json_: bool) -> None:
    result = _from_files(op, args) if op in _KEPT else None
    if result is None:
        result = _run(_ask(op, args))
    if json_ or _options.json:
        print(strict_json(result), flush=True)
    else:
        from supervisors.cli.looking.tables import console, print_result

        print_result(console(), op, result)


def _from_files(op: str, args: dict[str, Any]) -> Any:
    """The answer in the files of a run whose head is gone; None if there is a head to ask, or no run."""
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
    from supervisors.cli.looking.tables import line
    from supervisors.cli.running.outlook import PhaseProgress

    phase, loop = PhaseProgress(), asyncio.get_running_loop()
    async with ControlClient(_endpoint(), keys=_keys()) as client:
        async for event in client.watch({"job": job}):
            if json_:
                print(strict_json(event), flush=True)
            elif event["kind"] == "phase":
                phase.update(event, loop.time())
                if (text := phase.line()) is not None:
                    print(text, flush=True)
            else:
                number = {"step": event["step"] - 1, "done": event["step"]} if event["kind"] == "step" else {}
                print(line({**event, **number}), flush=True)


def _endpoint() -> str:
    """The endpoint asked for, else that of the newest run under ``runs/``."""
    from actors.control.socket import read_endpoint
    from configs.run_files import CONTROL_ENDPOINT

    where = _options.control
    if where is None:
        stored = sorted(Path("runs").glob(f"*/{CONTROL_ENDPOINT}"), key=os.path.getmtime)
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
