"""Micro-batches that find no memory are halved: the step is computed anew, counted once, and repeated alike later."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core.errors import StartFailed
from actors.core.watch import Gone
from actors.trainer import checkpoint, scarce_memory
from actors.trainer.backend import LossSpec, MemoryUse, MicroBatch, MicroBatchStats
from actors.trainer.backends.simulated_backend import TrainCost
from actors.trainer.errors import OutOfMemory, SampleTooLarge
from actors.trainer.measured_size import LEAST_TOKENS, MOST_TOKENS, MeasuredSize, chosen, fitting_tokens
from actors.trainer.micro_batches import Size, SizeRecord
from configs.run_files import MICRO_BATCHES
from configs.schema import RECOMPUTE_WAYS
from tests.actors.trainer.trainer_world import (
    GROUP,
    PROMPTS,
    NotingBackend,
    ScriptedScheduler,
    World,
    early,
    grant,
    grants,
    job_config,
    run_to_end,
)
from tests.simulated import run_simulated

STEPS = 3


class Tight(NotingBackend):
    """Has memory for so many tokens of a micro-batch from a step on; notes the sizes of those that it accumulates."""

    def __init__(self, tokens: float, *, from_step: int = 0, from_call: int = 0) -> None:
        super().__init__(TrainCost(memory_tokens=tokens, accumulate_base_s=1.0))
        self.from_step, self.from_call = from_step, from_call
        self.tried: list[int] = []
        self.dropped = 0

    @property
    def memory_tokens(self) -> float:
        is_short = self.steps >= self.from_step and len(self.calls) > self.from_call
        return self._cost.memory_tokens if is_short else np.inf

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self.tried.append(batch.input_ids.size)
        return await super().accumulate(batch, loss)

    async def drop_sums(self) -> None:
        self.dropped += 1
        await super().drop_sums()


def world_of(directory: Path, tokens: int | str, backend: NotingBackend | None = None, **changes: Any) -> World:
    """A world whose micro-batches have so many tokens; ``changes`` are sections of the job."""
    trainer = {"backend": "simulated", "lr": 0.1, "micro_batch_tokens": tokens, "window_prompts": 2}
    job = job_config(STEPS, **({"trainer": trainer} | changes))
    return World(directory, job=job, backend=backend or NotingBackend(), scheduler=ScriptedScheduler(STEPS))


def weights_after(world: World) -> bytes:
    newest = checkpoint.newest(world.run_dir)
    assert newest is not None
    return (newest / "trainer" / "backend.json").read_bytes()


def recorded(world: World) -> list[tuple[int, int, int]]:
    record = json.loads((world.run_dir / MICRO_BATCHES).read_text())
    return [(size["step"], size["update"], size["tokens"]) for size in record["sizes"]]


ALGORITHM = {"group_size": GROUP, "prompts_per_step": PROMPTS}
KINDS = {
    "one update": {},
    "KL": {"algorithm": ALGORITHM | {"kl_coefficient": 0.1}},
    "several updates": {"algorithm": ALGORITHM | {"minibatches": 2, "epochs": 2}},
    "critic": {"algorithm": ALGORITHM | {"name": "ppo"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_runs_short_from_its_first_step_on_is_one_that_had_the_smaller_size(
    tmp_path: Path, kind: str
) -> None:
    """Weights, statistics and samples: nothing is lost, and nothing counts twice."""
    tight = world_of(tmp_path / "tight", 64, Tight(20), **KINDS[kind])
    run_to_end(tight)
    smallest = recorded(tight)[-1][2]
    small = world_of(tmp_path / "small", smallest, **KINDS[kind])
    run_to_end(small)
    assert isinstance(tight.backend, Tight) and tight.backend.dropped >= 1
    assert max(tight.backend.tried[-STEPS:]) <= 20, "it stays at the smaller size"
    assert weights_after(tight) == weights_after(small)
    for step, commit in small.scheduler.commits.items():
        other = tight.scheduler.commits[step]
        assert other.prompts.tolist() == commit.prompts.tolist()
        for column in ("tokens_trained", "micro_batches", "loss", "grad_norm", "micro_batch_tokens"):
            np.testing.assert_equal(other.metrics[column], commit.metrics[column], err_msg=column)
    assert {trouble.kind for trouble in tight.scheduler.troubles} == {"out_of_memory"}
    assert len(tight.scheduler.troubles) == tight.backend.dropped >= len(recorded(tight)) - 1


def test_what_was_accumulated_before_memory_ran_short_counts_once(tmp_path: Path) -> None:
    """The first window of the step fits, the second does not: both are computed again."""
    tight = world_of(tmp_path / "tight", 64, Tight(12, from_call=2))
    run_to_end(tight)
    assert recorded(tight)[0][:2] == (0, 0) and isinstance(tight.backend, Tight) and tight.backend.dropped
    small = world_of(tmp_path / "small", recorded(tight)[-1][2])
    run_to_end(small)
    assert weights_after(tight) == weights_after(small)
    for column in ("tokens_trained", "micro_batches", "loss"):
        assert tight.scheduler.commits[0].metrics[column] == small.scheduler.commits[0].metrics[column]


def test_a_later_life_trains_each_step_with_the_size_that_it_had(tmp_path: Path) -> None:
    """Memory runs short in the second step; the trainer dies before its checkpoint, and trains two steps again."""
    world = world_of(tmp_path, 64, Tight(20, from_step=1))
    first = world.backend

    async def main() -> None:
        await world.start()
        while len(world.scheduler.commits) < 2:
            await asyncio.sleep(0.01)
        await world.kill_trainer()
        world.backend = Tight(np.inf)
        await world.start_trainer()
        await world.finish()

    run_simulated(main())
    assert [place for *place, _ in recorded(world)] == [[0, 0], [1, 0]] and recorded(world)[0][2] == 64
    assert isinstance(first, Tight) and first.dropped
    of_second_step = first.tried.index(max(first.tried[2:]), 2)  # the one that failed
    kept = [batch for at, batch in enumerate(first.batches) if at != of_second_step]
    assert world.backend.batches[: len(kept)] == kept


def test_the_size_holds_from_the_update_on_in_which_memory_ran_short() -> None:
    record = SizeRecord("auto", (Size(0, 0, 64),)).halved(Size(3, 1, 32)).halved(Size(5, 0, 16))
    assert [record.at(*place) for place in ((0, 0), (3, 0), (3, 1), (4, 0), (5, 0), (9, 9))] == [64, 64, 32, 32, 16, 16]
    again = record.halved(Size(1, 0, 24))
    assert [again.at(*place) for place in ((0, 9), (1, 0), (4, 0), (5, 0))] == [64, 24, 24, 16]


def test_a_sample_that_does_not_fit_alone_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    world = world_of(tmp_path, 64, Tight(3))

    async def main() -> Any:
        await world.start()
        return await world.finish()

    end = run_simulated(main())
    assert end.gone is Gone.CRASHED and isinstance(end.error, SampleTooLarge) and end.error.permanent
    assert "rollout.max_tokens" in str(end.error) and "trainer.recompute: whole" in str(end.error)


def test_running_short_while_early_samples_are_scored_repeats_the_step_too(tmp_path: Path) -> None:
    world = world_of(tmp_path, 64, Tight(12), algorithm=ALGORITHM | {"kl_coefficient": 0.1}, sync={"mode": "dynamic"})
    scheduler = world.scheduler

    def early_first(message: Any) -> bool:
        groups = [grant(message.step, message.step * PROMPTS + i) for i in range(PROMPTS)]
        ref = scheduler.ctx.ref(message.trainer)
        for group in groups[1:]:
            ref.tell(early(group, *range(GROUP)))
        ref.tell(grants(groups[0]))
        scheduler.ctx.start_task(later(message), "later")
        return False

    async def later(message: Any) -> None:
        await asyncio.sleep(1.0)
        scheduler.grant_step(message.step, message.trainer)

    scheduler.on_open = early_first
    run_to_end(world)
    assert isinstance(world.backend, Tight) and world.backend.dropped >= 1
    assert sorted(scheduler.commits) == list(range(STEPS))
    lengths = sum(int(grant(0, prompt).lengths.sum()) for prompt in range(PROMPTS))
    assert scheduler.commits[0].metrics["tokens_trained"] == lengths


def test_auto_takes_what_fits_and_a_later_life_keeps_it(tmp_path: Path) -> None:
    world = world_of(tmp_path, "auto", NotingBackend(TrainCost(memory_tokens=5000)))
    run_to_end(world)
    size = recorded(world)[0][2]
    assert size == 1024  # of 5,000 four fifths, shared with two workers on the machine
    assert world.scheduler.commits[0].metrics["micro_batch_tokens"] == size
    world.backend = NotingBackend(TrainCost(memory_tokens=100_000))
    run_to_end(world)
    assert recorded(world) == [(0, 0, size)]


def test_a_backend_that_cannot_tell_its_memory_gets_the_default(tmp_path: Path) -> None:
    world = world_of(tmp_path, "auto")
    run_to_end(world)
    assert world.scheduler.commits[0].metrics["micro_batch_tokens"] == 16_384
    assert not (tmp_path / MICRO_BATCHES).exists()


def test_another_size_in_the_job_file_begins_a_new_record(tmp_path: Path) -> None:
    (tmp_path / MICRO_BATCHES).write_bytes(msgspec.json.encode(SizeRecord("auto", (Size(0, 0, 8),))))
    world = world_of(tmp_path, 64)
    run_to_end(world)
    assert world.scheduler.commits[0].metrics["micro_batch_tokens"] == 64


class Measured(NotingBackend):
    """Measures each way of recomputation: (bytes and seconds of a token), of 1,000,000 free bytes."""

    def __init__(self, ways: dict[str, tuple[int, float]], *, short_of_memory: str = "") -> None:
        super().__init__()
        self.ways, self.short_of_memory = ways, short_of_memory
        self.used: list[str] = []

    async def use_recompute(self, way: str) -> None:
        self.used.append(way)

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse | None:
        if self.used[-1] == self.short_of_memory:
            raise OutOfMemory("none left")
        token_bytes, token_s = self.ways[self.used[-1]]
        return MemoryUse(token_bytes * batch.input_ids.size, 1_000_000, token_s * batch.input_ids.size)


@pytest.mark.parametrize(
    ("none", "short_of_memory", "taken", "tokens"),
    [
        ((100, 0.1), "", "none", 2048),  # the fastest, which has room
        ((200, 0.1), "", "selective", 2048),  # the fastest has room for 1,024 tokens alone
        ((100, 0.1), "none", "selective", 2048),
        ((100, 0.1), "whole", "whole", LEAST_TOKENS),  # nothing takes less
    ],
)
def test_auto_takes_the_fastest_way_that_has_room_and_a_later_life_takes_it_again(
    tmp_path: Path, none: tuple[int, float], short_of_memory: str, taken: str, tokens: int
) -> None:
    ways = {"none": none, "selective": (80, 0.12), "whole": (10, 0.15)}
    trainer = {"backend": "simulated", "lr": 0.1, "micro_batch_tokens": "auto", "recompute": "auto"}
    backend = Measured(ways, short_of_memory=short_of_memory)
    world = world_of(tmp_path, "auto", backend, trainer=trainer)
    run_to_end(world)
    metrics = world.scheduler.commits[0].metrics
    assert (recorded(world)[0][2], RECOMPUTE_WAYS[int(metrics["recompute"])]) == (tokens, taken)
    assert backend.used[-1] == taken
    assert ["whole", "selective", "none"][: len(backend.used) - 1] == backend.used[:-1]
    later = world.backend = Measured({})
    run_to_end(world)
    assert later.used == [taken], "nothing is measured again"


def test_another_way_in_the_job_file_begins_a_new_record(tmp_path: Path) -> None:
    (tmp_path / MICRO_BATCHES).write_bytes(msgspec.json.encode(SizeRecord(64, (Size(0, 0, 8),), "whole")))
    world = world_of(tmp_path, 64)
    run_to_end(world)
    assert world.scheduler.commits[0].metrics["micro_batch_tokens"] == 64
    assert "recompute" not in world.scheduler.commits[0].metrics


def test_a_record_of_before_there_was_a_choice_holds_for_the_way_that_the_job_has_now(tmp_path: Path) -> None:
    (tmp_path / MICRO_BATCHES).write_bytes(b'{"configured":64,"sizes":[{"step":0,"update":0,"tokens":8}]}')
    world = world_of(
        tmp_path, 64, trainer={"backend": "simulated", "lr": 0.1, "micro_batch_tokens": 64, "recompute": "whole"}
    )
    run_to_end(world)
    assert world.scheduler.commits[0].metrics["micro_batch_tokens"] == 8


def test_of_ways_with_as_much_room_the_fastest_is_taken() -> None:
    """Room is counted up to a bound, which the longest sample may be beyond."""
    sizes = [MeasuredSize(way=way, tokens=65_536, token_s=s) for way, s in (("whole", 3.0), ("none", 1.0))]
    assert chosen([*sizes, MeasuredSize(way="selective", tokens=256, token_s=0.1)], least_tokens=131_072) == sizes[1]


@pytest.mark.parametrize("content", [b"{", b'{"configured": "auto", "sizes": []}'])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MICRO_BATCHES).write_bytes(content)
    world = world_of(tmp_path, "auto")

    async def main() -> None:
        with pytest.raises(StartFailed, match=r"CheckpointCorrupt.*micro_batches\.json: .*remove it"):
            await world.start()
        await world.system.stop()

    run_simulated(main())


@pytest.mark.parametrize(
    ("room", "tokens"),
    [(10_000_000, 8192), (1, LEAST_TOKENS), (10**12, MOST_TOKENS), (1_000_000 + 1000 * 1024, 1024)],
)
def test_the_line_through_two_passes_says_what_fits(room: int, tokens: int) -> None:
    assert fitting_tokens([(512, 1_000_000 + 512_000), (2048, 1_000_000 + 2_048_000)], room) == tokens


def test_passes_whose_memory_does_not_grow_do_not_limit_tokens() -> None:
    assert fitting_tokens([(512, 4096), (2048, 4096)], 1) == MOST_TOKENS


def test_each_injected_lack_of_memory_repeats_a_step_once(tmp_path: Path) -> None:
    world = world_of(tmp_path, 64)
    scarce_memory.strike()
    scarce_memory.strike()
    run_to_end(world)
    assert sorted(world.scheduler.commits) == list(range(STEPS))
    assert ["an injected fault" in trouble.text for trouble in world.scheduler.troubles] == [True, True]
