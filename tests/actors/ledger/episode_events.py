"""Events of episodes as tests write them: one episode at a time, of a ledger that has one step of them.

ledger = episodes()
turned(ledger, 0, "abc", fresh=True)     what the environment says, as code points
say(ledger, 0, "xy", STOP)               what the model says
"""

from __future__ import annotations

import numpy as np

from actors.ledger import events as ev
from actors.ledger.ledger import Ledger, Outcome
from actors.protocol.episodes import EpisodeLimits
from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams

STOP_ID = ord("!")
LIMITS = EpisodeLimits(turns_max=3, turn_tokens=4, episode_tokens=24)
SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(STOP_ID,))


def issued(step: int = 0, prompts: int = 2, group: int = 2, limits: EpisodeLimits = LIMITS) -> ev.BatchIssued:
    ids, none = np.arange(step * prompts, (step + 1) * prompts), np.zeros(0, np.int32)
    return ev.BatchIssued(step, group, SAMPLING, ids, np.zeros(prompts, np.int32), none, [b""] * prompts, limits)


def episodes() -> Ledger:
    """Two prompts of two episodes, none of which has begun."""
    ledger = Ledger()
    ledger.apply(ev.Opened(1))
    ledger.apply(issued())
    return ledger


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def a_turn(ledger: Ledger, row: int, text: str, *, fresh: bool = False, most: int | None = None) -> ev.Turned:
    """The environment of ``row`` says ``text``, and the model may answer with ``most`` tokens."""
    batch = ledger.batches[0]
    start = int(batch.length[row])
    said = int(np.count_nonzero(batch.marks(row) >= 0))
    room = min(LIMITS.turn_tokens, SAMPLING.max_tokens - said, LIMITS.episode_tokens - start - len(text))
    limit = start + len(text) + (room if most is None else most)
    return ev.Turned(
        0, np.array([row], np.int32), np.array([start], np.int32), np.array([fresh], np.uint8),
        np.array([len(text)], np.int32), ids(text), np.array([limit], np.int32),
    )  # fmt: skip


def turned(ledger: Ledger, row: int, text: str, *, fresh: bool = False, most: int | None = None) -> Outcome:
    return ledger.apply(a_turn(ledger, row, text, fresh=fresh, most=most))


def assign(ledger: Ledger, row: int, worker: str = "w") -> None:
    ledger.apply(ev.Assigned.to_one(worker, 0, ledger.next_assignment, np.array([row], np.int32)))


def report(
    ledger: Ledger, row: int, text: str, finish: int = 0, worker: str = "w", version: int = 0, at: int | None = None
) -> Outcome:
    """Tokens of the hand-out that ``row`` has."""
    batch = ledger.batches[0]
    offset = int(batch.length[row]) if at is None else at
    event = ev.TokensAppended.one(
        worker, version, batch.assignment[[row]].copy(), np.array([offset], np.int32), np.array([len(text)], np.int32),
        np.array([finish], np.uint8), ids(text), np.full(len(text), -0.5, np.float32),
    )  # fmt: skip
    return ledger.apply(event)


def say(
    ledger: Ledger, row: int, text: str, finish: int = FinishReason.STOP, worker: str = "w", version: int = 0
) -> Outcome:
    """The model takes the turn that is due."""
    assign(ledger, row, worker)
    return report(ledger, row, text, finish, worker, version)


def ended(*rows: int, reward: float = 1.0) -> ev.EpisodesEnded:
    return ev.EpisodesEnded(0, np.array(rows, np.int32), np.full(len(rows), reward))


def cut(row: int, length: int) -> ev.EpisodeCut:
    return ev.EpisodeCut(0, np.array([row], np.int32), np.array([length], np.int32))


def text_of(ledger: Ledger, row: int) -> str:
    """What the row holds: the model's tokens in capitals, a bar before a fresh context."""
    held = ledger.batches[0].ragged(np.array([row], np.int32))
    letters = zip(map(chr, held.tokens.tolist()), held.versions.tolist(), strict=True)
    return "".join(letter.upper() if mark >= 0 else "|" * (mark == -2) + letter for letter, mark in letters)
