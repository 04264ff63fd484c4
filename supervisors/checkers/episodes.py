"""Episodes in the journal, folded a second time: token by token, by other code than the ledger's.

    begun: another life        turned: waiting ─▶ queued        cut: ─▶ waiting        ended: ─▶ scored

A row of an episode has a mark for each token: the policy version for one of the model's, -2 for the first one of a
fresh context, -1 for others of the environment. An event that does not fit becomes a complaint, as in ``replay.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from actors.ledger import events as ev
from supervisors.checkers.followed import IN_FLIGHT, QUEUED, SCORED, WAITING, Batch, Sample

_LIVE = (QUEUED, IN_FLIGHT, WAITING)


class Fold(Protocol):
    """What ``Episodes`` needs of the replay."""

    @property
    def batches(self) -> dict[int, Batch]: ...

    def rows(self, step: int, rows: Iterable[int], doing: str) -> list[Sample]: ...

    def move(self, sample: Sample, allowed: tuple[str, ...], to: str, doing: str) -> None: ...

    def end(self, number: int) -> None:
        """End a hand-out."""
        ...

    def complain_of_token(self, sample: Sample, what: str) -> None: ...


class Episodes:
    """Follows the events of episodes for a replay."""

    def __init__(self, replay: Fold) -> None:
        self._replay = replay
        self.handlers: dict[type, Callable[[Any], None]] = {
            ev.EpisodesBegun: self._begun,
            ev.Turned: self._turned,
            ev.EpisodeCut: self._cut,
            ev.EpisodesEnded: self._ended,
        }
        self.discarded = 0
        """Number of the model's tokens that were cut off."""

    def _begun(self, event: ev.EpisodesBegun) -> None:
        for sample in self._replay.rows(event.step, event.rows.tolist(), "a beginning"):
            self._replay.move(sample, _LIVE, sample.state, "its environment begins:")

    def _turned(self, event: ev.Turned) -> None:
        samples = self._replay.rows(event.step, event.rows.tolist(), "a turn")
        tokens, at = event.tokens.tolist(), 0
        columns = zip(
            samples, event.offsets.tolist(), event.fresh.tolist(), event.counts.tolist(), event.limits.tolist(),
            strict=False,
        )  # fmt: skip
        for sample, offset, fresh, count, limit in columns:
            self._replay.move(sample, (WAITING,), QUEUED, "its environment spoke:")
            if offset != len(sample.tokens):
                what = f"{sample.name}: its environment spoke at {offset}, and the row ends at {len(sample.tokens)}"
                self._replay.complain_of_token(sample, what)
            if not sample.tokens and not fresh:
                self._replay.complain_of_token(sample, f"{sample.name} begins with no context")
            sample.tokens += tokens[at : at + count]
            sample.versions += [-2 if fresh else -1, *[-1] * (count - 1)]
            sample.limit, sample.workers = limit, []  # hand-outs are counted in each turn
            at += count
            self._check_bounds(sample)

    def _check_bounds(self, sample: Sample) -> None:
        batch = self._replay.batches[sample.name.step]
        said = sum(version >= 0 for version in sample.versions)
        most = batch.max_tokens - said
        if batch.episodes is None:
            self._replay.complain_of_token(sample, f"{sample.name} is no episode, and has an environment")
        elif not len(sample.tokens) < sample.limit <= min(len(sample.tokens) + most, batch.episodes.episode_tokens):
            what = f"{sample.name}: a turn behind {said} tokens of the model may go on to position {sample.limit}"
            self._replay.complain_of_token(sample, f"{what}, beyond {batch.max_tokens} tokens or {batch.episodes}")

    def _cut(self, event: ev.EpisodeCut) -> None:
        samples = self._replay.rows(event.step, event.rows.tolist(), "a cut")
        for sample, length in zip(samples, event.lengths.tolist(), strict=False):
            self._over(sample, WAITING, "cut:")
            if length > len(sample.tokens):
                what = f"{sample.name} was cut to {length} tokens, and has {len(sample.tokens)}"
                self._replay.complain_of_token(sample, what)
            self._shorten(sample, length)

    def _ended(self, event: ev.EpisodesEnded) -> None:
        samples = self._replay.rows(event.step, event.rows.tolist(), "an end")
        for sample, reward in zip(samples, event.rewards.tolist(), strict=False):
            length = len(sample.tokens)
            if sample.state != WAITING and not event.keeps_turn:  # a turn is under way, or due
                while length and sample.versions[length - 1] >= 0:
                    length -= 1
            while length and sample.versions[length - 1] < 0:
                length -= 1
            self._over(sample, SCORED, "its episode ended:")
            self._shorten(sample, length)
            sample.reward = reward

    def _over(self, sample: Sample, to: str, doing: str) -> None:
        self._replay.move(sample, _LIVE, to, doing)
        if sample.assignment >= 0:
            self._replay.end(sample.assignment)

    def _shorten(self, sample: Sample, length: int) -> None:
        self.discarded += sum(version >= 0 for version in sample.versions[length:])
        del sample.tokens[length:], sample.versions[length:]
