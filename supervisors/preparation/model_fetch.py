"""Fetches a model by its hub name into the Hugging Face cache, before any process needs it.

    name ──▶ supervisors.preparation.hub_download, a process ──▶ Hugging Face cache; its commit ──▶ a record of the run

If the run directory holds the record, the run is resumed: it gets the commit that the record names, even if the branch
has moved on.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.host.whole_file import write_whole
from configs.checks.model_files import problem_of
from configs.limits import Limits
from supervisors.machine.processes.helper_process import run_helper
from supervisors.preparation.hub_download import Order, Report, read_report
from supervisors.preparation.phase import Phase, Say, Show
from supervisors.tree.errors import ModelNotFetched


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a hub, with the keys of the job file that name it and its revision."""

    field: str
    name: str
    revision_field: str
    revision: str | None


async def fetch_model(wanted: HubModel, record: Path, log: Path, limits: Limits, say: Say, show: Show) -> Path:
    """Fetch the model into the Hugging Face cache; returns its directory.

    Raises:
        ModelNotFetched: it could not be fetched; the message names the field, what was tried and what to do.
    """
    name, report_file = wanted.name, record.with_name(f"{record.stem}_download.json")
    revision = _recorded_commit(record, name) or wanted.revision
    report_file.unlink(missing_ok=True)
    say(f"looking for the model {name}" + (f" at {revision}" if revision else ""))
    order = Order(name, revision, str(report_file), wanted.field, wanted.revision_field)
    watch = _Progress(wanted, report_file, show, limits.model_download_stall_s)
    try:
        end = await run_helper(
            "supervisors.preparation.hub_download", log, limits, limits.model_download_timeout_s,
            stdin=json.dumps(asdict(order)).encode(), look=watch.look, every_s=limits.model_progress_s,
        )  # fmt: skip
    except TimeoutError as error:
        wrong = f"was not fetched within limits.model_download_timeout_s ({limits.model_download_timeout_s:g} s)"
        raise _not_fetched(wanted, wrong, "Raise it and start again: what has been fetched is kept") from error
    report = read_report(report_file)
    if report is None or report.stage not in ("done", "failed"):
        wrong = f"could not be fetched: the process that fetches it ended without a word ({end.exit})"
        raise _not_fetched(wanted, wrong, f"The last lines of {log}:\n{end.tail}")
    report_file.unlink()
    if report.stage == "failed":
        subject = f"{name!r} " if report.field == wanted.field else ""
        raise ModelNotFetched(f"{report.field}: {subject}{report.wrong}. {report.fix}")
    if report.note:
        say(report.note)
    # no check of the weights: the hub's client has compared their sizes with the hub's
    if (problem := problem_of(Path(report.directory), name, weights=False)) is not None:
        raise ModelNotFetched(f"{wanted.field}: {problem[0]}. {problem[1]}")
    say(f"the model is {name} at commit {report.commit[:12]}, in {report.directory}")
    _write_record(record, wanted, report)
    return Path(report.directory)


def _not_fetched(wanted: HubModel, wrong: str, fix: str) -> ModelNotFetched:
    return ModelNotFetched(f"{wanted.field}: {wanted.name!r} {wrong}. {fix}")


class _Progress:
    """The progress of a download is shown when it has changed, and a download that makes none is ended."""

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
            wrong = f"made no progress: nothing has come for limits.model_download_stall_s ({self._stall_s:g} s)"
            fix = "Look at the network, and start again: what has been fetched is kept"
            raise _not_fetched(self._wanted, wrong, fix)


def _recorded_commit(record: Path, name: str) -> str | None:
    """The commit that this run began with; None for a new run, or one that had not fetched the model yet."""
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
    write_whole(record, json.dumps(content, indent=1) + "\n", lasting=True)
