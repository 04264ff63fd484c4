"""Agents of the tests, one of which the row names."""

from __future__ import annotations

from typing import Any

import openai


async def agent(row: dict[str, Any], client: Any) -> Any:
    """Do as the agent of the row's name."""
    return (
        {"greeting": greeting, "wrapping": wrapping}[row["prompt"]](client)
        if row["prompt"] != "sdk"
        else await sdk(client)
    )


def greeting(client: Any) -> float:
    """Greets, by the client that it is given."""
    return float(client.chat([{"role": "user", "content": "greeting"}])["content"] == "hello")


async def sdk(client: Any) -> tuple[float, dict[str, float]]:
    """Uses OpenAI's SDK, which finds base URL and key in the environment."""
    model = openai.AsyncOpenAI(max_retries=0)
    messages: Any = [{"role": "user", "content": "sdk"}]
    chat = await model.chat.completions.create(model=client.model, messages=messages)
    return float(chat.choices[0].message.content == "hello"), {"answers": 1.0}


def wrapping(client: Any) -> float:
    """Goes on asking, and wraps what that raises, as frameworks do."""
    model = openai.OpenAI(max_retries=0)
    messages: Any = [{"role": "user", "content": "wrapping"}]
    try:
        while True:
            model.chat.completions.create(model=client.model, messages=messages)
    except openai.OpenAIError as error:
        raise RuntimeError("the framework gave up") from error
