"""Checkpoints of an adapter as other programs see them: a PEFT directory, and, merged, a whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from actors.models.adapter import CONFIG_FILE, TENSOR_FILE, AdapterSpec
from supervisors.cli.app import app
from supervisors.cli.models import evaluate
from tests.actors.trainer.backends.test_adapter import ADAPTER, scores_of, started, train
from tests.tiny_checkpoint import make_tiny_checkpoint

TOKENS = [5, 9, 11, 40, 7, 60, 23]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


async def exported(model_path: Path, directory: Path, adapter: AdapterSpec = ADAPTER) -> np.ndarray:
    """A checkpoint of a trained adapter in ``directory``; the log-probabilities of ``TOKENS`` under it."""
    backend = await started(model_path, adapter=adapter)
    await train(backend)
    await backend.export_checkpoint(directory)
    scores = await scores_of(backend, TOKENS)
    await backend.close()
    return scores


def merge(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["merge", *map(str, arguments), "--json"])


def log_probabilities(model: Any) -> np.ndarray:
    prompt = [3, 4, 5, 6, 7]  # that of ``scores_of``
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + TOKENS])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits.gather(-1, torch.tensor(TOKENS)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("targets", [(), ("q_proj", "mlp.down_proj")])
async def test_the_merged_model_says_what_the_adapter_says(
    model_path: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scores = await exported(model_path, tmp_path / "adapter", AdapterSpec(rank=4, alpha=8.0, targets=targets))
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layers"] == (4 if targets else 14)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(log_probabilities(model), scores, atol=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(model_path)
    assert not np.allclose(log_probabilities(whole), scores, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("ab")["input_ids"]
    assert not list(tmp_path.glob("*.partial"))


async def test_peft_loads_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    scores = await exported(model_path, tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), tmp_path / "adapter")
    np.testing.assert_allclose(log_probabilities(model), scores, atol=1e-5)


async def test_files_and_names_are_those_that_peft_documents(model_path: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    await exported(model_path, tmp_path, AdapterSpec(rank=4, alpha=8.0, targets=("q_proj",)))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["target_modules"]) == (
        *("LORA", 4, 8.0),
        ["q_proj"],
    )
    assert config["base_model_name_or_path"] == str(model_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="np") as file:
        assert sorted(file.keys()) == [
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            for layer in (0, 1)
            for part in "AB"
        ]


def _other_base(adapter: Path) -> None:
    text = (adapter / CONFIG_FILE).read_text()
    other = make_tiny_checkpoint(adapter.parent / "other", seed=3)
    (adapter / CONFIG_FILE).write_text(json.dumps(json.loads(text) | {"base_model_name_or_path": str(other)}))


def _set(**changes: object) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        config = json.loads((adapter / CONFIG_FILE).read_text())
        (adapter / CONFIG_FILE).write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_other_base, "name the directory that holds the former with --base"),
        (_set(base_model_name_or_path="/gone"), "its base was /gone, where no model is"),
        (_set(use_dora=True), "is no plain LoRA adapter (it sets use_dora)"),
        (_set(r=None), "is no description of a LoRA adapter"),
        (lambda adapter: (adapter / TENSOR_FILE).write_bytes(b"{"), "name another checkpoint"),
        (lambda adapter: (adapter / CONFIG_FILE).unlink(), "has no adapter_config.json"),
    ],
)
async def test_what_cannot_be_merged_is_refused_and_nothing_is_written(
    model_path: Path, tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    await exported(model_path, tmp_path / "adapter")
    harm(tmp_path / "adapter")
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "merged").exists()


async def test_a_base_that_has_moved_is_named_and_an_existing_directory_is_left_alone(
    model_path: Path, tmp_path: Path
) -> None:
    await exported(model_path, tmp_path / "adapter")
    _set(base_model_name_or_path="/gone")(tmp_path / "adapter")
    moved = Path(shutil.copytree(model_path, tmp_path / "moved"))
    assert merge(tmp_path / "adapter", tmp_path / "merged", "--base", moved).exit_code == 0
    assert merge(tmp_path / "adapter", tmp_path / "merged", "--base", moved).exit_code == 2
    assert "holds a whole model already" in merge(tmp_path / "merged", tmp_path / "again").output


JOB = """
name: held-out
steps: 1
model: {source: hf, path: MODEL, adapter: {rank: 4}}
data: {source: jsonl, path: DATA, max_prompt_tokens: 8}
reward: {kind: exact_match}
rollout: {max_tokens: 4}
eval: {data: {source: jsonl, path: DATA}}
"""


async def test_eval_of_an_adapter_measures_the_model_that_it_makes(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(evaluate, "_evaluate", lambda job, *_: (measured.append(job), ({"state": "finished"}, {}))[1])
    await exported(model_path, tmp_path / "adapter")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    job = JOB.replace("MODEL", str(model_path)).replace("DATA", str(tmp_path / "rows.jsonl"))
    (tmp_path / "job.yaml").write_text(job)
    command = ["eval", str(tmp_path / "adapter"), str(tmp_path / "job.yaml"), "--dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert measured[0].model.path == str(tmp_path / "run/merged") and measured[0].model.adapter is None
    assert (tmp_path / "run/merged/model.safetensors").exists()
    assert str(tmp_path / "run/merged") in (tmp_path / "run/job.yaml").read_text()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "holds a run already" in again.output
    _set(base_model_name_or_path="/gone")(tmp_path / "adapter")
    lost = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "other")])
    assert lost.exit_code == 2 and "headrace merge" in lost.output and not (tmp_path / "other").exists()
