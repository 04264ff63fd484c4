"""Stop texts are found with the token that completes them, as if the whole text were decoded at each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environments.errors import SourceUnreadable
from actors.sampling.stop_texts import Decode, StopTexts, decoder_of
from tests.byte_level_tokenizer import save_byte_level_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_level_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def decode(directory: Path) -> Decode:
    return decoder_of(directory)


def found_at(decode: Decode, texts: Sequence[str], tokens: Sequence[int]) -> int:
    stops = StopTexts(decode, texts)
    return next((at for at, token in enumerate(tokens) if stops.completed_by(token)), -1)


def found_in_the_whole(decode: Decode, texts: Sequence[str], tokens: Sequence[int]) -> int:
    for at in range(len(tokens)):
        text = decode(tokens[: at + 1]).rstrip("\N{REPLACEMENT CHARACTER}")
        if any(stop in text for stop in texts):
            return at
    return -1


CASES = [
    ("a text of several tokens", "What is 37 + 2? Answer: 39.", ["37 + 2"]),
    ("one that ends within a token", "Answer with the number alone.", ["ith t"]),
    ("one of several, whichever comes first", "user assistant system", ["system", "assistant"]),
    ("characters of several tokens", "in 東京 und Größe", ["京"]),
    ("one that begins with such a character", "in 東京 und Größe", ["京 und Gr"]),
    ("a special token", "yes<|im_end|>no", ["<|im_end|>"]),
    ("one across a special token", "yes<|im_end|>no", ["s<|im_end|>n"]),
    ("one that never comes", "user assistant", ["nobody"]),
]


@pytest.mark.parametrize(("text", "stops"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_text_is_found_with_the_token_that_completes_it(
    directory: Path, decode: Decode, text: str, stops: list[str]
) -> None:
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    at = found_at(decode, stops, tokens)
    assert at == found_in_the_whole(decode, stops, tokens)
    assert (at >= 0) == any(stop in text for stop in stops)
    if at >= 0:
        assert not any(stop in decode(tokens[:at]) for stop in stops)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 399), min_size=1, max_size=40), st.data())
def test_any_tokens_end_where_the_whole_text_first_holds_a_stop(
    decode: Decode, tokens: list[int], data: st.DataObject
) -> None:
    text = decode(tokens).replace("\N{REPLACEMENT CHARACTER}", "")
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[begin : begin + data.draw(st.integers(1, 12))] or "nothing"
    assert found_at(decode, [stop, "no such text"], tokens) == found_in_the_whole(decode, [stop], tokens)


def test_a_token_costs_the_same_however_long_the_sequence_is(decode: Decode) -> None:
    longest = 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    invalid, letter = 255, 60
    stops = StopTexts(counted, ["no such text"])
    for at in range(2000):
        stops.completed_by(letter if at < 1000 else invalid)
    assert longest <= 2 * 66
    assert len(stops._tail) < len("no such text")


def test_ids_without_a_text_have_none_and_a_model_without_a_tokenizer_is_told_of(
    decode: Decode, tmp_path: Path
) -> None:
    assert decode([10**6, 60]) == decode([60])
    with pytest.raises(SourceUnreadable, match="save the model's tokenizer beside it"):
        decoder_of(tmp_path)
