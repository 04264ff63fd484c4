"""What an optimizer does to the weights of a small model, beside torch's own on the parameters themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.train_service.sizes import state_bytes
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch import optimizers
from actors.trainer.backends.torch.flat import FlatParameters
from actors.trainer.backends.torch.optimizers import OPTIMIZERS, Muon
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import CheckpointCorrupt, ModelNotLoadable
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.checks import checks
from configs.checks.checks import check_job
from tests.smallest_job import smallest_job
from tests.tiny_checkpoint import make_tiny_checkpoint

RATE, DECAY = 0.01, 0.1
needs_bitsandbytes = pytest.mark.skipif(not checks.installed("bitsandbytes"), reason="bitsandbytes is not installed")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def gradients(model: Any, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(own.shape, generator=draw) for name, own in model.named_parameters()}


def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_the_rest(path: Path) -> None:
    ours, theirs = load(path), load(path)
    flat = FlatParameters(ours)
    spec = BackendSpec(model_path=path, optimizer="muon", learning_rate=RATE, weight_decay=DECAY)
    optimizer = OPTIMIZERS["muon"](flat, spec, ours)
    ends = {id(theirs.get_input_embeddings().weight), id(theirs.get_output_embeddings().weight)}
    hidden = [own for own in theirs.parameters() if own.dim() == 2 and id(own) not in ends]
    matrices = [own for own in theirs.parameters() if own.dim() == 2 and id(own) in ends]
    vectors = [own for own in theirs.parameters() if own.dim() == 1]
    muon = torch.optim.Muon(hidden, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=RATE, betas=spec.adam_betas)
    for step in range(3):
        drawn = gradients(theirs, step)
        for (name, own), (_, there) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            own.grad.copy_(drawn[name])
            there.grad = drawn[name].clone()
        optimizer.step(spec.adam_at(RATE))
        muon.step()
        adam.step()
    assert len(hidden) > 4
    for (name, own), (_, there) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(own, there, atol=1e-6, rtol=1e-5, msg=name)


def test_an_update_of_muon_is_as_large_as_one_of_adamw(path: Path) -> None:
    sizes = {}
    for name in ("adamw", "muon"):
        model = load(path)
        before = {key: own.detach().clone() for key, own in model.named_parameters()}
        spec = BackendSpec(model_path=path)
        optimizer = OPTIMIZERS[name](flat := FlatParameters(model), spec, model)
        flat.grad.normal_()
        for _ in range(20):
            optimizer.step(spec.adam_at(RATE))
        moved = {key: (own - before[key]).square().mean().sqrt().item() for key, own in model.named_parameters()}
        sizes[name] = moved["model.layers.0.mlp.up_proj.weight"] / (20 * RATE)
    assert (
        0.1 < sizes["muon"] < 0.4 and 0.5 < sizes["adamw"] < 1.1
    )  # 0.2 as in the source, and 1 at the very first steps


def test_no_embedding_of_any_kind_is_a_hidden_matrix(tmp_path: Path) -> None:
    make_model("gpt2", FAMILIES["gpt2"], tmp_path)
    model = load(tmp_path)
    muon = Muon(FlatParameters(model), BackendSpec(model_path=tmp_path, optimizer="muon"), model)
    of_layers = [own for own in model.transformer.h.parameters() if own.dim() == 2]
    assert [part.shape for part in muon._matrices] == [own.shape for own in of_layers], "positions are no layer"


def test_muon_keeps_one_number_for_each_of_a_hidden_matrix(path: Path) -> None:
    model = load(path)
    muon = Muon(FlatParameters(model), BackendSpec(model_path=path, optimizer="muon"), model)
    ends = sum({id(end.weight): end.weight.numel() for end in (model.lm_head, model.model.embed_tokens)}.values())
    matrices = sum(own.numel() for own in model.parameters() if own.dim() == 2) - ends
    assert dict(muon.sizes)["momentum_buffer"] == 4 * matrices
    assert {name: tensor.nbytes for name, tensor in muon.state().items()} == dict(muon.sizes)
    rest = sum(size for name, size in muon.sizes if name.startswith("exp_avg.")) // 4
    vectors = sum(own.numel() for own in model.parameters() if own.dim() < 2)
    assert ends + vectors <= rest < ends + 2 * vectors, "the rest alone, with what aligns it"


def trained(path: Path, optimizer: str, steps: int) -> tuple[Any, FlatParameters, torch.Tensor]:
    """An optimizer after some steps, its buffers, and the weights of before."""
    model = load(path)
    flat = FlatParameters(model)
    before = flat.master.clone()
    spec = BackendSpec(model_path=path, optimizer=optimizer, weight_decay=DECAY)
    made = OPTIMIZERS[optimizer](flat, spec, model)
    for step in range(steps):
        flat.grad.copy_(torch.randn(flat.grad.shape, generator=torch.Generator().manual_seed(step)))
        made.step(spec.adam_at(RATE))
    return made, flat, before


@needs_bitsandbytes
def test_with_moments_of_8_bits_matrices_move_much_as_by_adamw_and_vectors_as_by_it(path: Path) -> None:
    (_, whole, before), (_, small, _) = (trained(path, name, 5) for name in ("adamw", "adamw8bit"))
    moved, other = whole.master - before, small.master - before
    vectors = slice(whole.first_vector, None)
    torch.testing.assert_close(moved[vectors], other[vectors], atol=1e-5, rtol=1e-3)
    assert float((moved - other).norm() / moved.norm()) < 0.1
    assert not torch.equal(moved, other), "its moments are rounded"


@needs_bitsandbytes
def test_moments_of_8_bits_take_a_quarter_of_those_of_adamw(path: Path) -> None:
    small, flat, _ = trained(path, "adamw8bit", 1)
    assert {name: tensor.nbytes for name, tensor in small.state().items()} == dict(small.sizes)
    vectors = flat.master.numel() - flat.first_vector
    a_quarter = 2 * flat.first_vector + 8 * vectors
    assert a_quarter < sum(size for _, size in small.sizes) < a_quarter + 8 * (flat.first_vector / 256 + 1)
    estimated = state_bytes(path, dtype="float32", replicas=1, optimizer="adamw8bit")
    told = 8 * flat.master.numel() + sum(size for _, size in small.sizes)
    assert estimated == pytest.approx(told, rel=0.05)


@needs_bitsandbytes
def test_into_how_many_pieces_the_buffer_is_cut_changes_no_bit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, whole, _ = trained(path, "adamw8bit", 3)
    monkeypatch.setattr(optimizers, "_PIECE", 1024)
    many, cut, _ = trained(path, "adamw8bit", 3)
    assert len(many._pieces) > 3 and len(one._pieces) == 1
    assert torch.equal(whole.master, cut.master)
    assert all(torch.equal(tensor, many.state()[name]) for name, tensor in one.state().items())


def test_without_its_library_adamw8bit_is_refused_with_the_name_of_the_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(ModelNotLoadable, match=r"pip install 'headrace\[optimizers\]'"):
        trained(path, "adamw8bit", 0)
    job = smallest_job(trainer={"backend": "torch", "optimizer": "adamw8bit"})
    monkeypatch.setattr(checks, "installed", lambda package: package != "bitsandbytes")
    (problem,) = [found for found in check_job(job) if found[0] == "trainer.optimizer"]
    assert "bitsandbytes" in problem[1] and "headrace[optimizers]" in problem[2]


async def test_a_checkpoint_of_another_optimizer_is_refused_by_its_name(path: Path, tmp_path: Path) -> None:
    saved: dict[str, Path] = {}
    for name in ("adamw", "muon"):
        backend = TorchBackend()
        await backend.start(BackendSpec(model_path=path, optimizer=name))
        await backend.save(saved.setdefault(name, tmp_path / name))
        if name == "muon":
            with pytest.raises(CheckpointCorrupt, match=r"holds the state of adamw, and trainer\.optimizer is muon"):
                await backend.load(saved["adamw"])
        await backend.close()
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=path))
    with pytest.raises(CheckpointCorrupt, match=r"holds the state of muon, and trainer\.optimizer is adamw"):
        await backend.load(saved["muon"])
    await backend.close()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"backend": "fsdp", "optimizer": "muon"}}, "has some rows of each"),
        ({"trainer": {"backend": "fsdp", "optimizer": "adamw8bit"}}, "has some rows of each"),
        (
            {"model": {"adapter": {"rank": 4}}, "trainer": {"backend": "torch", "optimizer": "muon"}},
            "model.adapter is set",
        ),
    ],
)
def test_where_an_optimizer_cannot_be_it_is_refused_before_anything_starts(
    sections: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "installed", lambda _package: True)
    found = [problem for field, problem, _ in check_job(smallest_job(**sections)) if field == "trainer.optimizer"]
    assert len(found) == 1 and said in found[0]
