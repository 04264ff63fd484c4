"""The role processes of one job as children of its supervisors, alone or as rank groups.

    one     weights, rewards, …                          a process where ``place`` says
    group   trainer, and trainer.rank1 … of ``trainer.ranks``;
            rollout-0, and rollout-0.rank1 … of ``rollout.tensor_parallel``: all on one machine, one slot of it
    replica the trainer's ranks from ``JobConfig.ranks_here`` on, with ``cluster.place_replicas: remote`` or
            ``trainer.nodes``: as many together on a node that is kept for them, a slot each

Invariants
- A process is placed anew for each start; the ranks of a group go where one of them is (``Nodes.choose``).
- A trainer with replicas on other machines starts once there is a node for each of them.
- A head that was started again looks for each process once, on every node, before it starts one of its own
  (``group_adoption.py``).
- Followers come before their leader in the order of children, so that the leader stops first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.roles import RoleArgs
from actors.weights.segments import run_id
from configs.names import rank_name
from configs.schema import JobConfig
from supervisors.jobs.device_needs import devices_wanted
from supervisors.jobs.group_adoption import GroupAdoption
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.restart_budget import RestartPolicy

if TYPE_CHECKING:
    from actors.core.context import Context
    from supervisors.machine.membership.nodes import Nodes
    from transport.address import ActorAddress

Service = Callable[[], Awaitable["ActorAddress"]]
Record = Callable[..., None]


def ranks_of(job: JobConfig, role: str) -> int:
    """Number of processes that one trainer, or one rollout worker, of the job consists of; 1 for every other role.

    A trainer that has a training service computes nothing: the ranks are the service's.
    """
    return {
        "trainer": job.trainer.ranks if job.trainer.service is None else 1,
        "rollout": job.rollout.tensor_parallel,
    }.get(role, 1)


class RoleProcesses:
    """Makes the children of one job.

    Args:
        adopting: whether its processes may run already, started by a former life of the head.
        may_stay: whether rollout workers may be given work of other jobs when theirs is over.
        service: finds the training service as it runs now; None: the trainer computes itself.
        record: writes an event to events.jsonl.
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
        self._adoption = GroupAdoption(nodes, self._process, job.limits.stop_timeout_s)

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
        """Names of the ranks of ``name``, a list for each machine."""
        ranks = ranks_of(self._job, role)
        names = [rank_name(name, rank) for rank in range(ranks)]
        together = self._job.ranks_here if role == "trainer" else ranks
        return [names[first : first + together] for first in range(0, ranks, together)]

    def release(self, name: str, role: str = "rollout") -> None:
        """Free the places of ``name`` and its followers."""
        for rank in range(ranks_of(self._job, role)):
            self._nodes.release(self._process(rank_name(name, rank)))

    def end(self) -> None:
        """Keep no nodes for the job any more: it is over."""
        self._nodes.expect(self._process("trainer"), (), 0)

    def _process(self, name: str) -> str:
        """The name of a process at its node agent."""
        return f"{self._job.name}.{name}"

    def _child(self, args: RoleArgs, role: str, place: str, restart: RestartPolicy) -> ChildSpec:
        """Make the child of one process. ``role``: its leader's."""
        limits, name, process = self._job.limits, args.name, self._process(args.name)
        leader = args.leader or name
        own = next(replica for replica in self._replicas(leader, role) if name in replica)
        place = place if own[0] == leader else "replica"
        group = [self._process(one) for one in own] if args.size > 1 else []

        async def start(context: Context) -> Running:
            if self._adopting:
                lent = place.startswith("node:")
                running = await self._adoption.find(context, name, leader, self._replicas(leader, role), lent=lent)
                if running is not None:
                    return running
            told = args
            if args.role == "trainer" and self._service is not None:  # a service listens elsewhere in each of its lives
                told = msgspec.structs.replace(args, service=await self._service())
            wanted = 0 if self._job.rollout.server_of(leader) else devices_wanted(self._job, role)
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
