"""Environments, agents and tools that cannot work are refused from their source, before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.checks.environment_checks import check_environment
from tests.smallest_job import smallest_job

GAME = "def reset(self, row): ...\n    def step(self, answer): ..."
Problems = Any
"""Function of a source and the keys of ``environment`` → what is said, each with its field."""


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    monkeypatch.syspath_prepend(str(tmp_path))

    def check(source: str, **environment: Any) -> list[str]:
        name = f"theirs_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('never imported')\n{source}\n")
        environment = {key: _named(value, name) for key, value in environment.items()}
        return [
            f"{field}: {wrong.replace(name, 'theirs')}. {fix}"
            for field, wrong, fix in check_environment(smallest_job(reward={}, environment=environment))
        ]

    return check


def _named(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_named(one, name) for one in value]
    return value.replace("theirs", name) if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("class Game:\n    def reset(self, row): ...", {},
         "environment.path: theirs:Game (line 2) has no method 'step'"),
        ("class Game:\n    def reset(self): ...\n    def step(self, answer): ...", {},
         "reset (line 3) is called as reset(self, row): too many positional arguments. It takes (self)"),
        ("class Game:\n    def reset(self, row): ...\n    def step(self, answer, row): ...", {},
         "step (line 4) is called as step(self, answer): missing a required argument: 'row'"),
        (f"class Game:\n    def __init__(self, rungs=3): ...\n    {GAME}", {"rung": 2},
         "__init__(self, rung=…): got an unexpected keyword argument 'rung'. It takes (self, rungs=3)"),
        (f"class Game:\n    def __init__(self, rungs): ...\n    {GAME}", {},
         "__init__ (line 3) is called as __init__(self): missing a required argument: 'rungs'"),
        (f"class Game:\n    {GAME}", {"rungs": 2},
         "environment.options: theirs:Game: it has no __init__, and takes no 'rungs'"),
        ("class Base:\n    def reset(self, row): ...\nclass Game(Base): ...", {}, "has no method 'step'"),
        ("def Game(row, client): ...", {}, "Game (line 2) is called as Game(): missing a required argument: 'row'"),
        ("import no_such_library\nclass Game: ...", {},
         "environment.path: the module 'theirs' imports 'no_such_library'"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_driven_is_refused(
    problems: Problems, source: str, options: dict[str, Any], said: str
) -> None:
    (problem,) = problems(source, kind="python", path="theirs:Game", options=options)
    assert said in problem


@pytest.mark.parametrize(
    "source",
    [
        f"class Game:\n    def __init__(self, rungs): ...\n    {GAME}\n    def score(self): ...",
        f"class Game:\n    def __init__(self, rungs=1): ...\n    {GAME}",
        f"class Game:\n    def __init__(self, **options): ...\n    {GAME}",
        f"class Base:\n    {GAME}\nclass Game(Base):\n    def __init__(self, *, rungs): ...",
        f"from dataclasses import dataclass\n@dataclass\nclass Game:\n    rungs: int = 3\n    {GAME}",
        "from elsewhere import Base\nclass Game(Base): ...",
        "import gym\nclass Game(gym.Env):\n    def reset(self, row): ...",
        "class Game:\n    def __init__(self, rungs):\n        self.step = self.go\n    def reset(self, row): ...",
        "class Game:\n    def __getattr__(self, name): ...\n    def __init__(self, rungs): ...",
        f"class Hidden:\n    {GAME}\ndef Game(rungs): return Hidden()",
        "@registered\nclass Game: ...",
        "class Base(Game): ...\nclass Game(Base): ...",
        "Game = make()",
        "def made(**options): ...\nGame = made",
    ],
)
def test_one_that_may_work_is_let_through(problems: Problems, source: str) -> None:
    """Whatever the source does not settle is tried at the start, with the real class."""
    source = "if True:\n    pass\n" + source.replace("import gym\n", "").replace("from elsewhere import Base\n", "")
    assert problems(source, kind="python", path="theirs:Game", options={"rungs": 2}) == []


def test_a_class_that_another_module_gives_on_is_followed(
    problems: Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "__init__.py").write_text("from .ladder import Ladder\n")
    (tmp_path / "games" / "ladder.py").write_text("class Ladder:\n    def reset(self, row): ...\n")
    (problem,) = problems("", kind="python", path="games:Ladder")
    assert "games:Ladder (games.ladder, line 1) has no method 'step'" in problem


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class play:\n    def __call__(self, row, client): ...",
         "is a class, and calling it gives an object, not a reward. Write agent = play() there, and name that"),
        ("class play:\n    def step(self, answer): ...", "set kind to python for a class with reset and step"),
        ("def play(row): ...", "is called as play(row, client, rounds=…): too many positional arguments"),
        ("def play(row, client): ...", "got an unexpected keyword argument 'rounds'. It takes (row, client)"),
        ("async def play(row, client, *, rounds, model): ...",
         "missing a required argument: 'model'. It takes (row, client, *, rounds, model)"),
        ("def play(row, client, rounds): ...", None),
        ("async def play(row, client, **options): ...", None),
        ("def play(*args, rounds=1): ...", None),
    ],
)  # fmt: skip
def test_an_agent_is_a_function_that_takes_row_client_and_options(
    problems: Problems, source: str, said: str | None
) -> None:
    found = problems(source, kind="agent", path="theirs:play", options={"rounds": 2})
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("source", "tools", "said"),
    [
        ("class search: ...", ["theirs:search"], "environment.tools.0: theirs:search (line 2) is a class"),
        ("def search(query, /): ...", ["theirs:search"], "takes 'query' by position only"),
        ("def search(*words): ...", ["theirs:search"], "takes 'words' by position only"),
        ("def dumps(query): ...", ["json:dumps", "theirs:dumps"], "environment.tools: 2 of them are called 'dumps'"),
        ("", [f"mcp: {sys.executable} -m no_such_server"], "needs the module 'no_such_server', which "),
        ("", ["mcp: python3 server.py"], "names no file 'server.py' in the directory of an episode"),
        ("", ["mcp: python -c 'unclosed"], 'environment.tools.0: "mcp: python -c \'unclosed" names no program'),
    ],
)
def test_a_tool_is_a_function_whose_arguments_have_names(
    problems: Problems, source: str, tools: list[str], said: str
) -> None:
    (problem,) = problems(source, kind="python", tools=tools, options={"reward": "json:loads"})
    assert said in problem


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward": "no_such:score"}, "environment.options.reward: there is no module 'no_such'"),
        ({"reward": "json:loads", "turns": 3}, "environment.options.turns: is no option of the ready-made environment"),
    ],
)
def test_the_ready_made_environment_is_checked_as_a_reward_is(
    problems: Problems, options: dict[str, Any], said: str
) -> None:
    (problem,) = problems("", kind="python", tools=["json:dumps"], options=options)
    assert said in problem


def test_a_server_that_is_down_is_told_before_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {"kind": "openenv", "url": f"http://127.0.0.1:{server.getsockname()[1]}"}
        job = smallest_job(reward={}, environment=environment)
        assert check_environment(job) == []
        wrong = check_environment(smallest_job(reward={}, environment={**environment, "options": {"acton": "x"}}))
        assert wrong[0][:2] == (
            "environment.options.acton",
            "is no option of the ready-made environment of kind openenv",
        )
    ((field, wrong, fix),) = check_environment(job)
    assert (field, fix[:16]) == ("environment.url", "Start the server")
    assert "nobody answers at http://127.0.0.1" in wrong


def test_a_python_without_verifiers_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    job = smallest_job(reward={}, environment={"kind": "verifiers", "path": "hidden-number"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check_environment(job) == []
    monkeypatch.setenv("PYTHONPATH", "")
    ((field, wrong, _),) = check_environment(job)
    assert field == "environment.interpreter"
    assert "has no package verifiers" in wrong


def test_another_python_is_judged_by_its_files_and_not_run(tmp_path: Path) -> None:
    """A job file may be anybody's, and checking one starts no program that it names."""
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "pip").mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/run\n")
    python.chmod(0o755)
    environment = {"kind": "verifiers", "path": "hidden-number", "interpreter": str(python)}
    ((_, wrong, _),) = check_environment(smallest_job(reward={}, environment=environment))
    assert wrong == f"{python} has no package verifiers"
    (site / "verifiers").mkdir()
    assert check_environment(smallest_job(reward={}, environment=environment)) == []
    assert check_environment(smallest_job(reward={}, environment={**environment, "interpreter": "sh"})) == []
    assert not (tmp_path / "run").exists()
