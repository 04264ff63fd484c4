"""Keys of the job file that messages name exist: whoever reads one looks for the key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = [
    line.strip() for line in (ROOT / "tests/configs/schema_keys.txt").read_text("utf-8").splitlines() if line.strip()
]
KNOWN = {".".join(key.split(".")[:n]) for key in KEYS for n in range(1, key.count(".") + 2)}
SECTIONS = sorted({key.partition(".")[0] for key in KEYS if "." in key})
NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")
OPEN = ("environment.options.", "rollout.engine_options.")
"""Beginnings of keys that belong to the user's own code, or to an engine."""
FILES = {"jsonl", "json", "safetensors", "yaml", "bin"}


def messages(tree: ast.AST) -> Iterator[ast.Constant]:
    """Texts that are no docstrings and have several words."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documents and " " in str(node.value):
            yield node


def test_every_key_that_a_message_names_is_one_of_the_job_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {key}"
        for room in ("actors", "configs", "supervisors")
        for path in sorted((ROOT / room).rglob("*.py"))
        for text in messages(ast.parse(path.read_text("utf-8")))
        for key in NAMED.findall(str(text.value))
        if key not in KNOWN and not key.startswith(OPEN) and key.rpartition(".")[2] not in FILES
    ]
    assert wrong == []
