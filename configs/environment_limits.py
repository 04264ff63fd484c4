"""Limits of environments, agents and tools: what one episode may take of its machine."""

from __future__ import annotations

from pydantic import Field

from configs.process_limits import ProcessLimits


class EnvironmentLimits(ProcessLimits):
    """Holds the limits that episodes and the gateway obey, beside those of every process."""

    # episodes
    episode_grace_s: float = Field(
        default=10.0, description="an episode whose time is over has so long to be scored; then its process is killed"
    )
    episode_result_bytes: int = Field(default=1 << 16, description="what an episode's process says of its end")
    episode_log_bytes: int = Field(default=1 << 20, description="output of one episode, of which the newest half stays")
    episode_file_bytes: int = Field(
        default=4 << 30, description="one file that an episode writes; a larger one is an accident that fills the disk"
    )
    episode_metrics: int = Field(default=64, description="numbers that an environment tells of one episode")
    episodes_kept: int = Field(
        default=16, description="directories of failed episodes that an environment worker keeps, for people to look at"
    )
    gateway_silence_s: float = Field(
        default=60.0, description="a model's answer without a byte; the gateway sends white space twice a second"
    )
    episode_look_s: float = Field(default=1.0, description="how often the length of what episodes print is looked at")
    gateway_rendered_tokens: int = Field(
        default=4 << 20, description="tokens in all renderings that the gateway keeps at hand; they take 36 bytes each"
    )
    gateway_look_s: float = Field(default=0.1, description="how often a worker looks whether the gateway listens yet")
    tool_server_start_s: float = Field(default=30.0, description="an MCP server starts, and says which tools it has")
    tools_of_server: int = Field(default=128, description="tools of one MCP server; no model reads more schemas")
    tool_answer_bytes: int = Field(default=4 << 20, description="one answer of an MCP server; a longer one is an error")
    tool_output_chars: int = Field(
        default=16_000, description="of what a tool says, the model reads so many, from its beginning and its end"
    )

    # gateway
    gateway_request_bytes: int = Field(
        default=16 << 20, description="one request; a million token ids as JSON are 8 MB"
    )
    gateway_requests: int = Field(
        default=4096, description="requests answered at once; more are told to come back, so that memory stays bounded"
    )
    gateway_questions: int = Field(
        default=16, description="questions of one episode that wait for its turns; more are told to come back"
    )
    gateway_episodes: int = Field(
        default=1024,
        description="episodes whose rows are kept at hand, some hundred kB each; others are asked of the ledger again",
    )
    gateway_renderings: int = Field(
        default=4096,
        description="renderings, and turns as read, kept at hand: conversations are compared by looking them up",
    )
    gateway_stops: int = Field(
        default=16, description="stop texts of a request; OpenAI takes 4, and each is looked for in the whole turn"
    )
    gateway_alive_s: float = Field(
        default=0.5,
        gt=0,
        description="between two signs of life while a turn runs; read time-outs of clients are longer",
    )
    gateway_read_s: float = Field(default=60.0, description="the body of one request, and one write to a client")
    gateway_busy_s: float = Field(default=1.0, description="after which a client that was told to come back should")
