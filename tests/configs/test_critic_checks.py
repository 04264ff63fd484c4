"""Jobs with a critic that cannot work, and what they are told before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks.critic_checks import check_critic, why_no_critic
from configs.checks.learning_checks import check_learning
from tests.smallest_job import smallest_job


def directory(path: Path, tokens: list[str], *, vocab_size: int = 0, **config: Any) -> Path:
    """What can be read of a model without loading it."""
    path.mkdir()
    content = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size or len(tokens)} | config
    (path / "config.json").write_text(json.dumps(content))
    model = {"vocab": {token: index for index, token in enumerate(tokens[:-1])}}
    added = [{"content": tokens[-1], "id": len(tokens) - 1}]
    (path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def judge(labels: int) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {str(n): "L" for n in range(labels)}}


def found(**sections: Any) -> list[str]:
    sections["algorithm"] = {"name": "ppo"} | sections.get("algorithm", {})
    job = smallest_job(steps=9, **sections)
    return [f"{field}: {wrong}. {fix}" for field, wrong, fix in [*check_learning(job), *check_critic(job)]]


@pytest.mark.parametrize(
    ("sections", "field", "fix"),
    [
        ({"sync": {"mode": "minibatch"}}, "sync.mode: minibatch", "sync, one_step_barrier or async"),
        ({"trainer": {"window_prompts": 4}}, "trainer.window_prompts", "Remove it"),
        (
            {"trainer": {"service": "auto"}, "algorithm": {"epochs": 3}},
            "algorithm.epochs: 3 with trainer.service is not built",
            "Set it to 1",
        ),
        ({"critic": {"warmup_steps": 9}}, "critic.warmup_steps: 9 leaves none of the 9 steps", "Lower it"),
        (
            {"critic": {"reward": "exact_match"}},
            "critic.reward: 'exact_match' is no reward of this job with",
            "Name one",
        ),
        (
            {"critic": {"reward": "judge"}},
            "critic.reward: 'judge' is no reward of this job with kind: model",
            "Name one",
        ),
        (
            {"rollout": {"length_ranking": "siblings"}, "algorithm": {"group_size": 1}},
            "rollout.length_ranking: siblings, but algorithm.group_size is 1",
            "history or learned",
        ),
    ],
)
def test_what_ppo_cannot_do_is_refused_with_what_to_write(sections: dict[str, Any], field: str, fix: str) -> None:
    (problem,) = found(**sections)
    assert problem.startswith(field)
    assert fix in problem


def test_a_service_with_one_pass_samples_of_one_and_async_modes_are_fine() -> None:
    sections = {"trainer": {"service": "auto"}, "algorithm": {"group_size": 1, "kl_coefficient": 0.1}}
    assert found(**sections, sync={"mode": "async"}, critic={"warmup_steps": 8}) == []


def test_a_critic_reads_the_policys_tokens_and_has_one_value(tmp_path: Path) -> None:
    policy = directory(tmp_path / "policy", ["a", "b", "<end>"])
    good = directory(tmp_path / "good", ["a", "b", "<end>", "<pad>"], **judge(1))
    assert why_no_critic(good, policy) is None
    assert why_no_critic(policy, policy) is None
    for path, why in (
        (directory(tmp_path / "labels", ["a", "b", "<end>"], **judge(2)), "has 2 labels, and a critic has one value"),
        (directory(tmp_path / "order", ["b", "a", "<end>"]), "has another tokenizer than the policy"),
        (directory(tmp_path / "short", ["a", "b", "<end>"], vocab_size=2), "knows 2 tokens, and the policy"),
        (directory(tmp_path / "ends", ["a", "b", "<stop>"]), "'<end>' is not its token"),
    ):
        problem = why_no_critic(path, policy)
        assert problem is not None and why in problem[0]


def test_a_job_says_so_before_it_starts(tmp_path: Path) -> None:
    policy, other = directory(tmp_path / "policy", ["a", "b", "c"]), directory(tmp_path / "other", ["b", "a", "c"])
    trainer = {"backend": "simulated"}  # nobody will load these files
    job = {"model": {"path": str(policy)}, "critic": {"path": str(other)}, "trainer": trainer}
    (problem,) = found(**job)
    assert problem.startswith("critic.path: ") and "another tokenizer" in problem
    assert found(**job | {"critic": {"path": str(policy)}}) == []
    (problem,) = found(critic={"path": str(tmp_path)})
    assert "it has no config.json" in problem


@pytest.mark.parametrize(
    "tokenizer", [{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}, {"model": {"vocab": [1]}}]
)
def test_files_of_another_shape_than_transformers_writes_are_said(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    policy, broken = directory(tmp_path / "policy", ["a", "b"]), directory(tmp_path / "broken", ["a", "b"])
    (broken / "tokenizer.json").write_text(json.dumps(tokenizer))
    problem = why_no_critic(broken, policy)
    assert problem is not None and "is not as transformers writes it" in problem[0]
    number = why_no_critic(directory(tmp_path / "number", ["a", "b"], vocab_size="many"), policy)  # type: ignore[arg-type]
    assert number is not None and "is not as transformers writes it" in number[0]
