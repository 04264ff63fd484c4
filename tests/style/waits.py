"""Finds every wait of the code base, and which of them nothing ends but the other side.

A wait is an ``await``, ``async for`` or ``async with`` on anything but our own coroutine (whose waits are looked at
where it is written), and a call that blocks its thread: ``join()``, ``get()``, ``wait()``, ``communicate()`` …

It is bounded when it
- stands inside ``asyncio.timeout(limit)``, or hands a limit to what it calls (``timeout_s=``);
- is a sleep, or a task group whose tasks are all started in it and are our own coroutines;
- stands in ``on_start`` or ``on_stop``, which the kernel bounds;
- stands in a coroutine that is awaited inside of limits only, wherever the code base does so (two public ones of one
  name are taken to be awaited without).

The limit must be able to end it: None and a parameter that may be None do not. And it must come from
``configs/limits.py``: a number written on the spot, a constant of the file and a number as a default are told of too.

What is not seen: another library's function that waits within and has no limit, unless it is in ``BLOCKING_FUNCTIONS``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SAME_NAME: Final = {"wait", "get", "put", "join", "read", "acquire", "drain"}
"""Methods of asyncio and of ours alike. Without arguments, and not of ``self``, they are taken for asyncio's."""
NO_WAITS: Final = {"asyncio.sleep", "asyncio.create_subprocess_exec"}
"""They end by themselves: the latter has started the process, and does not wait for it."""
STARTS: Final = {"create_task", "start_task", "ensure_future", "start"}
"""Whoever is handed a coroutine by these names makes a task of it."""
BLOCKING: Final = {"join", "get", "wait", "communicate", "recv", "recv_bytes", "accept", "acquire", "readline"}
"""Calls without arguments that block a thread. With arguments ``join`` is a text's and ``get`` a map's."""
BLOCKING_FUNCTIONS: Final = {
    "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "urllib.request.urlopen",
    "socket.create_connection", "select.select", "fcntl.flock", "os.waitpid", "os.wait",
}  # fmt: skip
CONTEXT_VARIABLES: Final = {"current", "SIMULATED_HOST", "PROCESS"}
"""Their ``get()`` is no wait."""
KERNEL_BOUNDS: Final = {"on_start", "on_stop"}
LIMIT_ARGUMENTS: Final = {"timeout_s", "timeout", "deadline_s", "limit_s"}


@dataclass(frozen=True)
class Wait:
    """One wait that is not bounded as it should be."""

    file: str
    function: str
    what: str
    line: int = field(compare=False)
    why: str = field(compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """Stays the same when lines move."""
        return self.file, self.function, self.what

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}: {self.why}"


@dataclass
class _Function:
    """A coroutine of ours: its waits that lack a limit, and what it awaits of ours without one."""

    waits: list[Wait] = field(default_factory=list[Wait])
    awaits: set[str] = field(default_factory=set[str])


@dataclass
class _Known:
    """What is known of the code base as a whole. A private coroutine is named with its file, a public one without."""

    own: set[str]
    """Bare names of all our coroutines."""
    functions: dict[str, list[_Function]] = field(default_factory=dict[str, list[_Function]])
    awaited: set[str] = field(default_factory=set[str])
    """Those that somebody awaits, or makes a task of."""

    def reached(self) -> set[str]:
        """Coroutines that may be awaited without a limit, as far as is known: their own waits have none either."""
        reached = {name for name, bodies in self.functions.items() if len(bodies) > 1 or name not in self.awaited}
        fresh = reached
        while fresh:
            fresh = {name for one in fresh for body in self.functions.get(one, ()) for name in body.awaits} - reached
            reached |= fresh
        return reached


def parse(root: Path, paths: Iterable[Path]) -> dict[str, ast.Module]:
    """Syntax trees under the files' names relative to ``root``."""
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(), filename=str(path)) for path in paths}


def unbounded(trees: dict[str, ast.Module]) -> list[Wait]:
    """Every wait without a limit in ``trees`` (by file name), in their order."""
    known = _Known(_own_coroutines(trees.values()))
    found: list[Wait] = []
    for file, tree in trees.items():
        walker = _Walker(file, known)
        walker.visit(tree)
        found += walker.found
    reached = known.reached()
    return found + [w for name, bodies in known.functions.items() if name in reached for b in bodies for w in b.waits]


def _own_coroutines(trees: Iterable[ast.Module]) -> set[str]:
    """Names of our coroutines, asynchronous generators and asynchronous contexts."""
    own: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.AsyncFunctionDef):
            own.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.AsyncFunctionDef)}
            if methods & {"__aenter__", "__aiter__", "__anext__"}:
                own.add(node.name)
    return own


class _Walker(ast.NodeVisitor):
    """Goes through one file, and knows where it stands: in which class and function, and inside which limits."""

    def __init__(self, file: str, known: _Known) -> None:
        self._file = file
        self._known = known
        self._names: list[str] = []
        self._methods: list[set[str]] = []
        self._optional: set[str] = set()
        self._bound: dict[str, ast.expr] = {}
        """What names of the function were assigned last, or bound by ``async with``."""
        self._limited = 0
        self._function = _Function()
        self._taken: set[ast.AST] = set()
        """Calls that are awaited, or made tasks of: they do not block the thread."""
        self.found: list[Wait] = []
        """Those that no caller's limit can mend."""

    # ------------------------------------------------------------ where we are

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self._methods.append({item.name for item in node.body if isinstance(item, ast.AsyncFunctionDef)})
        self.generic_visit(node)
        self._methods.pop()
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._optional, self._bound, self._limited, self._function
        self._names.append(node.name)
        self._look_at_defaults(node.args)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._optional = {a.arg for a in arguments if a.annotation is not None and "None" in ast.unparse(a.annotation)}
        self._bound, self._limited, self._function = {}, int(node.name in KERNEL_BOUNDS), _Function()
        self.generic_visit(node)
        self._known.functions.setdefault(self._named(node.name), []).append(self._function)
        self._names.pop()
        self._optional, self._bound, self._limited, self._function = before

    def _look_at_defaults(self, arguments: ast.arguments) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [*zip(positional[::-1], arguments.defaults[::-1], strict=False)]
        pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
        for argument, default in pairs:
            if argument.arg in LIMIT_ARGUMENTS:
                self._limit_is_known(default, default)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._bound[target.id] = node.value
                self._optional.discard(target.id)
        self.generic_visit(node)

    # ------------------------------------------------------------ waits

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        limited = self._limited
        for item in node.items:
            entered = self._meaning(item.context_expr)
            if _is_call_of(entered, "asyncio.timeout", "asyncio.timeout_at"):
                assert isinstance(entered, ast.Call)
                self._limited += self._limit_holds(entered.args[0], node)
            elif not self._limited and not self._is_own(entered) and not self._is_closed_group(item, node):
                self._tell(node, item.context_expr, "a lock, or a context of others, is entered without a limit")
            if isinstance(item.optional_vars, ast.Name):
                self._bound[item.optional_vars.id] = entered
            self.visit(item.context_expr)
        for statement in node.body:
            self.visit(statement)
        self._limited = limited

    def _is_closed_group(self, item: ast.withitem, node: ast.AsyncWith) -> bool:
        """A task group that holds nothing but our own coroutines, all of them started in its body."""
        if not _is_call_of(item.context_expr, "asyncio.TaskGroup") or not isinstance(item.optional_vars, ast.Name):
            return False
        group = item.optional_vars.id
        starts = [call for part in node.body for call in ast.walk(part) if _is_call_of(call, f"{group}.create_task")]
        return bool(starts) and all(isinstance(call, ast.Call) and self._is_own(call.args[0]) for call in starts)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        if not self._limited and not self._is_own(self._meaning(node.iter)):
            self._tell(node, node.iter, "the next item is waited for without a limit")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        self._taken.add(node.value)
        self._look(node.value)
        self.generic_visit(node)

    def _look(self, waited: ast.expr) -> None:
        if isinstance(waited, ast.IfExp):
            self._look(waited.body)
            self._look(waited.orelse)
            return
        if isinstance(waited, ast.Starred):
            self._look(waited.value)
            return
        if isinstance(waited, ast.GeneratorExp | ast.ListComp):
            self._look(waited.elt)
            return
        if _is_call_of(waited, "asyncio.gather"):
            assert isinstance(waited, ast.Call)
            for part in waited.args:
                self._look(part)
            return
        meant = self._meaning(waited)
        if self._is_own(meant):
            self._note_awaited(meant, limited=bool(self._limited))
        elif not self._limited and not _is_call_of(waited, *NO_WAITS) and not self._hands_over_a_limit(waited):
            self._tell(waited, waited, "nothing ends it but the other side")

    def _note_awaited(self, call: ast.expr, *, limited: bool) -> None:
        name = self._named(_last_name(call))
        self._known.awaited.add(name)
        if not limited:
            self._function.awaits.add(name)

    def _named(self, name: str) -> str:
        return f"{self._file}:{name}" if name.startswith("_") else name

    def _hands_over_a_limit(self, node: ast.expr) -> bool:
        arguments = node.keywords if isinstance(node, ast.Call) else []
        limits = [argument.value for argument in arguments if argument.arg in LIMIT_ARGUMENTS]
        return bool(limits) and all(self._limit_holds(limit, node) for limit in limits)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in node.keywords:
            if argument.arg in LIMIT_ARGUMENTS:
                self._limit_is_known(argument.value, node)
        if _last_name(node) in STARTS:
            for argument in node.args:
                if isinstance(argument, ast.Call):
                    self._taken.add(argument)
                    if self._is_own(argument):  # a task has no limit but those within it
                        self._note_awaited(argument, limited=False)
                    elif _last_name(argument) in BLOCKING:
                        self._tell(argument, argument, "nothing ends it but the other side")
        if node not in self._taken and self._blocks(node):
            self._tell(node, node, "it blocks its thread until the other side ends it", surely=True)
        self.generic_visit(node)

    def _blocks(self, node: ast.Call) -> bool:
        if any(argument.arg in LIMIT_ARGUMENTS and not _is_none(argument.value) for argument in node.keywords):
            return False
        function = node.func
        if _is_call_of(node, *BLOCKING_FUNCTIONS):
            return True
        if not isinstance(function, ast.Attribute) or node.args:
            return False
        if function.attr == "result":  # of a task or future it is no wait, of a thread pool's it is
            return isinstance(function.value, ast.Call) and _last_name(function.value) == "submit"
        return function.attr in BLOCKING and ast.unparse(function.value) not in CONTEXT_VARIABLES

    # ------------------------------------------------------------ what a thing is

    def _meaning(self, node: ast.expr) -> ast.expr:
        """What a name of this function stands for; of a task, the coroutine that it runs."""
        if isinstance(node, ast.Name):
            node = self._bound.get(node.id, node)
        if isinstance(node, ast.Call) and _last_name(node) in STARTS and not self._is_own(node):
            return next((argument for argument in node.args if self._is_own(argument)), node)
        return node

    def _is_own(self, node: ast.expr) -> bool:
        """Whether it is a call of our own coroutine, or opens a stream of ours with a limit for each item."""
        if not isinstance(node, ast.Call):
            return False
        if _is_call_of(node, "contextlib.aclosing"):
            return self._is_own(node.args[0])
        function, name = node.func, _last_name(node)
        if not isinstance(function, ast.Attribute):
            return name in self._known.own
        owner = ast.unparse(function.value)
        if owner == "super()" or (owner == "self" and self._methods and name in self._methods[-1]):
            return True
        if name == "stream":
            return self._hands_over_a_limit(node)
        if owner.split(".")[0] in ("asyncio", "queue", "threading", "subprocess") or name not in self._known.own:
            return False
        return name not in SAME_NAME or bool(node.args or node.keywords)

    def _limit_holds(self, limit: ast.expr, node: ast.AST) -> bool:
        """Whether it ends the wait at all; and if so, tell if it is none of configs/limits.py."""
        if _is_none(limit) or (isinstance(limit, ast.Name) and limit.id in self._optional):
            self._tell(node, limit, "this limit may be None, which is none", surely=True)
            return False
        self._limit_is_known(limit, node)
        return True

    def _limit_is_known(self, limit: ast.expr, node: ast.AST) -> None:
        number = isinstance(limit, ast.Constant) and isinstance(limit.value, int | float)
        constant = isinstance(limit, ast.Name) and limit.id.isupper()
        if number or constant:
            self._tell(node, limit, "this limit is a number of its own, and not from configs/limits.py", surely=True)

    def _tell(self, at: ast.AST, what: ast.expr, why: str, *, surely: bool = False) -> None:
        wait = Wait(self._file, ".".join(self._names), ast.unparse(what), getattr(at, "lineno", 0), why)
        waits = self.found if surely else self._function.waits
        if wait not in waits:
            waits.append(wait)


def _is_call_of(node: ast.AST, *names: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    last = _last_name(node)
    return any(name.endswith(last) for name in names) and ast.unparse(node.func) in names


def _last_name(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
