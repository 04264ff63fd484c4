"""What a directory holds: adapters as PEFT writes them, in other dtypes, damaged, and more than memory holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.models.adapter import CONFIG_FILE, TENSOR_FILE, base_identity
from actors.sampling.errors import SnapshotUnusable
from actors.sampling.snapshots import SnapshotKind, Snapshots, read_adapter
from configs.limits import Limits
from tests.actors.sampling.sampling_world import inline
from tests.made_snapshots import write_adapter
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"))


def with_config(directory: Path, **keys: Any) -> None:
    file = directory / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def with_tensors(directory: Path, change: Callable[[torch.Tensor], torch.Tensor], **metadata: str) -> None:
    file = directory / TENSOR_FILE
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file, metadata=metadata or None)


def test_rank_scale_and_layers_are_those_of_the_files(base: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, base, rank=4, targets=("q_proj",))
    adapter, of = read_adapter(path, "float32")
    layers = tuple(f"model.layers.{n}.self_attn.q_proj" for n in range(2))
    assert (adapter.spec.rank, adapter.spec.scale, adapter.spec.targets, of) == (4, 2.0, layers, "")
    with_config(path, use_rslora=True)
    assert read_adapter(path, "float32")[0].spec.scale == 8.0 / 2
    with_config(path, use_rslora=False, target_modules="all-linear", target_parameters=[])
    assert read_adapter(path, "float32")[0].spec.targets == layers, "as the tensors' names say"
    with_config(path, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.gate.weight"])
    assert read_adapter(path, "float32")[0].spec.targets == ("q_proj", "mlp.experts.gate_up_proj", "mlp.gate")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
def test_tensors_are_rounded_to_the_dtype_of_the_engine(
    base: Path, tmp_path: Path, stored: torch.dtype, served: str
) -> None:
    path = write_adapter(tmp_path, base, rank=2, targets=("k_proj",))
    with_tensors(path, lambda tensor: tensor.to(stored))
    adapter, _ = read_adapter(path, served)
    for name, tensor in load_file(path / TENSOR_FILE).items():
        want = tensor.to(torch.float32).to(getattr(torch, served))
        have = torch.from_numpy(adapter.tensors[name].copy()).view(want.dtype)
        assert torch.equal(have, want) and adapter.dtypes[name] == served


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: (path / TENSOR_FILE).unlink(), "cannot be read as an adapter"),
    (lambda path: (path / TENSOR_FILE).write_bytes(b"\x08" * 40), "cannot be read as an adapter"),
    (lambda path: (path / CONFIG_FILE).write_text("{"), "cannot be read as JSON"),
    (lambda path: (path / CONFIG_FILE).write_text("[1]"), "expected a JSON object"),
    (lambda path: with_config(path, peft_type="IA3"), "has peft_type 'IA3'"),
    (lambda path: with_config(path, use_dora=True), "has use_dora True, which is not served"),
    (lambda path: with_config(path, bias="all"), "has bias 'all'"),
    (lambda path: with_config(path, rank_pattern={"q_proj": 2}), "has rank_pattern"),
    (lambda path: with_config(path, modules_to_save=["lm_head"]), "has modules_to_save"),
    (lambda path: with_config(path, r=0), "has r 0"),
    (lambda path: with_config(path, r="many"), "invalid literal"),
    (lambda path: with_config(path, lora_alpha=float("nan")), "lora_alpha nan"),
    (lambda path: with_tensors(path, lambda tensor: tensor * float("nan")), "holds a weight that is not finite"),
    (lambda path: with_tensors(path, lambda tensor: tensor.to(torch.int32)), "is I32: expected one of"),
    (lambda path: save_file({}, path / TENSOR_FILE), "holds no tensors"),
    (
        lambda path: with_tensors(path, lambda tensor: tensor, base="another"),
        "an adapter of the model with xxh3 another",
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[said for _, said in DAMAGES])
async def test_a_directory_that_is_no_adapter_of_this_model_is_refused_with_a_reason(
    base: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    path = write_adapter(tmp_path / "adapter", base, rank=2)
    damage(path)
    with pytest.raises(SnapshotUnusable, match=said):
        await Snapshots(base, "float32", Limits(), inline).opened(str(path))


async def test_an_adapter_that_names_this_model_is_served_and_a_whole_model_is_known_as_one(
    base: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", base, rank=2)
    with_tensors(path, lambda tensor: tensor, base=base_identity(base))
    snapshots = Snapshots(base, "float32", Limits(), inline)
    adapter, whole = await snapshots.opened(str(path)), await snapshots.opened(str(base))
    assert (adapter.kind, whole.kind) == (SnapshotKind.ADAPTER, SnapshotKind.MODEL)
    assert adapter is await snapshots.opened(str(path)) and adapter.version != whole.version
    assert (await snapshots.opened(None)).kind is SnapshotKind.BASE


async def test_tensors_are_kept_within_the_bound_and_read_again_when_they_are_gone(base: Path, tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / str(n), base, rank=4, seed=n) for n in range(4)]
    reads: list[Path] = []

    async def counted(function: Callable[..., Any], *args: Any) -> Any:
        reads.extend(args if function.__name__ == "_read" else ())
        return function(*args)

    size = read_adapter(paths[0], "float32")[0].size_bytes
    snapshots = Snapshots(base, "float32", Limits(sampling_memory_bytes=2 * size + 10, sampling_snapshots=3), counted)
    known = [await snapshots.opened(str(path)) for path in paths]
    assert snapshots.held_bytes == 2 * size and len(reads) == 4
    await snapshots.adapter(known[3])
    assert len(reads) == 4
    again = await snapshots.adapter(known[1])
    assert len(reads) == 5 and snapshots.held_bytes == 2 * size
    first = read_adapter(paths[1], "float32")[0].tensors
    assert all(np.array_equal(first[name], array) for name, array in again.tensors.items())
    assert (await snapshots.opened(str(paths[0]))).version == 5, "the fourth snapshot took the place of the first"
