"""What an environment and an agent are, as their author sees them. Nothing of it has to be imported by anybody.

    class MyEnvironment:                                     environment: {kind: python, path: my_module:MyEnvironment}
        def __init__(self, **options): ...                   one object an episode, in a process of its own
        def reset(self, row: dict) -> str | list[dict]: ...  what the model reads first
        def step(self, answer: str) -> Step: ...             (what it reads next, reward, whether that was all)
        def score(self) -> float: ...                        optional: the reward, in place of the sum of those of steps
        def metrics(self) -> dict[str, float]: ...           optional: numbers that are averaged over a step
        tools: list[Callable] = []                           optional: methods that the model may call
        def close(self) -> None: ...                         optional

    def agent(row: dict, client: Endpoint, **options):       environment: {kind: agent, path: my_module:agent}
        return reward                                        or (reward, metrics)

Each may be ``async``. ``row`` is the row of the data: ``prompt``, ``answer``, ``index`` and its further columns. What
the model reads is a text, which becomes a message of the user, or messages as the chat API has them, one or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from actors.environments.episodes.errors import EnvironmentBroken

ChatMessage = dict[str, Any]
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class Step(NamedTuple):
    """Is what ``step`` returns; a plain tuple does as well."""

    messages: Any = None
    """What the model reads next: a text, a message, several, or None."""
    reward: float = 0.0
    done: bool = False


class Outcome(NamedTuple):
    """Is what an episode comes to."""

    reward: float
    cause: str = "ended"
    """What ended it, as ``EpisodeEnded.cause`` has it."""
    metrics: Mapping[str, float] = NOTHING
    """Numbers of the environment's own."""


def as_messages(said: Any, whose: str) -> list[ChatMessage]:
    """What the environment says, as messages.

    Raises:
        EnvironmentBroken: it is neither a text nor messages.
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
    """What ``step`` has returned, as a Step.

    Raises:
        EnvironmentBroken: it is no such tuple.
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
