"""How an actor lives and ends: start, stop, crash, children, timers, tasks, blocking calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import (
    CancellationSwallowed,
    HandlerCancelled,
    NameTaken,
    RefusalReason,
    Refused,
    RemoteError,
    SentNoReply,
    StartFailed,
    UnknownActor,
    WrongHandler,
)
from actors.core.kernel.blocking import BlockingCallStuck
from actors.core.message import Done, Message, message
from configs.limits import DEFAULT_LIMITS


@message("test_cell.go")
class Go(Message):
    how: str = ""


@message("test_cell.tick")
class Tick(Message):
    number: int = 0


class Plain(Actor):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.held = asyncio.Event()
        self.gate = asyncio.Event()

    async def on_start(self) -> None:
        self.log.append("start")

    async def on_stop(self) -> None:
        self.log.append("stop")

    @handles(Go)
    async def go(self, message: Go) -> None:
        self.log.append(message.how)
        match message.how:
            case "crash":
                raise ValueError("boom")
            case "stop":
                self.ctx.stop("completed")
            case "hold":
                self.held.set()
                await self.gate.wait()
            case "cancelled":
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            case _:
                pass


@pytest.fixture
async def system(make_system: Any) -> Any:
    return await make_system("one", limits=DEFAULT_LIMITS.model_copy(update={"stop_timeout_s": 0.2}))


async def test_an_actor_ends_with_the_reason_that_it_gives(system: Any) -> None:
    plain = Plain()
    ref = await system.spawn("a", plain)
    await ref.ask(Go(how="stop"), Done)
    assert (await system.wait_stopped("a", timeout_s=5)).reason == "completed"
    assert plain.log == ["start", "stop", "stop"]
    assert system.actors() == []


async def test_on_stop_runs_after_a_crash_too_and_the_name_is_free_again(system: Any) -> None:
    plain = Plain()
    ref = await system.spawn("a", plain)
    with pytest.raises(RemoteError):
        await ref.ask(Go(how="crash"), Done)
    exit_ = await system.wait_stopped("a", timeout_s=5)
    assert exit_.reason == "crashed"
    assert isinstance(exit_.error, ValueError)
    assert plain.log == ["start", "crash", "stop"]
    again = Plain()
    await (await system.spawn("a", again)).ask(Go(), Done)
    assert again.log == ["start", ""]


async def test_what_raises_in_on_start_fails_the_spawn_with_its_cause(system: Any) -> None:
    class Broken(Plain):
        async def on_start(self) -> None:
            raise OSError("no such file")

    broken = Broken()
    with pytest.raises(StartFailed) as caught:
        await system.spawn("a", broken)
    assert isinstance(caught.value.__cause__, OSError)
    assert broken.log == [], "what has not started is not stopped"
    await system.spawn("a", Plain())


async def test_a_start_that_takes_too_long_fails(make_system: Any) -> None:
    class Slow(Plain):
        async def on_start(self) -> None:
            await self.gate.wait()

    system = await make_system("slow", limits=DEFAULT_LIMITS.model_copy(update={"ready_timeout_s": 0.02}))
    with pytest.raises(StartFailed):
        await system.spawn("a", Slow())
    assert system.actors() == []


async def test_messages_that_come_during_the_start_wait_for_its_end(system: Any) -> None:
    class Early(Plain):
        async def on_start(self) -> None:
            self.ctx.ref(self.ctx.self_address).tell(Go(how="early"))
            await asyncio.sleep(0)
            self.log.append("start")

    early = Early()
    ref = await system.spawn("a", early)
    await ref.ask(Go(how="late"), Done)
    assert early.log == ["start", "early", "late"]


async def test_a_name_can_be_taken_once(system: Any) -> None:
    await system.spawn("a", Plain())
    with pytest.raises(NameTaken):
        await system.spawn("a", Plain())


async def test_who_never_lived_cannot_be_waited_for(system: Any) -> None:
    with pytest.raises(UnknownActor):
        await system.wait_stopped("nobody")


async def test_a_handler_that_does_not_end_is_cancelled_at_the_stop_deadline(system: Any) -> None:
    plain = Plain()
    ref = await system.spawn("a", plain)
    asked = asyncio.ensure_future(ref.ask(Go(how="hold"), Done))
    await plain.held.wait()
    assert (await system.stop_actor("a")).reason == "killed"
    with pytest.raises(SentNoReply):
        await asked
    assert plain.log == ["start", "hold", "stop"]
    assert system.counters()["actors_killed"] == 1


async def test_an_on_stop_that_hangs_does_not_keep_the_name(system: Any) -> None:
    class Clinging(Plain):
        async def on_stop(self) -> None:
            await self.gate.wait()

    await system.spawn("a", Clinging())
    exit_ = await system.stop_actor("a")
    assert isinstance(exit_.error, TimeoutError)
    await system.spawn("a", Plain())


async def test_an_actor_that_swallows_its_cancellation_is_left_behind_and_its_name_is_free(make_system: Any) -> None:
    class Stubborn(Plain):
        cancelled = 0

        @handles(Go)
        async def go(self, message: Go) -> None:
            self.held.set()
            while not self.gate.is_set():
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1

    limits = DEFAULT_LIMITS.model_copy(update={"stop_timeout_s": 0.02, "cancellations_max": 3})
    system = await make_system("a", limits=limits)
    stubborn = Stubborn()
    ref = await system.spawn("a", stubborn)
    asked = asyncio.ensure_future(ref.ask(Go(), Done))
    await stubborn.held.wait()
    ended = await system.stop_actor("a")
    assert isinstance(ended.error, CancellationSwallowed)
    assert (stubborn.cancelled, system.counters()["actors_left_behind"]) == (3, 1)
    with pytest.raises(SentNoReply):
        await asked
    await system.spawn("a", Plain())
    stubborn.gate.set()  # its task ends after all, and takes nobody's name with it
    await asyncio.sleep(0.01)
    assert list(system.actors()) == ["a"]


async def test_a_task_that_raises_crashes_the_actor_and_others_are_cancelled(system: Any) -> None:
    class Busy(Plain):
        cancelled = False

        async def on_start(self) -> None:
            self.ctx.start_task(self.fail(), "fail")
            self.ctx.start_task(self.run(), "run")

        async def fail(self) -> None:
            await self.gate.wait()
            raise KeyError("lost")

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True

    busy = Busy()
    await system.spawn("a", busy)
    busy.gate.set()
    exit_ = await system.wait_stopped("a", timeout_s=5)
    assert isinstance(exit_.error, KeyError)
    assert busy.cancelled


async def test_children_end_with_their_parent_youngest_first(system: Any) -> None:
    ended: list[str] = []

    class Child(Actor):
        def __init__(self, name: str) -> None:
            self.name = name

        async def on_stop(self) -> None:
            ended.append(self.name)

    class Parent(Plain):
        async def on_start(self) -> None:
            for name in ("first", "second"):
                await self.ctx.spawn(name, Child(name))

    ref = await system.spawn("parent", Parent())
    assert system.actors() == ["parent", "first", "second"]
    with pytest.raises(RemoteError):
        await ref.ask(Go(how="crash"), Done)
    await system.wait_stopped("parent", timeout_s=5)
    assert ended == ["second", "first"]
    assert system.actors() == []


async def test_the_system_stops_its_actors_youngest_first(make_system: Any) -> None:
    ended: list[str] = []

    class Named(Actor):
        async def on_stop(self) -> None:
            ended.append(self.ctx.self_address.name)

    system = await make_system("two")
    for name in "abc":
        await system.spawn(name, Named())
    await system.stop()
    assert ended == ["c", "b", "a"]
    with pytest.raises(StartFailed):
        await system.spawn("d", Named())


async def test_questions_that_were_not_begun_are_refused_at_the_stop(system: Any) -> None:
    plain = Plain()
    ref = await system.spawn("a", plain)
    working = asyncio.ensure_future(ref.ask(Go(how="hold"), Done))
    await plain.held.wait()
    waiting = asyncio.ensure_future(ref.ask(Go(), Done))
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(system.stop_actor("a"))
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await ref.ask(Go(), Done)
    assert refused.value.reason is RefusalReason.STOPPING
    plain.gate.set()
    assert await working == Done(), "the one that has begun is finished"
    with pytest.raises(Refused):
        await waiting
    await stopping


async def test_a_cancellation_that_nobody_sent_is_a_crash(system: Any) -> None:
    ref = await system.spawn("a", Plain())
    with pytest.raises(RemoteError) as caught:
        await ref.ask(Go(how="cancelled"), Done)
    assert caught.value.error_type == "HandlerCancelled"
    assert isinstance((await system.wait_stopped("a", timeout_s=5)).error, HandlerCancelled)


async def test_messages_to_oneself_come_later_unless_cancelled(system: Any) -> None:
    class Clock(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.ticks: list[int] = []

        async def on_start(self) -> None:
            self.ctx.send_after(0.02, Tick(number=2))
            self.ctx.send_after(0.01, Tick(number=1))
            cancelled = self.ctx.send_after(0.015, Tick(number=9))
            cancelled.cancel()
            cancelled.cancel()
            with pytest.raises(WrongHandler):
                self.ctx.send_after(0.0, Unheard())

        @handles(Tick)
        async def tick(self, message: Tick) -> None:
            self.ticks.append(message.number)
            if message.number == 2:
                self.held.set()

    clock = Clock()
    await system.spawn("a", clock)
    async with asyncio.timeout(5):
        await clock.held.wait()
    assert clock.ticks == [1, 2]


@message("test_cell.unheard")
class Unheard(Message):
    pass


async def test_concurrent_handlers_are_bounded(make_system: Any) -> None:
    class Wide(Plain):
        running = 0
        running_max = 0

        @handles(Tick)
        @concurrent
        async def tick(self, message: Tick) -> None:
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            if self.running == 3:
                self.held.set()
            await self.gate.wait()
            self.running -= 1

    system = await make_system("wide", limits=DEFAULT_LIMITS.model_copy(update={"concurrent_handlers": 3}))
    wide = Wide()
    ref = await system.spawn("a", wide)
    asked = [asyncio.ensure_future(ref.ask(Tick(number=n), Done)) for n in range(10)]
    await wide.held.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert wide.running_max == 3
    wide.gate.set()
    assert await asyncio.gather(*asked) == [Done()] * 10
    assert wide.running_max == 3


async def test_blocking_calls_run_in_order_on_one_thread_beside_the_loop(system: Any) -> None:
    class Computing(Plain):
        async def on_start(self) -> None:
            threads = [await self.ctx.run_blocking(threading.get_ident) for _ in range(3)]
            assert len({*threads}) == 1
            assert threads[0] != threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                await self.ctx.run_blocking(lambda: 1 / 0)
            assert await self.ctx.run_blocking(int, "ff", base=16) == 255

        async def on_stop(self) -> None:
            await self.ctx.run_blocking(self.log.append, "released on the thread")

    computing = Computing()
    await system.spawn("a", computing)
    await system.stop_actor("a")
    assert computing.log == ["released on the thread"]


async def test_a_blocking_call_that_is_stuck_is_reported_and_left_behind(system: Any) -> None:
    release = threading.Event()
    running = threading.Event()

    class Stuck(Plain):
        async def on_start(self) -> None:
            self.ctx.start_task(self.ctx.run_blocking(self.block), "block")

        def block(self) -> None:
            running.set()
            release.wait(10)

    await system.spawn("a", Stuck())
    await asyncio.to_thread(running.wait, 5)
    await system.stop_actor("a")
    assert system.counters()["threads_left_behind"] == 1
    release.set()


async def test_a_blocking_call_that_does_not_return_in_time_crashes_who_waits_for_it(make_system: Any) -> None:
    release = threading.Event()

    class Stuck(Plain):
        @handles(Go)
        async def go(self, message: Go) -> None:
            await self.ctx.run_blocking(release.wait, 10)

    system = await make_system("a", limits=DEFAULT_LIMITS.model_copy(update={"blocking_call_s": 0.02}))
    ref = await system.spawn("a", Stuck())
    with pytest.raises(RemoteError, match="has not returned within"):
        await ref.ask(Go(), Done)
    release.set()
    assert isinstance((await system.wait_stopped("a")).error, BlockingCallStuck)


async def test_handlers_that_cannot_work_are_refused_when_the_class_is_made() -> None:
    with pytest.raises(WrongHandler, match="async"):

        class _Sync(Actor):  # pyright: ignore[reportUnusedClass]
            @handles(Go)
            def go(self, message: Go) -> None: ...

    with pytest.raises(WrongHandler, match="two handlers"):

        class _Twice(Actor):  # pyright: ignore[reportUnusedClass]
            @handles(Go)
            async def one(self, message: Go) -> None: ...
            @handles(Go)
            async def two(self, message: Go) -> None: ...

    class NoTag(Message):
        pass

    with pytest.raises(WrongHandler, match="tag"):

        class _NoTag(Actor):  # pyright: ignore[reportUnusedClass]
            @handles(NoTag)
            async def go(self, message: NoTag) -> None: ...


async def test_a_subclass_inherits_and_overrides_handlers(system: Any) -> None:
    class Quiet(Plain):
        @handles(Go)
        async def go(self, message: Go) -> None:
            self.log.append("overridden")

    class Quieter(Quiet):
        pass

    actor = Quieter()
    await (await system.spawn("a", actor)).ask(Go(how="crash"), Done)
    assert actor.log == ["start", "overridden"]


async def test_a_log_that_fails_keeps_no_actor_from_ending(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a full disk: every call of it raises, and whoever waits for the end learns of it all the same."""
    from actors.core.kernel import cell

    class Full:
        def __getattr__(self, _: str) -> Any:
            raise OSError(28, "No space left on device")

    class StopFails(Plain):
        async def on_stop(self) -> None:
            raise ValueError("on_stop failed")

    monkeypatch.setattr(cell, "log", Full())
    for actor in (Plain(), StopFails()):
        ref = await system.spawn("crashes", actor)
        ref.tell(Go(how="crash"))
        assert (await system.wait_stopped("crashes", timeout_s=5)).reason == "crashed"
