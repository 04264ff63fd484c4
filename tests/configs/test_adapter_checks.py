"""What is wrong with ``model.adapter`` before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    [(field, wrong, fix)] = check_adapter(job({"targets": ["q_proj", "0.mlp.up_proj", "proj"]}, model=model))
    assert (field, wrong.split()[0]) == ("model.adapter.targets", "'proj'")
    assert "down_proj" in fix
    assert check_adapter(job({"targets": "all-linear"}, model=model)) == []
