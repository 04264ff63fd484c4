"""A kubelet and a scheduler in one: it runs the pods of a namespace as processes of this machine, and says so.

    watch ─▶ new: bound, its command run, Running ─▶ it ends: Succeeded or Failed
             an image named ``missing/…``: ImagePullBackOff      a node selector: Unschedulable
             told to go: SIGTERM ─▶ grace period ─▶ SIGKILL ─▶ removed          removed: SIGKILL

It plays what a cluster does beside its API server; no real kubelet has run what these tests run. Directories of a pod
are directories of this machine: their paths are replaced in the command.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx2

SCHEDULED = {"type": "PodScheduled", "status": "True"}
NO_NODE = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
NO_IMAGE = 'Back-off pulling image "{}": not found'


class Kubelet:
    """It works between ``start`` and ``stop``. ``client``: an administrator's, with the API server's address."""

    def __init__(self, client: httpx2.AsyncClient, namespace: str, directory: Path) -> None:
        self._client = client
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._of = f"/api/v1/namespaces/{namespace}"
        self._directory = directory
        self._seen: set[str] = set()
        self._lives: dict[str, asyncio.Task[None]] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        """Pod → its process."""
        self.pods: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        self._lives["watch"] = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        for process in self.processes.values():
            _signal(process, signal.SIGKILL)
        for task in list(self._lives.values()):
            task.cancel()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        for process in self.processes.values():
            await process.wait()
            process._transport.close()  # else it is closed on a loop that may be closed by then

    def pod_of(self, node: str) -> str:
        return next(name for name, pod in self.pods.items() if pod["metadata"]["labels"].get("headrace/node") == node)

    async def say(self, name: str, status: dict[str, Any]) -> None:
        """Write a pod's status, if it is still there."""
        kind = {"Content-Type": "application/merge-patch+json"}
        await self._ask("PATCH", f"{self._pods}/{name}/status", content=json.dumps({"status": status}), headers=kind)

    async def _ask(self, method: str, address: str, **body: Any) -> httpx2.Response:
        while True:
            try:
                return await self._client.request(method, address, **body)
            except httpx2.HTTPError:
                await asyncio.sleep(0.1)  # the API server is away

    async def _watch(self) -> None:
        while True:
            try:
                listed = (await self._client.get(self._pods)).json()
                for pod in listed["items"]:
                    self._look("MODIFIED", pod)
                params = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
                async with self._client.stream("GET", self._pods, params=params, timeout=None) as changes:
                    async for line in changes.aiter_lines():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        self._look(event["type"], event["object"])
            except httpx2.HTTPError:
                await asyncio.sleep(0.1)  # the API server is away

    def _look(self, what: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        self.pods[name] = pod
        process = self.processes.get(name)
        if what == "DELETED":
            if process is not None:
                _signal(process, signal.SIGKILL)
        elif name not in self._seen:
            self._seen.add(name)
            self._lives[name] = asyncio.create_task(self._live(name, pod))
        elif pod["metadata"].get("deletionTimestamp") and process is not None and f"end {name}" not in self._lives:
            grace_s = pod["metadata"]["deletionGracePeriodSeconds"]
            self._lives[f"end {name}"] = asyncio.create_task(self._end(name, process, grace_s))

    async def _live(self, name: str, pod: dict[str, Any]) -> None:
        spec = pod["spec"]
        image = spec["containers"][0]["image"]
        if spec.get("nodeSelector"):
            no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_NODE}
            return await self.say(name, {"phase": "Pending", "conditions": [no]})
        target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
        bound = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self._ask("POST", f"{self._pods}/{name}/binding", json=bound)
        if image.startswith("missing/"):
            waiting = {"reason": "ImagePullBackOff", "message": NO_IMAGE.format(image)}
            return await self.say(name, self._status("Pending", image, {"waiting": waiting}))
        command = await self._command(name, spec)
        with (self._directory / f"{name}.log").open("wb") as log:
            self.processes[name] = process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=_environment(pod)
            )
        await self.say(name, self._status("Running", image, {"running": {"startedAt": "2026-01-01T00:00:00Z"}}))
        code = await process.wait()
        code = 128 - code if code < 0 else code
        said = (self._directory / f"{name}.log").read_text("utf-8", "replace")[-2000:] if code else ""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": said}
        await self.say(name, self._status("Failed" if code else "Succeeded", image, {"terminated": ended}))
        return None

    async def _end(self, name: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
        _signal(process, signal.SIGKILL)
        await process.wait()
        await self._ask("DELETE", f"{self._pods}/{name}", params={"gracePeriodSeconds": "0"})

    def _status(self, phase: str, image: str, state: dict[str, Any]) -> dict[str, Any]:
        container = {"name": "node", "image": image, "imageID": "", "ready": phase == "Running", "restartCount": 0}
        return {"phase": phase, "conditions": [SCHEDULED], "containerStatuses": [container | {"state": state}]}

    async def _command(self, name: str, spec: dict[str, Any]) -> list[str]:
        """With directories of this machine in place of the pod's own; a claim's is that of all pods that mount it."""
        places = dict[str, Path]()
        container = spec["containers"][0]
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        for volume in spec.get("volumes", []):
            claim = volume.get("persistentVolumeClaim")
            place = self._directory / ("claims" if claim else name) / (claim["claimName"] if claim else volume["name"])
            place.mkdir(parents=True, exist_ok=True)
            places[mounts[volume["name"]]] = place
            await self._fill(place, volume)
        places.pop("/dev/shm", None)
        inside = re.compile("|".join(map(re.escape, sorted(places, key=len, reverse=True))) or r"(?!)")
        words = container["command"] + container.get("args", [])
        return [inside.sub(lambda found: str(places[found.group()]), word) for word in words]

    async def _fill(self, place: Path, volume: dict[str, Any]) -> None:
        """What a Secret or a ConfigMap holds, as it is mounted."""
        if secret := volume.get("secret"):
            data = (await self._ask("GET", f"{self._of}/secrets/{secret['secretName']}")).json()["data"]
            for item in secret["items"]:
                file = place / item["path"]
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(base64.b64decode(data[item["key"]]))
        if found := volume.get("configMap"):
            for key, text in (await self._ask("GET", f"{self._of}/configmaps/{found['name']}")).json()["data"].items():
                (place / key).write_text(text)


def _environment(pod: dict[str, Any]) -> dict[str, str]:
    """Variables of a pod's process; fields are those of its metadata."""
    found = dict(os.environ)
    for variable in pod["spec"]["containers"][0].get("env", []):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "").removeprefix("metadata.")
        found[variable["name"]] = pod["metadata"][field] if field else variable["value"]
    return found


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
