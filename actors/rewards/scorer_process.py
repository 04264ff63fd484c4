"""A scorer process: the user's verifier runs here, so that it may hang, crash or print without harm.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON}                                        once
    out  {"ready": true} | {"broken": reason}                             once
    in   [[response, prompt, answer, index, extra], …]                    a batch
    out  [reward, ""] or [nil, reason]                                    one frame per response, in order, as each is done

The parent kills this process when a verdict takes longer than ``reward.timeout_s``.
"""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO, cast

import msgpack

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
    """Serve until stdin closes."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the frames
    try:
        _serve(requests, replies)
    except EOFError:
        return


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    from actors.rewards.scorers import Example, make_scorer  # noqa: PLC0415 (a failed import is reported, not raised)

    def send(value: object) -> None:
        replies.write(frame(value))
        replies.flush()

    job = JobConfig.model_validate_json(read_frame(requests)["job"])
    try:
        score = make_scorer(job)
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        send({"broken": f"{type(error).__name__}: {error}"})
        return
    send({"ready": True})
    while True:
        for response, prompt, answer, index, extra in read_frame(requests):
            try:
                send([score(response, Example(prompt, answer, index, extra)), ""])
            except Exception as error:  # noqa: BLE001 (as above)
                send([None, f"{type(error).__name__}: {error}"])


if __name__ == "__main__":
    main()
