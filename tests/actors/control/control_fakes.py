"""A system behind the control socket that is not there: jobs in a dict, and a list of what it was told to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from actors.control.errors import NotFound, NotNow

Plain = dict[str, Any]


class FakeBackend:
    """Verified by the server tests: it implements all of ControlBackend."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.events: asyncio.Queue[Plain | None] = asyncio.Queue()
        self.states = {"demo": "running"}
        self.hang = asyncio.Event()
        self.slow: asyncio.Event | None = None
        """What rows of metrics wait for, if anything."""

    def _job(self, job: str | None) -> str:
        name = job if job is not None else next(iter(self.states))
        if name not in self.states:
            raise NotFound(f"there is no job {name!r}", "Look with jobs")
        return name

    async def submit(self, job: Plain) -> Plain:
        self.calls.append(("submit", job))
        self.states[str(job["name"])] = "running"
        return {"job": job["name"], "run_dir": f"runs/{job['name']}"}

    async def jobs(self) -> list[Plain]:
        return [
            {"job": name, "state": state, "step": 3, "steps": 60, "run_dir": f"runs/{name}"}
            for name, state in self.states.items()
        ]

    async def watch(self, job: str | None) -> AsyncGenerator[Plain, None]:
        self._job(job)
        while (event := await self.events.get()) is not None:
            yield event

    async def pause(self, job: str | None) -> Plain:
        name = self._job(job)
        if self.states[name] == "paused":
            raise NotNow(f"{name} is paused already", "Use resume")
        self.states[name] = "paused"
        return {"job": name, "state": "paused"}

    async def resume(self, job: str | None) -> Plain:
        self.states[self._job(job)] = "running"
        return {"job": self._job(job), "state": "running"}

    async def cancel(self, job: str | None) -> Plain:
        self.states[self._job(job)] = "cancelled"
        return {"job": self._job(job), "state": "cancelled"}

    async def scale(self, job: str | None, workers: int) -> Plain:
        self.calls.append(("scale", workers))
        return {"job": self._job(job), "workers": workers}

    async def drain(self, target: str) -> Plain:
        if target == "hang":
            await self.hang.wait()
        if target == "bug":
            raise ZeroDivisionError("a bug of ours")
        self.calls.append(("drain", target))
        return {"target": target, "state": "draining"}

    async def undrain(self, target: str) -> Plain:
        self.calls.append(("undrain", target))
        return {"target": target}

    async def nodes(self) -> list[Plain]:
        given = {"0": ["demo.trainer"], "1": []}
        return [{"node": "head", "kind": "reserved", "slots": 2, "devices": ["0", "1"], "free": ["1"], "given": given}]

    async def services(self) -> list[Plain]:
        return [{"service": "train-0", "state": "ready", "serves": "one", "holder": "one", "saving": 0.3}]

    async def queue(self) -> list[Plain]:
        return [{"job": "two", "service": "train-0", "why": "queued: waits for 1.2 GB on train-0"}]

    async def models(self) -> list[Plain]:
        return [{"tenant": "alice", "model": "1:train:0", "base_model": "base", "operations": 3, "waiting": 0}]

    async def service_add(self, service: Plain) -> Plain:
        self.calls.append(("service_add", service["name"]))
        return {"service": service["name"], "state": "starting"}

    async def service_drain(self, service: str) -> Plain:
        self.calls.append(("service_drain", service))
        return {"service": service, "state": "draining"}

    async def service_remove(self, service: str) -> Plain:
        self.calls.append(("service_remove", service))
        return {"service": service, "state": "removed"}

    async def tree(self, job: str | None) -> list[Plain]:
        row = {"node": "head", "pid": 11, "state": "running", "incarnation": "1f", "restarts": 0}
        return [
            {"name": "scheduler.demo", "role": "scheduler", **row},
            {"name": "rollout-0", "role": "rollout", **row},
        ]

    async def metrics(self, job: str | None, last: int) -> list[Plain]:
        if self.slow is not None:
            await self.slow.wait()
        return [{"step": step, "reward_mean": step / 10} for step in range(3 - min(last, 3), 3)]

    async def logs(self, job: str | None, actor: str | None, lines: int) -> list[str]:
        return [f"{actor or 'head'}: line {number}" for number in range(min(lines, 2))]

    async def stalls(self, longer_than_s: float) -> list[Plain]:
        wait = {
            "process": "head",
            "waiter": "job.demo",
            "waits_for": "trainer",
            "kind": "ask",
            "what": "x",
            "since_s": 4,
        }
        return [wait] if longer_than_s < 4 else []

    async def dead_letters(self) -> Plain:
        return {"counts": [{"process": "head", "reason": "no_link", "messages": 2}], "newest": []}

    async def inject(self, job: str | None, fault: Plain) -> Plain:
        self.calls.append(("inject", fault))
        return {"job": self._job(job), "kind": fault["kind"], "hit": ["rollout-0 (process 11 on head)"]}

    async def checkpoint(self, job: str | None) -> Plain:
        return {"job": self._job(job), "step": 3, "path": "runs/demo/checkpoints/step_000003"}
