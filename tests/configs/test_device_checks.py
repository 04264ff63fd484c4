"""What needs a device that is not here is refused before anything starts."""

from __future__ import annotations

import pytest

from configs.checks import checks
from tests.smallest_job import smallest_job


@pytest.mark.parametrize(
    ("gpu", "device", "backend", "is_refused"),
    [
        (True, "auto", "torch", False),
        (True, "cpu", "torch", True),
        (False, "auto", "torch", True),
        (False, "auto", "simulated", False),
    ],
)
def test_flex_attention_is_refused_where_the_trainer_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, device: str, backend: str, is_refused: bool
) -> None:
    monkeypatch.setattr(checks, "has_gpu", lambda: gpu)
    job = smallest_job()
    trainer = job.trainer.model_copy(update={"attention": "flex", "device": device, "backend": backend})
    found = checks._check_device(job.model_copy(update={"trainer": trainer}))
    assert (
        found
        == [
            (
                "trainer.attention",
                "flex, which has no backward pass on a CPU, and the trainer has no other device",
                "Set it to blocks",
            )
        ]
        * is_refused
    )


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"recompute": "offload", "device": "cpu"}, "offload, which moves activations off a device"),
        ({"recompute": "auto"}, "auto, but nothing is measured at the start"),
        ({"recompute": "auto", "micro_batch_tokens": "auto", "service": "trained"}, "a training service measures"),
        ({"recompute": "selective", "attention": "flex"}, "selective, which keeps attention by torch's SDPA"),
        ({"recompute": "offload"}, ""),
        ({"recompute": "offload", "micro_batch_tokens": "auto"}, "does not measure what it takes of the host"),
        ({"recompute": "auto", "micro_batch_tokens": "auto"}, ""),
        ({"recompute": "whole", "attention": "flex"}, ""),
        ({"recompute": "offload", "device": "cpu", "backend": "simulated"}, ""),
    ],
)
def test_ways_of_recomputation_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], wrong: str
) -> None:
    monkeypatch.setattr(checks, "has_gpu", lambda: True)
    job = smallest_job()
    trainer = job.trainer.model_copy(update=changes)
    found = checks._check_device(job.model_copy(update={"trainer": trainer}))
    assert [field for field, _, _ in found] == ["trainer.recompute"] * bool(wrong)
    assert not wrong or wrong in found[0][1]
