"""One job on the cluster, from its submission to its summary.

start   model ready, a place on a training service if it names one
        ─▶ core (metrics, scheduler, job) ─▶ services and rollout workers, a process each (job_tree.py)
wait    until the job is done, a supervisor gives up, or the operator interrupts
stop    rollout ─▶ services ─▶ core ─▶ what is left in shared memory is removed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from actors.core.context import named_rng
from actors.core.errors import AskError
from actors.core.patience import Patience
from actors.core.system import ActorSystem
from actors.host.best_link import best_of
from actors.jobs.job import Job
from actors.protocol.job_news import JobEvent
from actors.protocol.jobs import CancelJob, CheckpointJob, CheckpointReport, JobReport, JobState
from actors.trainer import checkpoint
from actors.weights.segments import remove_segments
from configs.checks.rank_checks import check_rank_network
from configs.model_files import route_bytes, vocabulary
from configs.run_files import LOGS
from configs.schema import JobConfig
from supervisors.jobs.cost_meter import HOUR_S, CostMeter
from supervisors.jobs.device_needs import device_problems
from supervisors.jobs.job_news import JobListener, JobNews, OnProgress
from supervisors.jobs.job_tree import JobTree
from supervisors.jobs.orphaned_processes import OrphanedProcesses
from supervisors.jobs.service_places import ServicePlaces
from supervisors.jobs.start_words import start_words
from supervisors.machine.machine import LOCAL, Machine
from supervisors.machine.membership.nodes import Nodes
from supervisors.pool.slot_shares import WHOLE, PoolShare
from supervisors.preparation.abandonable import Abandonable
from supervisors.preparation.data_preparation import prepare_data
from supervisors.preparation.model_preparation import prepare_model
from supervisors.preparation.model_text import look_at_text
from supervisors.preparation.phase import Phase
from supervisors.preparation.reward_preparation import Trained, prepare_rewards
from supervisors.tree.errors import NeverServed, NoNode
from transport.address import ActorAddress

log = structlog.get_logger("headrace.job")


@dataclass(frozen=True)
class FormerLife:
    """What is known of an earlier head that ran this job, and whose processes may still run."""

    ended: str
    """Words for people on how it ended."""
    restarts: int = 0
    """Number of the job's restarts until then, that of the head included."""
    workers: int = 0
    """Number of rollout workers that was wanted last; 0: as the job file says."""
    functions: str = ""
    """Book of the job's functions (``providers/function_book.py``)."""


class JobRun:
    """A job on the cluster: ``start`` it, ``wait`` for its end, ``stop`` it in any case."""

    def __init__(
        self,
        system: ActorSystem,
        nodes: Nodes,
        job: JobConfig,
        run_dir: Path,
        *,
        machine: Machine = LOCAL,
        former: FormerLife | None = None,
        share: PoolShare = WHOLE,
        places: ServicePlaces | None = None,
        machines: str = "",
    ) -> None:
        """``places``: places on the head's training services; None: the head has no services. ``machines``: beginning
        of the names of machines that are this job's alone.
        """
        self.job, self.run_dir = job, run_dir
        self._system, self._nodes = system, nodes
        self._former = former
        self._news = JobNews(system, job.name)
        workers = former.workers if former is not None and former.workers else job.rollout.workers
        self._places = places if job.trainer.service is not None else None
        self._queued = False
        self.tree = JobTree(
            system, nodes, machine, job, run_dir, self._news, workers=workers, adopting=former is not None,
            service=self._service_address if self._places is not None else None, share=share,
            functions=former.functions if former is not None else "", machines=machines,
        )  # fmt: skip
        self._orphans = OrphanedProcesses(system, nodes, job.name, self.tree.children)
        self._before = Abandonable()
        self._prepared = job
        """The job as its processes get it: with the paths of data and reward models, once these are there."""
        self._rewards_trained: list[Trained] = []
        self._cost: CostMeter | None = None
        self._stop_counting: Callable[[], None] = lambda: None
        self._state = JobState.SUBMITTED
        self._told: dict[str, Any] = {}
        """Result of the job as its actor has told it last."""
        self._ended = asyncio.Event()
        """Set once the job is over and its record complete."""
        self._error = ""
        self._stopped = False

    @property
    def continued(self) -> bool:
        """Whether an earlier head has begun with the job."""
        return self._former is not None

    # ------------------------------------------------------------ start

    async def start(self, interrupted: asyncio.Event) -> bool:
        """Build the tree and wait until every process is ready. False: interrupted before it began.

        Raises:
            HeadraceError: the machine has too few devices, others can reach the network, the model could not be had, no
                service can serve it, a node is missing, or a process never became ready.
        """
        job, run_dir = self.job, self.run_dir
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        open_network = check_rank_network(job, self._system.endpoint)
        for field, wrong, fix in [*device_problems(job, self._nodes.devices_here), *open_network]:
            raise NoNode(f"{field}: {wrong}. {fix}")
        if self._former is None:
            remove_segments(run_dir)
            self._news.say(state="starting", steps=job.steps, run_dir=str(run_dir), message="preparing the model")
        # after an earlier head the model is there, and an interrupted run is first to take its checkpoint
        interrupted = interrupted if self._former is None else asyncio.Event()
        model_path = await self._before.run(self._prepare(), interrupted)
        self._news.say(phase="")  # the phase is over
        if model_path is not None and job.trainer.service is not None:
            await self._before.run(self._take_place(model_path), interrupted)
        if model_path is not None and job.cluster.nodes and not self._before.abandoned:
            await self._before.run(self._wait_for_nodes(), interrupted)
        if model_path is None or self._before.abandoned:
            self._news.say(state=str(self.state), message="interrupted before it began")
            return False
        if job.cluster.prices:
            self._count_cost()
        await self._system.spawn(f"news.{job.name}", JobListener(self._hear, self.tree.pool.worker_news))
        ends, said = await look_at_text(job, model_path, run_dir)
        known = {"vocabulary": vocabulary(job, model_path), "route_bytes": route_bytes(job, model_path)}
        await self.tree.start_core(self._job_maker(tuple(token.id for token in ends)), **known)
        self._news.say(core="ready")  # now the journal is this run's, and orders of its operator outlive this head
        for trained in self._rewards_trained:
            self._news.record("reward_model_trained", **trained)
        if self._former is None:
            for message in (*said, *start_words(job, self._nodes, self._system.endpoint)):
                self._news.say(message=message)
        else:
            self._news.record("head_restarted", restarts=self._former.restarts, why=self._former.ended)
        await self.tree.start_processes(model_path, self._prepared)
        if self._former is not None:
            self._orphans.start()
        return True

    async def _prepare(self) -> Path:
        """Prepare data, model and reward models; returns the model's directory."""
        job = await prepare_data(self.job, self.run_dir, self.say)
        model = await prepare_model(self.job, self.run_dir, self.say, self._show)
        self._prepared, self._rewards_trained = await prepare_rewards(job, self.run_dir, model, self.say, self._show)
        return model

    async def _take_place(self, model_path: Path) -> None:
        """Wait until a training service has room for the job.

        Raises:
            NeverServed: no service ever will, or there are none.
        """
        if self._places is None:
            raise NeverServed(
                f"trainer.service: {self.job.trainer.service} is named, but there are no services. "
                "Add --services FILE to the command that starts the head, or leave trainer.service out"
            )

        def say(reason: str) -> None:
            self._queued = True
            self._news.say(state=str(self.state), message=reason)

        try:
            job = self.job.model_copy(update={"critic": self._prepared.critic})  # its size counts
            await self._places.admit(job, self.run_dir, model_path, say)
        finally:
            self._queued = False

    async def _service_address(self) -> ActorAddress:
        assert self._places is not None, "only a job with a place asks for its service"
        return await self._places.address(self.job.name)

    async def _wait_for_nodes(self) -> None:
        """Wait for the nodes that the job wants; after a restart, only for those that come back soon."""
        count, wait_s = self.job.cluster.nodes, self.job.cluster.wait_s
        if self._former is None:
            await self._nodes.wait_for_remote(count, wait_s, self.job.name)
            return
        try:
            await self._nodes.wait_for_remote(count, min(wait_s, self.job.limits.nodes_return_s), self.job.name)
        except NoNode as error:
            self._news.say(message=f"going on without the nodes that the job wants: {error}")

    def _count_cost(self) -> None:
        """Count from now on what the job's machines cost."""
        self._cost = cost = CostMeter(self.job.cluster.prices, asyncio.get_running_loop().time)
        by_bill = self.tree.pool.billed_s.keys()

        def look() -> None:
            there = self._nodes.usable_by(self.job.name)
            for kind in cost.see([node.kind for node in there if node.kind not in by_bill]):
                self._news.record("kind_without_price", kind=kind)

        for kind in by_bill - self.job.cluster.prices.keys():
            self._news.record("kind_without_price", kind=kind)

        self._stop_counting = self._nodes.subscribe(look)
        look()

    def _take_cost(self) -> float:
        """The cost since the last call; functions cost what the step's row has just been billed."""
        assert self._cost is not None, "without prices nobody asks"
        prices, billed_s = self.job.cluster.prices, self.tree.pool.billed_s
        billed = sum(seconds * prices.get(kind, 0.0) / HOUR_S for kind, seconds in billed_s.items())
        return self._cost.take() + billed

    def _job_maker(self, stop_tokens: tuple[int, ...]) -> Callable[[], Job]:
        def make_job() -> Job:
            return Job(
                self.job,
                self.address("scheduler"),
                self.address("metrics"),
                run_dir=self.run_dir,
                stop_token_ids=stop_tokens,
                restarts=self.restarts,
                take_cost=self._take_cost if self._cost is not None else None,
                take_bill=self.tree.pool.take_bill,
                listener=self.address("news"),
            )

        return make_job

    def _hear(self, event: JobEvent) -> None:
        """Take in an event of the job's actor."""
        self._told = event.result
        self._state = JobState(str(event.result["state"]))
        if event.kind == "state" and self._state is JobState.FAILED:
            self.fail(str(event.fields["reason"]))
        else:
            self._news.tell(event)
        if event.kind == "ended":
            self._ended.set()

    # ------------------------------------------------------------ wait and stop

    async def wait(self, interrupted: asyncio.Event) -> dict[str, Any]:
        """Wait until the job is done; once ``interrupted`` is set, ask for a checkpoint and an early end.

        Returns the summary. A failure of the tree is in it, not raised.
        """
        ends = [
            asyncio.create_task(self._ended.wait(), name="job done"),
            asyncio.create_task(self._until_failed(), name="failed"),
        ]
        watcher = asyncio.create_task(self._until_interrupted(interrupted), name="interrupted")
        finished = asyncio.Event()
        for task in ends:
            task.add_done_callback(lambda _: finished.set())
        watcher.add_done_callback(lambda _: finished.set() if self.state.over else None)  # it could not be interrupted
        try:
            await finished.wait()  # bounded by the job itself: its steps, its supervisors, its operator
        finally:
            for task in (*ends, watcher):
                task.cancel()
        return self.summary()

    async def _until_failed(self) -> None:
        """Return when a supervisor has given up; the reason becomes the job's error."""
        self.fail(await self.tree.failed())

    async def _until_interrupted(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        silence_s = self.job.limits.stop_silence_s
        self._news.say(
            message="interrupted: finishing the step and taking a checkpoint; once more to end at once. "
            f"A step that stands still for {silence_s:g} s is left as it is"
        )
        await self.interrupt()
        await self._without_trainer()

    async def _without_trainer(self) -> None:
        """End a job that is to stop and whose trainer stays away, as on a lost node: nobody takes its checkpoint."""
        if self.job.only_evaluates:
            return
        look_s, silence_s = self.job.limits.stall_report_s, self.job.limits.stop_silence_s
        away_s = 0.0
        while away_s < silence_s and not self.state.over:
            await asyncio.sleep(look_s)
            away_s = 0.0 if self.tree.trainer_runs() else away_s + look_s
        if not self.state.over:
            self.fail(
                f"to stop, the job needs its trainer, which has been away for {away_s:.0f} s (limits.stop_silence_s): "
                "a resumed run goes on from the checkpoint before, with what was generated since"
            )

    def fail(self, why: str) -> None:
        """Mark the job as failed; the first reason is told, and is part of its summary."""
        if self._error:
            log.info("a further reason why a job has failed", job=self.job.name, why=why)
            return
        self._error = why
        self._news.say(state="failed", message=why)

    def abandon(self) -> bool:
        """End a run that still prepares its model or waits for a service; False if it is past that."""
        return self._before.abandon()

    async def interrupt(self) -> None:
        """Ask for a checkpoint and the end; ``wait`` returns when it is done.

        The job's actor or its scheduler may be away for as long as a restart takes: the job is asked until it stops.
        Within the restart window they are back, or their supervisor has given up; after it the job is failed.
        """
        limits = self.job.limits
        patience = Patience(limits, named_rng(self.job.seed, "interrupt"), limits.restart_window_s)
        while True:
            try:
                await self._system.ref(self.address("job")).ask(CancelJob(job=self.job.name), JobReport)
                return
            except AskError as error:
                if self.state is JobState.STOPPING or self.state.over:
                    return
                log.info("the interruption is repeated", job=self.job.name, after=str(error))
                if not await patience.again():
                    self.fail(f"could not be interrupted in good order: {error}")
                    return

    async def stop(self) -> None:
        """Take the tree down, youngest first, and remove what is left in shared memory. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._stop_counting()
        self._orphans.stop()
        await self.tree.stop()
        if self._places is not None:
            await self._places.leave(self.job.name)
        if f"news.{self.job.name}" in self._system.actors():
            await self._system.stop_actor(f"news.{self.job.name}")
        remove_segments(self.run_dir)
        if self.job.checkpoint.keep_best and self.state is JobState.FINISHED:
            async with asyncio.timeout(self.job.limits.checkpoint_timeout_s):
                await asyncio.to_thread(self._leave_best)

    def _leave_best(self) -> None:
        """Remove checkpoints that were kept for an evaluation, and turned out not to be the best."""
        best = best_of(checkpoint.checkpoints_directory(self.run_dir))
        if best is not None:
            checkpoint.prune(self.run_dir, self.job.checkpoint.keep, [checkpoint.step_of(best)])

    async def move_trainer(self) -> None:
        """Take a checkpoint, and start the trainer again from it on the service where the job's place is now."""
        self._news.say(message="the trainer moves to another service")
        ask = CheckpointJob(job=self.job.name)
        try:
            job = self._system.ref(self.address("job"))
            await job.ask(ask, CheckpointReport, timeout_s=self.job.limits.checkpoint_timeout_s)
        except AskError as error:  # then the trainer goes on from an older one
            log.info("no checkpoint before the move", job=self.job.name, error=str(error))
        await self.tree.restart_trainer()

    # ------------------------------------------------------------ what has become of it

    @property
    def state(self) -> JobState:
        if self._error:
            return JobState.FAILED
        if self._before.abandoned:
            return JobState.INTERRUPTED
        return JobState.QUEUED if self._queued else self._state

    def summary(self) -> dict[str, Any]:
        """The summary with which ``headrace run --json`` ends."""
        known: dict[str, Any] = {"job": self.job.name, "steps": 0}
        if self._told:
            known = self._told | {"restarts": self.restarts()}
        return known | {"state": str(self.state)} | ({"error": self._error} if self._error else {})

    def restarts(self) -> int:
        """Restarts of all of the job's actors and processes."""
        return (self._former.restarts if self._former is not None else 0) + self.tree.restarts()

    def address(self, part: str) -> ActorAddress:
        """Address of ``scheduler``, ``job``, ``metrics`` or ``news``."""
        return self.tree.address(part)

    # ------------------------------------------------------------ telling

    def subscribe(self, listener: OnProgress) -> Callable[[], None]:
        """Call ``listener`` with every progress map from now on; returns what ends that."""
        return self._news.subscribe(listener)

    def _show(self, phase: Phase) -> None:
        self._news.say(phase=phase.name, phase_done=phase.done, phase_total=phase.total, phase_unit=phase.unit)

    def say(self, message: str) -> None:
        """Give listeners a message for people."""
        self._news.say(message=message)
