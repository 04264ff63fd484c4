"""``headrace serve`` with real models and the unmodified client, through its death, too."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from configs.errors import ConfigError
from configs.serving import ServingConfig, models_named, problems_of, served_base
from tests.supervisors.serving.served_process import ServedProcess
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # the client warns of its own next versions
TEXTS = ([5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16])


@pytest.fixture(autouse=True)
def _quiet_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    gc.collect()  # sockets that the client leaves open are told of here, and not in another test


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


class Served(ServedProcess):
    """The command, serving one model that clients call ``base``."""

    def __init__(self, model: Path, directory: Path, *words: str) -> None:
        super().__init__({"base": model}, directory, *words)


def datum(tokens: list[int]) -> Any:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def trained(
    server: Served, steps: int, step_ended: threading.Event | None = None, **parts: bool
) -> tuple[list[float], list[float]]:
    """Losses of all steps, whose calls are under way together, and the newest snapshot's log-probabilities.

    ``parts``: what is trained, as the client names it; by default all, the output embedding too.
    """
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    training = service.create_lora_training_client(base_model="base", rank=8, seed=3, **parts).result()
    asked, losses = [], []
    for number in range(steps):
        asked.append(training.forward_backward([datum(TEXTS[number % 3]), datum(TEXTS[1])], "cross_entropy"))
        training.optim_step(tinker.AdamParams(learning_rate=2e-2))
    for answer in asked:
        losses.append(answer.result().metrics["loss:sum"])
        if step_ended is not None:
            step_ended.set()
    sampling = training.save_weights_and_get_sampling_client().result()
    told = sampling.compute_logprobs(tinker.ModelInput.from_ints(TEXTS[0])).result()
    forward = training.forward([datum(TEXTS[0])], "cross_entropy").result()
    np.testing.assert_allclose(told[1:], forward.loss_fn_outputs[0]["logprobs"].tolist(), atol=1e-5)
    service.close("success").result()
    return losses, told[1:]


def test_the_unmodified_client_trains_an_adapter_and_samples_what_was_trained(model_path: Path, tmp_path: Path) -> None:
    server = Served(model_path, tmp_path / "served")
    try:
        losses, _ = trained(server, 6)
        assert losses[-3:] < losses[:3]
        head, _ = trained(server, 6, train_mlp=False, train_attn=False)
        assert head[-3:] < head[:3] and head[0] == losses[0] and head[-3:] != losses[-3:]
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        with pytest.raises(tinker.TinkerError, match="'other' is not served here"):
            service.create_lora_training_client(base_model="other", rank=4).result()
        service.close("success").result()
    finally:
        assert server.end() == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_again_and_again_changes_no_bit(model_path: Path, tmp_path: Path) -> None:
    undisturbed = Served(model_path, tmp_path / "undisturbed")
    expected = trained(undisturbed, 40)
    undisturbed.end()
    server, step_ended, over = Served(model_path, tmp_path / "served"), threading.Event(), threading.Event()
    kills = 0

    def kill_now_and_then() -> None:
        nonlocal kills
        while not over.is_set() and kills < 4:
            if step_ended.wait(0.05):
                step_ended.clear()
                server.kill()
                kills += 1
                server.begin()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        assert trained(server, 40, step_ended) == expected
        assert kills >= 3
    finally:
        over.set()
        killer.join()
        server.end()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whichever_process_is_killed_no_bit_changes(model_path: Path, tmp_path: Path) -> None:
    """Trainer, model server, head and sampler in turn, while operations of 40 steps are under way."""
    undisturbed = Served(model_path, tmp_path / "undisturbed")
    expected = trained(undisturbed, 40)
    undisturbed.end()
    server, step_ended, over = Served(model_path, tmp_path / "served"), threading.Event(), threading.Event()
    killed: list[str] = []

    def kill_in_turn() -> None:
        for name in ("train-0", "models", "head", "sampler-0-0", "train-0"):
            while not over.is_set() and not step_ended.wait(0.05):
                pass
            step_ended.clear()
            if not over.is_set() and server.kill_one(name):
                killed.append(name)

    killer = threading.Thread(target=kill_in_turn)
    killer.start()
    try:
        assert trained(server, 40, step_ended) == expected
        assert {"train-0", "models", "head"} <= set(killed)
    finally:
        over.set()
        killer.join()
        assert server.end() == 0


def test_a_model_that_cannot_be_served_is_refused_by_name(model_path: Path, tmp_path: Path) -> None:
    def told(*texts: str) -> list[tuple[str, str]]:
        return [(field, what) for field, what, _ in problems_of(ServingConfig(models=models_named(texts)))]

    assert told(f"base={model_path}") == []
    assert told(f"base={tmp_path}") == [("models.0.path", f"{tmp_path} holds no config.json")]
    assert told(f"base={model_path}", f"base={model_path}") == [("models.1.name", "base is served already")]
    assert told() == [("models", "is empty")]
    with pytest.raises(ConfigError, match="is no name for a model"):
        models_named([f"a model={model_path}"])
    [model] = models_named([str(model_path)])
    assert model.name == str(model_path)
    assert served_base(model).context_tokens == 512
