"""Reads YAML for job files: with line numbers, and without repeated keys.

Differences from plain PyYAML
- ``3e-4`` is a number (YAML 1.2), not a string; ``2026-01-01`` is a string, not a date.
- A key given twice is an error; the last one would silently win otherwise.
- Every field's line is kept, so that an error can say where it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from configs.errors import ConfigError

Path_ = tuple[str, ...]
"""A field's path, one name per level; list items by index."""
FILE_BYTES_MAX: Final = 1 << 18
"""Longest YAML file that is read: some twenty times as long as a job with every key."""
_NODES_MAX: Final = 20_000
"""Most values of a file, those of an alias counted wherever it stands: a few lines of aliases can name billions."""
_NESTED_MAX: Final = 64


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats, without timestamps, and with a bound on brackets inside each other.

    The scanner looks at each open bracket again for every one that follows.
    """

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 (as in PyYAML)
        if self.flow_level >= _NESTED_MAX:
            raise yaml.YAMLError(f"values are nested more than {_NESTED_MAX} deep")
        super().fetch_flow_collection_start(TokenClass)


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
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _size(node, {}, 0)
            return loader.construct_document(node)  # pyright: ignore[reportUnknownMemberType]
        finally:
            loader.dispose()
    except (RecursionError, ValueError, TypeError) as error:  # nested too deeply, a month 13, …
        raise yaml.YAMLError(str(error)) from error


def _size(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Number of values in ``node``, those of an alias wherever it stands.

    Raises:
        ValueError: there are too many, they are nested too deeply, or one holds itself.
    """
    if depth > _NESTED_MAX:
        raise ValueError(f"values are nested more than {_NESTED_MAX} deep, or one holds itself")
    if id(node) not in known:
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inside = node.value
        elif isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_size(part, known, depth + 1) for part in inside)
    if known[id(node)] > _NODES_MAX:
        raise ValueError(f"it holds more than {_NODES_MAX:,} values, those of an alias counted wherever it stands")
    return known[id(node)]


def read_yaml(
    path: Path,
    *,
    holds: str = "job keys",
    example: str = "configs/quickstart.yaml",
    presets: Callable[[], Sequence[str]] = tuple,
) -> tuple[dict[str, Any], dict[Path_, int]]:
    """The mapping in ``path`` and the line of each of its fields; the other arguments are for the messages.

    Raises:
        ConfigError: the file cannot be read, is no YAML, repeats a key, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1).decode()
    except FileNotFoundError:
        named = f", or name a preset: {', '.join(presets())}" if presets() else ""
        raise _whole(path, "there is no such file", f"Check the path{named}") from None
    except IsADirectoryError:
        raise _whole(path, "is a directory", f"Name a file in it, which holds {holds}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _whole(path, f"cannot be read: {error}", "Name a UTF-8 text file that you may read") from error
    if len(text) > FILE_BYTES_MAX:
        raise _whole(path, f"is longer than {FILE_BYTES_MAX:,} bytes", f"Name a file of {holds}, such as {example}")
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
        _size(node, {}, 0)
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
