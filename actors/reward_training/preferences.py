"""Preferences: pairs of responses of which one is better. They are read from rows, and some are held out.

    row {chosen, rejected, prompt?}   each text, or chat messages
      prompt, text        ─▶ the response behind its prompt, as a scorer reads it (scoring/reward_text.py)
      prompt, messages    ─▶ put behind the prompt if the assistant's comes first; else they are the whole conversation
      no prompt           ─▶ text as it stands, or the whole conversation

Invariants
- Whether a pair is held out is a function of its prompt, or of the messages that both conversations begin with; where
  they share none, of both. So no prompt is on both sides, and neither the seed nor other rows change a pair's side.
- A row that cannot be used raises an error that names file, row and column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.rows import Chat
from actors.environments.prompts.tables import open_table
from actors.environments.prompts.text_rows import TextRows
from actors.environments.scoring.reward_text import RewardText
from actors.reward_training.errors import CannotTrain
from configs.data_forms import DataForm, UnknownForm, form_of, wrong_prompt
from configs.schema import DataConfig

_AS_IT_STANDS = DataConfig()


@dataclass(frozen=True, slots=True)
class Pair:
    """Holds two responses, of which the first is better."""

    chosen: str | Chat
    rejected: str | Chat
    prompt: str | Chat | None
    where: str
    """Source and row of the pair, for messages to the user."""
    data: DataConfig = _AS_IT_STANDS
    """Settings by which a prompt becomes text."""

    def read(self, text: RewardText) -> tuple[str | Chat, str | Chat]:
        """Both responses behind their prompt, as the model reads them.

        Raises:
            CannotTrain: they are chat messages, and the tokenizer has no chat template.
        """
        both = self._read(text, self.chosen), self._read(text, self.rejected)
        if not text.has_template and not all(isinstance(one, str) for one in both):
            raise CannotTrain(
                f"{self.where} holds chat messages, and the model's tokenizer has no chat template: put one beside it "
                "as chat_template.jinja, or write prompt, chosen and rejected as text"
            )
        return both

    def _read(self, text: RewardText, response: str | Chat) -> str | Chat:
        if isinstance(response, str):
            return response if self.prompt is None else text.read(self.prompt, response, self.data)
        if self.prompt is None or response[0]["role"] != "assistant":
            return response
        before = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        return [*before, *response]

    @property
    def group(self) -> str:
        """What pairs of one prompt have in common: they are held out together."""
        shared: object = self.prompt
        if shared is None and isinstance(self.chosen, list) and isinstance(self.rejected, list):
            turns = zip(self.chosen, self.rejected, strict=False)
            shared = [one for one, _ in takewhile(lambda two: two[0] == two[1], turns)]
        return json.dumps(shared or [self.chosen, self.rejected], default=str, sort_keys=True)

    def is_held_out(self, fraction: float) -> bool:
        """Whether the pair belongs to the ``fraction`` of all prompts on which the accuracy is measured."""
        return int.from_bytes(hashlib.blake2b(self.group.encode(), digest_size=8).digest()) < fraction * 2**64


def read_preferences(path: Path, field: str) -> list[Pair]:
    """The pairs in the file or directory at ``path``, which the user has named in ``field``.

    Raises:
        CannotTrain: there are none, or a row is not a pair; the message names the row.
    """
    named = f"{field} {path}"
    try:
        if not path.exists():
            raise CannotTrain(f"{named}: there is no such file; name one with the columns chosen and rejected")
        form = form_of(path, "file")
        table: Any = TextRows(path, field) if form is DataForm.TEXT else open_table(path, form, field=field)
        place = cast("Callable[[int], str]", getattr(table, "where", lambda i: f"row {i}"))
        pairs = [_pair(table[i], f"{named}, {place(i)}") for i in range(len(table))]
    except SourceUnreadable as error:
        raise CannotTrain(str(error)) from error
    except UnknownForm as error:
        raise CannotTrain(f"{named}: {error}. {error.fix}") from error
    if not pairs:
        raise CannotTrain(f"{named}: it has no rows; expected pairs, each with chosen and rejected")
    return pairs


def _pair(row: dict[str, Any], where: str) -> Pair:
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            have = ", ".join(sorted(row)) or "nothing"
            raise CannotTrain(f"{where}: no column {column!r}; the row has {have}. Add it, or leave the row out")
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    for column, value in (("chosen", chosen), ("rejected", rejected), ("prompt", prompt)):
        if value != "" and (column != "prompt" or value is not None) and (wrong := wrong_prompt(value)):
            raise CannotTrain(f"{where}: column {column!r} {wrong}. Mend it, or leave the row out")
    if type(chosen) is not type(rejected):
        raise CannotTrain(f"{where}: one of chosen and rejected is text, the other chat messages; write both alike")
    if chosen == rejected:
        raise CannotTrain(f"{where}: chosen and rejected are equal, so neither is better; leave the row out")
    return Pair(chosen, rejected, prompt, where)
