"""What a limited head lets jobs import is decided where something is imported, whatever the job's text said."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.environments.episodes.errors import EnvironmentRefused
from actors.environments.episodes.tools import Tools
from actors.environments.episodes.verifiers_call import VerifiersDriver
from actors.environments.errors import RewardRefused
from actors.environments.scoring.scorers import load_function
from actors.host import allowed_code
from actors.host.allowed_code import allow_only, is_allowed
from actors.trainer.errors import OwnFunctionFailed
from actors.trainer.learning.own_functions import own_loss
from tests.smallest_job import smallest_job

SAID = "is not allowed: this head runs functions of my_rewards, mcp: good only"


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module ``evil`` that tells of its import by a file, in processes that may import ``my_rewards``."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef score(*a): ...\n")
    (tmp_path / "my_rewards.py").write_text("def score(*a): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(allowed_code._VARIABLE, "[]")  # put back afterwards
    allow_only(["my_rewards", "mcp: good"])


def test_a_function_beyond_the_prefixes_is_not_imported(tmp_path: Path) -> None:
    for key in ("reward.function", "environment.path", "environment.tools.0", "environment.options.reward"):
        with pytest.raises(RewardRefused, match=SAID) as refused:
            load_function("evil:score", key)
        assert str(refused.value).startswith(f"{key} 'evil:score'")
    with pytest.raises(OwnFunctionFailed, match=SAID):
        own_loss("evil:score")
    assert not (tmp_path / "imported").exists()
    assert callable(load_function("my_rewards:score", "reward.function"))


def test_a_server_of_tools_and_an_interpreter_are_allowed_as_a_whole() -> None:
    assert Tools(["mcp: good"], 1.0)._commands == ["good"]
    with pytest.raises(EnvironmentRefused, match=r"'mcp: good\.evil' is not allowed"):
        Tools(["mcp: good.evil"], 1.0)
    job = smallest_job(reward={}, environment={"kind": "verifiers", "path": "my_rewards", "interpreter": "sh"})
    with pytest.raises(EnvironmentRefused, match=r"environment\.interpreter: 'sh' is not allowed"):
        VerifiersDriver(job)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("my_rewards:score", True),
        ("my_rewards.math:score", True),
        ("my_rewards_of_eve:score", False),
        ("my_rewards:x/evil_env", False),
        ("my_rewards.x/../../evil", False),
        ("/opt/python", True),
        ("/opt/python.d/../../tmp/evil", False),
    ],
)
def test_a_prefix_ends_where_a_name_does(name: str, allowed: bool) -> None:
    assert is_allowed(name, ["my_rewards", "/opt/python"]) == allowed
