"""Which code a submitted job may name. Whoever may submit a job may run code as the head's user, unless this limits it.

A job names code in ``reward.function``, ``algorithm.advantage`` and ``algorithm.loss``, in ``environment`` (``path``,
``tools``, ``interpreter``, ``options.reward``), and in ``rollout.engine_options`` for vLLM, whose arguments may name
classes that it imports. Models bring no code: they are loaded without ``trust_remote_code``, from safetensors.

A ``reward.url`` names no code, but has this machine send what a job says, and a variable of the head's environment,
where a job says. So a limited head asks only servers that are named beside the functions, as ``https://host:port``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

from actors.control.errors import BadConfig

_NAMES_CODE: Final = "function"
"""Last word of the keys whose text names a function."""
_NAMED_OTHERWISE: Final = {"algorithm": ("advantage", "loss"), "environment": ("path", "tools", "interpreter")}
"""Section → other keys whose text names code, or a program that is started."""
_NAMES_SERVER: Final = "url"
"""Last word of the keys whose text names a server."""


def check_allowed(job: Mapping[str, Any], prefixes: Sequence[str] | None) -> None:
    """Refuse a job that names other code than ``prefixes`` allow; None allows all.

    A prefix ends where a name does: ``my_rewards`` allows ``my_rewards:score`` and ``my_rewards.math:score``.

    Raises:
        BadConfig: says which key, and what is allowed.
    """
    if prefixes is None:
        return
    allowed = f"this head runs functions of {', '.join(prefixes)} only (--allow-functions)"
    for where, name in _code_of(job):
        if not isinstance(name, str) or not any(_begins(name, prefix) for prefix in prefixes):
            raise BadConfig(f"{where}: {name!r} is not allowed: {allowed}", "Use one of those, or ask whoever runs it")
    for where, url in _named(job, "", _NAMES_SERVER):
        if not isinstance(url, str) or _server_of(url) not in prefixes:
            server = _server_of(url) if isinstance(url, str) else "https://host:port"
            why = f"{where}: {url!r} is not allowed: {allowed}"
            raise BadConfig(why, f"Ask whoever runs it to allow {server}")
    settings = _section(job, "rollout")
    if settings.get("engine") == "vllm" and settings.get("engine_options"):
        raise BadConfig(f"rollout.engine_options: an engine's arguments may name code, and {allowed}", "Leave them out")


def _code_of(job: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Each key that names code, with what it says."""
    yield from _named(job, "", _NAMES_CODE)
    for name, keys in _NAMED_OTHERWISE.items():
        section = _section(job, name)
        for key in keys:
            yield from _named({key: section.get(key)}, f"{name}.", key.rstrip("s"))
    environment = _section(job, "environment")
    if not environment.get("path"):  # the ready-made one, which loads its scorer by name
        reward = _section(environment, "options").get("reward")
        yield from _named({"reward": reward}, "environment.options.", "reward")


def _section(job: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = job.get(name)
    return cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}


def _named(section: Mapping[str, Any], path: str, word: str) -> Iterator[tuple[str, object]]:
    """Each key whose last word is ``word``, at whatever depth, with what it says; a value may be a list."""
    for key, value in section.items():
        where = f"{path}{key}"
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, Mapping):
                yield from _named(cast("Mapping[str, Any]", item), f"{where}.", word)
            elif item is not None and key.rstrip("s").endswith(word):
                yield where, item


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith((f"{prefix}.", f"{prefix}:"))


def _server_of(url: str) -> str:
    """Scheme, host and port, as ``--allow-functions`` names a server; empty if it is no address."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname and parts.username is None else ""
