"""What a job's state will take is reckoned the same by the head, which admits it, and by the service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.train_service.sizes import replicas_of, state_bytes
from actors.trainer import setup
from configs.adapter_schema import AdapterConfig
from configs.services import ServiceConfig
from supervisors.head.admission import trained_bytes
from tests.smallest_job import smallest_job


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
