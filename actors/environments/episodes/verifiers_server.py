# pyright: basic, reportMissingImports=false
"""A ``verifiers`` environment and its server. This file runs in the interpreter that has the library, so it imports no
module of Headrace.

    stdin   {"path", "options", "roles", "address", "allowed"} on a line        once
    stdout  {"ready": true} | {"broken": sentence, "what": "library" | "environment"}        once
    address, a connection an episode
            {"task_data", "client", "model", "sampling"} ─▶ its environment server ─▶ {"ok", "reward", "errors", …}
            hung up ─▶ the episode is cancelled

The environment is the user's, unchanged; the server and its client are the library's own. ``allowed`` are the prefixes
of modules that its names may lead to, or null: the library imports what ids in its options name.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import socket
import struct
import sys
import tempfile
import types
from typing import Any

_LINE = 1 << 26
"""Most bytes of a task's data."""
_BUILT_IN = ("verifiers.v1.tasksets", "verifiers.v1.harnesses", "verifiers.v1.judges", "verifiers.v1.envs")
_USUAL_HARNESS = "verifiers.v1.harnesses.bash"
"""What the library takes where neither an option nor the taskset names a harness."""


def limit_imports(allowed: list[str]) -> None:
    """Have the library's loader import modules below ``allowed`` only; of its own parts, those whose names are there.

    Raises:
        ImportError: this version of the library imports in another way.
    """
    from verifiers.v1.utils import loaders

    if getattr(loaders, "importlib", None) is not importlib:
        raise ImportError("--allow-functions cannot limit what this version of verifiers imports; use 0.4.0")

    def may(module: str) -> bool:
        group, _, name = module.rpartition(".")
        name = name if group in _BUILT_IN else module
        prefixes = [prefix.replace("-", "_") for prefix in allowed]  # an id has hyphens, its module has none
        return module == _USUAL_HARNESS or any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)

    def import_module(module: str) -> types.ModuleType:
        if not may(module):
            raise ImportError(f"{module} is not allowed: only {', '.join(allowed)} (--allow-functions)")
        return importlib.import_module(module)

    def find_spec(module: str) -> Any:
        return importlib.util.find_spec(module) if module.startswith(_BUILT_IN) or may(module) else None

    loaders.importlib = types.SimpleNamespace(  # no spec_from_file_location: a file is nothing that a prefix allows
        import_module=import_module, util=types.SimpleNamespace(find_spec=find_spec)
    )


def merged(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """``given``, with what it leaves out filled in from ``defaults``, section by section."""
    out = {**defaults, **given}
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            out[name] = merged(given[name], value)
    return out


def configured(order: dict[str, Any]) -> Any:
    """The environment's configuration: the user's, with bounds for each role where user and author have set none."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    options = merged({"taskset": {"id": order["path"]}}, order["options"])
    roles: dict[str, Any] = {}
    for name, role in agent_config_fields(resolve_env_config(json.loads(json.dumps(options)))).items():
        unset = {key: value for key, value in order["roles"].items() if getattr(role, key) is None}
        if "runtime" not in role.model_fields_set:  # else it would be rented from the library's makers
            unset["runtime"] = {"type": "subprocess"}
        roles[name] = unset
    return resolve_env_config(merged(options, roles))


def told(episode: Any) -> dict[str, Any]:
    """The result of an episode; its reward is the mean of the rewards of the traces that are trained."""
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
    """Serve episodes until this process is ended."""
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
    """Whether this user has connected: the environment runs what it is told with the user's rights."""
    if sys.platform != "linux":
        return True  # the address is a file in the user's own directory
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
        import verifiers.v1  # noqa: F401 (only to see whether it is installed)
    except Exception as error:  # noqa: BLE001 (the error says why)
        say({"broken": shown(error), "what": "library"})
        return
    try:
        if order.get("allowed") is not None:
            limit_imports(order["allowed"])
        asyncio.run(serve(configured(order), order["address"], say))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user code: whatever it raises is reported)
        say({"broken": shown(error), "what": "environment"})


if __name__ == "__main__":
    main()
