"""What a function or class of the user takes and has, as its source says.

``package.module:name`` ─▶ syntax tree ─ from other import name ─▶ its tree ─▶ Definition ─▶ why a call does not fit

Invariants
- Whatever the source does not settle counts as right: a decorator may change a function, and a base class that is not
  found may have any method. The run's start tries the real thing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from configs.checks.source_lookup import LookUpFailed, NoModule, parsed, source_file

Function = ast.FunctionDef | ast.AsyncFunctionDef
Misfit = tuple[str, str]
"""(what is wrong, what to do)."""
_HOPS_MAX: Final = 4
"""Most modules that a name is followed through, from one import to the next."""
_PLAIN_BASES: Final = ("object", "ABC", "abc.ABC", "Protocol", "typing.Protocol")
"""Base classes that add nothing that a call meets."""
_OF_A_VALUE: Final = ("__new__", "__await__", "__float__", "__index__", "item")
"""Methods of classes whose objects do for a number, or give another one."""
_KEEP_METHODS: Final = ("dataclass", "dataclasses.dataclass")
"""Decorators of classes that keep the methods, and make the constructor."""


@dataclass(frozen=True)
class Definition:
    """Holds the one definition of a name, which nothing decorates or assigns again."""

    name: str
    module: str
    node: Function | ast.ClassDef
    tree: ast.Module

    @property
    def shown(self) -> str:
        where = f"{self.module}, " if self.module != self.name.partition(":")[0] else ""
        return f"{self.name} ({where}line {self.node.lineno})"


def definition_of(name: str, hops: int = _HOPS_MAX) -> Definition | None:
    """The definition of ``package.module:name``; None if it is decorated, made otherwise, or defined twice."""
    module, _, wanted = name.partition(":")
    try:
        tree = parsed(module)
    except (NoModule, LookUpFailed, SyntaxError, ValueError, OSError):
        return None  # find_function reports it
    if tree is None:
        return None
    named = [node for node in _scope(tree) if wanted in _bound_by(node)]
    if len(named) != 1 or named[0] not in tree.body:
        return None
    node = named[0]
    if isinstance(node, ast.ImportFrom) and hops and (origin := _origin(node, wanted, module)):
        found = definition_of(origin, hops - 1)
        return None if found is None else Definition(name, found.module, found.node, found.tree)
    if isinstance(node, ast.ClassDef) and not {ast.unparse(one) for one in node.decorator_list} - set(_KEEP_METHODS):
        return Definition(name, module, node, tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return Definition(name, module, node, tree)
    return None


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs when the module is imported, without the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _scope(child)


def _bound_by(node: ast.AST) -> Iterable[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del) else []


def _origin(node: ast.ImportFrom, wanted: str, module: str) -> str | None:
    """``module:name`` that an import gives the name ``wanted``."""
    source = node.module
    if node.level:  # relative to a package, or to the one that holds this module
        is_package = (source_file(module) or "").endswith("__init__.py")
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        source = ".".join([*parts, *([node.module] if node.module else [])])
    (name,) = [alias.name for alias in node.names if (alias.asname or alias.name) == wanted]
    return f"{source}:{name}" if source else None


# ------------------------------------------------------------ classes


def _tree_of(one: Definition, hops: int = _HOPS_MAX) -> tuple[list[Definition], bool]:
    """A class and those above it, and whether that is all of them."""
    assert isinstance(one.node, ast.ClassDef), "asked of classes alone"
    found, whole = [one], not one.node.keywords
    for base in one.node.bases:
        name = ast.unparse(base)
        if name in _PLAIN_BASES:
            continue
        above = definition_of(f"{one.module}:{name}") if isinstance(base, ast.Name) and hops else None
        if above is None or not isinstance(above.node, ast.ClassDef):
            whole = False
            continue
        more, all_there = _tree_of(above, hops - 1)
        found, whole = [*found, *more], whole and all_there
    return found, whole


def lacks(one: Definition, method: str) -> bool:
    """Whether objects of a class have no attribute ``method``, for sure."""
    classes, whole = _tree_of(one)
    if not whole:
        return False
    there = {name for found in classes for name in _attributes(found)}
    return method not in there and "__getattr__" not in there and "setattr" not in there


def gives_no_value(one: Definition) -> bool:
    """Whether calling a class gives an object that is no number and cannot be awaited, for sure."""
    return isinstance(one.node, ast.ClassDef) and all(lacks(one, name) for name in _OF_A_VALUE)


def _attributes(one: Definition) -> Iterator[str]:
    """Every name in the class, and every attribute that anything in its module sets."""
    for node in ast.walk(one.node):
        yield from _bound_by(node)
    for node in ast.walk(one.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and node.id == "setattr":
            yield node.id


def misfit_of_method(
    one: Definition, method: str, positional: Sequence[str] = (), keywords: Iterable[str] = ()
) -> Misfit | None:
    """Why ``method`` of an object of the class cannot be called so; None where it can, or the source does not tell."""
    classes, whole = _tree_of(one)
    for found in classes:
        if method == "__init__" and found.node.decorator_list:
            return None  # a data class
        body = found.node.body
        mine = [node for node in body if isinstance(node, Function) and node.name == method]
        if any(method in _bound_by(node) for node in ast.walk(found.node)):
            if len(mine) != 1 or mine[0].decorator_list:
                return None
            return misfit(f"{method} (line {mine[0].lineno})", mine[0], ["self", *positional], keywords)
    if method == "__init__" and whole and (names := list(keywords)) and lacks(one, "__new__"):
        return f"it has no __init__, and takes no {names[0]!r}", f"Write def __init__(self, {', '.join(names)})"
    return None


def misfit(shown: str, function: Function, positional: Sequence[str], keywords: Iterable[str]) -> Misfit | None:
    """Why the call ``function(*positional, **keywords)`` cannot be made; None if it can."""
    arguments, one = function.args, inspect.Parameter
    names = [*arguments.posonlyargs, *arguments.args]
    kinds = [one.POSITIONAL_ONLY] * len(arguments.posonlyargs) + [one.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    defaults = [*[one.empty] * (len(names) - len(arguments.defaults)), *arguments.defaults]
    takes = [one(name.arg, kind, default=value) for name, kind, value in zip(names, kinds, defaults, strict=True)]
    takes += [one(arguments.vararg.arg, one.VAR_POSITIONAL)] if arguments.vararg else []
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    takes += [one(name.arg, one.KEYWORD_ONLY, default=value or one.empty) for name, value in by_name]
    takes += [one(arguments.kwarg.arg, one.VAR_KEYWORD)] if arguments.kwarg else []
    try:
        inspect.Signature(takes).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*positional, *(f"{name}=…" for name in keywords)])
        return f"{shown} is called as {function.name}({call}): {error}", f"It takes ({ast.unparse(arguments)})"
    return None
