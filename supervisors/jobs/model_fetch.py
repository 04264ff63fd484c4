"""A model by its hub name, fetched into the Hugging Face cache before any process needs it.

    name ──▶ supervisors.jobs.hub_download, a process ──▶ Hugging Face cache; its commit ──▶ a record of the run

A run directory that holds the record is a resumed run: it gets the commit that is named there, whatever the branch has
become.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.checks.model_files import problem_of
from configs.limits import Limits
from supervisors.jobs.child_wait import child_ended
from supervisors.jobs.hub_download import Order, Report, read_report
from supervisors.jobs.phase import Phase, Say, Show
from supervisors.machine.process import Launch, launch
from supervisors.machine.process_log import last_lines
from supervisors.tree.errors import ModelNotFetched


@dataclass(frozen=True, slots=True)
class HubModel:
    """Names a model of a hub, and where the user has named it."""

    field: str
    name: str
    revision_field: str
    revision: str | None


async def fetch_model(wanted: HubModel, record: Path, log: Path, limits: Limits, say: Say, show: Show) -> Path:
    """Have the model in the Hugging Face cache; returns its directory.

    Raises:
        ModelNotFetched: it could not be had; the message names the field, what was tried and what to do.
    """
    name, report_file = wanted.name, record.with_name(f"{record.stem}_download.json")
    revision = _recorded_commit(record, name) or wanted.revision
    report_file.unlink(missing_ok=True)
    say(f"looking for the model {name}" + (f" at {revision}" if revision else ""))
    order = Order(name, revision, str(report_file), wanted.field, wanted.revision_field)
    command = [sys.executable, "-P", "-m", "supervisors.jobs.hub_download"]
    fetcher = launch(Launch(command, log, stdin=json.dumps(asdict(order)).encode()))
    watch = _Progress(wanted, report_file, show, limits.model_download_stall_s)
    try:
        end = await child_ended(fetcher, limits.model_download_timeout_s, watch.look, limits.model_progress_s)
    except TimeoutError as error:
        wrong = f"was not fetched within limits.model_download_timeout_s ({limits.model_download_timeout_s:g} s)"
        raise _not_fetched(wanted, wrong, "Raise it and start again: what has been fetched is kept") from error
    report = read_report(report_file)
    if report is None or report.stage not in ("done", "failed"):
        tail = "\n".join(last_lines(log, limits.exit_log_lines))
        wrong = f"could not be fetched: the process that fetches it ended without a word ({end})"
        raise _not_fetched(wanted, wrong, f"The last lines of {log}:\n{tail}")
    report_file.unlink()
    if report.stage == "failed":
        subject = f"{name!r} " if report.field == wanted.field else ""
        raise ModelNotFetched(f"{report.field}: {subject}{report.wrong}. {report.fix}")
    if report.note:
        say(report.note)
    # its weights are whole: the hub's client has held their sizes against the hub's
    if (problem := problem_of(Path(report.directory), name, weights=False)) is not None:
        raise ModelNotFetched(f"{wanted.field}: {problem[0]}. {problem[1]}")
    say(f"the model is {name} at commit {report.commit[:12]}, in {report.directory}")
    _write_record(record, wanted, report)
    return Path(report.directory)


def _not_fetched(wanted: HubModel, wrong: str, fix: str) -> ModelNotFetched:
    return ModelNotFetched(f"{wanted.field}: {wanted.name!r} {wrong}. {fix}")


class _Progress:
    """Shows how far a download is, when that has changed, and ends one that does not move."""

    def __init__(self, wanted: HubModel, report_file: Path, show: Show, stall_s: float) -> None:
        self._wanted, self._file, self._show, self._stall_s = wanted, report_file, show, stall_s
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
                self._show(Phase(f"downloading {self._wanted.name}", now.bytes_done, now.bytes_total, "bytes"))
        elif self._loop.time() - self._moved_s > self._stall_s:
            wrong = f"did not get on: nothing has come for limits.model_download_stall_s ({self._stall_s:g} s)"
            fix = "Look at the network, and start again: what has been fetched is kept"
            raise _not_fetched(self._wanted, wrong, fix)


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


def _write_record(record: Path, wanted: HubModel, report: Report) -> None:
    content = {
        "path": wanted.name,
        "revision": wanted.revision,
        "commit": report.commit,
        "directory": report.directory,
    }
    partial = record.with_name(record.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(record)
