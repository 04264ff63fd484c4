"""Finds modules as the import system of this interpreter does, finders of ``pip install -e`` included, and runs none.

    stdin   {"modules": [name, …], "path": [folder, …]} as JSON; ``path`` is searched after all else
    stdout  {name: {"file": its source, or null} | null if there is no such module} as JSON, on the last line

It runs in a process of its own, since each package above a module is put into ``sys.modules`` as an empty stand-in:
finders ask there where to look.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_SAYS_WHERE = (b"__path__", b"extend_path", b"declare_namespace", b"sys.modules")
"""Words in the code of packages that decide at their import where their modules are."""


def found(name: str) -> dict[str, Any] | None:
    """``{"file": …}``; None: there is no such module. Without a file, only an import could tell what is in it."""
    try:
        spec = _spec_of(name)
    except (ImportError, AttributeError, ValueError, KeyError):
        spec = None
    if spec is None:
        return {"file": None} if _decides_itself(name.rpartition(".")[0]) else None
    return {"file": spec.origin if spec.origin is not None and spec.origin.endswith(".py") else None}


def _spec_of(name: str) -> ModuleSpec | None:
    if (loaded := sys.modules.get(name)) is not None:
        return loaded.__spec__ or ModuleSpec(name, None)
    parent = name.rpartition(".")[0]
    where = None
    if parent and (_spec_of(parent) is None or (where := getattr(sys.modules.get(parent), "__path__", None)) is None):
        return None  # a plain module has no submodules
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, where)) is not None:
            break
    else:
        return None
    if spec.submodule_search_locations is not None:
        stand_in = types.ModuleType(name)
        stand_in.__spec__, stand_in.__path__ = spec, spec.submodule_search_locations  # type: ignore[assignment]
        sys.modules[name] = stand_in
    return spec


def _decides_itself(package: str) -> bool:
    """Whether code of ``package`` says where its modules are, which shows when it is imported."""
    try:
        spec = _spec_of(package) if package else None
        if spec is None or spec.origin is None:
            return False
        code = Path(spec.origin).read_bytes()
        return any(word in code for word in _SAYS_WHERE)
    except (ImportError, AttributeError, ValueError, KeyError, OSError):
        return False


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    sys.path += [folder for folder in question["path"] if folder not in sys.path]
    print("\n" + json.dumps({name: found(name) for name in question["modules"]}))


if __name__ == "__main__":
    main()
