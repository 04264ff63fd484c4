"""Sessions, tenants, sampling sessions and polls of the service, under virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actors.tinker import operations as op
from actors.tinker.errors import OperationRefused, Problem
from actors.tinker.paths import WeightsPath, checked_name, read_path
from actors.tinker.sampling import SamplingParameters
from actors.tinker.service import Pending
from tests.actors.tinker.tinker_world import BASE, FEW, World, call, run, spec, step, value

PROMPT = op.Array.of(np.arange(4, dtype=np.int32))


def sample(seed: int = 1, **fields: object) -> bytes:
    return op.encode(op.Sample(PROMPT, 1, SamplingParameters(max_tokens=3, seed=seed), **fields))  # type: ignore[arg-type]


async def refused(world: World, question, status: int) -> str:
    with pytest.raises(Problem) as problem:
        await question(world.service)
    assert problem.value.status == status
    return str(problem.value)


# ------------------------------------------------------------ sessions


def test_a_session_that_falls_silent_ends_with_its_models_and_keeps_what_was_saved(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        path = value(await world.result(model, 1, op.Save("kept")))["path"]
        request = await world.submit(model, 3, step())
        for _ in range(10):
            await asyncio.sleep(1000.0)
            await world.service.sessions.require("alice", session)
        poll = asyncio.create_task(world.service.retrieve("alice", request))
        await asyncio.sleep(3000.0)
        assert isinstance(await poll, Pending)
        assert "has ended" in await refused(world, lambda service: service.sessions.require("alice", session), 410)
        assert "has ended" in await refused(world, lambda service: service.line("alice", model), 410)
        assert "has ended" in await refused(world, lambda service: service.retrieve("alice", request), 410)
        assert world.faults.lives == 0
        again = await world.session()
        other, made = await world.service.create_model("alice", again, 0, None, "", {}, load=(path, False))
        assert value(await world.answer(made))["model_id"] == other

    run(tmp_path, story)


def test_a_poll_ends_at_once_when_its_session_does(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        request = await world.submit(model, 2, step())
        poll = asyncio.create_task(world.service.retrieve("alice", request))
        await asyncio.sleep(1.0)
        before_s = world.loop.time()
        await world.service.end_session("alice", session)
        with pytest.raises(Problem, match="has ended"):
            await poll
        assert world.loop.time() == before_s

    run(tmp_path, story, limits=FEW.model_copy(update={"tinker_poll_s": 1000.0}))


def test_a_poll_waits_for_its_answer_and_no_longer_than_its_limit(tmp_path):
    async def story(world: World) -> None:
        model = await world.model(await world.session())
        request = await world.submit(model, 2, step())
        began_s = world.loop.time()
        assert isinstance(await world.service.retrieve("alice", request), Pending)
        assert world.loop.time() - began_s == FEW.tinker_poll_s
        poll = asyncio.create_task(world.service.retrieve("alice", request))
        await asyncio.sleep(1.0)
        before_s = world.loop.time()
        await world.submit(model, 1, call(1))
        assert isinstance(await poll, op.Json)
        assert world.loop.time() == before_s

    run(tmp_path, story)


@pytest.mark.parametrize("request_id", ["", "1", "x/", "x/-1", "x/1e3", "/1", "x/" + "9" * 40, "x/٣"])
def test_what_is_no_request_id_is_a_wrong_request(tmp_path, request_id):
    async def story(world: World) -> None:
        assert "request_id" in await refused(world, lambda service: service.retrieve("alice", request_id), 400)

    run(tmp_path, story)


def test_sessions_and_models_of_a_tenant_are_bounded_and_others_are_served(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        await world.session()
        assert "sessions of yours" in await refused(world, lambda service: service.begin_session("alice", {}), 429)
        await world.session("bob")
        await world.model(session)
        ask = lambda service: service.create_model("alice", session, 1, spec(), BASE, {})  # noqa: E731
        assert "models of yours" in await refused(world, ask, 403)

    run(tmp_path, story, limits=FEW.model_copy(update={"tinker_sessions": 2, "tinker_models": 1}))


# ------------------------------------------------------------ tenants


def test_what_is_anothers_is_answered_as_what_does_not_exist(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        request = await world.submit(model, 1, op.Save("mine"))
        await world.answer(request)
        exported = value(await world.result(model, 2, op.Export(name="mine")))["path"]
        sampler = await world.service.create_sampler("alice", session, 0, path=exported, base_model=None)
        own = await world.session("bob")
        missing = model.replace("s-1", "s-99")
        for theirs, nobodys in [(model, missing)]:
            told = [
                await refused(world, lambda service, one=one: service.line("bob", one), 404)
                for one in (theirs, nobodys)
            ]
            assert told[0].replace(theirs, nobodys) == told[1]
            await refused(world, lambda service, one=theirs: service.model_row("bob", one), 404)
        await refused(world, lambda service: service.retrieve("bob", request), 404)
        await refused(world, lambda service: service.end_session("bob", session), 404)
        await refused(world, lambda service: service.create_model("bob", session, 5, spec(), BASE, {}), 404)
        load = (f"tinker://{model}/weights/mine", True)
        await refused(world, lambda service: service.create_model("bob", own, 0, None, "", {}, load=load), 404)
        await refused(world, lambda service: service.create_sampler("bob", own, 0, path=exported, base_model=None), 404)
        with pytest.raises(Problem, match="no sampling session"):
            world.service.sampler("bob", sampler)

    run(tmp_path, story)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\0", "-x", "a b", "x" * 129, "ä", "a\n"])
def test_a_name_that_could_lead_elsewhere_is_no_name(name):
    with pytest.raises(OperationRefused, match="path"):
        checked_name(name)
    with pytest.raises(OperationRefused, match="path"):
        read_path(f"tinker://s-1:train:0/weights/{name}")


@pytest.mark.parametrize(
    "path", ["", "tinker://", "tinker://a/weights", "tinker://a/weights/b/c", "tinker://a/other/b", "http://a/weights/b",
             "tinker:///weights/b", "a/weights/b", "tinker://a/external_weights/b"],
)  # fmt: skip
def test_what_names_no_weights_is_refused(path):
    with pytest.raises(OperationRefused, match="names no weights"):
        read_path(path)


def test_a_path_is_read_as_it_was_written():
    path = WeightsPath("s-1:train:0", "sampler_weights", "step_000010.final")
    assert read_path(str(path)) == path


# ------------------------------------------------------------ sampling


def test_snapshots_the_base_and_weights_in_flight_are_sampled_side_by_side(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)

        async def drawn(sampler: str, seq: int) -> op.Answer:
            return await world.answer(
                await world.service.sample(world.service.sampler("alice", sampler), seq, sample())
            )

        first = value(await world.result(model, 1, op.Export(session=f"{model}:snapshot:1")))["sampling_session_id"]
        moving = value(await world.result(model, 2, op.Export(session="fly", in_flight=True)))["sampling_session_id"]
        base = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        one, flying, plain = await drawn(first, 0), await drawn(moving, 0), await drawn(base, 0)
        assert one == flying != plain
        await world.result(model, 3, call(1))
        await world.result(model, 4, step())
        await world.result(model, 5, op.Export(session="fly again", in_flight=True))
        assert await drawn(first, 1) == one, "a snapshot never changes"
        assert await drawn(moving, 1) == await drawn("fly again", 0) != flying
        assert await drawn(base, 1) == plain

    run(tmp_path, story)


def test_a_sample_that_was_asked_twice_is_drawn_once_and_one_that_was_cut_off_again(tmp_path):
    async def story(world: World) -> op.Answer:
        session = await world.session()
        base = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        row = world.service.sampler("alice", base)
        requests = await asyncio.gather(*(world.service.sample(row, 7, sample()) for _ in range(3)))
        assert len(set(requests)) == 1
        first = await world.answer(requests[0])
        await world.service.sample(row, 7, sample(seed=9))
        assert await world.answer(requests[0]) == first
        assert world.sampler_faults.calls == 1
        cut_off = await world.service.sample(row, 8, sample())
        world.kill()
        await world.begin()
        assert await world.answer(cut_off) == first
        return first

    run(tmp_path, story)


def test_samples_that_fail_are_their_own_failed_futures_and_waiting_ones_are_bounded(tmp_path):
    async def story(world: World) -> None:
        world.sampler_faults.broken_at, world.sampler_faults.lost_at = {1}, {2}
        session = await world.session()
        base = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        row = world.service.sampler("alice", base)
        broken = await world.answer(await world.service.sample(row, 0, sample()))
        assert isinstance(broken, op.Failed) and not broken.of_user
        assert isinstance(await world.answer(await world.service.sample(row, 1, sample())), op.Samples)
        many = await asyncio.gather(
            *(world.service.sample(row, seq, sample()) for seq in range(2, 9)), return_exceptions=True
        )
        late = [one for one in many if isinstance(one, Problem)]
        assert late and all(one.status == 429 and "samples of yours wait" in str(one) for one in late)
        answers = [await world.answer(one) for one in many if isinstance(one, str)]
        assert all(isinstance(one, op.Samples) for one in answers)

    run(tmp_path, story, limits=FEW.model_copy(update={"tinker_waiting_samples": 3}))


def test_a_cancelled_sample_ends_in_the_sampler_and_is_not_drawn_by_the_next_life_either(tmp_path):
    async def story(world: World) -> None:
        gate = world.sampler_faults.gate = asyncio.Event()
        session = await world.session()
        base = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        row = world.service.sampler("alice", base)
        one, other = [await world.service.sample(row, seq, sample()) for seq in (0, 1)]
        while world.sampler_faults.calls < 2:
            await asyncio.sleep(0)
        poll = asyncio.ensure_future(world.answer(one))
        await refused(world, lambda service: service.cancel("bob", one), 404)
        await world.service.cancel("alice", one)
        answer = await poll
        assert isinstance(answer, op.Failed) and answer.of_user and "cancelled" in answer.error
        assert world.sampler_faults.given_up == 1
        early = asyncio.ensure_future(world.service.sample(row, 2, sample()))
        while not world.service._desk.waits(base, 2):
            await asyncio.sleep(0)
        await world.service.cancel("alice", f"{base}/2")
        assert isinstance(await world.answer(await early), op.Failed), "it was not stored yet when it was cancelled"
        gate.set()
        drawn = await world.answer(other)
        await world.service.cancel("alice", other)
        world.kill()
        calls = world.sampler_faults.calls
        await world.begin()
        assert await world.answer(one) == answer and await world.answer(other) == drawn
        assert world.sampler_faults.calls == calls

    run(tmp_path, story)


def test_what_a_client_leaves_and_cancels_makes_room_for_what_it_asks_next(tmp_path):
    """Ten thousand samples that nobody waits for: never more than the bound wait, and all can be given up."""

    async def story(world: World) -> None:
        world.sampler_faults.gate = asyncio.Event()
        session = await world.session()
        base = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        row = world.service.sampler("alice", base)
        for begin in range(0, 200, 50):
            taken = [await world.service.sample(row, seq, sample()) for seq in range(begin, begin + 50)]
            await refused(world, lambda service: service.sample(row, 9999, sample()), 429)
            await asyncio.gather(*(world.service.cancel("alice", one) for one in taken))
        assert not world.service._desk._tasks

    run(tmp_path, story, limits=FEW.model_copy(update={"tinker_waiting_samples": 50}))


def test_log_probabilities_of_the_last_tokens_alone(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        base = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        body = sample(prompt_logprobs=True, last_prompt_logprobs=2, topk=3)
        answer = await world.answer(await world.service.sample(world.service.sampler("alice", base), 0, body))
        assert isinstance(answer, op.Samples)
        logprobs = answer.sampled().prompt_logprobs
        assert logprobs is not None
        assert np.isnan(logprobs).tolist() == [True, True, False, False]

    run(tmp_path, story)


def test_the_snapshot_that_was_sampled_least_recently_goes_when_there_are_many(tmp_path):
    async def story(world: World) -> None:
        model = await world.model(await world.session())
        names = [f"snapshot {number}" for number in range(4)]
        for number, name in enumerate(names):
            await world.result(model, number + 1, op.Export(session=name))
        await world.service.sample(world.service.sampler("alice", names[0]), 0, sample())
        await asyncio.sleep(3 * FEW.tinker_look_s)
        assert [name for name in names if world.service._desk.knows(name)] == [names[0], names[2], names[3]]
        assert len(list((tmp_path / "models/1").glob("sampler-*"))) == 3

    run(tmp_path, story, limits=FEW.model_copy(update={"tinker_snapshots": 3}))
