"""Two tenants of one real server: one ruins its own models in all allowed ways, and the other sees no other bit."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

tinker = pytest.importorskip("tinker")

from benchmarks.serving._programs import Served, Work, model_of, service_of, trained
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
CONTEXT = 512
VICTIM = Work(rank=8, seed=1, steps=8, calls=2, datums=2, tokens=32, vocabulary=100)


@pytest.fixture(autouse=True)
def _quiet_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    gc.collect()  # sockets that the client leaves open are told of here, and not in another test


def datum(tokens: list[int], **inputs: list[float]) -> Any:
    filled: dict[str, Any] = {"target_tokens": tokens} | inputs
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=filled)


def attack(server: Served, over: threading.Event) -> list[str]:
    """Train a whole model, and an adapter, to pieces; returns what was refused."""
    refused: list[str] = []
    huge, tiny = [3e38] * 4, [-3e38] * 4
    calls: list[tuple[list[Any], str]] = [
        ([datum([1, 2, 3, 4], weights=huge)], "cross_entropy"),
        ([datum([1, 2, 3, 4], logprobs=tiny, advantages=huge)], "importance_sampling"),
        ([datum([1, 2, 3, 4], logprobs=tiny, advantages=[1.0] * 4)], "ppo"),
        ([datum([5] * CONTEXT, weights=[1.0] * CONTEXT)] * 3, "cross_entropy"),
        ([datum([5] * (CONTEXT + 1), weights=[1.0] * (CONTEXT + 1))], "cross_entropy"),
        ([datum([1, 99_999], weights=[1.0] * 2)], "cross_entropy"),
    ]
    with service_of(server.url, server.keys["mallory"]) as service:
        models = [model_of(service, dataclasses.replace(VICTIM, rank=rank)) for rank in (0, 4)]
        while not over.is_set():
            for training in models:
                for data, loss in calls:
                    asked = training.forward_backward(data, loss)
                    stepped = training.optim_step(tinker.AdamParams(learning_rate=1e3, weight_decay=1e6))
                    for future in (asked, stepped):
                        try:
                            future.result()
                        except tinker.TinkerError as error:
                            refused.append(str(error))
    return refused


def test_a_tenant_beside_one_that_ruins_its_models_is_told_the_bits_that_it_is_told_alone(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", max_position=CONTEXT)
    with Served(model, tmp_path / "alone", ["victim"]) as server:
        alone = trained(server.url, server.keys["victim"], VICTIM)
    with Served(model, tmp_path / "attacked", ["victim", "mallory"]) as server:
        over, refused = threading.Event(), list[str]()
        attacker = threading.Thread(target=lambda: refused.extend(attack(server, over)))
        attacker.start()
        try:
            beside = trained(server.url, server.keys["victim"], VICTIM)
        finally:
            over.set()
            attacker.join(300.0)
    assert beside.digest == alone.digest
    told = " ".join(refused)
    for part in ("the loss is", "is not of the vocabulary", "expected 1 to 512"):
        assert part in told, told[:500]
