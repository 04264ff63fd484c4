"""A task process: runs the user's verifier, which may hang, crash or print without harm, or else reads prompts.

Frames on stdin and stdout are a 4-byte big-endian length and a MessagePack value:

    in   {"job": job file as JSON, "model": directory, if it reads, else "", "run_dir": directory,
          "rows": whether it holds the data set, "policy": directory of the policy's tokenizer, or "",
          "parts": rewards that it scores, by their places}                             once
    out  {"ready": true} | {"broken": reason, "data": whether it is the data's fault}   once
    in   {"try": true}
    out  {"warnings": [text, …]} | {"broken": reason, "data": …}        (trial.py)
    in   {"score": [[response, context], …], "gather_s": float}
    out  [[reward, "", parts, cut] or [nil, reason, [], false], …]        one verdict a response, in order
         | {"broken": reason, "data": …}                                  none will come, however often asked
    in   {"read": [start, count]}
    out  what ``PromptStream.read`` returns | {"broken": reason, "data": …}
    in   {"read_evaluation": [start, count]}
    out  the same for prompts of the evaluation, and "overlap": the number of them that are in the training data, too
    in   {"answers": [context, …]}
    out  {"answers": [text, …]} | {"broken": reason, "data": …}

``parts`` of a verdict are the rewards whose weighted sum is the reward, where the job has several.

A context holds the index of the row that the response answers, and a digest of the row's content; the row itself is
looked up here, so that its columns reach the verifier with their own types and travel in no message.

A frame of verdicts is sent when a response is done and ``gather_s`` have passed since the last frame; with 0, each
verdict has a frame of its own, so that the parent knows which response is being scored when none comes.

A process that scores batches (``batch_serving.py``) may send a frame without verdicts as a sign of life, and ``cut``
says that a reward model read the response without its beginning. A process that scores one by one has no tokenizer, and
one that reads runs no code but ours. The parent kills a process whose verdict takes longer than ``reward.timeout_s``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO

from actors.environments.errors import SourceUnreadable
from actors.environments.scoring.scorer_frames import Answer, ScorerVerdict, Send, as_text, frame, read_frame
from actors.host.import_guard import import_transformers_without_torch
from actors.host.parent_death import lead_group
from actors.host.standard_streams import open_standard_streams
from configs.schema import JobConfig

if TYPE_CHECKING:
    from actors.environments.scoring.examples import Examples
    from actors.environments.scoring.scorers import Scorers


def main() -> None:
    """Serve until stdin closes, or the parent dies while a verifier hangs. What verifiers have started ends, too."""
    lead_group(os.getppid())
    requests = os.fdopen(os.dup(0), "rb")
    _read_nothing()  # what a verifier starts inherits stdin, and must not take the requests
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the frames
    open_standard_streams(unbreakable=True)  # a full disk there fails no verdict
    try:
        _serve(requests, replies)
    except EOFError:
        return


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    from actors.host.user_code import described

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
    except Exception as error:  # noqa: BLE001 (user code: whatever it raises is reported)
        broken(error, data=isinstance(error, SourceUnreadable))
        return
    send({"ready": True})
    while True:
        request = read_frame(requests)
        try:
            answer(request)
        except (OSError, MemoryError) as error:
            broken(error, data=False)  # the machine's fault: it may pass
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
    from actors.host.user_code import described

    verdicts: list[ScorerVerdict] = []
    sent_s = monotonic()
    for response, context in answers:
        try:
            reward, parts = scorers.score(response, partial(examples.of, context))
            verdicts.append(ScorerVerdict(reward, "", tuple(parts)))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (as above; no Ctrl-C comes here)
            verdicts.append(ScorerVerdict(None, as_text(described(error))))
        if monotonic() - sent_s >= gather_s:
            send(verdicts)
            verdicts, sent_s = [], monotonic()
    if verdicts:
        send(verdicts)


if __name__ == "__main__":
    main()
