"""Replies in the form of OpenAI's API and vLLM's: plain values, made of one Answer.

    chat completion      message, finish_reason, usage; with logprobs, token ids of prompt and answer where asked for
    chunks of a stream   the same in pieces, sent once the turn is complete
    generate             token_ids, and log-probabilities under ``token_id:N``, as the library verifiers reads them

Each has ``weight_versions``: the runs of tokens drawn by one policy version, as ``{version, start, end}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from actors.gateway.replies import ReplyReader
from actors.gateway.requests import ChatRequest
from actors.gateway.sessions import Answer
from actors.protocol.evaluations import short_name

Json = dict[str, Any]


def weight_versions(versions: np.ndarray) -> list[Json]:
    """The runs of tokens that have one version."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [{"version": int(versions[a]), "start": a, "end": b} for a, b in pairwise(edges) if b > a]


class ReplyMaker:
    """Makes replies of one job's model. ``created_s``: the time of day, in seconds since 1970."""

    def __init__(self, model: str, reader: ReplyReader, vocabulary: int) -> None:
        self.model = model
        self.vocabulary = vocabulary
        """Number of rows of the model's embedding."""
        self.token_text = reader.token_text
        self.ends = reader.ends
        self.reads_calls = reader.reads_calls

    def completion(self, answer: Answer, request: ChatRequest, created_s: float) -> Json:
        choice: Json = {
            "index": 0,
            "message": self._message(answer),
            "finish_reason": _finish(answer),
            "logprobs": self._logprobs(answer, request) if request.logprobs else None,
        }
        body = self._head(answer, "chat.completion", created_s) | {"choices": [choice], "usage": usage(answer)}
        if request.return_token_ids:
            choice["token_ids"] = answer.tokens.tolist()
            body["prompt_token_ids"] = answer.prompt.tolist()
        return body | {"weight_versions": weight_versions(answer.versions)}

    def chunks(self, answer: Answer, request: ChatRequest, created_s: float) -> Iterator[Json]:
        """The events of a stream, in order."""
        head = self._head(answer, "chat.completion.chunk", created_s)
        if request.stream_options is not None and request.stream_options.include_usage:
            head |= {"usage": None}
        message = self._message(answer)
        first: Json = {"role": "assistant", "content": message["content"] or ""}
        if answer.reply.reasoning:
            first["reasoning_content"] = answer.reply.reasoning
        opening: Json = {"index": 0, "delta": first, "finish_reason": None}
        opening["logprobs"] = self._logprobs(answer, request) if request.logprobs else None
        further: Json = {}
        if request.return_token_ids:
            opening["token_ids"] = answer.tokens.tolist()
            further["prompt_token_ids"] = answer.prompt.tolist()
        yield head | {"choices": [opening]} | further
        if calls := message.get("tool_calls"):
            numbered = [{"index": i} | call for i, call in enumerate(calls)]
            yield head | {"choices": [{"index": 0, "delta": {"tool_calls": numbered}, "finish_reason": None}]}
        closing = {"index": 0, "delta": {}, "finish_reason": _finish(answer)}
        yield head | {"choices": [closing], "weight_versions": weight_versions(answer.versions)}
        if "usage" in head:
            yield head | {"choices": [], "usage": usage(answer)}

    def generated(self, answer: Answer, request_id: str) -> Json:
        """The reply in the form of vLLM's ``/inference/v1/generate``."""
        pairs = zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True)
        content = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
        choice = {
            "index": 0,
            "token_ids": answer.tokens.tolist(),
            "logprobs": {"content": content},
            "finish_reason": "length" if answer.is_cut else "stop",
        }
        return {
            "request_id": request_id,
            "model": self.model,
            "choices": [choice],
            "prompt_logprobs": None,
            "usage": usage(answer),
            "weight_versions": weight_versions(answer.versions),
        }

    def _head(self, answer: Answer, kind: str, created_s: float) -> Json:
        name = answer.episode
        id_ = f"chatcmpl-{short_name(name.step)}-{name.prompt}-{name.sibling}-{name.attempt}-{answer.turn.number}"
        return {"id": id_, "object": kind, "created": int(created_s), "model": self.model}

    def _message(self, answer: Answer) -> Json:
        reply = answer.reply
        message: Json = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{answer.turn.number}_{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(reply.calls)
            ]
        return message

    def _logprobs(self, answer: Answer, request: ChatRequest) -> Json:
        content: list[Json] = []
        for token, logprob in zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True):
            text = f"token_id:{token}" if request.return_tokens_as_token_ids else self.token_text(token)
            raw = list(text.encode("utf-8", "replace"))
            content.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
        return {"content": content, "refusal": None}


def usage(answer: Answer) -> Json:
    prompt, said = len(answer.prompt), len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _finish(answer: Answer) -> str:
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.reply.calls else "stop"
