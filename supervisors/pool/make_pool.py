"""Builds the pool that a job asks for: only this file knows which parts a pool has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from configs.schema import JobConfig
from supervisors.pool.functions import Functions
from supervisors.pool.node_workers import NodeWorkers
from supervisors.pool.pool import Pool, PoolPart
from supervisors.pool.replica_moves import ReplicaMoves
from supervisors.pool.resizing import Resizing
from supervisors.pool.rollout_workers import News
from supervisors.pool.slot_shares import PoolShare

if TYPE_CHECKING:
    from supervisors.machine.membership.nodes import Nodes
    from supervisors.pool.rollout_workers import RolloutWorkers


def make_pool(
    job: JobConfig,
    nodes: Nodes,
    rollout: RolloutWorkers,
    news: News,
    *,
    wanted: int,
    share: PoolShare,
    functions: str,
    machines: str,
    trainer_runs: Callable[[], bool],
    restart_trainer: Callable[[], Awaitable[None]],
    now: Callable[[], float],
) -> Pool:
    """Build a job's pool.

    Args:
        wanted: workers on machines that stay.
        share: this job's share of the machines that come and go.
        functions: the book of the functions that a former life of the head has started.
        machines: beginning of the names of the job's own machines.
        restart_trainer: ends the trainer in good order, and starts it again.
        now: the clock.
    """
    scheduling = job.scheduling
    pool, parts = Pool(rollout, news, wanted), list[PoolPart]()
    node_workers: NodeWorkers | None = None
    if job.trainer_machines > 1 and not job.only_evaluates:
        trainer = f"{job.name}.trainer"
        parts.append(ReplicaMoves(nodes, trainer, news, runs=trainer_runs, restart=restart_trainer, now=now))
    if job.cluster.place_rollout == "elastic":
        ranks = job.rollout.tensor_parallel
        node_workers = NodeWorkers(
            nodes, rollout, news, job=job.name, limits=job.limits, now=now, share=share, ranks=ranks
        )  # fmt: skip
        parts.append(node_workers)
    if job.provider.kind == "functions":
        parts.append(Functions(job, nodes, news, now=now, former=functions, machines=machines))
    balanced = scheduling.workers_max is not None and scheduling.policy != "planned"
    if balanced or (scheduling.seeding and node_workers is not None):
        parts.append(Resizing(job, nodes, rollout, pool, node_workers, news))
    pool.add(parts)
    return pool
