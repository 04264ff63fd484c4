"""What workers that speak to servers cannot do, said before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from actors.rollout.worker_spec import engine_kind, engine_spec
from configs.checks.server_checks import check_servers
from tests.smallest_job import smallest_job

ONE, TWO = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("rollout", "others", "field", "said"),
    [
        ({"servers": [ONE, TWO], "workers": 1}, {}, "rollout.servers", "2 addresses, but rollout.workers is 1"),
        ({"servers": [ONE, f"{ONE}/"]}, {}, "rollout.servers", f"{ONE} is there twice"),
        ({"servers": [ONE], "tensor_parallel": 2}, {}, "rollout.tensor_parallel", "2, with rollout.servers"),
        ({"servers": [ONE], "temperature": 2.5}, {}, "rollout.temperature", "2.5, and the servers"),
        ({"servers": [ONE]}, {"model": {"source": "tiny", "adapter": {"rank": 4}}}, "rollout.servers", "not built"),
    ],
)
def test_what_a_worker_of_a_server_cannot_do_is_refused_by_key_and_value(
    rollout: dict[str, Any], others: dict[str, Any], field: str, said: str
) -> None:
    [(found, wrong, _)] = check_servers(smallest_job(rollout=rollout, **others))
    assert found == field
    assert said in wrong


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8000", "http://user:key@host:8000", "http://host:8000/v1", "http://a b"]
)
def test_an_address_is_one_of_http_without_a_path_or_a_key(address: str) -> None:
    [(field, wrong, fix)] = check_servers(smallest_job(rollout={"servers": [address]}))
    assert field == "rollout.servers" and repr(address) in wrong and "VLLM_API_KEY" in fix


def test_the_first_workers_have_the_servers_in_their_order_and_the_others_the_engine() -> None:
    job = smallest_job(rollout={"servers": [ONE, TWO], "workers": 3, "engine_options": {"tokens_per_step": 2}})
    assert check_servers(job) == []
    workers = ["rollout-0", "rollout-1", "rollout-2", "rollout-spot.1"]
    assert [engine_kind(job, worker) for worker in workers] == ["server", "server", "torch", "torch"]
    specs = [engine_spec(job, "m", worker).options for worker in workers]
    assert [spec.get("url") for spec in specs] == [ONE, TWO, None, None]
    assert specs[2] == {"tokens_per_step": 2}
