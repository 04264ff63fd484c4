"""The adapter for environments with ``reset`` and ``step``: it drives them against the endpoint.

    reset(row) ─▶ messages ─▶ endpoint.chat ─▶ answer ─▶ step(answer) ─▶ messages, reward ─▶ …  until done
                     ▲                            │
                     └──── tool results ◀── tools ┘  ``step`` does not see an answer that calls tools

A spent budget ends the loop; the reward is then that of ``score()``, or without one the sum of the rewards so far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from actors.environments.episodes.child import Driver
from actors.environments.episodes.endpoint import Endpoint
from actors.environments.episodes.errors import BudgetSpent, EnvironmentBroken, EnvironmentRefused
from actors.environments.episodes.interface import (
    ChatMessage,
    Outcome,
    Step,
    as_messages,
    as_metrics,
    as_reward,
    as_step,
    settled,
)
from actors.environments.episodes.tools import Toolbox, Tools
from actors.environments.prompts.rows import messages_of
from actors.environments.scoring.scorers import load_function
from actors.host.user_code import described
from configs.task_schema import DataConfig


class PythonDriver(Driver):
    """Drives episodes of one environment class."""

    def __init__(
        self, make: Callable[..., Any], options: Mapping[str, Any], tools: Tools, key: str, *, ready_made: bool = False
    ) -> None:
        """``key``: where the job file names the class. ``ready_made``: it is ours, and takes the row's source."""
        self._make = make
        self._options = options
        self._tools = tools
        self._key = key
        self._ready_made = ready_made

    def trial(self) -> None:
        """Find out what would make every episode fail.

        Raises:
            EnvironmentRefused: the environment cannot be made, or lacks a method that it must have.
        """
        environment = self._made()
        for name in ("reset", "step"):
            if not callable(getattr(environment, name, None)):
                wrong = f"{self._key}: a {type(environment).__name__} has no method {name!r}"
                raise EnvironmentRefused(f"{wrong}; an environment has reset(row) and step(answer)")
        with contextlib.closing(self._tools.opened(_tools_of(environment))):
            _close(environment)

    def _made(self) -> Any:
        try:
            return self._make(**self._options)
        except Exception as error:
            raise EnvironmentRefused(
                f"{self._key} cannot be made with environment.options: {described(error)}"
            ) from error

    def drive(self, row: Mapping[str, Any], endpoint: Endpoint, *, data: DataConfig, again: bool) -> Outcome:
        """Run one episode to its end; ``again``: the episode has been begun before.

        Raises:
            GatewayAway, SessionOver, ToolServerDied, and what the environment raises.
        """
        environment = self._make(**{**self._options, **({"data": data} if self._ready_made else {})})
        with contextlib.closing(self._tools.opened(_tools_of(environment), again=again)) as tools:
            try:
                reward, cause = _rounds(environment, dict(row), endpoint, tools)
                if hasattr(environment, "score"):
                    reward = as_reward(settled(environment.score()), "score()")
                told = settled(environment.metrics()) if hasattr(environment, "metrics") else {}
                return Outcome(reward, cause, {**tools.metrics, **as_metrics(told, "metrics()")})
            finally:
                _close(environment)


def _rounds(environment: Any, row: dict[str, Any], endpoint: Endpoint, tools: Toolbox) -> tuple[float, str]:
    """Drive the episode to its end; returns the sum of the rewards, and what has ended it."""
    messages = list(as_messages(settled(environment.reset(row)), "reset()"))
    if not messages:
        raise EnvironmentBroken("reset() gave nothing that the model could read; expected a text, or messages")
    total = 0.0
    while True:
        try:
            answer = endpoint.chat(messages, tools.schemas)
        except BudgetSpent as spent:
            return total, spent.budget
        messages.append(answer)
        if calls := cast("list[ChatMessage]", answer.get("tool_calls") or []):
            messages += [tools.answer(call, endpoint.left_s) for call in calls]
            continue
        step = as_step(settled(environment.step(answer.get("content") or "")), "step()")
        total += as_reward(step.reward, "step()")
        if step.done:
            return total, "ended"
        said = as_messages(step.messages, "step()")
        if not said:
            raise EnvironmentBroken("step() is not done, and gave nothing that the model could read next")
        messages += said


def _tools_of(environment: Any) -> list[Callable[..., Any]]:
    return list(getattr(environment, "tools", None) or [])


def _close(environment: Any) -> None:
    if callable(getattr(environment, "close", None)):
        settled(environment.close())


class ToolEnvironment:
    """The ready-made environment of jobs that name tools and no class: a question, tools, an answer, a reward.

        environment: {kind: python, tools: [my_tools:search, "mcp: my-server"], options: {reward: my_rewards:score}}

    The model reads the row's prompt, calls tools as often as its budgets allow, and answers; ``reward`` is called with
    the answer as ``reward.function`` would be: ``score(prompt, response, answer, **columns)``. If a budget is spent
    before the answer, the empty text is scored.
    """

    def __init__(self, reward: str = "", data: DataConfig | None = None) -> None:
        """``data``: the source of the row, which says how its prompts are shown; None: no row will be read."""
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
        self._row = row
        return [dict(message) for message in messages_of(row["prompt"], self._data)]

    def step(self, answer: str) -> Step:
        self._answer = answer
        return Step(done=True)

    def score(self) -> Any:
        columns = {name: value for name, value in self._row.items() if name not in ("prompt", "answer", "index")}
        return self._score(self._row["prompt"], self._answer, self._row["answer"], **columns)
