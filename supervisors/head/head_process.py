"""The inside of the head's process: from exec to the end of its work. Started by ``machine_process.py``, and again.

    stdin ─▶ HeadOrder ─▶ Head.start ─▶ control socket ─▶ HeadReady ─┬─ run jobs to their ends ────┬─▶ HeadEnded
                                                                     └─ serve jobs until a signal ─┘   ─▶ exit 0

Invariants
- The process ends with its parent (``parent_death``). The error that ends it is its exit note, and its last line on
  stderr.
- A next life needs nothing of this one but the run directory: the journal, the model, the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from actors.control.socket import for_this_machine, store_endpoint
from actors.core.context import named_rng
from actors.core.errors import AskError
from actors.core.patience import RETRYABLE, Patience
from actors.core.reason import reason_of
from actors.core.strict_json import strict_json
from actors.host.parent_death import die_with_parent
from actors.host.whole_file import write_whole
from configs.errors import ConfigError
from configs.fault_plan import FaultPlan
from configs.limits import Limits
from configs.loader import read_job
from configs.run_files import JOB_FILE, JOURNAL, SUMMARY
from configs.schema import JobConfig
from configs.services import ServicesConfig
from configs.serving import ServingConfig
from supervisors.head.head import Head
from supervisors.head.head_messages import (
    FormerJob,
    HeadBeacon,
    HeadEnded,
    HeadHeard,
    HeadOrder,
    HeadProgress,
    HeadReady,
    JobOrder,
)
from supervisors.jobs.job_run import FormerLife, JobRun
from supervisors.machine.devices import Devices
from supervisors.machine.machine import LocalMachine
from supervisors.machine.processes import exit_note
from supervisors.machine.processes.logs import log_to_file, new_loop
from supervisors.machine.processes.process import EXIT_CRASHED, EXIT_OK, EXIT_START_FAILED
from supervisors.nemesis.fault_schedule import faults_of
from transport.errors import HeadraceError

log = structlog.get_logger("headrace.head")


def run_head_process() -> None:
    """Be the head; what ``main.py lead`` calls. Does not return."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before it is ready there is nothing to interrupt
    note = exit_note.take_pipe()
    code = EXIT_CRASHED
    try:
        order = HeadOrder.decode(sys.stdin.buffer.read())
        log_to_file(Path(order.log))
        with asyncio.Runner(loop_factory=new_loop) as runner:
            code = runner.run(_main(order, lambda error: exit_note.leave(note, reason_of(error))))
    except asyncio.CancelledError:
        log.warning("interrupted twice")
    except BaseException as error:
        exit_note.leave(note, reason_of(error))
        log.exception("the head failed")
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


async def _main(order: HeadOrder, last_words: Callable[[BaseException], None]) -> int:
    head = Head(
        run_root=Path(order.run_root),
        listen=order.listen,
        keys=Path(order.keys) if order.keys else None,
        control_keys=Path(order.control_keys) if order.control_keys else None,
        limits=Limits.model_validate_json(order.limits),
        machine=LocalMachine(Devices(order.devices)),
        agent=order.agent,
        allow_functions=order.allow_functions,
        services_dir=Path(order.directory),
    )
    try:
        async with interruptible() as interrupted:
            try:
                await head.start()
                control = await head.serve_control(order.control)
            except (HeadraceError, OSError) as error:
                last_words(error)
                log.exception("the head could not start")
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                return EXIT_START_FAILED
            store_endpoint(Path(order.directory), for_this_machine(control))
            gc.freeze()  # imported objects live forever: a collection that goes through them stops the loop for 35 ms
            return await lead(head, order, control, interrupted)
    finally:
        await head.stop()


async def lead(head: Head, order: HeadOrder, control: str, interrupted: asyncio.Event) -> int:
    """Do what the order says on a head that has started; returns the exit code."""
    reporter = Reporter(head, order)
    reporter.ready(control)
    beacons = asyncio.create_task(reporter.beacons(), name="beacons")
    try:
        rules = ServicesConfig.model_validate_json(order.services) if order.services else None
        await head.begin_services(rules, former=order.former is not None)
        if order.serving:
            served = ServingConfig.model_validate_json(order.serving)
            await head.begin_serving(
                served, former=order.former is not None, say=lambda line: reporter.progress({"message": line})
            )
        head.subscribe(reporter.follow)
        summaries: dict[str, Any] = {}
        if order.jobs is not None:
            summaries = await run_jobs(head, order, order.jobs, interrupted, reporter)
        else:
            launch_again(head, order, reporter)
            await interrupted.wait()
            await head.interrupt_jobs()
        await reporter.ended(summaries)
    finally:
        beacons.cancel()
    return EXIT_OK


def former_life(order: HeadOrder, run_dir: Path, job: str) -> FormerLife | None:
    """What is known of the former head of ``job``; None if no former head started its core, and so none a process.

    Without a journal none did. A resumed run has a journal from before these lives, which says nothing of them: it may
    end with the order to stop after which this run goes on (``Scheduler``: ``resumed``). ``FormerJob.begun`` decides.
    """
    former = order.former
    if former is None or not (run_dir / JOURNAL).exists():
        return None
    known = former.jobs.get(job, FormerJob(restarts=former.restarts))
    if order.resume and not known.begun:
        return None
    return FormerLife(former.ended, known.restarts, known.workers, known.functions)


def launch_again(head: Head, order: HeadOrder, reporter: Reporter) -> None:
    """Go on with the jobs of the life before this one, and tell people of those with which it cannot."""
    for run_dir in head.register.read():
        try:
            job = read_job(run_dir / JOB_FILE)  # checked when it was submitted, and its processes run already
            head.launch(job, run_dir, former_life(order, run_dir, job.name))
        except (HeadraceError, ConfigError, OSError) as error:
            log.exception("a job is not gone on with", run_dir=str(run_dir), why=str(error))
            said = f"the restarted head cannot go on with {run_dir}: {error}; headrace run --resume {run_dir} may"
            reporter.progress({"message": said})
    head.admission.keep_only(set(head.jobs))


async def run_jobs(
    head: Head, order: HeadOrder, orders: Sequence[JobOrder], interrupted: asyncio.Event, reporter: Reporter
) -> dict[str, Any]:
    """Run jobs side by side to their ends; the summary of each by its name.

    The summary of a job that is over is kept in its directory, so that a next life of the head does not run it again. A
    job that is alone in the head's own directory needs no such file, and no lock beside the command's.
    """
    alone = [one.run_dir for one in orders] == [order.directory]
    jobs = {JobConfig.model_validate_json(one.job).name: one for one in orders}
    summaries: dict[str, Any] = {name: {} if alone else _summary_of(one, order) for name, one in jobs.items()}
    left = {name: one for name, one in jobs.items() if not summaries[name]}
    for name in jobs.keys() - left.keys():  # the life that saw the job's end may have died before it said so
        reporter.progress({"of_job": name, "processes": "gone"})
    head.admission.keep_only(set(left))
    plan = FaultPlan.model_validate_json(order.faults) if order.faults else None

    async def run_one(name: str, one: JobOrder) -> None:
        job, run_dir = JobConfig.model_validate_json(one.job), Path(one.run_dir)
        faults = faults_of(plan, name, list(jobs)) if plan is not None else None
        try:
            former = former_life(order, run_dir, name)
            task = head.launch(job, run_dir, former, alone=alone, faults=faults, machines=one.machines)
            summary = await asyncio.shield(task)
        except (HeadraceError, OSError) as error:
            run = head.jobs.get(name)  # None: it has not begun
            known: dict[str, Any] = {"job": name, "steps": 0} if run is None else run.summary()
            over = run is not None and run.state.over  # then its result stands, whatever failed after it
            summary = known if over else known | {"state": "failed", "error": str(error) or repr(error)}
        summaries[name] = _plain(summary)
        if not alone:
            _keep_summary(run_dir, summaries[name])
        reporter.progress({"of_job": name, "processes": "gone"})

    async def obey() -> None:
        await interrupted.wait()
        await head.interrupt_jobs()

    watcher = asyncio.create_task(obey(), name="interrupt all jobs")
    try:
        async with asyncio.TaskGroup() as group:
            for name, one in left.items():
                group.create_task(run_one(name, one), name=f"run {name}")
    finally:
        watcher.cancel()
    for said in () if alone else head.admission.sentences():
        reporter.progress({"message": said})
    return summaries


def _summary_of(one: JobOrder, order: HeadOrder) -> dict[str, Any]:
    """Summary of a job that was over before this life of the head; empty: it was not."""
    path = Path(one.run_dir) / SUMMARY
    return json.loads(path.read_text("utf-8")) if order.former is not None and path.exists() else {}


def _keep_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    write_whole(run_dir / SUMMARY, strict_json(summary, indent=1) + "\n")


class Reporter:
    """Tells the machine process what becomes of the head and its jobs."""

    def __init__(self, head: Head, order: HeadOrder) -> None:
        self._keeper = head.system.ref(order.keeper)
        self._nodes = head.nodes
        self._endpoint = head.endpoint
        self._limits = head.limits
        self._life = order.life

    def ready(self, control: str) -> None:
        self._keeper.tell(HeadReady(life=self._life, endpoint=self._endpoint, control=control))

    def follow(self, run: JobRun) -> None:
        """Pass on what a job says, with the job's name."""
        job = run.job.name
        run.subscribe(lambda fields: self.progress({"of_job": job, **fields}))

    def progress(self, fields: Mapping[str, Any]) -> None:
        self._keeper.tell(HeadProgress(life=self._life, fields=_plain(fields)))

    async def beacons(self) -> None:
        """Send beacons until cancelled."""
        while True:
            await asyncio.sleep(self._limits.beacon_interval_s)
            nodes = tuple(sorted(node.name for node in self._nodes.present if not node.local))
            self._keeper.tell(HeadBeacon(life=self._life, nodes=nodes))

    async def ended(self, summary: Mapping[str, Any]) -> None:
        """Say that the work is done, again and again while the link is down, for up to ``limits.link_grace_s``.

        Raises:
            AskError: the machine process does not answer.
        """
        news = HeadEnded(life=self._life, summary=_plain(summary))
        patience = Patience(self._limits, named_rng(self._life, "head ended"), self._limits.link_grace_s)
        while True:
            try:
                await self._keeper.ask(news, HeadHeard)
                return
            except AskError as error:
                if not isinstance(error, RETRYABLE) or not await patience.again():
                    log.exception("nobody hears of the end")
                    raise


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Enums, paths and numbers of other libraries as the plain values that the wire carries."""
    return msgspec.convert(msgspec.to_builtins(dict(fields), enc_hook=str), dict[str, Any])


@contextlib.asynccontextmanager
async def interruptible() -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second SIGINT or SIGTERM cancels the running task.

    A closed terminal sends SIGHUP more than once (the kernel, and the shell), so that no number of them ends a run at
    once. Under nohup it is ignored, and stays so.
    """
    loop, task, event = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    numbers = [signal.SIGINT, signal.SIGTERM]

    def interrupt() -> None:
        if event.is_set() and task is not None:
            task.cancel()
        event.set()

    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, event.set)
    try:
        yield event
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
