"""A task process: reads the data set and runs the user's verifier, which may hang, crash or print without harm.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON, "model": directory}                    once
    out  {"ready": true} | {"broken": reason}                             once
    in   {"score": [[response, prompt, answer, index, extra], …]}
    out  [reward, ""] or [nil, reason]                                    a frame per response, in order, when done
    in   {"read": [start, count]}
    out  {"prompts": [[ordinal, ids as int32 bytes, text, context], …], "exhausted": bool} | {"broken": reason}

One process does both because both need the data set, which can take seconds to import. The parent kills it when a
verdict takes longer than ``reward.timeout_s``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgpack

from actors.core.fate import die_with_parent
from configs.schema import JobConfig


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
    """Serve until stdin closes, or the parent dies while a verifier hangs."""
    die_with_parent(os.getppid())
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the frames
    try:
        _serve(requests, replies)
    except EOFError:
        return


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    from actors.rewards.prompt_stream import PromptStream
    from actors.rewards.scorers import Example, make_scorer

    def send(value: object) -> None:
        replies.write(frame(value))
        replies.flush()

    order = read_frame(requests)
    try:
        job = JobConfig.model_validate_json(order["job"])
        score = make_scorer(job)
        stream = PromptStream(job, Path(order["model"])) if order["model"] else None
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        send({"broken": f"{type(error).__name__}: {error}"})
        return
    send({"ready": True})
    while True:
        request = read_frame(requests)
        for response, prompt, answer, index, extra in request.get("score", ()):
            try:
                send([score(response, Example(prompt, answer, index, extra)), ""])
            except Exception as error:  # noqa: BLE001 (as above)
                send([None, f"{type(error).__name__}: {error}"])
        if "read" in request:
            try:
                send({"broken": "it was started without a model"} if stream is None else stream.read(*request["read"]))
            except Exception as error:  # noqa: BLE001 (a row that cannot be read is the data's fault)
                send({"broken": str(error)})


if __name__ == "__main__":
    main()
