"""A real run whose machines are pods, on a real API server that knows the head by its ServiceAccount.

Its rights are those of ``deploy/kubernetes/rights.yaml``. Pods are processes of this machine, as
``tests/kubernetes/kubelet.py`` runs them: no real kubelet does.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from small_job import simulated_job, simulated_rollout

pytest.importorskip("lightkube")

from supervisors.testing.run_under_test import HeadraceRun, RunRecord
from tests.free_ports import free_ports
from tests.kubernetes.api_server import MISSING, ApiServer
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.worlds import HEADRACE, NAMESPACE
from transport.zmq.security import allow, generate_keys, write_keys

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(MISSING, reason="there is no kube-apiserver, or no etcd"),
]

ROOT = Path(__file__).resolve().parents[2]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
StartRun = Callable[..., HeadraceRun]


class KubeletThread:
    """It runs pods beside the test, and keeps a list of processes by machine."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._admin = server.admin()
        self.kubelet = Kubelet(self._admin, NAMESPACE, directory)
        self._call(self.kubelet.start())

    def kill(self, node: str) -> None:
        self._loop.call_soon_threadsafe(self.kubelet.processes[self.kubelet.pod_of(node)].kill)

    def stop(self) -> None:
        self._call(self.kubelet.stop())
        self._call(self._admin.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    """With the namespace, and with the head's rights as ``deploy/`` has them."""
    directory = tmp_path / "cluster"
    directory.mkdir()
    server = ApiServer(directory)
    try:
        server.start()
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        rights = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "rights.yaml").read_text()))
        for one in rights:
            one["metadata"]["namespace"] = NAMESPACE  # as kubectl -n does
            for subject in one.get("subjects", []):
                subject["namespace"] = NAMESPACE
        server.apply(*rights)
        server.log_in("headrace-head", NAMESPACE)
        yield server
    finally:
        server.stop()


@pytest.fixture
def kubelet(server: ApiServer, tmp_path: Path) -> Iterator[KubeletThread]:
    (tmp_path / "pods").mkdir()
    kubelet = KubeletThread(server, tmp_path / "pods")
    yield kubelet
    kubelet.stop()


@pytest.fixture
def start(
    headrace_run: StartRun, small_model: Path, tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., HeadraceRun]:
    """Starts a run of ``nodes`` pods, whose keys come from a Secret that the head may not read."""

    def start(*, nodes: int, steps: int = 100_000, **section: Any) -> HeadraceRun:
        head_keys, node_keys = tmp_path / "head-keys", tmp_path / "node-keys"
        head, node = generate_keys(), generate_keys()
        write_keys(head, head_keys)
        write_keys(node, node_keys)
        allow(head_keys, "small", node.public)
        allow(node_keys, "head", head.public)
        files = {"node.secret": "node.secret", "node.public": "node.public", "head.public": "allowed/head.public"}
        data = {key: base64.b64encode((node_keys / path).read_bytes()).decode() for key, path in files.items()}
        metadata = {"name": "headrace-node-keys", "namespace": NAMESPACE}
        server.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("headrace-head", NAMESPACE)))
        kubernetes = {"image": "headrace:1", "command": HEADRACE, "keys_secret": "headrace-node-keys"} | section
        job = simulated_job(
            small_model,
            steps=steps,
            rollout=simulated_rollout(small_model, workers=1),
            cluster={"place_rollout": "elastic", "listen": f"tcp://0.0.0.0:{free_ports()}"},
            provider={"kind": "kubernetes", "nodes_max": nodes, "notice_s": 5.0, "kubernetes": kubernetes},
            limits={"machine_retry_s": 1.0, "hand_over_s": 0.5, "cluster_claim_s": 3.0, "machine_join_s": 20.0},
        )
        return headrace_run(job, arguments=["--keys", str(head_keys)])

    return start


def working(run: HeadraceRun) -> set[str]:
    """Pods' machines with a worker."""
    return {node for node in run.workers().values() if node.startswith("small-")}


@pytest.mark.timeout(600)
def test_pods_are_evicted_killed_and_unheard_of_and_nothing_is_lost_or_trained_twice_or_left(
    start: Callable[..., HeadraceRun], server: ApiServer, kubelet: KubeletThread
) -> None:
    """It grows to three pods. One is evicted with its notice, one is killed; the API server goes and comes back; at
    last the run itself is killed. Its next life removes the pods that were left, and finishes the run.
    """
    with server.client() as admin:

        def pods() -> list[str]:
            return [pod["metadata"]["name"] for pod in admin.get(PODS).json()["items"]]

        run = start(nodes=3)
        run.wait_until("three machines", lambda: len(working(run)) == 3)
        first, second, third = sorted(working(run))

        evicted = kubelet.kubelet.pod_of(first)
        eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": evicted}}
        assert admin.post(f"{PODS}/{evicted}/eviction", json=eviction).is_success
        run.wait_until("another in its place", lambda: len(working(run)) == 3 and first not in working(run))
        assert run.events("node_draining")[0]["node"] == first, "it was told, and left in good order"
        kubelet.kill(second)
        run.wait_until("another in its place", lambda: len(working(run)) == 3 and second not in working(run))

        server.kill()
        step = run.rows()[-1]["step"]
        run.wait_for_step(step + 3)
        assert third in working(run), "an API server that is away takes nothing away"
        kubelet.kill(third)
        run.wait_until("its end", lambda: third not in working(run))
        server.run_server()
        run.wait_until("another in its place", lambda: len(working(run)) == 3)

        run.kill()
        assert len(pods()) >= 3
        left = set(pods())
        keys = ["--keys", str(run.run_dir.with_name("head-keys"))]
        run.resume(settings=[f"steps={run.rows()[-1]['step'] + 60}"], arguments=keys)
        run.wait_until("those of a former life gone", lambda: not left & set(pods()))
        run.finish()
        assert (pods(), admin.get(LEASES).json()["items"]) == ([], [])


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_the_guides_commands_bring_up_a_head_that_runs_gives_its_pods_back_and_goes_on(
    server: ApiServer, kubelet: KubeletThread, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of ``deploy/kubernetes`` is applied. The test is the controller of the Job: it makes the head's pod of it."""
    shell = Guide(server, tmp_path, monkeypatch)
    preset = yaml.safe_load((ROOT / "configs" / "kubernetes.yaml").read_text())
    cluster = preset["cluster"] | {"listen": f"tcp://0.0.0.0:{free_ports()}"}
    limits = {"hand_over_s": 0.5, "cluster_claim_s": 3.0}
    job = preset | simulated_job(
        small_model, name=preset["name"], steps=100_000, rollout=simulated_rollout(small_model, workers=1),
        cluster=cluster, provider=preset["provider"] | {"nodes_max": 2, "notice_s": 5.0}, limits=limits,
    )  # fmt: skip
    (shell.place / "configs" / "kubernetes.yaml").write_text(yaml.safe_dump(job))
    shell.run(*shell.block("headrace keys head-keys"))
    rights, config_map, head, _logs, steer, delete = shell.block("kubectl apply")
    shell.run(rights, config_map, head, "kubectl apply -f deploy/kubernetes/network.yaml")
    run = RunRecord(tmp_path / "pods" / "claims" / "headrace-work" / "runs" / "kubernetes")

    with server.client() as admin:

        def pods() -> dict[str, dict[str, Any]]:
            return {pod["metadata"]["name"]: pod for pod in admin.get(PODS).json()["items"]}

        def until(what: str, holds: Callable[[], object]) -> None:
            deadline_s = time.monotonic() + 60
            while not holds():
                logs = [file.read_text()[-1500:] for file in (tmp_path / "pods").glob("headrace-head-*.log")]
                assert time.monotonic() < deadline_s, f"waited for {what}: {logs}"
                time.sleep(0.1)

        for life in (1, 2):
            of_job = admin.get(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/headrace-head").json()
            template, name = of_job["spec"]["template"], f"headrace-head-{life}"
            metadata = {"name": name, "labels": template["metadata"]["labels"]}
            made = admin.post(PODS, json={"metadata": metadata, "spec": template["spec"]})
            assert made.is_success, made.text
            before = len(run.rows())
            machines = {f"kubernetes-{2 * life - 1}", f"kubernetes-{2 * life}"}
            until("its machines", lambda: machines <= {row["node"] for row in run.events("node_joined")})  # noqa: B023
            until("steps", lambda: len(run.rows()) > before + 5)  # noqa: B023
            owners = [pod["metadata"].get("ownerReferences") for pod in pods().values()]
            uid = made.json()["metadata"]["uid"]
            assert owners.count([{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]) == 2
            said = shell.run(steer.partition(" -- ")[2].replace("/work", str(run.run_dir.parents[1])))
            assert all(machine in said for machine in machines)

            shell.run(delete.partition(" #")[0])
            assert admin.request("DELETE", f"{PODS}/{name}").is_success, "with its grace period, as the collector does"
            until("the end of all", lambda: not pods())
            assert admin.get(LEASES).json()["items"] == []
            if life == 1:
                shell.run(head)
        assert run.report().clean
    shell.run(*shell.block("kubectl delete pods,leases"))


class Guide:
    """Commands of the guide, run where the repository's files are copied to: ``kubectl`` is an administrator's."""

    def __init__(self, server: ApiServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
        self._blocks = [block.strip() for block in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)]
        self.place = directory / "repository"
        shutil.copytree(ROOT / "deploy", self.place / "deploy")
        (self.place / "configs").mkdir()
        admin = f"exec {shutil.which('kubectl')} --kubeconfig {server.kubeconfig('admin', NAMESPACE)}"
        unchecked = '[ "$1" != apply ] || set -- "$@" --validate=false'  # the server is older than some of the fields
        commands = {"headrace": f'exec {sys.executable} -P -m main "$@"', "kubectl": f'{unchecked}\n{admin} "$@"'}
        (directory / "bin").mkdir()
        for name, line in commands.items():
            (directory / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
            (directory / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("headrace-head", NAMESPACE)))

    def block(self, begins: str) -> list[str]:
        """The commands of the block that begins so."""
        (found,) = [block for block in self._blocks if block.startswith(begins)]
        return found.replace("\\\n", " ").splitlines()

    def run(self, *commands: str) -> str:
        said = ""
        for command in commands:
            done = subprocess.run(
                ["bash", "-ec", command], cwd=self.place, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            said += done.stdout
        return said


def test_a_run_whose_head_lacks_rights_ends_with_the_clusters_sentence(
    start: Callable[..., HeadraceRun], server: ApiServer
) -> None:
    with server.client() as admin:
        role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings/headrace-head"
        assert admin.delete(role).is_success
    run = start(nodes=1)
    run.process.wait(timeout=60)
    said = run.last_words()
    assert "the cluster refuses to look after pods in namespace train: leases.coordination.k8s.io" in said
    assert 'User "system:serviceaccount:train:headrace-head" cannot get resource "leases"' in said


def test_the_heads_role_is_enough_and_nothing_more(server: ApiServer) -> None:
    """What it may do is done by the runs above; here is what it may not do."""
    core, apps = f"/api/v1/namespaces/{NAMESPACE}", f"/apis/apps/v1/namespaces/{NAMESPACE}"
    rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
    with server.client("headrace-head") as head:
        assert head.get(PODS).status_code == 200
        assert head.get(f"{PODS}/any/log").status_code == 404, "it may read logs; there is no such pod"
        for method, path in [
            ("GET", f"{core}/secrets"), ("GET", f"{core}/secrets/headrace-node-keys"), ("POST", f"{core}/secrets"),
            ("GET", f"{core}/configmaps"), ("POST", f"{PODS}/any/attach"), ("POST", f"{PODS}/any/exec"),
            ("POST", f"{PODS}/any/eviction"), ("PATCH", f"{PODS}/any"), ("PUT", f"{PODS}/any/status"),
            ("DELETE", PODS), ("GET", "/api/v1/pods"), ("GET", "/api/v1/namespaces/default/pods"),
            ("POST", "/api/v1/namespaces/default/pods"), ("GET", "/api/v1/nodes"), ("POST", f"{apps}/deployments"),
            ("POST", f"{rights}/roles"), ("POST", f"{rights}/rolebindings"), ("GET", LEASES),
            ("POST", f"{core}/serviceaccounts/headrace-head/token"),
        ]:  # fmt: skip
            assert _code(head, method, path) == 403, f"{method} {path}"


def _code(client: httpx2.Client, method: str, path: str) -> int:
    body = {} if method in ("POST", "PUT", "PATCH") else None
    kind = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else None
    return client.request(method, path, json=body, headers=kind).status_code
