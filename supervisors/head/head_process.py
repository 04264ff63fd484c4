"""The inside of the head's process: from exec to the end of its work. Started by ``machine_process.py``, and again.

    stdin ─▶ HeadOrder ─▶ Head.start ─▶ control socket ─▶ HeadReady ─┬─ one job: run it ─▶ HeadEnded(summary) ─▶ exit 0
                                                                     ├─ several: run them ─▶ HeadEnded ─▶ exit 0
                                                                     └─ serve jobs until a signal ─▶ HeadEnded ─▶ exit 0

Invariants
- The process ends with its parent (``parent_death``). The error that ends it is its exit note, and its last line on
  stderr.
- Nothing of it is needed by a next life but the run directory: the journal, the model, the metrics.
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
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from actors.control.socket import for_this_machine, store_endpoint
from actors.core.context import named_rng
from actors.core.errors import AskError
from actors.core.patience import RETRYABLE, Patience
from actors.core.reason import reason_of
from actors.host.parent_death import die_with_parent
from configs.errors import ConfigError
from configs.fault_plan import FaultPlan
from configs.limits import Limits
from configs.loader import load_job
from configs.schema import JobConfig
from configs.services import ServicesConfig
from supervisors.head.head import Head
from supervisors.head.head_messages import HeadBeacon, HeadEnded, HeadHeard, HeadOrder, HeadProgress, HeadReady
from supervisors.jobs.job_run import FormerLife, JobRun
from supervisors.machine import exit_note
from supervisors.machine.devices import Devices
from supervisors.machine.logs import log_to_file, new_loop
from supervisors.machine.machine import JOURNAL, LocalMachine
from supervisors.machine.process import EXIT_CRASHED, EXIT_OK, EXIT_START_FAILED
from transport.errors import HeadraceError

log = structlog.get_logger("headrace.head")

SUMMARY: Final = "summary.json"
"""File of a run directory with the summary of a job that was run beside others and is over."""


def run_head_process() -> None:
    """Be the head; what ``main.py lead`` calls. Does not return."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it is ready, and told so, nobody has anything to interrupt
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
        services_dir=Path(order.services_dir) if order.services_dir else None,
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
            store_endpoint(Path(order.run_dir or order.run_root), for_this_machine(control))
            gc.freeze()  # imports are for ever: a collection that goes through them keeps everybody waiting for 35 ms
            return await lead(head, order, control, interrupted)
    finally:
        await head.stop()


async def lead(head: Head, order: HeadOrder, control: str, interrupted: asyncio.Event) -> int:
    """Do what the order says on a head that has started; returns the exit code."""
    reporter = Reporter(head, order)
    reporter.ready(control)
    beacons = asyncio.create_task(reporter.beacons(), name="beacons")
    try:
        summary: dict[str, Any] = {}
        rules = ServicesConfig.model_validate_json(order.services) if order.services else None
        await head.begin_services(rules, former=order.former is not None)
        if order.job:
            summary = await _run(head, order, interrupted, reporter)
        elif order.run_dirs:
            head.subscribe(reporter.follow)
            summary = await run_several(head, order, interrupted)
            for said in head.admission.sentences():
                reporter.progress({"message": said})
        else:
            head.subscribe(reporter.follow)
            _launch_again(head, order)
            await interrupted.wait()
            await head.interrupt_jobs()
        await reporter.ended(summary)
    finally:
        beacons.cancel()
    return EXIT_OK


async def _run(head: Head, order: HeadOrder, interrupted: asyncio.Event, reporter: Reporter) -> dict[str, Any]:
    job = JobConfig.model_validate_json(order.job)
    head.admission.keep_only({job.name})
    return await head.run(
        job,
        Path(order.run_dir),
        interrupted,
        on_progress=reporter.progress,
        faults=FaultPlan.model_validate_json(order.faults) if order.faults else None,
        former=former_life(order, Path(order.run_dir)),
    )


def former_life(order: HeadOrder, run_dir: Path, job: str = "") -> FormerLife | None:
    """None also for a run whose former heads did not get as far as its core: then they started no process.

    Where there is no journal none of them did. In a run that was resumed there is one of before, which says nothing of
    these lives: it may end with the order to stop that this run is to go on after (``Scheduler``: ``resumed``). Then
    what counts is what they have said. ``job``: which one of several.
    """
    former = order.former
    if former is None or not (run_dir / JOURNAL).exists():
        return None
    if order.resume and not (job in former.begun_jobs if job else former.begun):
        return None
    return FormerLife(former.ended, former.restarts, former.workers, former.functions)


def _launch_again(head: Head, order: HeadOrder) -> None:
    """Go on with the jobs of the life before this one."""
    for run_dir in head.register.read():
        try:
            head.launch(load_job(run_dir / "job.yaml", []), run_dir, former_life(order, run_dir))
        except (HeadraceError, ConfigError, OSError) as error:
            log.exception("a job is not gone on with", run_dir=str(run_dir), why=str(error))
    head.admission.keep_only(set(head.jobs))


async def run_several(head: Head, order: HeadOrder, interrupted: asyncio.Event) -> dict[str, Any]:
    """Run the jobs of ``order.run_dirs`` side by side; the summary of each by its name.

    That of a job that is over is kept in its directory: a next life of the head does not begin with it again.
    """
    loaded: dict[str, tuple[JobConfig, Path]] = {}
    summaries: dict[str, Any] = {}
    for directory in order.run_dirs:
        run_dir = Path(directory)
        job = load_job(run_dir / "job.yaml", [])
        if order.former is not None and (run_dir / SUMMARY).exists():
            summaries[job.name] = json.loads((run_dir / SUMMARY).read_text("utf-8"))
        else:
            loaded[job.name] = (job, run_dir)
            summaries[job.name] = {}
    head.admission.keep_only(set(loaded))

    async def run_one(job: JobConfig, run_dir: Path) -> None:
        try:
            ended = head.launch(job, run_dir, former_life(order, run_dir, job.name))
            summary = await asyncio.shield(ended)
        except (HeadraceError, OSError) as error:
            summary = {"job": job.name, "steps": 0, "state": "failed", "error": str(error) or repr(error)}
        summaries[job.name] = summary = _plain(summary)
        partial = run_dir / f"{SUMMARY}.partial"
        partial.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        partial.replace(run_dir / SUMMARY)

    async def obey() -> None:
        await interrupted.wait()
        await head.interrupt_jobs()

    watcher = asyncio.create_task(obey(), name="interrupt all jobs")
    try:
        async with asyncio.TaskGroup() as group:
            for job, run_dir in loaded.values():
                group.create_task(run_one(job, run_dir), name=f"run {job.name}")
    finally:
        watcher.cancel()
    return summaries


class Reporter:
    """Speaks to the machine process."""

    def __init__(self, head: Head, order: HeadOrder) -> None:
        self._keeper = head.system.ref(order.keeper)
        self._nodes = head.nodes
        self._endpoint = head.endpoint
        self._limits = head.limits
        self._life = order.life

    def ready(self, control: str) -> None:
        self._keeper.tell(HeadReady(life=self._life, endpoint=self._endpoint, control=control))

    def follow(self, run: JobRun) -> None:
        """Tell what becomes of one of the head's jobs, under its name."""
        job = run.job.name
        run.subscribe(lambda fields: self.progress({"of_job": job, **fields}))

    def progress(self, fields: Mapping[str, Any]) -> None:
        self._keeper.tell(HeadProgress(life=self._life, fields=_plain(fields)))

    async def beacons(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._limits.beacon_interval_s)
            nodes = tuple(sorted(node.name for node in self._nodes.present if not node.local))
            self._keeper.tell(HeadBeacon(life=self._life, nodes=nodes))

    async def ended(self, summary: Mapping[str, Any]) -> None:
        """Say it again while the link is down: it comes back, or the machine process takes this one for hung.

        Raises:
            AskError: the machine process does not answer, so it will not outlive this one.
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
    """Enums, paths and numbers of other libraries as what they are on the wire."""
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
