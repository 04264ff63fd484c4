"""Modules are found as the import system of the run's processes finds them, and are not run for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.checks.definitions import definition_of
from configs.checks.source_lookup import find_function, source_file

FINDER = """
import importlib.util, sys
FILES = {{"edited": "__init__.py", "edited.deep": "deep/__init__.py", "edited.deep.rewards": "deep/rewards.py"}}

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in FILES:
            return None
        file = {folder!r} + "/" + FILES[name]
        return importlib.util.spec_from_file_location(name, file)

sys.meta_path.append(Finder)
"""
"""What ``pip install -e`` leaves in an environment: code that runs at each start and adds a finder."""


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package ``edited``, which no folder of the path holds, and which must not be run."""
    folder, site = tmp_path / "source" / "whatever", tmp_path / "site"
    (folder / "deep").mkdir(parents=True)
    site.mkdir()
    for file in ("__init__.py", "deep/__init__.py", "deep/rewards.py"):
        (folder / file).write_text("raise RuntimeError('never imported')\ndef score(p, r, a): return 1.0\n")
    (site / "sitecustomize.py").write_text(FINDER.format(folder=str(folder)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    return folder


def test_a_module_of_an_editable_installation_is_found_by_its_finder_and_not_run(edited: Path) -> None:
    assert find_function("edited.deep.rewards:score") is None
    assert source_file("edited.deep.rewards:score") == str(edited / "deep" / "rewards.py")
    assert (definition := definition_of("edited.deep.rewards:score")) is not None
    assert definition.node.lineno == 2
    assert find_function("edited.deep.reward:score") == (
        "there is no module 'edited.deep.reward'",
        "Install it, or start headrace in the directory that holds it",
    )


def test_code_of_headrace_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with ``-e`` has no folder of ours on the path of the console script."""
    ours = str(Path(__file__).resolve().parents[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", ours)])
    assert find_function("actors.environments.examples.guess_number:GuessNumber") is None


@pytest.mark.parametrize("name", ["json.decoder:JSONDecoder", "os.path:join", "zlib:crc32", "sys:exit"])
def test_what_python_itself_brings_is_found(name: str) -> None:
    assert find_function(name) is None


def test_a_package_that_says_itself_where_its_modules_are_is_left_to_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "__init__.py").write_text("__path__ = __path__ + ['/elsewhere']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_function("spread.rewards:score") is None


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import no_such_library\n", "no_such_library"),
        ("from no_such_library.parts import one\n", "no_such_library"),
        ("try:\n    import no_such_library\nexcept ImportError:\n    pass\n", None),
        ("import sys\nsys.path.insert(0, '/elsewhere')\nimport no_such_library\n", None),
        ("import json, os.path\nfrom collections import abc\n", None),
    ],
)
def test_an_import_that_nobody_could_make_is_named_with_its_line(
    source: str, missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "importing.py").write_text(f"{source}def score(p, r, a): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_function("importing:score")
    if missing is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == f"the module 'importing' imports {missing!r} (line 1), and there is no such module"
