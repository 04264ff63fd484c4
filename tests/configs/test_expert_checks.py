"""Keys for mixtures of experts with a model, an engine or a trainer that cannot have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks.expert_checks import REPLAYED, check_experts
from configs.schema import JobConfig
from tests.smallest_job import smallest_job

REPLAY: dict[str, Any] = {"trainer": {"backend": "torch", "router_replay": True}}
BALANCE: dict[str, Any] = {"trainer": {"backend": "torch"}, "algorithm": {"load_balancing": 0.0}}


def problems(model_type: str | None, directory: Path, **sections: dict[str, Any]) -> list[str]:
    if model_type is not None:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        sections["model"] = {"source": "hf", "path": str(directory)}
    whole = smallest_job()
    sections = {"rollout": {"engine": "torch"}} | sections
    update = {name: getattr(whole, name).model_copy(update=values) for name, values in sections.items()}
    job: JobConfig = whole.model_copy(update=update)
    return [f"{field}: {wrong}. {fix}" for field, wrong, fix in check_experts(job)]


@pytest.mark.parametrize("family", REPLAYED)
def test_families_whose_routers_are_known_may_replay(tmp_path: Path, family: str) -> None:
    assert problems(family, tmp_path, **REPLAY) == []


@pytest.mark.parametrize(
    ("family", "sections", "said"),
    [
        (
            "llama",
            REPLAY,
            "trainer.router_replay: is set, but the model is a llama, whose routers are not known to it",
        ),
        (
            "phimoe",
            REPLAY,
            "Remove it; known are qwen3_moe, qwen2_moe, mixtral, olmoe, gpt_oss, granitemoe, d",
        ),
        ("deepseek_v3", BALANCE, "algorithm.load_balancing: is set, but the model is a deepseek_v3"),
        (
            "qwen3_moe",
            REPLAY | {"rollout": {"engine": "vllm"}},
            "rollout.engine is vllm, which does not tell the experts it has chosen. Remove it, or set rollout.engine",
        ),
        (
            "qwen3_moe",
            REPLAY | {"rollout": {"engine": "torch", "servers": ("http://127.0.0.1:8000",)}},
            "the servers of rollout.servers do not tell the experts they have chosen. Remove it, or rollout.servers",
        ),
        ("qwen3_moe", {"trainer": {"backend": "simulated", "router_replay": True}}, "trainer.backend is simulated"),
    ],
)
def test_what_cannot_be_is_refused_by_key_with_what_to_do(
    tmp_path: Path, family: str, sections: dict[str, Any], said: str
) -> None:
    [found] = problems(family, tmp_path, **sections)
    assert said in found


@pytest.mark.parametrize(
    ("family", "ranks", "said"),
    [
        ("llama", 2, "trainer.expert_parallel: true, but the model has no experts. Remove it"),
        ("qwen3_moe", 1, "trainer.ranks is 1 and trainer.replicas 1: one rank has all experts of a copy"),
        ("qwen3_moe", 2, None),
        (None, 2, None),  # not here yet
    ],
)
def test_experts_stay_at_their_ranks_if_there_are_experts_and_ranks(
    tmp_path: Path, family: str | None, ranks: int, said: str | None
) -> None:
    if family is not None:
        experts = {"num_experts": 8} if family == "qwen3_moe" else {}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **experts}))
    model = {"source": "hf", "path": str(tmp_path) if family else "Qwen/Qwen3-30B-A3B"}
    trainer = {"backend": "fsdp", "ranks": ranks, "expert_parallel": True}
    found = problems(None, tmp_path, model=model, trainer=trainer)
    assert found == [] if said is None else said in found[0]


def test_a_group_whose_routes_fit_into_no_message_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"num_hidden_layers": 48, "num_experts_per_tok": 8, "num_experts": 128}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    whole = smallest_job()
    update = {
        "model": whole.model.model_copy(update={"source": "hf", "path": str(model)}),
        "trainer": whole.trainer.model_copy(update={"router_replay": True}),
        "rollout": whole.rollout.model_copy(update={"engine": "torch", "max_tokens": 24_000}),
        "algorithm": whole.algorithm.model_copy(update={"group_size": 8}),
    }
    [(field, wrong, _)] = check_experts(whole.model_copy(update=update))
    assert field == "trainer.router_replay" and "with 384 bytes of routes each" in wrong
    fewer = update | {"algorithm": whole.algorithm.model_copy(update={"group_size": 2})}
    assert check_experts(whole.model_copy(update=fewer)) == []


def test_a_tiny_model_has_experts_if_the_job_says_so(tmp_path: Path) -> None:
    tiny = {"source": "tiny", "path": None}
    assert problems(None, tmp_path, **REPLAY, model=tiny | {"experts": 4}) == []
    [found] = problems(None, tmp_path, **REPLAY, model=tiny | {"experts": 0})
    assert "the model is a qwen3" in found


def test_a_model_that_is_not_here_yet_is_asked_when_it_is_loaded(tmp_path: Path) -> None:
    assert problems(None, tmp_path, **REPLAY, model={"source": "hf", "path": "Qwen/Qwen3-30B-A3B"}) == []
