"""Positions and chat templates are read from a model's small files, in all the forms that they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks.model_checks import check_model
from configs.model_files import ModelFileBroken, has_chat_template, positions, prompt_tokens_max, vocabulary
from tests.smallest_job import smallest_job


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def _yarn(original: int, factor: float) -> dict[str, Any]:
    return {"rope_type": "yarn", "original_max_position_embeddings": original, "factor": factor}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, None),
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 32}, 32),
        ({"max_seq_len": 64}, 64),
        ({"max_position_embeddings": 64, "alibi": True}, None),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 77}}, 77),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, 400),
        ({"max_position_embeddings": 100, "rope_scaling": _yarn(100, 4.0)}, 400),
        ({"max_position_embeddings": 400, "rope_parameters": _yarn(100, 4.0)}, 400),
        ({"max_position_embeddings": 400, "rope_parameters": {"full_attention": _yarn(200, 4.0)}}, 800),
        ({"max_position_embeddings": 131_072, "rope_scaling": _yarn(8192, 8.0)}, 131_072),
    ],
)
def test_positions_reach_as_far_as_the_configuration_says(
    tmp_path: Path, config: dict[str, Any], count: int | None
) -> None:
    write(tmp_path, "config.json", config)
    found = positions(tmp_path)
    assert (found.count if found else None) == count


def test_a_prompt_may_be_as_long_as_the_response_leaves_room(tmp_path: Path) -> None:
    job = smallest_job(rollout={"max_tokens": 100})
    assert prompt_tokens_max(job, tmp_path) == 512
    write(tmp_path, "config.json", {"max_position_embeddings": 256})
    assert prompt_tokens_max(job, tmp_path) == 156


def whole(directory: Path, config: dict[str, Any]) -> None:
    write(directory, "config.json", config)
    write(directory, "tokenizer.json", {})
    write(directory, "pytorch_model.bin", "an old pickle")


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_broken_file_is_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelFileBroken, match=r"config\.json.*again"):
        positions(tmp_path)
    job = smallest_job(model={"path": str(tmp_path)})
    assert [(field, "config.json" in wrong) for field, wrong, _ in check_model(job)] == [("model.path", True)]


def test_responses_longer_than_the_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    whole(tmp_path, {"n_positions": 32})
    [(field, wrong, fix)] = check_model(smallest_job(model={"path": str(tmp_path)}, rollout={"max_tokens": 40}))
    assert field == "rollout.max_tokens" and "32 positions (n_positions in " in wrong and "below 32" in fix
    assert check_model(smallest_job(model={"path": str(tmp_path)}, rollout={"max_tokens": 31})) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}),
    ],
)
def test_chat_without_a_template_is_refused_before_anything_starts(tmp_path: Path, name: str, content: Any) -> None:
    whole(tmp_path, {})
    job = smallest_job(model={"path": str(tmp_path)}, data={"source": "jsonl", "path": "x", "chat": True})
    assert [field for field, _, _ in check_model(job)] == ["data.chat"] and not has_chat_template(tmp_path)
    write(tmp_path, name, content)
    assert check_model(job) == [] and has_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("config", "rows"),
    [({"vocab_size": 300}, 300), ({"text_config": {"vocab_size": 40}, "vocab_size": 7}, 40), ({}, 0)],
)
def test_the_ids_of_a_model_are_those_of_its_text_config_and_simulated_engines_draw_others(
    tmp_path: Path, config: dict[str, Any], rows: int
) -> None:
    write(tmp_path, "config.json", config)
    real = smallest_job(rollout={"engine": "torch"}, trainer={"backend": "torch"})
    assert vocabulary(real, tmp_path) == rows
    assert vocabulary(smallest_job(rollout={"engine": "simulated"}), tmp_path) == 0
    assert vocabulary(smallest_job(trainer={"backend": "simulated"}), tmp_path) == 0
