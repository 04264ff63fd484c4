"""What can never work is found before the first episode, and told in a sentence."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from actors.environments.episodes.kinds import make_driver
from tests.smallest_job import smallest_job
from transport.errors import HeadraceError

HERE = "tests.actors.environments.episodes"
GAMES = f"{HERE}.played_environments"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"path": "no_such_module:Game"}, "environment.path 'no_such_module:Game' cannot be imported"),
        ({"path": f"{GAMES}:Countdown", "options": {"begin": 3}}, "cannot be made with environment.options"),
        ({"path": f"{GAMES}:Path"}, "has no method 'reset'"),
        ({"path": f"{GAMES}:right", "kind": "agent", "options": {"many": 3}}, "cannot be called as agent("),
        ({"path": f"{GAMES}:Countdown", "tools": ["mcp: no-such-server"]}, "no-such-server cannot be started"),
        ({"path": f"{GAMES}:Countdown", "tools": ["mcp: true"]}, "mcp: true does not get ready"),
        ({"path": f"{GAMES}:Countdown", "tools": [f"{GAMES}:add", f"{GAMES}:add"]}, "two tools are called 'add'"),
        ({"tools": [f"{GAMES}:add"]}, "environment.options.reward is missing"),
        ({"kind": "verifiers", "path": "x", "interpreter": "no-such-python"}, "is no program that can be run"),
        ({"kind": "verifiers", "path": "x"}, "cannot load verifiers (ModuleNotFoundError"),
        ({"kind": "verifiers", "path": "x", "options": {"client": {"type": "train"}}}, "renderer_model_name"),
    ],
)
def test_what_can_never_work_is_refused_with_a_sentence(environment: dict[str, Any], text: str) -> None:
    job = smallest_job(reward={}, environment={"kind": "python", **environment})
    with pytest.raises(HeadraceError, match=r"environment|tool server") as caught:
        make_driver(job).trial()
    assert text in str(caught.value) and caught.value.permanent
    assert not psutil.Process().children(), "what was started for the trial is gone and reaped"
