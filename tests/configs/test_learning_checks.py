"""Learning rules in job files: defaults that follow from the name, and what is refused with what to write."""

from __future__ import annotations

from typing import Any

import pytest

from configs.checks.learning_checks import check_learning
from configs.learning_schema import PRESETS, AlgorithmConfig
from configs.schema import JobConfig
from tests.smallest_job import smallest_job


def of(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def test_a_name_gives_defaults_and_a_key_overrides_them() -> None:
    assert (of(name="dapo").clip_low, of(name="dapo").clip_high) == (0.2, 0.28)
    assert of(name="dapo", clip_high=0.3).clip_high == 0.3
    assert (of(name="gspo").loss_mean, of(name="gspo", loss_mean="token").loss_mean) == ("sequence", "token")
    assert of().model_dump() == of(name="grpo").model_dump()


def test_each_correction_has_a_cap_of_its_own_unless_one_is_given() -> None:
    caps = [of(correction=kind).importance_cap for kind in ("tis", "icepop", "sequence_mask")]
    assert caps == [2.0, 5.0, 3.0]
    assert of(correction="icepop", importance_cap=4.0).importance_cap == 4.0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_job_that_was_written_down_is_the_same_once_read(name: str) -> None:
    job = smallest_job(algorithm={"name": name})
    assert JobConfig.model_validate_json(job.model_dump_json()) == job
    assert check_learning(job) == []


@pytest.mark.parametrize(
    ("algorithm", "sections", "problem"),
    [
        ({"name": "gspo", "gae_lambda": 0.9}, {}, "algorithm.gae_lambda: is set, but algorithm.name is gspo"),
        ({"gamma": 0.9}, {}, "algorithm.gamma: is set, but algorithm.name is grpo"),
        ({"name": "cispo", "group_size": 1}, {}, "algorithm.group_size: 1, but cispo compares"),
        ({"minibatches": 9, "prompts_per_step": 8}, {}, "algorithm.minibatches: 9, but a step has 8 prompts"),
        ({"minibatches": 2}, {"sync": {"mode": "dynamic"}}, "sync.mode: dynamic trains a part"),
        ({"name": "reinforce_pp"}, {"sync": {"mode": "minibatch"}}, "sync.mode: minibatch trains a part"),
        ({"minibatches": 2}, {"trainer": {"service": "auto"}}, "algorithm.minibatches: 2 with trainer.service"),
        ({"epochs": 2}, {"trainer": {"window_prompts": 2}}, "trainer.window_prompts: is set"),
        ({"kl_kind": "k1"}, {}, "algorithm.kl_kind: k1 in the loss has a gradient that is 0 on average"),
        ({"name": "reinforce_pp", "kl_kind": "k3"}, {}, "algorithm.kl_kind: is set, but reinforce_pp has the KL in"),
        ({"name": "ppo", "kl_unbiased": True}, {}, "algorithm.kl_unbiased: is set, but ppo has the KL in"),
        ({"name": "cispo", "correction": "tis"}, {}, "algorithm.correction: tis, but cispo bounds the same ratio"),
        ({"kl_unbiased": True}, {}, "algorithm.kl_unbiased: is set, but algorithm.kl_coefficient is 0"),
        (
            {"correction": "none", "importance_cap": 7.0},
            {},
            "algorithm.importance_cap: is set, but algorithm.correction",
        ),
        ({"filter_batches": 3}, {}, "algorithm.filter_batches: is set, but algorithm.filter is none"),
        ({"importance_floor": 0.3}, {}, "algorithm.importance_floor: is set, but algorithm.correction is tis"),
        (
            {"correction": "icepop", "importance_cap": 0.4},
            {},
            "algorithm.importance_floor: 0.5 is not below algorithm.importance_cap 0.4",
        ),
        ({"overlong": {"buffer_tokens": 8}}, {"rollout": {"max_tokens": 8}}, "algorithm.overlong.buffer_tokens: 8 is"),
        ({"name": "dapo"}, {"sync": {"mode": "async"}}, "sync.mode: async begins a step before it is known"),
        ({"name": "ppo", "filter": "spread"}, {}, "algorithm.filter: spread, but ppo learns from equal rewards"),
        (
            {"name": "dapo"},
            {"rollout": {"length_ranking": "history"}},
            "rollout.length_ranking: plans a step by its first prompts",
        ),
        ({"loss": "no_such:f"}, {}, "algorithm.loss: there is no module 'no_such'"),
        ({"advantage": "rewards"}, {}, "algorithm.advantage: 'rewards' is not of the form"),
        (
            {"loss": "tests.actors.trainer.own_code:reinforce"},
            {"trainer": {"service": "auto"}},
            "algorithm.loss: is set with trainer.service",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    algorithm: dict[str, Any], sections: dict[str, Any], problem: str
) -> None:
    job = smallest_job(**sections | {"algorithm": algorithm})
    (found,) = [f"{field}: {wrong}. {fix}" for field, wrong, fix in check_learning(job)]
    assert found.startswith(problem)
