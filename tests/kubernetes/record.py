"""Asks a real API server what the recorded one (``recorded_api.py``) answers later, and writes ``recorded.json``.

HEADRACE_KUBE_APISERVER=…/kube-apiserver python -m tests.kubernetes.record
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx2

from configs.kubernetes_schema import KubernetesConfig
from supervisors.providers.kubernetes.pods import Order, Owner, manifest
from tests.kubernetes.api_server import ApiServer

FILE = Path(__file__).with_name("recorded.json")
PODS = "/api/v1/namespaces/train/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/train/leases"
OWNER = Owner("demo", "headrace-demo-0a1b2c3d", "4e5f")
LEASE = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": OWNER.mark},
    "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000001Z"},
}
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "pods", "namespace": "train"},
    "spec": {"hard": {"pods": "0"}},
}


def pod(number: int, **changes: Any) -> dict[str, Any]:
    config = KubernetesConfig(image="registry.example/headrace:1", **changes)
    order = Order("demo-1", "spot", "tcp://10.0.0.1:7001", 1, 0.0)
    return manifest(config, OWNER, order, OWNER.pod_name(number))


def main() -> None:
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        server = ApiServer(Path(place))
        try:
            server.start(("nobody",))
            server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "train"}})
            with server.client() as client:
                _ask(client, server, said)
        finally:
            server.stop()
    FILE.write_text(json.dumps(_plain(said), indent=1, sort_keys=True) + "\n")
    print(f"{FILE}: {', '.join(said)}")


def _ask(client: httpx2.Client, server: ApiServer, said: dict[str, Any]) -> None:
    def note(name: str, answer: httpx2.Response) -> dict[str, Any]:
        said[name] = {"code": answer.status_code, "body": answer.json()}
        return answer.json()

    said["version"] = client.get("/version").json()["gitVersion"]
    said["asked"] = pod(1)
    listed = note("list", client.get(PODS))
    note("created", client.post(PODS, json=pod(1)))
    note("exists", client.post(PODS, json=pod(1)))
    bad_name = pod(2)
    bad_name["metadata"]["name"] = "Demo_2"
    note("invalid", client.post(PODS, json=bad_name))
    note("bad", client.post(PODS, json=pod(2, resources={"limits": {"memory": "64 GB"}})))
    stranger = {"Authorization": f"Bearer {server._tokens['nobody']}"}
    note("forbidden", client.post(PODS, json=pod(2), headers=stranger))
    note("missing", client.delete(f"{PODS}/headrace-none"))
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    one = f"{PODS}/{OWNER.pod_name(1)}"
    bound = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": OWNER.pod_name(1)}, "target": target}
    note("bound", client.post(f"{one}/binding", json=bound))
    note("no_log", client.get(f"{one}/log", params={"tailLines": 5}))
    merge = {"Content-Type": "application/merge-patch+json"}
    note("patched", client.patch(f"{one}/status", content='{"status": {"phase": "Running"}}', headers=merge))
    note("told_to_go", client.request("DELETE", one, json={"gracePeriodSeconds": 7}))
    note("removed", client.request("DELETE", one, json={"gracePeriodSeconds": 0}))
    params = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "1"}
    said["events"] = [json.loads(line) for line in client.get(PODS, params=params).text.splitlines()]
    client.post("/api/v1/namespaces/train/resourcequotas", json=QUOTA)
    while client.get("/api/v1/namespaces/train/resourcequotas/pods").json().get("status", {}) == {}:
        status = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
        address = "/api/v1/namespaces/train/resourcequotas/pods/status"
        client.patch(address, content=json.dumps(status), headers=merge)  # else a controller's part
    note("quota", client.post(PODS, json=pod(3)))
    made = note("lease_created", client.post(LEASES, json=LEASE))
    note("lease", client.get(f"{LEASES}/{OWNER.mark}"))
    note(
        "lease_replaced",
        client.put(f"{LEASES}/{OWNER.mark}", json=made | {"spec": made["spec"] | {"holderIdentity": "b"}}),
    )
    note("lease_conflict", client.put(f"{LEASES}/{OWNER.mark}", json=made))
    note("lease_removed", client.delete(f"{LEASES}/{OWNER.mark}"))
    note("lease_missing", client.get(f"{LEASES}/{OWNER.mark}"))
    revision = client.get(PODS).json()["metadata"]["resourceVersion"]
    etcd = f"http://127.0.0.1:{server._etcd_ports[0]}/v3/kv/compaction"
    httpx2.post(etcd, json={"revision": revision})
    note("expired", client.get(PODS, params=params))


def _plain(said: Any) -> Any:
    """Without the server's notes on who has written which field."""
    if isinstance(said, dict):
        return {key: _plain(value) for key, value in said.items() if key != "managedFields"}
    return [_plain(item) for item in said] if isinstance(said, list) else said


if __name__ == "__main__":
    main()
