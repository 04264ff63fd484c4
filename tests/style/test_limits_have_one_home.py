"""No time-out, back-off or bound is a number in the code: it is a field of ``configs/limits.py``, with its reason.

What is looked for is a number above 0 that is named as one: a constant ``…_S``, ``…_MS``, ``…_MAX`` or ``…_KEPT``, an
argument or a default ``…_s``, ``timeout``, ``maxsize`` or ``maxlen``, and what is slept or waited for. The few that are
no limits are listed here, each with its reason; an entry that fits nothing any more fails as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["transport", "actors", "supervisors"]

CONSTANT: Final = re.compile(r"(^|_)(S|MS|MAX|KEPT|HELD)$|^[a-z_]+_s$")
ARGUMENT: Final = re.compile(r"(^|_)(s|timeout|maxsize|maxlen)$")
WAITS: Final = {"sleep": 0, "timeout": 0, "wait": 0, "join": 0, "call_later": 0, "later": 0, "wait_for": 1}
"""Functions that wait, and which of their arguments says how long."""

NO_LIMITS: Final[dict[str, list[tuple[str, str]]]] = {
    "facts of a format or a protocol": [
        ("actors/control/protocol.py", "ID_CHARACTERS_MAX"),
        ("actors/control/socket.py", "ENDPOINT_BYTES_MAX"),
        ("actors/control/socket.py", "IPC_PATH_BYTES_MAX"),
        ("actors/host/plain_file.py", "INTEGER_DIGITS_MAX"),
        ("actors/host/plain_file.py", "NESTED_MAX"),
        ("actors/protocol/endings.py", "EPISODE_S"),
        ("actors/protocol/endings.py", "TURNS_MAX"),
        ("actors/trainer/checkpoint.py", "STATE_BYTES_MAX"),
        ("transport/zmq/handshake.py", "FRAMES_MAX"),
        ("transport/zmq/handshake.py", "SOCKETS_MAX"),
        ("transport/zmq/packing.py", "FRAMES_MAX"),
        ("transport/zmq/socket.py", "NEVER_RECONNECT_MS"),
        ("supervisors/api/run.py", "ROWS_MAX"),
        ("supervisors/jobs/cost_meter.py", "HOUR_S"),
        ("supervisors/machine/runtime_directory.py", "MARKER_BYTES_MAX"),
        ("supervisors/machine/membership/tenancy.py", "ORDER_BYTES_MAX"),
        ("supervisors/machine/runtime_directory.py", "SAME_START_S"),
        ("supervisors/providers/trace_files.py", "NODES_MAX"),
    ],
    "the pace, in milliseconds, of looks at what does not tell when it has changed": [
        ("actors/core/", "RETRY_S"),
        ("actors/core/", "FULL_RETRY_FIRST_S"),
        ("actors/core/", "FULL_RETRY_MAX_S"),
        ("actors/core/", "PROBE_S"),
        ("actors/core/", "PROBES_KEPT"),
        ("actors/host/parent_death.py", "POLL_S"),
        ("actors/rollout/engines/server/", "LOOK_S"),
        ("actors/rollout/worker.py", "LOOK_S"),
        ("supervisors/api/held_run.py", "LOOK_S"),
        ("transport/zmq/doorkeeper.py", "LOOK_S"),
        ("transport/zmq/socket.py", "FULL_S"),
        ("transport/zmq/timers.py", "PROBES_S"),
        ("transport/zmq/", "SETTLE_S"),
        ("transport/zmq/", "SETTLE_LOOK_S"),
        ("supervisors/testing/run_under_test.py", "POLL_S"),
    ],
    "numbers of an algorithm or of a rule; what may be chosen of them is a key of the job file": [
        ("actors/core/reason.py", "CHAIN_MAX"),
        ("actors/environments/episodes/agent_call.py", "CHAIN_MAX"),
        ("actors/host/parent_death.py", "SWEEPS_MAX"),
        ("actors/policies/seeding/offload.py", "first_s"),
        ("actors/policies/seeding/offload.py", "floor_s"),
        ("actors/policies/pool/pool_size.py", "REVERSALS_MAX"),
        ("actors/policies/sharing/slices.py", "LEAST_S"),
        ("actors/policies/sharing/slices.py", "INSTANT_S"),
        ("actors/ranker/readers.py", "VOCABULARY_MAX"),
        ("actors/rollout/engine.py", "SLOTS_MAX"),
        ("actors/trainer/backends/torch/layers/compiled_layers.py", "FORMS_MAX"),
        ("actors/trainer/backends/torch/packing.py", "ROW_TOKENS_MAX"),
        ("actors/trainer/backends/torch/replicas.py", "UNEVEN_MAX"),
        ("actors/trainer/learning/losses.py", "LOG_RATIO_MAX"),
        ("actors/trainer/setup.py", "REPLICAS_MAX"),
        ("actors/weights/delta.py", "CHANGED_MAX"),
        ("actors/weights/memory.py", "THREADS_MAX"),
        ("actors/core/senders.py", "lru_cache.maxsize"),
        ("actors/roles.py", "lru_cache.maxsize"),
        ("supervisors/machine/processes/process_spec.py", "lru_cache.maxsize"),
        ("supervisors/providers/trace_generator.py", "life_mean_s"),
        ("supervisors/providers/trace_generator.py", "absent_mean_s"),
        ("supervisors/providers/trace_generator.py", "crunch_every_s"),
        ("supervisors/providers/trace_generator.py", "crunch_mean_s"),
        ("supervisors/providers/trace_generator.py", "notice_s"),
    ],
    "what an injected fault looks like": [
        ("transport/link_faults.py", "POLL_S"),
        ("supervisors/faults/", "PERIOD_S"),
        ("supervisors/faults/", "ANSWER_S"),
        ("supervisors/nemesis/", "POLL_S"),
    ],
    "time and sizes of a simulated world": [
        ("actors/ranker/simulated.py", "init.score_s"),
        ("actors/ranker/simulated.py", "init.fit_s"),
        ("transport/sim/loop.py", "PLACES_MAX"),
        ("transport/sim/loop.py", "CANCELLED_MAX"),
        ("transport/sim/network.py", "latency_s"),
        ("transport/sim/network.py", "jitter_s"),
        ("transport/sim/network.py", "bandwidth_bytes_s"),
        ("supervisors/simulation/", "AGAIN_S"),
        ("supervisors/simulation/", "FENCE_S"),
        ("supervisors/simulation/", "LOOK_S"),
        ("supervisors/simulation/", "SETTLED_S"),
        ("supervisors/simulation/", "SHORTEST_S"),
        ("supervisors/simulation/", "STALLS_MAX"),
        ("supervisors/simulation/", "UNKNOWN_S"),
        ("supervisors/simulation/", "SEEDS_MAX"),
    ],
    "how a finished run is read and shown": [
        ("supervisors/cli/console/page_data.py", "MORE_COLUMNS_MAX"),
        ("actors/control/verbs.py", "longer_than_s"),
        ("supervisors/checkers/restarts.py", "CLOCK_SLACK_S"),
        ("supervisors/checkers/service_calls.py", "INSTANT_S"),
        ("supervisors/cli/", "SHOWN_MAX"),
        ("actors/train_service/service_trace.py", "SHORTEST_S"),
        ("supervisors/cli/", "SILENCE_S"),
        ("supervisors/cli/console/page_data.py", "RATE_S"),
        ("supervisors/cli/console/page_data.py", "NEIGHBOURS_S"),
    ],
    "what a check tells traffic by": [("supervisors/jobs/rank_traffic.py", "LINK_BITS_PER_S")],
    "installing runs before configs/limits.py can be imported": [("supervisors/cli/vllm_install.py", "TIMEOUT_S")],
}
"""Reason → file or room, and what is named there, without a leading underscore."""


def is_number(node: ast.expr | None) -> bool:
    """A number above 0, or an expression or a tuple of some."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool) and node.value > 0
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, ast.Tuple) and any(map(is_number, node.elts))


def numbers(tree: ast.AST) -> Iterator[str]:
    """What is named like a limit and is a number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and CONSTANT.search(target.id) and is_number(node.value):
                yield target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            placed = [*arguments.posonlyargs, *arguments.args][::-1]
            defaults = [*zip(placed, arguments.defaults[::-1], strict=False)]
            for argument, default in [*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
                if ARGUMENT.search(argument.arg) and is_number(default):
                    yield f"{node.name.strip('_')}.{argument.arg}"
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            at = WAITS.get(function, len(node.args))
            if at < len(node.args) and is_number(node.args[at]):
                yield function
            for keyword in node.keywords:
                if keyword.arg and ARGUMENT.search(keyword.arg) and is_number(keyword.value):
                    yield f"{function}.{keyword.arg}"


def found() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in numbers(ast.parse(path.read_text(encoding="utf-8"))):
                yield path.relative_to(ROOT).as_posix(), name.removeprefix("_")


def test_every_limit_is_a_field_of_limits_or_has_a_reason_not_to_be() -> None:
    allowed = [place for places in NO_LIMITS.values() for place in places]
    seen = list(found())
    left = [f"{file}: {name}" for file, name in seen if not any(file.startswith(p) and name == n for p, n in allowed)]
    assert not left, "make it a field of configs/limits.py, or say in NO_LIMITS why it is none:\n" + "\n".join(left)
    stale = [(p, n) for p, n in allowed if not any(file.startswith(p) and name == n for file, name in seen)]
    stale = [(p, n) for p, n in stale if (ROOT / p).exists()]
    assert not stale, f"these fit nothing any more; take them out of NO_LIMITS: {stale}"


@pytest.mark.parametrize(
    "code",
    [
        "RETRY_S = 0.5", "_LIVES_MAX: Final = 256", "class A:\n    wait_s: float = 5.0",
        "def f(timeout_s: float = 5.0): ...", "def f(*, ready_s=60.0): ...", "asyncio.sleep(0.5)",
        "asyncio.wait_for(event.wait(), 10)", "loop.call_later(0.1, f)", "Queue(maxsize=8)", "ask(q, timeout_s=2 * 30)",
    ],
)  # fmt: skip
def test_a_number_that_is_a_limit_is_found(code: str) -> None:
    assert list(numbers(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["self._busy_s = 0.0", "def f(left_s: float = 0.0): ...", "asyncio.sleep(0)", "sleep(limits.log_trim_s)", "N = 3"],
)
def test_what_is_no_number_or_no_limit_is_left_in_peace(code: str) -> None:
    assert not list(numbers(ast.parse(code)))
