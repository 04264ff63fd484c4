"""A simulated process ends as by SIGKILL and stands still as by SIGSTOP, and takes nobody else along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transport.address import PeerId
from transport.memory_transport import MemoryTransport
from transport.sim.loop import SimulatedLoop
from transport.sim.network import Cut, Disturbance, SimNetwork, Weather
from transport.sim.process import PROCESS, SimProcess
from transport.transport import DownReason, Frame, Lane

HEARTBEAT_S = 1.5


class Log:
    """What a peer hears, in whose process, and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []
        self.processes: set[str] = set()

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self._add(bytes(frames[0]).decode())

    def on_peer_up(self, peer: PeerId) -> None:
        self._add("up")

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self._add(f"down {reason.value}")

    def _add(self, what: str) -> None:
        process = PROCESS.get()
        self.processes.add(process.name if process is not None else "")
        self.heard.append((what, round(asyncio.get_running_loop().time(), 3)))


class Pair:
    """Processes a and b with a link between them."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.network = SimNetwork(weather=Weather(latency_s=0.01, jitter_s=0.0))
        self.processes = {name: SimProcess(name) for name in "ab"}
        self.logs = {name: Log() for name in "ab"}
        self.ends = {name: MemoryTransport(self.network, PeerId(name, n)) for n, name in enumerate("ab", 1)}

    async def link(self) -> Pair:
        for name in "ab":
            await self.processes[name].start(self.ends[name].start(self.logs[name]), "start")
        await self.processes["a"].start(self.ends["a"].connect("memory://b", timeout_s=5), "connect")
        await asyncio.sleep(0.1)
        return self

    def send(self, text: str, source: str = "a") -> None:
        target = self.ends["b" if source == "a" else "a"].peer
        self.processes[source].run(self.ends[source].send, target, Lane.MESSAGE, [text.encode()])

    def kill(self, name: str, *, silent: bool = False) -> None:
        self.loop.kill(self.processes[name])
        self.ends[name].abort(silent=silent)

    def heard(self, name: str) -> list[str]:
        return [what for what, _ in self.logs[name].heard if what != "up"]


def run(scenario: Callable[[SimulatedLoop], object], seed: int = 0) -> None:
    loop = SimulatedLoop(seed)
    try:
        loop.run_until_complete(scenario(loop))  # type: ignore[arg-type]
    finally:
        loop.dismantle()


def test_a_killed_process_runs_nothing_more_not_even_a_finally() -> None:
    async def main(loop: SimulatedLoop) -> None:
        did: list[str] = []

        async def work() -> None:
            loop.call_later(2, did.append, "a timer")
            try:
                await asyncio.create_task(asyncio.sleep(2), name="its child")
            finally:
                did.append("finally")

        async def stranger() -> None:
            await asyncio.sleep(3)
            did.append("a stranger")

        victim, other = SimProcess("victim"), SimProcess("other")
        victim.start(work(), "work")
        other.start(stranger(), "stranger")
        await asyncio.sleep(1)
        loop.kill(victim)
        await asyncio.sleep(5)
        assert did == ["a stranger"]

    run(main)


def test_a_process_that_is_killed_while_it_is_halted_before_its_first_step_is_gone_without_a_word() -> None:
    async def main(loop: SimulatedLoop) -> None:
        words: list[object] = []
        loop.set_exception_handler(lambda _, context: words.append(context))
        process = SimProcess("p")
        process.start(asyncio.sleep(0), "never begun")
        process.halt()
        await asyncio.sleep(1)
        loop.kill(process)
        await asyncio.sleep(1)
        assert words == []

    run(main)


def test_a_halted_process_does_later_in_order_what_became_due() -> None:
    async def main(loop: SimulatedLoop) -> None:
        did: list[tuple[int, float]] = []

        async def tick() -> None:
            for number in range(1, 5):
                loop.call_at(number, lambda n=number: did.append((n, loop.time())))

        process = SimProcess("p")
        await process.start(tick(), "tick")
        await asyncio.sleep(1.5)
        process.halt()
        await asyncio.sleep(2)
        assert [number for number, _ in did] == [1]
        process.go_on(loop)
        await asyncio.sleep(2)
        assert did == [(1, 1.0), (2, 3.5), (3, 3.5), (4, 4.0)]

    run(main)


def test_a_receiver_runs_in_its_own_process_and_not_in_the_sender_s() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        pair.send("hello")
        await asyncio.sleep(1)
        assert (pair.heard("b"), pair.logs["b"].processes) == (["hello"], {"b"})

    run(main)


def test_what_a_process_had_sent_arrives_after_its_death_and_then_the_news_of_it() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        pair.send("last words")
        pair.kill("a")
        pair.send("to nobody", "b")
        await asyncio.sleep(0.1)
        assert pair.heard("b") == ["last words", "down unreachable"]
        assert pair.heard("a") == []

    run(main)


def test_the_loss_of_power_is_noticed_by_the_heartbeats_alone() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        began_s = loop.time()
        pair.kill("a", silent=True)
        await asyncio.sleep(5)
        assert pair.logs["b"].heard[-1] == ("down unreachable", round(began_s + HEARTBEAT_S, 3))

    run(main)


def test_a_death_behind_a_cut_is_told_when_the_cut_is_mended() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        cut = Cut("a".__eq__, "b".__eq__)
        pair.network.cut(cut)
        pair.kill("a")
        await asyncio.sleep(0.5)
        assert pair.heard("b") == []
        pair.network.mend(cut)
        await asyncio.sleep(0.1)
        assert pair.heard("b") == ["down unreachable"]

    run(main)


def test_a_peer_that_is_halted_for_a_moment_gets_all_that_was_sent_and_for_longer_is_unreachable() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        for seconds, lost in ((1.0, False), (3.0, True)):
            pair.processes["b"].halt()
            pair.network.halt("b")
            pair.send(f"{seconds}")
            await asyncio.sleep(seconds)
            assert f"{seconds}" not in pair.heard("b")
            pair.processes["b"].go_on(loop)
            pair.network.go_on("b")
            await asyncio.sleep(0.1)
            assert (f"{seconds}" in pair.heard("b")) is not lost
            assert ("down unreachable" in pair.heard("a")) is lost
            assert ("down unreachable" in pair.heard("b")) is lost

    run(main)


def test_a_busy_peer_whose_heartbeats_go_on_is_not_given_up() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        pair.processes["b"].halt()
        pair.network.halt("b", heartbeats=True)
        pair.send("wait")
        await asyncio.sleep(60)
        pair.processes["b"].go_on(loop)
        pair.network.go_on("b")
        await asyncio.sleep(0.1)
        assert (pair.heard("b"), pair.heard("a")) == (["wait"], [])

    run(main)


def test_a_cut_covers_lives_that_begin_while_it_lasts() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        cut = Cut("a".__eq__, lambda peer: peer != "a")
        pair.network.cut(cut)
        newcomer = MemoryTransport(pair.network, PeerId("c", 3))
        await newcomer.start(Log())
        connecting = asyncio.create_task(newcomer.connect("memory://a", timeout_s=10))
        await asyncio.sleep(2)
        assert not connecting.done()
        pair.network.mend(cut)
        assert (await connecting).name == "a"

    run(main)


def test_a_disturbance_hits_its_ends_and_its_lane_until_it_is_calmed() -> None:
    async def main(loop: SimulatedLoop) -> None:
        pair = await Pair(loop).link()
        slow = Disturbance("a".__eq__, "b".__eq__, Lane.MESSAGE, delay_s=0.5)
        pair.network.disturb(slow)
        pair.ends["a"].send(pair.ends["b"].peer, Lane.SIGNAL, [b"urgent"])
        pair.send("late")
        await asyncio.sleep(0.1)
        assert pair.heard("b") == ["urgent"]
        await asyncio.sleep(1)
        pair.network.calm(slow)
        pair.send("soon")
        await asyncio.sleep(0.1)
        assert pair.heard("b") == ["urgent", "late", "soon"]

    run(main)


def test_tasks_of_a_set_run_in_an_order_that_the_seed_fixes_and_addresses_do_not() -> None:
    def order(seed: int) -> list[int]:
        done: list[int] = []

        async def main(_: SimulatedLoop) -> None:
            async def one(number: int) -> None:
                try:
                    await asyncio.sleep(100)
                finally:
                    done.append(number)

            with_padding = [object() for _ in range(seed % 7 * 100)]  # other addresses each time
            tasks = {asyncio.create_task(one(number)) for number in range(20)}
            del with_padding
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
            await asyncio.sleep(1)

        run(main, seed=5)
        return done

    assert order(1) == order(2) == order(3)
