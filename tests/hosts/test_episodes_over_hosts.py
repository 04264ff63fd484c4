"""Episodes whose rollout workers, and agents, are on other hosts than the gateway and the environments.

host head: scheduler, trainer, gateway, environments      hosts one, two: rollout workers      host one: an agent, too
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from benchmarks._processes import ROOT
from benchmarks.namespaces.cluster import ClusterOfHosts
from benchmarks.namespaces.network import Network
from configs.schema import JobConfig
from supervisors.preparation.tiny_model import make_tiny_model

pytestmark = pytest.mark.cluster

StartCluster = Callable[..., ClusterOfHosts]
FAR: Final = ("--site", "far")
CUT_S: Final = 10.0
AGENT_CUT_S: Final = 4.0


def _certificate(directory: Path, address: str) -> dict[str, str]:
    """The section ``gateway`` of a job whose agents are on other hosts; its certificate is good for ``address``."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=headrace"]
    words += ["-addext", f"subjectAltName=IP:{address}"]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
    return {"host": "0.0.0.0", "tls_certificate": str(certificate), "tls_key": str(key)}


def games(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """The preset's games of guessing, on simulated engines and a simulated trainer; a turn takes some 0.1 s."""
    job = yaml.safe_load((ROOT / "configs" / "episodes.yaml").read_text("utf-8"))
    job["data"]["path"] = str(ROOT / "configs" / job["data"]["path"])
    job["model"] |= {"hidden": 32, "layers": 1, "warm_start_steps": 0}
    job["algorithm"] |= {"group_size": 4, "prompts_per_step": 4}
    model = tmp_path / "model"
    make_tiny_model(JobConfig.model_validate(job), model)
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    return job | {
        "model": {"source": "hf", "path": str(model)},
        "rollout": {
            "engine": "simulated",
            "engine_options": {"base_s": 0.03, "mean_tokens": 3, "vocab": vocab},
            "workers": 4,
            "max_tokens": 16,
        },
        "trainer": {"backend": "simulated"},
        "checkpoint": {"every": 0},
        "metrics": {"tensorboard": False},
    } | sections  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
def test_episodes_go_on_when_the_link_of_their_workers_and_then_of_their_gateway_is_cut_for_ten_seconds(
    start_cluster: StartCluster, network: Network, tmp_path: Path
) -> None:
    """Environments are on the head's host: no token that the model has said is lost to them."""
    cluster = start_cluster(games(tmp_path, steps=5000), nodes={"one": FAR, "two": FAR})
    run = cluster.run
    for cut in ("one", "head"):
        run.wait_until("four workers", lambda: len(cluster.workers()) == 4)
        run.wait_for_step(len(run.rows()) + 2)
        network.cut(cluster.hosts[cut])
        time.sleep(CUT_S)
        network.heal(cluster.hosts[cut])
        healed_s = time.monotonic()
        run.wait_for_step(len(run.rows()))
        print(
            f"\nlink of {cut} cut for {CUT_S:g} s; a step {time.monotonic() - healed_s:.1f} s after it is back", end=""
        )
    run.wait_until("four workers again", lambda: len(cluster.workers()) == 4)
    run.wait_for_step(len(run.rows()) + 3)
    assert cluster.ctl("head", "cancel")["state"] == "stopping"
    summary = run.finish(state="interrupted")
    lost = ("prompts_lost", "samples_trained_twice", "tokens_discarded")
    assert {name: summary[name] for name in lost} == dict.fromkeys(lost, 0)
    rows = run.rows()
    assert all(row["episodes"] == 16 and row["turns_mean"] == row["env_guesses"] for row in rows)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_agent_on_another_host_reaches_the_gateway_by_its_address_with_its_key_also_after_a_cut_of_its_link(
    start_cluster: StartCluster, network: Network, tmp_path: Path
) -> None:
    """A question that is under way while the link is cut is asked again, and no token is sampled twice."""
    environment = {"kind": "external", "turn_tokens": 6}
    gateway = _certificate(tmp_path, "10.77.0.1")
    cluster = start_cluster(
        games(tmp_path, environment=environment, gateway=gateway, steps=2), nodes={"one": FAR, "two": FAR}
    )
    run, one = cluster.run, cluster.hosts["one"]
    endpoint, key = run.run_dir / "gateway.endpoint", run.run_dir / "gateway.key"
    run.wait_until("gateway", lambda: endpoint.exists() and key.exists())
    base = endpoint.read_text().strip()
    assert base.startswith("https://10.77.0.1:")
    words = ("env", f"PYTHONPATH={ROOT}", sys.executable, str(Path(__file__).with_name("agent_elsewhere.py")))
    agent = one.start(*words, base, str(key), gateway["tls_certificate"], "32")
    assert agent.stdout is not None
    assert [agent.stdout.readline() for _ in range(5)][-1] == b"4\n", "five episodes are over"
    network.cut(one)
    time.sleep(AGENT_CUT_S)
    network.heal(one)
    summary = run.finish()
    longest_s = float(agent.stdout.read().split()[-1])
    assert longest_s > AGENT_CUT_S, "no question was under way"
    print(f"\nlongest question {longest_s:.1f} s")
    assert (summary["samples"], summary["samples_dropped"], summary["tokens_discarded"]) == (32, 0, 0)
    assert [row["turns_mean"] for row in run.rows()] == [2.0, 2.0]
