"""The job file reaches the backend and the loss field by field."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.roles import RoleArgs
from actors.trainer.backend import CriticSpec
from actors.trainer.setup import (
    SHARED_OUT_BYTES,
    backend_spec,
    loss_spec,
    make_backend,
    resolve_replicas,
    resolve_threads,
)
from configs.schema import JobConfig
from tests.actors.trainer.trainer_world import job_config
from transport.address import ActorAddress, PeerId

NOBODY = ActorAddress("nobody", PeerId("nowhere", 1))


def spec_of(job: JobConfig, model: Path = Path("/model")):
    args = RoleArgs(
        role="trainer", name="trainer", node="n", job=job.model_dump_json(), model_path=str(model), run_dir="/run",
        scheduler=NOBODY, metrics=NOBODY,
    )  # fmt: skip
    return backend_spec(args, job)


def test_every_training_parameter_reaches_the_backend() -> None:
    trainer = {
        "backend": "simulated", "lr": 0.5, "warmup_steps": 7, "weight_decay": 0.1, "betas": (0.8, 0.9),
        "max_grad_norm": 3.0, "threads": 2, "recompute": "whole", "attention": "flex",
    }  # fmt: skip
    spec = spec_of(job_config(trainer=trainer, seed=9, model={"path": "m", "dtype": "bfloat16"}))
    assert (spec.model_path, spec.dtype, spec.device, spec.threads) == (Path("/model"), "bfloat16", "cpu", 2)
    assert (spec.learning_rate, spec.warmup_steps, spec.weight_decay) == (0.5, 7, 0.1)
    assert (spec.adam_betas, spec.max_grad_norm, spec.seed) == ((0.8, 0.9), 3.0, 9)
    assert spec.recompute == "whole"
    assert spec.attention == "flex"
    assert not spec.needs_reference


def test_a_kl_term_needs_a_reference() -> None:
    job = job_config(algorithm={"kl_coefficient": 0.01, "clip_high": 0.3, "importance_cap": 4.0})
    assert spec_of(job).needs_reference
    loss = loss_spec(job)
    assert (loss.kl_coefficient, loss.clip_low, loss.clip_high, loss.importance_cap) == (0.01, 0.2, 0.3, 4.0)


def test_a_critic_begins_with_the_policy_or_another_model_and_counts_updates_as_the_optimizer_does() -> None:
    assert spec_of(job_config()).critic is None
    algorithm = {"name": "ppo", "kl_coefficient": 0.1, "epochs": 3}
    critic, trainer = {"lr": 0.2, "warmup_steps": 2, "value_clip": 0.3}, {"backend": "simulated", "warmup_steps": 5}
    job = job_config(algorithm=algorithm, critic=critic, trainer=trainer, steps=7)
    spec = spec_of(job)
    assert spec.critic == CriticSpec(model_path=Path("/model"), learning_rate=0.2, warmup_steps=6)
    assert (spec.total_steps, spec.warmup_steps, spec.needs_reference) == (21, 15, True)
    assert (loss_spec(job).kl_coefficient, loss_spec(job).value_clip) == (0.0, 0.3), "the KL is in the rewards"
    other = spec_of(job_config(algorithm=algorithm, critic={"path": "/judge"})).critic
    assert other is not None and other.model_path == Path("/judge")


def test_with_a_small_model_the_trainer_leaves_a_core_to_the_head_and_off_policy_half_of_them(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert resolve_threads(job_config(), tmp_path) == max(1, cores - 1)
    assert resolve_threads(job_config(sync={"mode": "async"}), tmp_path) == max(1, cores // 2)
    assert resolve_threads(job_config(sync={"mode": "async"}, trainer={"threads": 3}), tmp_path) == 3


def test_a_model_whose_operations_are_worth_sharing_out_is_trained_on_every_core(tmp_path: Path) -> None:
    with (tmp_path / "model-00001-of-00002.safetensors").open("wb") as shard:
        shard.truncate(SHARED_OUT_BYTES)
    assert resolve_threads(job_config(), tmp_path) == len(os.sched_getaffinity(0))
    assert resolve_threads(job_config(trainer={"threads": 1}), tmp_path) == 1
    assert [resolve_replicas(threads, tmp_path) for threads in (1, 2, 7)] == [1, 2, 2]
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(1000))
    assert resolve_replicas(7, tmp_path) == 1


def test_a_model_that_is_compiled_has_no_replicas_since_torch_compiles_on_one_thread(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(SHARED_OUT_BYTES)
    specs = [spec_of(job_config(trainer={"threads": 2, "compile": on}), tmp_path) for on in (False, True)]
    assert [(spec.compile, spec.replicas, spec.threads) for spec in specs] == [(False, 2, 2), (True, 1, 2)]


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="simulated"):
        make_backend("jax")
