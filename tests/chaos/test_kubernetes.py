"""A real run whose machines are pods, on a real API server that knows the head by its ServiceAccount.

Its rights are those of ``deploy/kubernetes/rights.yaml``. Pods are processes of this machine, as
``tests/kubernetes/kubelet.py`` runs them: no real kubelet does.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from small_job import simulated_job, simulated_rollout

pytest.importorskip("lightkube")

from supervisors.testing.run_under_test import HeadraceRun
from tests.free_ports import free_ports
from tests.kubernetes.api_server import MISSING, ApiServer
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.worlds import HEADRACE, NAMESPACE
from transport.zmq.security import allow, generate_keys, write_keys

pytestmark = [pytest.mark.long, pytest.mark.skipif(MISSING, reason="there is no kube-apiserver, or no etcd")]

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
