"""Checks of ``environment`` and ``gateway``: missing keys, keys of another kind, settings that do not go with episodes
of several turns, and where the gateway may listen. None of the user's code is imported.
"""

from __future__ import annotations

import ipaddress
import shutil
import sys
from pathlib import Path
from typing import Any, Final, cast

from configs.checks.episode_code import (
    VERIFIERS_INSTALL,
    check_code,
    check_tools,
    why_no_server,
    why_no_tool_server,
    why_no_verifiers,
)
from configs.episode_schema import EnvironmentConfig, GatewayConfig
from configs.errors import Found
from configs.schema import JobConfig

_KINDS_OF: Final = {
    "path": ("python", "agent", "verifiers"),
    "options": ("python", "agent", "verifiers", "openenv"),
    "url": ("openenv",),
    "interpreter": ("verifiers",),
    "tools": ("python", "openenv"),
}
"""Key of ``environment`` → the kinds that it belongs to."""
_MCP: Final = "mcp:"


def check_environment(job: JobConfig) -> list[Found]:
    """Problems of ``environment`` by itself."""
    environment = job.environment
    found = [*_check_keys(environment), *_check_tools(environment)]
    if environment.kind == "verifiers":
        found += _check_verifiers(environment)
    if environment.kind == "openenv":
        found += _check_server(environment.url)
    found += check_code(environment)
    if environment.kind in ("python", "agent") and environment.path is not None:
        return found
    if environment.kind == "agent" or (environment.kind == "python" and not environment.tools):
        wrong = f"is missing, and environment.kind is {environment.kind}"
        found.append(("environment.path", wrong, "Name your class or function as package.module:name"))
    elif environment.kind == "python" and not environment.options.get("reward"):
        wrong = "says no reward, and environment.path names no class that would give one"
        found.append(
            (
                "environment.options",
                wrong,
                "Name the function as {reward: package.module:name}, or set environment.path",
            )
        )
    return found


def _check_server(url: str | None) -> list[Found]:
    if not (url or "").startswith(("http://", "https://")):
        return [("environment.url", f"is {url!r}, and environment.kind is openenv", "Write it as http://host:port")]
    problem = why_no_server(url or "")
    return [("environment.url", *problem)] if problem else []


def _check_verifiers(environment: EnvironmentConfig) -> list[Found]:
    """Problems of path and interpreter. Whether the library knows the environment shows when the process starts."""
    found: list[Found] = []
    if not environment.path:
        wrong = "is missing, and environment.kind is verifiers"
        found.append(("environment.path", wrong, "Name the environment as its library does: its id"))
    taskset = environment.options.get("taskset")
    named = cast("dict[str, Any]", taskset).get("id") if isinstance(taskset, dict) else None
    if named is not None and named != environment.path:
        wrong = f"{named!r}, and environment.path is {environment.path!r}, which names the taskset"
        found.append(("environment.options.taskset.id", wrong, "Remove one of them"))
    interpreter = shutil.which(environment.interpreter) if environment.interpreter is not None else sys.executable
    if interpreter is None:
        wrong = f"{environment.interpreter!r} is no program that can be run"
        found.append(("environment.interpreter", wrong, f"Name a Python that has verifiers: {VERIFIERS_INSTALL}"))
    elif problem := why_no_verifiers(interpreter):
        found.append(("environment.interpreter", *problem))
    return found


def _check_keys(environment: EnvironmentConfig) -> list[Found]:
    found: list[Found] = []
    for key, kinds in _KINDS_OF.items():
        if environment.kind not in kinds and getattr(environment, key) != EnvironmentConfig.model_fields[key].default:
            wrong = f"is set, but environment.kind is {environment.kind}"
            found.append((f"environment.{key}", wrong, f"Remove it, or set environment.kind to {' or '.join(kinds)}"))
    return found


def _check_tools(environment: EnvironmentConfig) -> list[Found]:
    keys = {f"environment.tools.{i}": name for i, name in enumerate(environment.tools)}
    found = check_tools({key: name for key, name in keys.items() if not name.startswith(_MCP)})
    for key, name in keys.items():
        if name.startswith(_MCP) and (problem := why_no_tool_server(name.removeprefix(_MCP))):
            found.append((key, f"{name!r} {problem[0]}", problem[1]))
    return found


def check_episodes(job: JobConfig) -> list[Found]:
    """Problems of ``environment`` with the rest of the job file."""
    if not job.has_episodes:
        return []
    return [*_check_budgets(job), *_check_beside(job)]


def _check_budgets(job: JobConfig) -> list[Found]:
    environment, most = job.environment, job.rollout.max_tokens
    found: list[Found] = []
    if environment.turn_tokens is not None and environment.turn_tokens > most:
        wrong = f"{environment.turn_tokens} is more than the model's tokens of a whole episode (rollout.max_tokens)"
        found.append(("environment.turn_tokens", f"{wrong}, {most}", "Lower it, or leave it out"))
    if job.episode_tokens <= most:
        wrong = f"{job.episode_tokens} leaves the environment nothing beside rollout.max_tokens, {most}"
        found.append(("environment.episode_tokens", wrong, f"Set it to {2 * most} or more, or leave it out"))
    return found


def _check_beside(job: JobConfig) -> list[Found]:
    kind, scheduling, rollout = job.environment.kind, job.scheduling, job.rollout
    because = f"is not built for episodes (environment.kind: {kind})"
    beside = [
        ("scheduling.policy", "planned", scheduling.policy == "planned", "Set it to assign or rlboost"),
        ("scheduling.seeding", "true", scheduling.seeding, "Set it to false"),
        ("provider.kind", "functions", job.provider.kind == "functions", "Set it to none or local"),
        ("rollout.length_ranking", rollout.length_ranking, rollout.length_ranking != "none", "Set it to none"),
    ]
    return [(key, f"{value} {because}", fix) for key, value, wrong, fix in beside if wrong]


def check_gateway(job: JobConfig) -> list[Found]:
    """Problems of ``gateway``, where the job has one."""
    return [*why_not_listen(job.gateway), *_check_public_url(job.gateway)] if job.has_episodes else []


def _check_public_url(gateway: GatewayConfig) -> list[Found]:
    url = gateway.public_url
    if url is None:
        return []
    if not url.startswith(("http://", "https://")) or not url.endswith("/v1"):
        return [("gateway.public_url", f"{url} is no base URL of agents", "Write it as https://HOST/v1")]
    if not gateway.port:
        wrong = "is 0, any free port, and a proxy (gateway.public_url) has to find each life of the gateway"
        return [("gateway.port", wrong, "Set the port that the proxy passes on to")]
    return []


def why_not_listen(gateway: GatewayConfig) -> list[Found]:
    """Why the gateway must not listen as configured; empty: it may."""
    instead = "listen at 127.0.0.1 behind a reverse proxy and set gateway.public_url"
    return without_tls(gateway.host, gateway.tls_certificate, gateway.tls_key, instead, "gateway.")


def without_tls(host: str, certificate: str | None, key: str | None, instead: str, section: str = "") -> list[Found]:
    """Why a server must not listen at ``host`` with these PEM files; empty: it may.

    ``instead``: what else to do but to give it a certificate; ``section``: of the keys, with a dot.
    """
    if (certificate is None) != (key is None):
        missing, there = ("tls_key", "tls_certificate") if key is None else ("tls_certificate", "tls_key")
        return [(section + missing, f"is missing, and {section}{there} is set", "Set both, or neither")]
    if certificate is None and not is_loopback(host):
        wrong = f"{host} can be reached from other machines, and there is no TLS: keys would go in the clear"
        return [(f"{section}host", wrong, f"Set {section}tls_certificate and {section}tls_key, or {instead}")]
    names = {f"{section}tls_certificate": certificate, f"{section}tls_key": key}
    return [
        (field, f"{path} is no file", "Name a PEM file")
        for field, path in names.items()
        if path is not None and not Path(path).expanduser().is_file()
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
