"""What a run's files say once nobody can be asked: for ``headrace runs``, and for ``headrace ctl`` after the end.

job.yaml ─▶ name, model, steps       metrics.jsonl ─▶ steps, rewards, seconds       events.jsonl ─▶ state, error
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml

from actors.jobs.summary import Row, Summary, read_rows
from configs.limits import DEFAULT_LIMITS
from supervisors.checkers.history import RunState
from supervisors.checkers.run_directory import JOB_FILE, JOURNAL, is_open, run_state
from supervisors.cli.command import JOBS_FILE
from supervisors.machine.file_end import whole_lines

_READ_BYTES: Final = DEFAULT_LIMITS.control_read_bytes
_EVENTS_READ: Final = 2000
"""Lines at the end of events.jsonl among which the last word on the job's state is looked for."""

Plain = dict[str, Any]


class RunFiles:
    """The files of one run. Nothing is changed in them, and a run that goes on may be read."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def name(self) -> str:
        """Name of its directory; of one of several jobs also that of the command's."""
        several = (self.run_dir.parent / JOBS_FILE).is_file()
        return f"{self.run_dir.parent.name}/{self.run_dir.name}" if several else self.run_dir.name

    @property
    def is_run(self) -> bool:
        return (self.run_dir / JOB_FILE).is_file()

    @property
    def goes_on(self) -> bool:
        """Whether a process of this machine has the journal open."""
        return is_open(self.run_dir / JOURNAL)

    def facts(self) -> Plain:
        """A row for ``headrace runs``."""
        job, rows = self._job(), self._rows()
        summary = Summary()
        for row in rows:
            summary.add(row)
        began_s = (self.run_dir / JOB_FILE).stat().st_mtime
        return {
            "run": self.name,
            "state": str(self._state()),
            "steps": f"{summary.steps}/{job.get('steps', '?')}",
            "reward_first": summary.reward_first,
            "reward_last": summary.reward_last,
            "seconds": round(sum(float(row.get("seconds") or 0.0) for row in rows), 1),
            "model": model_name(_section(job, "model")),
            "mode": str(_section(job, "sync").get("mode", "sync")),
            "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(began_s)),
        }

    def _state(self) -> RunState:
        """Processes are looked through only for a run that has not said that it is over."""
        events = self._events()
        state = run_state(events, alive=False)
        return run_state(events, alive=self.goes_on) if state is RunState.CRASHED else state

    # ------------------------------------------------------------ verbs of ctl

    def jobs(self) -> list[Plain]:
        """As the head would have answered: the one job of the run."""
        job, facts = self._job(), self.facts()
        said = [event for event in self._events() if event.get("event") == "job_state"]
        return [
            {
                "job": str(job.get("name", "")),
                "state": facts["state"],
                "step": int(facts["steps"].partition("/")[0]),
                "steps": job.get("steps"),
                "run_dir": str(self.run_dir),
                "workers": 0,
                "reward_last": facts["reward_last"],
                "error": str(said[-1].get("reason", "")) if said and facts["state"] == "failed" else "",
            }
        ]

    def metrics(self, last: int) -> list[Plain]:
        return [json.loads(line) for line in whole_lines(self.run_dir / "metrics.jsonl", last, _READ_BYTES)]

    def logs(self, actor: str | None, lines: int) -> list[str]:
        """The last lines of the actor's log, of all if none is named.

        Raises:
            FileNotFoundError: there is no such log.
        """
        directory = self.run_dir / "logs"
        names = sorted(file.stem for file in directory.glob("*.log"))
        if actor is not None and actor not in names:
            raise FileNotFoundError(f"there is no log of {actor!r} in {directory}; there are: {', '.join(names)}")
        wanted = [actor] if actor is not None else names
        return [line for name in wanted for line in whole_lines(directory / f"{name}.log", lines, _READ_BYTES)][-lines:]

    @property
    def job_name(self) -> str:
        return str(self._job().get("name", ""))

    def answer(self, op: str, args: Mapping[str, Any]) -> Any:
        """The answer to a verb of ctl that a run's files can give.

        Raises:
            KeyError: they cannot.
        """
        verbs: dict[str, Callable[[], Any]] = {
            "jobs": self.jobs,
            "metrics": lambda: self.metrics(int(args.get("last", 1))),
            "logs": lambda: self.logs(args.get("actor"), int(args.get("lines", 100))),
        }
        return verbs[op]()

    # ------------------------------------------------------------ reading

    def _job(self) -> Plain:
        """The job file as it stands; empty where it cannot be read: a list of runs is not to fail for one."""
        try:
            found = yaml.safe_load((self.run_dir / JOB_FILE).read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return cast("Plain", found) if isinstance(found, dict) else {}

    def _rows(self) -> list[Row]:
        try:
            return read_rows(self.run_dir / "metrics.jsonl")
        except (OSError, ValueError):
            return []

    def _events(self) -> list[Plain]:
        found: list[Plain] = []
        for line in whole_lines(self.run_dir / "events.jsonl", _EVENTS_READ, _READ_BYTES):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # torn by a crash
        return found


def model_name(model: Mapping[str, Any]) -> str:
    """What people call the model of that section of a job file: the last part of its path, or ``tiny``."""
    if model.get("source") == "tiny" or not model.get("path"):
        return str(model.get("source", ""))
    return Path(str(model["path"])).name


def _section(job: Plain, name: str) -> Plain:
    section = job.get(name)
    return cast("Plain", section) if isinstance(section, dict) else {}


def runs_in(root: Path) -> list[RunFiles]:
    """The runs below ``root``, the newest first; ``root`` itself if it is one."""
    if RunFiles(root).is_run:
        return [RunFiles(root)]
    files = list(root.glob(f"*/{JOB_FILE}"))
    for several in root.glob(f"*/{JOBS_FILE}"):
        files += several.parent.glob(f"*/{JOB_FILE}")
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [RunFiles(file.parent) for file in files]


def runs_of_command(directory: Path | None, root: Path) -> list[RunFiles]:
    """The runs of one command, which may have run several jobs: of ``directory``, else the newest below ``root``."""
    if directory is None:
        newest = runs_in(root)[:1]
        several = newest and (newest[0].run_dir.parent / JOBS_FILE).is_file()
        return runs_in(newest[0].run_dir.parent) if several else newest
    return runs_in(directory) if (directory / JOBS_FILE).is_file() else [RunFiles(directory)]
