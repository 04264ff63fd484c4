"""Before anything starts: which tokens end a response, by whom, and whether text fits the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.jobs.stop_tokens import BadStopToken, end_tokens
from supervisors.preparation.model_text import ends_of_template, look_at_text
from supervisors.tree.errors import ModelTextUnusable
from tests.chat_tokenizer import CHATML, SPECIAL, TURN_END, save_tokenizer
from tests.smallest_job import smallest_job

END_ID, TURN_END_ID = SPECIAL.index("<end>"), SPECIAL.index(TURN_END)


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_all_files_that_name_an_end_token_are_believed(tmp_path: Path) -> None:
    """The model's files and the tokenizer's disagree in many published models."""
    save_tokenizer(tmp_path, eos_token=TURN_END)
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": 1}})
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 20]})
    ends = end_tokens(tmp_path, ["a"])
    assert [str(end) for end in ends] == [
        "<end> (1: generation_config.json, config.json)",
        "<|im_end|> (5: eos_token of the tokenizer)",
        f"{ends[2].text} (20: generation_config.json)",
        f"a ({ends[3].id}: rollout.stop)",
    ]


def test_an_end_token_may_be_an_object_or_stand_in_an_older_file(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "</s>"}}})
    write(tmp_path, "special_tokens_map.json", {"eos_token": {"content": "</s>", "lstrip": False}})
    assert [str(end) for end in end_tokens(tmp_path)] == ["</s> (7: eos_token of the tokenizer)"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config.json", '{"eos_token_id": [1,', r"generation_config\.json cannot be read as JSON"),
        ("generation_config.json", {"eos_token_id": "</s>"}, r"generation_config\.json: eos_token_id has '</s>'"),
        ("config.json", {"eos_token_id": [1, None]}, r"config\.json: eos_token_id has None"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds a list"),
    ],
)
def test_a_broken_file_of_end_tokens_is_a_sentence(tmp_path: Path, name: str, content: Any, said: str) -> None:
    write(tmp_path, name, content)
    with pytest.raises(BadStopToken, match=said):
        end_tokens(tmp_path)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, [END_ID, TURN_END_ID]),
        (CHATML.replace("m['content'] +", "m['content'] + '\\n' +"), [END_ID, TURN_END_ID]),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}", [END_ID, END_ID]),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}", [END_ID]),
        ("{{ raise_exception('only with tools') }}", [END_ID]),
    ],
)
def test_what_the_template_writes_behind_an_answer_ends_a_response(
    tmp_path: Path, template: str, ends: list[int]
) -> None:
    """A word does not, or no answer could hold it."""
    tokenizer = save_tokenizer(tmp_path, template)
    assert [id_ for id_, _ in ends_of_template(tokenizer, {})] == ends


async def test_the_ends_are_told_with_their_sources_and_so_is_a_limit_of_prompts(tmp_path: Path) -> None:
    """The model has 64 positions and a chat template, which a process of its own looks at."""
    save_tokenizer(tmp_path)
    write(tmp_path, "config.json", {"eos_token_id": END_ID, "max_position_embeddings": 64})
    (tmp_path / "logs").mkdir()
    ends, said = await look_at_text(smallest_job(rollout={"max_tokens": 16}), tmp_path, tmp_path)
    assert [end.id for end in ends] == [END_ID, TURN_END_ID]
    assert said == [
        "a response ends at <end> (1: config.json, eos_token of the tokenizer) or at <|im_end|> (5: the chat template)",
        (
            "prompts may have up to 48 tokens: the model has 64 positions (max_position_embeddings),"
            " of which rollout.max_tokens takes 16; longer ones are left out"
        ),
    ]


async def test_a_tokenizer_that_transformers_cannot_load_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    (tmp_path / "logs").mkdir()
    with pytest.raises(ModelTextUnusable, match="transformers cannot load its tokenizer") as refused:
        await look_at_text(smallest_job(), tmp_path, tmp_path)
    assert refused.value.permanent


async def test_a_hub_model_that_is_too_short_is_refused_once_it_is_there(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"eos_token_id": 1, "max_position_embeddings": 64})
    with pytest.raises(ModelTextUnusable, match=r"rollout\.max_tokens: 64 is longer than the model: it has 64 pos"):
        await look_at_text(smallest_job(rollout={"max_tokens": 64}), tmp_path, tmp_path)


async def test_responses_of_an_evaluation_must_fit_the_model_too(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"eos_token_id": 1, "max_position_embeddings": 64})
    job = smallest_job(rollout={"max_tokens": 16}, eval={"data": {"path": "held_out.jsonl"}, "max_tokens": 64})
    with pytest.raises(ModelTextUnusable, match=r"eval\.max_tokens: 64 is longer than the model: it has 64 pos"):
        await look_at_text(job, tmp_path, tmp_path)
