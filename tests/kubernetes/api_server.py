"""A real API server with its etcd, for the long tests. How to build one stands in ``docs/guides/kubernetes.md``.

``HEADRACE_KUBE_APISERVER`` names the binary (else it is looked for in PATH), etcd comes from PATH.
"""

from __future__ import annotations

import csv
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx2
import yaml

BINARY = os.environ.get("HEADRACE_KUBE_APISERVER") or shutil.which("kube-apiserver")
ETCD = shutil.which("etcd")
MISSING = BINARY is None or ETCD is None


class ApiServer:
    """It runs from ``start`` to ``stop``. Users are known by tokens; ``kubeconfig`` writes a file for one of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._etcd_ports = _free_port(), _free_port()
        self._port = _free_port()
        self.address = f"https://127.0.0.1:{self._port}"
        self._tokens = {"admin": secrets.token_hex(8)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, users: tuple[str, ...] = ()) -> None:
        for user in users:
            self._tokens[user] = secrets.token_hex(8)
        key = self._directory / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        with (self._directory / "tokens.csv").open("w", newline="") as file:
            for user, token in self._tokens.items():
                csv.writer(file).writerow([token, user, user, *(["system:masters"] if user == "admin" else [])])
        client, peer = (f"http://127.0.0.1:{port}" for port in self._etcd_ports)
        self._run(
            [str(ETCD), "--data-dir", str(self._directory / "etcd"), "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"default={peer}"],
            "etcd.log",
        )  # fmt: skip
        self.run_server()

    def run_server(self) -> None:
        """The server alone, and again after ``kill``."""
        key = str(self._directory / "service-accounts.key")
        self._run(
            [str(BINARY), "--etcd-servers", f"http://127.0.0.1:{self._etcd_ports[0]}",
             "--cert-dir", str(self._directory / "certificates"), "--bind-address", "127.0.0.1",
             "--secure-port", str(self._port), "--token-auth-file", str(self._directory / "tokens.csv"),
             "--authorization-mode", "RBAC",
             "--service-account-key-file", key, "--service-account-signing-key-file", key,
             "--service-account-issuer", "https://headrace.test", "--service-cluster-ip-range", "10.96.0.0/24",
             "--disable-admission-plugins", "ServiceAccount", "--watch-cache=false"],
            "server.log",
        )  # fmt: skip
        deadline = time.monotonic() + 60
        with self.client() as client:
            while True:
                try:
                    if client.get("/readyz").text == "ok" and client.get("/api/v1/namespaces/default").is_success:
                        return
                except httpx2.HTTPError:
                    pass
                assert time.monotonic() < deadline, (self._directory / "server.log").read_text()[-2000:]
                time.sleep(0.2)

    def kill(self) -> None:
        """The server, not what it has stored."""
        server = self._processes.pop()
        server.kill()
        server.wait()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def client(self, user: str = "admin") -> httpx2.Client:
        return httpx2.Client(base_url=self.address, headers=self._header(user), verify=_unchecked(), timeout=10)

    def log_in(self, account: str, namespace: str) -> None:
        """From now on the ServiceAccount is a user of this name, with a token that the server has issued."""
        with self.client() as client:
            address = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
            asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            answer = client.post(address, json=asked)
            assert answer.is_success, answer.text
            self._tokens[account] = answer.json()["status"]["token"]

    def admin(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.address, headers=self._header("admin"), verify=_unchecked(), timeout=10)

    def apply(self, *objects: dict[str, object]) -> None:
        """Make these objects, as an administrator, each at the address that its kind has."""
        groups = {"rbac.authorization.k8s.io/v1": "apis/rbac.authorization.k8s.io/v1", "v1": "api/v1"}
        with self.client() as client:
            for made in objects:
                metadata = made["metadata"]
                assert isinstance(metadata, dict)
                where = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
                answer = client.post(
                    f"/{groups[str(made['apiVersion'])]}{where}/{str(made['kind']).lower()}s", json=made
                )
                assert answer.is_success, answer.text

    def kubeconfig(self, user: str, namespace: str) -> Path:
        path = self._directory / f"{user}.kubeconfig"
        cluster = {"server": self.address, "insecure-skip-tls-verify": True}
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(content))
        return path

    def _header(self, user: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._tokens[user]}"}

    def _run(self, command: list[str], log: str) -> None:
        with (self._directory / log).open("ab") as file:
            self._processes.append(subprocess.Popen(command, stdout=file, stderr=file))


def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
