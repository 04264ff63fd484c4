"""What is wrong with a trainer or an engine of several ranks before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.adapter_schema import AdapterConfig
from configs.checks.rank_checks import (
    check_rank_network,
    check_rank_places,
    check_sharding,
    check_tensor_parallel,
    why_indivisible,
)
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
        ({"backend": "torch", "expert_parallel": True}, {}, "trainer.expert_parallel", "true, which is for"),
        ({"ranks": 4, "replicas": 3}, {}, "trainer.replicas", "3 copies of the weights do not share out 4 ranks"),
        ({"ranks": 4, "nodes": 3}, {}, "trainer.nodes", "3 machines do not share out 4 ranks"),
        ({"ranks": 12, "nodes": 2, "replicas": 3}, {}, "trainer.nodes", "neither divides the other"),
        ({"backend": "torch", "nodes": 2}, {}, "trainer.nodes", "2, which is for trainer.backend: fsdp, not torch"),
        ({"backend": "simulated", "ranks": 3, "nodes": 2}, {}, "trainer.nodes", "2 machines do not share out 3 ranks"),
        ({"backend": "torch", "context_ranks": 2}, {}, "trainer.context_ranks", "2, which is for"),
        ({"ranks": 4, "context_ranks": 3}, {}, "trainer.context_ranks", "has 4 ranks on a machine"),
        ({"ranks": 4, "replicas": 4, "context_ranks": 2}, {}, "trainer.context_ranks", "has 1 ranks on a machine"),
        ({"ranks": 2, "context_ranks": 2, "attention": "flex"}, {}, "trainer.context_ranks", "computes whole rows"),
        (
            {"ranks": 2, "context_ranks": 2},
            {"algorithm": {"load_balancing": 0.01}},
            "trainer.context_ranks",
            "algorithm.load_balancing is set",
        ),
        ({"ranks": 4, "replicas": 2, "service": "s"}, {}, "trainer.replicas", "2, but trainer.service is set"),
        ({"ranks": 2, "nodes": 2, "service": "s"}, {}, "trainer.nodes", "2, but trainer.service is set"),
        ({"ranks": 2, "context_ranks": 2, "service": "s"}, {}, "trainer.context_ranks", "but trainer.service is set"),
        ({"expert_parallel": True, "service": "s"}, {}, "trainer.expert_parallel", "true, but trainer.service is set"),
        ({"offload": True, "service": "s"}, {}, "trainer.offload", "true, but trainer.service is set"),
        ({"backend": "simulated", "ranks": 2, "service": "s"}, {}, "trainer.service", "trainer.ranks is more"),
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
    assert check_sharding(job(trainer={"backend": "fsdp", "ranks": 2, "service": "train-0"})) == []


def test_a_model_that_passes_a_state_along_its_rows_cannot_have_them_shared(tmp_path: Path) -> None:
    def problems(*layers: str) -> list[Any]:
        (tmp_path / "config.json").write_text(json.dumps({"layer_types": layers}))
        shared = {"backend": "fsdp", "ranks": 2, "context_ranks": 2}
        return check_sharding(job(trainer=shared, model={"path": str(tmp_path)}))

    assert problems("full_attention", "sliding_attention") == []
    [(field, wrong, _)] = problems("full_attention", "linear_attention")
    assert field == "trainer.context_ranks" and "layers of linear_attention" in wrong


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
    [(field, wrong, fix)] = check_rank_places(job(**whole))
    assert field == "cluster.place_replicas" and wrong.startswith(said) and fix


def test_replicas_on_other_machines_leave_the_first_ones_ranks_here() -> None:
    four = {"backend": "fsdp", "ranks": 4, "replicas": 2}
    apart = job(trainer=four, cluster={"nodes": 1, "place_replicas": "remote", "place_rollout": "local"})
    assert check_rank_places(apart) == []
    assert (apart.ranks_here, job(trainer=four).ranks_here) == (2, 4)


def apart(**sections: dict[str, Any]) -> JobConfig:
    """A copy of four ranks over two machines, with ``sections`` put on top."""
    whole = {"trainer": {"backend": "fsdp", "ranks": 4, "nodes": 2}, "cluster": {"nodes": 1}, "provider": {}}
    return job(**{name: values | sections.get(name, {}) for name, values in whole.items()})


def test_a_copy_over_two_machines_has_half_of_its_ranks_here_and_copies_may_share_machines_or_have_several() -> None:
    assert check_rank_places(apart()) == check_sharding(apart()) == []
    assert (apart().trainer_machines, apart().ranks_here) == (2, 2)
    for ranks, nodes, replicas in ((8, 4, 2), (8, 2, 4), (4, 2, 2)):
        several = apart(trainer={"ranks": ranks, "nodes": nodes, "replicas": replicas})
        assert check_rank_places(several) == check_sharding(several) == []
        assert several.ranks_here == ranks // nodes


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        ({"cluster": {"nodes": 0}}, "trainer.nodes", "2, but cluster.nodes is 0: no other machine would join"),
        ({"provider": {"kind": "functions"}}, "trainer.nodes", "2, but provider.kind is functions"),
        ({"cluster": {"listen": "tcp://10.1.2.3:7001"}}, "trainer.nodes", "2, and nodes reach the head at 10.1.2.3"),
        (
            {"cluster": {"place_replicas": "remote"}, "trainer": {"replicas": 2}},
            "cluster.place_replicas", "remote, and trainer.nodes is 2, which divides the ranks over machines already",
        ),
    ],
)  # fmt: skip
def test_a_copy_over_machines_that_cannot_be_there_is_refused(
    sections: dict[str, dict[str, Any]], field: str, said: str
) -> None:
    [(found, wrong, fix)] = check_rank_places(apart(**sections))
    assert found == field and wrong.startswith(said) and fix


def test_a_simulated_trainer_on_several_machines_exchanges_nothing_that_needs_keys() -> None:
    assert check_rank_places(apart(trainer={"backend": "simulated"}, cluster={"listen": "tcp://0.0.0.0:7001"})) == []


@pytest.mark.parametrize(
    "listen", ["tcp://0.0.0.0:7001", "tcp://10.1.2.3:7001", "tcp://[::]:7001", "tcp://head.lab:7001"]
)
def test_replicas_beyond_loopback_are_refused_until_the_job_says_that_they_go_unencrypted(listen: str) -> None:
    cluster = {"nodes": 1, "place_replicas": "remote", "place_rollout": "local", "listen": listen}
    trainer = {"backend": "fsdp", "ranks": 2, "replicas": 2}
    [(field, wrong, fix)] = check_rank_places(job(trainer=trainer, cluster=cluster))
    assert field == "cluster.place_replicas"
    assert "no keys and no encryption" in wrong and "cluster.replicas_unencrypted" in fix
    assert check_rank_places(job(trainer=trainer, cluster=cluster | {"replicas_unencrypted": True})) == []
    here = job(trainer=trainer, cluster=cluster | {"listen": "tcp://127.0.0.1:7001"})
    assert check_rank_places(here) == []
    assert check_rank_network(here, listen) and not check_rank_network(here, "ipc:///tmp/head")


QWEN = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151_936}


def test_an_engine_of_one_rank_is_refused() -> None:
    [(field, wrong, fix)] = check_tensor_parallel(smallest_job(rollout={"engine": "torch", "tensor_parallel": 2}))
    assert field == "rollout.tensor_parallel"
    assert "rollout.engine is torch" in wrong and "vllm" in fix
    assert check_tensor_parallel(smallest_job(rollout={"engine": "simulated", "tensor_parallel": 2})) == []


@pytest.mark.parametrize(
    ("ranks", "changes", "named"),
    [
        (2, {}, ""),
        (16, {}, ""),  # eight heads of keys, each of which two ranks have
        (3, {}, "num_attention_heads = 16"),
        (4, {"num_key_value_heads": 6}, "num_key_value_heads = 6"),
        (4, {"intermediate_size": 3070}, "intermediate_size = 3070"),
        (3, {"num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 100}, "padded to 128"),
        (2, {"text_config": {"num_attention_heads": 15}}, "num_attention_heads = 15"),
    ],
)
def test_a_model_is_divided_as_vllm_divides_it(tmp_path: Path, ranks: int, changes: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
    wrong = why_indivisible(tmp_path, ranks)
    assert named in wrong and bool(named) == bool(wrong)
    job = smallest_job(model={"path": str(tmp_path)}, rollout={"engine": "vllm", "tensor_parallel": ranks})
    assert [found[1] for found in check_tensor_parallel(job)] == ([wrong] if wrong else [])


def test_nothing_is_said_of_one_rank_or_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    assert check_tensor_parallel(smallest_job(rollout={"engine": "torch"})) == []
    elsewhere = {"path": str(tmp_path / "nothing")}
    assert check_tensor_parallel(smallest_job(model=elsewhere, rollout={"engine": "vllm", "tensor_parallel": 3})) == []
