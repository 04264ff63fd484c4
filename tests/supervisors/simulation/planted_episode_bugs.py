"""Bugs of episodes, planted as those of ``planted_bugs.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from actors.ledger.batch import StepBatch
from actors.ledger.episode_entry import EpisodeEntry
from actors.protocol.episodes import TakeTurn
from actors.scheduler.drivers import Drive, Driver, Drivers
from actors.scheduler.episode_rows import EpisodeRows
from actors.scheduler.episode_turns import EpisodeRow
from tests.supervisors.simulation.planted_bugs import Replace

THE_HEAD_DIES = {"a_turn_is_told_before_it_is_durable"}
"""Bugs for which the head has to die, again and again."""
PLANTED: dict[str, Callable[[Replace], None]] = {}
SEEDS: dict[str, int] = {}
"""The first seeds that catch them."""


def caught_by(seed: int) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """A bug that the seeds before ``seed`` let pass."""

    def plant_it(plant: Callable[[Replace], None]) -> Callable[[Replace], None]:
        PLANTED[plant.__name__], SEEDS[plant.__name__] = plant, seed
        return plant

    return plant_it


@caught_by(1)
def a_replay_is_sampled_anew(replace: Replace) -> None:
    right = EpisodeRow._holds

    def holds(self: EpisodeRow, ask: TakeTurn, end: int) -> bool:
        return right(self, ask, end) and not ask.diverged

    replace(EpisodeRow, "_holds", holds)


@caught_by(12)
def a_turn_is_told_before_it_is_durable(replace: Replace) -> None:
    async def durable(self: EpisodeRows) -> None:
        return

    replace(EpisodeRows, "durable", durable)


@caught_by(1)
def what_a_dead_environment_drove_is_forgotten(replace: Replace) -> None:
    def lose(self: Drivers, driver: Driver) -> list[Drive]:
        self.by_name.pop(driver.name, None)
        return list(driver.driven.values())

    replace(Drivers, "lose", lose)


@caught_by(0)
def the_environment_s_words_count_as_the_model_s(replace: Replace) -> None:
    right = StepBatch.put_marked

    def put_marked(self: StepBatch, row: int, tokens: np.ndarray, mark: int) -> None:
        start = int(self.length[row])
        right(self, row, tokens, mark)
        self._versions[row, start + 1 : self.length[row]] = self.step

    replace(StepBatch, "put_marked", put_marked)


@caught_by(8)
def what_is_cut_off_is_not_counted(replace: Replace) -> None:
    right = EpisodeEntry._cut

    def cut(self: EpisodeEntry, batch: StepBatch, row: int, length: int) -> None:
        counted = self._ledger.counters.tokens_discarded
        right(self, batch, row, length)
        self._ledger.counters.tokens_discarded = counted

    replace(EpisodeEntry, "_cut", cut)


@caught_by(8)
def a_turn_under_way_is_trained_when_its_episode_is_over(replace: Replace) -> None:
    def cut(self: EpisodeEntry, batch: StepBatch, row: int, length: int) -> None:
        """Nothing is cut off."""

    replace(EpisodeEntry, "_cut", cut)


@caught_by(0)
def an_environment_gets_more_than_it_has_slots_for(replace: Replace) -> None:
    replace(Driver, "free", property(lambda _: 1))


@caught_by(0)
def an_episode_is_driven_twice(replace: Replace) -> None:
    right: Any = Drivers.__contains__

    def contains(self: Drivers, key: Any) -> bool:
        return right(self, key) and key.sibling > 0

    replace(Drivers, "__contains__", contains)
