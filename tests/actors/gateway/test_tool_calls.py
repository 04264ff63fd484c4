"""Calls of tools in what a model says: each is read whole, or is a call that the model hears to be none."""

from __future__ import annotations

import json

import pytest

from actors.gateway.rendering import Chat, ChatTemplate
from actors.gateway.replies import Reply, ReplyReader
from actors.gateway.requests import chat_of
from actors.gateway.tool_calls import OPEN_CALL, UNREADABLE_CALLS, ToolCall, split_calls
from tests.actors.gateway.bpe_tokenizer import CHATML, END, THINKING, make_tokenizer

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {
            "properties": {
                "cmd": {"type": "string"},
                "times": {"type": "integer"},
                "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            },
        },
    },
}
USER = {"role": "user", "content": "Do it."}


def calls_of(text: str) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in split_calls(text, [SHELL])[1]]


def tagged(*texts: str) -> str:
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)


def xml(**given: str) -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<function=shell>\n{told}</function>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "shell", "arguments": {"cmd": "echo </tool_call> end"}}', {"cmd": "echo </tool_call> end"}),
        ('{"name": "shell", "arguments": {"cmd": "<tool_call> { \\" }"}}', {"cmd": '<tool_call> { " }'}),
        ('{"name": "shell", "arguments": "{\\"cmd\\": \\"ls\\"}"}', {"cmd": "ls"}),
        ('{"name": "shell", "arguments": ""}', {}),
        ('{"name": "shell", "arguments": null}', {}),
        ('{"name": "shell", "arguments": []}', {}),
        ('{"name": "shell", "arguments": {}}', {}),
        ('{"name": "shell"}', {}),
        ('{"name": "shell", "parameters": {"cmd": "ls"}}', {"cmd": "ls"}),
        (xml(), {}),
        (xml(cmd="12", times="3"), {"cmd": "12", "times": 3}),
        (xml(cmd="echo </parameter></function> </tool_call"), {"cmd": "echo </parameter></function> </tool_call"}),
        (xml(note="null", other="[1]"), {"note": None, "other": [1]}),
        (xml(cmd="a").replace("\n", ""), {"cmd": "a"}),
    ],
)  # fmt: skip
def test_a_call_is_read_whole_whatever_its_arguments_hold(text: str, arguments: dict) -> None:
    assert split_calls(tagged(text), [SHELL])[0] == ""
    assert calls_of(tagged(text)) == [("shell", arguments)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"name": "shell", "arguments": {"cmd": "ls </tool_call> a"}', "shell"),  # a brace is missing
        ('{"name": "shell", "arguments": {"cmd": "ls"}}}', "shell"),
        ('{"name": "shell", "arguments": {"cmd": "l\ns"}}', "shell"),
        ('{"name": "shell", "arguments": {"cmd": NaN}}', ""),
        ('{"name": "shell", "arguments": "ls -l"}', "shell"),
        ('{"name": "shell", "arguments": [1]}', "shell"),
        ('{"arguments": {"cmd": "ls"}}', ""),
        ("{" * 100_000, ""),
        ("shell(ls)", ""),
        ("", ""),
        ("<function=shell>\n<parameter=cmd>\nls\n</function>", "shell"),
        ("<function=shell>\n<parameter=cmd>\nrm", "shell"),
    ],
)
def test_a_call_that_cannot_be_read_is_no_answer_but_a_call_without_an_object(text: str, name: str) -> None:
    content, calls = split_calls("I look. " + tagged(text) + "Done.", [SHELL])
    assert (content.split(), [call.name for call in calls]) == (["I", "look.", "Done."], [name])
    try:
        assert not isinstance(json.loads(calls[0].arguments), dict) or not name
    except (ValueError, RecursionError):
        pass


def test_a_call_that_was_cut_off_is_none_and_tags_in_prose_are_text() -> None:
    assert split_calls('<tool_call>{"name": "shell", "argu', [SHELL])[1][0].name == "shell"
    assert calls_of('<tool_call>{"name": "shell"}') == [("shell", {})]  # complete: only the tag is missing
    for text in ("I use <tool_call> here.", "</tool_call>", "a < b", ""):
        assert split_calls(text, [SHELL]) == (text, ())


def test_parallel_calls_are_read_in_order_and_the_text_between_them_is_kept() -> None:
    one, two = '{"name": "shell", "arguments": {"cmd": "1"}}', '{"name": "shell", "arguments": {"cmd": "2"}}'
    both = [("shell", {"cmd": "1"}), ("shell", {"cmd": "2"})]
    for text in (
        tagged(one, two), tagged(f"{one}\n{two}"), tagged(f"[{one}, {two}]"),
        f"<tool_call>{one}<tool_call>{two}</tool_call>",
        tagged("<function=shell><parameter=cmd>1</parameter></function><function=shell><parameter=cmd>2</parameter></function>"),
    ):  # fmt: skip
        assert calls_of(text) == both
    content, calls = split_calls(f"First {tagged(one)} then {tagged('{')} and {tagged(two)} now.", [SHELL])
    assert (content.split(), [call.name for call in calls]) == (
        ["First", "then", "and", "now."],
        ["shell", "", "shell"],
    )


@pytest.mark.parametrize("broken", ["{", "<function=a>", '{"a": "', "{</tool_call>"])
def test_a_turn_of_nothing_but_broken_calls_is_looked_through_for_the_first_of_them_only(broken: str) -> None:
    content, calls = split_calls(f"Again: {OPEN_CALL}{broken}" * 10_000, [SHELL])
    assert len(calls) == UNREADABLE_CALLS + 1
    assert len({call.arguments for call in calls[:-1]}) == 1
    assert calls[-1].arguments.count(OPEN_CALL) >= 10_000 - 2 * UNREADABLE_CALLS  # a string may hold the next tag
    assert set(content.split()) == {"Again:"}


def test_tags_in_prose_are_text_however_many_they_are() -> None:
    text = f"{OPEN_CALL} is a tag. " * 10_000
    assert split_calls(text, [SHELL]) == (text, ())


def read(tokenizer, text: str, *, opened: bool = False, tools=(SHELL,)) -> Reply:
    reader = ReplyReader(tokenizer, [int(tokenizer.convert_tokens_to_ids(END))], 16, 1 << 16)
    tokens = tokenizer(text + END, add_special_tokens=False)["input_ids"]
    return reader.read(tokens, opened=opened, chat=Chat((USER,), tuple(tools)))


def test_calls_between_reasoning_and_text_are_read_and_those_that_are_only_thought_of_are_not() -> None:
    tokenizer = make_tokenizer(THINKING)
    call, made = tagged('{"name": "shell", "arguments": {"cmd": "</think>"}}'), ToolCall("shell", '{"cmd": "</think>"}')
    told = read(tokenizer, f"<think>\nhm {tagged('{}')}\n</think>\n\nI look. {call} So.")
    assert (told.content.split(), told.calls) == (["I", "look.", "So."], (made,))
    assert "hm" in str(told.reasoning)
    unclosed = read(tokenizer, "hm " + tagged('{"name": "shell"}'), opened=True)
    assert (unclosed.content, unclosed.reasoning, unclosed.calls) == ("", "hm ", (ToolCall("shell", "{}"),))
    assert read(tokenizer, call, tools=()).content.strip() == call.strip()


def test_the_tokenizers_own_response_template_is_used_and_what_does_not_fit_it_is_a_call_that_went_wrong() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "<|im_start|>call ", "close": "<|im_start|>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }  # fmt: skip
    told = read(tokenizer, 'I look. <|im_start|>call {"name": "shell", "arguments": {"cmd": "ls"}}<|im_start|>')
    assert (told.content.strip(), told.calls) == ("I look.", (ToolCall("shell", '{"cmd": "ls"}'),))
    assert read(tokenizer, "Just text.") == Reply("Just text.")
    (wrong,) = read(tokenizer, 'I look. <|im_start|>call {"name": "shell", "arguments": {').calls
    assert wrong.name == "shell"


def test_a_call_that_could_not_be_read_comes_back_to_every_template_as_the_text_that_it_was() -> None:
    strict = CHATML.replace(
        "{{ call.function.arguments | tojson }}", "{% for k, v in call.function.arguments | items %}{{ k }}{% endfor %}"
    )
    said = '{"name": "shell", "arguments": {"cmd": "ls"}'
    calls = [{"id": "1", "type": "function", "function": {"name": "shell", "arguments": said}}]
    chat = chat_of(
        [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "Error"}],
        [SHELL],
        None,
    )
    for template in (strict, CHATML):
        tokenizer = make_tokenizer(template)
        text = tokenizer.decode(ChatTemplate(tokenizer, {}, 8, 1 << 16, 1 << 16).render(chat))
        assert f"<tool_call>\n{said}\n</tool_call>" in text
