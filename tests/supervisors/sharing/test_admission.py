"""Places of jobs on services: who waits, for what, in which order, and what a next life of the head knows of it."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.core.errors import NotSent
from actors.protocol.training import DetachBundle
from configs.schema import JobConfig
from configs.services import ServiceConfig, ServicesConfig
from supervisors.machine.machine import LOCAL
from supervisors.sharing.admission import Admission
from supervisors.sharing.service_register import ServiceRegister
from supervisors.tree.errors import NeverServed, ServiceGone
from tests.smallest_job import smallest_job


def service(name: str, **changes: Any) -> ServiceConfig:
    return ServiceConfig.model_validate({"name": name, "memory_bytes": 1600, "threads": 1} | changes)


def job(name: str, service: str = "train-0", **trainer: Any) -> JobConfig:
    return smallest_job(name=name, steps=9, trainer={"service": service, "threads": 1} | trainer)


class World:
    """An admission over services that are ready, and remembers what it asks of them."""

    def __init__(self, directory: Path, *services: ServiceConfig, former: bool = False, **rules: Any) -> None:
        self.directory = directory
        self.news: list[str] = []
        self.register = ServiceRegister(directory, on_news=self.news.append)
        if former:
            self.register.read()
        else:
            self.register.begin(ServicesConfig(services=list(services), **rules))
        self.asked: list[tuple[str, Any]] = []
        self.moved: list[str] = []
        self.services = [
            SimpleNamespace(config=config, draining=False, failure="") for config in self.register.now.rules.services
        ]

        self.away: set[str] = set()
        """Services that are not there just now."""
        self.isolated: list[str] = []
        """Jobs of which a service says that it has died in their calls."""

        async def ask(name: str, question: Any, _: Any) -> Any:
            if name in self.away:
                raise NotSent(f"the service {name} is not ready")
            self.asked.append((name, question))
            return SimpleNamespace(isolated=self.isolated)

        async def address(name: str) -> str:
            return f"address of {name}"

        pretended = cast(Any, SimpleNamespace(all=self.services, ask=ask, address=address, machine=LOCAL))
        self.admission = Admission(pretended, self.register, on_move=self.moved.append)
        if former:
            self.admission.go_on()
        self.said: dict[str, list[str]] = {}

    def model(self, parameters: int) -> Path:
        """A model of so many parameters, by the header of its weights."""
        path = self.directory / f"model-{parameters}"
        path.mkdir(exist_ok=True)
        header = json.dumps({"w": {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 0]}}).encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        return path

    def ask(self, wanted: JobConfig, parameters: int = 50) -> asyncio.Task[None]:
        """``wanted`` asks for a place."""
        self.admission.submitted(wanted.name)
        return self.again(wanted, parameters)

    def again(self, wanted: JobConfig, parameters: int = 50) -> asyncio.Task[None]:
        say = self.said.setdefault(wanted.name, []).append
        work = self.admission.admit(wanted, self.directory, self.model(parameters), say)
        return asyncio.create_task(work, name=wanted.name)

    def on(self) -> dict[str, str]:
        return {name: place.service for name, place in self.admission.places.items()}

    def detached(self) -> list[tuple[str, str]]:
        """Services that were told of a job's end, and which job's."""
        return [(name, question.job) for name, question in self.asked if isinstance(question, DetachBundle)]

    def noted(self) -> dict[str, tuple[str, ...]]:
        """What the register has of jobs whose end their service does not know yet."""
        fresh = ServiceRegister(self.directory)
        fresh.read()
        return fresh.now.over

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)


async def test_a_job_has_a_place_at_once_where_there_is_room_and_its_trainer_is_told_where(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0"))
    await world.ask(job("a"))
    assert (world.on(), world.said["a"]) == ({"a": "train-0"}, [])
    assert cast(str, await world.admission.address("a")) == "address of train-0"
    await world.admission.leave("a")
    assert world.on() == {}
    ((name, question),) = world.asked
    assert (name, question.job, question.keep, type(question)) == ("train-0", "a", False, DetachBundle)
    with pytest.raises(ServiceGone, match="a has no place"):
        await world.admission.address("a")


async def test_a_job_that_fits_later_waits_and_is_told_for_what_once_and_begins_when_there_is_room(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, service("train-0", host_bytes=3200))
    await world.ask(job("a"), 100)
    waiting = world.ask(job("b"), 100)
    await world.settle()
    world.admission.decide()
    assert world.said["b"] == ["queued: waits for 0.0016 MB on train-0"]
    (row,) = world.admission.queue()
    assert (row["job"], row["why"], row["state_bytes"]) == ("b", world.said["b"][0], 1600)
    await world.admission.leave("a")
    await waiting
    assert (world.on(), world.admission.queue()) == ({"b": "train-0"}, [])


async def test_a_model_that_never_fits_is_refused_with_the_bytes_needed_and_available(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0"))
    await world.ask(job("a"))
    with pytest.raises(
        NeverServed, match=r"can never be served: its trained state needs .* has .*: raise memory_bytes"
    ):
        await world.ask(job("big"), 101)
    assert world.on() == {"a": "train-0"}, "nothing else is disturbed"


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (job("x", "train-9"), "trainer.service: 'train-9' is no service of this head"),
        (job("x", threads=2), "trainer.threads: 2, but the service train-0 computes with 1"),
    ],
)
async def test_what_contradicts_its_service_is_refused(tmp_path: Path, wanted: JobConfig, says: str) -> None:
    world = World(tmp_path, service("train-0"))
    with pytest.raises(NeverServed, match=says):
        await world.ask(wanted)


async def test_a_quota_keeps_a_job_waiting_and_others_pass_it(tmp_path: Path) -> None:
    quotas = ({"project": "nlp", "jobs_max": 1},)
    rules = ServicesConfig.model_validate_json(json.dumps({"services": [], "quotas": quotas}))
    world = World(tmp_path, service("train-0"), quotas=rules.quotas)
    await world.ask(job("a", project="nlp"))
    second = world.ask(job("b", project="nlp"))
    await world.settle()
    assert world.said["b"] == ["queued: waits for a job of project nlp to end: its quota is 1"]
    await world.ask(job("c", project="other"))
    await world.admission.leave("a")
    await second
    assert world.on() == {"c": "train-0", "b": "train-0"}


async def test_priority_goes_first_and_among_equals_whoever_was_submitted_first(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0", jobs_max=1))
    await world.ask(job("a"))
    for name in ("b", "c", "urgent"):
        world.admission.submitted(name)
    late = [world.again(job("urgent", priority=5)), world.again(job("c")), world.again(job("b"))]
    order: list[str] = []
    await world.settle()
    assert [row["job"] for row in world.admission.queue()] == ["b", "c", "urgent"]
    for _ in late:
        (holder,) = world.on()
        await world.admission.leave(holder)
        await world.settle()
        order += world.on()
    assert order == ["urgent", "b", "c"]


async def test_a_service_that_is_drained_or_was_given_up_gets_no_job(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0"), service("train-1"))
    world.services[0].draining = True
    world.services[1].failure = "it was given up"
    waiting = world.ask(job("a", "auto"))
    await world.settle()
    assert world.on() == {}
    world.services[0].draining = False
    world.admission.decide()
    await waiting
    assert world.on() == {"a": "train-0"}


async def test_a_job_that_is_cancelled_while_it_waits_leaves_the_queue(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0", jobs_max=1))
    await world.ask(job("a"))
    waiting = world.ask(job("b"))
    await world.settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await world.admission.leave("b")
    assert world.admission.queue() == []
    await world.admission.leave("a")
    assert world.on() == {}


async def test_a_next_life_of_the_head_has_the_same_places_and_those_who_waited_wait_in_their_order(
    tmp_path: Path,
) -> None:
    first = World(tmp_path, service("train-0", jobs_max=1), service("train-1", threads=4))
    await first.ask(job("a"))
    (waits := first.ask(job("b"))).cancel()

    second = World(tmp_path, former=True)
    assert [one.config.name for one in second.services] == ["train-0", "train-1"]
    for name in ("b", "c", "a"):
        second.admission.submitted(name)
    second.admission.keep_only({"a", "b", "c"})
    waiting = [second.again(job("c")), second.again(job("b"))]
    await second.settle()
    await second.again(job("a"))  # it had begun: nobody has taken its place though it asks last
    assert (second.on(), [row["job"] for row in second.admission.queue()]) == ({"a": "train-0"}, ["b", "c"])
    second.admission.keep_only({"b", "c"})
    second.admission.decide()
    await waiting[1]
    assert second.on() == {"b": "train-0"}
    for task in (waits, *waiting):
        task.cancel()


async def test_a_job_whose_profile_is_known_makes_room_for_one_without_and_its_trainer_is_moved(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, service("train-0"), service("train-1"), cold_steps=2)
    await world.ask(job("a", "auto"))
    await world.ask(job("b", "auto"))
    assert sorted(world.on().values()) == ["train-0", "train-1"]
    waiting = world.ask(job("c", "auto"))
    await world.settle()
    assert world.said["c"] == ["queued: waits for a service of its own for its first 2 steps"]
    row = {"seconds": 10.0, "service_wait_s": 0.0, "switch_s": 0.0, "compute_s": 1.0}
    for step in (1, 2):
        for name in ("a", "b"):
            world.admission.heard(name, row | {"step": step})
    await world.settle()
    (moved,) = world.moved
    assert len({world.on()[name] for name in ("a", "b")}) == 1
    world.admission.decide()  # as the head has it do when the trainer has moved
    await waiting
    assert world.on()["c"] not in (world.on()["a"], world.on()["b"])
    assert world.admission.use_of(world.on()[moved]).jobs.keys() == {"a", "b"}
    (was,) = {"train-0", "train-1"} - {world.on()[moved]}
    assert (world.detached(), world.noted()) == ([], {was: (moved,)}), "its trainer computes there until it is moved"
    world.admission.service_is_ready(was)
    await world.settle()
    assert world.detached() == []
    await world.admission.address(moved)  # its next trainer starts, so that its last one has ended
    await world.settle()
    assert (world.detached(), world.noted()) == ([(was, moved)], {})


async def test_a_service_that_was_away_as_a_job_ended_is_told_once_it_is_there_and_not_again(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0"))
    for name in ("a", "b"):
        await world.ask(job(name))
    world.away.add("train-0")
    await world.admission.leave("a")
    await world.settle()
    assert (world.on(), world.detached(), world.noted()) == ({"b": "train-0"}, [], {"train-0": ("a",)})
    world.away.clear()
    for _ in range(2):
        world.admission.service_is_ready("train-0")
        await world.settle()
    assert (world.detached(), world.noted()) == ([("train-0", "a")], {})


async def test_the_end_of_another_job_is_an_occasion_to_say_what_could_not_be_said(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0"))
    for name in ("a", "b"):
        await world.ask(job(name))
    world.away.add("train-0")
    await world.admission.leave("a")
    world.away.clear()
    await world.admission.leave("b")
    await world.settle()
    assert sorted(world.detached()) == [("train-0", "a"), ("train-0", "b")]
    assert world.noted() == {}


async def test_a_job_that_is_there_again_is_not_ended_by_what_was_to_be_said_of_its_former_life(tmp_path: Path) -> None:
    world = World(tmp_path, service("train-0"))
    await world.ask(job("a"))
    world.away.add("train-0")
    await world.admission.leave("a")
    await world.ask(job("a"))
    world.away.clear()
    world.admission.service_is_ready("train-0")
    await world.settle()
    assert (world.on(), world.detached(), world.noted()) == ({"a": "train-0"}, [], {})


async def test_a_next_life_of_the_head_says_what_its_former_one_could_not_and_of_jobs_that_do_not_go_on(
    tmp_path: Path,
) -> None:
    first = World(tmp_path, service("train-0"))
    for name in ("a", "b", "c"):
        await first.ask(job(name))
    first.away.add("train-0")
    await first.admission.leave("a")
    second = World(tmp_path, former=True)
    second.away.add("train-0")
    second.admission.keep_only({"c"})
    await second.settle()
    assert (second.on(), second.noted()) == ({"c": "train-0"}, {"train-0": ("a", "b")})
    second.away.clear()
    second.admission.service_is_ready("train-0")
    await second.settle()
    assert sorted(second.detached()) == [("train-0", "a"), ("train-0", "b")]


async def test_nobody_joins_a_job_for_which_its_service_died_and_the_next_life_of_the_head_knows(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, service("train-0"))
    for name in ("a", "b"):
        await world.ask(job(name))
    world.isolated = ["a", "somebody"]
    world.admission.service_is_ready("train-0")
    await world.settle()
    assert world.on() == {"a": "train-0", "b": "train-0"}, "whoever is there stays"
    second = World(tmp_path, former=True)
    second.admission.submitted("a")
    waiting = second.ask(job("c"))
    await second.settle()
    says = ["queued: waits for a place on train-0, where a runs alone because services died under it"]
    assert second.said["c"] == says
    await second.again(job("a"))
    second.admission.decide()
    assert second.admission.places["a"].alone
    assert second.said["c"] == says
    await second.admission.leave("a")
    await waiting
    assert "c" in second.on()


async def test_a_full_disk_delays_no_job_and_is_told_once_and_what_it_did_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, service("train-0", jobs_max=1))
    await world.ask(job("a"))
    waiting = world.ask(job("b"))
    await world.settle()

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        await world.admission.leave("a")
        await waiting
        with pytest.raises(OSError, match="No space"):
            world.register.set_services([], ())
        assert world.register.now.rules.services, "a change of services is made only if it is noted"
    assert world.on() == {"b": "train-0"}
    (told,) = world.news
    assert "head.services.json cannot be written (No space left on device)" in told
    assert World(tmp_path, former=True).on() == {"a": "train-0"}

    world.admission.heard("b", {"service_wait_s": 0.0, "step": 1})
    assert world.news[1:] == [f"{tmp_path / 'head.services.json'} is written again"]
    assert World(tmp_path, former=True).on() == {"b": "train-0"}


async def test_a_damaged_register_is_told_and_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "head.services.json").write_text("{")
    with pytest.raises(ValueError, match=r"nobody knows which services there are.*Remove it"):
        ServiceRegister(tmp_path).read()
