"""The routes by which agents use the model, in the form of OpenAI's API and vLLM's.

    POST /v1/chat/completions          messages in, a message out; streams too
    POST /v1/chat/completions/tokens   the same, with the prompt's token ids beside the messages
    POST /inference/v1/generate        token ids in, token ids out
    POST /tokenize                     a text or messages as token ids
    GET  /v1/models                    the model, and how long a context may get

All of them exist below /s/KEY too, for agents that can set a URL and no header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import xxhash
from aiohttp import web

from actors.gateway.errors import too_long, wrong
from actors.gateway.http import Http, as_json
from actors.gateway.off_loop import OffLoop
from actors.gateway.openai_json import ReplyMaker
from actors.gateway.rendering import ChatTemplate
from actors.gateway.requests import ChatRequest, GenerateRequest, Sampling, TokenizeRequest, chat_of, parsed
from actors.gateway.sessions import Answer, Sessions
from actors.gateway.walk import Question
from actors.host.clock import time_of_day_s
from actors.protocol.episodes import EpisodeName
from actors.protocol.evaluations import is_evaluation
from configs.schema import JobConfig


class OpenAiRoutes:
    """Answers agents. ``tell`` reports a trouble to people, by its kind."""

    def __init__(
        self, http: Http, off_loop: OffLoop, sessions: Sessions, template: ChatTemplate, replies: ReplyMaker,
        job: JobConfig, tell: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._off_loop = off_loop
        self._http, self._sessions, self._template, self._replies = http, sessions, template, replies
        self._tell = tell
        self._job = job

    def add_to(self, app: web.Application) -> None:
        routes = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/chat/completions/tokens", self.chat_of_tokens),
            ("POST", "/inference/v1/generate", self.generate),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/v1/tokenize", self.tokenize),
            ("GET", "/v1/models", self.models),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
            app.router.add_route(method, f"/s/{{key}}{path}", handler)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._chat(request, with_tokens=False)

    async def chat_of_tokens(self, request: web.Request) -> web.StreamResponse:
        return await self._chat(request, with_tokens=True)

    async def _chat(self, request: web.Request, *, with_tokens: bool) -> web.StreamResponse:
        episode = self._http.episode(request)
        with self._off_loop.room(episode):
            body = await self._http.body(request)
            is_retry = self._http.is_retry(request)
            asked, question = await self._off_loop.run(episode, self._chat_asked, body, is_retry, with_tokens)
        self._tell_ignored(episode, asked)
        if asked.tools and not self._replies.reads_calls:
            self._tell(
                "gateway_tools",
                "agents give tools, and the model's chat template has no <tool_call> and its tokenizer no "
                "response_template: calls in another form are read as text, and no tool is called. Put a "
                "response_template into tokenizer_config.json, or a template with <tool_call> beside it",
            )
        pending = self._sessions.ask(episode, question, _digest(request, body))
        streams, now_s = bool(asked.stream), time_of_day_s()

        def make(answer: Answer) -> Iterable[dict[str, Any]]:
            return (
                self._replies.chunks(answer, asked, now_s)
                if streams
                else [self._replies.completion(answer, asked, now_s)]
            )

        return await self._http.reply(request, pending, make, streams=streams, settle=self._sessions.settle)

    def _chat_asked(self, body: bytes, is_retry: bool, with_tokens: bool) -> tuple[ChatRequest, Question]:
        asked = parsed(body, ChatRequest)
        if not with_tokens and not self._template.is_there:
            fix = "put one beside the tokenizer as chat_template.jinja, or ask with token ids (/inference/v1/generate)"
            raise wrong("messages", f"the model's tokenizer has no chat template: {fix}", "no_chat_template")
        question = asked.question(is_retry=is_retry, with_tokens=with_tokens)
        if question.chat is not None:
            self._template.refuse_too_long(question.chat)
        self._refuse_tokens(question)
        return asked, question

    async def generate(self, request: web.Request) -> web.StreamResponse:
        episode = self._http.episode(request)
        with self._off_loop.room(episode):
            body = await self._http.body(request)
            is_retry = self._http.is_retry(request)
            asked, question = await self._off_loop.run(episode, self._tokens_asked, body, is_retry)
        self._tell_ignored(episode, asked.sampling_params)
        digest = _digest(request, body)
        pending = self._sessions.ask(episode, question, digest)
        name = asked.request_id or digest.hex()
        return await self._http.reply(
            request, pending, lambda answer: [self._replies.generated(answer, name)], streams=False,
            settle=self._sessions.settle,
        )  # fmt: skip

    def _tokens_asked(self, body: bytes, is_retry: bool) -> tuple[GenerateRequest, Question]:
        asked = parsed(body, GenerateRequest)
        question = asked.question(is_retry=is_retry)
        self._refuse_tokens(question)
        return asked, question

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        key = await self._someone(request)
        with self._off_loop.room(key):
            body = await self._http.body(request)
            return await self._off_loop.run(key, self._tokenized, body)

    def _tokenized(self, body: bytes) -> web.StreamResponse:
        asked = parsed(body, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise wrong("prompt", "expected either prompt (a text) or messages")
        if asked.messages is not None:
            chat = chat_of(asked.messages, asked.tools, asked.chat_template_kwargs)
            self._template.refuse_too_long(chat)
            tokens = self._template.render(chat, ask=asked.add_generation_prompt is not False)
        else:
            with_special = asked.add_special_tokens is not False
            tokens = self._template.encode(asked.prompt or "", special_tokens=with_special, param="prompt")
        found = {"count": len(tokens), "max_model_len": self._sessions.positions, "tokens": tokens}
        strings = [self._replies.token_text(token) for token in tokens] if asked.return_token_strs else None
        return as_json(found | {"token_strs": strings})

    async def models(self, request: web.Request) -> web.StreamResponse:
        await self._someone(request)
        model = {
            "id": self._replies.model, "object": "model", "created": int(time_of_day_s()), "owned_by": "headrace",
            "root": self._replies.model, "parent": None, "max_model_len": self._sessions.positions, "permission": [],
        }  # fmt: skip
        return as_json({"object": "list", "data": [model]})

    async def _someone(self, request: web.Request) -> EpisodeName | None:
        """The episode whose key the request has; None: it has the admin key. Raises HttpProblem if it is over."""
        if self._http.has_admin_key(request):
            return None
        episode = self._http.episode(request)
        await self._sessions.refuse_over(episode)
        return episode

    def _tell_ignored(self, episode: EpisodeName, asked: Sampling) -> None:
        """Tell people which settings of ``asked`` are ignored."""
        job = self._job.evaluation if is_evaluation(episode.step) else self._job
        if ignored := asked.ignored({"temperature": job.rollout.temperature}, self._replies.ends):
            self._tell(
                "gateway_sampling",
                f"agents ask for {', '.join(ignored)} other than the job's: ignored, for tokens are drawn as the job "
                "says, or the trainer would learn from another distribution. The job file's rollout.temperature and "
                "rollout.stop say how",
            )

    def _refuse_tokens(self, question: Question) -> None:
        """Refuse tokens that the model lacks, or more than its context can hold."""
        tokens = question.tokens or ()
        if len(tokens) > self._sessions.positions:
            raise too_long("token_ids", f"{len(tokens)} tokens", self._sessions.positions)
        for place, token in enumerate(tokens):
            if token >= self._replies.vocabulary:
                raise wrong(
                    f"token_ids[{place}]", f"{token} is no token of this model ({self._replies.vocabulary} rows)"
                )


def _digest(request: web.Request, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(request.path.encode("utf-8", "surrogateescape") + b"\n" + body)
