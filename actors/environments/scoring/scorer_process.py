"""A task process: reads the data set and runs the user's verifier, which may hang, crash or print without harm.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON, "model": directory, "run_dir": directory}   once
    out  {"ready": true} | {"broken": reason, "data": bool}                    once; data: they are to blame
    in   {"score": [[response, context], …], "gather_s": float}
    out  [[reward, ""] or [nil, reason], …]                                    one verdict a response, in order
    in   {"read": [start, count]}
    out  what ``PromptStream.read`` returns | {"broken": reason, "data": bool}

A context says which row of the data set the response answers, and what the row's content comes to; the row itself is
looked up here, so that its columns reach the verifier with their own types and travel through nobody's messages.

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

from actors.host.parent_death import lead_group
from configs.schema import JobConfig

if TYPE_CHECKING:
    from actors.environments.scoring.examples import Example, Examples

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
    from actors.environments.errors import SourceUnreadable
    from actors.environments.prompts.prompt_stream import PromptStream
    from actors.environments.prompts.sources import compares, open_source
    from actors.environments.scoring.examples import Examples
    from actors.environments.scoring.scorers import make_scorer

    def send(value: object) -> None:
        replies.write(frame(value))
        replies.flush()

    def broken(error: Exception, *, data: bool) -> None:
        send({"broken": _text(error if data else f"{type(error).__name__}: {error}"), "data": data})

    order = read_frame(requests)
    try:
        job = JobConfig.model_validate_json(order["job"])
        model, run_dir = order["model"], order["run_dir"]
        source = open_source(job.data, job.seed, compares=compares(job.reward)) if model else None
        stream = PromptStream(job, Path(model), Path(run_dir) if run_dir else None, source=source) if model else None
        score, examples = make_scorer(job, source), Examples(source)
    except SourceUnreadable as error:
        return broken(error, data=True)
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        return broken(error, data=False)
    send({"ready": True})
    while True:
        request = read_frame(requests)
        if "score" in request:
            _score_all(score, examples, request["score"], send, gather_s=request["gather_s"])
        if "read" in request:
            try:
                if stream is None:
                    raise SourceUnreadable("the process was started without a model")
                send(stream.read(*request["read"], slice_s=job.limits.read_slice_s))
            except (OSError, MemoryError) as error:
                broken(error, data=False)  # of the machine: it may pass
            except Exception as error:  # noqa: BLE001 (what it could not read now it can never read)
                broken(error if isinstance(error, SourceUnreadable) else _as_data_error(error), data=True)


def _as_data_error(error: Exception) -> Exception:
    from actors.environments.errors import SourceUnreadable

    return SourceUnreadable(f"the prompts cannot be read: {type(error).__name__}: {error}")


def _text(value: object) -> str:
    """What MessagePack carries of ``value`` as text: half a surrogate pair is written out."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _score_all(
    score: Callable[[str, Example], float],
    examples: Examples,
    answers: Sequence[tuple[str, bytes]],
    send: Callable[[object], None],
    *,
    gather_s: float,
) -> None:
    verdicts: list[Verdict] = []
    sent_s = monotonic()
    for response, context in answers:
        try:
            verdicts.append((score(response, examples.of(context)), ""))
        except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
            verdicts.append((None, _text(f"{type(error).__name__}: {error}")))
        if monotonic() - sent_s >= gather_s:
            send(verdicts)
            verdicts, sent_s = [], monotonic()
    if verdicts:
        send(verdicts)


if __name__ == "__main__":
    main()
