"""Samples from many snapshots of one base model with one engine: side by side if it holds adapters, else by turns.

    sample ─▶ checked ─▶ snapshot known ─▶ queue of its snapshot ── its turn (``turns.py``) ─▶ engine ─▶ answer
                                               ▲                                                │
    run:  ┌─▶ aborts ─▶ next turn? load ─▶ score prompts, admit while slots are free ─▶ step ───┤
          └─────────────────────────────────────────────────────────────────────────────────────┘
                                               └── the engine failed: what ran fails, the engine is started anew

The torch engine holds adapters, so the base model and all adapters of it have one turn; whole models have one each. The
simulated engine holds none, nor does the torch engine for a model with experts.

Invariants
- The engine is touched by ``run`` alone (but for ``hurry``): weights, aborts and requests change between two steps.
- A turn begins when the engine computes nothing, and an adapter is dropped when nothing computes with it, so each
  sequence is of one snapshot from its first token to its last.
- In a turn a free slot goes to the snapshot with the fewest running sequences, and of those to the one that asked
  first; if there is no memory for its adapter, it waits until one is idle, and all others wait with it.
- A snapshot that cannot be loaded fails its own requests, and those alone; a request for which its weights give no
  numbers fails alone.
- A request under which the engine failed is not tried again: it may be the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from actors.core.patience import Patience
from actors.environments.errors import SourceUnreadable
from actors.jobs.stop_tokens import stop_token_ids
from actors.protocol.sampling import SampleRequest, SampleResult
from actors.rollout.engine import EngineSpec, RolloutEngine, StepOutput
from actors.rollout.engine_kinds import create_engine
from actors.rollout.errors import EngineError, EngineUnavailable, LogitsNotFinite, ModelUnreadable, WeightsMismatch
from actors.sampling.calls import Call, RunningSequence
from actors.sampling.errors import EngineLost, SamplerClosed, SnapshotUnusable
from actors.sampling.requests import Bounds, check_request, wrong
from actors.sampling.serving_engine import ServingEngine, start_serving
from actors.sampling.snapshots import RunBlocking, Snapshot, Snapshots
from actors.sampling.stop_texts import Decode, StopTexts, decoder_of
from actors.sampling.turns import TurnView, next_turn
from configs.limits import DEFAULT_LIMITS, Limits

log = structlog.get_logger("headrace.sampler")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSetup:
    """Says which engine a sampler has. ``spec`` has no adapter: each snapshot brings its own."""

    engine: str
    """Kind of the engine, a key of ``engine_kinds.py``."""
    spec: EngineSpec
    end_tokens: tuple[int, ...] | None = None
    """Tokens that end a sequence unless a request says others; None: as the model's files say."""


class SnapshotSampler:
    """Answers ``sample`` while ``run`` is running; see the module's docstring.

    Args:
        make: makes an engine without starting it; by default one of the setup's kind.
        decode: text of tokens; by default by the base model's tokenizer, which is read when a stop text comes.
        run_blocking: runs functions that read files; by default in threads.
    """

    def __init__(
        self,
        setup: SamplerSetup,
        *,
        limits: Limits = DEFAULT_LIMITS,
        rng: random.Random | None = None,
        run_blocking: RunBlocking = asyncio.to_thread,
        make: Callable[[], RolloutEngine] | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._setup, self._limits = setup, limits
        self._rng = rng or random.Random()
        self._run_blocking = run_blocking
        self._make = make or (lambda: create_engine(setup.engine))
        self._decode = decode
        self._snapshots = Snapshots(setup.spec.model_path, setup.spec.dtype, limits, run_blocking)
        self._patience = Patience(limits, self._rng)
        self._serving: ServingEngine | None = None
        self._bounds = Bounds(0, setup.spec.max_context_tokens, limits)
        self._end_tokens = setup.end_tokens or ()
        self._queues: dict[int, dict[Call, None]] = {}
        """Calls that wait, in the order of their arrival, by snapshot; one stays until the engine has all of it."""
        self._running: dict[int, RunningSequence] = {}
        self._gone: list[int] = []
        """Requests of the engine that are to be aborted."""
        self._numbers = itertools.count(1)
        self._turn_began_s, self._turn_has_served = 0.0, False
        self._failures = 0
        """Failures of the engine since a call was answered."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._over = ""
        """Reason why there are no more answers; empty while there are."""

    # ------------------------------------------------------------ what is asked

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample ``request.samples`` sequences. Cancelling it ends them.

        Raises:
            BadSampleRequest: a field cannot be served; nothing was computed.
            SnapshotUnusable: the snapshot is missing, or not one of this base model.
            EngineLost: the engine failed under it; asking again is safe.
            SamplerClosed: the sampler has ended, or is not started.
        """
        self._refuse_if_over()
        check_request(request, self._bounds)
        stop = request.stop
        texts = [one for one in stop or () if isinstance(one, str)]
        tokens = self._end_tokens if stop is None else tuple(one for one in stop if isinstance(one, int))
        decode = await self._decoder() if texts else None
        snapshot = await self._snapshots.opened(request.snapshot)
        self._refuse_if_over()
        call = Call(
            request,
            snapshot,
            seed=self._rng.getrandbits(63) if request.seed is None else request.seed,
            stop_tokens=tokens,
            stop_texts=lambda: StopTexts(decode, texts) if decode else None,
            context_tokens=self._bounds.context_tokens,
            since_s=_now(),
        )
        self._queues.setdefault(snapshot.version, {})[call] = None
        self._tell()
        try:
            return await call.answer
        finally:
            self._leave(call)

    async def _decoder(self) -> Decode:
        if self._decode is None:
            try:
                async with asyncio.timeout(self._limits.sampling_load_s):
                    self._decode = await self._run_blocking(decoder_of, self._setup.spec.model_path)
            except SourceUnreadable as error:
                raise wrong("stop", "texts", f"ids of tokens, since texts cannot be found here: {error}") from error
            except TimeoutError as error:
                raise EngineLost("the model's tokenizer was not read in time; ask again") from error
        assert self._decode is not None
        return self._decode

    def _refuse_if_over(self) -> None:
        if self._over or self._bounds.vocab == 0:
            raise SamplerClosed(f"the sampler answers nothing: {self._over or 'it is not started'}")

    def _tell(self) -> None:
        """Have ``run`` look at once what there is to do."""
        self._news.set()
        if self._serving is not None:
            self._serving.engine.hurry()

    def _leave(self, call: Call) -> None:
        """Forget ``call``, and end what the engine still computes for it."""
        queue = self._queues.get(call.snapshot.version, {})
        if call in queue:
            del queue[call]
        left = [one.number for one in call.sequences if self._running.pop(one.number, None) is not None]
        if left:
            self._gone += left
            self._tell()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engine. ``run`` must follow.

        Raises:
            EngineUnavailable: the engine cannot serve snapshots, or a library or device is missing.
            ModelUnreadable: the base model cannot be loaded.
            BadStopToken: the base model names no end token, and the setup none.
        """
        if self._setup.spec.adapter is not None:
            raise EngineUnavailable("a sampler's engine is started without an adapter: each snapshot brings its own")
        if self._setup.end_tokens is None:
            async with asyncio.timeout(self._limits.sampling_start_s):
                self._end_tokens = await self._run_blocking(stop_token_ids, self._setup.spec.model_path)
        await self._start_engine()

    async def _start_engine(self) -> None:
        self._serving = await start_serving(self._make, self._setup.spec, self._snapshots, self._limits)
        engine = self._serving.engine
        self._bounds = Bounds(
            engine.vocab, self._setup.spec.max_context_tokens, self._limits, engine.tells_top_logprobs
        )
        self._turn_began_s, self._turn_has_served = _now(), False

    async def run(self) -> None:
        """Serve until cancelled, or closed.

        Raises:
            EngineLost: the engine failed again and again; nothing is served any more.
        """
        self._task = asyncio.current_task()
        try:
            while not self._over:
                try:
                    if self._serving is None:
                        await self._start_engine()
                    else:
                        await self._advance(self._serving)
                except Exception as error:  # noqa: BLE001 - of any library below the engine
                    await self._failed(error)
        finally:
            self._end("it was ended, or its engine failed too often")

    async def close(self) -> None:
        """End all calls with SamplerClosed, and the engine. Idempotent."""
        self._end("it was closed")
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            async with asyncio.timeout(self._limits.close_timeout_s):
                await asyncio.gather(self._task, return_exceptions=True)
        await self._close_engine()

    def _end(self, why: str) -> None:
        self._over = self._over or why
        for call in self._calls():
            call.fail(SamplerClosed(f"the sampler answers nothing: {self._over}"))

    def _calls(self) -> list[Call]:
        """All calls that have no answer yet."""
        waiting = [call for queue in self._queues.values() for call in queue]
        return [*dict.fromkeys([*waiting, *(one.call for one in self._running.values())])]

    async def _close_engine(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.close()

    # ------------------------------------------------------------ the loop

    async def _advance(self, serving: ServingEngine) -> None:
        """Do what is next: begin a turn, or admit requests and make a step, or wait for news."""
        engine = serving.engine
        self._news.clear()
        engine.abort(self._gone)
        self._gone = []
        self._queues = {version: queue for version, queue in self._queues.items() if queue}
        asking = {version: next(iter(queue)) for version, queue in self._queues.items()}
        turns: dict[int, float] = {}
        for call in asking.values():
            turn = serving.turn_of(call.snapshot)
            turns[turn.version] = min(call.since_s, turns.get(turn.version, call.since_s))
        view = TurnView(serving.present.version, self._turn_began_s, engine.has_work, self._turn_has_served, turns)
        choice = next_turn(view, self._limits.sampling_patience_s, _now())
        if choice.load is not None:
            loads = (serving.turn_of(call.snapshot) for call in asking.values())
            await self._begin_turn(serving, next(turn for turn in loads if turn.version == choice.load))
            return
        if choice.admits:
            await self._admit(serving)
        if engine.has_work:
            async with asyncio.timeout(self._limits.engine_step_s):
                output = await engine.step()
            self._take(output)
        elif self._running:
            raise EngineError(f"the {engine.kind} engine has lost {len(self._running)} sequences")
        elif not self._queues:
            await self._news.wait()

    async def _admit(self, serving: ServingEngine) -> None:
        """Give the engine requests of the present turn, as long as it has free slots."""
        engine, scored_tokens = serving.engine, 0
        while len(self._running) < engine.slots and (call := self._next_call(serving)) is not None:
            queue, self._turn_has_served = self._queues[call.snapshot.version], True
            try:
                if not await serving.hold(call.snapshot, {one.call.snapshot.version for one in self._running.values()}):
                    return
            except (SnapshotUnusable, WeightsMismatch, ModelUnreadable) as error:
                serving.loading = None
                self._refuse(call.snapshot, error)
                continue
            if call.needs_scores:
                if scored_tokens >= self._limits.sampling_score_tokens:
                    return
                await self._score_prompt(serving, call, queue)
                scored_tokens += len(call.prompt)
            elif call in queue:  # it may have left meanwhile
                self._begin_one(serving, call, queue)

    def _next_call(self, serving: ServingEngine) -> Call | None:
        """The call that the next free slot is for, of those that the present turn is for; None: there is none."""
        running = Counter(one.call.snapshot.version for one in self._running.values())
        calls = [next(iter(queue)) for queue in self._queues.values() if queue]
        mine = [call for call in calls if serving.turn_of(call.snapshot) is serving.present]
        return min(mine, key=lambda call: (running[call.snapshot.version], call.since_s), default=None)

    def _begin_one(self, serving: ServingEngine, call: Call, queue: dict[Call, None]) -> None:
        serving.engine.add([call.begin_one(number := next(self._numbers), serving.adapter_of(call.snapshot))])
        self._running[number] = call.sequences[-1]
        if not call.left:
            del queue[call]

    async def _score_prompt(self, serving: ServingEngine, call: Call, queue: dict[Call, None]) -> None:
        call.is_begun = True
        try:
            async with asyncio.timeout(self._limits.engine_step_s):
                call.scores = await serving.score(call.prompt, call.request.top_prompt_logprobs, call.snapshot)
        except LogitsNotFinite as error:
            call.fail(_no_numbers(call, error))
            queue.pop(call, None)

    def _take(self, output: StepOutput) -> None:
        """Hand out the tokens of a step; those of sequences that have ended here already are dropped."""
        end = 0
        for number, count, finished in zip(
            output.requests.tolist(), output.counts.tolist(), output.finished.tolist(), strict=True
        ):
            begin, end = end, end + count
            sequence, tops = self._running.get(number), None if output.tops is None else output.tops[begin:end]
            if sequence is None or not sequence.take(
                output.tokens[begin:end], output.logprobs[begin:end], finished, tops
            ):
                continue
            del self._running[number]
            if not finished:
                self._gone.append(number)
            if sequence.call.answer_if_ended():
                self._failures = 0
                self._patience.begin_anew()

    # ------------------------------------------------------------ failures

    async def _begin_turn(self, serving: ServingEngine, snapshot: Snapshot) -> None:
        try:
            await serving.load(snapshot)
        except (SnapshotUnusable, WeightsMismatch, ModelUnreadable) as error:
            self._refuse(snapshot, error)
        serving.loading = None
        self._turn_began_s, self._turn_has_served = _now(), False

    def _refuse(self, snapshot: Snapshot, error: Exception) -> None:
        """Fail all calls of ``snapshot``, and all that come."""
        why = f"snapshot {snapshot.path} cannot be served: {error}"
        log.warning("a snapshot cannot be served", snapshot=str(snapshot.path), error=why)
        snapshot.refusal = why
        for call in self._calls():
            if call.snapshot is snapshot:
                call.fail(SnapshotUnusable(why))
        self._queues.pop(snapshot.version, None)

    async def _failed(self, error: Exception) -> None:
        """Fail the calls under which the engine has failed, and give the engine up; ``run`` starts another one.

        Raises:
            EngineLost: it has failed too often.
        """
        serving = self._serving
        if isinstance(error, LogitsNotFinite):
            for call in {self._running[number].call: None for number in error.requests if number in self._running}:
                call.fail(_no_numbers(call, error))
                self._leave(call)
            return
        self._failures += 1
        log.warning("the sampler's engine has failed", error=repr(error), failures=self._failures)
        lost = EngineLost(f"the engine failed under the request ({type(error).__name__}: {error}); ask again")
        for call in self._calls():
            if call.is_begun or (serving is not None and call.snapshot is serving.loading):
                call.fail(lost)
                self._queues.get(call.snapshot.version, {}).pop(call, None)
        self._running.clear()
        self._gone.clear()
        await self._close_engine()
        if self._failures > self._limits.sampling_restarts:
            raise EngineLost(f"the engine has failed {self._failures} times in a row, at last by {error!r}") from error
        await asyncio.sleep(self._patience.pause_s())


def _no_numbers(call: Call, error: LogitsNotFinite) -> SnapshotUnusable:
    return SnapshotUnusable(f"snapshot {call.snapshot.path} has no numbers for this prompt: {error}")


def _now() -> float:
    return asyncio.get_running_loop().time()
