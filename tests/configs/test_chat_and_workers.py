"""``chat: true`` without a template, and more workers than a machine takes, are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks import checks
from configs.checks.checks import check_job
from configs.checks.model_checks import check_model
from tests.smallest_job import smallest_job


def chat_problems(model: dict[str, Any], *, chat: bool = True) -> list[str]:
    data = {"source": "jsonl", "path": "unused.jsonl", "chat": chat}
    return [wrong for field, wrong, _ in check_model(smallest_job(model=model, data=data)) if field == "data.chat"]


def test_chat_needs_a_template_wherever_the_model_keeps_it(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    model = {"source": "hf", "path": str(tmp_path)}
    assert "has no chat template" in chat_problems(model)[0]
    assert chat_problems(model, chat=False) == []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert chat_problems(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert chat_problems(model) == []
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_problems(model) == []


def test_a_tiny_model_has_no_chat_template_and_what_a_hub_has_is_not_known() -> None:
    assert "tiny model" in chat_problems({"source": "tiny"})[0]
    assert chat_problems({"source": "hf", "path": "some/model"}) == []


@pytest.mark.parametrize(
    ("rollout", "refused"),
    [
        ({"workers": 16}, False),
        ({"workers": 17}, True),
        ({"workers": 99, "engine": "simulated"}, False),
    ],
)
def test_more_workers_than_a_machine_takes_are_refused(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], refused: bool
) -> None:
    monkeypatch.setattr(checks, "cores_here", lambda: 2)
    found = {field: (wrong, fix) for field, wrong, fix in check_job(smallest_job(rollout=rollout))}
    assert ("rollout.workers" in found) is refused
    if refused:
        assert "17 processes on 2 cores" in found["rollout.workers"][0] and "at most 16" in found["rollout.workers"][1]
