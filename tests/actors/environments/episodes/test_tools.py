"""Tools: what goes wrong in a call is text that the model reads; servers speak MCP; output and time are bounded."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest

from actors.environments.episodes.errors import ToolServerDied
from actors.environments.episodes.python_loop import PythonDriver, ToolEnvironment
from actors.environments.episodes.tools import Toolbox, Tools
from configs.limits import DEFAULT_LIMITS
from configs.task_schema import DataConfig

HERE = "tests.actors.environments.episodes.played_environments"

SERVER = textwrap.dedent('''
    """A server of the library's own: what is unmodified speaks so."""
    import os, time
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("played")
    notes: list[str] = []

    @server.tool()
    def note(text: str) -> str:
        """Keep a note."""
        notes.append(text)
        return "; ".join(notes)

    @server.tool()
    def long(characters: int) -> str:
        return "m" * characters

    @server.tool()
    def die() -> str:
        os._exit(4)

    @server.tool()
    def fail() -> str:
        raise ValueError("nothing there")

    @server.tool()
    def wait(seconds: float) -> str:
        time.sleep(seconds)
        return "at last"

    server.run("stdio")
''')


def call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": text}}


def said(toolbox: Toolbox, name: str, arguments: Any) -> str:
    answer = toolbox.answer(call(name, arguments))
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "c1")
    return answer["content"]


def test_a_function_is_a_tool_by_its_hints_and_its_docstring() -> None:
    toolbox = Tools([f"{HERE}:add"], 1.0).opened()
    (schema,) = toolbox.schemas
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["b"]["type"] == "integer"
    assert said(toolbox, "add", {"a": 1, "b": 2}) == "3"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("subtract", {}, "Error: there is no tool 'subtract'. There are: add, slow, loud, broken."),
        ("add", "{a: 1", "Error: the arguments of add are no JSON"),
        ("", '{"arguments": {}}', "Error: the call cannot be read"),
        ("add", "[1]", "must be a JSON object"),
        ("add", {"a": "one"}, "do not fit: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 1}, "do not fit: c: Unexpected keyword argument"),
        ("slow", {"seconds": 30}, "Error: slow took longer than 0.1 s and was stopped."),
        ("broken", {}, "Error: KeyError: 'no such drawer' (played_environments.py:"),
    ],
)
def test_what_the_model_can_bring_about_is_text_that_it_reads(name: str, arguments: Any, text: str) -> None:
    toolbox = Tools([f"{HERE}:{name}" for name in ("add", "slow", "loud", "broken")], 0.1).opened()
    assert text in said(toolbox, name, arguments)
    assert toolbox.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_an_output_that_floods_is_cut_in_its_middle() -> None:
    text = said(Tools([f"{HERE}:loud"], 5.0).opened(), "loud", {"characters": 1_000_000})
    assert len(text) < DEFAULT_LIMITS.tool_output_chars + 100
    assert text.startswith("zzz") and text.endswith("zzz") and "984000 characters left out" in text


@pytest.fixture
def command(tmp_path: Path) -> str:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    return f"mcp: {sys.executable} {server}"


def test_an_mcp_server_serves_tools_keeps_its_state_and_says_what_fails(command: str) -> None:
    toolbox = Tools([command], 5.0).opened()
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["note", "long", "die", "fail", "wait"]
    assert toolbox.schemas[0]["function"]["parameters"]["required"] == ["text"]
    assert said(toolbox, "note", {"text": "milk"}) == "milk"
    assert said(toolbox, "note", {"text": "eggs"}) == "milk; eggs"
    assert "Error executing tool fail" in said(toolbox, "fail", {})  # the library keeps its reason to itself
    assert "answered with more than" in said(toolbox, "long", {"characters": 2 * DEFAULT_LIMITS.tool_answer_bytes})
    late = toolbox.answer(call("wait", {"seconds": 0.6}), left_s=0.3)["content"]
    assert "took longer than 0.3 s" in late
    assert said(toolbox, "note", {"text": "tea"}) == "milk; eggs; tea"  # the late answer is passed over
    toolbox.close()


def test_a_server_that_dies_is_the_machines_fault_once_and_then_the_model_reads_of_it(command: str) -> None:
    first = Tools([command], 5.0).opened()
    with pytest.raises(ToolServerDied, match="ended with code 4"):
        first.answer(call("die", {}))
    first.close()
    again = Tools([command], 5.0).opened(again=True)
    assert "has ended with code 4" in said(again, "die", {})
    assert "has ended with code 4" in said(again, "note", {"text": "milk"})
    again.close()


class PlayedEndpoint:
    """Answers from a list."""

    left_s = 10.0

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[list[Any], Any]] = []

    def chat(self, messages: list[Any], tools: Any = ()) -> dict[str, Any]:
        self.asked.append((list(messages), tools))
        answer = self._answers.pop(0)
        return {"role": "assistant", **answer} if isinstance(answer, dict) else {"role": "assistant", "content": answer}


def test_the_ready_made_environment_lets_the_model_call_tools_until_it_answers() -> None:
    data = DataConfig(source="jsonl", path="x", system_prompt="Use tools.", template="Q: {prompt}")
    tools = Tools([f"{HERE}:add"], 1.0)
    driver = PythonDriver(ToolEnvironment, {"reward": f"{HERE}:right"}, tools, "environment.options", ready_made=True)
    endpoint = PlayedEndpoint({"content": None, "tool_calls": [call("add", {"a": 2, "b": 3})]}, "5")
    row = {"prompt": "2 + 3", "answer": "5", "index": 0, "level": 1}
    outcome = driver.drive(row, cast(Any, endpoint), data=data, again=False)
    assert (outcome.reward, outcome.cause) == (1.0, "ended")
    assert outcome.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    first, second = endpoint.asked
    assert [message["role"] for message in first[0]] == ["system", "user"]
    assert first[0][1]["content"] == "Q: 2 + 3" and first[1] == tools.opened().schemas
    assert second[0][-1] == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"}
