"""Runs real jobs as child processes, for tests that observe them, inject faults, and check Headrace's promises.

    run = HeadraceRun(run_dir, "job.yaml", settings=["steps=30"], faults=[{"kind": "kill", "target": {…}}])
    run.wait_for_step(5)
    run.inject("hang", "rollout-0")
    summary = run.finish()          # waits; the job must have finished, and no checker may find a violation

``HeadraceJobs`` is the same for several jobs under one command, ``HeadraceCluster`` for ``headrace head``, to which
jobs are submitted. ``pytest_plugin.py`` makes a fixture of each. They use Headrace as a user would, through the
command line, the control socket and files.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from actors.control.client import ControlClient
from actors.control.errors import ControlError, TimedOut, Unreachable
from actors.control.socket import read_endpoint
from configs.fault_plan import dump_fault, fault_from_mapping
from configs.limits import DEFAULT_LIMITS
from configs.loader import load_job
from configs.run_files import EVENTS, METRICS
from supervisors.checkers.checks import Report, check
from supervisors.checkers.run_directory import read_history

T = TypeVar("T")
_ROOT: Final = Path(__file__).resolve().parents[2]
_POLL_S: Final = 0.05
_TAIL: Final = 25
"""Number of last lines of output that the message of a failed wait shows."""
_STEP: Final = re.compile(r"(\S+: )?step \d+ \(\d+ of \d+\) ")
"""A line that tells of one step; a run has hundreds of them."""
_NOT_THERE: Final = (Unreachable, TimedOut, OSError)
"""Exceptions of a control-socket request while the head is started or restarted."""
_EXIT_CODES: Final = {"finished": 0, "failed": 1, "interrupted": 130}


class RunRecord:
    """Reads the files that a run, going on or over, has written to ``run_dir``."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one for each committed step."""
        return _lines(self.run_dir / METRICS)

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The lines of events.jsonl, of one name or all."""
        return [row for row in _lines(self.run_dir / EVENTS) if name in ("", row["event"])]

    def report(self, *, must_finish: bool = False) -> Report:
        """The checkers' report on the run so far; see ``headrace doctor --run``."""
        return check(read_history(self.run_dir), must_finish=must_finish)


class _UnderTest(RunRecord):
    """Runs the process of a ``headrace`` command and nodes beside it, and reads the record of the run in ``run_dir``.

    ``directory``: the command's, which holds the file with its control endpoint; its output lies beside it.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, directory: Path, through: Sequence[str] = ()) -> None:
        super().__init__(directory)
        self.directory = directory
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._through = list(through)
        self._said, self._errors = (directory.with_name(f"{directory.name}.{kind}") for kind in ("out", "err"))
        directory.parent.mkdir(parents=True, exist_ok=True)

    def _launch(
        self, said: Path, errors: Path, *arguments: str, through: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])
        with said.open("w") as out, errors.open("a") as err:
            return subprocess.Popen(
                [*through, sys.executable, "-P", "-m", "main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": path},
            )

    def _file(self, kind: str, content: str | Path | Mapping[str, Any]) -> Path:
        if not isinstance(content, Mapping):
            return Path(content)
        path = self.directory.with_name(f"{self.directory.name}.{kind}.yaml")
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
        return path

    def _plan(self, faults: str | Path | Sequence[Mapping[str, Any]] | None, seed: int) -> list[str]:
        if faults is None:
            return []
        plan = faults if isinstance(faults, str | Path) else {"seed": seed, "faults": [dict(f) for f in faults]}
        return ["--faults", str(self._file("faults", plan))]

    def _run(self, words: Sequence[str], settings: Sequence[str]) -> None:
        given = (word for setting in settings for word in ("--set", setting))
        self.process = self._launch(self._said, self._errors, "run", *words, *given, "--json", through=self._through)

    def _ended(self, timeout_s: float) -> tuple[int, Any]:
        """Wait for the end, and return the exit code of ``headrace run --json`` and the JSON that it printed last."""
        try:
            code = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run is not over after {timeout_s:g} s\n{self.last_words()}") from None
        lines = [line for line in self._said.read_text().splitlines() if line.startswith(("{", "["))]
        return code, json.loads(lines[-1]) if lines else None

    def add_node(
        self, name: str, join: str, *arguments: str, slots: int = 1, through: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start ``headrace node``, which joins ``join`` and ends with the run. ``through``: as for HeadraceRun."""
        log = self.directory.with_name(f"{name}.log")
        words = ("node", "--join", join, "--name", name, "--slots", str(slots), *arguments)
        self.nodes[name] = self._launch(log, log, *words, through=through)
        return self.nodes[name]

    # ------------------------------------------------------------ looking

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def call(
        self, op: str, args: Mapping[str, Any] | None = None, *, timeout_s: float = DEFAULT_LIMITS.control_timeout_s
    ) -> Any:
        """Send one request over the control socket; docs/control_protocol.md lists them.

        Raises:
            ControlError (actors.control.errors): the run refused.
        """

        async def ask() -> Any:
            async with ControlClient(read_endpoint(str(self.directory))) as client:
                return await client.call(op, dict(args or {}), timeout_s=timeout_s)

        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the test may be a coroutine, with a loop of its own
            patience_s = timeout_s + DEFAULT_LIMITS.connect_timeout_s
            return thread.submit(asyncio.run, ask()).result(timeout=patience_s)

    def processes(self) -> dict[str, int]:
        """Process ids by name: ``head``, and the actors that run in processes of their own."""
        rows = [row for row in self.call("tree") if row["state"] == "running"]
        head = next((row["pid"] for row in rows if row["name"] == "head"), self.process.pid)
        return {row["name"]: row["pid"] for row in rows if row["name"] == "head" or row["pid"] not in (0, head)}

    def workers(self) -> dict[str, str]:
        """The rollout workers that run, each with its node."""
        rows = self.call("tree")
        return {row["name"]: row["node"] for row in rows if row["role"] == "rollout" and row["state"] == "running"}

    # ------------------------------------------------------------ waiting

    def wait_until(
        self, what: str, probe: Callable[[], T | None], *, timeout_s: float = DEFAULT_LIMITS.run_patience_s
    ) -> T:
        """Poll until ``probe`` returns something true; ``probe`` may query a head that is down just now.

        Raises:
            AssertionError: the run ended first, or it took too long; with the run's last output.
        """

        def look() -> T | None:
            over = self.over
            found = _tried(probe)
            assert found or not over, f"the run ended before {what}\n{self.last_words()}"
            return found

        return self.settle(what, look, timeout_s=timeout_s)

    def settle(
        self, what: str, probe: Callable[[], T | None], *, timeout_s: float = DEFAULT_LIMITS.control_timeout_s
    ) -> T:
        """Poll as ``wait_until`` does, but on a run that may be over."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if found := _tried(probe):
                return found
            time.sleep(_POLL_S)
        raise AssertionError(f"no {what} within {timeout_s:g} s\n{self.last_words()}")

    def wait_for_step(self, step: int, *, timeout_s: float = DEFAULT_LIMITS.run_patience_s) -> None:
        """Wait until step ``step``, counted from 0, is committed."""
        self.wait_until(f"step {step}", lambda: any(row["step"] >= step for row in self.rows()), timeout_s=timeout_s)

    def wait_for_event(
        self, name: str, *, timeout_s: float = DEFAULT_LIMITS.run_patience_s, **fields: Any
    ) -> dict[str, Any]:
        """Wait until an event of that name with those fields is recorded, and return it."""

        def look() -> dict[str, Any] | None:
            fitting = (row for row in self.events(name) if all(row.get(key) == value for key, value in fields.items()))
            return next(fitting, None)

        return self.wait_until(f"event {name} {fields}", look, timeout_s=timeout_s)

    def last_words(self) -> str:
        """The last lines of the run's output and events, of each job's steps the newest; and its processes now."""
        said = [line for file in (self._errors, self._said) if file.exists() for line in file.read_text().splitlines()]
        newest = {line.partition("step ")[0]: number for number, line in enumerate(said) if _STEP.match(line)}
        told = [line for number, line in enumerate(said) if not _STEP.match(line) or number in newest.values()]
        events = [json.dumps(row) for row in self.events()]
        return "\n".join([*told[-_TAIL:], *events[-_TAIL:], *self._processes_now()])

    def _processes_now(self) -> list[str]:
        """What ``ctl tree`` says, if the run goes on and answers."""
        with contextlib.suppress(ControlError, OSError, ValueError):  # ValueError: its socket wants keys
            return [] if self.over else [json.dumps(row) for row in self.call("tree")]
        return []

    # ------------------------------------------------------------ injecting faults

    def inject(
        self, kind: str, target: str | Mapping[str, Any] | None = None, *, lasts_s: float | None = None, **keys: Any
    ) -> list[str]:
        """Inject one fault now; returns what was hit.

        Args:
            kind: kill, hang, slow, … as in docs/guides/fault_injection.md.
            target: a process's name, or a target as a plain map: ``{"link": ["head", "rollout-0"]}``.
            lasts_s: the fault's ``heal_after_s``.
            keys: further keys of the fault, such as ``factor=8``.

        Raises:
            ConfigError: the fault is malformed.
            ControlError (actors.control.errors): the fault is not possible in this run; the message says why.
        """
        fault: dict[str, Any] = {"kind": kind, **keys}
        if target is not None:
            fault["target"] = {"name": target} if isinstance(target, str) else dict(target)
        if lasts_s is not None:
            fault["heal_after_s"] = lasts_s
        patience_s = DEFAULT_LIMITS.control_timeout_s + DEFAULT_LIMITS.fault_target_wait_s
        answer = self.call("inject", {"fault": dump_fault(fault_from_mapping(fault))}, timeout_s=patience_s)
        return list(answer["hit"])

    def interrupt(self) -> None:
        """Interrupt the run as Ctrl-C does: it takes a checkpoint and ends."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the command's process, with which all its processes on the same machine end."""
        _kill(self.process)

    def close(self) -> None:
        """Kill the command and its nodes."""
        for process in (*self.nodes.values(), self.process):
            _kill(process)


class HeadraceRun(_UnderTest):
    """Runs ``headrace run`` in ``run_dir``.

    Args:
        job: a job file, or a job as a plain map.
        settings: as after ``--set``: ``["steps=30"]``.
        faults: a plan, as the path of a YAML file or as a list of faults, each a plain map.
        arguments: further arguments of the command.
        through: words before the command that run it elsewhere, such as ``ip netns exec far``.
    """

    def __init__(
        self,
        run_dir: Path,
        job: str | Path | Mapping[str, Any],
        *,
        settings: Sequence[str] = (),
        faults: str | Path | Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        arguments: Sequence[str] = (),
        through: Sequence[str] = (),
    ) -> None:
        super().__init__(run_dir, through)
        self._run([str(self._file("job", job)), "--dir", str(run_dir), *arguments, *self._plan(faults, seed)], settings)

    def resume(self, *, settings: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
        """Start ``headrace run --resume`` in the same run directory, once this run is over."""
        assert self.over, "a run that goes on cannot be resumed: finish or kill it first"
        self._run(["--resume", str(self.run_dir), *arguments], settings)

    def finish(
        self, *, state: str = "finished", timeout_s: float = DEFAULT_LIMITS.run_finish_s, clean: bool = True
    ) -> dict[str, Any]:
        """Wait for the end and return the summary of ``headrace run --json``.

        With ``clean``, raises AssertionError unless the job ended as ``state`` says and no checker finds a violation.
        """
        code, said = self._ended(timeout_s)
        assert said or not clean, f"the run ended with {code} and without a summary\n{self.last_words()}"
        summary: dict[str, Any] = said or {}
        if clean:
            ended = f"exit code {code}: {summary}\n{self.last_words()}"
            assert (code, summary["state"]) == (_EXIT_CODES[state], state), ended
            report = self.report(must_finish=state == "finished")
            assert report.clean, "\n".join(violation.what for violation in report.violations)
        return summary


class HeadraceJobs(_UnderTest):
    """Runs ``headrace run`` with several jobs in ``directory``; ``jobs`` maps each job's name to its record.

    Args:
        jobs: job files, or jobs as plain maps.
        services: a services file, or a plain map.
        settings: as after ``--set``, for every job.
        faults: as for HeadraceRun; targets name their job.
        arguments: further arguments of the command.
    """

    def __init__(
        self,
        directory: Path,
        jobs: Sequence[str | Path | Mapping[str, Any]],
        *,
        services: str | Path | Mapping[str, Any] | None = None,
        settings: Sequence[str] = (),
        faults: str | Path | Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(directory)
        files = [self._file(f"job-{number}", job) for number, job in enumerate(jobs)]
        shared = ["--services", str(self._file("services", services))] if services is not None else []
        self.jobs = {name: RunRecord(directory / name) for name in (load_job(file).name for file in files)}
        words = [*map(str, files), "--dir", str(directory), *shared, *arguments, *self._plan(faults, seed)]
        self._run(words, settings)

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The lines of events.jsonl of all jobs, of one name or all, in the order of time."""
        found = (row for job in self.jobs.values() for row in job.events(name))
        return sorted(found, key=lambda row: row["time_s"])

    def pid_of(self, name: str, job: str | None = None) -> int | None:
        """Pid of the process ``name``: of a job, a service or the head; None while it is being started."""
        rows = self.call("tree", {"job": job} if job is not None else {})
        return next((row["pid"] for row in rows if row["name"] == name and row["state"] == "running"), None)

    def finish(self, *, timeout_s: float = DEFAULT_LIMITS.run_finish_s) -> dict[str, dict[str, Any]]:
        """Wait for the end and return each job's summary; all must finish, and no checker may find a violation."""
        code, said = self._ended(timeout_s)
        states = {summary["job"]: summary["state"] for summary in said or ()}
        assert states == dict.fromkeys(self.jobs, "finished"), f"exit code {code}: {states}\n{self.last_words()}"
        for name, job in self.jobs.items():
            found = [violation.what for violation in job.report(must_finish=True).violations]
            assert not found, "\n".join([name, *found])
        return {summary["job"]: summary for summary in said}


class HeadraceCluster(_UnderTest):
    """Runs ``headrace head`` in ``directory``; ``run_dir`` is that of the job submitted last.

    Args:
        listen: endpoint that nodes join: ``tcp://127.0.0.1:7000``.
        arguments, through: as for HeadraceRun.
    """

    def __init__(
        self, directory: Path, listen: str, *, arguments: Sequence[str] = (), through: Sequence[str] = ()
    ) -> None:
        super().__init__(directory, through)
        self._listen = listen
        words = ("head", "--listen", listen, "--dir", str(directory), *arguments)
        self.process = self._launch(self._said, self._errors, *words, through=self._through)

    def join(self, *names: str) -> None:
        """Add nodes of one slot each."""
        for name in names:
            self.add_node(name, self._listen)

    def submit(self, job: Mapping[str, Any]) -> None:
        """Submit ``job`` as soon as the head is ready, and follow it."""
        self.wait_until("head", lambda: self.call("jobs") == [])
        self.run_dir = Path(self.call("submit", {"job": dict(job)})["run_dir"])


def _tried(probe: Callable[[], T | None]) -> T | None:
    try:
        return probe()
    except _NOT_THERE:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # does nothing if it has ended
    process.wait(timeout=DEFAULT_LIMITS.kill_timeout_s)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSON Lines file; the last may be half-written."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
