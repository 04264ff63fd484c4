"""Episodes of several turns: the sections ``environment`` and ``gateway`` of a job file.

environment   who speaks between the model's turns, and how long an episode may get
gateway       where requests to the model are answered
"""

from __future__ import annotations

from typing import Any, Literal

from configs.section import PositiveFloat, PositiveInt, Section


class EnvironmentConfig(Section):
    """Who speaks between the model's turns. ``none``: each prompt is answered once, and ``reward`` scores that."""

    kind: Literal["none", "python", "agent", "verifiers", "openenv", "external"] = "none"
    """``python``: your class with ``reset`` and ``step``; ``agent``: your function, which calls the endpoint that it is
    given; ``verifiers``: an environment of that library; ``openenv``: a server; ``external``: agents outside, which
    begin and end episodes over HTTP. The reward comes from there, and ``reward`` stays unset."""
    path: str | None = None
    """``python``, ``agent``: ``package.module:name`` of the class or function; ``verifiers``: the taskset's id."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class or function; ``verifiers``: what the library's ``[env]`` block holds, and
    ``client``: how it asks the model."""
    url: str | None = None
    """``openenv``: where the server is."""
    interpreter: str | None = None
    """``verifiers``: the Python that has it installed; unset: Headrace's own."""
    tools: list[str] = []
    """Tools that the model may call: ``package.module:function``, or an MCP server's command as ``mcp: COMMAND``."""
    turns_max: PositiveInt = 16
    """Turns of the model in an episode, at most."""
    turn_tokens: PositiveInt | None = None
    """Tokens of a turn, at most; unset: what the episode has left. ``rollout.max_tokens`` are the model's tokens of all
    turns together."""
    episode_tokens: PositiveInt | None = None
    """Tokens of an episode, of model and environment, and of contexts that were begun afresh; unset: four times
    ``rollout.max_tokens``."""
    episode_s: PositiveFloat = 600.0
    """Seconds of an episode; then it is ended, and scored as it is."""
    tool_s: PositiveFloat = 30.0
    """Seconds of one call of a tool; then the model reads that it took too long."""
    attempts: PositiveInt = 3
    """Times that an episode is begun, at most, where its environment fails by no doing of the model's; then it has no
    result, and is dropped with the reason."""
    workers: PositiveInt = 1
    """Environment worker processes."""
    slots: PositiveInt = 16
    """Episodes that each of them drives at once."""

    @property
    def processes(self) -> dict[str, str]:
        """Name → role of each process that the environment needs; agents outside need only the gateway."""
        if self.kind == "none":
            return {}
        workers = 0 if self.kind == "external" else self.workers
        return {"gateway": "gateway"} | {f"environments-{index}": "environments" for index in range(workers)}


class GatewayConfig(Section):
    """Where agents reach the model."""

    host: str = "127.0.0.1"
    """Address to listen at. Beyond the loopback interface it needs ``tls_certificate`` and ``tls_key``."""
    port: int = 0
    """0: any free port; ``RUN/gateway.endpoint`` says which."""
    tls_certificate: str | None = None
    """PEM file."""
    tls_key: str | None = None
    """PEM file."""
    public_url: str | None = None
    """How agents reach it, if not as it listens: behind a reverse proxy, say."""
