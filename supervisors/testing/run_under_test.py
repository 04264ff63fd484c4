"""A real run as a child process, to be looked at from outside, harmed, and held against Headrace's promises.

    run = HeadraceRun(run_dir, "job.yaml", settings=["steps=30"], faults=[{"kind": "kill", "target": {…}}])
    run.wait_for_step(5)
    run.inject("hang", "rollout-0")
    summary = run.finish()          # waits; the job must have finished, and every checker must be content

``pytest_plugin.py`` makes a fixture of it. It talks to the run as anybody would: command line, control socket, files.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from actors.control.client import ControlClient
from actors.control.socket import read_endpoint
from configs.fault_plan import dump_fault, fault_from_mapping
from configs.limits import DEFAULT_LIMITS
from supervisors.checkers.checks import Report, check
from supervisors.checkers.run_directory import read_history

T = TypeVar("T")
_ROOT: Final = Path(__file__).resolve().parents[2]
_POLL_S: Final = 0.05
_TAIL: Final = 25
"""Last lines of what a run said, for the message of a failed wait."""


class HeadraceRun:
    """``headrace run`` in ``run_dir``.

    Args:
        job: a job file, or a job as a plain map.
        settings: as after ``--set``: ``["steps=30"]``.
        faults: a plan, as the path of a YAML file or as a list of faults, each a plain map.
    """

    def __init__(
        self,
        run_dir: Path,
        job: str | Path | Mapping[str, Any],
        *,
        settings: Sequence[str] = (),
        faults: str | Path | Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        self.run_dir = run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._beside = run_dir.parent
        arguments = [str(self._file("job", job)), "--dir", str(run_dir)]
        if faults is not None:
            plan = faults if isinstance(faults, str | Path) else {"seed": seed, "faults": [dict(f) for f in faults]}
            arguments += ["--faults", str(self._file("faults", plan))]
        self._start([*arguments, *(word for setting in settings for word in ("--set", setting))])

    def _file(self, kind: str, content: str | Path | Mapping[str, Any]) -> Path:
        if not isinstance(content, Mapping):
            return Path(content)
        path = self._beside / f"{self.run_dir.name}.{kind}.yaml"
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
        return path

    def _start(self, arguments: Sequence[str]) -> None:
        self._said = self._beside / f"{self.run_dir.name}.out"
        self._errors = self._beside / f"{self.run_dir.name}.err"
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])
        with self._said.open("w") as out, self._errors.open("a") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "main", "run", *arguments, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": path},
            )

    def resume(self, *, settings: Sequence[str] = ()) -> None:
        """``headrace run --resume`` of the same run directory, once this one is over."""
        assert self.process.poll() is not None, "a run that goes on cannot be resumed: finish or kill it first"
        self._start(["--resume", str(self.run_dir), *(word for s in settings for word in ("--set", s))])

    # ------------------------------------------------------------ looking

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one for each committed step."""
        return _lines(self.run_dir / "metrics.jsonl")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The lines of events.jsonl, of one name or all."""
        return [row for row in _lines(self.run_dir / "events.jsonl") if name in ("", row["event"])]

    def report(self, *, must_finish: bool = False) -> Report:
        """What the checkers say of the run so far; see ``headrace doctor --run``."""
        return check(read_history(self.run_dir), must_finish=must_finish)

    def call(
        self, op: str, args: Mapping[str, Any] | None = None, *, timeout_s: float = DEFAULT_LIMITS.control_timeout_s
    ) -> Any:
        """One request over the control socket; docs/control_protocol.md lists them.

        Raises:
            ControlError (actors.control.errors): the run said no.
        """

        async def ask() -> Any:
            async with ControlClient(read_endpoint(str(self.run_dir))) as client:
                return await client.call(op, dict(args or {}), timeout_s=timeout_s)

        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the test may be a coroutine, with a loop of its own
            patience_s = timeout_s + DEFAULT_LIMITS.connect_timeout_s
            return thread.submit(asyncio.run, ask()).result(timeout=patience_s)

    def processes(self) -> dict[str, int]:
        """Process ids by name: ``head``, and the actors that run in processes of their own."""
        rows = self.call("tree")
        head = next((row["pid"] for row in rows if row["name"] == "head"), self.process.pid)
        return {row["name"]: row["pid"] for row in rows if row["name"] == "head" or row["pid"] not in (0, head)}

    # ------------------------------------------------------------ waiting

    def wait_until(
        self, what: str, probe: Callable[[], T | None], *, timeout_s: float = DEFAULT_LIMITS.run_patience_s
    ) -> T:
        """Look again and again until ``probe`` returns something true.

        Raises:
            AssertionError: the run ended first, or it took too long; with the last words of the run.
        """

        def look() -> T | None:
            over = self.over
            found = probe()
            assert found or not over, f"the run ended before {what}\n{self.last_words()}"
            return found

        return self.settle(what, look, timeout_s=timeout_s)

    def settle(
        self, what: str, probe: Callable[[], T | None], *, timeout_s: float = DEFAULT_LIMITS.control_timeout_s
    ) -> T:
        """As ``wait_until``, of a run that may be over."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if found := probe():
                return found
            time.sleep(_POLL_S)
        raise AssertionError(f"no {what} within {timeout_s:g} s\n{self.last_words()}")

    def wait_for_step(self, step: int, *, timeout_s: float = DEFAULT_LIMITS.run_patience_s) -> None:
        """Until step ``step``, counted from 0, is committed."""
        self.wait_until(f"step {step}", lambda: any(row["step"] >= step for row in self.rows()), timeout_s=timeout_s)

    def wait_for_event(
        self, name: str, *, timeout_s: float = DEFAULT_LIMITS.run_patience_s, **fields: Any
    ) -> dict[str, Any]:
        """Until an event of that name with those fields is recorded."""

        def look() -> dict[str, Any] | None:
            fitting = (row for row in self.events(name) if all(row.get(key) == value for key, value in fields.items()))
            return next(fitting, None)

        return self.wait_until(f"event {name} {fields}", look, timeout_s=timeout_s)

    def finish(self, *, timeout_s: float = DEFAULT_LIMITS.run_finish_s, clean: bool = True) -> dict[str, Any]:
        """Wait for the end and return the summary of ``headrace run --json``.

        With ``clean`` the job must have finished, and no checker may find anything: AssertionError otherwise.
        """
        try:
            code = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run is not over after {timeout_s:g} s\n{self.last_words()}") from None
        lines = [line for line in self._said.read_text().splitlines() if line.startswith("{")]
        assert lines or not clean, f"the run ended with {code} and without a summary\n{self.last_words()}"
        summary: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        if clean:
            assert (code, summary["state"]) == (0, "finished"), f"exit code {code}: {summary}\n{self.last_words()}"
            report = self.report(must_finish=True)
            assert report.clean, "\n".join(violation.what for violation in report.violations)
        return summary

    def last_words(self) -> str:
        """What the run last said and recorded."""
        said = [line for file in (self._errors, self._said) if file.exists() for line in file.read_text().splitlines()]
        events = [json.dumps(row) for row in self.events()]
        return "\n".join([*said[-_TAIL:], *events[-_TAIL:]])

    # ------------------------------------------------------------ doing harm

    def inject(
        self, kind: str, target: str | Mapping[str, Any] | None = None, *, lasts_s: float | None = None, **keys: Any
    ) -> list[str]:
        """Commit one fault now; returns what was hit.

        Args:
            kind: kill, hang, slow, … as in docs/guides/fault_injection.md.
            target: a process's name, or a target as a plain map: ``{"link": ["head", "rollout-0"]}``.
            lasts_s: the fault's ``heal_after_s``.
            keys: further keys of the fault, such as ``factor=8``.

        Raises:
            ConfigError: it does not fit the vocabulary.
            ControlError (actors.control.errors): it cannot be done to this run; the message says why.
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
        """Ctrl-C: a checkpoint, then the end."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the process of ``headrace run``, with which every other one of the run ends."""
        self.process.kill()
        self.process.wait(timeout=DEFAULT_LIMITS.kill_timeout_s)

    def close(self) -> None:
        """End whatever still runs."""
        if not self.over:
            self.kill()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may be under way."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
