"""Turns plain values into a typed model, or one ConfigError that names each field, what was found, and what to do.

    mapping ── JSON mode, strict ──▶ model
                     └── pydantic's errors ──▶ Problem: field, value, expectation, fix ──▶ ConfigError

Works for any tree of frozen models: sections in sections, lists of sections, and unions of sections told apart by a
literal field such as ``kind``. A field's path is what a person wrote: ``faults.2.target.role``.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.errors import ConfigError, Found, Problem
from configs.familiar_keys import key_by_meaning
from configs.yaml_source import read_yaml

Where = Callable[[str], str]
"""Function from a field to the place where it was written, such as ``job.yaml:12``."""
Loc = tuple[str, ...]
M = TypeVar("M", bound=BaseModel)

_SHOWN_MAX = 80
_LISTED_MAX = 40
"""Keys of a section that a message spells out. Only ``limits`` has more, and a page of its own."""
_FORMER_CHOICES: Final = {"colocated": "sync", "closed_form": "simulated"}
"""Values of older job files, and what to write instead."""
_LONG_LIST = "docs/reference/limits.md"


def validate(model: type[M], values: Mapping[str, Any], where: Where) -> M:
    """``values`` as a ``model``; types are strict, yet lists stand for tuples.

    Raises:
        ConfigError: with one Problem for each thing that does not fit.
    """
    try:
        text = json.dumps(values)  # JSON mode is what lets lists stand for tuples
    except (TypeError, ValueError) as error:
        wrong = f"holds something that JSON cannot carry: {error}"
        raise ConfigError.of(where(""), "", wrong, "Use plain YAML values and text keys") from error
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        found = [_explain(model, dict(item), where) for item in error.errors(include_url=False)]
        raise ConfigError(list(dict.fromkeys(filter(None, found)))) from error


def load_file(
    model: type[M],
    path: str | Path,
    *,
    holds: str,
    example: str,
    presets: Callable[[], Sequence[str]] = tuple,
    check: Callable[[M], Sequence[Found]] = lambda _: (),
) -> M:
    """The YAML file at ``path`` as a ``model``; ``holds``, ``example`` and ``presets`` are for the message about a
    wrong file.

    ``check``: finds problems that the types of single fields do not exclude.

    Raises:
        ConfigError: it cannot be read, is no YAML, or does not fit; the message names line and field.
    """
    source = Path(path)
    values, lines = read_yaml(source, holds=holds, example=example, presets=presets)

    def where(field: str) -> str:
        at = tuple(field.split("."))
        while at and at not in lines:
            at = at[:-1]
        return f"{source}:{lines[at]}" if at else str(source)

    loaded = validate(model, values, where)
    if problems := [Problem(where(field), field, wrong, fix) for field, wrong, fix in check(loaded)]:
        raise ConfigError(problems)
    return loaded


def dotted_keys(model: type[BaseModel]) -> list[str]:
    """Every key of ``model``, dotted, in the schema's order; lists of sections count as one key."""
    return [".".join(path) for path in _all_keys(model)]


# ------------------------------------------------------------ sentences


def _explain(root: type[BaseModel], error: dict[str, Any], where: Where) -> Problem | None:
    """Turn one pydantic error into a sentence and a fix; None: another error of the same field says it better."""
    at = _Place(root, tuple(str(part) for part in error["loc"]))
    field, kind, value = at.field, str(error["type"]), error.get("input")
    shown = json.dumps(value)
    shown = shown if len(shown) <= _SHOWN_MAX else shown[: _SHOWN_MAX - 3] + "…"
    context: dict[str, Any] = error.get("ctx") or {}
    if kind == "extra_forbidden":
        return Problem(where(field), field, "there is no such key", _suggest_key(root, at))
    if kind == "missing":
        fix = f"Add it: {at.description}" if at.description else "Add it"
        fix = fix.partition(". ")[0]
        return Problem(where(field), field, "is missing, and has no default", fix)
    if at.words and (kind == "list_type" or (kind == "literal_error" and not isinstance(value, list))):
        return _no_list(where(field), field, value, shown, at.words)
    if at.words and kind == "literal_error":
        return None
    if kind == "literal_error":
        choices = [str(item) for item in _choices(at.annotation)] or [str(context.get("expected"))]
        return _one_of(where(field), field, value, shown, choices)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(at, kind, value, where)
    expected = str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    expected = "at least one item" if kind == "too_short" else expected
    fix = _suggest_value(kind, value, at)
    return Problem(where(field), field, f"{shown} is not allowed: expected {expected}", fix)


_NUMBERED_DEVICE: Final = re.compile(r"^cuda:(\d+)$")


def _one_of(place: str, field: str, value: object, shown: str, choices: list[str]) -> Problem:
    if (instead := _FORMER_CHOICES.get(str(value))) in choices:
        return Problem(place, field, f"{shown} is no longer a choice", f"Write {instead} instead")
    if "cuda" in choices and (found := _NUMBERED_DEVICE.match(str(value))) is not None:
        wrong = f"{shown} is not one of {', '.join(choices)}: each process is given a device, and sees no other"
        return Problem(place, field, wrong, f"Write cuda, and name the machine's devices with --devices {found[1]},")
    near = difflib.get_close_matches(str(value), choices, n=1)
    fix = f"Did you mean {near[0]!r}?" if near else f"Use one of: {', '.join(choices)}"
    return Problem(place, field, f"{shown} is not one of {', '.join(choices)}", fix)


def _no_list(place: str, field: str, value: object, shown: str, words: Sequence[str]) -> Problem:
    """A value that is to be one of ``words``, or a list."""
    near = difflib.get_close_matches(str(value), words, n=1)
    fix = (
        f"Did you mean {near[0]!r}?" if near else f"Write it as a list: [{value if isinstance(value, str) else 'a, b'}]"
    )
    return Problem(place, field, f"{shown} is neither {' nor '.join(words)} nor a list", fix)


def _wrong_tag(at: _Place, kind: str, value: object, where: Where) -> Problem:
    """A section of a union whose telling field is missing or unknown."""
    tag, members = _members(at.annotation)
    field, choices = f"{at.field}.{tag}", list(members)
    if kind == "union_tag_not_found":
        return Problem(where(field), field, "is missing, and has no default", f"Use one of: {', '.join(choices)}")
    found = cast("dict[str, Any]", value).get(tag) if isinstance(value, dict) else value
    return _one_of(where(field), field, found, json.dumps(found), choices)


def _suggest_value(kind: str, value: object, at: _Place) -> str:
    if kind == "string_type":
        return f"Put it in quotes: {at.path[-1]}: {json.dumps(str(value))}"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "Write the bare value, without quotes or a unit"
    if kind == "int_from_float":
        return f"Write a whole number, such as {round(cast('float', value))}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "Write it as a section: its keys indented below it"
    if kind in ("list_type", "tuple_type"):
        return "Write it as a list: [a, b], or one item a line, each after '- '"
    if kind == "too_short":
        return "Name at least one"
    if kind == "string_pattern_mismatch":
        return "Use letters, digits, '_', '-' and '.', starting with a letter or digit, 64 at most"
    return f"Change it ({at.description})" if at.description else "Change it"


def _suggest_key(root: type[BaseModel], at: _Place) -> str:
    known = list((at.section or root).model_fields)
    name = at.path[-1]
    everywhere = dotted_keys(root)
    if (ours := key_by_meaning(name, everywhere)) is not None:
        return ours
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {'.'.join((*at.path[:-1], near[0]))!r}?"
    elsewhere = [path for path in _all_keys(root) if path[-1] == name]
    inside = [path for path in elsewhere if path[: len(at.path) - 1] == at.path[:-1]]
    if elsewhere:  # the right name in the wrong section: rather one below the section where it was written
        return f"Did you mean {'.'.join(min(inside or elsewhere, key=len))!r}?"
    near = difflib.get_close_matches(at.field, everywhere, n=1, cutoff=0.75)
    if near:
        return f"Did you mean {near[0]!r}?"
    if len(known) > _LISTED_MAX:
        return f"Remove it, or use one of the {len(known)} in {_LONG_LIST}"
    return f"Remove it; known here: {', '.join(known)}"


# ------------------------------------------------------------ finding one's way in the schema


class _Place:
    """Finds what an error's location points at. pydantic names a union's chosen member in it, which nobody wrote."""

    def __init__(self, root: type[BaseModel], loc: Loc) -> None:
        self.path: Loc = ()
        """The path as written: without the members of unions."""
        self.section: type[BaseModel] | None = None
        """The section that holds the last field."""
        self.info: FieldInfo | None = None
        self.annotation: Any = root
        self.words: list[str] = []
        """The words that the field may have in place of a list, if it is such a field."""
        for part in loc:
            self._enter(part)

    @property
    def field(self) -> str:
        return ".".join(self.path)

    @property
    def description(self) -> str:
        text = " ".join((self.info.description or "").replace("``", "").split()) if self.info else ""
        return text.rstrip(".")

    def _enter(self, part: str) -> None:
        kind, members = _bare(self.annotation), _members(self.annotation)[1]
        if members and part in members:
            self.annotation = members[part]
            return
        options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
        self.words = [str(word) for option in options for word in _choices(option)]
        if self.words and "[" in part:  # pydantic's name of an option, such as list[str]
            self.annotation = next((option for option in options if not _choices(option)), None)
            return
        self.path = (*self.path, part)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            self.section, self.info = kind, kind.model_fields.get(part)
            self.annotation = self.info.annotation if self.info else None
        else:
            self.section = self.info = None
            self.annotation = _item(kind)


def _bare(annotation: Any) -> Any:
    """The annotation without Annotated and without the None of an optional field."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [item for item in get_args(annotation) if item is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else annotation
    return annotation


def _item(kind: Any) -> Any:
    """The kind of a list's or tuple's items."""
    arguments = get_args(kind) if get_origin(kind) in (list, tuple) else ()
    return arguments[0] if arguments else None


def _members(annotation: Any) -> tuple[str, dict[str, type[BaseModel]]]:
    """The field that tells a union's sections apart, and the sections by its value."""
    kind = _bare(annotation)
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    sections = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    if not sections or len(sections) != len(options):
        return "", {}
    tag = next(iter(sections[0].model_fields))
    return tag, {str(_choices(s.model_fields[tag].annotation)[0]): s for s in sections}


def _choices(annotation: Any) -> tuple[Any, ...]:
    kind = _bare(annotation)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _all_keys(model: type[BaseModel], at: Loc = ()) -> list[Loc]:
    keys: list[Loc] = []
    for name, info in model.model_fields.items():
        inner = _bare(info.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _all_keys(inner, (*at, name))
        else:
            keys.append((*at, name))
    return keys
