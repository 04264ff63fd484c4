"""The adapter for agents: functions that run their own loop, and call the endpoint by any client they like.

    agent(row, client, **options) ─▶ reward, or (reward, metrics)
        │ raises
        ├─ because turns, tokens or its context were spent ────▶ reward 0, ended by that budget
        ├─ because the gateway cannot be reached ──────────────▶ infrastructure: the episode is begun again
        └─ for anything else, or because time was over ────────▶ no result: tried again, then dropped

A model that talks for ever causes the first. Without a result nothing would teach it not to, so it gets the reward of a
model that has achieved nothing. Time is different, since slow machines spend it too. An agent that wants another reward
catches the error and returns a number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from actors.environments.episodes.child import Driver
from actors.environments.episodes.endpoint import Endpoint
from actors.environments.episodes.errors import BudgetSpent, EnvironmentRefused, GatewayAway, SessionOver
from actors.environments.episodes.interface import Outcome, as_metrics, as_reward, settled
from configs.task_schema import DataConfig

_CHAIN_MAX: Final = 32
"""Most causes of an agent's error that are examined, since causes may form a cycle."""
_OF_THE_MODEL: Final = frozenset(["turns", "tokens", "context"])
"""Budgets that only the model spends."""
_TOO_LONG: Final = "context_length_exceeded"
"""The gateway's error code for messages that are longer than the model's context."""
_UNREACHED: Final = ("APIConnectionError", "APITimeoutError", "InternalServerError")
"""Errors of OpenAI's client that are the fault of neither the agent nor the request."""


class AgentDriver(Driver):
    """The driver runs episodes of one agent function. ``key``: key of the job file that names the function."""

    def __init__(self, agent: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
        self._agent = agent
        self._options = options
        self._key = key

    def trial(self) -> None:
        """Raise EnvironmentRefused if the function does not take what it will be given."""
        try:
            inspect.signature(self._agent).bind({}, None, **self._options)
        except TypeError as error:
            wrong = f"{self._key} cannot be called as agent(row, client, **environment.options): {error}"
            raise EnvironmentRefused(wrong) from error
        except ValueError:
            return  # its signature cannot be read

    def drive(self, row: Mapping[str, Any], endpoint: Endpoint, *, data: DataConfig, again: bool) -> Outcome:
        """Run one episode to its end. Raises what the agent raises, and GatewayAway, SessionOver."""
        try:
            returned = settled(self._agent(dict(row), endpoint, **self._options))
        except Exception as error:  # noqa: BLE001 (user code; ``budget_that_ended`` raises other errors again)
            return Outcome(0.0, budget_that_ended(error))
        reward, metrics = cast("tuple[Any, Any]", returned) if _is_pair(returned) else (returned, {})
        return Outcome(as_reward(reward, "the agent"), metrics=as_metrics(metrics, "the agent"))


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, tuple) and len(cast("tuple[Any, ...]", returned)) == 2


def budget_that_ended(error: Exception) -> str:
    """The budget whose end made user code raise ``error``; if none, raises ``error`` or our own error behind it."""
    for one in _chain(error):
        if isinstance(one, GatewayAway | SessionOver):
            raise one from error
        if (budget := _budget_in(one)) in _OF_THE_MODEL:
            return budget
        if getattr(one, "code", "") == "episode_ended" or "episode_ended" in str(one):
            raise SessionOver(str(one)) from error
        if type(one).__name__ in _UNREACHED:
            raise GatewayAway(f"the agent could not reach the gateway: {one}") from error
    raise error


def _budget_in(error: BaseException) -> str:
    """The budget that an error of any client names, else empty: clients repeat the text of the gateway."""
    if isinstance(error, BudgetSpent):
        return error.budget
    text = str(error)
    if getattr(error, "code", "") == _TOO_LONG or _TOO_LONG in text:
        return "context"
    if getattr(error, "code", "") != "budget_spent" and "budget_spent" not in text:
        return ""
    quoted = text.replace('"', "'")
    budgets = {getattr(error, "param", ""), *(one for one in ("tokens", "time") if f"'{one}'" in quoted)}
    return next((budget for budget in ("time", "tokens") if budget in budgets), "turns")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, the errors that it groups, and those that caused it."""
    waiting: list[BaseException] = [error]
    for _ in range(_CHAIN_MAX):
        if not waiting:
            return
        one = waiting.pop(0)
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += list(cast("BaseExceptionGroup[BaseException]", one).exceptions)
        waiting += [before for before in (one.__cause__, one.__context__) if before is not None]
