"""An OpenEnv server, unmodified and in an environment of its own, holds sixteen sessions at once.

``HEADRACE_OPENENV_PYTHON`` names an interpreter that has openenv 0.10; without it the test is skipped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from actors.environments.episodes.errors import EnvironmentRefused, ToolServerDied
from actors.environments.episodes.openenv import OpenEnv
from actors.environments.episodes.python_loop import PythonDriver
from actors.environments.episodes.tools import Tools
from configs.task_schema import DataConfig

PYTHON = os.environ.get("HEADRACE_OPENENV_PYTHON", "")

SERVER = textwrap.dedent('''
    import sys
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_app
    from openenv.core.env_server.types import ConcurrencyConfig

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Counting(Environment):
        """Wants its own seed said, once it has been counted down to it."""
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.left = 0

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.left = 3
            self.seed = seed
            return Heard(text=f"{seed}: {self.left}?")

        def step(self, action, timeout_s=None, **kwargs):
            right = action.message == str(self.left - 1)
            self.left -= 1
            return Heard(text=f"{self.left}?", reward=float(right), done=self.left == 0)

        @property
        def state(self):
            return State()

    at_once = ConcurrencyConfig(max_concurrent_envs=16)
    app = create_app(Counting, Say, Heard, env_name="counting", concurrency_config=at_once)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
''')


class Counts:
    """Plays the model."""

    left_s = 60.0

    def chat(self, messages: list[Any], tools: Any = ()) -> dict[str, Any]:
        asked = messages[-1]["content"].rstrip("?").split()[-1]
        return {"role": "assistant", "content": str(int(asked) - 1)}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, "-P", str(server), str(port)], cwd=tmp_path)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="HEADRACE_OPENENV_PYTHON names no interpreter with openenv")
def test_sixteen_sessions_of_an_unmodified_server_run_at_once(url: str) -> None:
    options = {"url": url, "observation": "text", "reset": ["seed"]}
    driver = PythonDriver(OpenEnv, options, Tools([], 1.0), "environment.url")
    driver.trial()
    rewards: dict[int, float] = {}

    def play(seed: int) -> None:
        data = DataConfig(source="jsonl", path="x")
        rewards[seed] = driver.drive({"seed": seed}, cast(Any, Counts()), data=data, again=False).reward

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert rewards == dict.fromkeys(range(16), 3.0)


def test_an_address_where_nobody_is_and_one_that_is_none_are_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ToolServerDied, match="nobody answers"):
            OpenEnv(f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(EnvironmentRefused, match="name the server as"):
        OpenEnv("")
