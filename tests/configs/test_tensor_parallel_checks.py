"""A job whose workers have several ranks is refused where its engine has one, or its model does not divide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks.tensor_parallel_checks import check_tensor_parallel, why_indivisible
from tests.smallest_job import smallest_job

QWEN = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151_936}


def test_an_engine_of_one_rank_is_refused() -> None:
    [(field, wrong, fix)] = check_tensor_parallel(smallest_job(rollout={"engine": "torch", "tensor_parallel": 2}))
    assert field == "rollout.tensor_parallel"
    assert "rollout.engine is torch" in wrong and "vllm" in fix
    assert check_tensor_parallel(smallest_job(rollout={"engine": "simulated", "tensor_parallel": 2})) == []


@pytest.mark.parametrize(
    ("ranks", "changes", "named"),
    [
        (2, {}, ""),
        (16, {}, ""),  # eight heads of keys, each of which two ranks have
        (3, {}, "num_attention_heads = 16"),
        (4, {"num_key_value_heads": 6}, "num_key_value_heads = 6"),
        (4, {"intermediate_size": 3070}, "intermediate_size = 3070"),
        (3, {"num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 100}, "padded to 128"),
        (2, {"text_config": {"num_attention_heads": 15}}, "num_attention_heads = 15"),
    ],
)
def test_a_model_is_divided_as_vllm_divides_it(tmp_path: Path, ranks: int, changes: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
    wrong = why_indivisible(tmp_path, ranks)
    assert named in wrong and bool(named) == bool(wrong)
    job = smallest_job(model={"path": str(tmp_path)}, rollout={"engine": "vllm", "tensor_parallel": ranks})
    assert [found[1] for found in check_tensor_parallel(job)] == ([wrong] if wrong else [])


def test_nothing_is_said_of_one_rank_or_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    assert check_tensor_parallel(smallest_job(rollout={"engine": "torch"})) == []
    elsewhere = {"path": str(tmp_path / "nothing")}
    assert check_tensor_parallel(smallest_job(model=elsewhere, rollout={"engine": "vllm", "tensor_parallel": 3})) == []
