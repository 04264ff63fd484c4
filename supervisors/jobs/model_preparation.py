"""The policy's files, before any process needs them: where the job says, fetched from a hub, or made on the spot.

    source: tiny ─────────▶ the user's cache, else supervisors.jobs.tiny_model ─▶ RUN_DIR/model        (or model.path)
    path is a directory ──▶ itself
    path is a hub name ───▶ supervisors.jobs.hub_download ──▶ Hugging Face cache; its commit ──▶ RUN_DIR/model.json

Whatever takes long is a process of its own. A run directory that holds ``model.json`` is a resumed run: it gets the
commit that is named there, whatever the branch has become.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from configs.checks.model_checks import is_hub_name
from configs.checks.model_files import problem_of
from configs.schema import JobConfig
from supervisors.jobs.hub_download import Order, Report, read_report
from supervisors.jobs.model_cache import ModelCache, cache_key
from supervisors.machine.process import ChildProcess, Launch, ProcessExit, launch
from supervisors.machine.process_log import last_lines
from supervisors.tree.errors import ModelNotFetched, ModelNotMade

RECORD: Final = "model.json"
"""File of the run directory that says which commit of which hub name the run uses."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase is work that takes long before the first step, and how much of it is done."""

    name: str
    done: int
    total: int
    unit: str
    """What is counted: ``steps`` or ``bytes``."""


def _to_nobody(_: object) -> None:
    """Tell nobody."""


Say = Callable[[str], None]
"""Callback that tells a person something once."""
Show = Callable[[Phase], None]
"""Callback that shows how far it is."""


async def prepare_model(job: JobConfig, run_dir: Path, say: Say = _to_nobody, show: Show = _to_nobody) -> Path:
    """Have the job's model on disk; returns its directory.

    Raises:
        ModelNotMade: the maker of the tiny model failed; the message holds the last lines of its log.
        ModelNotFetched: a hub name led to no model; the message names ``model.path``, what was tried and what to do.
    """
    if job.model.source == "tiny":
        return await _make_tiny(job, run_dir, say, show)
    path = Path(str(job.model.path)).expanduser()
    if path.exists() or not is_hub_name(str(job.model.path)):
        return path  # the job file's check has looked at it, and whoever reads it says what is wrong with it
    return await _fetch(job, run_dir, say, show)


async def _make_tiny(job: JobConfig, run_dir: Path, say: Say, show: Show) -> Path:
    directory = Path(job.model.path) if job.model.path is not None else run_dir.resolve() / "model"
    if (directory / "config.json").exists():
        return directory
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    cache, wait_s = ModelCache.of_user(), job.limits.model_cache_s
    if await _in_time(wait_s, lambda: cache.take(cache_key(job), partial)):
        say("the model is one that was made before, from the cache")
    else:
        shutil.rmtree(partial, ignore_errors=True)
        await _run_maker(job, run_dir, partial, show)
        await _in_time(wait_s, lambda: cache.keep(cache_key(job), partial))
    partial.rename(directory)  # a directory of that name is whole
    return directory


async def _in_time(wait_s: float, use_cache: Callable[[], bool]) -> bool:
    """What ``use_cache`` returns; False if a home that hangs does not answer: the run goes on without it."""
    try:
        async with asyncio.timeout(wait_s):
            return await asyncio.to_thread(use_cache)
    except TimeoutError:
        return False


async def _run_maker(job: JobConfig, run_dir: Path, directory: Path, show: Show) -> None:
    order, report, log = run_dir / "model_order.json", run_dir / "model_making.json", run_dir / "logs" / "model.log"
    order.write_text(job.model_dump_json())
    report.unlink(missing_ok=True)
    words = [str(order), str(directory), str(report)]
    maker = launch(Launch([sys.executable, "-P", "-m", "supervisors.jobs.tiny_model", *words], log))
    limits = job.limits

    def look() -> None:
        if report.exists() and (done := int(json.loads(report.read_text("utf-8"))["done"])):
            show(Phase("making the model", done, job.model.warm_start_steps, "steps"))

    try:
        end = await child_ended(maker, limits.model_preparation_timeout_s, look, limits.model_making_look_s)
    except TimeoutError as error:
        raise ModelNotMade(f"the tiny model was not made within {limits.model_preparation_timeout_s:g} s") from error
    if end.code != 0:
        tail = "\n".join(last_lines(log, limits.exit_log_lines))
        raise ModelNotMade(f"the tiny model could not be made ({end}); last lines of {log}:\n{tail}")
    report.unlink(missing_ok=True)


async def child_ended(
    child: ChildProcess, timeout_s: float, look: Callable[[], None] | None = None, every_s: float | None = None
) -> ProcessExit:
    """Wait for a child, and call ``look`` every ``every_s`` meanwhile; whatever is raised here ends the child.

    Raises:
        TimeoutError: it still runs after ``timeout_s``.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    try:
        while True:
            left_s = until_s - loop.time()
            try:
                return await child.wait(left_s if every_s is None else min(every_s, left_s))
            except TimeoutError:
                if loop.time() >= until_s:
                    raise
            if look is not None:
                look()
    finally:
        child.kill()
        await child.gone()


# ------------------------------------------------------------ hub names


async def _fetch(job: JobConfig, run_dir: Path, say: Say, show: Show) -> Path:
    name, limits = str(job.model.path), job.limits
    record, report_file, log = run_dir / RECORD, run_dir / "model_download.json", run_dir / "logs" / "model.log"
    revision = _recorded_commit(record, name) or job.model.revision
    report_file.unlink(missing_ok=True)
    say(f"looking for the model {name}" + (f" at {revision}" if revision else ""))
    order = Order(name=name, revision=revision, report=str(report_file))
    command = [sys.executable, "-P", "-m", "supervisors.jobs.hub_download"]
    fetcher = launch(Launch(command, log, stdin=json.dumps(asdict(order)).encode()))
    watch = _Progress(name, report_file, show, limits.model_download_stall_s)
    try:
        end = await child_ended(fetcher, limits.model_download_timeout_s, watch.look, limits.model_progress_s)
    except TimeoutError as error:
        wrong = f"was not fetched within limits.model_download_timeout_s ({limits.model_download_timeout_s:g} s)"
        raise _not_fetched(name, wrong, "Raise it and start again: what has been fetched is kept") from error
    report = read_report(report_file)
    if report is None or report.stage not in ("done", "failed"):
        tail = "\n".join(last_lines(log, limits.exit_log_lines))
        wrong = f"could not be fetched: the process that fetches it ended without a word ({end})"
        raise _not_fetched(name, wrong, f"The last lines of {log}:\n{tail}")
    report_file.unlink()
    if report.stage == "failed":
        subject = f"{name!r} " if report.field == "model.path" else ""
        raise ModelNotFetched(f"{report.field}: {subject}{report.wrong}. {report.fix}")
    if report.note:
        say(report.note)
    # its weights are whole: the hub's client has held their sizes against the hub's
    if (problem := problem_of(Path(report.directory), name, weights=False)) is not None:
        raise ModelNotFetched(f"model.path: {problem[0]}. {problem[1]}")
    say(f"the model is {name} at commit {report.commit[:12]}, in {report.directory}")
    _write_record(record, job, report)
    return Path(report.directory)


def _not_fetched(name: str, wrong: str, fix: str) -> ModelNotFetched:
    return ModelNotFetched(f"model.path: {name!r} {wrong}. {fix}")


class _Progress:
    """Shows how far a download is, when that has changed, and ends one that does not move."""

    def __init__(self, name: str, report_file: Path, show: Show, stall_s: float) -> None:
        self._name, self._file, self._show, self._stall_s = name, report_file, show, stall_s
        self._loop = asyncio.get_running_loop()
        self._last: Report | None = None
        self._moved_s = self._loop.time()

    def look(self) -> None:
        """Called every ``limits.model_progress_s``.

        Raises:
            ModelNotFetched: nothing has come for ``limits.model_download_stall_s``.
        """
        now = read_report(self._file)
        if now != self._last:
            self._last, self._moved_s = now, self._loop.time()
            if now is not None and now.stage == "downloading":
                self._show(Phase(f"downloading {self._name}", now.bytes_done, now.bytes_total, "bytes"))
        elif self._loop.time() - self._moved_s > self._stall_s:
            wrong = f"did not get on: nothing has come for limits.model_download_stall_s ({self._stall_s:g} s)"
            raise _not_fetched(self._name, wrong, "Look at the network, and start again: what has been fetched is kept")


def _recorded_commit(record: Path, name: str) -> str | None:
    """The commit that this run began with; None for a new run, or one that has not got so far."""
    if not record.exists():
        return None
    try:
        content = json.loads(record.read_text("utf-8"))
        return str(content["commit"]) if content["path"] == name else None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelNotFetched(
            f"{record} does not say which commit of {name!r} this run uses ({error!r}). Write "
            f'{{"path": "{name}", "commit": "…"}} there, or remove it to take the newest'
        ) from error


def _write_record(record: Path, job: JobConfig, report: Report) -> None:
    content = {
        "path": job.model.path,
        "revision": job.model.revision,
        "commit": report.commit,
        "directory": report.directory,
    }
    partial = record.with_name(record.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(record)
