"""Byte-level BPE with SmolLM2's special tokens and chat template: ids and texts are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environments.prompts.tokenizer import TextCodec
from actors.jobs.stop_tokens import end_tokens
from configs.schema import DataConfig
from tests.byte_level_tokenizer import SPECIAL, SYSTEM, save_byte_level_tokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    [
        "37 + 2 =  39\n",
        "naïve Größe",
        "東京 👩‍🚀",
        "a<|im_end|>\n<|im_start|>assistant\n",
        " <|endoftext|> ",
        "\u0301",
        "",
    ]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Its directory, and the tokenizer that AutoTokenizer makes of it."""
    directory = tmp_path_factory.mktemp("byte-level")
    return directory, save_byte_level_tokenizer(directory)


@pytest.fixture(scope="module")
def codecs(made: tuple[Path, Any]) -> dict[bool, TextCodec]:
    """With and without special tokens in responses."""
    data = DataConfig(source="jsonl", path="unused.jsonl", chat=True)
    return {shown: TextCodec(made[0], data, special_tokens=shown) for shown in (False, True)}


@settings(max_examples=100, deadline=None)
@given(question=TEXTS, system=st.none() | TEXTS)
def test_ids_of_a_chat_are_those_of_apply_chat_template(
    made: tuple[Path, Any], codecs: dict[bool, TextCodec], question: str, system: str | None
) -> None:
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text, ids = codecs[False].encode(messages if system is not None else question)
    wanted = made[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.tolist() == wanted
    assert text == made[1].apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert (SYSTEM in text) == (system is None or SYSTEM in system)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shown=st.booleans())
def test_any_ids_are_decoded_as_transformers_decodes_them(
    made: tuple[Path, Any], codecs: dict[bool, TextCodec], data: st.DataObject, shown: bool
) -> None:
    """A policy at the start of a run draws bytes that are no characters, and special tokens in mid-sentence."""
    ids = data.draw(st.lists(st.integers(0, len(made[1]) - 1), max_size=30))
    assert codecs[shown].decode(np.array(ids, np.int32)) == made[1].decode(ids, skip_special_tokens=not shown)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_a_response_that_is_cut_within_a_character_reads_as_it_does_in_transformers(
    made: tuple[Path, Any], codecs: dict[bool, TextCodec], text: str
) -> None:
    """Whole, it is the text itself, however many tokens its characters are split over."""
    ids = made[1](text)["input_ids"]
    assert codecs[True].decode(ids) == text
    for end in range(len(ids)):
        part = codecs[True].decode(ids[:end])
        assert part == made[1].decode(ids[:end])


def test_characters_are_split_over_tokens_here(made: tuple[Path, Any]) -> None:
    assert len(made[1]("👩‍🚀")["input_ids"]) > 3


def test_a_response_ends_at_the_end_of_a_turn(made: tuple[Path, Any]) -> None:
    assert [end.id for end in end_tokens(made[0])] == [SPECIAL.index("<|im_end|>")]
