"""What every way to compute attention over packed rows promises (``row_attention.py``), on a CPU.

Held against each other and against sequences by themselves: documents side by side, trees with branches of branches,
several rows with padding, rows longer than a block. ``flex`` has no backward pass on a CPU, so there only its logits
are compared, uncompiled; ``-m gpu`` compares its gradients.

transformers mixes documents without a word in three ways, and the same comparison finds each of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils

from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.attention import blocks as attention_blocks
from actors.trainer.backends.torch.attention.blocks import query_blocks
from actors.trainer.backends.torch.attention.flex import block_mask
from actors.trainer.backends.torch.attention.row_attention import KINDS, attention_of
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.packing import Layout, Row, packed, padded, plan_blocks
from actors.trainer.errors import ModelNotLoadable
from actors.trainer.learning.samples import pad
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.actors.trainer.random_samples import random_samples
from tests.tiny_checkpoint import make_tiny_checkpoint

TRAINED = ("dense", "blocks")
"""Kinds with a backward pass on a CPU."""
CUDA = pytest.param("flex", "cuda", marks=pytest.mark.gpu)
DOCUMENTS = [(20, [30]), (4, [50]), (33, [9]), (7, [41])]
"""(prompt tokens, response tokens of each sibling): one sibling each, so nothing branches."""
TREE = [(40, [70, 50, 61, 33]), (3, [90, 20, 8])]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the tests have several blocks."""
    monkeypatch.setattr(attention_blocks, "QUERY_ROWS", 32)
    monkeypatch.setattr(attention_blocks, "LEAST_ROWS", 8)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def eager_flex() -> Iterator[None]:
    """flex_attention without a compiler."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def batch_of(groups: list[tuple[int, list[int]]], *, vocabulary: int) -> MicroBatch:
    return pad(random_samples(groups, 0, vocabulary=vocabulary))


def logits_by(path: Path, kind: str, device: str = "cpu", dtype: str = "float32") -> ResponseLogits:
    """A model that computes packed rows by ``kind``; uncompiled flex is let through on a CPU, for its logits."""
    model = load_model(path, BackendSpec(model_path=path, attention=kind, device=device, dtype=dtype))
    if kind == "flex" and device == "cpu":
        with pytest.raises(ModelNotLoadable, match=r"trainer\.attention: flex is for CUDA.*set it to blocks"):
            ResponseLogits(model, device)
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        head._forward_pre_hooks.clear()
        model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
        source = ResponseLogits(model, device)
        model.config._attn_implementation = KINDS["flex"].implementation  # type: ignore[union-attr]
        source._attention = KINDS["flex"]
        return source
    source = ResponseLogits(model, device)
    assert source.may_pack and attention_of(model) is KINDS[kind] is source._attention
    return source


def rows_of(batch: MicroBatch, count: int) -> list[Row]:
    blocks = plan_blocks(batch)
    return [tuple(blocks[row::count]) for row in range(count)]


def computed(source: ResponseLogits, layout: Layout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [N, V] of every predicted token, and the gradients of a sum over them."""
    model = source.model
    model.zero_grad()
    row_of = torch.from_numpy(layout.row_of).to(source._device)
    logits = source.forward(layout).index_select(0, row_of)
    if torch.is_grad_enabled():
        logits.float().logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    grads = {name: own.grad.float().cpu() for name, own in model.named_parameters() if own.grad is not None}
    return logits.detach().float().cpu(), grads


def assert_alike(
    one: tuple[torch.Tensor, dict[str, torch.Tensor]], other: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-4)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        assert (grad - other[1][name]).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("groups", [DOCUMENTS, TREE], ids=["documents", "tree"])
@pytest.mark.parametrize(("kind", "device"), [*((kind, "cpu") for kind in TRAINED), CUDA])
def test_logits_and_gradients_are_those_of_sequences_by_themselves(
    model_path: Path, kind: str, device: str, groups: list[tuple[int, list[int]]], rows: int
) -> None:
    batch = batch_of(groups, vocabulary=2)
    where = response_positions(batch)
    source = logits_by(model_path, kind, device)
    layout = packed(batch, where, rows_of(batch, rows))
    assert layout.input_ids.shape[1] > 2 * attention_blocks.QUERY_ROWS
    assert_alike(computed(source, padded(batch, where)), computed(source, layout))


@pytest.mark.parametrize("groups", [DOCUMENTS, TREE], ids=["documents", "tree"])
def test_blocks_give_what_a_dense_mask_gives(model_path: Path, groups: list[tuple[int, list[int]]]) -> None:
    batch = batch_of(groups, vocabulary=2)
    layout = packed(batch, response_positions(batch), rows_of(batch, 1))
    dense, blocks = (computed(logits_by(model_path, kind), layout) for kind in TRAINED)
    assert_alike(dense, blocks)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("groups", [DOCUMENTS, TREE], ids=["documents", "tree"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gives_the_same_logits(model_path: Path, groups: list[tuple[int, list[int]]]) -> None:
    batch = batch_of(groups, vocabulary=2)
    layout = packed(batch, response_positions(batch), rows_of(batch, 2))
    with torch.no_grad():
        assert_alike(computed(logits_by(model_path, "dense"), layout), computed(logits_by(model_path, "flex"), layout))


@pytest.mark.parametrize("length", [1, 100, 128, 700])
def test_the_tiles_of_flex_are_those_of_the_dense_mask(length: int) -> None:
    rng = np.random.default_rng(length)
    ends = np.array([np.arange(1, length + 1), np.full(length, length)])
    for i in range(0, length, 90):  # a branch begins here, and ends at a place that a tile may not have
        ends[0, i : i + 90] = min(length, i + 90)
        ends[0, i + 40 : i + 60] = min(length, i + int(rng.integers(60, 90)))
    found = block_mask(ends, "cpu")
    i = np.arange(length)
    dense = (i <= i[:, None]) & (i[:, None] < ends[:, None])
    tiles = -(-length // 128)
    room = np.zeros((2, tiles * 128, tiles * 128), np.bool_)
    room[:, :length, :length] = dense
    wanted = room.reshape(2, tiles, 128, tiles, 128).any((2, 4))
    np.testing.assert_array_equal(found.to_dense()[:, 0].numpy().astype(np.bool_), wanted)
    real = np.zeros_like(room)
    real[:, :length, :length] = True
    whole = (room | ~real).reshape(2, tiles, 128, tiles, 128).all((2, 4)) & wanted
    counts = found.full_kv_num_blocks[:, 0].numpy()
    assert (counts <= whole.sum(-1)).all(), "no tile counts as seen in full of which something is not"


def test_a_block_has_the_keys_that_one_of_its_rows_sees_and_no_others() -> None:
    batch = batch_of(TREE, vocabulary=2)
    layout = packed(batch, response_positions(batch), rows_of(batch, 1))
    assert layout.ends is not None
    cuts = query_blocks(layout.ends[0])
    assert [cut.start for cut in cuts] == [0, *(cut.end for cut in cuts[:-1])]
    for cut in cuts:
        np.testing.assert_array_equal(cut.keys, np.flatnonzero(layout.mask[0, 0, cut.start : cut.end].any(0)))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "starcoder2", "phi3"])
def test_a_sliding_window_is_kept_along_the_path(tmp_path: Path, family: str) -> None:
    """Sequences by themselves have the windows of transformers; packed rows count them along each path."""
    window = 20
    make_model(family, {**FAMILIES[family], "vocab_size": 100, "sliding_window": window}, tmp_path)
    source = logits_by(tmp_path, "blocks")
    batch = batch_of(TREE, vocabulary=2)
    where = response_positions(batch)
    wanted = computed(source, padded(batch, where))
    assert_alike(wanted, computed(source, packed(batch, where, rows_of(batch, 1))))
    for part in source.model.modules():
        assert getattr(part, "sliding_window", None) in (None, window), "the probe has put windows back"


def test_a_model_that_ignores_its_window_is_not_packed(tmp_path: Path) -> None:
    make_model("gemma2", {**FAMILIES["gemma2"], "vocab_size": 100, "sliding_window": 20}, tmp_path)
    model = load_model(tmp_path, BackendSpec(model_path=tmp_path))
    for part in model.modules():
        if hasattr(part, "sliding_window"):
            part.sliding_window = None  # type: ignore[assignment]
    assert not ResponseLogits(model, "cpu").may_pack
    assert attention_of(model) is KINDS["dense"]


def test_a_model_that_does_not_hand_the_tree_on_has_a_dense_mask(model_path: Path) -> None:
    model = load_model(model_path, BackendSpec(model_path=model_path))
    original = model.forward

    def copying(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = None if attention_mask is None else attention_mask.clone()
        return original(*args, attention_mask=mask, **kwargs)

    model.forward = copying  # type: ignore[method-assign]
    source = ResponseLogits(model, "cpu")
    assert source.may_pack and source._attention is KINDS["dense"] is attention_of(model)


Call = Callable[[Any, Layout], torch.Tensor]


def _with_a_cache(model: Any, layout: Layout) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(layout.input_ids), position_ids=_places(layout), use_cache=True).logits


def _with_a_mask_of_ones(model: Any, layout: Layout) -> torch.Tensor:
    ids = torch.from_numpy(layout.input_ids)
    mask = torch.ones(ids.shape, dtype=torch.long)
    return model(input_ids=ids, position_ids=_places(layout), attention_mask=mask, use_cache=False).logits


def _with_cumulative_lengths(model: Any, layout: Layout) -> torch.Tensor:
    assert layout.ends is not None
    borders = torch.from_numpy(np.unique(np.concatenate([[0], layout.ends[0]]))).int()
    longest = int(borders.diff().max())
    return model(
        input_ids=torch.from_numpy(layout.input_ids), use_cache=False, cu_seq_lens_q=borders, cu_seq_lens_k=borders,
        max_length_q=longest, max_length_k=longest,
    ).logits  # fmt: skip


def _as_transformers_finds_them(model: Any, layout: Layout) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(layout.input_ids), position_ids=_places(layout), use_cache=False).logits


def _places(layout: Layout) -> torch.Tensor:
    assert layout.position_ids is not None
    return torch.from_numpy(layout.position_ids)


def _search_of_transformers() -> Any:
    """The search for documents as transformers has it, of which its module was spared when the model was loaded."""
    spec = importlib.util.spec_from_file_location("transformers.masking_utils_anew", masking_utils.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew.find_packed_sequence_indices


@pytest.mark.parametrize(
    ("call", "is_right"),
    [
        (_as_transformers_finds_them, True),
        (_with_a_cache, False),
        (_with_a_mask_of_ones, False),
        (_with_cumulative_lengths, False),
    ],
)
def test_documents_that_transformers_mixes_are_found_by_this_comparison(
    model_path: Path, call: Call, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(DOCUMENTS, vocabulary=96)
    where = response_positions(batch)
    source = logits_by(model_path, "blocks")
    layout = packed(batch, where, rows_of(batch, 1))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", _search_of_transformers())
    with torch.no_grad():
        wanted, _ = computed(source, padded(batch, where))
        ours, _ = computed(source, layout)
        theirs = call(source.model, layout)[0][torch.from_numpy(layout.rows[layout.row_of])]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(theirs, wanted, rtol=1e-4, atol=1e-4) == is_right
