"""The role processes of one job as children of its supervisors, alone or as rank groups.

    one     weights, rewards, …                          a process where ``place`` says
    group   trainer, and trainer.rank1 … of ``trainer.ranks``;
            rollout-0, and rollout-0.rank1 … of ``rollout.tensor_parallel``: all on one machine, one slot of it
    replica the trainer's ranks from ``JobConfig.ranks_here`` on, with ``cluster.place_replicas: remote``: as many
            together on a node that is kept for them, a slot each

Invariants
- A process is placed anew for each start; the ranks of a group go where one of them is (``Nodes.choose``).
- A trainer with replicas on other machines starts once there is a node for each of them.
- A head that was started again looks for each process once, on every node, before it starts one of its own. Of a group
  it adopts all or none: what is left of one that is not whole, or is given up meanwhile, is stopped.
- Followers come before their leader in the order of children, so that the leader stops first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.roles import RoleArgs
from actors.weights.segments import run_id
from configs.names import rank_name
from configs.schema import JobConfig
from supervisors.jobs.adoption import adopt
from supervisors.jobs.device_needs import devices_wanted
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.restart_budget import ExitCause, RestartPolicy

if TYPE_CHECKING:
    from actors.core.context import Context
    from supervisors.machine.nodes import Nodes
    from transport.address import ActorAddress

Service = Callable[[], Awaitable["ActorAddress"]]
Record = Callable[..., None]


def ranks_of(job: JobConfig, role: str) -> int:
    """Number of processes that one trainer, or one rollout worker, of the job consists of; 1 for every other role."""
    return {"trainer": job.trainer.ranks, "rollout": job.rollout.tensor_parallel}.get(role, 1)


class RoleProcesses:
    """Makes the children of one job.

    Args:
        adopting: whether they may run already, begun by a former life of the head.
        may_stay: whether rollout workers may be given work of other jobs when theirs is over.
        service: finds the training service as it runs now; None: the trainer computes itself.
        record: into events.jsonl.
    """

    def __init__(
        self,
        nodes: Nodes,
        job: JobConfig,
        run_dir: Path,
        scheduler: ActorAddress,
        metrics: ActorAddress,
        *,
        adopting: bool,
        may_stay: bool,
        service: Service | None,
        record: Record,
    ) -> None:
        self._nodes, self._job, self._run_dir = nodes, job, run_dir
        self._scheduler, self._metrics = scheduler, metrics
        self._adopting, self._may_stay, self._service, self._record = adopting, may_stay, service, record
        self._model_path = Path()
        self._prepared_job = job
        """The job as processes are told it."""
        self._found: dict[str, asyncio.Task[dict[str, Running]]] = {}
        """Leader → what was found running of its group, all of it or nothing, less what a child was given of it."""
        self._given_up: set[str] = set()
        """Leaders whose groups were given up before it was known what runs of them."""

    def prepared(self, model_path: Path, job: JobConfig) -> None:
        """From now on processes are told this model and this job, with its data on disk."""
        self._model_path, self._prepared_job = model_path, job

    def children(
        self, name: str, role: str, place: str, restart: RestartPolicy = RestartPolicy.PERMANENT
    ) -> list[ChildSpec]:
        """The process ``name``, after its followers, on the machine that ``place`` asks for (``Nodes.choose``)."""
        size = ranks_of(self._job, role)
        job, run_dir = self._prepared_job.model_dump_json(), str(self._run_dir)
        leader = RoleArgs(
            role=role,
            name=name,
            node="",
            job=job,
            model_path=str(self._model_path),
            run_dir=run_dir,
            scheduler=self._scheduler,
            metrics=self._metrics,
            run_id=run_id(self._run_dir),
            beside_trainer=role == "rollout" and place == "local",
            size=size,
        )
        kind = self._job.trainer.backend if role == "trainer" else self._job.rollout.engine
        followers = [
            msgspec.structs.replace(leader, role="rank", name=rank_name(name, rank), rank=rank, leader=name, kind=kind)
            for rank in range(1, size)
        ]
        self._expect_replicas(name, role)
        return [self._child(args, role, place, restart) for args in [*followers, leader]]

    def _expect_replicas(self, name: str, role: str) -> None:
        """Have a node kept for each replica of a trainer that is on another machine."""
        if replicas := self._replicas(name, role)[1:]:
            wanted = devices_wanted(self._job, role)
            self._nodes.expect(self._process(name), [[self._process(one) for one in r] for r in replicas], wanted or 0)

    def _replicas(self, name: str, role: str) -> list[list[str]]:
        """Names of the ranks of ``name``, those together that are on one machine."""
        ranks = ranks_of(self._job, role)
        names = [rank_name(name, rank) for rank in range(ranks)]
        together = self._job.ranks_here if role == "trainer" else ranks
        return [names[first : first + together] for first in range(0, ranks, together)]

    def release(self, name: str, role: str = "rollout") -> None:
        """``name`` and its followers have no place on any node any more."""
        for rank in range(ranks_of(self._job, role)):
            self._nodes.release(self._process(rank_name(name, rank)))

    def end(self) -> None:
        """The job is over: nothing is kept for it."""
        self._nodes.expect(self._process("trainer"), (), 0)

    def _process(self, name: str) -> str:
        """What it is called at its node agent."""
        return f"{self._job.name}.{name}"

    def _child(self, args: RoleArgs, role: str, place: str, restart: RestartPolicy) -> ChildSpec:
        """``role``: its leader's."""
        limits, name, process = self._job.limits, args.name, self._process(args.name)
        leader = args.leader or name
        names = [rank_name(leader, rank) for rank in range(args.size)]
        own = next(replica for replica in self._replicas(leader, role) if name in replica)
        place = place if own[0] == leader else "replica"
        group = [self._process(one) for one in own] if args.size > 1 else []

        async def start(context: Context) -> Running:
            if self._adopting:
                running = await self._adopted(context, name, leader, names, role, place)
                if running is not None:
                    return running
            told = args
            if args.role == "trainer" and self._service is not None:  # it listens elsewhere in each of its lives
                told = msgspec.structs.replace(args, service=await self._service())
            wanted = devices_wanted(self._job, role)
            node = await self._nodes.choose(
                process, place, self._job.cluster.wait_s, devices=wanted or 0, group=group
            )  # fmt: skip
            devices = None if wanted is None else self._nodes.devices_of(process)
            if devices:
                self._record("devices_given", child=name, node=node.name, devices=",".join(devices))
            return await start_process(
                context, node.agent, told, job=self._job.name, ready_s=limits.ready_timeout_s, limits=limits,
                may_stay=role == "rollout" and self._may_stay and args.size == 1, devices=devices,
            )  # fmt: skip

        ready_s = limits.ready_timeout_s + self._job.cluster.wait_s
        return ChildSpec(
            name, start, role=args.role, restart=restart, shutdown_s=limits.stop_timeout_s, ready_s=ready_s,
            group=leader if args.size > 1 else "",
        )  # fmt: skip

    async def _adopted(
        self, context: Context, name: str, leader: str, names: list[str], role: str, place: str
    ) -> Running | None:
        """``name`` as it runs already, with all of its group. Whoever of that asks first looks for all, once."""
        if leader not in self._found:
            replicas, lent = self._replicas(leader, role), place.startswith("node:")
            looking = self._look_for(context, leader, names, replicas, lent=lent)
            self._found[leader] = asyncio.create_task(looking, name=f"look for what runs of {leader}")
        try:
            found = await asyncio.shield(self._found[leader])
        except asyncio.CancelledError:
            self._given_up.add(leader)
            looking = self._found[leader]
            if looking.done() and (running := looking.result().pop(name, None)) is not None:
                await _stopped(running, 0.0)
            raise
        return found.pop(name, None)

    async def _look_for(
        self, context: Context, leader: str, names: list[str], replicas: list[list[str]], *, lent: bool
    ) -> dict[str, Running]:
        found: dict[str, Running] = {}
        for replica in replicas:
            group = [self._process(one) for one in replica] if len(names) > 1 else []
            for name in replica:
                running = await adopt(context, self._nodes, self._process(name), name, group=group, lent=lent)
                if running is not None:
                    found[name] = running
        if len(found) == len(names) and leader not in self._given_up:
            return found
        if found:
            context.log.warning("a rank group is not whole, or not wanted", group=leader, runs=sorted(found))
        async with asyncio.TaskGroup() as stops:
            for running in found.values():
                stops.create_task(_stopped(running, self._job.limits.stop_timeout_s))
        return {}


async def _stopped(running: Running, deadline_s: float) -> None:
    await running.stop(deadline_s, ExitCause.STOPPED)
