"""Which tokens end a response: all that any file of the model names, since the files often disagree.

generation_config.json ┐
config.json            ┴─▶ eos_token_id, one or several
tokenizer_config.json, else special_tokens_map.json ── eos_token, a text ─▶ its id
the chat template      ── what it writes behind an answer (``supervisors/preparation/model_text.py`` asks transformers)
rollout.stop           ── texts of the job file ─▶ their ids
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from configs.model_files import ModelFileBroken, read_model_file
from transport.errors import HeadraceError

Claim = tuple[int, str]
"""Id of a token that ends a response, and the file or key that says so."""


class BadStopToken(HeadraceError):
    """Configuration: a text of ``rollout.stop`` is not one token of this model, or there is no end token at all."""

    permanent = True


@dataclass(frozen=True, slots=True)
class EndToken:
    """Holds a token that ends a response, and the sources that say so."""

    id: int
    text: str
    """Text of the token; empty if the files do not tell."""
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.text or 'a token'} ({self.id}: {', '.join(self.sources)})"


def stop_token_ids(model_path: Path, stop: Sequence[str] = ()) -> tuple[int, ...]:
    """The ids that the model's files and ``stop`` name, ascending; see ``end_tokens``."""
    return tuple(token.id for token in end_tokens(model_path, stop))


def end_tokens(model_path: Path, stop: Sequence[str] = (), further: Iterable[Claim] = ()) -> tuple[EndToken, ...]:
    """All tokens that end a response, by id. Reads JSON files of the HF directory, without torch or transformers.

    Raises:
        BadStopToken: the message names the file, or the text, and what to do.
    """
    try:
        names = _Names(model_path)
        claims = [*_of_model(model_path), *_of_tokenizer(model_path, names), *further]
        claims += [(_single_token(model_path, text), "rollout.stop") for text in stop]
        if not claims:
            raise BadStopToken(
                f"model.path: {model_path.name} names no eos_token_id in generation_config.json or config.json, and its"
                " tokenizer no eos_token; add one there, or name a token in rollout.stop"
            )
        sources: dict[int, list[str]] = {}
        for id_, source in claims:
            sources.setdefault(id_, []).append(source)
        return tuple(EndToken(id_, names.text(id_), tuple(dict.fromkeys(sources[id_]))) for id_ in sorted(sources))
    except ModelFileBroken as error:
        raise BadStopToken(f"model.path: {error}") from error


def _of_model(model_path: Path) -> list[Claim]:
    claims: list[Claim] = []
    for name in ("generation_config.json", "config.json"):
        config = read_model_file(model_path, name)
        value: object = config.get("eos_token_id")
        inner = config.get("text_config")
        if value is None and isinstance(inner, dict):
            value = cast("dict[str, Any]", inner).get("eos_token_id")
        for id_ in cast("list[object]", value if isinstance(value, list) else [] if value is None else [value]):
            if not isinstance(id_, int) or isinstance(id_, bool) or id_ < 0:
                raise BadStopToken(
                    f"model.path: {model_path / name}: eos_token_id has {id_!r}, expected the id of a token, or a list"
                )
            claims.append((id_, name))
    return claims


def _of_tokenizer(model_path: Path, names: _Names) -> list[Claim]:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = read_model_file(model_path, file).get("eos_token")
        text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and (id_ := names.id(text)) is not None:
            return [(id_, "eos_token of the tokenizer")]
    return []


class _Names:
    """Knows the tokens that the tokenizer's files list. Reads tokenizer.json, which is large, only if it has to."""

    def __init__(self, model_path: Path) -> None:
        self._path = model_path
        self._texts: dict[int, str] = {}
        for id_, token in read_model_file(model_path, "tokenizer_config.json").get("added_tokens_decoder", {}).items():
            self._texts[int(id_)] = str(token["content"])

    def text(self, id_: int) -> str:
        return self._texts.get(id_) or {i: text for text, i in self._all.items()}.get(id_, "")

    def id(self, text: str) -> int | None:
        listed = next((id_ for id_, known in self._texts.items() if known == text), None)
        return self._all.get(text) if listed is None else listed

    @cached_property
    def _all(self) -> dict[str, int]:
        content = read_model_file(self._path, "tokenizer.json")
        found: dict[str, int] = {}
        vocabulary = content.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict):
            found.update(cast("dict[str, int]", vocabulary))
        elif isinstance(vocabulary, list):  # a list of pieces with their scores
            found.update({str(cast("list[Any]", piece)[0]): i for i, piece in enumerate(cast("list[Any]", vocabulary))})
        return found | {str(token["content"]): int(token["id"]) for token in content.get("added_tokens", [])}


def _single_token(model_path: Path, text: str) -> int:
    from tokenizers import Tokenizer  # a compiled library, needed only where a job names further stop tokens

    path = model_path / "tokenizer.json"
    if not path.exists():
        raise BadStopToken(f"rollout.stop: {model_path.name} has no tokenizer.json, so {text!r} cannot be looked up")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # the file may have been saved with either
    tokenizer.no_padding()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise BadStopToken(
            f"rollout.stop: {text!r} is {len(ids)} tokens of this model, it must be one; use another text"
        )
    return ids[0]
