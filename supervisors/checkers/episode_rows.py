"""Checks of episodes: token marks, bounds, and the numbers of trained and discarded tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from actors.protocol.episodes import FRESH
from supervisors.checkers.followed import COMMITTED, Sample
from supervisors.checkers.history import History, Violation
from supervisors.checkers.replay import Replay

EPISODES = "episodes"


def check_episodes(history: History, replay: Replay) -> Iterator[Violation]:
    """Marks make sense, bounds hold, and the figures of each step are those that the journal gives."""
    for batch in replay.batches.values():
        if batch.episodes is None:
            continue
        for sample in batch.samples:
            yield from _marks(sample)
            turns = sum(after >= 0 > before for before, after in pairwise(sample.versions))
            if turns > batch.episodes.turns_max or _said(sample) > batch.max_tokens:
                what = f"{turns} turns and {_said(sample)} tokens of the model, of {batch.episodes.turns_max} and"
                yield Violation.of(EPISODES, sample.name, f"{sample.name} has {what} {batch.max_tokens}")
            if sample.state == COMMITTED and not _said(sample):
                yield Violation.of(
                    EPISODES, sample.name, f"{sample.name} was trained, and the model has said nothing in it"
                )
    yield from _figures(history, replay)


def _marks(sample: Sample) -> Iterator[Violation]:
    """A row begins with a fresh context, and each of its marks has a meaning."""
    marks = sample.versions
    if marks and marks[0] != FRESH:
        yield Violation.of(
            EPISODES, sample.name, f"{sample.name} begins with the mark {marks[0]}, and not with a fresh context"
        )
    if odd := [mark for mark in marks if mark < FRESH]:
        yield Violation.of(
            EPISODES, sample.name, f"{sample.name} has a token with the mark {odd[0]}, which says nothing"
        )


def _figures(history: History, replay: Replay) -> Iterator[Violation]:
    """Token counts in metrics.jsonl are those of the journal, where it still has the events to compare with."""
    for row in history.rows:
        step = int(row["step"])
        batch = replay.batches.get(step)
        if batch is None or batch.episodes is None:
            continue
        said = sum(_said(sample) for sample in batch.samples if sample.state == COMMITTED)
        if "tokens_trained" in row and int(row["tokens_trained"]) != said:
            told = int(row["tokens_trained"])
            what = f"step {step} trained {told} tokens by its row, and its samples have {said} of the model's"
            yield Violation(checker=EPISODES, what=what, step=step)
        told, last = int(row.get("tokens_discarded") or 0), step == history.job.steps - 1
        known = replay.episodes.discarded
        if not replay.pruned_below and (told > known or (last and told < known)):
            what = f"step {step} tells of {told} discarded tokens, and the journal of {known}"
            yield Violation(checker=EPISODES, what=what, step=step)


def _said(sample: Sample) -> int:
    """Number of the sample's tokens that the model generated."""
    return sum(version >= 0 for version in sample.versions)
