"""Fetches a model by its hub name into the Hugging Face cache, in its own process, so that the head never waits.

    order (stdin) ─▶ ask the hub ─▶ choose files ─▶ enough room? ─▶ snapshot_download ─▶ complete? ─▶ done
                         └ away, offline, refused ─▶ copy in the cache ─────────────────────┘
    report (a file) ◀── replaced as a whole at every change; the parent reads it now and then

Invariants
- The last report is ``done``, with a directory that holds a complete model of one commit, or ``failed``, with what was
  tried and what to do. A process that ends without either has crashed, and its log says how.
- ``HF_HOME``, ``HF_HUB_CACHE``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` work as in huggingface_hub, which
  is imported only when this process runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.host.parent_death import die_with_parent
from actors.host.whole_file import write_whole
from configs.limits import DEFAULT_LIMITS
from supervisors.preparation.hub_files import lacking_files, lacking_kinds, needed_files


@dataclass(frozen=True)
class Order:
    """The order says what to fetch. ``revision`` is a branch, a tag or a commit; None: the default branch."""

    name: str
    revision: str | None
    report: str
    field: str = "model.path"
    """Key of the job file that names the model, for messages."""
    revision_field: str = "model.revision"


@dataclass(frozen=True)
class Report:
    """The report says how far the download is. ``stage`` is ``asking``, ``downloading``, ``done`` or ``failed``."""

    stage: str
    bytes_done: int = 0
    bytes_total: int = 0
    directory: str = ""
    commit: str = ""
    note: str = ""
    """Remark for ``done``, such as that the hub was away and the cache was used."""
    field: str = "model.path"
    wrong: str = ""
    """Rest of a sentence for ``failed``, which begins with the model's name: what was tried, and how it failed."""
    fix: str = ""


def read_report(path: Path) -> Report | None:
    """The newest report in the file; None if there is none yet."""
    try:
        return Report(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None


class _Failed(Exception):
    """The model cannot be fetched; ``report`` says why."""

    def __init__(self, wrong: str, fix: str, field: str = "") -> None:
        super().__init__(wrong)
        self.report = Report("failed", field=field, wrong=wrong, fix=fix)


class _Reporter:
    """The reporter writes the report, from any thread. That is seldom: the client counts bytes every 10 MB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._now = Report("asking")
        self._bytes_of_bar: dict[int, int] = {}

    def say(self, report: Report) -> None:
        with self._lock:
            self._now = report
            self._write()

    def add(self, bar: int, count: float) -> None:
        """Add bytes of a progress bar. Bars count the same bytes, as they come and on disk: the largest sum counts."""
        with self._lock:
            self._bytes_of_bar[bar] = self._bytes_of_bar.get(bar, 0) + int(count)
            done = min(max(self._bytes_of_bar.values()), self._now.bytes_total)
            self._now = replace(self._now, bytes_done=done)
            self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(asdict(self._now)))


def fetch(order: Order) -> Report:
    """Have the complete model of ``order`` on disk, from cache or hub; writes and returns the last report."""
    reporter = _Reporter(Path(order.report))
    reporter.say(Report("asking"))
    try:
        report = _fetch(order, reporter)
    except _Failed as failure:
        report = replace(failure.report, field=failure.report.field or order.field)
    reporter.say(report)
    return report


def _fetch(order: Order, reporter: _Reporter) -> Report:
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

    try:
        info = HfApi().model_info(
            order.name, revision=order.revision, files_metadata=True, timeout=DEFAULT_LIMITS.hub_answer_s
        )
    except Exception as error:  # noqa: BLE001  whichever HTTP library is below raises errors of its own
        return _from_cache(order, error)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    if lacking := lacking_kinds(sizes):
        raise _Failed(
            f"names a repository of {hub()} that is no model we can read: at its top there is no {', '.join(lacking)}",
            "Choose a repository with safetensors and a fast tokenizer, or convert it with save_pretrained"
            f" and set {order.field} to the directory",
        )
    wanted = needed_files(sizes)
    cached = [name for name in wanted if isinstance(try_to_load_from_cache(order.name, name, revision=info.sha), str)]
    missing_bytes = sum(sizes[name] for name in wanted if name not in cached)
    _check_room(missing_bytes)
    reporter.say(Report("downloading", bytes_total=missing_bytes, commit=str(info.sha)))
    # the revision as the user named it, so that the cache learns its commit and can be used offline
    what = {"revision": order.revision, "allow_patterns": [_literal(name) for name in wanted]}
    try:
        directory = Path(snapshot_download(order.name, **what, tqdm_class=_counting_bar(reporter)))
    except Exception as error:  # as above; each becomes one sentence with what to do
        raise _failed(order, error, "was not fetched as a whole; what has come is kept") from error
    if lacking := lacking_files(directory):
        raise _Failed(
            f"was fetched to {directory}, and lacks {_listed(lacking)}",
            f"Its author has to mend it; {_elsewhere(order)}",
        )
    return Report("done", directory=str(directory), commit=directory.name)


def _from_cache(order: Order, why: Exception) -> Report:
    """Use the copy in the cache, since the hub could not be used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    what = {"revision": order.revision, "allow_patterns": ["config.json"]}
    try:
        directory = Path(snapshot_download(order.name, **what, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, UnicodeError) as error:
        raise _failed(order, why, f"is not in the cache {HF_HUB_CACHE}") from error
    if lacking := lacking_files(directory):
        raise _failed(order, why, f"is in the cache without {_listed(lacking)} ({directory})") from why
    note = f"the hub at {hub()} was of no help ({brief(why)}); the cache has it"
    return Report("done", directory=str(directory), commit=directory.name, note=note)


def _check_room(wanted_bytes: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < wanted_bytes:
        raise _Failed(
            f"needs {wanted_bytes / 1e9:.1f} GB more in {HF_HUB_CACHE}, where {free_bytes / 1e9:.1f} GB are free",
            "Make room there, or set HF_HOME to a larger disk",
        )


def _literal(name: str) -> str:
    """A pattern that matches ``name`` and nothing else."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _counting_bar(reporter: _Reporter) -> Any:
    """A class of progress bars that draw nothing, and report bytes to ``reporter``."""
    from tqdm.auto import tqdm

    class CountingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes and n:
                reporter.add(id(self), n)
            return super().update(n)

    return CountingBar


# ------------------------------------------------------------ failures


def hub() -> str:
    """The address of the hub."""
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT


def _elsewhere(order: Order) -> str:
    return f"download it elsewhere (hf download {order.name} --local-dir DIR) and set {order.field} to DIR"


def _failed(order: Order, error: Exception, what: str) -> _Failed:
    """The failure ``what``, with the hub's own words for the reason, and what the job's author can do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    unauthorized = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
    if isinstance(error, RevisionNotFoundError):
        wrong = f"{order.revision!r} is no branch, tag or commit of {order.name} on {hub()}"
        return _Failed(wrong, f"Use one that its page lists, or remove {order.revision_field}", order.revision_field)
    fix = f"Start it again where the hub can be reached, or {_elsewhere(order)}"
    if isinstance(error, HFValidationError | UnicodeError):
        what, fix = "is no hub name", "Name one such as Qwen/Qwen3-0.6B, or a directory"
    elif isinstance(error, GatedRepoError):
        fix = f"Ask for access on its page and set HF_TOKEN to a token of that account, or {_elsewhere(order)}"
    elif unauthorized or isinstance(error, RepositoryNotFoundError):  # without a token, a hub does not say which
        fix = f"Check the name; if it is private set HF_TOKEN, and renew one that is refused; or {_elsewhere(order)}"
    return _Failed(f"{what}, and the hub at {hub()} was of no help ({brief(error)})", fix)


def brief(error: BaseException) -> str:
    """An error's type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(os.EX_OK if fetch(Order(**json.load(sys.stdin))).stage == "done" else 1)
