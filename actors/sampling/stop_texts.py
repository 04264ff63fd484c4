"""Finds the token that completes a stop text, as tokens come one by one.

    tokens  … a b c │ d e │ f ─▶ decode(d e f) minus decode(d e) = the text that f adds ─▶ is a stop text in it, or
                    └─────┴─ begins in the tail of the text before?

Invariants
- The text is that of all tokens so far, special tokens included, without a character whose bytes are not all there.
- A token costs two decodings of a few tokens, however long the sequence is: of the text only a tail is kept, in which
  a stop text may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

from actors.environments.prompts.tokenizer import load_tokenizer

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character yet."""
_UNCLEAR_TOKENS: Final = 64
"""Tokens after which bytes that are still no character are believed to be none; a character has four bytes at most."""


class StopTexts:
    """Watches one sequence for ``texts``, none of which is empty."""

    def __init__(self, decode: Decode, texts: Sequence[str]) -> None:
        self._decode, self._texts = decode, texts
        self._kept = max(len(text) for text in texts) - 1
        self._tail = ""
        self._tokens: list[int] = []
        """Tokens since the last but one place at which the text was whole."""
        self._told = 0
        """Number of them whose text is in the tail."""

    def completed_by(self, token: int) -> bool:
        """Whether one of the texts is complete with ``token``, which follows those before."""
        self._tokens.append(token)
        before = self._decode(self._tokens[: self._told])
        now = self._decode(self._tokens)
        whole = now.rstrip(_INCOMPLETE)
        text = self._tail + whole[len(before) :]
        if any(stop in text for stop in self._texts):
            return True
        if whole == now or len(self._tokens) > _UNCLEAR_TOKENS:
            self._tail = text[max(0, len(text) - self._kept) :]
            self._tokens = self._tokens[self._told :]
            self._told = len(self._tokens)
        return False


def decoder_of(model_path: Path) -> Decode:
    """Decodes with the tokenizer of an HF directory; ids that it lacks have no text.

    Raises:
        SourceUnreadable: transformers cannot load it.
    """
    tokenizer = load_tokenizer(model_path)
    largest = max(tokenizer.get_vocab().values(), default=-1)

    def decode(tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token <= largest]
        text = tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast("str", text)

    return decode
