"""What is wrong with ``model.adapter`` before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.adapter_schema import AdapterConfig
from configs.checks.adapter_checks import check_adapter
from configs.schema import JobConfig
from tests.smallest_job import smallest_job
from tests.tiny_checkpoint import make_tiny_checkpoint


def job(adapter: dict[str, Any] | None, **sections: dict[str, Any]) -> JobConfig:
    torch = {"trainer": {"backend": "torch"}, "rollout": {"engine": "torch"}}
    changes = {**torch, **sections, "model": {"adapter": AdapterConfig.model_validate(adapter) if adapter else None}}
    changes["model"] |= sections.get("model", {})
    whole = smallest_job()
    update = {name: getattr(whole, name).model_copy(update=values) for name, values in changes.items()}
    return whole.model_copy(update=update)


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        ({"trainer": {"backend": "simulated"}}, "trainer.backend", "has no adapters"),
        ({"rollout": {"engine": "simulated"}}, "rollout.engine", "has no adapters"),
        ({"rollout": {"engine": "vllm", "in_flight": "keep"}}, "rollout.in_flight", "must be prefilled anew"),
    ],
)
def test_what_computes_no_adapter_is_refused_by_name(sections: dict[str, Any], field: str, said: str) -> None:
    [(found, wrong, _)] = check_adapter(job({"rank": 4}, **sections))
    assert found == field
    assert said in wrong
    assert check_adapter(job(None, **sections)) == []


def test_a_target_that_no_file_of_the_model_names_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    model = {"source": "hf", "path": str(make_tiny_checkpoint(tmp_path / "model"))}
    [(field, wrong, fix)] = check_adapter(job({"targets": ["q_proj", "0.mlp.up_proj", "proj", "lm_head"]}, model=model))
    assert (field, wrong.split()[0]) == ("model.adapter.targets", "'proj'")
    assert "down_proj" in fix
    assert "embed" not in fix, "what is offered can have an adapter"
    for targets in ("all-linear", ["all-linear", "lm_head"]):
        assert check_adapter(job({"targets": targets}, model=model)) == []


EXPERTS = {"source": "tiny", "experts": 4}


@pytest.mark.parametrize(
    ("adapter", "sections", "field", "said"),
    [
        (
            {"targets": ["q_proj", "experts.down_proj"]},
            {"rollout": {"engine": "vllm", "in_flight": "recompute"}},
            "model.adapter.targets",
            "'experts.down_proj' names weights of experts, and vLLM is given adapters of linear layers only",
        ),
        (
            {"targets": ["gate_up_proj"]},
            {"trainer": {"backend": "fsdp", "ranks": 2, "expert_parallel": True}},
            "model.adapter.targets",
            "where trainer.expert_parallel keeps them at their ranks",
        ),
        (
            {"targets": "all-linear"},
            {"rollout": {"engine": "vllm", "in_flight": "recompute", "device": "cpu"}},
            "rollout.engine",
            "cannot compute a mixture of experts with adapters",
        ),
        ({"targets": ["gate_proj"]}, {}, "model.adapter.targets", "'gate_proj' names no layer of 'the tiny model'"),
    ],
)
def test_experts_that_can_have_no_adapter_are_refused(
    adapter: dict[str, Any], sections: dict[str, Any], field: str, said: str
) -> None:
    [(found, wrong, _)] = check_adapter(job(adapter, model=EXPERTS, **sections))
    assert found == field
    assert said in wrong
    dense = check_adapter(job(adapter, **sections, model={"source": "tiny"}))
    assert not any("experts" in wrong and "names no layer" not in wrong for _, wrong, _ in dense)


def test_experts_may_be_targets_by_the_names_that_they_have_once_loaded(tmp_path: Path) -> None:
    """Their files have a matrix for each expert; a model that is not here yet is asked when it is loaded."""
    targets = {"targets": ["q_proj", "mlp.experts.gate_up_proj", "down_proj"]}
    assert check_adapter(job(targets, model=EXPERTS)) == []
    make_model("mixtral", FAMILIES["mixtral"], tmp_path)
    model = {"source": "hf", "path": str(tmp_path)}
    assert check_adapter(job(targets, model=model)) == []
    [(_, wrong, fix)] = check_adapter(job({"targets": ["shared_experts.down_proj"]}, model=model))
    assert "'shared_experts.down_proj' names no layer" in wrong
    assert fix == "It has gate, k_proj, o_proj, q_proj, v_proj, lm_head, experts.gate_up_proj, experts.down_proj"


def test_a_target_is_looked_for_in_a_tiny_model_and_in_one_that_the_cache_of_the_hub_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"source": "tiny"}
    assert check_adapter(job({"targets": ["q_proj", "mlp.up_proj"]}, model=tiny)) == []
    [(_, wrong, fix)] = check_adapter(job({"targets": ["query"]}, model=tiny))
    assert "'query' names no layer of 'the tiny model'" in wrong
    assert "q_proj" in fix
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--acme--small"
    make_tiny_checkpoint(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    fetched = {"source": "hf", "path": "acme/small"}
    assert check_adapter(job({"targets": ["q_proj"]}, model=fetched)) == []
    assert check_adapter(job({"targets": ["query"]}, model=fetched)) != []
    assert check_adapter(job({"targets": ["query"]}, model={"source": "hf", "path": "acme/not-fetched"})) == []
