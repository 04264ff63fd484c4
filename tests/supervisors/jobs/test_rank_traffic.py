"""Bytes that ranks on several machines exchange, as ``headrace check`` tells them: by arithmetic.

That weights are gathered twice and gradients summed once is counted in ``test_fsdp_elsewhere.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisors.cli.looking.check import what_would_run
from supervisors.jobs.rank_traffic import Shape, traffic_words
from tests.smallest_job import smallest_job
from tests.tiny_checkpoint import make_tiny_checkpoint

BILLION = 10**9


def shape(ranks: int, machines: int, copies: int = 1) -> Shape:
    return Shape(ranks=ranks, machines=machines, copies=copies)


@pytest.mark.parametrize(
    ("ranks", "machines", "copies", "bytes_a_weight"),
    [
        (2, 2, 1, 4.0),  # half of: gathered twice in bfloat16, summed once in float32
        (16, 2, 1, 7.5),
        (16, 2, 2, 4.0),  # gradients alone, a ring of two
        (16, 4, 2, 7.0 + 2.0),  # each copy over two machines, and half of the gradients on each of them
        (8, 1, 1, 0.0),
    ],
)
def test_what_leaves_a_machine_in_a_micro_batch_of_a_bfloat16_model(
    ranks: int, machines: int, copies: int, bytes_a_weight: float
) -> None:
    of = shape(ranks, machines, copies)
    if machines > 1:
        assert of.micro_batch_bytes(BILLION, BILLION, 2) == bytes_a_weight * BILLION
    assert of.leader_bytes(2, BILLION) == (0 if of.spans == 1 else 2 * BILLION * (of.spans - 1) // of.spans)


def test_an_adapters_frozen_model_is_gathered_and_its_gradients_are_the_adapters_alone() -> None:
    assert shape(4, 2).micro_batch_bytes(BILLION, 0, 2) == 3 * BILLION
    assert shape(4, 2, 2).micro_batch_bytes(BILLION, 0, 2) == 0


def test_check_tells_what_a_copy_over_machines_costs_and_offers_copies_where_they_are_cheaper(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "model")
    trainer = {"backend": "fsdp", "ranks": 8, "nodes": 2}
    job = smallest_job(model={"source": "hf", "path": str(tmp_path / "model")}, trainer=trainer, cluster={"nodes": 1})
    said = what_would_run(job)["ranks"]
    assert said.startswith("8 on 2 machines, 4 on the head's: ") and "leave each of 2 machines in a micro-batch" in said
    assert ". trainer.replicas: 2 sends " in said
    copies = job.model_copy(update={"trainer": job.trainer.model_copy(update={"replicas": 2})})
    assert traffic_words(copies).endswith("gradients alone")
    elsewhere = job.model_copy(update={"model": job.model.model_copy(update={"path": "acme/model"})})
    assert traffic_words(elsewhere).startswith("for each billion weights 10.5 GB (8.4 s at 10 Gbit/s) leave each of 2")
    assert what_would_run(smallest_job()).get("ranks") is None
    one = job.model_copy(update={"trainer": job.trainer.model_copy(update={"nodes": 1})})
    assert what_would_run(one)["ranks"] == "8 on this machine"
