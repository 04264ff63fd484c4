"""``headrace console RUN|ENDPOINT``: a run in the browser, while it goes on and after it.

RUN (a directory) ─▶ RunFiles ─┐                    ┌─▶ ConsoleServer ─▶ browsers of this machine
                               ├─▶ Feed ────────────┤
ENDPOINT ─▶ LiveRun ───────────┘                    └─ a run's own endpoint is in its directory
"""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from supervisors.cli.command import EXIT_BAD_CONFIG, fail, finish, wrong

_LISTEN: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\[\]/]+):(?P<port>\d{1,5})")


def console(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR|ENDPOINT", help="A run's directory, or the control endpoint of a head.")
    ],
    job: Annotated[str | None, typer.Option(help="The job's name; not needed if there is only one.")] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where browsers of this machine connect. Port 0: any free one.")
    ] = "127.0.0.1:0",
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
    keys: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_CONTROL_KEYS", help="Directory of this client's keys; those that may only look suffice."
        ),
    ] = None,
) -> None:
    """Show a run in the browser: reward, throughput, lanes, workers, samples, stalls. It changes nothing in the run."""
    from configs.errors import ConfigError
    from transport.zmq.security import KeyFileError, load_keys

    try:
        host, port = _address(listen)
        pair = load_keys(keys) if keys is not None else None
        files, where = _sources(run)
    except (ConfigError, KeyFileError) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    finish(lambda: _serve(files, where, job, pair, (host, port), open_=open_))


def _address(listen: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: ``listen`` is no address, or other machines could connect.
    """
    from transport.endpoints import is_loopback

    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > 65535:
        raise wrong(f"--listen {listen}", "expected HOST:PORT", "Say 127.0.0.1:8642, or leave it out")
    if not is_loopback(found["host"]):
        port = found["port"] if int(found["port"]) else "8642"
        what = "other machines could connect, and the console is for this one alone"
        raise wrong(
            f"--listen {listen}",
            what,
            f"Listen at 127.0.0.1:{port}, and from elsewhere run ssh -L {port}:127.0.0.1:{port} HOST",
        )
    return found["host"].strip("[]"), int(found["port"])


def _sources(run: str) -> tuple[Any, Callable[[], str]]:
    """The files of the run, if they are here, and how to learn where its control socket is.

    Raises:
        ConfigError: ``run`` is neither a run directory nor an endpoint.
    """
    from actors.control.socket import read_endpoint
    from configs.limits import DEFAULT_LIMITS
    from supervisors.cli.console.run_files import RunFiles

    if "://" in run:
        return None, lambda: run
    return RunFiles(Path(run), DEFAULT_LIMITS), lambda: read_endpoint(run)


async def _serve(
    files: Any, where: Callable[[], str], job: str | None, keys: Any, address: tuple[str, int], *, open_: bool
) -> None:
    from configs.limits import DEFAULT_LIMITS
    from supervisors.cli.console.feed import Feed
    from supervisors.cli.console.live_run import LiveRun
    from supervisors.cli.console.server import ConsoleServer

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    feed = Feed(files, DEFAULT_LIMITS)
    name = job or (files.settings.get("name") if files is not None else None)
    feed.live = LiveRun(where, name, keys, DEFAULT_LIMITS, feed.heard)
    tasks = [asyncio.create_task(feed.run()), asyncio.create_task(feed.live.run())]
    for task in tasks:  # they go on for ever: whatever ends one ends the console
        task.add_done_callback(lambda _: stopped.set())
    server = ConsoleServer(feed, DEFAULT_LIMITS)
    try:
        await server.start(*address)
        print(f"{server.url}\nCtrl-C ends the console, not the run.", flush=True)
        with _browser(server.url) if open_ else nullcontext():
            await stopped.wait()
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
    finally:
        await server.stop()
        for task in tasks:
            task.cancel()


@contextmanager
def _browser(url: str) -> Iterator[None]:
    """Open ``url`` in a browser, by way of a file: arguments of processes can be read by everybody on the machine."""
    with tempfile.TemporaryDirectory(prefix="headrace-console-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">', encoding="utf-8")
        if not webbrowser.open(page.as_uri()):
            print("no browser could be opened: open the address yourself", flush=True)
        yield
