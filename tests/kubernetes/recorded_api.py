"""An API server made of what a real one has answered: ``recorded.json``, which ``record.py`` writes.

Bodies, codes and sentences are the recorded ones; names, labels and versions in them are those of the request. It knows
pods and leases of one namespace, and what happens to a pod: bound, run, told to go with a grace period, removed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

SAID: dict[str, Any] = json.loads(Path(__file__).with_name("recorded.json").read_text())
_POD = re.compile(r"/api/v1/namespaces/[^/]+/pods(?:/(?P<name>[^/]+)(?:/(?P<part>binding|status|log))?)?")
_LEASE = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/[^/]+/leases(?:/(?P<name>[^/]+))?")
_RECORDED_POD = SAID["created"]["body"]["metadata"]["name"]
_RECORDED_LEASE = SAID["lease"]["body"]["metadata"]["name"]
_STATUS = {key: SAID["patched"]["body"][key] for key in ("status",)}


class RecordedApi(httpx2.AsyncBaseTransport):
    """It is used in place of a connection, by the provider and by whoever plays the kubelet."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.refusal: str | None = None
        """Name of the recorded refusal with which pods are answered that are asked for; None: they are made."""
        self.away = False
        """True while nobody answers."""
        self.answers_lost = 0
        """Number of pods that are made and of which the answer is lost."""
        self.logs: dict[str, str] = {}
        """Pod → what it has said; of one that is not in it the log is not to be had."""
        self.requests: list[str] = []
        self._version = 1
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(0)
        if self.away:
            raise httpx2.ConnectError("All connection attempts failed", request=request)
        self.requests.append(f"{request.method} {request.url.path}")
        body = json.loads(request.content or b"{}")
        if pod := _POD.fullmatch(request.url.path):
            return self._pod(request, pod["name"], pod["part"], body)
        lease = _LEASE.fullmatch(request.url.path)
        assert lease is not None, request.url
        return self._lease(request.method, lease["name"], body)

    def break_watches(self) -> None:
        """All that are open end; what is asked for with an older version is gone."""
        self._events.clear()
        self._version += 1
        self._changed.set()

    # ------------------------------------------------------------ pods

    def _pod(self, request: httpx2.Request, name: str | None, part: str | None, body: Any) -> httpx2.Response:
        params = request.url.params
        if name is None and request.method == "POST":
            return self._create(body)
        if name is None and params.get("watch"):
            stream = self._watch(int(params["resourceVersion"]), params.get("labelSelector", ""))
            return httpx2.Response(200, stream=_Stream(stream))
        if name is None:
            found = [pod for pod in self.pods.values() if _fits(pod, params.get("labelSelector", ""))]
            listed = SAID["list"]["body"] | {"items": found, "metadata": {"resourceVersion": str(self._version)}}
            return httpx2.Response(200, json=listed)
        pod = self.pods.get(name)
        if pod is None:
            return _answer("missing", {"headrace-none": name})
        if part == "log":
            return httpx2.Response(200, text=self.logs[name]) if name in self.logs else _answer("no_log")
        if part == "binding":
            pod["spec"]["nodeName"] = body["target"]["name"]
            self._tell("MODIFIED", pod)
            return _answer("bound")
        if part == "status":
            pod["status"] |= body["status"]
            self._tell("MODIFIED", pod)
            return httpx2.Response(200, json=pod)
        grace_s = int(body.get("gracePeriodSeconds", params.get("gracePeriodSeconds", "30")))
        return self._delete(name, pod, grace_s if pod["spec"].get("nodeName") else 0)

    def _create(self, asked: dict[str, Any]) -> httpx2.Response:
        name = asked["metadata"]["name"]
        if self.refusal is not None:
            return _answer(self.refusal, {_RECORDED_POD[:-1] + "3": name})
        if name in self.pods:
            return _answer("exists", {_RECORDED_POD: name})
        self.pods[name] = pod = _filled(asked, SAID["created"]["body"])
        self._tell("ADDED", pod)
        if self.answers_lost:
            self.answers_lost -= 1
            raise httpx2.ReadError("the connection was lost")
        return httpx2.Response(201, json=pod)

    def _delete(self, name: str, pod: dict[str, Any], grace_s: int) -> httpx2.Response:
        if grace_s == 0:
            del self.pods[name]
            self._tell("DELETED", pod)
        else:
            told = SAID["told_to_go"]["body"]["metadata"]
            pod["metadata"] |= {
                "deletionTimestamp": told["deletionTimestamp"], "deletionGracePeriodSeconds": grace_s,
            }  # fmt: skip
            self._tell("MODIFIED", pod)
        return httpx2.Response(200, json=pod)

    def _tell(self, what: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, what, copy.deepcopy(pod)))
        self._changed.set()

    async def _watch(self, version: int, selector: str) -> AsyncIterator[bytes]:
        while True:
            oldest = self._events[0][0] if self._events else self._version + 1
            if version + 1 < oldest:
                yield json.dumps(SAID["expired"]["body"]).encode() + b"\n"
                return
            for at, what, pod in [event for event in self._events if event[0] > version]:
                version = at
                if _fits(pod, selector):
                    yield json.dumps({"type": what, "object": pod}).encode() + b"\n"
            self._changed.clear()
            await self._changed.wait()
            if self.away:
                raise httpx2.ReadError("the connection was lost")

    # ------------------------------------------------------------ leases

    def _lease(self, method: str, name: str | None, body: dict[str, Any]) -> httpx2.Response:
        name = name or str(body["metadata"]["name"])
        lease, names = self.leases.get(name), {_RECORDED_LEASE: name}
        self._version += 1
        if method == "POST":
            self.leases[name] = lease = _filled(body, SAID["lease_created"]["body"])
        elif lease is None:
            return _answer("lease_missing", names)
        elif method == "PUT" and body["metadata"].get("resourceVersion") != lease["metadata"]["resourceVersion"]:
            return _answer("lease_conflict", names)
        elif method == "PUT":
            lease |= {"spec": body["spec"]}
        elif method == "DELETE":
            del self.leases[name]
            return _answer("lease_removed")
        if method != "GET":
            lease["metadata"]["resourceVersion"] = str(self._version)
        return httpx2.Response(201 if method == "POST" else 200, json=lease)


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, lines: AsyncIterator[bytes]) -> None:
        self._lines = lines

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._lines


def _answer(name: str, names: dict[str, str] | None = None) -> httpx2.Response:
    """A recorded one, with our names in it."""
    text = json.dumps(SAID[name]["body"])
    for recorded, ours in (names or {}).items():
        text = text.replace(recorded, ours)
    return httpx2.Response(SAID[name]["code"], content=text, headers={"Content-Type": "application/json"})


def _filled(asked: Any, made: Any) -> Any:
    """What was asked for, with what the server has added to the recorded request."""
    if isinstance(asked, dict) and isinstance(made, dict):
        keys = [*asked, *(key for key in made if key not in asked and key != "labels")]
        return {key: _filled(asked[key], made.get(key)) if key in asked else copy.deepcopy(made[key]) for key in keys}
    if isinstance(asked, list) and isinstance(made, list):
        return [_filled(item, made[0] if made and index == 0 else None) for index, item in enumerate(asked)]
    return asked


def _fits(pod: dict[str, Any], selector: str) -> bool:
    labels = pod["metadata"].get("labels", {})
    wanted = (pair.split("=", 1) for pair in selector.split(",") if pair)
    return all(labels.get(key) == value for key, value in wanted)
