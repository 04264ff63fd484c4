"""How the gateway refuses a request: with a status, a code for programs, and a sentence for people.

HeadraceError
└── HttpProblem      a request cannot be served; the text says which field is wrong, if any, and what to do

    400 wrong request, budget spent    401 no valid key, or one of an attempt that is over    403 not an external job
    404 no such route                  410 the episode has ended    413 too large    500 a failure of the gateway
    429 nothing to begin, or too many questions of one episode    503 busy, or the scheduler does not answer

Nothing is answered 409 or 408: SDKs repeat such requests, and repeating one of an ended episode helps nobody.
"""

from __future__ import annotations

from typing import Any

from transport.errors import HeadraceError

BUDGET_SPENT = "budget_spent"
TOO_LONG = "context_length_exceeded"


class HttpProblem(HeadraceError):
    """Ends a request with ``status``. ``param`` names the field that is wrong."""

    def __init__(
        self, status: int, code: str, text: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The problem in the form of OpenAI's servers."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def spent(budget: str) -> HttpProblem:
    """The problem of a spent ``budget``, named in ``param``: ``turns``, ``tokens`` or ``time``."""
    text = f"the episode's budget is spent ({budget}): end it, and score what there is"
    return HttpProblem(400, BUDGET_SPENT, text, param=budget)


def too_long(param: str, told: str, positions: int) -> HttpProblem:
    """The problem of a request that cannot fit the context, whatever its tokens are; ``told`` says how long it is."""
    text = f"{param}: {told} are more than the model's context length of {positions} tokens can hold: shorten them"
    return HttpProblem(400, TOO_LONG, text, param=param)


def wrong(param: str, text: str, code: str = "invalid_value") -> HttpProblem:
    """The problem of a request whose field ``param`` cannot be served as it is."""
    return HttpProblem(400, code, f"{param}: {text}", param=param)
