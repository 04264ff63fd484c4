"""Rules that whiten a step: what is asked before it, what becomes of the answers, and PPO's passes over a step."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from actors.protocol.steps import OpenStep
from actors.trainer import checkpoint
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.learning.samples import TrainSample
from actors.trainer.learning.step_estimates import StepEstimates
from tests.actors.trainer.learning.test_gae import as_trl
from tests.actors.trainer.random_samples import random_samples
from tests.actors.trainer.trainer_world import (
    GROUP,
    PROMPTS,
    NotingBackend,
    ScriptedScheduler,
    World,
    grant,
    grants,
    job_config,
    run_to_end,
)
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job


def scored_samples() -> list[TrainSample]:
    rng = np.random.default_rng(3)
    plain = random_samples([(3, [4, 1]), (5, [7, 2])])
    return [
        dataclasses.replace(
            s,
            reference_logprobs=rng.normal(-4.6, 0.3, s.tokens.size).astype(np.float32),
            old_logprobs=rng.normal(-4.6, 0.3, s.tokens.size).astype(np.float32),
        )
        for s in plain
    ]


def numbers_of(samples: list[TrainSample], seed: int) -> dict[tuple[int, ...], np.ndarray]:
    rng = np.random.default_rng(seed)
    return {tuple(s.tokens.tolist()): rng.normal(size=s.tokens.size).astype(np.float32) for s in samples}


Numbers = dict[tuple[int, ...], np.ndarray]


class Answering(SimulatedBackend):
    """Answers with these values for each response, and none elsewhere."""

    def __init__(self, values: Numbers) -> None:
        super().__init__()
        self._numbers = values

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return self._of(batch, self._numbers)

    @staticmethod
    def _of(batch: MicroBatch, numbers: Numbers) -> np.ndarray:
        result = np.zeros(batch.input_ids.shape, np.float32)
        for row, (p, end) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True)):
            result[row, p:end] = numbers[tuple(batch.input_ids[row, p:end].tolist())]
        return result


@pytest.mark.parametrize("budget_tokens", [8, 1000])
def test_advantages_and_returns_of_a_step_are_trls_whitened_however_it_is_cut(budget_tokens: int) -> None:
    samples, algorithm = scored_samples(), {"name": "ppo", "kl_coefficient": 0.2, "gamma": 0.97, "gae_lambda": 0.9}
    values = numbers_of(samples, 1)
    job = smallest_job(algorithm=algorithm, trainer={"micro_batch_tokens": budget_tokens})
    estimates = StepEstimates(job, Answering(values).values)
    found = asyncio.run(estimates.estimated(samples))
    advantages: list[float] = []
    kl = shaped = 0.0
    for sample, got in zip(samples, found, strict=True):
        key, policy, reference = tuple(sample.tokens.tolist()), sample.old_logprobs, sample.reference_logprobs
        assert policy is not None and reference is not None and got.returns is not None
        columns = policy.tolist(), reference.tolist(), values[key].tolist()
        own, returns = as_trl(float(sample.advantage), *columns, 0.2, 0.97, 0.9)
        np.testing.assert_allclose(got.returns, returns, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(got.old_values, values[key])
        advantages += own
        kl += float((policy - reference).sum())
        shaped += float(sample.advantage) - 0.2 * float((policy - reference).sum())
    whole = np.array(advantages)
    whole = (whole - whole.mean()) / np.sqrt(whole.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate([got.advantage for got in found]), whole, rtol=1e-4, atol=1e-5)
    metrics = estimates.taken_metrics()
    assert metrics["kl_per_response"] == pytest.approx(kl / 4, rel=1e-4)
    assert metrics["kl_per_token"] == pytest.approx(kl / 14, rel=1e-4)
    assert metrics["shaped_reward_mean"] == pytest.approx(shaped / 4, rel=1e-4)
    assert estimates.taken_metrics() == {}


def masked(sample: TrainSample, mask: list[bool]) -> TrainSample:
    """``sample`` with tokens of an environment put in where ``mask`` is False."""
    where = np.array(mask)

    def spread(column: np.ndarray) -> np.ndarray:
        found = np.full(len(where), 50, column.dtype)
        found[where] = column
        return found

    assert sample.old_logprobs is not None and sample.reference_logprobs is not None
    return dataclasses.replace(
        sample,
        tokens=spread(sample.tokens),
        logprobs=spread(sample.logprobs),
        stale=spread(sample.stale),
        old_logprobs=spread(sample.old_logprobs),
        reference_logprobs=spread(sample.reference_logprobs),
        mask=where,
    )


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_tokens_of_an_environment_are_skipped_and_change_nothing_of_the_others(name: str) -> None:
    class Counting(SimulatedBackend):
        """Expects of a token what its id says."""

        async def values(self, batch: MicroBatch) -> np.ndarray:
            return batch.input_ids.astype(np.float32) / 100

    samples = scored_samples()
    mask = [True, False, False, True, True, False, True]
    mixed = [masked(samples[0], mask), *samples[1:]]
    job = smallest_job(algorithm={"name": name, "kl_coefficient": 0.2, "gamma": 0.9})
    plain, found = (asyncio.run(StepEstimates(job, Counting().values).estimated(given)) for given in (samples, mixed))
    for before, after in zip(plain, found, strict=True):
        where = slice(None) if after.mask is None else after.mask
        np.testing.assert_array_equal(np.asarray(after.advantage)[where], before.advantage)
        if before.returns is not None and after.returns is not None:
            np.testing.assert_array_equal(after.returns[where], before.returns)
    assert not np.asarray(found[0].advantage)[[1, 2, 5]].any()


def test_reinforce_pp_by_hand() -> None:
    """Two responses of scores 1 and 0, of 2 and 1 tokens; beta 0.5, gamma 0.5, log-ratios (0.2, -0.4) and (0.6).

    Token rewards (-0.1, 0.2 + 1) and (-0.3 + 0); returns to go (-0.1 + 0.5 * 1.2, 1.2) and -0.3: 0.5, 1.2, -0.3, whose
    mean is 7/15 and whose sample variance is 0.5633.
    """
    ids = np.array([3], np.int32)

    def sample(prompt: int, score: float, ratios: list[float]) -> TrainSample:
        zeros = np.zeros(len(ratios), np.float32)
        return TrainSample(
            prompt=prompt, sibling=0, prompt_ids=ids, tokens=zeros.astype(np.int32), logprobs=zeros,
            stale=zeros.astype(np.bool_), advantage=score, reference_logprobs=zeros,
            old_logprobs=np.array(ratios, np.float32),
        )  # fmt: skip

    job = smallest_job(algorithm={"name": "reinforce_pp", "kl_coefficient": 0.5, "gamma": 0.5})
    estimates = StepEstimates(job, SimulatedBackend().values)
    found = asyncio.run(estimates.estimated([sample(0, 1.0, [0.2, -0.4]), sample(1, 0.0, [0.6])]))
    returns = np.array([0.5, 1.2, -0.3])
    expected = (returns - 7 / 15) / np.sqrt(0.5633333)
    np.testing.assert_allclose(np.concatenate([s.advantage for s in found]), expected, rtol=1e-5)
    assert all(s.returns is None and s.old_values is None for s in found)
    assert "explained_variance" not in estimates.taken_metrics()


class NotingCritic(NotingBackend):
    """Notes its critic's calls too, and what each micro-batch holds for it."""

    def __init__(self) -> None:
        super().__init__(TrainCost(step_s=1.0))
        self.taken: list[MicroBatch] = []

    async def values(self, batch: MicroBatch) -> np.ndarray:
        self.calls.append("values")
        return await super().values(batch)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self.taken.append(batch)
        return await super().accumulate(batch, loss)


def ppo_world(tmp_path: Path, **changes: object) -> World:
    algorithm = {"name": "ppo", "group_size": GROUP, "prompts_per_step": PROMPTS, "kl_coefficient": 0.1, "epochs": 1}
    trainer = {"backend": "simulated", "lr": 0.1, "micro_batch_tokens": 1000}
    sections: dict[str, object] = {"sync": {"mode": "sync"}, "critic": {"lr": 0.1}, "trainer": trainer}
    algorithm |= changes.pop("algorithm", {})  # type: ignore[arg-type]
    job = job_config(algorithm=algorithm, **sections | changes)
    return World(tmp_path, job=job, backend=NotingCritic())


def test_values_and_scores_are_asked_before_the_step_and_one_pass_follows(tmp_path: Path) -> None:
    world = ppo_world(tmp_path)
    run_to_end(world)
    tokens = sum(int(grant(0, prompt).lengths.sum()) for prompt in range(PROMPTS))
    assert world.backend.calls[1:6] == ["score", "score", "values", "accumulate", f"step {tokens}"]
    row = world.scheduler.commits[0].metrics
    assert {"value_loss", "explained_variance", "critic_grad_norm", "kl_per_token", "kl_per_response"} <= set(row)
    assert row["shaped_reward_mean"] == pytest.approx(row["reward_mean"] - 0.1 * row["kl_per_response"], rel=1e-4)
    assert row["degenerate_fraction"] == 0.0
    assert row["tokens_trained"] == tokens


def test_samples_of_one_a_prompt_and_of_equal_rewards_teach_too(tmp_path: Path) -> None:
    world = ppo_world(tmp_path)
    world.scheduler.equal = set(range(3 * PROMPTS))
    run_to_end(world)
    assert all(commit.metrics["tokens_trained"] > 0 for commit in world.scheduler.commits.values())


def test_nothing_is_trained_before_all_of_the_step_is_there_in_async_mode_too(tmp_path: Path) -> None:
    world = ppo_world(tmp_path, sync={"mode": "async"})
    held = asyncio.Event()

    def some_of_it(message: OpenStep) -> bool:
        if message.step == 0 and not held.is_set():
            held.set()
            ref = world.scheduler.ctx.ref(message.trainer)
            for prompt in range(PROMPTS):  # each that is expected, but others may follow
                ref.tell(grants(grant(0, prompt)))
            return False
        return True

    async def main() -> None:
        world.scheduler.on_open = some_of_it
        await world.start()
        await held.wait()
        await asyncio.sleep(1.0)
        assert "accumulate" not in world.backend.calls
        await world.finish()

    run_simulated(main())
    assert sorted(world.scheduler.commits) == [0, 1, 2]


def test_further_passes_take_the_same_micro_batches_and_count_once(tmp_path: Path) -> None:
    once, twice = ppo_world(tmp_path / "once"), ppo_world(tmp_path / "twice", algorithm={"epochs": 2})
    run_to_end(once)
    run_to_end(twice)
    assert isinstance(twice.backend, NotingCritic) and isinstance(once.backend, NotingCritic)
    first, second = twice.backend.taken[:2]
    np.testing.assert_array_equal(first.input_ids, second.input_ids)
    np.testing.assert_array_equal(first.advantages, second.advantages)
    assert first.old_logprobs is not None and second.old_logprobs is not None
    np.testing.assert_array_equal(first.old_logprobs, second.old_logprobs)
    assert once.backend.taken[0].old_logprobs is None
    assert twice.backend.steps == 2 * once.backend.steps
    rows = [world.scheduler.commits[0].metrics for world in (once, twice)]
    assert rows[0]["tokens_trained"] == rows[1]["tokens_trained"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"])
    assert twice.weights.published == [0, 1, 2, 3]


def test_while_the_critic_warms_up_each_version_has_the_bytes_of_the_first(tmp_path: Path) -> None:
    world = ppo_world(tmp_path, steps=4, critic={"lr": 0.1, "warmup_steps": 2})
    world.scheduler = ScriptedScheduler(4)
    run_to_end(world)
    hashes = [world.weights.manifests[version].chunk_hashes for version in range(5)]
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3] != hashes[4]
    rates = [world.scheduler.commits[step].metrics["learning_rate"] for step in range(4)]
    assert rates == [0.0, 0.0, 0.1, 0.1]


@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_trainer_that_is_killed_comes_to_the_same_policy_and_the_same_critic(
    tmp_path: Path, killed_after: int
) -> None:
    """Within the warm-up and after it, with passes and a reference; the next life begins at an older checkpoint."""

    def world_in(directory: Path) -> World:
        changes = {"steps": 6, "critic": {"lr": 0.1, "warmup_steps": 2}, "algorithm": {"epochs": 2}}
        world = ppo_world(directory, **changes)
        world.scheduler = ScriptedScheduler(6, seed=len(directory.name))
        world.scheduler.checkpoint_after = {killed_after - 1}
        return world

    whole, broken = world_in(tmp_path / "whole"), world_in(tmp_path / "broken")
    run_to_end(whole)

    async def main() -> None:
        await broken.start()
        while len(broken.scheduler.commits) <= killed_after or not broken.scheduler.checkpoints:
            await asyncio.sleep(0.1)
        await broken.kill_trainer()
        broken.backend = NotingCritic()
        await broken.start_trainer()
        await broken.finish()

    run_simulated(main())
    (one, other) = (checkpoint.newest(world.run_dir) for world in (whole, broken))
    assert one is not None and other is not None and one.name == other.name == "step_000006"
    files = (Path("trainer") / "backend.json", Path("config.json"))
    assert [(one / file).read_bytes() for file in files] == [(other / file).read_bytes() for file in files]
