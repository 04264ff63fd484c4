"""Lists in the guides name what the tables of the code have: a kind more, or a rule more, and its page is behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from configs.episode_schema import EnvironmentConfig
from configs.learning_schema import Correction, RuleName
from configs.schema import RolloutConfig, SyncMode
from configs.task_schema import Reward
from supervisors.jobs.run_record import RESUME_MAY_SET, RESUME_MAY_SET_IF_SAID
from tests.style.product_files import imports_of

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "actors" / "policies"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def section(name: str, heading: str) -> str:
    return page(name).split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def first_column(text: str, header: str) -> list[str]:
    """Words in backticks of the first column of the table that begins with ``header``."""
    rows = text.split(f"\n| {header} ", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [word for row in rows if row.startswith("| `") for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


def kinds(section_: Any, key: str) -> set[str]:
    """The words that a key of the job file may have, but for ``none``."""
    found = [word for part in (section_.model_fields[key].annotation,) for word in _words(part)]
    return {*found} - {"none"}


def _words(annotation: Any) -> list[str]:
    inner = get_args(annotation)
    return [word for part in inner for word in ([part] if isinstance(part, str) else _words(part))]


def test_the_rules_of_learning_are_all_on_both_pages() -> None:
    assert set(first_column(page("guides/learning_rules.md"), "name")) == set(get_args(RuleName))
    named = section("guides/bring_your_own_task.md", "The learning rule").split("`name` is one of", 1)[1]
    assert set(re.findall(r"`(\w+)`", named.split(":", 1)[0])) == set(get_args(RuleName))
    assert set(first_column(page("guides/learning_rules.md"), "`correction`")) == set(get_args(Correction))


def test_the_kinds_of_rewards_environments_and_modes_are_on_their_pages() -> None:
    task = page("guides/bring_your_own_task.md")
    assert set(first_column(task, "`reward.kind`")) == kinds(Reward, "kind")
    pages = " ".join(page(f"guides/{name}.md") for name in ("write_an_environment", "train_your_agent"))
    for kind in kinds(EnvironmentConfig, "kind"):
        assert re.search(rf"kind: {kind}\b", pages), kind
    modes = page("guides/modes_and_length_ranking.md")
    assert first_column(modes, "`sync.mode`") == list(get_args(SyncMode))
    assert set(first_column(modes, "`rollout.length_ranking`")) - {"none"} == kinds(RolloutConfig, "length_ranking")


def test_what_a_resume_may_set_is_on_its_page() -> None:
    words = section("guides/resume_and_checkpoints.md", "Stopping and going on").replace("\n", " ")
    said = words.split("Only `steps`", 1)[1].split("may be changed by a resume", 1)[0]
    assert {"steps", *re.findall(r"`([\w.]+)`", said)} == {key.rstrip(".") for key in RESUME_MAY_SET}
    learning = words.split("A learning rate (", 1)[1].split(")", 1)[0]
    assert set(re.findall(r"`([\w.]+)`", learning)) == set(RESUME_MAY_SET_IF_SAID)


def test_each_event_of_a_function_is_on_its_page() -> None:
    recorded = re.findall(r'record\("(function_\w+)"', (ROOT / "supervisors/pool/functions.py").read_text("utf-8"))
    told = section("guides/functions.md", "What is billed").split("tells each life", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`(function_\w+)`", told)) == set(recorded)
    assert set(re.findall(r"`(function_\w+)`", page("reference/events.md"))) == set(recorded)


def test_the_gateways_routes_are_on_its_page() -> None:
    routes = set[str]()
    for file in ("openai_http.py", "episodes_http.py"):
        text = (ROOT / "actors" / "gateway" / file).read_text("utf-8")
        routes |= {f"{method} {path}" for method, path in re.findall(r'\("(POST|GET)", "(/[\w/]+)"', text)}
        routes |= {f"POST {path}" for path in re.findall(r'add_post\("(/v1[\w/]+)"', text)}
    assert set(first_column(page("reference/gateway.md"), "endpoint")) == routes


def test_each_policy_is_on_its_page_beside_files_that_call_it() -> None:
    """A file that is named as calling a rule imports it, or one that the same row names."""
    table = page("guides/writing_a_policy.md").split("| decision | rule", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    listed = set[str]()
    for row in table:
        _, _, rules, callers, _ = row.split("|")
        named = re.findall(r"`([\w/]+)\.py`", rules)
        listed |= set(named)
        modules = {f"actors.policies.{name.replace('/', '.')}" for name in named}
        for caller in re.findall(r"`([\w/]+\.py)`", callers):
            assert modules & {module for module, _ in imports_of(ROOT / caller)}, f"{caller} calls none of {named}"
    views = {"assigning/view", "sharing/placement_view"}  # what rules are shown
    there = {str(file.relative_to(POLICIES).with_suffix("")) for file in POLICIES.rglob("*.py")}
    assert listed == {name for name in there if not name.endswith("__init__")} - views
