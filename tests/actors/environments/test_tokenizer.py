"""Text is what transformers makes of it: ids of prompts, texts of responses, refusals in the template's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.environments.errors import PromptRefused, SourceUnreadable
from actors.environments.prompts.prompt_stream import PromptStream
from actors.environments.prompts.tokenizer import TextCodec
from configs.schema import DataConfig
from tests.chat_tokenizer import CHATML, END, TURN, TURN_END, VOCABULARY, save_tokenizer
from tests.smallest_job import smallest_job

TEMPLATES: dict[str, str | dict[str, str]] = {
    "plain": CHATML,
    "date": "{{ strftime_now('%d %b %Y') }}\n" + CHATML,
    "generation": CHATML.replace("m['content']", "m['content']").replace(
        "{{ '<|im_start|>' + m['role']",
        "{% generation %}{{ m['role'] }}{% endgeneration %}{{ '<|im_start|>' + m['role']",
        1,
    ),
    "break": CHATML.replace("{% endfor %}", "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}", 1),
    "json": CHATML.replace("m['content']", "(m['content'] | tojson(indent=1))"),
    "named": {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML},
    "parts": CHATML.replace(
        "m['content']", "(m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join)"
    ),
    "specials": "{{ bos_token }}" + CHATML + "{{ eos_token }}",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A directory for each template, and the tokenizer that AutoTokenizer makes of it."""
    from transformers import AutoTokenizer

    made: dict[str, tuple[Path, Any]] = {}
    for name, template in TEMPLATES.items():
        directory = tmp_path_factory.mktemp(name)
        save_tokenizer(directory, template)
        made[name] = directory, AutoTokenizer.from_pretrained(directory)
    return made


def codec_of(directory: Path, *, special_tokens: bool = False, **data: Any) -> TextCodec:
    return TextCodec(directory, DataConfig(source="jsonl", **data), special_tokens=special_tokens)


def text_parts(template: str) -> st.SearchStrategy[Any]:
    words = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from([TURN_END, "  x\n", "<a & 'b'>", ""])
    return (
        words | st.lists(st.builds(lambda text: {"type": "text", "text": text}, words), max_size=2)
        if (template == "parts")
        else words
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ids_and_text_of_a_chat_are_those_of_apply_chat_template(
    tokenizers: dict[str, tuple[Path, Any]], data: st.DataObject
) -> None:
    """Any template, any messages: equal, or refused where transformers raises."""
    name = data.draw(st.sampled_from(sorted(TEMPLATES)))
    directory, auto = tokenizers[name]
    roles = data.draw(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=4))
    messages = [{"role": role, "content": data.draw(text_parts(name))} for role in roles]
    prefill = roles[-1] == "assistant"
    how = {"add_generation_prompt": not prefill, "continue_final_message": prefill}
    try:
        wanted = auto.apply_chat_template(messages, return_dict=False, **how)
        text = auto.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:  # whatever it raises, its words are to be read
        with pytest.raises(PromptRefused) as refused:
            codec_of(directory).encode(messages)
        assert str(error) in str(refused.value)
        return
    assert codec_of(directory).encode(messages)[0] == text
    assert codec_of(directory).encode(messages)[1].tolist() == wanted


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, VOCABULARY + 50), max_size=30), shown=st.booleans())
def test_a_response_is_decoded_as_transformers_decodes_it(
    tokenizers: dict[str, tuple[Path, Any]], ids: list[int], shown: bool
) -> None:
    """Ids that no text has, of a vocabulary padded beyond the tokenizer's, are no text."""
    directory, auto = tokenizers["plain"]
    known = [i for i in ids if i < VOCABULARY]
    wanted = auto.decode(known, skip_special_tokens=not shown)
    assert codec_of(directory, special_tokens=shown).decode(np.array(ids, np.int32)) == wanted


def test_special_tokens_are_hidden_unless_they_are_asked_for(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ids = codec_of(tmp_path).encode(f"{TURN}a{END}")[1]
    assert codec_of(tmp_path).decode(ids) == "a"
    assert codec_of(tmp_path, special_tokens=True).decode(ids) == f"{TURN}a{END}"


def test_spaces_are_cleaned_up_where_the_tokenizer_says_so(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, clean_up_tokenization_spaces=True)
    assert codec_of(tmp_path).decode(codec_of(tmp_path).encode("a , b .")[1]) == "a, b."


def test_what_a_tokenizer_file_carries_from_earlier_calls_has_no_influence(tmp_path: Path) -> None:
    """Somebody truncated to 2 and padded to 8 before saving; the end of a prompt is the question."""
    save_tokenizer(tmp_path)
    whole = codec_of(tmp_path).encode("1+1=")[1]
    file = tmp_path / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": truncation, "padding": padding}))
    assert codec_of(tmp_path).encode("1+1=")[1].tolist() == whole.tolist()
    assert len(codec_of(tmp_path, chat=True).encode("1+1=")[1]) > 8


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("x\ud83d", "tokenizer refuses the prompt"),
        ([{"role": "user", "content": None}], "NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "list"),
        ([{"role": "wizard", "content": "hi"}], "no wizards here"),
        ([], "empty conversation"),
        (["hi"], "refuses the prompt"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_refused_in_the_words_of_who_refuses(
    tmp_path: Path, prompt: Any, said: str
) -> None:
    wizards = "{% if messages[0]['role'] == 'wizard' %}{{ raise_exception('no wizards here') }}{% endif %}"
    save_tokenizer(tmp_path, wizards + CHATML)
    with pytest.raises(PromptRefused, match=said) as refused:
        codec_of(tmp_path).encode(prompt)
    assert refused.value.permanent


def test_a_refused_row_is_passed_over_and_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"q": text, "answer": ""}) for text in ("a", "x\ud83d")))
    job = smallest_job(data={"path": str(rows), "shuffle": False, "prompt_key": "q", "epochs": 1})
    read = PromptStream(job, tmp_path).read(0, 2)
    assert [text for _, _, text, _ in read["prompts"]] == ["a"] and read["exhausted"]
    assert list(read["first"].values()) == [
        "row 1 (line 2): half of a surrogate pair stands in it, which is no character"
    ]


def test_a_system_prompt_is_for_prompts_that_have_none_of_their_own(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    codec = codec_of(tmp_path, chat=True, system_prompt="be brief")
    own = [{"role": "system", "content": "be long"}, {"role": "user", "content": "q"}]
    assert codec.encode("q")[0].startswith(f"{TURN}system\nbe brief{TURN_END}\n{TURN}user\nq")
    assert codec.encode(own)[0].startswith(f"{TURN}system\nbe long{TURN_END}\n{TURN}user\nq")


def test_the_model_goes_on_with_a_last_message_of_the_assistant(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]
    assert codec_of(tmp_path).encode(chat)[0].endswith(f"{TURN}assistant\n<think>")


def test_further_arguments_reach_the_template(tmp_path: Path) -> None:
    template = {"default": "{{ enable_thinking }}" + CHATML, "tool_use": "tools {{ tools | length }}" + CHATML}
    save_tokenizer(tmp_path, template)
    assert codec_of(tmp_path, chat=True, chat_template_kwargs={"enable_thinking": False}).encode("q")[0][:5] == "False"
    tools = {"tools": [{"name": "add"}], "chat_template": "tool_use"}
    assert codec_of(tmp_path, chat=True, chat_template_kwargs=tools).encode("q")[0].startswith("tools 1")


def test_chat_without_a_template_is_refused_at_once(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    with pytest.raises(SourceUnreadable, match=r"data\.chat"):
        codec_of(tmp_path, chat=True)


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreadable, match=r"model\.path .*transformers cannot load its tokenizer"):
        codec_of(tmp_path)


def test_the_tokenizer_of_another_model_is_refused_with_figures(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    with pytest.raises(SourceUnreadable, match=f"ids go up to {VOCABULARY - 1}, and the model's vocab_size is 50"):
        codec_of(tmp_path).check_vocabulary()


def test_an_added_token_that_the_model_lacks_is_refused_where_a_prompt_has_it(tmp_path: Path) -> None:
    """Text models come with tokens for images; a pad token is often added without a row for it."""
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    codec = codec_of(tmp_path)
    codec.check_vocabulary()
    assert codec.encode("a")[1].size == 1
    with pytest.raises(
        PromptRefused, match=f"'<image>' \\({VOCABULARY}\\), and the model's vocab_size is {VOCABULARY}"
    ):
        codec.encode("a<image>")


def test_prompts_that_leave_no_room_for_the_response_are_passed_over(tmp_path: Path) -> None:
    """10 positions, of which the response takes 6."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"n_positions": 10}')
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text, "answer": ""}) for text in ("a", "abcde", "abcd")))
    data = {"source": "jsonl", "path": str(rows), "shuffle": False, "epochs": 1}
    read = PromptStream(smallest_job(data=data, rollout={"max_tokens": 6}), tmp_path).read(0, 3)
    assert [text for _, _, text, _ in read["prompts"]] == ["a", "abcd"]
    with pytest.raises(SourceUnreadable, match=r"3 without room for rollout\.max_tokens"):
        PromptStream(smallest_job(data=data, rollout={"max_tokens": 10}), tmp_path).read(0, 1)


def test_a_tokenizer_in_plain_python_is_used_as_transformers_uses_it(tmp_path: Path) -> None:
    """ByT5 has bytes for tokens and no tokenizer.json; asked for an id that it lacks, it would make a character up."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained(tmp_path)
    codec = codec_of(tmp_path)
    assert codec.encode("né")[1].tolist() == tokenizer("né")["input_ids"]
    assert codec.decode([*codec.encode("né")[1], 5000]) == "né"
