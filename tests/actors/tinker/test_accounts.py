"""What tenants have used: exact through deaths, told of as events, and shown to nobody else."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.tinker import operations as op
from actors.tinker.service import TinkerService
from tests.actors.tinker.http_world import HttpWorld
from tests.actors.tinker.test_service import sample
from tests.actors.tinker.tinker_world import BASE, FEW, World, call, run, spec, step


async def drawn(world: World, sampler: str, seq: int, tenant: str = "alice") -> op.Answer:
    async def asked(service: TinkerService) -> str:
        return await service.sample(service.sampler(tenant, sampler), seq, sample())

    return await world.answer(await world.ask(asked), tenant)


@pytest.mark.parametrize("seed", range(4))
def test_accounts_count_each_operation_once_through_deaths(tmp_path, seed):
    draw = random.Random(seed)

    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)

        async def strike_now_and_then() -> None:
            for _ in range(4):
                await asyncio.sleep(draw.uniform(0.01, 0.2))
                world.strike()

        striking = asyncio.create_task(strike_now_and_then())
        asked = [await world.submit(model, seq, call(1, 2, 3) if seq % 3 else step()) for seq in range(1, 31)]
        for request in asked:
            await world.answer(request)
        assert isinstance(await world.result(model, 31, call(13)), op.Failed)
        sampler = await world.ask(lambda one: one.create_sampler("alice", session, 0, path=None, base_model=BASE))
        for seq in range(5):
            await drawn(world, sampler, seq)
        await striking
        while not world.ready.is_set():
            await world.ready.wait()
        spent = (await world.service.uses())["alice"]
        assert world.lives == 5
        assert (spent["operations"], spent["training_tokens"]) == (1 + 31 + 5, 20 * 3), "what was refused has no tokens"
        assert spent["sampled_tokens"] == 5 * 3
        by_model = {one.model: one.operations for one in await world.service.spent()}
        assert by_model == {model: 32, BASE: 5}
        await world.service.end_session("alice", session)
        assert {one.model for one in await world.service.spent()} == {BASE}
        assert (await world.service.uses())["alice"]["operations"] == 37, "sums outlive a model"

    run(tmp_path, story, seed=seed)


def test_events_tell_of_operations_and_of_the_lives_of_models(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        await world.result(model, 1, call(1, 2, 3))
        await world.result(model, 2, step())
        await world.result(model, 3, call(13))
        sampler = await world.service.create_sampler("alice", session, 0, path=None, base_model=BASE)
        await drawn(world, sampler, 7)
        await asyncio.sleep(FEW.tinker_idle_s + 1.0)
        world.faults.lost_at = {world.faults.calls + 1}
        await world.result(model, 4, call(1))
        await world.service.end_session("alice", session)

        names = [event["event"] for event in world.events]
        assert [name for name in names if name != "operation"] == [
            "server_started", "model_made", "model_parked", "model_woken", "model_lost", "model_woken", "model_ended",
        ]  # fmt: skip
        told = [
            tuple(event[name] for name in ("model", "seq", "kind", "tokens", "outcome"))
            for event in world.events
            if event["event"] == "operation"
        ]
        assert told == [
            (model, 0, "create", 0, "done"), (model, 1, "forward_backward", 3, "done"),
            (model, 2, "optim_step", 0, "done"),
            (model, 3, "forward_backward", 0, "refused"), (BASE, 7, "sample", 3, "done"),
            (model, 4, "forward_backward", 1, "done"),
        ]  # fmt: skip
        assert all(event["tenant"] == "alice" for event in world.events[1:])

    run(tmp_path, story)


async def test_a_tenant_is_shown_what_it_uses_and_the_operator_what_all_do(tmp_path):
    async with HttpWorld(tmp_path) as world:
        service = world.server.service
        for tenant in ("alice", "bob"):
            session = await service.begin_session(tenant, {})
            _, request = await service.create_model(tenant, session, 0, spec(), BASE, {})
            await service.retrieve(tenant, request)

        async def shown(tenant: str) -> dict[str, dict]:
            async with world.client(tenant) as client, client.get("headrace/status") as response:
                assert response.status == 200
                return {row["tenant"]: row for row in (await response.json())["tenants"]}

        assert list(await shown("alice")) == ["alice"]
        assert list(await shown("nobody_yet")) == []
        both = await shown("operator")
        assert list(both) == ["alice", "bob"]
        assert (both["bob"]["models"], both["bob"]["sessions"], both["bob"]["operations"]) == (1, 1, 1)
        assert [one["tenant"] for one in both["bob"]["by_model"]] == ["bob"]


async def test_saved_weights_are_deleted_by_their_owner_alone(tmp_path):
    async with HttpWorld(tmp_path) as world:
        service = world.server.service
        session = await service.begin_session("alice", {})
        model, _ = await service.create_model("alice", session, 0, spec(), BASE, {})
        request = await service.submit(await service.line("alice", model), 1, op.encode(op.Save("kept")))
        await service.retrieve("alice", request)

        async def deleted(tenant: str, path: str) -> int:
            async with world.client(tenant) as client, client.delete(f"training_runs/{path}") as response:
                return response.status

        path = f"{model}/checkpoints/weights/kept"
        assert await deleted("bob", path) == 404
        assert await deleted("alice", f"{model}/checkpoints/other/kept") == 404
        assert await deleted("alice", path) == 204
        assert await deleted("alice", path) == 404
