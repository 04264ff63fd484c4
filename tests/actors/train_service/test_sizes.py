"""What a job's state will take is reckoned the same by the head, which admits it, and by the service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.models.adapter import AdapterSpec
from actors.train_service.sizes import parameters_of, replicas_of, state_bytes
from actors.trainer import setup
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.adapter import Switch, add_adapter
from actors.trainer.backends.torch.causal_lm import load_model
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.adapter_schema import AdapterConfig
from configs.services import ServiceConfig
from supervisors.sharing.admission import trained_bytes
from tests.smallest_job import smallest_job
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.mark.parametrize(
    ("backend", "device", "threads", "replicas"),
    [("torch", "cpu", 1, 1), ("torch", "cpu", 4, 2), ("torch", "cuda", 4, 1), ("simulated", "cpu", 4, 1)],
)
def test_head_and_service_come_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, device: str, threads: int, replicas: int
) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [50], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(setup, "SHARED_OUT_BYTES", 1)
    assert replicas_of(tmp_path, backend=backend, device=device, threads=threads) == replicas
    needed = state_bytes(tmp_path, dtype="float32", replicas=replicas)
    assert needed == 50 * (12 + 4 * replicas)
    service = ServiceConfig.model_validate(
        {"name": "s", "memory_bytes": 1, "backend": backend, "device": device, "threads": threads}
    )
    assert trained_bytes(smallest_job(), tmp_path, [service]) == needed


def test_the_state_of_an_adapter_is_the_adapters_alone(tmp_path: Path) -> None:
    shapes = {"layers.0.q.weight": [64, 32], "layers.0.down.weight": [32, 128], "norm.weight": [32]}
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    job = smallest_job()
    whole = trained_bytes(job, tmp_path, [])
    model = job.model.model_copy(update={"adapter": AdapterConfig(rank=2, targets=["q"])})
    adapted = trained_bytes(job.model_copy(update={"model": model}), tmp_path, [])
    assert (whole, adapted) == ((64 * 32 + 32 * 128 + 32) * 16, 2 * (64 + 32) * 16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("targets", [("lm_head",), ("all-linear", "lm_head")])
def test_an_adapter_of_a_head_that_is_in_no_file_is_reckoned_too(
    tmp_path: Path, targets: tuple[str, ...], tied: bool
) -> None:
    make_tiny_checkpoint(tmp_path, tied=tied)
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path)).requires_grad_(False)
    spec = AdapterSpec(rank=4, alpha=4.0, targets=targets)
    add_adapter(model, spec, Switch(), seed=0)
    takes = sum(own.numel() for own in model.parameters() if own.requires_grad)
    assert takes <= parameters_of(tmp_path, spec) <= 2 * takes


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_adapter_of_experts_is_reckoned_at_no_less_than_it_takes_and_without_it_experts_count_nothing(
    tmp_path: Path, family: str
) -> None:
    """In mixtral's files each expert has matrices of its own, in gpt_oss's all of them have one tensor."""
    make_model(family, FAMILIES[family], tmp_path)
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path)).requires_grad_(False)
    targets = ("o_proj", "experts.gate_up_proj", "experts.down_proj")
    add_adapter(model, AdapterSpec(rank=4, alpha=4.0, targets=targets), Switch(), seed=0)
    takes = sum(own.numel() for own in model.parameters() if own.requires_grad)
    reckoned = parameters_of(tmp_path, AdapterSpec(rank=4, alpha=4.0, targets=targets))
    assert takes <= reckoned < 1.5 * takes
    others = parameters_of(tmp_path, AdapterSpec(rank=4, alpha=4.0, targets=("o_proj",)))
    assert others == 2 * 4 * sum(model.model.layers[0].self_attn.o_proj.weight.shape)
