"""``headrace serve`` with real models and the unmodified client, through its death, too."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from actors.tinker.errors import OperationRefused
from actors.tinker.learner import ModelSpec
from configs.limits import DEFAULT_LIMITS
from supervisors.serving.local_models import LocalFactory, NotServable, adapter_of
from supervisors.serving.local_server import base_models
from tests.free_ports import free_ports
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # the client warns of its own next versions
PARTS = ("train_attn", "train_mlp", "train_unembed")
TEXTS = ([5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16])


@pytest.fixture(autouse=True)
def _quiet_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    gc.collect()  # sockets that the client leaves open are told of here, and not in another test


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


class Served:
    """The command as a process, at one port in all of its lives."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._words = [
            *(sys.executable, "-m", "main", "serve", "--model", f"base={model}", "--dir", str(directory)),
            *("--port", str(free_ports(1)), "--tenant", "alice"),
        ]
        self._log = directory.with_suffix(".log")
        self.begin()

    def begin(self) -> None:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=subprocess.STDOUT)
        until_s = time.monotonic() + DEFAULT_LIMITS.run_patience_s
        while "TINKER_API_KEY" not in (said := self._log.read_text()):
            assert self._process.poll() is None and time.monotonic() < until_s, said
            time.sleep(0.05)
        self.url, self.key = (re.findall(rf"{name}=(\S+)", said)[0] for name in ("TINKER_BASE_URL", "TINKER_API_KEY"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=30)


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


def test_an_adapter_is_of_the_parts_that_a_client_names() -> None:
    def spec(**parts: bool) -> ModelSpec:
        return ModelSpec(base_model="base", rank=4, seed=0, **(dict.fromkeys(PARTS, False) | parts))

    for parts, targets in (
        ({"train_unembed": True}, ("lm_head",)),
        ({"train_attn": True}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({"train_mlp": True, "train_unembed": True}, ("gate_proj", "up_proj", "down_proj", "lm_head")),
        ({"train_attn": True, "train_mlp": True}, ("all-linear",)),
    ):
        adapter = adapter_of(spec(**parts))
        assert adapter is not None and adapter.targets == targets
    with pytest.raises(OperationRefused, match="trains nothing"):
        LocalFactory({}, DEFAULT_LIMITS).check(spec())


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
        while not over.is_set():
            if step_ended.wait(0.05):
                step_ended.clear()
                time.sleep(0.3)
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


def test_a_directory_that_cannot_be_served_is_refused_by_name(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(NotServable, match=r"holds no config\.json"):
        base_models([str(tmp_path)])
    with pytest.raises(NotServable, match="'base' is served already"):
        base_models([f"base={model_path}", f"base={model_path}"])
    assert base_models([str(model_path)])[str(model_path)].context_tokens == 512
