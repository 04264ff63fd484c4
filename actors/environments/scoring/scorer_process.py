"""A task process: runs the user's verifier, which may hang, crash or print without harm; or reads prompts.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON, "model": directory, if it reads, else "", "run_dir": directory,
          "rows": whether it holds the data set, "policy": directory of the policy's tokenizer, or "",
          "parts": rewards that it scores, by their places}                             once
    out  {"ready": true} | {"broken": reason, "data": whether it is the data's fault}   once
    in   {"try": true}
    out  {"warnings": [text, …]} | {"broken": reason, "data": …}        (trial.py)
    in   {"score": [[response, context], …], "gather_s": float}
    out  [[reward, "", parts, cut] or [nil, reason, [], false], …]        one verdict a response, in order
         | {"broken": reason, "data": …}                                  none will come, however often it is asked
    in   {"read": [start, count]}
    out  what ``PromptStream.read`` returns | {"broken": reason, "data": …}
    in   {"read_evaluation": [start, count]}
    out  the same of the prompts of the evaluation, and "overlap": those of them that are prompts of training, too
    in   {"answers": [context, …]}
    out  {"answers": [text, …]} | {"broken": reason, "data": …}

Parts are the rewards that the sum is made of, where the job has several.

A context says which row of the data set the response answers, and what the row's content comes to; the row itself is
looked up here, so that its columns reach the verifier with their own types and travel through nobody's messages.

Verdicts leave together once the oldest has waited for ``gather_s`` and a response is done; with 0,
each has a frame of its own, so that the parent knows which response is being scored when none comes.

One that scores batches (``batch_serving.py``) sends a frame without verdicts as a sign of life, or says in the place of
a verdict that its response was ``cut``. One that scores one by one has no
tokenizer, and one that reads runs no code but ours. The parent kills it when a verdict takes longer than
``reward.timeout_s``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO

from actors.environments.errors import SourceUnreadable
from actors.environments.scoring.scorer_frames import Answer, Send, Verdict, as_text, frame, read_frame
from actors.host.import_guard import import_transformers_without_torch
from actors.host.parent_death import lead_group
from actors.host.standard_streams import open_standard_streams
from configs.schema import JobConfig

if TYPE_CHECKING:
    from actors.environments.scoring.examples import Examples
    from actors.environments.scoring.scorers import Scorers


def main() -> None:
    """Serve until stdin closes, or the parent dies while a verifier hangs. What verifiers have started ends with us."""
    lead_group(os.getppid())
    requests = os.fdopen(os.dup(0), "rb")
    _read_nothing()  # what a verifier starts inherits its input: it must not take the requests
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the frames
    open_standard_streams(unbreakable=True)  # and if that has no room, no verdict fails for it
    try:
        _serve(requests, replies)
    except EOFError:
        return


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    from actors.environments.scoring.user_code import described

    def send(value: object) -> None:
        replies.write(frame(value))
        replies.flush()

    def broken(error: Exception, *, data: bool) -> None:
        send({"broken": as_text(described(error)), "data": data})

    order = read_frame(requests)
    reads = bool(order["model"])
    try:
        job = JobConfig.model_validate_json(order["job"])
        answer = _reader(job, order, send) if reads else _scorer(job, order, send)
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is its verdict on itself)
        broken(error, data=isinstance(error, SourceUnreadable))
        return
    send({"ready": True})
    while True:
        request = read_frame(requests)
        try:
            answer(request)
        except (OSError, MemoryError) as error:
            broken(error, data=False)  # of the machine: it may pass
        except Exception as error:  # noqa: BLE001 (as above; what could not be read now can never be)
            broken(error, data=reads or isinstance(error, SourceUnreadable))


def _reader(job: JobConfig, order: dict[str, Any], send: Send) -> Answer:
    import_transformers_without_torch()
    from actors.environments.prompts.evaluation_stream import EvaluationStream
    from actors.environments.prompts.mixed_stream import open_stream
    from actors.environments.prompts.sources import open_all_sources
    from actors.environments.scoring.examples import Examples

    sources = open_all_sources(job)
    run_dir = Path(order["run_dir"]) if order["run_dir"] else None
    stream, examples = open_stream(job, Path(order["model"]), run_dir, sources), Examples(sources)
    held_out = EvaluationStream(job, Path(order["model"]), run_dir, sources) if job.eval is not None else None

    def answer(request: dict[str, Any]) -> None:
        if "answers" in request:
            send({"answers": [as_text(examples.answer(context)) for context in request["answers"]]})
        elif held_out is not None and "read_evaluation" in request:
            send(held_out.read(*request["read_evaluation"], slice_s=job.limits.read_slice_s))
        else:
            send(stream.read(*request["read"], slice_s=job.limits.read_slice_s))

    return answer


def _scorer(job: JobConfig, order: dict[str, Any], send: Send) -> Answer:
    if job.reward.each[order["parts"][0]][1].batched:
        from actors.environments.scoring.batch_serving import batch_scorer

        return batch_scorer(job, order, send)
    from actors.environments.prompts.sources import open_all_sources
    from actors.environments.scoring.examples import Examples
    from actors.environments.scoring.scorers import Scorers
    from actors.environments.scoring.trial import try_once

    sources = open_all_sources(job) if order["rows"] else None
    scorers, examples = Scorers(job, sources), Examples(sources or {})

    def answer(request: dict[str, Any]) -> None:
        if "try" in request:
            send({"warnings": [as_text(warning) for warning in try_once(job, scorers, sources or {})]})
        else:
            _score_all(scorers, examples, request["score"], send, gather_s=request["gather_s"])

    return answer


def _score_all(
    scorers: Scorers,
    examples: Examples,
    answers: Sequence[tuple[str, bytes]],
    send: Send,
    *,
    gather_s: float,
) -> None:
    from actors.environments.scoring.user_code import described

    verdicts: list[Verdict] = []
    sent_s = monotonic()
    for response, context in answers:
        try:
            reward, parts = scorers.score(response, partial(examples.of, context))
            verdicts.append((reward, "", parts, False))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (as above; no terminal is ours)
            verdicts.append((None, as_text(described(error)), [], False))
        if monotonic() - sent_s >= gather_s:
            send(verdicts)
            verdicts, sent_s = [], monotonic()
    if verdicts:
        send(verdicts)


if __name__ == "__main__":
    main()
