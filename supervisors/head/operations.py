"""What the control socket can do: the ControlBackend of a running head.

ctl, scripts ──▶ ControlServer ──▶ Operations ──▶ Head, JobRun, the job's actors
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from actors.control.backend import Plain
from actors.control.errors import BadArgs, NotFound, NotNow
from actors.core.context import named_rng
from actors.core.ref import ActorRef
from actors.protocol.jobs import CancelJob, CheckpointJob, CheckpointReport, JobReport, PauseJob, ResumeJob
from configs.errors import ConfigError, Problem
from configs.fault_plan import fault_from_mapping
from configs.loader import dump_job, job_from_mapping
from configs.names import SERVING, SHARED
from configs.run_files import JOB_FILE, LOGS, METRICS
from configs.services import problems_with
from supervisors.head.allowed_functions import check_allowed
from supervisors.head.service_operations import ServiceOperations
from supervisors.head.stall_report import StallReport
from supervisors.head.view import HeadView
from supervisors.jobs.device_needs import device_problems
from supervisors.jobs.job_run import JobRun
from supervisors.jobs.run_record import write_record
from supervisors.jobs.worker_room import Room
from supervisors.machine.membership.nodes import Node
from supervisors.machine.processes.file_end import whole_lines
from supervisors.machine.run_directory import make_run_directory
from supervisors.tree.child_record import ChildInfo
from supervisors.tree.errors import FaultNotPossible

T = TypeVar("T")


class Operations(ServiceOperations):
    """Implements ``actors.control.backend.ControlBackend`` over a head."""

    def __init__(self, head: HeadView) -> None:
        super().__init__(head)
        self._strikes = 0
        self._reading = asyncio.Lock()

    def _run(self, job: str | None) -> JobRun:
        """The run of that name, or the only one.

        Raises:
            NotFound: no such job, or several and none was named.
        """
        jobs = self._head.jobs
        if job is None and len(jobs) == 1:
            return next(iter(jobs.values()))
        if job is None:
            raise NotFound(f"{len(jobs)} jobs are here; name one of {sorted(jobs)}" if jobs else "there is no job")
        if job not in jobs:
            raise NotFound(f"there is no job {job!r}; there are: {sorted(jobs)}")
        return jobs[job]

    async def submit(self, job: Plain) -> Plain:
        check_allowed(job, self._head.allow_functions)
        config = await asyncio.to_thread(job_from_mapping, job, "the submitted job")  # it may ask a hub
        problems = list(problems_with(config, self._head.admission.rules))
        if (kind := config.provider.kind) != "none":  # the machine process knows the jobs of its command only
            wrong = f"{kind}, and a head starts no machines for jobs that are submitted to it"
            problems.append(("provider.kind", wrong, "Use headrace run, or leave provider out and start headrace node"))
        problems += device_problems(config, self._head.nodes.devices_here)
        if problems:
            raise ConfigError([Problem("the submitted job", *found) for found in problems])
        await self._free(config.name)
        try:
            run_dir = make_run_directory(self._head.run_root, config.name)
            (run_dir / JOB_FILE).write_text(dump_job(config), encoding="utf-8")
            write_record(run_dir, config)
            self._head.launch(config, run_dir)
        except OSError as error:
            raise NotNow(f"no run can begin in {self._head.run_root}: {error}", "make room there") from error
        return {"job": config.name, "run_dir": str(run_dir), "state": "starting"}

    async def _free(self, name: str) -> None:
        """Wait until a former job of that name is taken down.

        Raises:
            NotNow: it still runs, or taking it down takes too long.
        """
        self._check_over(name)
        if not await self._head.name_is_free(name):
            raise NotNow(f"the former job named {name!r} is still being taken down", "try again in some seconds")
        self._check_over(name)  # somebody else may have waited for the name, too

    def _check_over(self, name: str) -> None:
        if name == SERVING and self._head.serving is not None:
            raise NotNow(f"{name} is what the processes are called that serve models", "give the job another name")
        running = self._head.jobs.get(name)
        if running is not None and not running.state.over:
            raise NotNow(
                f"a job named {name!r} is {running.state}", "give the new one another name, or cancel that one"
            )

    async def jobs(self) -> list[Plain]:
        return [await self._status(run) for run in list(self._head.jobs.values())]

    async def _status(self, run: JobRun) -> Plain:
        summary = run.summary()
        return {
            "job": run.job.name,
            "state": str(run.state),
            "step": int(summary.get("steps", 0)),
            "steps": run.job.steps,
            "run_dir": str(run.run_dir),
            "workers": run.tree.pool.workers_wanted,
            "reward_last": summary.get("reward_last"),
            "error": str(summary.get("error", "")),
        }

    async def watch(self, job: str | None) -> AsyncGenerator[Plain, None]:
        runs = list(self._head.jobs.values()) if job is None else [self._run(job)]
        queue: asyncio.Queue[Plain] = asyncio.Queue(self._head.limits.control_event_queue)
        unsubscribes: dict[str, Callable[[], None]] = {}

        def begin(run: JobRun) -> None:
            unsubscribes.pop(run.job.name, _nothing)()  # of a former job of that name
            unsubscribes[run.job.name] = run.subscribe(_listener(run.job.name, queue))
            _put(queue, {"kind": "state", "job": run.job.name, "state": str(run.state)})

        end_launches = self._head.subscribe(begin) if job is None else _nothing
        try:
            for run in runs:
                begin(run)
            while job is None or not runs[0].state.over or not queue.empty():
                yield await queue.get()  # the server closes the stream when the watcher leaves
        finally:
            end_launches()
            for unsubscribe in unsubscribes.values():
                unsubscribe()

    async def pause(self, job: str | None) -> Plain:
        run = self._running(job)
        return _plain(await self._job(run).ask(PauseJob(job=run.job.name), JobReport))

    async def resume(self, job: str | None) -> Plain:
        run = self._running(job)
        return _plain(await self._job(run).ask(ResumeJob(job=run.job.name), JobReport))

    async def cancel(self, job: str | None) -> Plain:
        if (run := self._run(job)).abandon():
            return {"job": run.job.name, "state": str(run.state), "step": 0, "steps": run.job.steps, "waiting_for": ""}
        run = self._running(job)
        return _plain(await self._job(run).ask(CancelJob(job=run.job.name), JobReport))

    async def checkpoint(self, job: str | None) -> Plain:
        run = self._running(job)
        timeout_s = run.job.limits.checkpoint_timeout_s
        made = await self._job(run).ask(CheckpointJob(job=run.job.name), CheckpointReport, timeout_s=timeout_s)
        return {"job": run.job.name, "step": made.step, "path": made.path}

    def _job(self, run: JobRun) -> ActorRef:
        return self._head.system.ref(run.address("job"))

    def _running(self, job: str | None) -> JobRun:
        """The run of that name, or the only one.

        Raises:
            NotFound, NotNow: there is no such job, or it does not run.
        """
        run = self._run(job)
        if run.state.over or f"job.{run.job.name}" not in self._head.system.actors():
            raise NotNow(f"job {run.job.name!r} is {run.state}", "only a running job can do this")
        return run

    async def inject(self, job: str | None, fault: Plain) -> Plain:
        run = self._running(job)
        try:
            typed = fault_from_mapping(fault)
        except ConfigError as error:
            raise BadArgs(str(error), "docs/guides/fault_injection.md has the vocabulary") from error
        timed = [name for name in ("at_s", "after_step", "times", "every_s") if name in typed.model_fields_set]
        if timed:
            raise BadArgs(
                f"fault.{timed[0]}: inject strikes once and at once", "Leave it out, or run with --faults PLAN"
            )
        nemesis = self._head.nemeses.get(run.job.name)
        if nemesis is None:
            raise NotNow(f"the processes of {run.job.name!r} are not there yet, or not any more", "try again later")
        self._strikes += 1
        rng = named_rng(run.job.seed, "inject", str(self._strikes))
        try:
            hit = await nemesis.strike(typed, rng)
        except FaultNotPossible as error:
            raise NotNow(str(error), "docs/guides/fault_injection.md says what each kind can hit") from error
        return {"job": run.job.name, "kind": typed.kind, "target": str(typed.target), "hit": hit}

    async def scale(self, job: str | None, workers: int) -> Plain:
        run = self._running(job)
        room = Room.of(self._head.nodes.usable_by(run.job.name))
        if workers > run.tree.pool.workers_wanted and (why := room.refusal(run.job, workers)):
            raise BadArgs(why, f"ask for at most {room.most(run.job)}, or start nodes")
        if warning := room.warning(run.job, workers):
            run.say(f"warning: {warning}")
        await run.tree.pool.scale(workers)
        return {"job": run.job.name, "workers": workers}

    async def drain(self, target: str) -> Plain:
        self._check_not_needed(target)
        for run in list(self._head.jobs.values()):  # another may be submitted meanwhile
            if not run.state.over and await run.tree.pool.drain_worker(target):
                return {"target": target, "workers": 1}
        if not self._head.nodes.drain(target):
            raise NotFound(f"there is no rollout worker or node named {target!r}; headrace ctl tree lists them")
        moved = 0
        for run in list(self._head.jobs.values()):
            if not run.state.over:
                moved += await run.tree.pool.drain_node(target)
        return {"target": target, "workers": moved}

    def _check_not_needed(self, target: str) -> None:
        """Raises:
        NotNow: ``target`` is a machine without which a running job could not go on.
        """
        nodes = self._head.nodes.present
        if any(node.local and node.name == target for node in nodes):
            raise NotNow(
                f"{target} is the head's own machine, where trainer, weights and rewards are",
                "Drain its workers by name, or lower their number with scale",
            )
        remote = [run.job.name for run in self._head.jobs.values()
                  if not run.state.over and run.job.cluster.place_rollout == "remote"
                  and self._is_last(target, run.job.name)]  # fmt: skip
        if remote:
            raise NotNow(
                f"{target} is the last machine for the workers of {', '.join(remote)} (cluster.place_rollout: remote)",
                "Start another one with headrace node --join first",
            )

    def _is_last(self, target: str, job: str) -> bool:
        """Whether ``job`` has no machine but ``target`` to place workers on."""
        nodes = self._head.nodes
        left = [node for node in nodes.usable_by(job) if not node.local and not node.draining and node.name != target]
        return nodes.knows(target) and nodes.owner_of(target) in ("", job) and not left

    async def undrain(self, target: str) -> Plain:
        nodes = self._head.nodes
        if not nodes.knows(target):
            if self.undrain_service(target):
                return {"target": target}
            raise NotFound(f"there is no node or service named {target!r}; headrace ctl tree lists them")
        if not nodes.undrain(target):
            raise NotNow(f"{target} has said itself that it goes", "Start it again once it has gone")
        return {"target": target}

    async def tree(self, job: str | None) -> list[Plain]:
        runs = list(self._head.jobs.values()) if job is None else [self._run(job)]
        rows = [_row("head", "head", "head") | {"pid": os.getpid()}]
        rows += [_row("nodes", "nodes", "head"), _row("agent", "node_agent", "head")]
        rows += [
            _row(f"agent@{node.name}", "node_agent", node.name) | ({"state": "draining"} if node.draining else {})
            for node in self._head.nodes.present
            if not node.local
        ]
        for name, children in self._head.services.children() if job is None else ():
            rows += [_row(name, "supervisor", "head"), *(self._child(info, SHARED) for info in children)]
        if self._head.serving is not None and job is None:
            rows += [_row(SERVING, "supervisor", "head")]
            rows += [self._child(info, SERVING) for info in self._head.serving.children()]
        for run in runs:
            for part, supervisor in run.tree.supervisors.items():
                rows.append(_row(f"{part}.{run.job.name}", "supervisor", "head"))
                rows += [self._child(info, run.job.name) for info in supervisor.snapshot()]
        return rows

    def _child(self, info: ChildInfo, owner: str) -> Plain:
        return _child(info, self._head.nodes.devices_of(f"{owner}.{info.name}"))

    async def nodes(self) -> list[Plain]:
        return [_machine(node) for node in self._head.nodes.present]

    async def stalls(self, longer_than_s: float) -> list[Plain]:
        return await StallReport(self._head).stalls(longer_than_s)

    async def dead_letters(self) -> Plain:
        return await StallReport(self._head).dead_letters()

    async def metrics(self, job: str | None, last: int) -> list[Plain]:
        return await self._read(_rows, self._run(job).run_dir / METRICS, last)

    async def logs(self, job: str | None, actor: str | None, lines: int) -> list[str]:
        return await self._read(_log_lines, self._run(job).run_dir / LOGS, actor, lines)

    async def _read(self, read: Callable[..., T], *args: object) -> T:
        """Read files on a thread, for one client at a time, so that the loop that runs the jobs does not wait."""
        async with self._reading:
            return await asyncio.to_thread(read, *args, self._head.limits.control_read_bytes)


def _rows(path: Path, last: int, max_bytes: int) -> list[Plain]:
    return [json.loads(line) for line in whole_lines(path, last, max_bytes)]


def _log_lines(directory: Path, actor: str | None, lines: int, max_bytes: int) -> list[str]:
    """Raises:
    BadArgs: there is no such log.
    """
    names = sorted(file.stem for file in directory.glob("*.log"))
    if actor is not None and actor not in names:
        raise BadArgs(f"there is no log of {actor!r}; there are: {names}")
    wanted = [actor] if actor is not None else names
    share = max_bytes // max(len(wanted), 1)
    return [line for name in wanted for line in whole_lines(directory / f"{name}.log", lines, share)][-lines:]


_KINDS: Final = {"reward_mean": "step", "state": "state", "phase": "phase"}
"""Key of a progress map → kind of the event that watchers get."""


def _listener(job: str, queue: asyncio.Queue[Plain]) -> Any:
    def listen(progress: Mapping[str, Any]) -> None:
        kind = next((kind for key, kind in _KINDS.items() if key in progress), "message")
        _put(queue, {"kind": kind, "job": job, **progress})

    return listen


def _put(queue: asyncio.Queue[Plain], event: Plain) -> None:
    if queue.full():
        queue.get_nowait()  # the oldest goes: a slow watcher sees the newest, and metrics.jsonl has them all
    queue.put_nowait(event)


def _nothing() -> None:
    """Do nothing, where nothing has to be unsubscribed."""


def _plain(report: JobReport) -> Plain:
    return {
        "job": report.job,
        "state": str(report.state),
        "step": report.step,
        "steps": report.steps,
        "waiting_for": report.waiting_for,
    }


def _row(name: str, role: str, node: str) -> Plain:
    return {"name": name, "role": role, "node": node, "pid": 0, "state": "running", "incarnation": "", "restarts": 0,
            "devices": []}  # fmt: skip


def _machine(node: Node) -> Plain:
    return {
        "node": node.name,
        "kind": node.kind,
        "state": "draining" if node.draining else "running",
        "slots": None if node.local else node.slots,  # the job file says how many workers the head's own machine has
        "slots_used": None if node.local else node.slots_used,
        "devices": list(node.devices.ids),
        "free": list(node.devices.free),
        "given": {device: sorted(users) for device, users in node.devices.users.items()},
    }


def _child(info: ChildInfo, devices: tuple[str, ...] | None) -> Plain:
    return {
        "name": info.name,
        "role": info.role,
        "node": info.node,
        "pid": info.pid,
        "state": info.state,
        "incarnation": f"{info.incarnation:x}",
        "restarts": info.restarts,
        "devices": list(devices or ()),
    }
