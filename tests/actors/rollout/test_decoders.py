"""Both decoders against Hugging Face, over architectures, and a row's independence of its neighbours, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.rollout.engines.torch.decoder import Decoder, make_decoder
from actors.rollout.engines.torch.fused_decoder import FusedDecoder
from actors.rollout.engines.torch.generic_decoder import GenericDecoder
from actors.rollout.engines.torch.model_loading import load_model
from actors.rollout.engines.torch.prefill import prefill_chunks
from actors.rollout.errors import ModelUnreadable
from tests.tiny_checkpoint import make_tiny_checkpoint

FUSED = ["qwen3", "qwen2", "llama", "mistral"]
GENERIC = [*FUSED, "gpt2", "gpt_neox", "opt"]
CASES = [(name, "fused") for name in FUSED] + [(name, "generic") for name in GENERIC]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(tmp_path: Path, architecture: str, dtype: str = "float32", **options: Any) -> Any:
    path = make_tiny_checkpoint(tmp_path / architecture, architecture=architecture, **options)
    return load_model(path, dtype, torch.device("cpu"))


def make(model: Any, kind: str, *, prefill_tokens: int = 40, max_rows: int = 12) -> Decoder:
    return make_decoder(model, kind, max_rows=max_rows, max_tokens=128, prefill_tokens=prefill_tokens)


def prompts(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(3, 99, n).astype(np.int32) for n in lengths]


class Batch:
    """Drives a decoder as the engine does, with tokens fixed by (prompt, position)."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.rows = decoder, list[np.ndarray]()

    @torch.inference_mode()
    def join(self, sequences: Sequence[np.ndarray]) -> list[torch.Tensor]:
        logits = self.decoder.prefill(sequences)
        self.rows += list(sequences)
        return list(logits.clone())

    @torch.inference_mode()
    def grow(self, *, apart: bool = False) -> list[torch.Tensor]:
        """``apart``: with tokens that differ by slot too."""
        tokens = [3 + (31 * int(row[0]) + 7 * len(row) + apart * i) % 90 for i, row in enumerate(self.rows)]
        self.rows = [np.append(row, np.int32(token)) for row, token in zip(self.rows, tokens, strict=True)]
        lengths = np.array([len(row) for row in self.rows])
        return list(self.decoder.decode(np.array(tokens, np.int64), lengths).clone())

    @torch.inference_mode()
    def drop(self, *slots: int) -> None:
        keep = len(self.rows) - len(slots)
        targets = np.array([slot for slot in sorted(slots) if slot < keep], np.int64)
        sources = np.array([slot for slot in range(keep, len(self.rows)) if slot not in slots], np.int64)
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        self.rows = self.rows[:keep]
        self.decoder.arrange(sources, targets, keep)

    @torch.inference_mode()
    def fork(self, *slots: int) -> None:
        """Each of ``slots`` goes on twice; a first token of its own makes the copy another sequence."""
        targets = np.arange(len(self.rows), len(self.rows) + len(slots))
        self.rows += [self.rows[slot] for slot in slots]
        self.decoder.arrange(np.array(slots, np.int64), targets, len(self.rows))


def expected(model: Any, row: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, -1]


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_logits_are_those_of_hugging_face_while_rows_come_share_prefixes_and_go(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    model = load(tmp_path, architecture, tied=architecture in ("qwen3", "gpt2", "opt"))
    batch = Batch(make(model, kind))
    checked = 0

    def check(logits: list[torch.Tensor], first: int = 0) -> None:
        nonlocal checked
        for row, got in zip(batch.rows[first:], logits, strict=True):
            torch.testing.assert_close(got, expected(model, row), atol=1e-4, rtol=0)
            checked += 1

    a, b, c = prompts(5, 17, 30)
    check(batch.join([a, a, b, a]))
    for _ in range(3):
        check(batch.grow())
    batch.drop(1)
    check(batch.join([c, c, prompts(1)[0]]), first=3)
    for _ in range(4):
        check(batch.grow())
    batch.drop(0, 2, 5)
    for _ in range(20):
        check(batch.grow())
    assert checked == 4 + 12 + 3 + 24 + 60


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_a_forked_row_goes_on_by_itself_from_what_it_had_in_common(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    model = load(tmp_path, architecture)
    batch = Batch(make(model, kind))
    batch.join(prompts(5, 17))
    for _ in range(3):
        batch.grow()
    batch.fork(1, 1, 0)
    assert len(batch.rows) == 5
    for step in range(40):  # beyond the first width of the cache
        logits = batch.grow(apart=step == 0)
        assert len({row.tobytes() for row in batch.rows}) == 5, "each says something else from here on"
        for row, got in zip(batch.rows, logits, strict=True):
            torch.testing.assert_close(got, expected(model, row), atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_steps_that_are_replayed_on_cuda_are_those_of_the_cpu_while_rows_come_and_go_and_weights_change(
    tmp_path: Path,
) -> None:
    models = [load(tmp_path, "qwen3"), load(tmp_path, "qwen3").to("cuda")]
    twins = [Batch(make(model, "fused")) for model in models]

    def check(steps: int) -> None:
        for _ in range(steps):
            for want, got in zip(*(twin.grow() for twin in twins), strict=True):
                torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=0)
        assert twins[1].decoder._graphs._recorded, "the shape came often enough"  # type: ignore[attr-defined]

    for joining in (prompts(5, 17, 30), prompts(9, 12, 3)):
        for twin in twins:
            twin.join(joining)
        check(6)
    for twin, model in zip(twins, models, strict=True):
        twin.drop(0, 4)
        twin.grow()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            twin.decoder.weights_changed()
    check(50)  # beyond the first span and the first width of the cache


def test_the_fused_decoder_is_chosen_where_it_fits_and_refuses_by_reason_where_not(tmp_path: Path) -> None:
    assert isinstance(make(load(tmp_path, "qwen3"), "auto"), FusedDecoder)
    gpt2 = load(tmp_path, "gpt2")
    assert isinstance(make(gpt2, "auto"), GenericDecoder)
    with pytest.raises(ModelUnreadable, match="'gpt2'"):
        make(gpt2, "fused")
    mistral = load(tmp_path, "mistral")
    mistral.config.sliding_window = 64
    assert isinstance(make(mistral, "auto"), GenericDecoder)


def test_bfloat16_logits_are_close_to_hugging_faces_own(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3", dtype="bfloat16")
    batch = Batch(make(model, "fused"))
    batch.join(prompts(5, 17))
    for _ in range(5):
        logits = batch.grow()
        for row, got in zip(batch.rows, logits, strict=True):
            assert got.dtype == torch.bfloat16
            wide = expected(model, row).float()
            assert float((got.float() - wide).abs().max()) < 0.05 * float(wide.abs().max())


def test_a_rows_logits_are_the_same_bits_whatever_else_is_in_the_batch(tmp_path: Path) -> None:
    """Held by the fused decoder in float32 on the CPU with one thread."""
    model = load(tmp_path, "qwen3", hidden=96, layers=3)
    lone, *others = prompts(14, 3, 9, 21, 28, 40, 11, 2, 60, 33)

    def history(neighbours: int, shared: int) -> list[torch.Tensor]:
        batch = Batch(make(model, "fused", prefill_tokens=64 + 16 * neighbours))
        seen = [batch.join([*others[:neighbours], *[lone] * shared, lone])[-1]]
        for step in range(24):
            if step == 8 and neighbours > 2:
                batch.drop(0, 2)  # the row under test moves to another slot
            slot = next(i for i, row in enumerate(batch.rows) if row[:14].tolist() == lone.tolist())
            seen.append(batch.grow()[slot])
        return seen

    alone = history(0, 0)
    for neighbours, shared in [(1, 0), (2, 0), (3, 1), (5, 2), (9, 0)]:
        for ours, theirs in zip(alone, history(neighbours, shared), strict=True):
            assert torch.equal(ours, theirs)


def test_the_cache_grows_with_use_within_its_bound_and_is_given_back(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3")
    decoder = make(model, "fused", max_rows=16)

    def cache_bytes() -> int:
        return decoder._cache._keys.nbytes + decoder._cache._values.nbytes

    assert cache_bytes() == 0
    batch = Batch(decoder)
    batch.join(prompts(5))
    small = cache_bytes()
    batch.join([prompts(100)[0]] * 15)
    bound = 2 * 2 * 16 * 2 * 128 * 8 * 4  # keys and values, layers, rows, heads, tokens, head_dim, bytes
    assert 0 < small < cache_bytes() <= bound
    decoder.clear()
    assert cache_bytes() == 0


def test_prefill_batches_hold_similar_lengths_within_the_token_bound() -> None:
    lengths = [5, 200, 6, 7, 90, 8, 91]
    chunks = prefill_chunks(lengths, 100)
    assert sorted(index for chunk in chunks for index in chunk) == list(range(7))
    assert all(len(chunk) == 1 or max(lengths[i] for i in chunk) * len(chunk) <= 100 for chunk in chunks)
    assert [1] in chunks
