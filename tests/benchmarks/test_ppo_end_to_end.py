"""``headrace bench ppo`` on a job of three steps, and that the loop it is held against is PPO."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from actors.environments.prompts.rows import Row
from actors.environments.scoring.batches import Asked
from actors.environments.scoring.examples import Example
from actors.environments.scoring.model_scorer import ModelScorer
from benchmarks._processes import ROOT
from benchmarks.jobs import ppo
from benchmarks.jobs.bare_loop import BareLoop
from benchmarks.jobs.bare_ppo import LearnedReward, PpoLearner
from configs.loader import load_job
from supervisors.preparation.model_preparation import prepare_model
from tests.reward_model import save_reward_model

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.warm_start_steps=30",
    "algorithm.prompts_per_step=8",
    "rollout.workers=1",
    "rollout.threads=1",
    "trainer.threads=1",
    "critic.warmup_steps=1",
    "metrics.tensorboard=false",
]
VERIFIER = "reward={kind: reasoning_gym}"
LEARNED = ["reward.train.pairs=300", "reward.train.steps=20"]
JOB = ROOT / "benchmarks" / "jobs" / "ppo.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(prepare_model(load_job(JOB, SMALL), tmp_path_factory.mktemp("bench_model")))


@pytest.mark.long
def test_the_bare_loop_trains_the_critic_first_and_then_both(model: Path) -> None:
    threads = torch.get_num_threads()
    job = load_job(JOB, [*SMALL, VERIFIER])
    learner = PpoLearner(job, model)
    loop = BareLoop(job, model, threads=(1, 1), learner=learner)

    def sums() -> tuple[float, float]:
        both = learner._of_policy, learner._of_critic
        return tuple(sum(float(p.detach().double().abs().sum()) for p in each) for each in both)  # type: ignore[return-value]

    before = sums()
    loop.step()
    warm = sums()
    assert learner.kl_per_response == pytest.approx(0.0, abs=1e-4), "the policy is the reference still"
    loop.step()
    torch.set_num_threads(threads)
    after = sums()
    assert (before[0] == warm[0], before[1] == warm[1]) == (True, False)
    assert (warm[0] == after[0], warm[1] == after[1]) == (False, False)


def test_the_bare_loops_learned_reward_is_what_a_job_scores_with(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "model", template=None)
    job = load_job(JOB, [f"reward={{kind: model, path: {path}}}", "data.template='{prompt}='"])
    texts = ["12", "", "345?"]
    rows = [Row(prompt=prompt, answer="", index=0, extra={}) for prompt in ("1+2", "3", "4+5")]
    scorer = ModelScorer("reward", job.reward)
    both = zip(rows, texts, strict=True)
    asked = [Asked(text, Example(row.prompt, "", 0, {}), job.data) for row, text in both]
    wanted = [found.reward for found in scorer.score(asked, lambda: None)]
    assert LearnedReward(job)(rows, texts).tolist() == pytest.approx(wanted, abs=1e-5)


def row(reward: float) -> dict[str, float]:
    return {"reward_mean": reward, "kl_per_response": 0.5, "samples": 10, "seconds": 2.0}


def test_curves_are_the_same_if_they_end_no_further_apart_than_seeds_do() -> None:
    ours = [[row(0.1), row(0.2), row(0.3), row(0.5)], [row(0.1), row(0.2), row(0.3), row(0.6)]]
    near = [[*run[:3], row(run[3]["reward_mean"] + 0.05)] for run in ours]
    far = [[*run[:3], row(run[3]["reward_mean"] + 0.2)] for run in ours]
    found = ppo.compare(ours, near, 1) | {"lost": 0, "twice": 0}
    assert (found["reward_difference"], found["reward_spread"], found["ratio"]) == (-0.05, 0.1, 1.0)
    assert ppo.missed(found) == []
    (why,) = ppo.missed(ppo.compare(ours, far, 1) | {"lost": 0, "twice": 0})
    assert why == "rewards end -0.2 apart, seeds 0.1"
    assert len(ppo.missed(found | {"lost": 1, "twice": 2, "ratio": 0.8})) == 3


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("reward", ["verifier", "learned"])
def test_bench_ppo_prints_both_curves_and_the_ratio(
    model: Path, capsys: pytest.CaptureFixture[str], reward: str
) -> None:
    settings = SMALL + (LEARNED if reward == "learned" else [])
    sets = ["--reward", reward, *(part for override in settings for part in ("--set", override))]
    short = ["--steps", "3", "--seeds", "1", "--skip", "1", "--threads", "1:1", "--cores", "64", "--model", str(model)]
    assert ppo.main(["--json", *short, *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ratio"] > 0 and found["reward"] == reward
    assert [len(found["curves"][name][0]) for name in ("ours", "bare")] == [3, 3]
    assert found["lost"] == found["twice"] == 0
    assert found["kl_last_quarter"]["ours"][0] >= -0.1
