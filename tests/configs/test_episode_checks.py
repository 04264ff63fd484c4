"""Jobs with an environment that cannot work, and what they are told before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from configs.checks.checks import check_job
from configs.checks.environment_checks import check_episodes
from tests.smallest_job import smallest_job

ENVIRONMENT = {"kind": "python", "path": "game:Game"}


def found(**sections: Any) -> list[str]:
    sections["environment"] = ENVIRONMENT | sections.get("environment", {})
    sections.setdefault("reward", {})
    return [f"{field}: {wrong}. {fix}" for field, wrong, fix in check_episodes(smallest_job(**sections))]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"scheduling": {"policy": "planned"}}, "scheduling.policy: planned is not built for episodes"),
        ({"scheduling": {"seeding": True}}, "scheduling.seeding: true is not built for episodes"),
        ({"rollout": {"length_ranking": "history"}}, "rollout.length_ranking: history is not built for episodes"),
        (
            {"environment": {"turn_tokens": 9}, "rollout": {"max_tokens": 8}},
            "environment.turn_tokens: 9 is more than the model's tokens of a whole episode (rollout.max_tokens), 8",
        ),
        (
            {"environment": {"episode_tokens": 8}, "rollout": {"max_tokens": 8}},
            "environment.episode_tokens: 8 leaves the environment nothing beside rollout.max_tokens, 8. Set it to 16",
        ),
    ],
)
def test_what_does_not_go_with_episodes_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    [problem] = found(**sections)
    assert problem.startswith(said)


def test_episodes_by_themselves_are_no_problem_and_without_them_nothing_is_looked_at() -> None:
    assert found() == []
    assert check_episodes(smallest_job(scheduling={"seeding": True})) == []


def test_a_micro_batch_must_hold_an_episode_in_one_context() -> None:
    job = smallest_job(
        environment=ENVIRONMENT, reward={}, rollout={"max_tokens": 64}, trainer={"micro_batch_tokens": 255}
    )
    wrong = {field: f"{what}. {fix}" for field, what, fix in check_job(job)}
    assert wrong["trainer.micro_batch_tokens"].startswith(
        "255 cannot hold one sample of environment.episode_tokens = 256"
    )
