"""The running system on one page.

    machine process             headrace run, headrace head (machine_process.py)
    ├── agent                   this machine's node agent: owns role processes (node_agent.py)
    ├── keeper                    keeps one head process alive, and hears from it
    └── provider                headrace run: brings up node processes and takes them away (providers/)

    head process                a child of the machine process; killed, it is started again (head_process.py)
    ├── nodes                   register of machines (nodes.py)
    ├── control server          the scriptable socket (actors/control)
    ├── slot shares             which job's workers are on which slot of the nodes (slot_shares.py)
    ├── service.<name>          a training service that several jobs share (services.py)           a process each
    └── per job (job_tree.py)
        ├── core.<job>          rest_for_one: metrics ─▶ scheduler (ledger, journal) ─▶ job
        ├── services.<job>      one_for_one: weights · rewards (and prompts) · trainer · ranker   a process each
        │                       · gateway · environments-0 …, where the job has episodes
        └── rollout.<job>       one_for_one, sized by ``scale``: rollout-0 … rollout-n, and   a process each
                                by the nodes (elastic_pool.py): rollout-<node> …

    A trainer or a worker of several ranks is a group in there: its processes end and start as one (role_processes.py).

    node process (node.py)
    ├── agent                   that machine's node agent
    └── membership              keeps the node in the head's register

The services do not lean on each other's memory: each finds the others through the scheduler and rebuilds what it
holds (weights from shared memory, the trainer from its checkpoint and the ledger), so one death restarts one process.
The head's is one of them: its next life adopts the role processes, which look for it where it was (adoption.py).

Four ways in: ``run_job`` and ``run_jobs`` (headrace run), ``run_head`` (headrace head), ``run_node`` (headrace node).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.control.socket import default_endpoint, for_others
from actors.weights.segments import SITE_VARIABLE, remove_segments
from configs.fault_plan import FaultPlan
from configs.limits import DEFAULT_LIMITS
from configs.schema import JobConfig
from configs.services import ServicesConfig
from supervisors.head.head_messages import HeadOrder, HeadReady
from supervisors.head.head_process import interruptible
from supervisors.head.job_register import JobRegister
from supervisors.head.machine_process import MachineProcess, failed_summary
from supervisors.head.services import remove_stored
from supervisors.jobs.job_news import OnProgress
from supervisors.machine.devices import NO_DEVICES, Devices
from supervisors.machine.logs import log_to_file
from supervisors.machine.machine import LocalMachine
from supervisors.machine.node import NodeProcess
from supervisors.providers.job_provider import JobProvider
from supervisors.tree.errors import HeadGaveUp
from transport.endpoints import split_key


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
    services: ServicesConfig | None = None,
    devices: Devices = NO_DEVICES,
) -> dict[str, Any]:
    """Run one job to its end on a head of its own; returns the summary of ``headrace run --json``.

    Ctrl-C asks for a checkpoint and ends the run as ``interrupted``; a second one ends it at once.

    Raises:
        HeadraceError: the machine process could not start. What happens to the head and the job is in the summary.
    """
    run_dir = run_dir.resolve()
    log_to_file(run_dir / "logs" / "machine.log")

    def on_ready(head: HeadReady) -> None:
        if head.life > 1:
            on_progress({"control": head.control, "message": "the head is back, and takes over what runs"})
            return
        at, join = _shown(for_others(head.control), control_keys), _shown(head.endpoint, keys)
        on_progress({"control": head.control, "message": f"control socket {at}"})
        if job.cluster.nodes:
            on_progress({"message": f"waiting for {job.cluster.nodes} nodes: headrace node --join {join}"})

    provider = JobProvider(job, run_dir, on_progress, keys=keys)
    machine = MachineProcess(
        listen=job.listen, limits=job.limits, on_progress=provider.hear, on_ready=on_ready, keys=keys,
        machine=LocalMachine(devices),
    )  # fmt: skip
    order = _order(run_dir.parent, control or default_endpoint(run_dir, machine.private), run_dir / "logs" / "head.log",
                   keys, control_keys)  # fmt: skip
    order = msgspec.structs.replace(
        order,
        job=job.model_dump_json(),
        run_dir=str(run_dir),
        resume=resume,
        faults=faults.model_dump_json() if faults is not None else "",
        services=services.model_dump_json() if services is not None else "",
        services_dir=str(run_dir),
    )
    try:
        async with _started(machine), provider.providing(machine.endpoint), interruptible() as interrupted:
            return await machine.lead(order, interrupted)
    except HeadGaveUp as error:
        return dict(failed_summary(job.name, machine.keeper, str(error)))
    finally:
        remove_segments(run_dir)  # a head that was killed did not get to it
        remove_stored(run_dir)


async def run_jobs(
    directory: Path,
    jobs: Mapping[Path, JobConfig],
    *,
    resume: bool,
    control: str | None,
    on_progress: OnProgress,
    keys: Path | None = None,
    control_keys: Path | None = None,
    services: ServicesConfig | None = None,
    devices: Devices = NO_DEVICES,
) -> dict[str, Any]:
    """Run several jobs side by side, on one head, to their ends; returns the summary of each by its name.

    ``directory`` is the command's: logs of head and machine, the control socket, and the services' files lie in it.
    ``jobs``: by run directory, which holds the job's file. Ctrl-C as in ``run_job``, for all of them.

    Raises:
        HeadraceError: the machine process could not start.
    """
    directory = directory.resolve()
    run_dirs = [run_dir.resolve() for run_dir in jobs]
    log_to_file(directory / "logs" / "machine.log")
    listen = next((job.cluster.listen for job in jobs.values() if job.cluster.nodes), None)

    def on_ready(head: HeadReady) -> None:
        if head.life > 1:
            on_progress({"message": "the head is back, and takes over what runs"})
            return
        on_progress({"message": f"control socket {_shown(for_others(head.control), control_keys)}"})
        if listen is not None:
            on_progress({"message": f"nodes join with headrace node --join {_shown(head.endpoint, keys)}"})

    machine = MachineProcess(
        listen=listen, limits=DEFAULT_LIMITS, on_progress=on_progress, on_ready=on_ready, keys=keys,
        machine=LocalMachine(devices),
    )  # fmt: skip
    order = _order(directory, control or default_endpoint(directory, machine.private),
                   directory / "logs" / "head.log", keys, control_keys)  # fmt: skip
    order = msgspec.structs.replace(
        order,
        run_dirs=tuple(str(run_dir) for run_dir in run_dirs),
        resume=resume,
        services=services.model_dump_json() if services is not None else "",
    )
    try:
        async with _started(machine), interruptible() as interrupted:
            return await machine.lead(order, interrupted)
    except HeadGaveUp as error:
        return {job.name: failed_summary(job.name, machine.keeper, str(error)) for job in jobs.values()}
    finally:
        for run_dir in run_dirs:
            remove_segments(run_dir)
        remove_stored(directory)


async def run_head(
    *,
    listen: str,
    control: str | None,
    run_root: Path,
    keys: Path | None,
    control_keys: Path | None = None,
    on_progress: OnProgress,
    allow_functions: Sequence[str] | None = None,
    services: ServicesConfig | None = None,
    devices: Devices = NO_DEVICES,
) -> None:
    """Serve jobs that come over the control socket until a signal; running jobs take a checkpoint first."""
    run_root.mkdir(parents=True, exist_ok=True)
    run_root = run_root.resolve()
    log_to_file(run_root / "machine.log")

    def on_ready(head: HeadReady) -> None:
        print(f"nodes join    headrace node --join {_shown(head.endpoint, keys)}", flush=True)
        print(f"control       {_shown(for_others(head.control), control_keys)}", flush=True)

    machine = MachineProcess(
        listen=listen, limits=DEFAULT_LIMITS, on_progress=on_progress, on_ready=on_ready, keys=keys,
        machine=LocalMachine(devices),
    )  # fmt: skip
    at = control or default_endpoint(run_root, machine.private)
    order = _order(run_root, at, run_root / "head.log", keys, control_keys)
    if allow_functions:
        order = msgspec.structs.replace(order, allow_functions=tuple(allow_functions))
    if services is not None:
        order = msgspec.structs.replace(order, services=services.model_dump_json())
    try:
        async with _started(machine), interruptible() as interrupted:
            await machine.lead(order, interrupted)
    finally:
        for run_dir in JobRegister(run_root, machine.peer).read():
            remove_segments(run_dir)
        remove_stored(run_root)


def _shown(endpoint: str, keys: Path | None) -> str:
    """As people type it: the key of this user's own pair is found by itself."""
    return split_key(endpoint)[0] if keys is None else endpoint


def _order(run_root: Path, control: str, log: Path, keys: Path | None, control_keys: Path | None) -> HeadOrder:
    """The order for the first life; the machine process fills in what it knows."""
    return HeadOrder(
        run_root=str(run_root),
        control=control,
        log=str(log),
        keys=str(keys.resolve()) if keys is not None else "",
        control_keys=str(control_keys.resolve()) if control_keys is not None else "",
    )


async def run_node(
    *,
    join: str,
    name: str | None,
    slots: int | None,
    keys: Path | None,
    kind: str = "reserved",
    site: str = "",
    notice_s: float = 0.0,
    devices: Devices = NO_DEVICES,
) -> None:
    """Lend this machine to the head at ``join`` until a signal, or until the head stays away."""
    if site:
        os.environ[SITE_VARIABLE] = site  # the processes of a node have its environment
    node = NodeProcess(
        join=join, name=name, slots=slots, keys=keys, kind=kind, notice_s=notice_s, machine=LocalMachine(devices)
    )
    async with interruptible() as interrupted:
        try:
            await node.start()
            print(f"node {node.name} has joined {join}", flush=True)
            if not await node.wait(interrupted):
                print(f"node {node.name}: the head at {join} has ended", flush=True)
        finally:
            await node.stop()


@contextlib.asynccontextmanager
async def _started(machine: MachineProcess) -> AsyncIterator[None]:
    try:
        await machine.start()
        yield
    finally:
        await machine.stop()
