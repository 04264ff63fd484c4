"""Preferences made of a task's own answers: a response with fewer mistakes is preferred to one with more.

    row's answer ── 0 to 2 mistakes ──▶ chosen ── 1 to 3 more, or another row's answer ──▶ rejected

The right answer is the chosen one in half of the pairs, so that the order of wrong ones is learned too: a policy that
is often wrong is told which way is better. How good a response truly is, the task's own verifier knows, which can be
shown beside the learned reward. A mistake is a letter that is replaced, left out, doubled, put in, or changes places
with the next.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping

from actors.environments.prompts.rows import Source
from actors.environments.prompts.sources import epoch_order
from actors.reward_training.errors import CannotTrain
from actors.reward_training.preferences import Pair
from configs.schema import DataConfig

_FIRST_MISTAKES = (0, 0, 0, 1, 1, 2)
_MORE_MISTAKES = (1, 1, 2, 3)
_OTHER_ANSWER = 0.2
"""Share of the rejected that are the answer of another row."""
_TRIES = 20
"""Draws of one pair before its row is passed over: an answer of one letter has few mistakes."""


def pairs_of_answers(data: Mapping[str, tuple[DataConfig, Source]], seed: int, count: int) -> list[Pair]:
    """``count`` pairs, from the rows of all sources in turn; equal seeds give equal pairs.

    Raises:
        CannotTrain: the answers allow no pairs.
        SourceUnreadable: a row cannot be read.
    """
    sources = [(config, source, epoch_order(config, seed, len(source), 0)) for config, source in data.values()]
    draw = random.Random(f"headrace preferences {seed}")
    pairs: list[Pair] = []
    without = 0
    while len(pairs) < count:
        number = len(pairs) + without
        config, source, order = sources[number % len(sources)]
        index = int(order[number // len(sources) % len(order)])
        answer, other = (_answer(source, row) for row in (index, draw.randrange(len(source))))
        row = source.row(index)
        if (two := _two(answer, other, draw)) is None:
            without += 1
            if without > count + sum(len(source) for _, source, _ in sources):
                raise CannotTrain(
                    "preferences answers: the data's answers are too short or too alike to make wrong ones of them. "
                    "Name a file of preferences instead"
                )
            continue
        pairs.append(Pair(*two, row.prompt, source.where(index), config))
    return pairs


def _answer(source: Source, index: int) -> str:
    answer = source.row(index).answer
    if answer is None or str(answer) == "":
        raise CannotTrain(
            f"preferences answers: {source.where(index)} of the data has no answer to make a pair of. Set "
            "data.answer_key, or name a file of preferences"
        )
    return str(answer)


def _two(answer: str, other: str, draw: random.Random) -> tuple[str, str] | None:
    """A better and a worse response; None if none was found."""
    for _ in range(_TRIES):
        better = _spoilt(answer, draw.choice(_FIRST_MISTAKES), draw)
        worse = other if draw.random() < _OTHER_ANSWER else _spoilt(better, draw.choice(_MORE_MISTAKES), draw)
        if worse not in (better, answer):
            return better, worse
    return None


def _spoilt(text: str, mistakes: int, draw: random.Random) -> str:
    letters = string.digits if text.isdigit() else string.ascii_lowercase
    for _ in range(mistakes):
        at = draw.randrange(len(text) or 1)
        before, here, after = text[:at], text[at : at + 1], text[at + 1 :]
        text = draw.choice(
            (
                before + draw.choice(letters) + after,
                before + after,
                before + here + here + after,
                before + draw.choice(letters) + here + after,
                before + after[:1] + here + after[1:],
            )
        )
    return text
