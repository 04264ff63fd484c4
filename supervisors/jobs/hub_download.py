"""Fetches a model by its hub name into the Hugging Face cache: a process of its own, so that the head never waits.

    order (stdin) ─▶ commit in the cache? ─▶ ask the hub ─▶ choose files ─▶ snapshot_download ─▶ whole? ─▶ done
                                                └ away, offline ─▶ what the cache has ──────────────┘
    report (a file) ◀── replaced as a whole at every change; the parent looks at it now and then

Invariants
- The last report is ``done``, with a directory that holds a whole model of one commit, or ``failed``, with what was
  tried and what to do. A process that ends without either has crashed, and its log says how.
- ``HF_HOME``, ``HF_HUB_CACHE``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` mean what they mean to
  huggingface_hub, which is imported nowhere else and only when the process runs.
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
from typing import TYPE_CHECKING, Any, Final

from actors.host.fate import die_with_parent
from configs.limits import DEFAULT_LIMITS
from supervisors.jobs.hub_files import lacking_files, lacking_kinds, needed_files

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
"""The hub's list of a repository's files."""


@dataclass(frozen=True)
class Order:
    """What to fetch. ``revision`` is a branch, a tag or a commit; None: the default branch."""

    name: str
    revision: str | None
    report: str


@dataclass(frozen=True)
class Report:
    """How far it is. ``stage`` is ``asking``, ``downloading``, ``done`` or ``failed``."""

    stage: str
    bytes_done: int = 0
    bytes_total: int = 0
    directory: str = ""
    commit: str = ""
    note: str = ""
    """Of ``done``: something worth saying, such as that the hub was away and the cache was used."""
    field: str = "model.path"
    wrong: str = ""
    """Of ``failed``: what was tried and what came of it; a phrase that goes on after the value."""
    fix: str = ""


def read_report(path: Path) -> Report | None:
    """The report as it stands; None before the first."""
    try:
        return Report(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None


class _Failed(Exception):
    """The model cannot be had; ``report`` says why."""

    def __init__(self, wrong: str, fix: str, field: str = "model.path") -> None:
        super().__init__(wrong)
        self.report = Report("failed", field=field, wrong=wrong, fix=fix)


class _Reporter:
    """Writes the report from whichever thread has news; the client tells of bytes every 10 MB, so that is seldom."""

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
        """Bytes of one progress bar. Bars count the same bytes on their way in and on disk: the fullest one tells."""
        with self._lock:
            self._bytes_of_bar[bar] = self._bytes_of_bar.get(bar, 0) + int(count)
            done = min(max(self._bytes_of_bar.values()), self._now.bytes_total)
            self._now = replace(self._now, bytes_done=done)
            self._write()

    def _write(self) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(asdict(self._now)), encoding="utf-8")
        partial.replace(self._path)


def fetch(order: Order) -> Report:
    """Have a whole model of ``order`` on disk, from the cache or the hub; returns the last report, which is written."""
    reporter = _Reporter(Path(order.report))
    reporter.say(Report("asking"))
    try:
        report = _fetch(order, reporter)
    except _Failed as failure:
        report = failure.report
    reporter.say(report)
    return report


def _fetch(order: Order, reporter: _Reporter) -> Report:
    if order.revision is not None and _COMMIT.fullmatch(order.revision):  # a commit never changes: no need to ask
        try:
            return _from_cache(order)
        except _NotCached:
            pass
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi().model_info(
            order.name, revision=order.revision, files_metadata=True, timeout=DEFAULT_LIMITS.hub_answer_s
        )
    except HfHubHTTPError as error:
        refused = _refused(error, order)
        return _cached_because(order, f"the hub at {_hub()} says no ({_brief(error)})", refused)
    except (HFValidationError, UnicodeError) as error:
        raise _Failed(
            f"is no hub name ({_brief(error)})", "Name one such as Qwen/Qwen3-0.6B, or a directory"
        ) from error
    except Exception as error:  # noqa: BLE001  whichever HTTP library is below raises errors of its own
        return _cached_because(order, _why_away(error))
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    if lacking := lacking_kinds(sizes):
        raise _Failed(
            f"names a repository of {_hub()} that is no model we can read: at its top there is no {', '.join(lacking)}",
            "Choose a repository with safetensors and a fast tokenizer, or convert it with save_pretrained"
            " and set model.path to the directory",
        )
    return _download(order, str(info.sha), {name: sizes[name] for name in needed_files(sizes)}, reporter)


def _download(order: Order, commit: str, sizes: dict[str, int], reporter: _Reporter) -> Report:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    missing = {
        name: size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(order.name, name, revision=commit), str)
    }
    _check_room(sum(missing.values()))
    reporter.say(Report("downloading", bytes_total=sum(missing.values()), commit=commit))
    try:
        # the revision as it was asked for, so that the cache learns what it stands for and can answer offline
        directory = Path(
            snapshot_download(
                order.name,
                revision=order.revision,
                allow_patterns=[_literal(name) for name in sizes],
                tqdm_class=_counting_bar(reporter),
            )
        )
    except Exception as error:  # as above; each becomes one sentence with what to do
        raise _download_failed(error, order) from error
    if lacking := lacking_files(directory):
        raise _Failed(
            f"was fetched to {directory}, and lacks {_listed(lacking)}",
            f"Its author has to mend it; {_elsewhere(order)}",
        )
    return Report("done", directory=str(directory), commit=directory.name)


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
    """A name as a pattern that matches nothing else."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _counting_bar(reporter: _Reporter) -> Any:
    """A progress bar that draws nothing and tells the reporter of bytes."""
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


# ------------------------------------------------------------ the cache


class _NotCached(Exception):
    """The cache has no such model, or not all of it; the text says which."""


def _from_cache(order: Order) -> Report:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(
            snapshot_download(
                order.name, revision=order.revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except LocalEntryNotFoundError as error:
        raise _NotCached(f"is not in the cache {HF_HUB_CACHE}") from error
    if lacking := lacking_files(directory):
        raise _NotCached(f"is in the cache without {_listed(lacking)} ({directory})")
    return Report("done", directory=str(directory), commit=directory.name)


def _cached_because(order: Order, why: str, otherwise: _Failed | None = None) -> Report:
    """What the cache has, since the hub did not help. Raises ``otherwise`` if the cache does not either."""
    try:
        return replace(_from_cache(order), note=f"{why}; the cache has it")
    except _NotCached as error:
        fix = f"Start it where the hub can be reached, or {_elsewhere(order)}"
        raise otherwise or _Failed(f"{error}, and {why}", fix) from error


# ------------------------------------------------------------ saying no


def _hub() -> str:
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT


def _elsewhere(order: Order) -> str:
    return f"download it elsewhere (hf download {order.name} --local-dir DIR) and set model.path to DIR"


def _why_away(error: BaseException) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to ask the hub"
    return f"the hub at {_hub()} cannot be reached ({_brief(error)})"


def _refused(error: HfHubHTTPError, order: Order) -> _Failed:
    """What an HTTP status means to whoever wrote the job."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    hub, status, elsewhere = _hub(), error.response.status_code, _elsewhere(order)
    if isinstance(error, GatedRepoError):
        token = "the token that was sent has no access" if get_token() else "no token was sent"
        fix = f"Ask for access on its page, set HF_TOKEN to a token of that account and start again, or {elsewhere}"
        return _Failed(f"is gated on {hub}, and {token}", fix)
    if status == 401 and "Invalid credentials" in str(error):
        return _Failed(f"was asked for at {hub}, which does not accept the token", "Renew HF_TOKEN, or unset it")
    if status == 401 or isinstance(error, RepositoryNotFoundError):  # a hub does not tell strangers which of the two
        token = "with the token that was sent" if get_token() else "without a token"
        fix = f"Check the name; if it is private set HF_TOKEN; or {elsewhere}"
        return _Failed(f"cannot be seen on {hub} {token}: it does not exist, or is private", fix)
    if isinstance(error, RevisionNotFoundError):
        wrong = f"{order.revision!r} is no branch, tag or commit of {order.name} on {hub}"
        return _Failed(wrong, "Use one that its page lists, or remove model.revision", "model.revision")
    return _Failed(f"was asked for at {hub}, which answered {status} ({_brief(error)})", f"Try later, or {elsewhere}")


def _download_failed(error: Exception, order: Order) -> _Failed:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        return _refused(error, order)
    return _Failed(
        f"could not be fetched from {_hub()} as a whole ({_brief(error)})",
        f"Start again: what has been fetched is kept; or {_elsewhere(order)}",
    )


def _brief(error: BaseException) -> str:
    """An error's type and first line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}" if lines else type(error).__name__


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(os.EX_OK if fetch(Order(**json.load(sys.stdin))).stage == "done" else 1)
