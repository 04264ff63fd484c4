"""One sequence that the vLLM engine has not brought to its end."""

from __future__ import annotations

from dataclasses import dataclass

from actors.rollout.engine import GenerationRequest


@dataclass(slots=True)
class Unfinished:
    """Follows one sequence. ``tokens`` are the prompt's and the response's."""

    request: GenerationRequest
    tokens: list[int]
    prompt_tokens: int
    core_id: str = ""

    @property
    def position(self) -> int:
        """Position of the token that comes next."""
        return self.request.first + len(self.tokens) - self.prompt_tokens
