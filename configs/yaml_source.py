"""YAML as a job file wants it: line numbers, no repeated keys, no surprises.

Differences from plain PyYAML
- ``3e-4`` is a number (YAML 1.2), not a string; ``2026-01-01`` is a string, not a date.
- A key given twice is an error; the last one would silently win otherwise.
- Every field's line is kept, so that an error can say where it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from configs.errors import ConfigError
from configs.presets import preset_names

Path_ = tuple[str, ...]
"""A field's path, one name per level; list items by index."""


class _Loader(yaml.SafeLoader):
    """Is SafeLoader with YAML 1.2 floats and without timestamps."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def parse_value(text: str) -> Any:
    """One YAML value, as after ``--set a.b=``. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506  _Loader is a SafeLoader
    except (RecursionError, ValueError, TypeError) as error:  # nested too deeply, a month 13, …
        raise yaml.YAMLError(str(error)) from error


def read_yaml(
    path: Path, *, holds: str = "job keys", example: str = "configs/quickstart.yaml"
) -> tuple[dict[str, Any], dict[Path_, int]]:
    """The mapping in ``path`` and the line of each of its fields; ``holds`` and ``example`` are for the messages.

    Raises:
        ConfigError: the file cannot be read, is no YAML, repeats a key, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = f"Check the path, or name a preset: {', '.join(preset_names())}"
        raise _whole(path, "there is no such file", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _whole(path, f"cannot be read: {error}", "Name a UTF-8 text file that you may read") from error
    try:
        return _parse(path, text, holds, example)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        wrong = f"is not valid YAML: {error.problem or error.context}"
        raise ConfigError.of(where, "", wrong, "Mend the indentation, colons and quotes near that line") from error
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        wrong = f"is not valid YAML: {error}"
        raise _whole(path, wrong, "Remove control characters, odd keys and deep nesting") from error


def _parse(path: Path, text: str, holds: str, example: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            found = "nothing" if node is None else f"a {node.tag.rpartition(':')[2]}"
            raise _whole(path, f"holds {found}, expected a mapping of {holds}", f"Start from {example}")
        lines: dict[Path_, int] = {}
        _walk(path, node, (), lines)
        return loader.construct_document(node), lines  # pyright: ignore[reportUnknownMemberType]
    finally:
        loader.dispose()


def _walk(path: Path, node: yaml.Node, at: Path_, lines: dict[Path_, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            here, line = (*at, name), key.start_mark.line + 1
            if here in lines:
                wrong = f"the key is given twice (first on line {lines[here]})"
                raise ConfigError.of(f"{path}:{line}", ".".join(here), wrong, "Keep one of the two")
            lines[here] = line
            _walk(path, value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*at, str(index))] = item.start_mark.line + 1
            _walk(path, item, (*at, str(index)), lines)


def _whole(path: Path, wrong: str, fix: str) -> ConfigError:
    return ConfigError.of(str(path), "", wrong, fix)
