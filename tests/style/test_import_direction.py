"""The arrows of the design, read from the syntax trees of every product file.

    configs ← transport ← actors.core ← actors.<role> ← supervisors ← main.py

A role imports of another role its ``messages.py`` only. One file touches zmq. Heavy imports stay where they are needed,
and what would make two equal runs differ is not called.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["configs", "transport", "actors", "supervisors"]
FILES = [*sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")), ROOT / "main.py"]
OURS = {*PACKAGES, "main"}

LAYERS = {"configs": 0, "transport": 1, "actors.core": 2, "actors": 3, "supervisors": 4, "main": 5}

# What a file may do although the rule says no, each with its reason.
ZMQ_FILES = {"transport.zmq.socket", "transport.zmq.context", "actors.control.socket", "actors.control.client"}
"""The actors' own wire has one owner, and contexts and keys another; the control socket is for any language."""
CLIENT_SIDE = {
    f"actors.weights.{name}"
    for name in ("client", "delta", "errors", "holding", "manifest", "memory", "pace", "segments")
}
"""How a version is laid out, published and pulled: plain functions over messages that hold no actor. Those who publish
and pull link against them; the server's own code is as closed as any other role's."""
WALL_CLOCK = {"actors.host.clock"}
"""Times of day for people and for joining the files of a run; nothing is decided by them."""
HEAVY = {"torch", "vllm", "transformers", "kubernetes", "datasets"}
BANNED_CALLS = {
    "asyncio.wait": "its sets have no order: iterate a list",
    "asyncio.as_completed": "its order differs from run to run",
    "time.time": "the loop's clock, ctx.now(); wall_clock() of the log for people",
    "uuid.uuid4": "ctx.rng, or the incarnation and a counter",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is imported at run time, at any depth; imports for the type checker only do not count."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"line {node.lineno}: relative imports hide the direction"
            yield node.module, node.lineno
            # `from actors.rollout import messages` names a module too
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names if is_module(node, alias))
        else:
            yield from imports(node)


def is_module(node: ast.ImportFrom, alias: ast.alias) -> bool:
    place = ROOT.joinpath(*(node.module or "").split("."), alias.name)
    return place.is_dir() or place.with_suffix(".py").exists()


def layer(module: str) -> int:
    """The layer of one of our modules; ``actors/roles.py`` names roles by strings and may be read by any of them."""
    if module in ("actors", "actors.roles") or module == "actors.core" or module.startswith("actors.core."):
        return LAYERS["actors.core"]
    return LAYERS[module.split(".", maxsplit=1)[0]]


def role(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "actors" or len(parts) == 1 or parts[1] in ("core", "roles"):
        return None
    return parts[1]


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted calls, with aliases of imports resolved."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            head, _, rest = ast.unparse(node.func).partition(".")
            if head in aliases:
                yield aliases[head] + (f".{rest}" if rest else ""), node.lineno


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_arrow_points_back() -> None:
    """A layer imports itself and what is below it."""
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        for module, line in imports(tree_of(path))
        if module.split(".")[0] in OURS and layer(module) > layer(name_of(path))
    ]
    assert wrong == []


def test_a_role_imports_of_another_role_its_messages_only() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        if (own := role(name_of(path))) is not None
        for module, line in imports(tree_of(path))
        if role(module) not in (None, own) and module not in CLIENT_SIDE
        # `from actors.rollout import messages` names the package as well as the module: the package itself is empty
        if not all(name.endswith("messages") for name in module.split(".")[2:3])
    ]
    assert wrong == []


def test_the_client_side_of_a_role_holds_no_actor() -> None:
    """What others may link against besides messages must not bring a role's actor in."""
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        if name_of(path) in CLIENT_SIDE
        for module, line in imports(tree_of(path))
        if role(module) is not None and module not in CLIENT_SIDE and not module.endswith(".messages")
    ]
    assert wrong == []


def test_one_file_owns_the_sockets() -> None:
    found = {name_of(path) for path in FILES for module, _ in imports(tree_of(path)) if module.split(".")[0] == "zmq"}
    assert found <= ZMQ_FILES


def test_the_wire_and_the_kernel_name_nothing_heavy() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        if name_of(path).startswith(("configs", "transport", "actors.core"))
        for module, line in imports(tree_of(path))
        if module.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_nothing_is_pickled() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        for module, line in imports(tree_of(path))
        if module.split(".")[0] in {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}
    ]
    assert wrong == []


def test_what_would_make_equal_runs_differ_is_not_called() -> None:
    wrong: list[str] = []
    for path in FILES:
        if not name_of(path).startswith(("actors", "transport", "supervisors")):
            continue
        for call, line in calls(tree_of(path)):
            if call == "time.time" and name_of(path) in WALL_CLOCK:
                continue
            drawn = call.startswith("random.") and not call.startswith("random.Random")
            if call in BANNED_CALLS or drawn:
                why = BANNED_CALLS.get(call, "a named stream, ctx.rng(name)")
                wrong.append(f"{where(path, line)} calls {call}: {why}")
    assert wrong == []


def test_no_attic_is_opened() -> None:
    attics = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [str(path) for path in FILES if path.name in attics] == []


def test_every_file_opens_with_a_docstring() -> None:
    """Invariants in protocol files, the flow in flow files; an empty package file says nothing."""
    silent = [where(path, 1) for path in FILES if path.read_text().strip() and not ast.get_docstring(tree_of(path))]
    assert silent == []


LOADED = """
import sys
before = len(sys.modules)
import {modules}
print(len(sys.modules) - before, *sorted(set(sys.modules) & {heavy}))
"""
HEAVY = {"torch", "vllm", "transformers", "datasets", "kubernetes", "scipy", "pandas", "httpx", "sqlite3"}
KERNEL_MODULES_MAX = 540
"""473 take half a second of processor time on a quiet core, two thirds of it for numpy, attrs and pydantic: a
tenth more is well under the second in which a process is to be there."""


@pytest.mark.parametrize(
    "modules",
    [
        "actors.core.system, transport.zmq.transport, transport.memory_transport",
        "transport.zmq.transport, transport.link_faults, transport.sim.network, transport.codec, transport.envelope",
    ],
)
def test_the_kernel_starts_with_few_modules_and_none_of_the_heavy_ones(modules: str) -> None:
    """What decides how soon a process is there is counted: a busy machine doubles whatever is timed."""
    command = [sys.executable, "-c", LOADED.format(modules=modules, heavy=HEAVY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    count, *unwanted = done.stdout.split()
    assert unwanted == []
    assert int(count) <= KERNEL_MODULES_MAX


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("import zmq.asyncio", "zmq.asyncio"),
        ("def f():\n    from actors.trainer.losses import x", "actors.trainer.losses"),
        ("from actors.weights import messages", "actors.protocol.weights"),
    ],
)
def test_this_test_sees_imports_wherever_they_stand(code: str, module: str) -> None:
    assert module in [name for name, _ in imports(ast.parse(code))]


def test_this_test_sees_calls_under_other_names() -> None:
    code = "import time as t\nfrom random import choice as pick\nt.time()\npick([1])\nself.random.choice()"
    assert [name for name, _ in calls(ast.parse(code))] == ["time.time", "random.choice"]
