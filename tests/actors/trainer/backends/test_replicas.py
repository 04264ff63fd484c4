"""A micro-batch that is shared out between replicas of the model is learned from as one that is not."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, summed
from actors.trainer.backends.torch.replicas import Replica, Replicas, shares
from actors.trainer.learning.samples import pad
from tests.actors.trainer.random_samples import random_samples
from tests.tiny_checkpoint import make_tiny_checkpoint

LOSS = LossSpec(kl_coefficient=0.1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


def batch_of(groups: list[tuple[int, list[int]]], seed: int = 0) -> MicroBatch:
    return pad(random_samples(groups, seed))


BATCH = batch_of([(9, [7, 3, 4]), (7, [5, 2]), (5, [6, 6, 5]), (6, [1, 8])])


def made(path: Path, threads: int, dtype: str = "float32") -> Replicas:
    return Replicas(BackendSpec(model_path=path, threads=threads, replicas=2, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_replicas_sum_the_gradients_and_the_statistics_of_one_model(model_path: Path, dtype: str) -> None:
    found = []
    for threads in (1, 2):
        learner = made(model_path, threads, dtype)
        reference = learner.score(BATCH, 1.0) - 0.1
        batch = MicroBatch(**{f: getattr(BATCH, f) for f in MicroBatch.__slots__} | {"reference_logprobs": reference})
        stats = [summed([learner.accumulate(batch, LOSS), learner.taken_stats()]) for _ in range(2)]
        assert stats[0] == stats[1], "sums are of the micro-batch, not of what came before"
        learner.parameters.gather_gradients()
        found.append((learner.parameters.grad.clone(), stats[0]))
        learner.close()
    (one, one_stats), (two, two_stats) = found
    scale = one.abs().max().item()
    tolerance, relative = (1e-5, 1e-4) if dtype == "float32" else (0.02, 0.02)
    torch.testing.assert_close(one, two, rtol=0, atol=tolerance * scale)
    assert two_stats.tokens == one_stats.tokens
    for name in ("weight", "loss_sum", "clipped_sum", "kl_sum", "entropy_sum", "mismatch_sum"):
        assert getattr(two_stats, name) == pytest.approx(getattr(one_stats, name), rel=relative)


def test_each_replica_computes_a_share_and_all_with_the_weights_of_the_first(model_path: Path) -> None:
    learner = made(model_path, 2)
    before = learner.score(BATCH, 1.0)
    learner.parameters.load_master(learner.parameters.master * 1.5)
    assert np.abs(learner.score(BATCH, 1.0) - before).max(1).min() > 1e-3, "no row is still of the old weights"
    learner.accumulate(BATCH, LOSS)
    assert all(sums.total.abs().sum() > 0 for sums in learner.parameters.sums)
    learner.parameters.zero_gradients()
    assert not any(sums.total.abs().sum() > 0 for sums in learner.parameters.sums)
    learner.close()


def test_the_same_micro_batch_gives_the_same_bits_whichever_replica_is_late(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, found = Replica.accumulate, list[torch.Tensor]()
    for late in (0, 1):
        learner = made(model_path, 2)
        gone_ahead = threading.Event()

        def accumulate(
            self: Replica, *args: object, learn: bool, learner=learner, late=late, done=gone_ahead
        ) -> object:  # type: ignore[no-untyped-def]
            if self is learner.members[late]:
                assert done.wait(20)
            result = honest(self, *args, learn=learn)  # type: ignore[arg-type]
            done.set()
            return result

        monkeypatch.setattr(Replica, "accumulate", accumulate)
        learner.accumulate(BATCH, LOSS)
        learner.parameters.gather_gradients()
        found.append(learner.parameters.grad.clone())
        learner.close()
    assert torch.equal(found[0], found[1])


def test_a_share_that_fails_is_raised_when_the_others_rest(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, honest, ended = made(model_path, 2), Replica.accumulate, threading.Event()
    failed = threading.Event()

    def accumulate(self: Replica, *args: object, learn: bool) -> object:
        if self is learner.members[0]:
            failed.set()
            raise RuntimeError("out of memory")
        assert failed.wait(20)
        result = honest(self, *args, learn=learn)  # type: ignore[arg-type]
        ended.set()
        return result

    monkeypatch.setattr(Replica, "accumulate", accumulate)
    with pytest.raises(RuntimeError, match="out of memory"):
        learner.accumulate(BATCH, LOSS)
    assert ended.is_set()
    learner.close()


def test_further_threads_work_inside_the_replicas(model_path: Path) -> None:
    learner = made(model_path, 5)
    assert learner._on_each(lambda *_: torch.get_num_threads(), BATCH, shares(BATCH, 2)) == [3, 2]
    learner.close()


groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=6
)


@given(groups, st.integers(1, 4), st.integers(0, 3))
def test_shares_are_all_rows_once_in_order(made_of: list[tuple[int, list[int]]], count: int, seed: int) -> None:
    batch = batch_of(made_of, seed)
    parts = shares(batch, count)
    assert 1 <= len(parts) <= count
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(batch.lengths)))
    assert all(part.stop > part.start for part in parts)


def test_siblings_stay_together_unless_a_share_would_be_much_too_large() -> None:
    assert shares(batch_of([(9, [4, 4]), (9, [4, 4]), (9, [4])]), 2) == [slice(0, 2), slice(2, 5)]
    assert shares(batch_of([(9, [4, 4, 4, 4, 4]), (2, [1])]), 2) == [slice(0, 2), slice(2, 6)]
    assert shares(batch_of([(9, [4])]), 2) == [slice(0, 1)]


def test_what_siblings_say_alike_is_no_work() -> None:
    batch = batch_of([(5, [6, 6, 6, 6]), (5, [6]), (5, [6]), (5, [6])])
    assert shares(batch, 2) == [slice(0, 4), slice(4, 7)]
    batch.input_ids[:4] = batch.input_ids[0]
    assert shares(batch, 2) == [slice(0, 5), slice(5, 7)]
