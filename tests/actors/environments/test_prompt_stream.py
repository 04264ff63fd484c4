"""Ordinal → prompt is a function of the job file: whoever restarts repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.prompt_stream import PromptStream
from tests.smallest_job import smallest_job


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory with a tokenizer that knows single letters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {chr(ord("a") + i): i for i in range(26)} | {"<unk>": 26}
    core: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def stream(tokenizer: Path, rows: list[Any], **data: Any) -> PromptStream:
    path = tokenizer / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    job = smallest_job(seed=3, data={"source": "jsonl", "path": str(path), **data})
    return PromptStream(job, tokenizer)


ROWS = [{"prompt": letter * 3, "answer": letter} for letter in "abcdefgh"]


def texts(read: dict[str, Any]) -> list[str]:
    return [text for _, _, text, _ in read["prompts"]]


def test_a_fresh_stream_reads_the_same_prompts_from_any_ordinal(tokenizer: Path) -> None:
    """Two epochs, read whole or from the middle by a stream that has just started."""
    whole = texts(stream(tokenizer, ROWS).read(0, 16))
    assert texts(stream(tokenizer, ROWS).read(5, 7)) == whole[5:12]
    assert sorted(whole[:8]) == sorted(whole[8:]) == sorted(row["prompt"] for row in ROWS)
    assert whole[:8] != whole[8:]


def test_prompts_carry_their_tokens_and_their_answer(tokenizer: Path) -> None:
    """The scorer gets what the row says, through the opaque context."""
    ordinal, ids, text, context = stream(tokenizer, ROWS, shuffle=False, template="x{prompt}").read(1, 1)["prompts"][0]
    assert (ordinal, text) == (1, "xbbb")
    assert np.frombuffer(ids, np.int32).tolist() == [23, 1, 1, 1]
    assert msgpack.unpackb(context) == ["bbb", "b", 1, {}]


def test_prompts_that_are_too_long_are_passed_over_and_ordinals_stay_dense(tokenizer: Path) -> None:
    """The third row does not fit; its neighbours follow on each other."""
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "ccccc"}, {"prompt": "d"}]
    read = stream(tokenizer, rows, shuffle=False, max_prompt_tokens=4, epochs=1).read(0, 4)
    assert texts(read) == ["a", "b", "d"]
    assert read["exhausted"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_ends_at_a_line_feed_only(tokenizer: Path, separator: str) -> None:
    """Unicode has further line separators, which are ordinary characters of a JSON string."""
    rows = [json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False) + "\r", json.dumps({"prompt": "c"})]
    assert texts(stream(tokenizer, rows, shuffle=False).read(0, 2)) == [f"a{separator}b", "c"]


def test_data_in_which_no_prompt_fits_is_refused(tokenizer: Path) -> None:
    """An endless search for a row would be a silent hang."""
    with pytest.raises(SourceUnreadable, match="max_prompt_tokens 2"):
        stream(tokenizer, ROWS, max_prompt_tokens=2).read(0, 1)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"prompt": "a"}, "{not json"], "line 2"),
        ([{"prompt": "a"}, "[1, 2]"], "line 2.*list.*JSON object"),
        ([{"question": "a"}], "row 0.*no column 'prompt'.*question"),
        ([{"prompt": 7}], "row 0.*int.*string"),
        ([], "no rows"),
    ],
)
def test_bad_rows_are_named(tokenizer: Path, rows: list[Any], complaint: str) -> None:
    """File, line or row, and what was expected."""
    with pytest.raises(SourceUnreadable, match=complaint):
        stream(tokenizer, rows, shuffle=False).read(0, 1)


def test_the_chat_template_is_compiled_once_for_all_prompts(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes ten times as long as the rest of a prompt, and a step has hundreds of them."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    compiled: list[Any] = []
    compile_it = ImmutableSandboxedEnvironment.from_string

    def note(environment: Any, source: Any, **settings: Any) -> Any:
        compiled.append(source)
        return compile_it(environment, source, **settings)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", note)
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    read = stream(tokenizer, ROWS, shuffle=False, chat=True).read(0, 2)
    assert texts(read) == ["<user>aaa", "<user>bbb"]
    assert len(compiled) == 1
