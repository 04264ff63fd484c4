"""A task process: reads the data set and runs the user's verifier, which may hang, crash or print without harm.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON, "model": directory}                    once
    out  {"ready": true} | {"broken": reason, "data": whether it is the data's fault}   once
    in   {"try": true}
    out  {"warning": text, empty if all is well} | {"broken": reason, "data": …}     (trial.py)
    in   {"score": [[response, prompt, answer, index, extra], …], "gather_s": float}
    out  [[reward, ""] or [nil, reason], …]                               one verdict a response, in order
    in   {"read": [start, count]}
    out  {"prompts": [[ordinal, ids as int32 bytes, text, context], …], "exhausted": bool} | {"broken": reason}

Verdicts leave together once the oldest has waited for ``gather_s`` and a response is done; with 0,
each has a frame of its own, so that the parent knows which response is being scored when none comes.

One process does both because both need the data set, which can take seconds to import. The parent kills it when a
verdict takes longer than ``reward.timeout_s``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgpack

from actors.environments.errors import SourceUnreadable
from actors.host.parent_death import lead_group
from configs.schema import JobConfig

if TYPE_CHECKING:
    from actors.environments.scoring.scorers import Example

Verdict = tuple[float | None, str]
"""A reward, or why there is none."""


def read_frame(stream: BinaryIO) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    return msgpack.unpackb(stream.read(int.from_bytes(head, "big")))


def frame(value: object) -> bytes:
    """``value`` as one frame of bytes."""
    body = cast("bytes", msgpack.packb(value))
    return len(body).to_bytes(4, "big") + body


def main() -> None:
    """Serve until stdin closes, or the parent dies while a verifier hangs. What verifiers have started ends with us."""
    lead_group(os.getppid())
    requests = os.fdopen(os.dup(0), "rb")
    _read_nothing()  # what a verifier starts inherits its input: it must not take the requests
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the frames
    try:
        _serve(requests, replies)
    except EOFError:
        return


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    from actors.environments.prompts.prompt_stream import PromptStream
    from actors.environments.scoring.scorers import Example, make_scorer
    from actors.environments.scoring.trial import try_once
    from actors.environments.scoring.user_code import described

    def send(value: object) -> None:
        replies.write(frame(value))
        replies.flush()

    order = read_frame(requests)
    try:
        job = JobConfig.model_validate_json(order["job"])
        score = make_scorer(job)
        stream = PromptStream(job, Path(order["model"])) if order["model"] else None
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        send(_broken(error, described))
        return
    send({"ready": True})
    while True:
        request = read_frame(requests)
        if "score" in request:
            answers = [(response, Example(*example)) for response, *example in request["score"]]
            _score_all(score, answers, send, described, gather_s=request["gather_s"])
        if "try" in request:
            try:
                send({"warning": try_once(job, score, stream) if stream is not None else ""})
            except Exception as error:  # noqa: BLE001 (as above)
                send(_broken(error, described))
        if "read" in request:
            try:
                send({"broken": "it was started without a model"} if stream is None else stream.read(*request["read"]))
            except Exception as error:  # noqa: BLE001 (a row that cannot be read is the data's fault)
                send({"broken": str(error)})


def _broken(error: Exception, described: Callable[[BaseException], str]) -> dict[str, Any]:
    return {"broken": described(error), "data": isinstance(error, SourceUnreadable)}


def _score_all(
    score: Callable[[str, Example], float],
    answers: Sequence[tuple[str, Example]],
    send: Callable[[object], None],
    described: Callable[[BaseException], str],
    *,
    gather_s: float,
) -> None:
    verdicts: list[Verdict] = []
    sent_s = monotonic()
    for response, example in answers:
        try:
            verdicts.append((score(response, example), ""))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (as above; no terminal is ours)
            verdicts.append((None, described(error)))
        if monotonic() - sent_s >= gather_s:
            send(verdicts)
            verdicts, sent_s = [], monotonic()
    if verdicts:
        send(verdicts)


if __name__ == "__main__":
    main()
