"""A team's server as one command: TLS, quotas, keys that are made and revoked beside it, and what can be watched."""

from __future__ import annotations

import gc
import json
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

tinker = pytest.importorskip("tinker")

from configs.limits import DEFAULT_LIMITS
from tests.certificates import make_authority
from tests.free_ports import free_ports
from tests.supervisors.serving.test_serve import TEXTS, Served, datum
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _quiet_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    gc.collect()  # sockets that the client leaves open are told of here, and not in another test


def keys(directory: Path, *words: str) -> str:
    asked = [sys.executable, "-m", "main", "keys", str(directory), *words]
    return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_one_command_serves_a_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, certificate, key = make_authority(tmp_path)
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: alice, models: 1}]")
    gauges, directory = free_ports(1), tmp_path / "served"
    server = Served(
        make_tiny_checkpoint(tmp_path / "model"), directory, "--tls", str(certificate), "--tls-key", str(key),
        "--tenants", str(tmp_path / "tenants.yaml"), "--prometheus-port", str(gauges),
    )  # fmt: skip
    trusted = ssl.create_default_context(cafile=str(authority))

    def status(of: str) -> dict:
        request = urllib.request.Request(f"{server.url}/api/v1/headrace/status", headers={"X-API-Key": of})
        with urllib.request.urlopen(request, timeout=30, context=trusted) as answer:
            return {row["tenant"]: row for row in json.load(answer)["tenants"]}

    try:
        assert server.url.startswith("https://127.0.0.1:")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        training = service.create_lora_training_client(base_model="base", rank=4, seed=3).result()
        asked = [training.forward_backward([datum(TEXTS[0])], "cross_entropy") for _ in range(3)]
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        assert all(one.result().metrics["loss:sum"] > 0 for one in asked)
        with pytest.raises(tinker.TinkerError, match="1 models of yours are alive"):
            service.create_lora_training_client(base_model="base", rank=4).result()

        operator, further = keys(directory, "--tenant", "operator"), keys(directory, "--tenant", "alice")
        for of in (server.key, operator, further):
            assert status(of)["alice"]["training_tokens"] == 3 * (len(TEXTS[0]) - 1)
        keys(directory, "--revoke", further)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            status(further)
        assert list(status(server.key)) == ["alice"]

        told = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        kinds = [event["kind"] for event in told if event["event"] == "operation"]
        assert kinds == ["create", *["forward_backward"] * 3, "optim_step"]
        assert {"server_started", "model_made", "key_refused"} <= {event["event"] for event in told}
        until_s = time.monotonic() + 3 * DEFAULT_LIMITS.tinker_look_s
        wanted = r'headrace_serving_operations\{tenant="alice"\} 5.0'
        while not re.search(wanted, page := _page(gauges)):
            assert time.monotonic() < until_s, page
            time.sleep(0.5)
        service.close("success").result()
    finally:
        assert server.end() == 0


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()
