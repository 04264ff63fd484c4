"""The interface of environments and agents for their authors, whose code need not import anything from here.

    class MyEnvironment:                                     environment: {kind: python, path: my_module:MyEnvironment}
        def __init__(self, **options): ...                   one object per episode, in a process of its own
        def reset(self, row: dict) -> str | list[dict]: ...  what the model reads first
        def step(self, answer: str) -> Step: ...             (what it reads next, reward, whether that was all)
        def score(self) -> float: ...                        optional: the reward, in place of the sum over all steps
        def metrics(self) -> dict[str, float]: ...           optional: numbers that are averaged over a step
        tools: list[Callable] = []                           optional: methods that the model may call
        def close(self) -> None: ...                         optional

    def agent(row: dict, client: Endpoint, **options):       environment: {kind: agent, path: my_module:agent}
        return reward                                        or (reward, metrics)

Each function may be ``async``. ``row`` is a row of the data: ``prompt``, ``answer``, ``index`` and its other columns.
What the model reads is a text, which becomes a message of the user, or one or several messages as in the chat API.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from actors.environments.episodes.errors import EnvironmentBroken
from actors.environments.scoring.user_code import as_number
from configs.limits import DEFAULT_LIMITS

ChatMessage = dict[str, Any]
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
_loop: asyncio.AbstractEventLoop | None = None
"""Event loop for all coroutines of user code in this process, so that a later call can use what an earlier opened."""


class Step(NamedTuple):
    """A step is what ``step`` returns; a plain tuple will do as well."""

    messages: Any = None
    """What the model reads next: a text, a message, several, or None."""
    reward: float = 0.0
    done: bool = False


class Outcome(NamedTuple):
    """An episode ends with this outcome."""

    reward: float
    cause: str = "ended"
    """What ended the episode, as in ``EpisodeEnded.cause``."""
    metrics: Mapping[str, float] = NOTHING
    """The environment's own metrics."""


def as_messages(said: Any, whose: str) -> list[ChatMessage]:
    """Turn what the environment says, ``said``, into messages.

    Raises:
        EnvironmentBroken: ``said`` is neither a text nor messages.
    """
    if said is None or (isinstance(said, str) and not said):
        return []
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    several = cast("list[Any]", said if isinstance(said, list) else [said])
    for message in several:
        if not isinstance(message, dict) or not isinstance(cast("ChatMessage", message).get("role"), str):
            raise EnvironmentBroken(
                f"{whose} gave a {type(message).__name__}; expected a text, or messages: {{'role': …, 'content': …}}"
            )
    return cast("list[ChatMessage]", several)


def as_step(returned: Any, whose: str) -> Step:
    """Turn what ``step`` has returned into a Step.

    Raises:
        EnvironmentBroken: ``returned`` is no tuple of three values.
    """
    if not isinstance(returned, tuple):
        raise EnvironmentBroken(
            f"{whose} returned a {type(returned).__name__}; expected (what the model reads next, reward, done)"
        )
    fields = cast("tuple[Any, ...]", returned)
    if len(fields) != 3:
        raise EnvironmentBroken(
            f"{whose} returned {len(fields)} values; expected three: what the model reads next, reward, done"
        )
    return Step(*fields)


def as_reward(value: Any, whose: str) -> float:
    """``value`` as a finite number.

    Raises:
        EnvironmentBroken: it is infinite or NaN.
        ScorerBroken: it is not a number.
    """
    number = as_number(value, whose)
    if not math.isfinite(number):
        raise EnvironmentBroken(f"{whose} gave the reward {number}; expected a finite number")
    return number


def as_metrics(value: Any, whose: str) -> dict[str, float]:
    """``value`` as numbers by name. Raises as ``as_reward``, or EnvironmentBroken if it is no map or has too many."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EnvironmentBroken(f"{whose} gave a {type(value).__name__}; expected numbers by name")
    told = cast("Mapping[Any, Any]", value)
    if len(told) > DEFAULT_LIMITS.episode_metrics:
        raise EnvironmentBroken(f"{whose} gave {len(told)} numbers; expected at most {DEFAULT_LIMITS.episode_metrics}")
    return {str(name): as_reward(number, f"{whose} {name!r}") for name, number in told.items()}


def settled(value: Any) -> Any:
    """``value``, or its result if it is awaitable."""
    global _loop
    if not inspect.isawaitable(value):
        return value
    _loop = _loop or asyncio.new_event_loop()
    return _loop.run_until_complete(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value
