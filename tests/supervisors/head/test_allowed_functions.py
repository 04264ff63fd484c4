"""Whoever may submit may run code; the operator says which."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.control.errors import BadConfig
from supervisors.head.allowed_functions import check_allowed
from supervisors.head.head import Head
from supervisors.head.operations import Operations

PREFIXES = ["my_rewards", "lab.scorers:exact"]


def job(function: object, **sections: Any) -> dict[str, Any]:
    return {"name": "j", "reward": {"kind": "function", "function": function}, **sections}


@pytest.mark.parametrize("function", ["my_rewards:score", "my_rewards.math:score", "lab.scorers:exact", None])
def test_what_begins_with_a_prefix_is_allowed(function: str | None) -> None:
    check_allowed(job(function), PREFIXES)


@pytest.mark.parametrize(
    "function",
    ["os:execlp", "my_rewards_of_eve:score", "lab.scorers:exactly", "lab.scorers", "my_rewards", "", 7, ["os:system"]],
)
def test_other_code_is_refused_with_what_is_allowed(function: object) -> None:
    if function == "my_rewards":
        check_allowed(job(function), PREFIXES)  # it is no function, which the job file's own check says
        return
    with pytest.raises(
        BadConfig, match=r"reward.function: .* this head runs functions of my_rewards, lab.scorers:exact"
    ):
        check_allowed(job(function), PREFIXES)


def test_functions_of_learning_and_of_environments_are_allowed_by_the_same_prefixes() -> None:
    code = {"path": "my_rewards:Game", "tools": ["my_rewards.tools:look"], "options": {"path": "a file"}}
    check_allowed({"algorithm": {"loss": "my_rewards:loss", "loss_mean": "token"}, "environment": code}, PREFIXES)
    check_allowed({"algorithm": {"loss": None}, "environment": {"tools": []}}, PREFIXES)


@pytest.mark.parametrize(
    "sections",
    [
        {"rewards": [{"function": "my_rewards:a"}, {"function": "os:system"}]},
        {"anything": {"deep": {"functions": ["my_rewards:a", "os:system"]}}},
        {"data": {"filter_function": "os:system"}},
        {"algorithm": {"loss": "os:system"}},
        {"algorithm": {"advantage": "os:system"}},
        {"environment": {"kind": "python", "path": "os:system"}},
        {"environment": {"kind": "agent", "path": "my_rewards:play", "tools": ["my_rewards:look", "mcp: sh -c id"]}},
        {"environment": {"kind": "verifiers", "path": "my_rewards", "interpreter": "/tmp/python"}},
        {"environment": {"kind": "python", "tools": ["my_rewards:look"], "options": {"reward": "os:system"}}},
        {"environment": {"kind": "python", "path": "my_rewards:x/../os:system"}},
        {"environment": {"kind": "verifiers", "path": "my_rewards:x/evil_env"}},
        *(
            {"environment": {"kind": "verifiers", "path": "my_rewards", "options": options}}
            for options in (
                {"taskset": {"id": "evil_env"}},
                {"taskset": {"task": {"rewards": {"score": {"fn": "evil.py:score"}}}}},
                {"taskset": {"system_prompt": "/etc/passwd"}},
                {"taskset": "evil_env"},
                {"id": "evil_env"},
                {"agent": {"harness": {"id": "evil_env"}}},
                {"agent": {"harness": {"id": "my_rewards", "env": {"LD_PRELOAD": "/tmp/evil.so"}}}},
                {"agent": {"runtime": {"type": "docker"}}},
                {"client": {"type": "train", "renderer_model_name": "/anything"}},
            )
        ),
        {"environment": {"kind": "openenv", "url": "http://evil.example"}},
        {"rollout": {"engine": "vllm", "engine_options": {"worker_cls": "os.system"}}},
    ],
)
def test_code_is_found_wherever_a_job_names_it(sections: dict[str, Any]) -> None:
    check_allowed(job("my_rewards:a", **sections), None)
    with pytest.raises(BadConfig, match="--allow-functions"):
        check_allowed(job("my_rewards:a", **sections), PREFIXES)


def test_numbers_of_a_verifiers_environment_and_its_own_settings_are_free() -> None:
    options = {
        "taskset": {"numbers": 8},
        "agent": {"harness": {"id": "my_rewards"}, "max_turns": 4, "sampling": {"top_k": 3}},
        "client": {"type": "train"},
        "timeout": {"episode": 60},
    }
    check_allowed({"environment": {"kind": "verifiers", "path": "my_rewards", "options": options}}, PREFIXES)


async def test_a_job_that_is_refused_leaves_nothing_behind_and_is_not_even_looked_at(tmp_path: Path) -> None:
    head = SimpleNamespace(allow_functions=("my_rewards",), run_root=tmp_path, jobs={})
    with pytest.raises(BadConfig, match="'os:execlp' is not allowed"):
        await Operations(cast(Head, head)).submit(job("os:execlp", nonsense=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reward", [{"kind": "http"}, [{"kind": "exact_match"}, {"kind": "http"}]])
@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://scorer.lab:8000/get_reward?x=1", True),
        ("http://scorer.lab:8000/get_reward", False),
        ("https://scorer.lab/get_reward", False),
        ("https://scorer.lab:8000@evil.example/", False),
        ("https://evil.example/#https://scorer.lab:8000", False),
        ("https://[", False),
        (7, False),
    ],
)
def test_a_limited_head_asks_only_servers_that_it_names(reward: Any, url: object, allowed: bool) -> None:
    """Else a job could send what the head's machine can reach, and its environment, to anybody."""
    last = reward[-1] if isinstance(reward, list) else reward
    last = {**last, "url": url}
    job = {"name": "j", "reward": [*reward[:-1], last] if isinstance(reward, list) else last}
    check_allowed(job, None)
    if allowed:
        check_allowed(job, [*PREFIXES, "https://scorer.lab:8000"])
    with pytest.raises(BadConfig, match="--allow-functions"):
        check_allowed(job, PREFIXES if allowed else [*PREFIXES, "https://scorer.lab:8000"])


def test_a_limited_head_lets_workers_speak_only_to_servers_that_it_names() -> None:
    """A worker sends them the key of vLLM from the head's environment."""
    job = {"name": "j", "rollout": {"servers": ["http://gpu.lab:8000", "http://evil.example:8000"]}}
    check_allowed(job, None)
    check_allowed(job, [*PREFIXES, "http://gpu.lab:8000", "http://evil.example:8000"])
    with pytest.raises(BadConfig, match=r"rollout\.servers: 'http://evil\.example:8000' is not allowed"):
        check_allowed(job, [*PREFIXES, "http://gpu.lab:8000"])
