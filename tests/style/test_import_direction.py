"""The arrows of the design, read from the syntax trees of every product file.

    configs ← transport ← actors ← supervisors ← main.py          benchmarks may use everything, and nothing uses it

    actors        core ← host ← protocol ← ledger ← fleet ← scheduler        policies are pure, and below the ledger
                  every other role stands on core, host and protocol         those who pull may use the weights' client
                  those who load models stand on models, too
                  reward_training and gateway read data and text as environments does; gateway, end tokens as jobs does
                  serving joins tinker, which knows protocols alone, with the trainer's parts and sampling, and shows
                  gauges as metrics does
                  sampling drives an engine of rollout, and reads text and end tokens as gateway does
    supervisors   tree ← faults ← machine ← preparation, providers ← pool ← jobs ← nemesis, sharing ← serving ← head
                  head ← simulation, api ← cli

``ACTORS`` and ``SUPERVISORS`` say it room by room. There is no import circle between files. Imports for type checkers
alone count like all others. One file touches zmq. Heavy imports stay where they are needed, and what would make two
equal runs differ is not called.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.style.product_files import FILES, LAYERS, MODULES, PRODUCT, ROOT, imports, imports_of, text_of, tree_of

KERNEL = frozenset({"core", "host", "roles"})
"""What every actor stands on; ``actors/roles.py`` names roles by strings."""
ROLE = KERNEL | {"protocol"}
ACTORS = {
    "core": frozenset[str](),
    "roles": {"core"},
    "host": {"core"},
    "protocol": KERNEL,
    "policies": frozenset[str](),
    "models": {"core", "host"},
    "ledger": ROLE | {"policies"},
    "fleet": ROLE | {"policies", "ledger"},
    "scheduler": ROLE | {"policies", "ledger", "fleet"},
    "jobs": ROLE,
    "rollout": ROLE | {"ranks", "models"},
    "trainer": ROLE | {"ranks", "models"},
    "train_service": ROLE | {"trainer", "ranks", "policies", "models"},
    "environments": ROLE | {"models"},
    "gateway": ROLE | {"environments", "jobs"},
    "tinker": ROLE,
    "reward_training": ROLE | {"environments", "models"},
    "sampling": ROLE | {"rollout", "models", "environments", "jobs"},
    "serving": ROLE | {"tinker", "sampling", "trainer", "models", "metrics"},
    "weights": ROLE,
    "ranker": ROLE | {"models"},
    "ranks": ROLE,
    "metrics": ROLE,
    "control": ROLE,
}
"""Room of ``actors`` → the others that it may import."""

_RUNNING = frozenset({"tree", "faults", "machine", "preparation", "providers", "pool", "jobs"})
"""What it takes to run a job."""
SUPERVISORS = {
    "tree": frozenset[str](),
    "faults": {"tree"},
    "checkers": {"tree"},
    "machine": {"tree", "faults"},
    "preparation": {"tree", "faults", "machine"},
    "providers": {"tree", "faults", "machine"},
    "pool": {"tree", "machine", "providers"},
    "jobs": _RUNNING - {"jobs"},
    "nemesis": _RUNNING,
    "sharing": _RUNNING,
    "head": _RUNNING | {"sharing", "serving", "nemesis"},
    "serving": _RUNNING | {"sharing"},
    "simulation": _RUNNING | {"sharing", "serving", "nemesis", "head", "checkers"},
    "testing": {"tree", "checkers"},
    "trees": _RUNNING | {"sharing", "serving", "nemesis", "head"},
    "api": _RUNNING | {"sharing", "nemesis", "head", "checkers", "trees", "serving"},
    "cli": _RUNNING | {"sharing", "nemesis", "head", "checkers", "trees", "api", "simulation", "serving"},
}
"""Room of ``supervisors`` → the others that it may import; ``trees.py`` is the running system on one page."""

# What a file may do although the rule says no, each with its reason.
CLIENT_SIDE = {
    f"actors.weights.{name}"
    for name in ("client", "delta", "errors", "holding", "manifest", "memory", "pace", "segments", "shares")
}
"""How a version is laid out, published and pulled: plain functions over messages that hold no actor. Those who publish
and pull link against them; the server's own code is as closed as any other role's."""
LINKS_CLIENT_SIDE = {"rollout", "trainer", "train_service"}
ZMQ_FILES = {"transport.zmq.socket", "transport.zmq.context", "actors.control.socket", "actors.control.client"}
"""The wire of the actors has one owner, and contexts and keys another; the control socket is for any language."""
WALL_CLOCK = {"actors.host.clock"}
"""Times of day for people and for joining the files of a run; nothing is decided by them."""
HEAVY = {"torch", "vllm", "transformers", "lightkube", "datasets"}
BANNED_CALLS = {
    "asyncio.wait": "its sets have no order: iterate a list",
    "asyncio.as_completed": "its order differs from run to run",
    "time.time": "the loop's clock, ctx.now(); wall_clock() of the log for people",
    "uuid.uuid4": "ctx.rng, or the incarnation and a counter",
}


def room(module: str, package: str) -> str | None:
    """The room of ``package`` that a module stands in; None: it is another package's, or the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 else None


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted calls, with aliases of imports resolved."""
    aliases: dict[str, str] = {}
    called: list[ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called.append(node)
    for node in called:
        head, _, rest = ast.unparse(node.func).partition(".")
        if head in aliases:
            yield aliases[head] + (f".{rest}" if rest else ""), node.lineno


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def offending(wrong: Callable[[str, str], bool], modules: dict[str, Path] = PRODUCT) -> list[str]:
    """Imports for which ``wrong(importing module, imported module)``."""
    return [
        f"{where(path, line)} imports {module}"
        for name, path in modules.items()
        for module, line in imports_of(path)
        if wrong(name, module)
    ]


# ------------------------------------------------------------ who may import whom


def test_no_arrow_points_back() -> None:
    """A layer imports itself and what is below it; benchmarks are above everything, so nobody imports them."""
    heights = {layer: height for height, layer in enumerate(LAYERS)}

    def upward(name: str, module: str) -> bool:
        other, own = (one.split(".", maxsplit=1)[0] for one in (module, name))
        return heights.get(other, -1) > heights[own]

    assert offending(upward) == []


@pytest.mark.parametrize(("package", "rooms"), [("actors", ACTORS), ("supervisors", SUPERVISORS)])
def test_a_room_imports_what_it_stands_on(package: str, rooms: dict[str, set[str]]) -> None:
    """Roles say messages of ``actors.protocol`` to one another, and know nothing else of each other."""

    def foreign(name: str, module: str) -> bool:
        own, other = room(name, package), room(module, package)
        if own is None or other in (None, own) or (own in LINKS_CLIENT_SIDE and module in CLIENT_SIDE):
            return False
        return other not in rooms.get(own, ())

    assert offending(foreign) == []


@pytest.mark.parametrize(("package", "rooms"), [("actors", ACTORS), ("supervisors", SUPERVISORS)])
def test_every_room_has_its_place_and_none_of_them_stands_on_itself(package: str, rooms: dict[str, set[str]]) -> None:
    assert {found for name in MODULES if (found := room(name, package)) is not None} == set(rooms)
    assert len([*TopologicalSorter(rooms).static_order()]) == len(rooms)


def test_the_client_side_of_the_weights_holds_no_actor() -> None:
    """What others may link against besides messages must not bring the server in."""
    outside = {name: MODULES[name] for name in CLIENT_SIDE}
    assert offending(lambda _, module: room(module, "actors") == "weights" and module not in CLIENT_SIDE, outside) == []


def test_the_kernel_is_private() -> None:
    """Whoever is outside ``actors.core`` uses its public face."""
    kernel = "actors.core.kernel"
    assert offending(lambda name, module: module.startswith(kernel) and not name.startswith("actors.core")) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """An empty ``__init__.py`` is nobody's import."""
    graph = {
        name: {module for module, _ in imports_of(path) if module in MODULES and text_of(MODULES[module]).strip()}
        for name, path in MODULES.items()
    }
    assert circle_in(graph) == []


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """A circle, the first of it again at its end; empty if there is none."""
    try:
        TopologicalSorter({name: others - {name} for name, others in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


# ------------------------------------------------------------ what is imported and called


def test_one_file_owns_the_sockets() -> None:
    found = {name for name, path in PRODUCT.items() for module, _ in imports_of(path) if module.split(".")[0] == "zmq"}
    assert found <= ZMQ_FILES


def test_the_wire_and_the_kernel_name_nothing_heavy() -> None:
    below = ("configs", "transport", "actors.core")
    assert offending(lambda name, module: name.startswith(below) and module.split(".")[0] in HEAVY) == []


def test_nothing_is_pickled() -> None:
    pickles = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert offending(lambda _, module: module.split(".")[0] in pickles) == []


def test_what_would_make_equal_runs_differ_is_not_called() -> None:
    wrong: list[str] = []
    for name, path in PRODUCT.items():
        if not name.startswith(("actors", "transport", "supervisors")):
            continue
        for call, line in calls(tree_of(path)):
            if call == "time.time" and name in WALL_CLOCK:
                continue
            drawn = call.startswith("random.") and not call.startswith("random.Random")
            if call in BANNED_CALLS or drawn:
                why = BANNED_CALLS.get(call, "a named stream, ctx.rng(name)")
                wrong.append(f"{where(path, line)} calls {call}: {why}")
    assert wrong == []


def test_no_attic_is_opened() -> None:
    attics = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [str(path) for path in PRODUCT.values() if path.name in attics] == []


def test_no_docstring_begins_with_a_word_that_needs_the_name_before_it() -> None:
    """A docstring says what the thing is or does; 'Of one worker.' is no sentence."""
    fragment = re.compile(r"(Of|For which|With which|To which)\b")
    found = [
        where(path, node.lineno)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and fragment.match(node.value.value)
    ]
    assert found == []


def test_every_file_opens_with_a_docstring() -> None:
    """Invariants in protocol files, the flow in flow files; an empty package file says nothing."""
    silent = [
        where(path, 1) for path in PRODUCT.values() if text_of(path).strip() and not ast.get_docstring(tree_of(path))
    ]
    assert silent == []


LOADED = """
import sys
before = len(sys.modules)
import {modules}
print(len(sys.modules) - before, *sorted(set(sys.modules) & {heavy}))
"""
NOT_LOADED = HEAVY | {"scipy", "pandas", "httpx", "sqlite3"}
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
    command = [sys.executable, "-c", LOADED.format(modules=modules, heavy=NOT_LOADED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    count, *unwanted = done.stdout.split()
    assert unwanted == []
    assert int(count) <= KERNEL_MODULES_MAX


# ------------------------------------------------------------ the test itself


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("import zmq.asyncio", "zmq.asyncio"),
        ("def f():\n    from actors.trainer.losses import x", "actors.trainer.losses"),
        ("from actors.weights import manifest", "actors.weights.manifest"),
        ("if TYPE_CHECKING:\n    from actors.core.context import Context", "actors.core.context"),
        ("try:\n    pass\nexcept OSError:\n    import torch", "torch"),
    ],
)
def test_this_test_sees_imports_wherever_they_stand(code: str, module: str) -> None:
    assert [name for name, _ in imports(ast.parse(code))] == [module]


def test_this_test_sees_circles() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"d"}}) in [
        ["a", "c", "b", "a"],
        ["b", "a", "c", "b"],
        ["c", "b", "a", "c"],
    ]


def test_this_test_sees_calls_under_other_names() -> None:
    code = "import time as t\nfrom random import choice as pick\nt.time()\npick([1])\nself.random.choice()"
    assert [name for name, _ in calls(ast.parse(code))] == ["time.time", "random.choice"]
