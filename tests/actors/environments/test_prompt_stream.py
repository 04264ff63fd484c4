"""Ordinal → prompt is a function of the job file: whoever restarts repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.prompt_stream import EMPTY, REFUSED, TOO_LONG, PromptStream
from actors.environments.prompts.sources import open_source
from actors.environments.scoring.examples import Example, Examples
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


def stream(tokenizer: Path, rows: list[Any], run_dir: Path | None = None, **data: Any) -> PromptStream:
    path = tokenizer / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    reward = {"kind": "function", "function": "unused:score"}
    job = smallest_job(seed=3, data={"source": "jsonl", "path": str(path), **data}, reward=reward)
    return PromptStream(job, tokenizer, run_dir)


def test_a_planned_job_is_told_how_long_the_answers_are(tokenizer: Path) -> None:
    """Of a row without an answer nothing is said, and other jobs do not count."""
    rows = [{"prompt": "a", "answer": "abc"}, {"prompt": "b", "answer": 42}, {"prompt": "c"}]
    plain = stream(tokenizer, rows, shuffle=False)
    job = smallest_job(
        data={"source": "jsonl", "path": str(tokenizer / "rows.jsonl"), "shuffle": False},
        reward={"kind": "function", "function": "unused:score"},
        rollout={"length_ranking": "history"}, scheduling={"policy": "planned", "workers_max": 2},
    )  # fmt: skip
    planned = PromptStream(job, tokenizer).read(0, 3)["prompts"]
    assert [prompt[4:] for prompt in planned] == [[3], [2], []]
    assert [prompt[:4] for prompt in planned] == plain.read(0, 3)["prompts"]


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
    source = open_source(smallest_job(data={"source": "jsonl", "path": str(tokenizer / "rows.jsonl")}).data, 3)
    assert Examples({"": source}).of(context) == Example("bbb", "b", 1, {})


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
    with pytest.raises(SourceUnreadable, match="at most 2 tokens"):
        stream(tokenizer, ROWS, max_prompt_tokens=2).read(0, 1)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"prompt": "a"}, "{not json"], "line 2"),
        ([{"prompt": "a"}, "[1, 2]"], "line 2.*list.*JSON object"),
        ([{"question": "a"}], "row 0.*no column 'prompt'.*question"),
        ([{"prompt": 7}], "row 0.*int.*string"),
        ([{"prompt": "a"}] * 30 + [{"prompt": None}], r"row 30 \(line 31\): column 'prompt' is null"),
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


class Counted:
    """Counts what a stream tokenises."""

    def __init__(self, stream: PromptStream) -> None:
        self.texts: list[Any] = []
        codec = stream._codec
        encode = codec.encode

        def counted(prompt: Any) -> Any:
            self.texts.append(prompt)
            return encode(prompt)

        codec.encode = counted  # type: ignore[method-assign]


FILTERED = [{"prompt": "abcdefgh"[: 1 + i % 8]} for i in range(40)]


def test_a_stream_that_starts_anew_tokenises_only_what_it_is_asked_for(tokenizer: Path, tmp_path: Path) -> None:
    """A resumed run is at its thousandth step: the rows before it have been looked at once, and that is enough."""
    settings: dict[str, Any] = {"max_prompt_tokens": 4}
    whole = texts(stream(tokenizer, FILTERED, **settings).read(0, 55))
    first = stream(tokenizer, FILTERED, tmp_path, **settings)
    assert texts(first.read(0, 10)) == whole[:10]
    resumed = stream(tokenizer, FILTERED, tmp_path, **settings)
    counted = Counted(resumed)
    assert texts(resumed.read(8, 2)) == whole[8:10] and len(counted.texts) == 2
    assert texts(resumed.read(10, 45)) == whole[10:]
    assert texts(stream(tokenizer, FILTERED, tmp_path, **settings).read(40, 10)) == whole[40:50]
    first.read(0, 1)
    counted = Counted(first)
    assert texts(first.read(30, 2)) == whole[30:32] and len(counted.texts) == 2  # another process has looked meanwhile


def test_what_was_seen_of_other_data_settings_or_tokenizer_does_not_count(tokenizer: Path, tmp_path: Path) -> None:
    """Each of them decides which rows fit."""
    stream(tokenizer, FILTERED, tmp_path, max_prompt_tokens=4).read(0, 10)
    assert not stream(tokenizer, FILTERED, tmp_path, max_prompt_tokens=4).read(0, 1)["replaced"]
    again = stream(tokenizer, FILTERED, tmp_path, max_prompt_tokens=6)
    assert again.read(0, 1)["seen"] < 10 and not again.read(0, 1)["replaced"]
    other = stream(tokenizer, FILTERED[1:], tmp_path, max_prompt_tokens=6)
    assert other.read(0, 1)["replaced"]


def test_a_file_of_what_was_seen_that_is_torn_costs_time_only(tokenizer: Path, tmp_path: Path) -> None:
    """Cut at every byte, and with a line of another process in it."""
    whole = texts(stream(tokenizer, FILTERED, max_prompt_tokens=4).read(0, 30))
    stream(tokenizer, FILTERED, tmp_path, max_prompt_tokens=4).read(0, 18)
    file = tmp_path / "prompt_rows.jsonl"
    body = file.read_bytes()
    for cut in range(0, len(body), 7):
        file.write_bytes(body[:cut])
        assert texts(stream(tokenizer, FILTERED, tmp_path, max_prompt_tokens=4).read(12, 12)) == whole[12:24], cut
        file.write_bytes(body + body[cut:])
        assert texts(stream(tokenizer, FILTERED, tmp_path, max_prompt_tokens=4).read(12, 12)) == whole[12:24], cut


def test_a_long_search_returns_how_far_it_is_and_goes_on_from_there(tokenizer: Path, tmp_path: Path) -> None:
    """Rows that do not fit come first. Each answer gets on by a row at least, though a slice has no time at all."""
    rows = [{"prompt": "abcde"}] * 300 + [{"prompt": "a"}, {"prompt": "b"}]
    found: list[str] = []
    seen: list[int] = []
    for _ in range(400):
        searching = stream(
            tokenizer, rows, tmp_path, shuffle=False, max_prompt_tokens=2, epochs=1
        )  # a new process each
        read = searching.read(len(found), 3 - len(found), slice_s=0.0)
        found += texts(read)
        seen.append(read["seen"])
        if read["exhausted"]:
            break
    assert found == ["a", "b"] and seen == sorted(seen)
    assert read["passed"] == {TOO_LONG: 300}


def test_rows_that_are_passed_over_are_counted_by_reason_with_the_first_of_each(tokenizer: Path) -> None:
    """Refused by the template, without tokens, too long; half a surrogate pair is refused by the tokenizer."""
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not this') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    prompts = ["aa", "bad", "", "abcdefgh", "x\ud83d", "bb"]
    read = stream(
        tokenizer, [{"prompt": p} for p in prompts], shuffle=False, chat=True, max_prompt_tokens=5, epochs=1
    ).read(0, 9)
    assert texts(read) == ["aa", "bb"] and read["exhausted"]
    assert read["passed"] == {REFUSED: 2, EMPTY: 1, TOO_LONG: 1}
    assert "row 1 (line 2)" in read["first"][REFUSED] and "not this" in read["first"][REFUSED]
    assert "row 2 (line 3)" in read["first"][EMPTY] and "row 3 (line 4): 8 tokens" in read["first"][TOO_LONG]


def test_data_that_template_and_tokenizer_refuse_altogether_end_the_search_with_the_first_row(tokenizer: Path) -> None:
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + '.' }}{% endfor %}")
    rows = [{"prompt": [{"role": "user", "content": None}]}] * 4
    with pytest.raises(SourceUnreadable, match=r"none of the 4 prompts can be used.*row 0 \(line 1\)"):
        stream(tokenizer, rows, shuffle=False).read(0, 1)
