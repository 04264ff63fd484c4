"""What is wrong with a trainer of several ranks before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from configs.adapter_schema import AdapterConfig
from configs.checks.sharding_checks import check_replica_places, check_sharding
from configs.schema import JobConfig
from tests.smallest_job import smallest_job


def job(**sections: dict[str, Any]) -> JobConfig:
    whole = smallest_job()
    update = {name: getattr(whole, name).model_copy(update=values) for name, values in sections.items()}
    return whole.model_copy(update=update)


@pytest.mark.parametrize(
    ("trainer", "others", "field", "said"),
    [
        ({"backend": "torch", "ranks": 2}, {}, "trainer.ranks", "2, which is for trainer.backend: fsdp, not torch"),
        ({"backend": "torch", "replicas": 2}, {}, "trainer.replicas", "2, which is for"),
        ({"backend": "simulated", "offload": True}, {}, "trainer.offload", "true, which is for"),
        ({"ranks": 4, "replicas": 3}, {}, "trainer.replicas", "3 copies of the weights do not share out 4 ranks"),
        ({"service": "shared"}, {}, "trainer.service", "'shared', but a training service shares one process"),
        ({"backend": "simulated", "ranks": 2, "service": "s"}, {}, "trainer.service", "trainer.ranks is more than 1"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_key_and_value(
    trainer: dict[str, Any], others: dict[str, dict[str, Any]], field: str, said: str
) -> None:
    [(found, wrong, _)] = check_sharding(job(trainer={"backend": "fsdp"} | trainer, **others))
    assert found == field
    assert said in wrong


def test_ranks_that_replicas_share_out_are_fine_and_heads_need_not_divide() -> None:
    for ranks, replicas in ((1, 1), (2, 1), (4, 2), (6, 3), (3, 1)):
        assert check_sharding(job(trainer={"backend": "fsdp", "ranks": ranks, "replicas": replicas})) == []
    assert check_sharding(job()) == []
    assert check_sharding(job(trainer={"backend": "simulated", "ranks": 3})) == []


def test_ranks_train_an_adapter_and_a_critic() -> None:
    trained = {"model": {"adapter": AdapterConfig(rank=4)}, "algorithm": {"name": "ppo"}}
    assert check_sharding(job(trainer={"backend": "fsdp", "ranks": 2}, **trained)) == []


def test_a_pass_of_all_ranks_holds_as_many_tokens_as_each_of_them_takes() -> None:
    trainer = job(trainer={"backend": "fsdp", "ranks": 4, "micro_batch_tokens": 100}).trainer
    assert trainer.pass_tokens == 400


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"cluster": {"nodes": 0}}, "remote, but cluster.nodes is 0: no other machine would join"),
        ({"trainer": {"replicas": 1}}, "remote, but trainer.backend is fsdp, and trainer.replicas 1"),
        ({"trainer": {"backend": "torch"}}, "remote, but trainer.backend is torch, and trainer.replicas 2"),
        ({"provider": {"kind": "functions"}}, "remote, but provider.kind is functions, whose machines end"),
    ],
)
def test_replicas_on_other_machines_need_a_sharded_trainer_and_machines_that_stay(
    sections: dict[str, dict[str, Any]], said: str
) -> None:
    whole = {"cluster": {"nodes": 1}, "trainer": {"backend": "fsdp", "ranks": 2, "replicas": 2}, "provider": {}}
    whole = {name: values | sections.get(name, {}) for name, values in whole.items()}
    whole["cluster"]["place_replicas"] = "remote"
    [(field, wrong, fix)] = check_replica_places(job(**whole))
    assert field == "cluster.place_replicas" and wrong.startswith(said) and fix


def test_replicas_on_other_machines_leave_the_first_ones_ranks_here() -> None:
    four = {"backend": "fsdp", "ranks": 4, "replicas": 2}
    apart = job(trainer=four, cluster={"nodes": 1, "place_replicas": "remote", "place_rollout": "local"})
    assert check_replica_places(apart) == []
    assert (apart.ranks_here, job(trainer=four).ranks_here) == (2, 4)
