"""A task process: runs the user's verifier, which may hang, crash or print without harm; or reads prompts.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON, "model": directory; "": it scores}     once
    out  {"ready": true} | {"broken": reason}                             once
    in   {"score": [[response, prompt, answer, index, extra], …], "gather_s": float}
    out  [[reward, ""] or [nil, reason], …]                               one verdict a response, in order
    in   {"read": [start, count]}
    out  {"prompts": [[ordinal, ids as int32 bytes, text, context], …], "exhausted": bool} | {"broken": reason}

Verdicts leave together once the oldest has waited for ``gather_s`` and a response is done; with 0,
each has a frame of its own, so that the parent knows which response is being scored when none comes.

One that scores has no tokenizer, and one that reads runs no code but ours. The parent kills it when a verdict takes
longer than ``reward.timeout_s``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgpack

from actors.host.import_guard import import_transformers_without_torch
from actors.host.parent_death import lead_group
from configs.schema import JobConfig

if TYPE_CHECKING:
    from actors.environments.prompts.prompt_stream import PromptStream
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
    from actors.environments.scoring.scorers import Example, make_scorer

    def send(value: object) -> None:
        replies.write(frame(value))
        replies.flush()

    order = read_frame(requests)
    try:
        job = JobConfig.model_validate_json(order["job"])
        stream = _open_stream(job, Path(order["model"])) if order["model"] else None
        score = make_scorer(job) if stream is None else _never
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        send({"broken": f"{type(error).__name__}: {error}"})
        return
    send({"ready": True})
    while True:
        request = read_frame(requests)
        if "score" in request:
            answers = [(response, Example(*example)) for response, *example in request["score"]]
            _score_all(score, answers, send, gather_s=request["gather_s"])
        if "read" in request:
            try:
                send({"broken": "it was started without a model"} if stream is None else stream.read(*request["read"]))
            except Exception as error:  # noqa: BLE001 (a row that cannot be read is the data's fault)
                send({"broken": str(error)})


def _open_stream(job: JobConfig, model: Path) -> PromptStream:
    import_transformers_without_torch()
    from actors.environments.prompts.prompt_stream import PromptStream

    return PromptStream(job, model)


def _never(_response: str, _example: Example) -> float:
    raise RuntimeError("this process reads prompts and scores nothing")


def _score_all(
    score: Callable[[str, Example], float],
    answers: Sequence[tuple[str, Example]],
    send: Callable[[object], None],
    *,
    gather_s: float,
) -> None:
    verdicts: list[Verdict] = []
    sent_s = monotonic()
    for response, example in answers:
        try:
            verdicts.append((score(response, example), ""))
        except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
            verdicts.append((None, f"{type(error).__name__}: {error}"))
        if monotonic() - sent_s >= gather_s:
            send(verdicts)
            verdicts, sent_s = [], monotonic()
    if verdicts:
        send(verdicts)


if __name__ == "__main__":
    main()
