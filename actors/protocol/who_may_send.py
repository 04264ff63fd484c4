"""The table of who may send which message over a link. It is part of the protocol: a message that is new gets a line.

The kinds of senders are explained in ``actors/core/senders.py``. A tag without kinds is said within a process only, or
is an answer: an answer is taken from whoever was asked, and from nobody else. The tags of the supervisors' messages
stand here too, as text, so that all of it can be read in one place (``docs/guides/security.md`` shows it).
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
_PROCESS = _ROLE | _TRAIN_SERVICE | _RANK
"""Every process that a node agent has started."""
_NODE = frozenset([SenderKind.AGENT])
_WITHIN = frozenset[SenderKind]()
"""Said within one process, or an answer."""

WHO_MAY_SEND: Final[dict[str, frozenset[SenderKind]]] = {
    # core
    "core.look": _HEAD,
    "core.renew_lease": _ROLE,
    "core.done": _WITHIN,
    "core.down": _WITHIN,
    "core.failure": _WITHIN,
    "core.lease_renewed": _WITHIN,
    "core.refusal": _WITHIN,
    "core.sight": _WITHIN,
    "core.target_gone": _WITHIN,
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
    "scheduler.acknowledged": _WITHIN,
    "scheduler.batch_issued": _WITHIN,
    "scheduler.committed": _WITHIN,
    "scheduler.data_ended": _WITHIN,
    "scheduler.give_up_evaluation": _WITHIN,
    "scheduler.end_of_grace": _WITHIN,
    "scheduler.environment_registered": _WITHIN,
    "scheduler.episode_leased": _WITHIN,
    "scheduler.episode_record": _WITHIN,
    "scheduler.end_of_notice": _WITHIN,
    "scheduler.issue_batch": _WITHIN,
    "scheduler.no_word": _WITHIN,
    "scheduler.progress": _WITHIN,
    "scheduler.query_progress": _WITHIN,
    "scheduler.registered": _WITHIN,
    "scheduler.request_checkpoint": _WITHIN,
    "scheduler.service_found": _WITHIN,
    "scheduler.set_paused": _WITHIN,
    "scheduler.tick": _WITHIN,
    "scheduler.turn_taken": _WITHIN,
    "scheduler.worker_ended": _WITHIN,
    "jobs.trouble": _ROLE,
    # to the job: its scheduler and the head's operator are in the same process
    "jobs.cancel": _WITHIN,
    "jobs.checkpoint": _WITHIN,
    "jobs.checkpoint_report": _WITHIN,
    "jobs.checkpoint_stored": _WITHIN,
    "jobs.event": _WITHIN,
    "jobs.evaluation_done": _WITHIN,
    "jobs.generation_ended": _WITHIN,
    "jobs.need_batch": _WITHIN,
    "jobs.need_evaluation": _WITHIN,
    "jobs.pause": _WITHIN,
    "jobs.report": _WITHIN,
    "jobs.resume": _WITHIN,
    "jobs.status": _WITHIN,
    "jobs.step_committed": _WITHIN,
    "jobs.step_planned": _WITHIN,
    "jobs.worker_released": _WITHIN,
    "jobs.worker_woken": _WITHIN,
    # to the metrics
    "metrics.event": _PROCESS,
    "metrics.process_health": _PROCESS,
    "metrics.samples": _SERVICE,
    "metrics.spans": _PROCESS,
    "metrics.evaluation_row": _WITHIN,
    "metrics.flush": _WITHIN,
    "metrics.flushed": _WITHIN,
    "metrics.step_row": _WITHIN,
    # to the trainer, the ranker, rewards and prompts
    "trainer.early_samples": _HEAD,
    "trainer.grant_groups": _HEAD,
    "trainer.step_granted": _HEAD,
    "scheduler.service_changed": _HEAD | _SERVICE,
    "ranker.observe_lengths": _HEAD,
    "ranker.score_prompts": _HEAD,
    "rewards.score": _HEAD,
    "rewards.scored": _WITHIN,
    "rewards.show_samples": _HEAD,
    "prompts.read": _HEAD,
    "prompts.prompts_read": _WITHIN,
    # to an environment worker
    "environments.begin_episodes": _HEAD,
    "environments.abandon_episodes": _HEAD,
    # to a training service: a trainer speaks for its own job
    "training.attach": _SERVICE,
    "training.call": _SERVICE,
    "training.committed": _SERVICE,
    "training.detach": _HEAD | _SERVICE,
    "training.query_service": _HEAD,
    "training.answer": _WITHIN,
    "training.attached": _WITHIN,
    "training.service_state": _WITHIN,
    # to a rank: from the leader of its group alone
    "ranks.follow": _ROLE,
    "ranks.order": _ROLE,
    "ranks.done": _WITHIN,
    # weights: a worker asks the server, and other workers that pass on what they have
    "weights.get_chunks": _WORKER,
    "weights.get_manifest": _WORKER,
    "weights.get_segment": _WORKER,
    "weights.publish": _SERVICE,
    "weights.query_versions": _SERVICE,
    "weights.segment_damaged": _WORKER,
    "weights.chunk": _WITHIN,
    "weights.manifest_reply": _WITHIN,
    "weights.published": _WITHIN,
    "weights.segment_ready": _WITHIN,
    "weights.versions": _WITHIN,
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
    "node.processes": _WITHIN,
    "node.spawn_reply": _WITHIN,
    "node.stop_reply": _WITHIN,
    "nodes.join": _NODE,
    "nodes.leave": _NODE,
    "nodes.joined": _WITHIN,
    # faults that are injected on purpose
    "faults.apply": _HEAD,
    "faults.signal_child": _HEAD,
    "faults.signal_node": _HEAD,
    "faults.slow_child": _HEAD,
    "faults.applied": _WITHIN,
    # the head to whoever keeps it alive
    "head.beacon": _HEAD,
    "head.ended": _HEAD,
    "head.progress": _HEAD,
    "head.ready": _HEAD,
    "head.heard": _WITHIN,
}


def guard_for(own: PeerId) -> Guard:
    """The guard of one of the product's processes."""
    return guard_of(own, WHO_MAY_SEND)
