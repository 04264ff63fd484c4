"""Quotas: what is over a rate waits, what is over a number or over bytes is refused, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.tinker import operations as op
from actors.tinker.errors import Problem
from actors.tinker.service import Pending
from actors.tinker.tenants import Rate
from configs.tenants import TenantsConfig
from tests.actors.tinker.http_world import LIMITS, HttpWorld
from tests.actors.tinker.tinker_world import BASE, FEW, World, call, run, simulated, spec, step, value

SLOW = FEW.model_copy(update={"tinker_burst_s": 1.0})
TEN = call(*range(10))
"""A call of ten tokens."""


def quotas(**of_alice: float) -> TenantsConfig:
    return TenantsConfig.model_validate({"tenants": [{"name": "alice", **of_alice}]})


async def seconds(world: World, tenant: str, calls: int, number: int = 0) -> float:
    """Time that so many calls of one model take, all of which are under way together."""
    model = await world.model(await world.session(tenant), tenant, number)
    began_s = world.loop.time()
    asked = [await world.submit(model, seq, TEN, tenant) for seq in range(1, calls + 1)]
    for request in asked:
        assert isinstance(await world.answer(request, tenant), op.Losses)
    return world.loop.time() - began_s


# ------------------------------------------------------------ tokens in a second


def test_calls_over_a_tenants_rate_wait_and_those_of_another_do_not(tmp_path):
    async def story(world: World) -> None:
        alice, bob = await asyncio.gather(seconds(world, "alice", 12), seconds(world, "bob", 12))
        assert 10.0 <= alice < 11.0, "two calls are in the burst, and each of the ten others costs a second"
        assert bob < 1.0

    run(tmp_path, story, limits=SLOW, tenants=quotas(training_tokens_per_s=10))


def test_models_of_one_tenant_share_its_rate(tmp_path):
    async def story(world: World) -> None:
        both = await asyncio.gather(seconds(world, "alice", 6), seconds(world, "alice", 6))
        assert 10.0 <= max(both) < 11.0

    run(tmp_path, story, limits=SLOW, tenants=quotas(training_tokens_per_s=10))


def test_who_waits_for_a_rate_is_told_so_and_the_wait_is_no_computing(tmp_path):
    async def story(world: World) -> None:
        model = await world.model(await world.session())
        asked = [await world.submit(model, seq, TEN) for seq in range(1, 4)]
        pending = await world.service.retrieve("alice", asked[-1])
        assert isinstance(pending, Pending)
        assert pending.paused
        assert "your quota is 0.1 training tokens/s" in pending.why
        assert [row["why"] for row in world.service.rows()] != [""]
        for request in asked:
            await world.answer(request)
        spent = (await world.service.uses())["alice"]
        assert spent["wait_s"] == pytest.approx(199.0, abs=1.0)
        assert spent["compute_s"] < 1.0
        assert not world.service.tenants.why_held("alice", model)

    run(tmp_path, story, limits=SLOW, tenants=quotas(training_tokens_per_s=0.1))


def test_what_computes_no_tokens_passes_at_once_and_an_ended_session_gives_its_tokens_back(tmp_path):
    async def story(world: World) -> None:
        idle, session = await world.model(await world.session()), await world.session()
        one, other = await world.model(session, number=0), await world.model(session, number=1)
        await world.result(one, 1, call(*range(60)))
        await world.submit(other, 1, call(*range(60)))
        await world.submit(one, 2, call(*range(60)))
        await asyncio.sleep(0.5)
        began_s = world.loop.time()
        await world.result(idle, 1, op.Save("kept"))
        assert world.loop.time() - began_s < 0.5
        await world.service.end_session("alice", session)
        await world.result(idle, 2, TEN)
        assert 58.0 < world.loop.time() - began_s < 60.0, "for the call that was computed alone"

    run(tmp_path, story, limits=SLOW, tenants=quotas(training_tokens_per_s=1))


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 200)), min_size=1, max_size=30), st.sampled_from([0.1, 1, 60])
)
def test_no_span_of_time_has_more_tokens_than_rate_and_burst_allow(calls: list[tuple[float, int]], burst_s: float):
    per_s = 20.0
    begun: list[tuple[float, int]] = []

    async def taken(rate: Rate, number: int, tokens: int) -> None:
        await rate.take(str(number), tokens)
        begun.append((asyncio.get_running_loop().time(), tokens))

    async def story() -> None:
        rate, tasks = Rate(per_s, burst_s), []
        for number, (pause_s, tokens) in enumerate(calls):
            await asyncio.sleep(pause_s)
            tasks.append(asyncio.create_task(taken(rate, number, tokens)))
        await asyncio.gather(*tasks)

    with simulated() as loop:
        loop.run_until_complete(story())
    assert [tokens for _, tokens in begun] == [tokens for _, tokens in calls], "in the order in which they came"
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            span_s = begun[last][0] - begun[first][0]
            before_the_last = sum(tokens for _, tokens in begun[first:last])
            assert before_the_last <= per_s * (span_s + burst_s) + 0.1


# ------------------------------------------------------------ numbers


def test_models_alive_are_bounded_by_the_tenants_own_quota_then_by_that_of_others(tmp_path):
    config = TenantsConfig.model_validate({"default": {"models": 1}, "tenants": [{"name": "alice", "models": 2}]})

    async def story(world: World) -> None:
        for tenant, most in (("alice", 2), ("bob", 1)):
            session = await world.session(tenant)
            for number in range(most):
                await world.model(session, tenant, number)
            with pytest.raises(Problem, match=f"{most} models of yours are alive") as problem:
                await world.service.create_model(tenant, session, most, spec(), BASE, {})
            assert problem.value.status == 403

    run(tmp_path, story, tenants=config)


async def test_requests_at_once_are_bounded_by_the_tenants_quota_and_a_paused_one_is_told_so(tmp_path):
    limits = LIMITS.model_copy(update={"tinker_poll_s": 0.2, "tinker_burst_s": 0.001})
    tenants = quotas(requests=1, training_tokens_per_s=0.01)
    async with HttpWorld(tmp_path, limits, tenants) as world:
        service = world.server.service
        session = await service.begin_session("alice", {})
        model, _ = await service.create_model("alice", session, 0, spec(), BASE, {})
        line = await service.line("alice", model)
        asked = [await service.submit(line, seq, op.encode(TEN)) for seq in (1, 2, 3)]
        async with world.client() as client:

            async def polled() -> tuple[int, dict]:
                async with client.post("retrieve_future", json={"request_id": asked[-1]}) as response:
                    return response.status, await response.json()

            answers = sorted(await asyncio.gather(polled(), polled()), key=lambda answer: answer[0])
        assert answers[0][0] == 408
        assert answers[0][1]["queue_state"] == "paused_rate_limit"
        assert "training tokens/s" in answers[0][1]["queue_state_reason"]
        assert answers[1][0] == 429
        assert "1 requests of yours are being answered" in answers[1][1]["error"]


# ------------------------------------------------------------ bytes


def test_a_save_over_the_quota_is_refused_by_what_can_go_until_it_has_gone(tmp_path):
    async def story(world: World) -> None:
        model = await world.model(await world.session())
        other = await world.model(await world.session("bob"), "bob")
        path = value(await world.result(model, 1, op.Save("first")))["path"]
        for seq, operation in ((2, op.Save("second")), (3, op.Export(name="named")), (4, op.Export(session="unnamed"))):
            refused = await world.result(model, seq, operation)
            assert isinstance(refused, op.Failed)
            assert refused.of_user
            assert f"your quota is 60: delete saved weights (the largest are {path})" in refused.error
            assert "ttl_seconds" in refused.error
        value(await world.result(other, 1, op.Save("first"), "bob"))
        value(await world.result(other, 2, op.Save("second"), "bob"))
        assert isinstance(await world.result(model, 5, step()), op.Json), "training goes on"

        await world.service.delete_weights("alice", path)
        value(await world.result(model, 6, op.Save("second", ttl_s=30)))
        assert isinstance(await world.result(model, 7, op.Save("third")), op.Failed)
        await asyncio.sleep(60.0)
        value(await world.result(model, 8, op.Save("third")))

    limits = FEW.model_copy(update={"tinker_idle_s": 1000.0})  # else the model's own state is saved, and counts
    run(tmp_path, story, limits=limits, tenants=quotas(saved_bytes=60))


def test_unnamed_snapshots_make_room_for_newer_ones(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        seen = []
        for seq in range(1, 30):
            made = value(await world.result(model, seq, op.Export(session=f"{session}:sample:{seq}")))
            seen.append(made["sampling_session_id"])
            assert len(world.service._desk.rows()) <= 6
        assert [row.id for row in world.service._desk.rows()][-2:] == seen[-2:], "the newest ones are there"
        await asyncio.sleep(30.0)
        kept = list((tmp_path / "models").glob("*/sampler-*"))
        assert 2 <= len(kept) <= 6

    run(tmp_path, story, tenants=quotas(saved_bytes=60))


def test_the_two_newest_snapshots_of_a_model_stay_however_small_the_quota_is(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        for seq in (1, 2):
            value(await world.result(model, seq, op.Export(session=f"{session}:sample:{seq}")))
        refused = await world.result(model, 3, op.Export(session=f"{session}:sample:3"))
        assert isinstance(refused, op.Failed)
        assert "your quota is 20: end a session" in refused.error
        assert len(world.service._desk.rows()) == 2

    run(tmp_path, story, tenants=quotas(saved_bytes=20))


def test_bytes_are_those_on_the_disk_in_every_life(tmp_path):
    def on_the_disk() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "models").rglob("*") if file.is_file())

    async def story(world: World) -> None:
        model = await world.model(await world.session())
        value(await world.result(model, 1, op.Save("a")))
        value(await world.result(model, 2, op.Export(name="a")))
        before = (await world.service.uses())["alice"]["disk_bytes"]
        assert before == on_the_disk() > 0
        world.strike()
        await asyncio.sleep(1.0)
        assert (await world.service.uses())["alice"]["disk_bytes"] == before

    run(tmp_path, story)
