"""The ready-made environment of jobs that name tools and no class: a question, tools, an answer, a reward.

    environment: {kind: python, tools: [my_tools:search, "mcp: my-server"], options: {reward: my_rewards:score}}

The model reads the row's prompt, calls tools as often as its budgets allow, and answers; ``reward`` is asked about the
answer as ``reward.function`` would be: ``score(prompt, response, answer, **columns)``. A budget that is spent before
the answer leaves the empty text to be scored.
"""

from __future__ import annotations

from typing import Any

from actors.environments.episodes.errors import EnvironmentRefused
from actors.environments.episodes.interface import ChatMessage, Step
from actors.environments.scoring.scorers import load_function
from configs.task_schema import DataConfig


class ToolEnvironment:
    """See the module's docstring. ``data``: the source of the row, which says how its prompts are shown."""

    def __init__(self, reward: str = "", data: DataConfig | None = None) -> None:
        if not reward:
            raise EnvironmentRefused(
                "environment.options.reward is missing, and environment.path is, too: name the function that scores "
                "an answer, as package.module:name"
            )
        self._data = data
        self._score = load_function(reward, "environment.options.reward")
        self._row: dict[str, Any] = {}
        self._answer = ""

    def reset(self, row: dict[str, Any]) -> list[ChatMessage]:
        assert self._data is not None, "only a trial, which has no row, is made without the source of one"
        self._row, prompt = row, row["prompt"]
        messages: list[ChatMessage] = (
            [{"role": "user", "content": self._data.template.replace("{prompt}", prompt)}]
            if isinstance(prompt, str)
            else [dict(message) for message in prompt]
        )
        if self._data.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        return messages

    def step(self, answer: str) -> Step:
        self._answer = answer
        return Step(done=True)

    def score(self) -> Any:
        columns = {name: value for name, value in self._row.items() if name not in ("prompt", "answer", "index")}
        return self._score(self._row["prompt"], self._answer, self._row["answer"], **columns)
