# pyright: basic, reportMissingImports=false
"""A ``verifiers`` environment and its server, run as a file in the interpreter that has the library: nothing of ours is
imported here.

    stdin   {"path", "options", "roles", "address"} on a line        once
    stdout  {"ready": true} | {"broken": sentence, "what": "library" | "environment"}        once
    address, a connection an episode
            {"task_data", "client", "model", "sampling"} ─▶ its environment server ─▶ {"ok", "reward", "errors", …}
            hung up ─▶ the episode is cancelled

The environment is the user's as it is, the server and the client that asks it are the library's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
from typing import Any

_LINE = 1 << 26
"""Bytes of a task's data, at most."""


def merged(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """``given``, and of ``defaults`` what it leaves out, section by section."""
    out = {**defaults, **given}
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            out[name] = merged(given[name], value)
    return out


def configured(order: dict[str, Any]) -> Any:
    """The environment's configuration: the user's, then bounds for each role that neither he nor its author has set."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    options = merged(order["options"], {"taskset": {"id": order["path"]}})
    roles: dict[str, Any] = {}
    for name, role in agent_config_fields(resolve_env_config(json.loads(json.dumps(options)))).items():
        unset = {key: value for key, value in order["roles"].items() if getattr(role, key) is None}
        if "runtime" not in role.model_fields_set:  # else it is rented from who has made the library
            unset["runtime"] = {"type": "subprocess"}
        roles[name] = unset
    return resolve_env_config(merged(options, roles))


def told(episode: Any) -> dict[str, Any]:
    """What an episode has come to: the reward is the mean of those of its traces that are trained."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    metrics: dict[str, float] = {}
    for trace in traces:
        metrics |= {name: one.score for name, one in trace.rewards.items() if one is not None}
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {
        "ok": episode.ok,
        "reward": sum(trace.reward for trace in traces) / len(traces) if traces else None,
        "metrics": metrics,
        "errors": [{"text": f"{one.type}: {one.message}", "status": one.status_code} for one in errors],
    }


async def serve(config: Any, address: str, say: Any) -> None:
    """Until this process is ended."""
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.serve import EnvClient, EnvServer
    from verifiers.v1.types import SamplingConfig

    async def episode(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: asyncio.Task[Any] | None = None
        if not is_ours(writer):
            writer.close()
            return
        try:
            asked = json.loads(await reader.readline())
            kind = TrainClientConfig if asked["client"].get("type") == "train" else EvalClientConfig
            sampling = SamplingConfig(**asked["sampling"])
            run = client.run(kind(**asked["client"]), asked["model"], sampling, asked["task_data"])
            running = task = asyncio.create_task(run)
            hung_up = asyncio.create_task(reader.read(1))
            hung_up.add_done_callback(lambda _: task.cancel())
            said = told(await running)
            hung_up.cancel()
        except asyncio.CancelledError:
            writer.close()
            return
        except Exception as error:  # noqa: BLE001 (whatever the environment raises is its end)
            said = {"ok": False, "reward": None, "metrics": {}, "errors": [{"text": shown(error), "status": None}]}
        finally:
            if running is not None:
                running.cancel()
        with contextlib.suppress(OSError):
            writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory() as private:
        server = EnvServer(config, address=f"ipc://{private}/server")
        serving = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        await client.wait_for_server_startup()
    async with await asyncio.start_unix_server(episode, address, limit=_LINE):
        say({"ready": True})
        await serving


def is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether this user has connected: the environment runs what it is told with his rights."""
    if sys.platform != "linux":
        return True  # the address is a file of his
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", peer)[1] == os.getuid()


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Serve until this process is killed."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what an import prints goes to the log, not between the lines

    def say(value: dict[str, Any]) -> None:
        os.write(replies, json.dumps(value).encode() + b"\n")

    order = json.loads(sys.stdin.readline())
    try:
        import verifiers.v1  # noqa: F401 (whether it is there)
    except Exception as error:  # noqa: BLE001 (it says why)
        say({"broken": shown(error), "what": "library"})
        return
    try:
        asyncio.run(serve(configured(order), order["address"], say))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        say({"broken": shown(error), "what": "environment"})


if __name__ == "__main__":
    main()
