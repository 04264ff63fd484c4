"""Joins what is known of a run into the sections of the page, and tells each page what has changed.

    RunFiles (a directory), LiveRun (a control socket) ─▶ Feed ─ section, data ─▶ Page (a bounded queue) ─▶ browser

Sections: ``head``, ``rows``, ``evaluations``, ``lanes``, ``workers``, ``devices``, ``samples``, ``stalls``, ``events``.
All but ``rows`` are sent whole; ``rows`` says with ``reset`` whether it replaces what the page has.

Invariants
- A page that opens gets every section, then only what changes.
- A page that is more than ``console_queue_updates`` behind is disconnected; it connects again and gets every section.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from configs.limits import Limits
from supervisors.cli.console.live_run import LiveRun
from supervisors.cli.console.page_data import COLUMNS, Plain, lanes, progress, step_values
from supervisors.cli.console.run_files import OVER, RunFiles

Update = tuple[str, Any]
_PARTS: Final = {
    "rows": ("rows", "head"),
    "spans": ("lanes", "workers"),
    "events": ("events", "workers", "head", "stalls"),
    "samples": ("samples",),
    "evaluations": ("evaluations",),
    "live": ("head", "workers", "devices", "stalls", "events"),
}
"""What has changed → sections that show it."""


class Page:
    """One open page: the updates that wait for it, and whether it is too far behind."""

    def __init__(self, updates_max: int) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue(updates_max)
        self.behind = False

    def offer(self, update: Update) -> None:
        if self.updates.full():
            self.behind = True
        else:
            self.updates.put_nowait(update)


class Feed:
    """Shows a run by its files, its control socket, or both. Files say more and take precedence."""

    def __init__(self, files: RunFiles | None, limits: Limits) -> None:
        self.files = files
        self.live: LiveRun | None = None
        self._limits = limits
        self._pages: set[Page] = set()
        self._shown: dict[str, Any] = {}
        if files is not None:
            files.look()
        self._renew(_PARTS)

    @property
    def pages(self) -> int:
        return len(self._pages)

    def snapshot(self) -> dict[str, Any]:
        """Every section as it stands, with all rows."""
        return {**self._shown, "rows": self._rows(reset=True)}

    @contextmanager
    def open_page(self) -> Iterator[Page]:
        """Tell a page of every change from now on."""
        page = Page(self._limits.console_queue_updates)
        self._pages.add(page)
        try:
            yield page
        finally:
            self._pages.discard(page)

    def samples_of(self, step: int) -> list[Plain]:
        """Samples kept of a step, perhaps none."""
        return self.files.samples.get(step, []) if self.files is not None else []

    async def run(self) -> None:
        """Look at the files again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.console_look_s)
            self._look()

    def changed(self, *parts: str) -> None:
        """Renew the sections that show ``parts``, and tell pages of those that are different now."""
        self._renew(parts)

    def heard(self, part: str) -> None:
        """Take in news from the socket. Rows of steps come from the files alone, if there are files."""
        if part == "rows" and self.files is not None:
            self._look()
        else:
            self.changed(part)

    def _look(self) -> None:
        if self.files is not None and (changed := self.files.look()):
            self.changed(*changed)

    def _renew(self, parts: Any) -> None:
        for section in dict.fromkeys(section for part in parts for section in _PARTS[part]):
            if section == "rows":
                self._tell("rows", self._rows(reset=False))
                continue
            data = getattr(self, f"_{section}")()
            if data != self._shown.get(section):
                self._shown[section] = data
                self._tell(section, data)

    def _tell(self, section: str, data: Any) -> None:
        for page in self._pages:
            page.offer((section, data))

    # ------------------------------------------------------------ sections

    def _values(self) -> list[list[float | None]]:
        if self.files is not None:
            return self.files.values
        return [step_values(row) for row in self.live.rows] if self.live is not None else []

    def _rows(self, *, reset: bool) -> Plain:
        values, columns = self._values(), list(self.files.columns if self.files is not None else COLUMNS)
        if not reset and self.files is not None and not self.files.anew:
            return {"reset": False, "columns": columns, "rows": values[len(values) - self.files.new_values :]}
        return {"reset": True, "columns": columns, "rows": values}

    def _head(self) -> Plain:
        files, live = self.files, self.live
        settings = files.settings if files is not None else {}
        status = live.status if live is not None else {}
        alive = live is not None and live.reachable
        state = (str(status.get("state", "")) if alive else "") or (files.state if files is not None else "")
        steps = settings.get("steps") or status.get("steps")
        feed = "live" if alive else "over" if state in OVER else "lost" if live is not None else "files"
        return {
            **progress(self._values(), _whole(steps)),
            "staleness_bound": _staleness_bound(settings),
            "job": settings.get("name") or status.get("job") or (live.job if live is not None else None),
            "settings": settings,
            "run_dir": str(files.run_dir) if files is not None else status.get("run_dir"),
            "state": state,
            "reason": str(status.get("error") or "") or (files.reason if files is not None else ""),
            "feed": feed,
            "feed_why": live.why if live is not None else "it has no control endpoint",
            "waiting_for": live.waiting_for if alive and live is not None else "",
            "workers_wanted": status.get("workers"),
            "files": files is not None,
            "alive_s": self._limits.console_alive_s,
        }

    def _lanes(self) -> Plain:
        if self.files is None:
            return lanes([], lambda _worker, _second: None, 1, 1)
        limits, workers = self._limits, self.files.workers
        return lanes(list(self.files.spans), workers.version_at, limits.console_lane_steps, limits.console_bars)

    def _workers(self) -> list[Plain]:
        tree = self.live.tree if self.live is not None else []
        if self.files is not None:
            return self.files.workers.table(list(self.files.spans), tree)
        return [
            {key: row.get(key) for key in ("name", "state", "pid", "node", "restarts")}
            for row in tree
            if row.get("role") == "rollout"
        ]

    def _devices(self) -> list[Plain]:
        """One row per device of all machines; none while the running system does not answer."""
        return [
            {"node": node["node"], "device": device, "processes": processes}
            for node in (self.live.nodes if self.live is not None else ())
            for device, processes in node["given"].items()
        ]

    def _evaluations(self) -> Plain:
        return {"rows": [row for _, row in sorted(self.files.evaluations.items())] if self.files is not None else []}

    def _samples(self) -> Plain:
        return {"steps": sorted(self.files.samples) if self.files is not None else []}

    def _stalls(self) -> Plain:
        live, files = self.live, self.files
        asked = live.stalls if live is not None else None
        health = sorted(files.health.values(), key=lambda row: str(row["process"])) if files is not None else []
        return {
            "asked": asked is not None,
            "rows": asked or [],
            "health": [row for row in health if row["oldest_wait_s"]],
        }

    def _events(self) -> Plain:
        messages = list(self.live.messages) if self.live is not None else []
        return {"rows": list(self.files.told) if self.files is not None else [], "messages": messages}


def _staleness_bound(settings: Plain) -> int | None:
    """Versions that a sample may be behind; None where the mode has no bound of its own, or is not known."""
    bounds = {"async": _whole(settings.get("sync.max_staleness", 1)), "one_step_barrier": 1}
    return bounds.get(str(settings.get("sync.mode")))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
