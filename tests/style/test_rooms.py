"""A room says what is in it: no folder is a heap, no file is a fragment, and what one kind needs no other names.

Read from the files of the product, as ``test_import_direction`` does, which says who may import whom.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

from tests.style.product_files import MODULES, PRODUCT, ROOT, imports_of, text_of, tree_of

FILES_OF_A_FOLDER_MAX = 20
FOLDERS_WITH_MORE = {
    "actors/protocol": "a file a conversation: who looks for one goes by its name",
    "configs": "the job file's sections, a file each",
}

SHORT_LINES = 50
"""A file shorter than this that only one other imports is read together with that one, and so belongs into it."""
ONE_KIND_A_FILE = {
    "supervisors/cli": "each command is a file",
    "configs/checks": "each subject of a job file has its checks",
    "supervisors/checkers": "each promise has its checker",
}
"""Folders whose files are kinds of one thing, however short: the next kind is one more file."""
SHORT_FOR_A_REASON = {
    "actors/environments/episodes/kinds.py": "the table of all kinds: one more is a line there",
    "actors/fleet/modes/make.py": "the table of all modes: one more is a line there",
    "actors/rollout/engines/vllm/expected.py": "the setup makes arguments of adapters, and this asks the setup",
    "actors/trainer/backends/torch/slicing.py": "packing lays rows out, and does not ask which ranks compute them",
    "actors/ledger/episode_ends.py": "a pure reading of a row, which the folding of events does not need to know",
    "actors/policies/pool/keeping.py": "a decision is pure, and its room knows no provider",
    "actors/ranker/errors.py": "the errors of a room are in a file of that name",
    "actors/ranker/simulated.py": "the shipped fake of a role, chosen by the simulation alone",
    "actors/trainer/learning/learning_rate.py": "a rule of learning, which the contract of backends uses",
    "configs/fault_words.py": "faults are declared here, and the command line reads them from words",
    "supervisors/jobs/cost_meter.py": "what machines cost is not how a run goes, which is long enough",
    "supervisors/jobs/start_words.py": "what people are told of a start is not how a run goes",
    "supervisors/preparation/abandonable.py": "a wait of its own kind, which a run has before its first process",
    "supervisors/tree/node_loss.py": "a pure rule, beside the restart budget",
}
"""Short file that only one other imports → why it stands alone."""


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_folder_is_a_heap() -> None:
    """One who looks for a thing reads the names of its folder, and more than some twenty are not read."""
    found = Counter(_relative(path.parent) for path in MODULES.values() if path.name != "__init__.py")
    heaps = {folder: count for folder, count in found.items() if count > FILES_OF_A_FOLDER_MAX}
    assert set(heaps) == set(FOLDERS_WITH_MORE), heaps


def test_a_short_file_that_one_other_imports_is_part_of_that_one() -> None:
    """Or says why not. A file that is started by its name has no importer, and is none of these."""
    users = defaultdict[str, set[str]](set)
    for name, path in MODULES.items():
        for module, _ in imports_of(path):
            users[module].add(name)
    lone = {
        _relative(path)
        for name, path in PRODUCT.items()
        if len(users[name]) == 1 and text_of(path).count("\n") < SHORT_LINES and path.name != "__init__.py"
        if not any(_relative(path).startswith(f"{folder}/") for folder in ONE_KIND_A_FILE)
    }
    assert lone == set(SHORT_FOR_A_REASON)


def test_a_class_docstring_has_its_subject() -> None:
    """Not: 'It is …'. Who reads a class knows its name, and wants to be told what it holds or does."""
    opening = re.compile(r"(It|They|This) ")
    found = [
        f"{_relative(path)}:{node.lineno} {node.name}"
        for path in PRODUCT.values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and opening.match(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_a_mode_of_the_fleet_is_named_in_its_own_folder_alone() -> None:
    """So that a fifth one is a file, and an ``if`` nowhere."""
    kinds = re.compile(r"\b_(planned|seeding|balancing)\b")
    found = [
        _relative(path)
        for name, path in PRODUCT.items()
        if name.startswith("actors.") and ".fleet.modes." not in name and kinds.search(text_of(path))
    ]
    assert found == []


def test_the_loop_of_the_trainer_asks_no_backend_which_kind_it_is() -> None:
    loop = [path for name, path in PRODUCT.items() if re.fullmatch(r"actors\.trainer\.\w+", name)]
    asking = re.compile(r"self\._service\b|isinstance\([^)]*Backend\)")
    assert [_relative(path) for path in loop if asking.search(text_of(path))] == []


WHOLE_BY_THEMSELVES = {
    "actors.host.plain_file": "by the descriptor of a folder, which others could exchange meanwhile",
    "actors.host.whole_file": "the one place",
    "actors.reward_training.train": "a directory",
    "actors.trainer.backends.torch.merging": "a directory",
    "actors.trainer.checkpoint": "a directory",
    "actors.weights.memory": "mapped while it is written",
    "supervisors.preparation.dataset_download": "a directory",
    "supervisors.preparation.model_cache": "a directory",
    "supervisors.preparation.model_preparation": "a directory",
}
"""Module that renames something once it is whole → what that is, if no file."""


def test_files_are_replaced_whole_in_one_place() -> None:
    """``write_whole`` flushes file and folder; a copy of it forgets one of them."""
    writers = {
        name for name, path in PRODUCT.items() if re.search(r"with_name\([^\n]*\.partial|\.partial[\"-]", text_of(path))
    }
    assert writers - {"actors.weights.holding", "actors.weights.segments"} <= set(WHOLE_BY_THEMSELVES)


ERRORS_BY_NAME = {
    "actors/core/errors.py": "the table that finds the class of a name from another process",
    "actors/environments/episodes/agent_call.py": "classes of libraries that the user's agent may or may not have",
}


def test_errors_are_matched_by_their_class() -> None:
    by_name = re.compile(r"error_type (==|!=|in)|__name__ (==|!=|in)(?! \"__main__\")")
    found = {_relative(path) for path in PRODUCT.values() if by_name.search(text_of(path))}
    assert found == set(ERRORS_BY_NAME)
