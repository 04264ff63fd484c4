"""A remote scorer, asked in batches over HTTP, in the shape of OpenRLHF's ``--remote_rm_url``.

    POST url   {"query": [prompt + response, …], "prompts": [prompt, …], "labels": [answer, …]}
    200        {"rewards": [number, …]}                                   one for each of query, in order

    connection lost, 408, 425, 429, 5xx ──▶ again after a pause, or when Retry-After says, until reward.timeout_s
                                        └─▶ no result
    no JSON, another number of rewards, a reward that is no finite number ────────────────▶ no result
    3xx, other 4xx ───────────────────────────────────────────────────────────────────────▶ RewardRefused: the run ends

Invariants
- One question (name look-up, connection, repeats, a reply that trickles) takes at most ``reward.timeout_s`` in all.
- Requests go to ``url`` only: a redirect is not followed, since the key would go with it.
- A reply is read up to ``limits.remote_reply_bytes``.
- No message shows the key, or what a URL has behind its ``?``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, cast

import httpx

from actors.environments.errors import RewardRefused
from actors.environments.prompts.tokenizer import TextCodec
from actors.environments.scoring.batches import Asked
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.host.clock import time_of_day_s
from actors.host.import_guard import import_transformers_without_torch
from configs.schema import JobConfig
from configs.task_schema import Reward

_PASSING = (408, 425, 429)
"""Client errors that say "later": too slow, too early, too many."""


class _Passing(Exception):
    """A failure that may pass: the request is sent again while there is time."""

    def __init__(self, what: str, retry_after_s: float = 0.0) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s
        """Seconds that the server asks to wait; 0 if it does not say."""


class _NoRewards(Exception):
    """The reply holds no rewards in the expected form."""


class HttpScorer:
    """Asks the server at ``url``; ``policy``: directory of the tokenizer that made the prompts, or empty.

    Raises:
        RewardRefused: the variable that should hold the key does not.
    """

    def __init__(self, job: JobConfig, where: str, reward: Reward, policy: str) -> None:
        self.batch = reward.batch_samples
        self._job = job
        self._where = where
        self._url = httpx.URL(reward.url or "")
        self._shown = str(self._url.copy_with(query=None, fragment=None, username=None, password=None))
        self._key = _key_of(where, reward)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(headers=headers, timeout=job.reward.timeout_s, follow_redirects=False)
        self._codec: TextCodec | None = None
        if policy:
            import_transformers_without_torch()
            self._codec = TextCodec(Path(policy), job.data)

    def score(self, asked: Sequence[Asked], alive: Callable[[], None]) -> list[ScorerVerdict]:
        try:
            return self._ask(asked)
        except _NoRewards as error:
            return [ScorerVerdict(None, str(error))] * len(asked)

    def try_once(self, asked: Asked) -> ScorerVerdict:
        try:
            (found,) = self._ask([asked])
        except _NoRewards as error:
            raise RewardRefused(
                f"{self._where}.url {self._shown}: {error}. It must answer "
                '{"query": […], "prompts": […], "labels": […]} with {"rewards": [one number for each]}'
            ) from error
        return found

    def close(self) -> None:
        """Close the connections. A scorer process does without: its parent kills it."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    def _ask(self, asked: Sequence[Asked]) -> list[ScorerVerdict]:
        prompts = [self._prompt(one) for one in asked]
        question = {
            "query": [prompt + one.response for prompt, one in zip(prompts, asked, strict=True)],
            "prompts": prompts,
            "labels": [one.example.answer for one in asked],
        }
        body = json.dumps(question, default=str).encode()
        reply = self._runner.run(self._within(body))
        if isinstance(reply, str):
            return [ScorerVerdict(None, reply)] * len(asked)
        return [_found(value) for value in _rewards(reply, len(asked))]

    def _prompt(self, asked: Asked) -> str:
        """The prompt as the policy saw it, if its tokenizer is here; else by ``data.template``, or as JSON."""
        prompt = asked.example.prompt
        if self._codec is not None:
            return self._codec.for_data(asked.data).encode(prompt)[0]
        return asked.data.template.replace("{prompt}", prompt) if isinstance(prompt, str) else json.dumps(prompt)

    async def _within(self, body: bytes) -> bytes | str:
        """The reply, or why there is none within the deadline."""
        limits, timeout_s = self._job.limits, self._job.reward.timeout_s
        pause_s, why = limits.backoff_first_s, ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._post(body)
                    except _Passing as error:
                        why, asked_s = f"; last: {error}", error.retry_after_s
                    await asyncio.sleep(max(pause_s, min(asked_s, timeout_s)))  # the deadline ends a longer pause
                    pause_s = min(2 * pause_s, limits.backoff_max_s)
        except TimeoutError:
            return f"{self._shown} gave no rewards within reward.timeout_s ({timeout_s:g} s){why}"

    async def _post(self, body: bytes) -> bytes:
        """Send one request; returns the body of the reply.

        Raises:
            _Passing, _NoRewards, RewardRefused: see the drawing above.
        """
        try:
            async with self._client.stream("POST", self._url, content=body) as reply:
                status = reply.status_code
                if status in _PASSING or status >= 500:
                    raise _Passing(f"it answered {status} {reply.reason_phrase}", _retry_after_s(reply))
                if status == 200:
                    return await self._read(reply)
                raise RewardRefused(await self._refusal(reply))
        except httpx.HTTPError as error:
            raise _Passing(f"{type(error).__name__}: {self._without_key(str(error))}".rstrip(": ")) from error

    async def _read(self, reply: httpx.Response) -> bytes:
        longest = self._job.limits.remote_reply_bytes
        body = await _first_bytes(reply, longest + 1)
        if len(body) > longest:
            raise _NoRewards(f"its reply is longer than limits.remote_reply_bytes ({longest})")
        return body

    async def _refusal(self, reply: httpx.Response) -> str:
        said = f"{self._where}.url {self._shown}: the scorer answered {reply.status_code} {reply.reason_phrase}"
        if reply.is_redirect:
            return f"{said}, which sends us elsewhere, and redirects are not followed: name the address itself"
        if reply.status_code in (401, 403):
            return f"{said}: it wants a key, or another one; {self._where}.key_env names the variable that holds it"
        body = await _first_bytes(reply, self._job.limits.remote_error_chars)
        words = self._without_key(" ".join(body.decode(errors="replace").split()))
        return f"{said}, as it would again: {words[: self._job.limits.remote_error_chars] or 'without a word'}"

    def _without_key(self, text: str) -> str:
        text = text.replace(self._key, "***") if self._key else text
        return text.replace(str(self._url), self._shown)


async def _first_bytes(reply: httpx.Response, wanted: int) -> bytes:
    """At least ``wanted`` bytes of the reply, or the whole reply."""
    body = bytearray()
    parts = cast("AsyncGenerator[bytes, None]", reply.aiter_raw())
    async with contextlib.aclosing(parts):
        async for part in parts:
            body += part
            if len(body) >= wanted:
                break
    return bytes(body)


def _retry_after_s(reply: httpx.Response) -> float:
    """What ``Retry-After`` asks for, as seconds or as a date (RFC 9110, 10.2.3); 0 without one that can be read."""
    said = reply.headers.get("Retry-After", "").strip()
    if said.isdecimal():
        return float(said)
    try:
        until = parsedate_to_datetime(said)
        return max(0.0, until.timestamp() - time_of_day_s())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _key_of(where: str, reward: Reward) -> str:
    if reward.key_env is None:
        return ""
    key = os.environ.get(reward.key_env, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        what = "holds no text that a header can carry" if key else "is not set where scores are asked for"
        raise RewardRefused(f"{where}.key_env: the environment variable {reward.key_env} {what}; export the key in it")
    return key


def _rewards(body: bytes, wanted: int) -> list[object]:
    """The rewards in a reply, one for each response.

    Raises:
        _NoRewards: the reply has another form.
    """
    try:
        reply: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        kind = "HTML" if body.lstrip()[:1] == b"<" else "no JSON"
        raise _NoRewards(f"its reply is {kind}, expected JSON with 'rewards'") from error
    rewards: Any = cast("Mapping[str, object]", reply).get("rewards") if isinstance(reply, dict) else None
    if not isinstance(rewards, list):
        raise _NoRewards("its reply has no list 'rewards'")
    found = cast("list[object]", rewards)
    if len(found) != wanted:
        raise _NoRewards(f"it gave {len(found)} rewards for {wanted} responses")
    return found


def _found(value: object) -> ScorerVerdict:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return ScorerVerdict(float(value))
        except OverflowError:
            return ScorerVerdict(None, "its reward is a whole number beyond all floating ones")
    return ScorerVerdict(None, f"its reward is {type(value).__name__}, expected a number")
