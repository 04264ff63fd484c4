"""The table of who may send which message over a link, a part of the protocol: a new message gets a line here.

The kinds of senders are explained in ``actors/core/senders.py``. An answer is taken only from the actor that was asked.
A job's actor hears only what its own process says, since its scheduler and the head's operator are there. The
tags of the supervisors' messages stand here too, as text, so that all of it can be read in one place
(``docs/guides/security.md`` shows it).
"""

from __future__ import annotations

from typing import Final

from actors.core.senders import Guard, SenderKind, guard_of
from transport.address import PeerId

_HEAD = frozenset([SenderKind.HEAD])
_WORKER = frozenset([SenderKind.WORKER])
_SERVICE = frozenset([SenderKind.SERVICE])
_ROLE = _SERVICE | _WORKER
_RANK = frozenset([SenderKind.RANK])
_TRAIN_SERVICE = frozenset([SenderKind.TRAIN_SERVICE])
_MODEL_SERVER = frozenset([SenderKind.MODEL_SERVER])
_LEADER = _ROLE | _TRAIN_SERVICE
_PROCESS = _ROLE | _TRAIN_SERVICE | _RANK | _MODEL_SERVER | {SenderKind.SAMPLER}
"""Kinds of processes that a node agent has started."""
_NODE = frozenset([SenderKind.AGENT])

_SAID_WITHIN: Final = (
    "core.done", "core.down", "core.failure", "core.lease_renewed", "core.refusal", "core.sight", "core.target_gone",
    "scheduler.acknowledged", "scheduler.batch_issued", "scheduler.committed", "scheduler.data_ended",
    "scheduler.end_of_grace", "scheduler.end_of_notice", "scheduler.environment_registered",
    "scheduler.episode_leased", "scheduler.episode_record", "scheduler.give_up_evaluation", "scheduler.issue_batch",
    "scheduler.no_word", "scheduler.progress", "scheduler.query_progress", "scheduler.registered",
    "scheduler.request_checkpoint", "scheduler.service_found", "scheduler.set_paused", "scheduler.tick",
    "scheduler.turn_taken", "scheduler.worker_ended",
    "jobs.cancel", "jobs.checkpoint", "jobs.checkpoint_report", "jobs.checkpoint_stored", "jobs.evaluation_done",
    "jobs.event", "jobs.generation_ended", "jobs.need_batch", "jobs.need_evaluation", "jobs.pause", "jobs.report",
    "jobs.resume", "jobs.status", "jobs.step_committed", "jobs.step_planned", "jobs.worker_released",
    "jobs.worker_woken",
    "metrics.evaluation_row", "metrics.flush", "metrics.flushed", "metrics.step_row",
    "rewards.scored",
    "sampling.sampled",
    "serving.found", "serving.state",
    "prompts.prompts_read",
    "training.answer", "training.attached", "training.service_state",
    "ranks.done",
    "weights.chunk", "weights.manifest_reply", "weights.published", "weights.segment_ready", "weights.versions",
    "node.processes", "node.spawn_reply", "node.stop_reply",
    "nodes.joined",
    "faults.applied",
    "head.heard",
)  # fmt: skip
"""Tags that nobody may send over a link: they are sent within a process, or are answers."""

WHO_MAY_SEND: Final[dict[str, frozenset[SenderKind]]] = {
    **dict.fromkeys(_SAID_WITHIN, frozenset[SenderKind]()),
    # core
    "core.look": _HEAD,
    "core.renew_lease": _ROLE,
    # to the scheduler
    "scheduler.assignments_failed": _WORKER,
    "scheduler.checkpoint_taken": _SERVICE,
    "scheduler.commit_step": _SERVICE,
    "scheduler.cut_turn": _SERVICE,
    "scheduler.draining": _WORKER,
    "scheduler.episode_ended": _SERVICE,
    "scheduler.get_episode": _SERVICE,
    "scheduler.lease_episode": _SERVICE,
    "scheduler.leaving": _WORKER,
    "scheduler.length_scores": _SERVICE,
    "scheduler.lookup_service": _ROLE,
    "scheduler.open_step": _SERVICE,
    "scheduler.register_environment": _SERVICE,
    "scheduler.register_service": _SERVICE | _RANK,
    "scheduler.register_worker": _WORKER,
    "scheduler.take_turn": _SERVICE,
    "scheduler.token_report": _WORKER,
    "scheduler.version_available": _SERVICE,
    "scheduler.worker_asleep": _WORKER,
    "scheduler.worker_version": _WORKER,
    "jobs.trouble": _ROLE,
    # to the metrics
    "metrics.event": _PROCESS,
    "metrics.process_health": _PROCESS,
    "metrics.samples": _SERVICE,
    "metrics.spans": _PROCESS,
    # to the trainer, the ranker, rewards and prompts
    "trainer.early_samples": _HEAD,
    "trainer.grant_groups": _HEAD,
    "trainer.step_granted": _HEAD,
    "scheduler.service_changed": _HEAD | _SERVICE,
    "ranker.observe_lengths": _HEAD,
    "ranker.score_prompts": _HEAD,
    "rewards.score": _HEAD,
    "rewards.show_samples": _HEAD,
    "prompts.read": _HEAD,
    # to an environment worker
    "environments.begin_episodes": _HEAD,
    "environments.abandon_episodes": _HEAD,
    # to a sampler of snapshots
    "sampling.ask": _HEAD | _MODEL_SERVER,
    # between the head and the model server
    "serving.find": _MODEL_SERVER,
    "serving.listens": _MODEL_SERVER,
    "serving.query": _HEAD,
    # to a training service: a trainer speaks for its own job, the model server for its models
    "training.attach": _SERVICE | _MODEL_SERVER,
    "training.call": _SERVICE | _MODEL_SERVER,
    "training.committed": _SERVICE | _MODEL_SERVER,
    "training.detach": _HEAD | _SERVICE | _MODEL_SERVER,
    "training.query_service": _HEAD,
    # to a rank: from the leader of its group alone
    "ranks.follow": _LEADER,
    "ranks.order": _LEADER,
    # weights: a worker asks the server, and other workers that pass on what they have
    "weights.get_chunks": _WORKER,
    "weights.get_manifest": _WORKER,
    "weights.get_segment": _WORKER,
    "weights.publish": _SERVICE,
    "weights.query_versions": _SERVICE,
    "weights.segment_damaged": _WORKER,
    # to a rollout worker
    "rollout.assign": _HEAD,
    "rollout.drain": _HEAD,
    "rollout.pull_version": _HEAD,
    "rollout.reports_taken": _HEAD,
    "rollout.revoke": _HEAD,
    "rollout.set_asleep": _HEAD,
    # between supervisors, node agents and role processes
    "node.adopt": _HEAD,
    "node.list": _HEAD,
    "node.spawn": _HEAD,
    "node.stop": _HEAD,
    "node.process_exited": _NODE | {SenderKind.MACHINE},
    "node.process_beacon": _PROCESS,
    "node.process_ready": _PROCESS,
    "nodes.join": _NODE,
    "nodes.leave": _NODE,
    # faults that are injected on purpose
    "faults.apply": _HEAD,
    "faults.signal_child": _HEAD,
    "faults.signal_node": _HEAD,
    "faults.slow_child": _HEAD,
    # the head to the process that keeps it alive
    "head.beacon": _HEAD,
    "head.ended": _HEAD,
    "head.progress": _HEAD,
    "head.ready": _HEAD,
}


def guard_for(own: PeerId) -> Guard:
    """The guard of one of the product's processes."""
    return guard_of(own, WHO_MAY_SEND)
