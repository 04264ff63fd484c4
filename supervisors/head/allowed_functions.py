"""Which code a submitted job may name. Whoever may submit a job may run code as the head's user, unless this limits it.

This tells the job's author at once; what holds is decided once more where something is imported, by
``actors/host/allowed_code.py``, since options may be names to the library that reads them.

A job names code in ``reward.function``, ``algorithm.advantage`` and ``algorithm.loss``, in ``environment`` (``path``,
``tools``, ``interpreter``, ``options.reward``, most options of ``verifiers``), and in ``rollout.engine_options`` for
vLLM, whose arguments may name classes that it imports. Models bring no code: they are loaded without
``trust_remote_code``, from safetensors.

A ``reward.url`` or one of ``rollout.servers`` names no code, but makes this machine send the job's text, and a variable
of the head's environment, to an address that the job names. So a limited head asks only servers that are allowed as
well, as ``https://host:port``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

from actors.control.errors import BadConfig
from actors.host.allowed_code import is_allowed

_NAMES_CODE: Final = "function"
"""Last word of the keys whose text names a function."""
_NAMED_OTHERWISE: Final = {"algorithm": ("advantage", "loss"), "environment": ("path", "tools", "interpreter")}
"""Section → other keys whose text names code, or a program that is started."""
_PLAIN_OF_VERIFIERS: Final = ("timeout", "retries", "max_concurrent_agents")
"""Options of ``verifiers`` that are numbers."""
_LOADED_BY_TASKSET: Final = ("", "id", "task", "system_prompt")
"""Keys of a taskset that lead to other code and files; the rest is for the taskset, which is allowed."""
_OF_ROLE: Final = (
    *("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens"),
    *("timeout", "retries", "sampling", "network_notice"),
)
_PLAIN_OF_ROLE: Final[Mapping[str, Sequence[str]]] = {"client": ("type",)}
"""Other sections of options → their keys that load nothing; a role of the environment has those of ``_OF_ROLE``."""
_NAMES_SERVER: Final = "url"
"""Last word of the keys whose text names a server."""


def check_allowed(job: Mapping[str, Any], prefixes: Sequence[str] | None) -> None:
    """Refuse a job that names other code than ``prefixes`` allow; None allows all.

    A prefix ends where a name does: ``my_rewards`` allows ``my_rewards:score`` and ``my_rewards.math:score``.

    Raises:
        BadConfig: the job names other code; the text says which key, and what is allowed.
    """
    if prefixes is None:
        return
    allowed = f"this head runs functions of {', '.join(prefixes)} only (--allow-functions)"
    for where, name in _code_of(job):
        if not isinstance(name, str) or not is_allowed(name, prefixes):
            raise BadConfig(f"{where}: {name!r} is not allowed: {allowed}", "Use one of those, or ask whoever runs it")
    engines = _named({"servers": _section(job, "rollout").get("servers")}, "rollout.", "server")
    for where, url in (*_named(job, "", _NAMES_SERVER), *engines):
        if not isinstance(url, str) or _server_of(url) not in prefixes:
            server = _server_of(url) if isinstance(url, str) else "https://host:port"
            why = f"{where}: {url!r} is not allowed: {allowed}"
            raise BadConfig(why, f"Ask whoever runs it to allow {server}")
    for where in _doors_of_verifiers(_section(job, "environment"), prefixes):
        why = f"{where}: its library may take it for code, a program or a file, and {allowed}"
        raise BadConfig(why, "Leave it out, or ask whoever runs it")
    settings = _section(job, "rollout")
    if settings.get("engine") == "vllm" and settings.get("engine_options"):
        raise BadConfig(f"rollout.engine_options: an engine's arguments may name code, and {allowed}", "Leave them out")


def _code_of(job: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Each key that names code, with its value."""
    yield from _named(job, "", _NAMES_CODE)
    for name, keys in _NAMED_OTHERWISE.items():
        section = _section(job, name)
        for key in keys:
            yield from _named({key: section.get(key)}, f"{name}.", key.rstrip("s"))
    environment = _section(job, "environment")
    if not environment.get("path"):  # the ready-made one, which loads its scorer by name
        reward = _section(environment, "options").get("reward")
        yield from _named({"reward": reward}, "environment.options.", "reward")


def _doors_of_verifiers(environment: Mapping[str, Any], prefixes: Sequence[str]) -> Iterator[str]:
    """Options by which a job could have the library load or start something beside ``environment.path``."""
    if environment.get("kind") != "verifiers":
        return
    for name, value in _section(environment, "options").items():
        if name in _PLAIN_OF_VERIFIERS:
            continue
        keys = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"": value}
        for key, inner in keys.items():
            if key == "harness" and isinstance(inner, Mapping):  # one that is allowed, as it comes
                said = cast("Mapping[str, Any]", inner)
                if list(said) == ["id"] and isinstance(said["id"], str) and is_allowed(said["id"], prefixes):
                    continue
            plain = key not in _LOADED_BY_TASKSET if name == "taskset" else key in _PLAIN_OF_ROLE.get(name, _OF_ROLE)
            if not plain:
                yield f"environment.options.{name}{f'.{key}' if key else ''}"


def _section(job: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = job.get(name)
    return cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}


def _named(section: Mapping[str, Any], path: str, word: str) -> Iterator[tuple[str, object]]:
    """Each key whose last word is ``word``, at any depth, with its value; a list gives each of its items."""
    for key, value in section.items():
        where = f"{path}{key}"
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, Mapping):
                yield from _named(cast("Mapping[str, Any]", item), f"{where}.", word)
            elif item is not None and key.rstrip("s").endswith(word):
                yield where, item


def _server_of(url: str) -> str:
    """Scheme, host and port, as ``--allow-functions`` names a server; empty if it is no address."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname and parts.username is None else ""
