"""A model's line: order, repeats, gaps, refusals, bounds, rest, and what is lost when computing is."""

from __future__ import annotations

import asyncio

import pytest

from actors.tinker import operations as op
from actors.tinker.errors import Problem
from tests.actors.tinker.tinker_world import FEW, World, call, run, step, value


async def trained(world: World, operations: list[op.Operation]) -> list[op.Answer]:
    model = await world.model(await world.session())
    return [await world.result(model, seq, one) for seq, one in enumerate(operations, 1)]


PLAIN: list[op.Operation] = [call(1, 2), call(3), step(), call(4), step(), call(5, forward_only=True)]


def test_operations_that_come_in_any_order_are_executed_in_that_of_their_numbers(tmp_path):
    async def story(world: World) -> list[op.Answer]:
        model = await world.model(await world.session())
        submitted = {seq: await world.submit(model, seq, one) for seq, one in [*enumerate(PLAIN, 1)][::-1]}
        return [await world.answer(submitted[seq]) for seq in sorted(submitted)]

    in_order = run(tmp_path / "a", lambda world: trained(world, PLAIN)) if (tmp_path / "a").mkdir() is None else []
    (tmp_path / "b").mkdir()
    assert run(tmp_path / "b", story) == in_order
    assert all(isinstance(one, op.Json | op.Losses) for one in in_order)


def test_a_repeat_gets_the_kept_answer_and_is_executed_once(tmp_path):
    async def story(world: World) -> None:
        model = await world.model(await world.session())
        submitted = await asyncio.gather(*(world.submit(model, 1, call(1)) for _ in range(3)))
        assert len(set(submitted)) == 1
        first = await world.answer(submitted[0])
        assert await world.result(model, 1, call(9)) == first, "another body under the same number is a repeat too"
        assert value(await world.result(model, 2, step()))["metrics"] == {"steps": 1.0, "calls": 1.0}

    run(tmp_path, story)


def test_a_gap_stalls_its_model_alone_and_is_told(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        stalled, other = await world.model(session), await world.model(session, number=1)
        request = await world.submit(stalled, 2, step())
        assert isinstance(await world.result(other, 1, call(1)), op.Losses)
        pending = await world.service.retrieve("alice", request)
        assert "operation 1 of this model has not come; 1 wait behind it" in repr(pending)
        assert list(world.service.gaps()) == [stalled]
        await world.submit(stalled, 1, call(1))
        assert value(await world.answer(request))["metrics"]["calls"] == 1.0
        assert world.service.gaps() == {}

    run(tmp_path, story)


def test_a_refused_operation_leaves_no_trace_and_the_next_goes_on(tmp_path):
    async def story(world: World) -> list[op.Answer]:
        return await trained(world, [call(1), op.Refused("loss_fn: no"), call(13), step(), call(2)])

    async def without(world: World) -> list[op.Answer]:
        return await trained(world, [call(1), step(), call(2)])

    for name in "ab":
        (tmp_path / name).mkdir()
    first, refused, by_learner, *rest = run(tmp_path / "a", story)
    assert refused == op.Failed("loss_fn: no", of_user=True)
    assert by_learner == op.Failed("data: the fake takes no token 13", of_user=True)
    assert [first, *rest] == run(tmp_path / "b", without)


@pytest.mark.parametrize("fault", ["lost_at", "broken_at", "nan_at"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_what_goes_wrong_in_one_call_is_as_if_it_had_not_been_asked_or_had_gone_well(tmp_path, fault, at):
    """A learner that dies is made again; a call that fails, or whose loss is no number, is taken back."""
    operations: list[op.Operation] = [call(1), call(2), step(), call(3), step()]

    async def story(world: World) -> list[op.Answer]:
        getattr(world.faults, fault).add(at)
        return await trained(world, operations)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    answers = run(tmp_path / "a", story)
    failed = [isinstance(one, op.Failed) for one in answers]
    if fault == "lost_at" or (fault == "nan_at" and at in (3, 5)):
        assert not any(failed)
    else:
        assert [seq for seq, one in enumerate(failed, 1) if one] == [at]
    kept = [one for one, bad in zip(operations, failed, strict=True) if not bad]
    undisturbed = run(tmp_path / "b", lambda world: trained(world, kept))
    assert [one for one, bad in zip(answers, failed, strict=True) if not bad] == undisturbed


def test_an_operation_that_ends_every_learner_fails_and_the_next_goes_on(tmp_path):
    async def story(world: World) -> None:
        world.faults.lost_at = {1, 2, 3}
        died, after = await trained(world, [call(1), call(2)])
        assert isinstance(died, op.Failed) and not died.of_user and "died 3 times" in died.error
        assert isinstance(after, op.Losses)

    run(tmp_path, story)


def test_a_line_takes_in_so_many_operations_and_always_the_one_that_is_next(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        line = await world.service.line("alice", model)
        for seq in (2, 3, 4):
            await world.submit(model, seq, call(seq))
        with pytest.raises(Problem, match="3 operations of this model wait") as refused:
            await line.submit(5, op.encode(call(5)))
        assert refused.value.status == 429
        assert isinstance(await world.result(model, 1, call(1)), op.Losses)
        assert isinstance(await world.result(model, 5, call(5)), op.Losses)

    run(tmp_path, story, limits=FEW.model_copy(update={"tinker_waiting_operations": 3}))


def test_an_idle_model_gives_its_learner_back_and_goes_on_where_it_was(tmp_path):
    async def story(world: World, *, rests: bool) -> list[op.Answer]:
        model, answers = await world.model(await world.session()), []
        for seq, one in enumerate([call(1), step(), call(2), call(3), step(), call(4)], 1):
            answers.append(await world.result(model, seq, one))
            if rests:
                await asyncio.sleep(100.0)
                assert world.faults.lives == 0
        return answers

    for name in "ab":
        (tmp_path / name).mkdir()
    rested = run(tmp_path / "a", lambda world: story(world, rests=True))
    assert rested == run(tmp_path / "b", lambda world: story(world, rests=False))


def test_a_saved_state_lets_the_bodies_before_it_go_and_its_own_predecessor(tmp_path):
    async def story(world: World) -> None:
        model = await world.model(await world.session())
        for seq in range(1, 21):
            await world.result(model, seq, step() if seq % 4 == 0 else call(seq))
        log = world.service._log
        assert await log.to_replay(model) == [17, 18, 19, 20] or await log.to_replay(model) == []
        row = await log.model(model)
        assert row is not None and row.state is not None and row.done == 20
        assert [path.name for path in (tmp_path / "models/1").iterdir()] == [row.state.rpartition("/")[2]]
        bodies = await log._run(
            lambda db: db.execute("SELECT count(*) FROM operations WHERE body IS NOT NULL").fetchone()
        )
        assert bodies[0] == len(await log.to_replay(model))

    run(tmp_path, story)


def test_weights_are_saved_loaded_and_never_written_over_by_accident(tmp_path):
    async def story(world: World) -> None:
        session = await world.session()
        model = await world.model(session)
        await world.result(model, 1, call(1))
        await world.result(model, 2, step())
        path = value(await world.result(model, 3, op.Save("first")))["path"]
        assert path == f"tinker://{model}/weights/first"
        twice = await world.result(model, 4, op.Save("first"))
        assert isinstance(twice, op.Failed) and twice.of_user and "exists" in twice.error
        before = await world.result(model, 5, call(7, forward_only=True))
        await world.result(model, 6, call(2))
        await world.result(model, 7, step())
        other, request = await world.ask(
            lambda service: service.create_model("alice", session, 1, None, "", {}, load=(path, True))
        )
        assert value(await world.answer(request)) == {"path": path, "model_id": other, "type": "load_weights"}
        assert await world.result(other, 1, call(7, forward_only=True)) == before
        assert value(await world.result(other, 2, step()))["metrics"]["steps"] == 2.0
        assert value(await world.result(model, 8, op.Save("first", overwrite=True)))["path"] == path

    run(tmp_path, story)
