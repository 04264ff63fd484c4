"""What the gateway refuses, and how an agent is told: a status, a code for programs, and a sentence for people.

HeadraceError
└── HttpProblem      the request's fault, or that of its episode; the text says which field and what to do

    400 wrong request, budget spent    401 no key of this run, or of an attempt that is over    403 not with this key
    410 the episode has ended          413 too large    429 later (Retry-After)    503 the scheduler stays away

Nothing is answered 409 or 408: SDKs repeat those, and to repeat an ended episode helps nobody.
"""

from __future__ import annotations

from typing import Any

from transport.errors import HeadraceError

BUDGET_SPENT = "budget_spent"
TOO_LONG = "context_length_exceeded"


class HttpProblem(HeadraceError):
    """It ends a request with ``status``. ``param`` names the field that is wrong."""

    def __init__(
        self, status: int, code: str, text: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """As OpenAI's servers say it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def spent(budget: str) -> HttpProblem:
    """``budget``: ``turns``, ``tokens`` or ``time``, which is told as ``param``."""
    text = f"the episode's budget is spent ({budget}): end it, and score what there is"
    return HttpProblem(400, BUDGET_SPENT, text, param=budget)


def wrong(param: str, text: str, code: str = "invalid_value") -> HttpProblem:
    """A field of the request cannot be served as it is."""
    return HttpProblem(400, code, f"{param}: {text}", param=param)
