"""Preferences made from a task's own answers: of two responses with various mistakes, the better one is preferred.

    row's answer ─▶ two drawn of: right · with mistakes · goes on as another answer · cut short · another answer
                ─▶ how good each truly is ─▶ better: chosen, worse: rejected; equally good: drawn anew

The task's own scorer says how good a response truly is (``reasoning_gym``); for other data it is the text's similarity
to the answer. This true score can be compared with the learned reward, which has seen only which of two was better.
Most responses are wrong, as a policy's are at first, so that the order among wrong ones is learned too.
"""

from __future__ import annotations

import difflib
import random
import string
from collections.abc import Mapping

from actors.environments.prompts.rows import Source
from actors.environments.prompts.sources import epoch_order
from actors.reward_training.errors import CannotTrain
from actors.reward_training.preferences import Pair
from configs.schema import DataConfig

_MISTAKES = (1, 2, 3)
_TRIES = 20
"""Attempts to draw a pair before its row is passed over: an answer of one letter can go wrong in few ways."""


def pairs_of_answers(data: Mapping[str, tuple[DataConfig, Source]], seed: int, count: int) -> list[Pair]:
    """``count`` pairs, from the rows of all sources in turn; equal seeds give equal pairs.

    Raises:
        CannotTrain: the answers allow no pairs.
        SourceUnreadable: a row cannot be read.
    """
    sources = [(config, source, epoch_order(config, seed, len(source), 0)) for config, source in data.values()]
    draw = random.Random(f"headrace preferences {seed}")
    pairs: list[Pair] = []
    passed_over = 0
    while len(pairs) < count:
        number = len(pairs) + passed_over
        config, source, order = sources[number % len(sources)]
        index = int(order[number // len(sources) % len(order)])
        if (two := _two(config, source, index, draw)) is not None:
            pairs.append(Pair(*two, source.row(index).prompt, source.where(index), config))
            continue
        passed_over += 1
        if passed_over > count + sum(len(source) for _, source, _ in sources):
            raise CannotTrain(
                "preferences answers: the data's answers are too short or too alike to make wrong ones of them. "
                "Name a file of preferences instead"
            )
    return pairs


def _two(config: DataConfig, source: Source, index: int, draw: random.Random) -> tuple[str, str] | None:
    """A better and a worse response to row ``index``; None if none was found."""
    answer = _answer(source, index)
    for _ in range(_TRIES):
        other = _answer(source, draw.randrange(len(source)))
        one, two = _response(answer, other, draw), _response(answer, other, draw)
        good = [_how_good(config, source, index, answer, text) for text in (one, two)]
        if good[0] != good[1]:
            return (one, two) if good[0] > good[1] else (two, one)
    return None


def _answer(source: Source, index: int) -> str:
    answer = source.row(index).answer
    if answer is None or str(answer) == "":
        raise CannotTrain(
            f"preferences answers: {source.where(index)} of the data has no answer to make a pair of. Set "
            "data.answer_key, or name a file of preferences"
        )
    return str(answer)


def _how_good(config: DataConfig, source: Source, index: int, answer: str, response: str) -> float:
    if config.source == "reasoning_gym":
        return source.score(response, index)
    return difflib.SequenceMatcher(None, response, answer, autojunk=False).ratio()


def _response(answer: str, other: str, draw: random.Random) -> str:
    """Draw a response to ``answer``'s row as a policy might give it."""
    at = draw.randrange(len(answer))
    return draw.choice(
        (
            lambda: answer,
            lambda: _with_mistakes(answer, draw),
            lambda: _with_mistakes(answer, draw),
            lambda: answer[:at] + other[draw.randrange(len(other)) :],
            lambda: answer[:at],
            lambda: other,
        )
    )()


def _with_mistakes(text: str, draw: random.Random) -> str:
    """``text`` with a few letters replaced, left out, doubled, inserted, or swapped with the next."""
    letters = string.digits if text.isdigit() else string.ascii_lowercase
    for _ in range(draw.choice(_MISTAKES)):
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
