"""A fault in the words of a command line: ``headrace ctl inject kill role=rollout --set times=2 --set every_s=5``."""

from __future__ import annotations

from typing import Any

from configs.errors import ConfigError
from configs.fault_plan import dump_fault, fault_from_mapping
from configs.yaml_source import parse_value


def fault_from_words(kind: str, target: str | None, lasts_s: float | None, settings: list[str]) -> dict[str, Any]:
    """A fault as people write it on a command line, checked, as a plain map.

    Args:
        target: a process's name; or ``role=``, ``node=``, ``link=A,B``, ``chunk=newest`` or ``chunk=VERSION``.
        settings: further keys, ``a.b=value``, the value in YAML.

    Raises:
        ConfigError: it does not fit the vocabulary; the message names the field.
    """
    fault: dict[str, Any] = {"kind": kind}
    if target is not None:
        fault["target"] = _target_from_word(target)
    if lasts_s is not None:
        fault["heal_after_s"] = lasts_s
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys = name.strip().split(".")
        section: Any = fault
        for key in keys[:-1]:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if not equals or not all(keys) or not isinstance(section, dict):
            raise ConfigError.of(f"--set {setting}", "", "is not of the form a.b=value", "Write --set factor=8")
        section[keys[-1]] = parse_value(text)
    return dump_fault(fault_from_mapping(fault, "headrace ctl inject"))


def _target_from_word(word: str) -> dict[str, Any]:
    form, equals, value = word.partition("=")
    if not equals:
        return {"name": word}
    if form == "link":
        return {"link": value.split(",")}
    if form == "chunk":
        return {"chunk": {} if value in ("", "newest") else {"version": parse_value(value)}}
    return {form: value}
