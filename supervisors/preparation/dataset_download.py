"""Fetches a data set by its hub name and writes it as Arrow files, in its own process, since that may take long.

    order (stdin) ─▶ load_dataset: the hub, or the cache if it is away ─▶ save_to_disk(DIRECTORY.partial) ─▶ renamed
    report (a file) ◀── done or failed

Invariants
- A directory of that name is complete: it is written under another name and then renamed.
- No code from the hub is run: ``datasets`` does not support loading scripts any more.
- ``HF_HOME``, ``HF_DATASETS_CACHE``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` work as in ``datasets``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.host.parent_death import die_with_parent
from actors.host.whole_file import write_whole
from configs.data_forms import UnknownForm, chosen_split
from supervisors.preparation.hub_download import Report, brief, hub

_FROM_CACHE = "Using the latest cached version"
"""Part of the warning that ``datasets`` logs when it could not use the hub."""


@dataclass(frozen=True)
class DataOrder:
    """The order says what to fetch; ``key``: section of the job file that names it, for messages."""

    name: str
    key: str
    config: str | None
    split: str | None
    revision: str | None
    directory: str
    report: str


class _Failed(Exception):
    """The data set cannot be fetched; ``report`` says why."""

    def __init__(self, field: str, wrong: str, fix: str) -> None:
        super().__init__(wrong)
        self.report = Report("failed", field=field, wrong=wrong, fix=fix)


class _Notes(logging.Handler):
    """The handler keeps the warnings that ``datasets`` logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def fetch(order: DataOrder) -> Report:
    """Fetch the data set of ``order`` into its directory; writes and returns the report."""
    try:
        report = _fetch(order)
    except _Failed as failure:
        report = failure.report
    write_whole(Path(order.report), json.dumps(asdict(report)))
    return report


def _fetch(order: DataOrder) -> Report:
    import datasets

    datasets.disable_progress_bars()
    notes = _Notes()
    logging.getLogger("datasets").addHandler(notes)
    try:
        loaded: Any = datasets.load_dataset(order.name, order.config, split=order.split, revision=order.revision)
    except Exception as error:  # the hub's client and each reader raise errors of their own
        raise _failed(order, error) from error
    cached = any(_FROM_CACHE in text for text in notes.said)
    if cached and order.revision is not None:
        wrong = f"the hub at {hub()} was of no help, and the cache does not say which revision of {order.name!r} it has"
        fix = f"Start again where the hub can be reached, or remove {order.key}.revision"
        raise _Failed(f"{order.key}.revision", wrong, fix)
    try:
        table = loaded if order.split is not None else loaded[chosen_split([str(name) for name in loaded], order.name)]
    except UnknownForm as error:
        raise _Failed(f"{order.key}.split", str(error), error.fix) from error
    _save(order, table)
    note = f"the hub at {hub()} was of no help; the cache has {order.name}" if cached else ""
    return Report("done", directory=order.directory, bytes_total=len(table), note=note)


def _save(order: DataOrder, table: Any) -> None:
    partial = Path(f"{order.directory}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        table.save_to_disk(str(partial))
        shutil.rmtree(order.directory, ignore_errors=True)
        partial.rename(order.directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        fix = "Make room there" if error.errno == errno.ENOSPC else "Check that directory"
        raise _Failed(
            f"{order.key}.path", f"{order.name!r} cannot be written to {order.directory}: {error}", fix
        ) from error


def _failed(order: DataOrder, error: Exception) -> _Failed:
    """The failure for ``error``, in the library's own words, with what the job's author can do."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    key, name, said = order.key, repr(order.name), brief(error)
    elsewhere = f"save it elsewhere (load_dataset(…).save_to_disk(DIR)) and set {key}.path to DIR"
    if isinstance(error, ValueError) and ("BuilderConfig" in said or "Config name is missing" in said):
        return _Failed(
            f"{key}.config", f"{order.config!r} does not choose one of {name}: {said}", "Set it to one of those"
        )
    if isinstance(error, ValueError) and ("nknown split" in said or ("split" in said and order.split is not None)):
        return _Failed(f"{key}.split", f"{order.split!r} is none of {name}: {said}", "Set it to one of those")
    if isinstance(error, DatasetNotFoundError) and "Revision" in said:
        wrong = f"{order.revision!r} is no branch, tag or commit of {order.name} on {hub()}"
        return _Failed(f"{key}.revision", wrong, f"Use one that its page lists, or remove {key}.revision")
    # without a token, a hub does not tell whether a data set is private or missing
    unseen = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404)
    wrong = f"{name} is neither a file or directory here nor a data set that {hub()} shows us ({said})"
    if isinstance(error, DatasetNotFoundError) and "gated" in said:
        fix = f"Ask for access on its page and set HF_TOKEN to a token of that account, or {elsewhere}"
    elif unseen or isinstance(error, DatasetNotFoundError | HFValidationError | FileNotFoundError):
        fix = f"Check the name; if it is private set HF_TOKEN, and renew one that is refused; or {elsewhere}"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        wrong, fix = (
            f"{name} does not fit on the disk of the cache ({said})",
            "Make room, or set HF_HOME to a larger disk",
        )
    elif isinstance(error, ConnectionError):
        wrong = f"{name} is neither a file or directory here nor in the cache, and {hub()} was of no help ({said})"
        fix = f"Start again where the hub can be reached, or {elsewhere}"
    elif isinstance(error, DataFilesNotFoundError | RuntimeError):
        wrong, fix = f"{name} is no data set that can be read ({said})", f"Use another one, or {elsewhere}"
    else:
        wrong, fix = f"{name} could not be fetched ({said})", f"Start again, or {elsewhere}"
    return _Failed(f"{key}.path", wrong, fix)


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(os.EX_OK if fetch(DataOrder(**json.load(sys.stdin))).stage == "done" else 1)
