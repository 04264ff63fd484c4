"""Reads what a run's files say, for ``headrace runs``, and for ``headrace ctl`` once the head is gone.

job.yaml ─▶ name, model, steps       metrics.jsonl ─▶ steps, rewards, seconds       events.jsonl ─▶ state, error
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml

from actors.host.plain_file import json_object, read_plain
from actors.jobs.summary import Row, Summary, read_rows
from configs.limits import DEFAULT_LIMITS
from configs.run_files import CHECKPOINTS, EVENTS, JOB_FILE, JOBS_FILE, JOURNAL, LOGS, METRICS
from configs.yaml_source import FILE_BYTES_MAX, parse_value
from supervisors.checkers.history import RunState
from supervisors.checkers.run_directory import is_open, run_state
from supervisors.machine.processes.file_end import whole_lines

_READ_BYTES: Final = DEFAULT_LIMITS.control_read_bytes
_EVENTS_READ: Final = 2000
"""Lines at the end of events.jsonl in which the job's newest state is looked for."""

Plain = dict[str, Any]


class RunFiles:
    """Reads the files of one run, also while the run goes on, and changes none of them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def title(self) -> str:
        """Name of the run's directory; if its command ran several jobs, after the name of their common directory."""
        several = (self.run_dir.parent / JOBS_FILE).is_file()
        return f"{self.run_dir.parent.name}/{self.run_dir.name}" if several else self.run_dir.name

    @property
    def is_run(self) -> bool:
        return (self.run_dir / JOB_FILE).is_file()

    @property
    def goes_on(self) -> bool:
        """Whether a process of this machine has the journal open."""
        return is_open(self.run_dir / JOURNAL)

    @property
    def name(self) -> str:
        """Name of the run's job."""
        return str(self._job().get("name", ""))

    @property
    def steps(self) -> int | None:
        """Number of steps that the job file asks for."""
        steps = self._job().get("steps")
        return steps if isinstance(steps, int) else None

    def state(self, *, alive: bool) -> RunState:
        """State that the job recorded last; if that is no final one, ``alive`` says whether the run has a process."""
        return run_state(self._events(), alive=alive)

    def summary(self) -> Plain:
        """What ``headrace run --json`` printed at the end, as far as the files tell."""
        summary, rows = Summary(), self._rows()
        for row in rows:
            summary.add(row)
        (job,) = self.jobs()
        known = summary.result()
        stored = sorted((self.run_dir / CHECKPOINTS).glob("step_*"))
        known |= {"checkpoint": str(stored[-1]) if stored else None, "state": job["state"]}
        return {"job": job["job"]} | known | ({"error": job["error"]} if job["error"] else {})

    def facts(self) -> Plain:
        """A row for ``headrace runs``."""
        job, rows = self._job(), self._rows()
        summary = Summary()
        for row in rows:
            summary.add(row)
        began_s = _written_s(self.run_dir / JOB_FILE)
        return {
            "run": self.title,
            "state": str(self._state()),
            "steps": f"{summary.steps}/{job.get('steps', '?')}",
            "reward_first": summary.reward_first,
            "reward_last": summary.reward_last,
            "seconds": round(summary.seconds, 1),
            "model": model_name(_section(job, "model")),
            "mode": str(_section(job, "sync").get("mode", "sync")),
            "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(began_s)),
        }

    def _state(self) -> RunState:
        """State of the run; processes are searched only if it has not recorded its end."""
        events = self._events()
        state = run_state(events, alive=False)
        return run_state(events, alive=self.goes_on) if state is RunState.CRASHED else state

    # ------------------------------------------------------------ verbs of ctl

    def jobs(self) -> list[Plain]:
        """Answer to the verb ``jobs``, as the head would have given it: the one job of the run."""
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
        lines = whole_lines(self.run_dir / METRICS, last, _READ_BYTES)
        return [row for line in lines if (row := json_object(line)) is not None]

    def logs(self, actor: str | None, lines: int) -> list[str]:
        """The last lines of the actor's log, or of all logs if no actor is named.

        Raises:
            FileNotFoundError: there is no such log.
        """
        directory = self.run_dir / LOGS
        names = sorted(file.stem for file in directory.glob("*.log"))
        if actor is not None and actor not in names:
            raise FileNotFoundError(f"there is no log of {actor!r} in {directory}; there are: {', '.join(names)}")
        wanted = [actor] if actor is not None else names
        return [line for name in wanted for line in whole_lines(directory / f"{name}.log", lines, _READ_BYTES)][-lines:]

    def answer(self, op: str, args: Mapping[str, Any]) -> Any:
        """The answer to a verb of ctl that a run's files can give.

        Raises:
            KeyError: the files cannot answer it.
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
            found = parse_value(read_plain(self.run_dir / JOB_FILE, FILE_BYTES_MAX).decode())
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return cast("Plain", found) if isinstance(found, dict) else {}

    def _rows(self) -> list[Row]:
        try:
            return read_rows(self.run_dir / METRICS)
        except (OSError, ValueError):
            return []

    def _events(self) -> list[Plain]:
        try:
            lines = whole_lines(self.run_dir / EVENTS, _EVENTS_READ, _READ_BYTES)
        except (OSError, ValueError):
            return []
        return [event for line in lines if (event := json_object(line)) is not None]  # others a crash has torn


def model_name(model: Mapping[str, Any]) -> str:
    """Short name of the model in a job file's section ``model``: the last part of its path, or ``tiny``."""
    if model.get("source") == "tiny" or not model.get("path"):
        return str(model.get("source", ""))
    return Path(str(model["path"])).name


def _written_s(file: Path) -> float:
    """When ``file`` was written last; 0 if it has gone meanwhile."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


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
    files = [file for file in files if file.is_file()]
    files.sort(key=_written_s, reverse=True)
    return [RunFiles(file.parent) for file in files]


def runs_of_command(directory: Path | None, root: Path) -> list[RunFiles]:
    """The runs of one command, which may have run several jobs: of ``directory``, else the newest below ``root``."""
    if directory is None:
        newest = runs_in(root)[:1]
        several = newest and (newest[0].run_dir.parent / JOBS_FILE).is_file()
        return runs_in(newest[0].run_dir.parent) if several else newest
    return runs_in(directory) if (directory / JOBS_FILE).is_file() else [RunFiles(directory)]
