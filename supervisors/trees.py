"""The running system on one page.

    head process
    ├── nodes                   register of machines (nodes.py)
    ├── agent                   this machine's node agent: owns role processes (node_agent.py)
    ├── control server          the scriptable socket (actors/control)
    └── per job (job_run.py)
        ├── core.<job>          rest_for_one: metrics ─▶ scheduler (ledger, journal) ─▶ job
        ├── services.<job>      one_for_one: weights · rewards (and prompts) · trainer        a process each
        └── rollout.<job>       one_for_one, sized by ``scale``: rollout-0 … rollout-n        a process each

    node process (node.py)
    ├── agent                   that machine's node agent
    └── membership              keeps the node in the head's register

The services do not lean on each other's memory: each finds the others through the scheduler and rebuilds what it
holds (weights from shared memory, the trainer from its checkpoint and the ledger), so one death restarts one process.

Three ways in: ``run_job`` (headrace run), ``run_head`` (headrace head), ``run_node`` (headrace node).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from actors.control.socket import default_endpoint, for_others, for_this_machine, store_endpoint
from configs.fault_plan import FaultPlan
from configs.schema import JobConfig
from supervisors.head import Head, OnProgress
from supervisors.logs import configure_head_logging
from supervisors.node import NodeProcess


async def run_job(
    job: JobConfig,
    run_dir: Path,
    *,
    resume: bool,
    control: str | None,
    on_progress: OnProgress,
    keys: Path | None = None,
    control_keys: Path | None = None,
    faults: FaultPlan | None = None,
) -> dict[str, Any]:
    """Run one job to its end on a head of its own; returns the summary of ``headrace run --json``.

    Ctrl-C asks for a checkpoint and ends the run as ``interrupted``; a second one ends it at once.

    Raises:
        HeadraceError: the head could not start. What happens to the job itself is in the summary.
    """
    run_dir = run_dir.resolve()
    configure_head_logging(run_dir / "logs" / "head.log")
    listen = job.cluster.listen if job.cluster.nodes else None
    head = Head(run_root=run_dir.parent, listen=listen, keys=keys, control_keys=control_keys, limits=job.limits)
    async with _started(head), _interruptible() as interrupted:
        endpoint = await head.serve_control(control or default_endpoint(run_dir))
        store_endpoint(run_dir, for_this_machine(endpoint))
        on_progress({"control": endpoint, "message": f"control socket {for_others(endpoint)}"})
        if job.cluster.nodes:
            on_progress({"message": f"waiting for {job.cluster.nodes} nodes: headrace node --join {head.endpoint}"})
        return await head.run(job, run_dir, interrupted, resume=resume, on_progress=on_progress, faults=faults)


async def run_head(
    *, listen: str, control: str | None, run_root: Path, keys: Path | None, control_keys: Path | None = None
) -> None:
    """Serve jobs that come over the control socket until a signal; running jobs take a checkpoint first."""
    run_root.mkdir(parents=True, exist_ok=True)
    configure_head_logging(run_root / "head.log")
    head = Head(run_root=run_root.resolve(), listen=listen, keys=keys, control_keys=control_keys)
    async with _started(head), _interruptible() as interrupted:
        endpoint = await head.serve_control(control or default_endpoint(run_root))
        store_endpoint(run_root, for_this_machine(endpoint))
        print(f"nodes join    headrace node --join {head.endpoint}", flush=True)
        print(f"control       {for_others(endpoint)}", flush=True)
        await interrupted.wait()
        await head.interrupt_jobs()


async def run_node(*, join: str, name: str | None, slots: int | None, keys: Path | None) -> None:
    """Lend this machine to the head at ``join`` until a signal, or until the head stays away."""
    node = NodeProcess(join=join, name=name, slots=slots, keys=keys)
    async with _interruptible() as interrupted:
        try:
            await node.start()
            print(f"node {node.name} has joined {join}", flush=True)
            await node.wait(interrupted)
        finally:
            await node.stop()


@contextlib.asynccontextmanager
async def _started(head: Head) -> AsyncIterator[None]:
    try:
        await head.start()
        yield
    finally:
        await head.stop()


@contextlib.asynccontextmanager
async def _interruptible() -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one cancels the running task."""
    loop, task, event = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()

    def interrupt() -> None:
        if event.is_set() and task is not None:
            task.cancel()
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield event
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
