"""The running system on one page.

    machine process             headrace run, headrace head (machine_process.py)
    ├── agent                   this machine's node agent: owns role processes (node_agent.py)
    ├── keeper                    keeps one head process alive, and hears from it
    └── providers               headrace run: each brings up its job's machines and takes them away (providers/)

    head process                a child of the machine process; killed, it is started again (head_process.py)
    ├── nodes                   register of machines (nodes.py)
    ├── control server          the scriptable socket (actors/control)
    ├── slot shares             which job's workers are on which slot of the nodes (pool/slot_shares.py)
    ├── service.<name>          a training service that several jobs share (services.py)           a process each
    ├── serving                 models for programs of other people: models, sampler-0-0 …        a process each
    └── per job (job_tree.py)
        ├── core.<job>          rest_for_one: metrics ─▶ scheduler (ledger, journal) ─▶ job
        ├── services.<job>      one_for_one: weights · rewards (and prompts) · trainer · ranker   a process each
        │                       · gateway · environments-0 …, where the job has episodes
        └── rollout.<job>       one_for_one, sized by ``scale``: rollout-0 … rollout-n, and   a process each
                                by the nodes (pool/node_workers.py): rollout-<node> …

    A trainer or a worker of several ranks is a group in there: its processes end and start as one (role_processes.py).

    node process (node.py)
    ├── agent                   that machine's node agent
    └── membership              keeps the node in the head's register

The services do not depend on each other's memory: each finds the others through the scheduler and rebuilds its state
(weights from shared memory, the trainer from its checkpoint and the ledger), so one death restarts one process. That is
true of the head, too: its next life adopts the role processes, which look for it at its old endpoint (adoption.py).

Two ways in: ``run_head`` (headrace run: a head that ends with its jobs; headrace head: one that serves until a signal)
and ``run_node`` (headrace node).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.control.socket import default_endpoint, for_others
from actors.host.allowed_code import allow_only
from actors.weights.segments import SITE_VARIABLE, remove_segments
from configs.fault_plan import FaultPlan
from configs.limits import DEFAULT_LIMITS
from configs.run_files import LOGS
from configs.schema import JobConfig
from configs.services import ServicesConfig
from configs.serving import ServingConfig
from supervisors.head.head_messages import HeadOrder, HeadReady, JobOrder
from supervisors.head.head_process import interruptible
from supervisors.head.job_register import JobRegister
from supervisors.head.machine_process import MachineProcess, failed_summary
from supervisors.jobs.job_news import OnProgress
from supervisors.machine.devices import NO_DEVICES, Devices
from supervisors.machine.machine import LocalMachine
from supervisors.machine.membership.node import NodeProcess
from supervisors.machine.processes.logs import log_to_file
from supervisors.providers.job_provider import JobProviders, machines_of
from supervisors.sharing.services import remove_stored
from supervisors.tree.errors import HeadGaveUp
from transport.endpoints import split_key


async def run_head(
    directory: Path,
    jobs: Mapping[Path, JobConfig] | None,
    *,
    on_progress: OnProgress,
    listen: str | None = None,
    control: str | None = None,
    resume: bool = False,
    keys: Path | None = None,
    control_keys: Path | None = None,
    faults: FaultPlan | None = None,
    services: ServicesConfig | None = None,
    serving: ServingConfig | None = None,
    allow_functions: Sequence[str] | None = None,
    devices: Devices = NO_DEVICES,
) -> dict[str, Any]:
    """Run a head until its jobs are over, or until a signal if it serves; returns the jobs' summaries by name.

    Ctrl-C asks for a checkpoint and ends jobs as ``interrupted``; a second one ends them at once.

    Args:
        directory: the head's own, for its logs, control socket and services' files, and for the run directories of
            submitted jobs. A job that is run alone may have it as its run directory.
        jobs: by run directory, which holds the job's file. None: serve jobs that come over the control socket.
        on_progress: called with each piece of news, a map (``cli/live_view.py``), with ``of_job`` if it is of one job.
        listen: endpoint at which nodes join. None: the one that the jobs name.
        serving: models to serve beside the jobs, by one of ``services``.
        faults: a plan for ``jobs``; each summary says what has become of that job's part.
        allow_functions: prefixes of the functions that submitted jobs may name; None: any.

    Raises:
        HeadraceError: the machine process could not start, or a serving head could not be kept running. Other failures
            of jobs and their head are in the summaries.
    """
    if allow_functions:
        allow_only(allow_functions)
    directory.mkdir(parents=True, exist_ok=True)
    directory, serves = directory.resolve(), jobs is None
    jobs = {run_dir.resolve(): job for run_dir, job in (jobs or {}).items()}
    alone, logs = [*jobs] == [directory], directory if serves else directory / LOGS
    log_to_file(logs / "machine.log")

    def on_ready(head: HeadReady) -> None:
        if head.life > 1 and not serves:
            on_progress({"message": "the head is back, and takes over what runs"})
            return
        at, join = _shown(for_others(head.control), control_keys), _shown(head.endpoint, keys)
        if serves:
            said = [f"nodes join    headrace node --join {join}"] if listen is not None else []
            said += [f"control       {at}"]
        else:
            said = [f"control socket {at}", *_lines_on_nodes(jobs.values(), join, alone=alone)]
        for message in said:
            on_progress({"message": message})

    providers = JobProviders(jobs, on_progress, keys=keys, several=not alone)
    machine = MachineProcess(
        listen=listen or listen_of(jobs.values()), limits=jobs[directory].limits if alone else DEFAULT_LIMITS,
        on_progress=providers.hear, on_ready=on_ready, keys=keys, machine=LocalMachine(devices),
    )  # fmt: skip
    order = HeadOrder(
        run_root=str(directory.parent if alone else directory),
        directory=str(directory),
        control=control or default_endpoint(directory, machine.private),
        log=str(logs / "head.log"),
        keys=str(keys.resolve()) if keys is not None else "",
        control_keys=str(control_keys.resolve()) if control_keys is not None else "",
        jobs=None if serves else tuple(
            JobOrder(job.model_dump_json(), str(run_dir), "" if alone else machines_of(job))
            for run_dir, job in jobs.items()
        ),
        resume=resume,
        faults=faults.model_dump_json() if faults is not None else "",
        services=services.model_dump_json() if services is not None else "",
        serving=serving.model_dump_json() if serving is not None else "",
        allow_functions=tuple(allow_functions) if allow_functions else None,
    )  # fmt: skip
    try:
        async with _started(machine), providers.providing(machine.endpoint), interruptible() as interrupted:
            return await machine.lead(order, interrupted)
    except HeadGaveUp as error:
        if serves:
            raise
        return {job.name: failed_summary(job.name, machine.keeper, str(error)) for job in jobs.values()}
    finally:  # a head that was killed has not cleaned up
        for run_dir in JobRegister(directory, machine.peer).read() if serves else jobs:
            remove_segments(run_dir)
        remove_stored(directory)


def listen_of(jobs: Collection[JobConfig]) -> str | None:
    """The endpoint at which machines join the head of ``jobs``, which agree on it; None: no other machine joins."""
    return next((job.listen for job in jobs if job.listen is not None), None)


def _lines_on_nodes(jobs: Collection[JobConfig], join: str, *, alone: bool) -> list[str]:
    """Lines that tell people how to start the nodes that ``jobs`` wait for."""
    wanted = sum(job.cluster.nodes for job in jobs)
    if alone and wanted:
        return [f"waiting for {wanted} nodes: headrace node --join {join}"]
    return [f"nodes join with headrace node --join {join}"] if wanted else []


def _shown(endpoint: str, keys: Path | None) -> str:
    """``endpoint`` as people type it: without its key if that is of this user's default pair, which is found anyway."""
    return split_key(endpoint)[0] if keys is None else endpoint


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
