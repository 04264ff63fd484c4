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
from actors.protocol.job_news import JobEvent, WorkerNews
from actors.protocol.jobs import CancelJob, CheckpointJob, CheckpointReport, JobReport, JobState
from actors.trainer import checkpoint
from actors.weights.segments import remove_segments
from configs.schema import JobConfig
from supervisors.jobs.abandonable import Abandonable
from supervisors.jobs.cost_meter import HOUR_S, CostMeter
from supervisors.jobs.data_preparation import prepare_data
from supervisors.jobs.device_needs import device_problems
from supervisors.jobs.job_news import JobListener, JobNews, OnProgress
from supervisors.jobs.job_tree import JobTree
from supervisors.jobs.model_preparation import prepare_model
from supervisors.jobs.model_text import look_at_text
from supervisors.jobs.orphaned_processes import OrphanedProcesses
from supervisors.jobs.phase import Phase
from supervisors.jobs.pool_share import WHOLE, PoolShare
from supervisors.jobs.reward_preparation import Trained, prepare_rewards
from supervisors.jobs.service_places import ServicePlaces
from supervisors.jobs.start_words import start_words
from supervisors.machine.machine import LOCAL, Machine
from supervisors.machine.nodes import Nodes
from supervisors.providers.function_book import KIND
from supervisors.tree.errors import NeverServed, NoNode
from transport.address import ActorAddress

log = structlog.get_logger("headrace.job")


@dataclass(frozen=True)
class FormerLife:
    """This is what is known of the head that ran this job before this one, and whose processes may still run."""

    ended: str
    """Words for people on how it ended."""
    restarts: int = 0
    """Number of restarts up to then, its own among them."""
    workers: int = 0
    """Number of rollout workers that was wanted last; 0: as the job file says."""
    functions: str = ""
    """Book of the job's functions."""


class JobRun:
    """A job run is a submitted job: ``start`` it, ``wait`` for its end, ``stop`` it in any case."""

    def __init__(
        self,
        system: ActorSystem,
        nodes: Nodes,
        job: JobConfig,
        run_dir: Path,
        *,
        on_progress: OnProgress | None,
        machine: Machine = LOCAL,
        former: FormerLife | None = None,
        share: PoolShare = WHOLE,
        places: ServicePlaces | None = None,
    ) -> None:
        """``places``: on the head's training services; None: it has none."""
        self.job, self.run_dir = job, run_dir
        self._system, self._nodes = system, nodes
        self._former = former
        self._news = JobNews(system, job.name, on_progress)
        workers = former.workers if former is not None and former.workers else job.rollout.workers
        self._places = places if job.trainer.service is not None else None
        self._queued = False
        self.tree = JobTree(
            system, nodes, machine, job, run_dir, self._news, workers=workers, adopting=former is not None,
            service=self._service_address if self._places is not None else None, share=share,
            functions=former.functions if former is not None else "",
        )  # fmt: skip
        self._orphans = OrphanedProcesses(system, nodes, job.name, self.tree.children)
        self._before = Abandonable()
        self._prepared = job
        """The job as its processes get it: once data and reward models are there, with their places."""
        self._rewards_trained: list[Trained] = []
        self._cost: CostMeter | None = None
        self._stop_counting: Callable[[], None] = lambda: None
        self._state = JobState.SUBMITTED
        self._told: dict[str, Any] = {}
        """Result of the job as its actor has told it last."""
        self._told_s = 0.0
        self._ended = asyncio.Event()
        """Set once the job is over and its record complete."""
        self._error = ""
        self._stopped = False

    @property
    def continued(self) -> bool:
        """A head before this one has begun with it."""
        return self._former is not None

    # ------------------------------------------------------------ start

    async def start(self, interrupted: asyncio.Event) -> bool:
        """Build the tree and wait until every process is ready. False: interrupted before it began.

        Raises:
            HeadraceError: the machine has too few devices, the model could not be had, no service can serve it, a node
                is missing, or a process never became ready.
        """
        job, run_dir = self.job, self.run_dir
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for field, wrong, fix in device_problems(job, self._nodes.devices_here):
            raise NoNode(f"{field}: {wrong}. {fix}")
        if self._former is None:
            remove_segments(run_dir)
            self._news.say(state="starting", steps=job.steps, run_dir=str(run_dir), message="preparing the model")
        # the model is there when there was a head before, and an interrupted run is to take its checkpoint
        interrupted = interrupted if self._former is None else asyncio.Event()
        model_path = await self._before.run(self._prepare(), interrupted)
        self._news.say(phase="")  # it is over
        if model_path is not None and job.trainer.service is not None:
            await self._before.run(self._take_place(model_path), interrupted)
        if model_path is None or self._before.abandoned:
            self._news.say(state=str(self.state), message="interrupted before it began")
            return False
        if job.cluster.nodes:
            await self._wait_for_nodes()
        if job.cluster.prices:
            self._count_cost()
        await self._system.spawn(f"news.{job.name}", JobListener(self._hear, self._hear_workers))
        ends, said = await look_at_text(job, model_path, run_dir)
        await self.tree.start_core(self._job_maker(tuple(token.id for token in ends)))
        self._news.say(core="ready")  # and the journal is this run's: what its operator wants now outlives this head
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
        """Have data, model and reward models here; returns the model's directory."""
        job = await prepare_data(self.job, self.run_dir, self.say)
        model = await prepare_model(self.job, self.run_dir, self.say, self._show)
        self._prepared, self._rewards_trained = await prepare_rewards(job, self.run_dir, model, self.say, self._show)
        return model

    async def _take_place(self, model_path: Path) -> None:
        """Wait until a training service has room for the job.

        Raises:
            NeverServed: none ever will, or there are no services.
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
        """Those that the job wants; after a restart, those that come back soon, with what they run."""
        count, wait_s = self.job.cluster.nodes, self.job.cluster.wait_s
        if self._former is None:
            await self._nodes.wait_for_remote(count, wait_s)
            return
        try:
            await self._nodes.wait_for_remote(count, min(wait_s, self.job.limits.nodes_return_s))
        except NoNode as error:
            self._news.say(message=f"going on without the nodes that the job wants: {error}")

    def _count_cost(self) -> None:
        """From now on, what the machines that are there cost."""
        self._cost = cost = CostMeter(self.job.cluster.prices, asyncio.get_running_loop().time)
        by_bill = {KIND} if self.tree.functions is not None else set[str]()

        def look() -> None:
            for kind in cost.see([node.kind for node in self._nodes.present if node.kind not in by_bill]):
                self._news.record("kind_without_price", kind=kind)

        for kind in by_bill - self.job.cluster.prices.keys():
            self._news.record("kind_without_price", kind=kind)

        self._stop_counting = self._nodes.subscribe(look)
        look()

    def _take_cost(self) -> float:
        """What was spent since the last time: of functions, what the row has just been billed."""
        assert self._cost is not None, "without prices nobody asks"
        functions, price = self.tree.functions, self.job.cluster.prices.get(KIND, 0.0)
        return self._cost.take() + (functions.newly_billed_s * price / HOUR_S if functions is not None else 0.0)

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
                take_bill=self.tree.functions.take_bill if self.tree.functions is not None else None,
                listener=self.address("news"),
            )

        return make_job

    def _hear_workers(self, news: WorkerNews) -> None:
        """What the job's scheduler says of its workers: nobody but functions is started or ended by it."""
        if self.tree.functions is not None:
            self.tree.functions.hear(news)

    def _hear(self, event: JobEvent) -> None:
        """What the job's actor says."""
        self._told, self._told_s = event.result, asyncio.get_running_loop().time()
        self._state = JobState(str(event.result["state"]))
        if event.kind == "state" and self._state is JobState.FAILED:
            self.fail(str(event.fields["reason"]))
        else:
            self._news.tell(event)
        if event.kind == "ended":
            self._ended.set()

    # ------------------------------------------------------------ wait and stop

    async def wait(self, interrupted: asyncio.Event) -> dict[str, Any]:
        """Until the job is done; the first set of ``interrupted`` asks for a checkpoint and an early end.

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
        self._news.say(message="interrupted: finishing the step and taking a checkpoint; once more to end at once")
        await self.interrupt()

    def fail(self, why: str) -> None:
        """The job could not be started or kept; the first reason is told, and is part of its summary."""
        if self._error:
            log.info("a further reason why a job has failed", job=self.job.name, why=why)
            return
        self._error = why
        self._news.say(state="failed", message=why)

    def abandon(self) -> bool:
        """End a run that has not begun, as its model is prepared or a service is full; False if it is past that."""
        return self._before.abandon()

    async def interrupt(self) -> None:
        """Ask for a checkpoint and the end; ``wait`` returns when it is done.

        The job or its scheduler may be away for as long as a restart takes: it is asked until it stops. Within the
        restart window they are back, or their supervisor has given up; from then on the job is failed.
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
        """Its place is on another service now: after a checkpoint, which the trainer's next life goes on from there."""
        self._news.say(message="the trainer moves to another service")
        ask = CheckpointJob(job=self.job.name)
        try:
            job = self._system.ref(self.address("job"))
            await job.ask(ask, CheckpointReport, timeout_s=self.job.limits.checkpoint_timeout_s)
        except AskError as error:  # then it goes on from an older one
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
        """What ``headrace run --json`` ends with."""
        known: dict[str, Any] = {"job": self.job.name, "steps": 0}
        if self._told:
            known = self._told | {"restarts": self.restarts()}
            if not self._state.over:
                known["seconds"] = round(known["seconds"] + asyncio.get_running_loop().time() - self._told_s, 3)
        return known | {"state": str(self.state)} | ({"error": self._error} if self._error else {})

    def restarts(self) -> int:
        """Restarts of all of the job's actors and processes."""
        return (self._former.restarts if self._former is not None else 0) + self.tree.restarts()

    def address(self, part: str) -> ActorAddress:
        """Address of ``scheduler``, ``job``, ``metrics`` or ``news``."""
        return self.tree.address(part)

    # ------------------------------------------------------------ telling

    def subscribe(self, listener: OnProgress) -> Callable[[], None]:
        """Hear of every progress map from now on; returns how to stop."""
        return self._news.subscribe(listener)

    def _show(self, phase: Phase) -> None:
        self._news.say(phase=phase.name, phase_done=phase.done, phase_total=phase.total, phase_unit=phase.unit)

    def say(self, message: str) -> None:
        """Tell whoever listens, for people."""
        self._news.say(message=message)
