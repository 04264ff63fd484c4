"""The parts of a check. Each is one process: a suite of tests, or a measurement that ends with one line of JSON.

On a device the suites run what is marked ``gpu``, and on a CPU in its place the same suites' tests of torch on a CPU.
Measurements are shorter there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from benchmarks.check_gpu.running import Ended, Result

LIMIT_S: Final = 150.0
"""One part: twice what the longest has taken on one H200."""
_NAMED_FAILURES: Final = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part runs."""

    device: str
    directory: Path
    """Its own, for what it writes."""

    @property
    def on_cpu(self) -> bool:
        """The CPU has the device's place."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is checked."""

    shows: str
    """What has been shown once it has passed, after "shows that"."""
    command: Callable[[Place], list[str]]
    read: Callable[[Place, Ended], Result]
    """The result of a process that has ended by itself."""
    missing: Callable[[Place], str] = lambda place: ""
    """Why it is skipped here; empty: it is not."""
    limit_s: float = LIMIT_S


# ---------------------------------------------------------------------- suites


def _suite(shows: str, files: Sequence[str], *, on_cuda: str = "", on_cpu: str = "", **more: Any) -> Part:
    """Tests of ``files``; ``on_cuda`` and ``on_cpu`` choose among them by name, after the mark."""

    def command(place: Place) -> list[str]:
        mark, names = ("not gpu and not long", on_cpu) if place.on_cpu else ("gpu", on_cuda)
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={_report_of(place)}", f"--basetemp={place.directory}/t"]
        options += ["-m", mark, *(["-k", names] if names else []), *_processes()]
        return [sys.executable, "-m", "pytest", *files, *options]

    return Part(shows, command, _read_suite, **more)


def _report_of(place: Place) -> Path:
    return place.directory / "tests.xml"


def _processes() -> list[str]:
    """Several processes share the device where there are cores for them, and where xdist is installed."""
    count = min(4, len(os.sched_getaffinity(0)) // 4)
    if count < 2 or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(count), "--dist", "worksteal"]


def _read_suite(place: Place, ended: Ended) -> Result:
    report = _report_of(place)
    if not report.exists():
        return Result("failed", why=ended.tail)
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - pytest wrote it just now
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if (case.find("skipped")) is not None]
    figures: dict[str, object] = {"tests": len(cases) - len(failed) - len(skipped)}
    if skipped:
        figures["tests_skipped"] = len(skipped)
    if failed:
        names = [f"{case.get('name')}: {_message(case)}" for case in failed]
        more = [f"and {len(names) - _NAMED_FAILURES} more"] if len(names) > _NAMED_FAILURES else []
        return Result("failed", {**figures, "tests_failed": len(failed)}, "\n".join([*names[:_NAMED_FAILURES], *more]))
    if len(cases) == len(skipped):
        why = "; ".join(sorted({_message(case) for case in skipped})) or "there is no such test"
        return Result("skipped", why=why)
    if ended.code != 0:
        return Result("failed", figures, ended.tail)
    return Result("passed", figures)


def _message(case: ET.Element) -> str:
    """The first line of what a test said as it failed or was skipped."""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            return (found.get("message") or "").partition("\n")[0]
    return ""


# ---------------------------------------------------------------------- measurements


def _measurement(
    shows: str, command: Callable[[Place], list[str]], keys: Mapping[str, str], *, under: str = "", **more: Any
) -> Part:
    """A benchmark's last line is JSON; ``keys`` names what of it the report tells, ``a.b`` being b within a."""

    def read(place: Place, ended: Ended) -> Result:
        lines = ended.out.splitlines()
        try:
            told: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        except json.JSONDecodeError:
            told = {}
        told = told.get(under, {}) if under else told
        if ended.code != 0 or not told:
            return Result("failed", why=str(told.get("error") or ended.tail))
        return Result("passed", {name: _within(told, key) for name, key in keys.items()})

    return Part(shows, command, read, **more)


def _within(told: Any, key: str) -> object:
    for name in key.split("."):
        told = told.get(name, "not told") if isinstance(told, dict) else told
    return round(told, 3) if isinstance(told, float) else told


def _bench_gpu(shows: str, part: str, keys: Mapping[str, str], **more: Any) -> Part:
    """A part of `bench gpu`."""

    def command(place: Place) -> list[str]:
        small = ["--small"] if place.on_cpu else []
        return [sys.executable, "-m", "benchmarks.gpu.gpu", "--json", "--device", place.device, "--parts", part, *small]

    return _measurement(shows, command, keys, under=part, **more)


_JOB: Final = {
    "steps": "steps",
    "first_reward": "reward_first",
    "last_reward": "reward_last",
    "samples/s": "samples_per_second",
    "lost": "prompts_lost",
    "trained_twice": "samples_trained_twice",
}


def _long_rows(kind: str) -> Callable[[Place], list[str]]:
    """`bench long_rows`; on a CPU always in blocks, since flex_attention has no backward pass there."""

    def command(place: Place) -> list[str]:
        sizes = ["--tokens=4096", "--kind=blocks"] if place.on_cpu else ["--tokens=16384", f"--kind={kind}"]
        options = ["--json", "--check", "--cases=group", f"--device={place.device}", *sizes]
        return [sys.executable, "-m", "benchmarks.gpu.long_rows", *options]

    return command


_LONG_ROWS: Final = {
    "of_dense_memory": "of_its_memory", "of_dense_time": "of_its_time", "gradients_differ_by": "gradient_difference",
}  # fmt: skip


def _loop(place: Place) -> list[str]:
    """`bench loop` in async mode, where engine and trainer compute at once."""
    device = [f"--set={role}.device={place.device}" for role in ("rollout", "trainer")]
    shorter = ["--job=configs/quickstart.yaml", "--set=model.warm_start_steps=30"] if place.on_cpu else []
    cores = f"--cores={len(os.sched_getaffinity(0))}"
    steps = ["--steps=8", "--skip=3", "--threads=1:1", "--mode=async"]
    return [sys.executable, "-m", "benchmarks.jobs.loop", "--json", *steps, *device, *shorter, cores]


def _head(place: Place) -> list[str]:
    """`bench train_memory`, on a CPU with sizes at which its processes take no time."""
    small = ["--tokens=256", "--vocabulary=20000", "--hidden=64"] if place.on_cpu else []
    return [sys.executable, "-m", "benchmarks.gpu.train_memory", "--json", f"--device={place.device}", *small]


def _compile(place: Place) -> list[str]:
    """`bench compile`, on a CPU with a model that compiles in little time."""
    sizes = ["--tokens=1024", "--hidden=32", "--layers=2"] if place.on_cpu else ["--tokens=16384", "--hidden=1024"]
    return [sys.executable, "-m", "benchmarks.gpu.compile", "--json", "--check", f"--device={place.device}", *sizes]


# ---------------------------------------------------------------------- all of them


def _no_vllm(place: Place) -> str:
    return "" if importlib.util.find_spec("vllm") else "vLLM is not installed (make vllm)"


ENGINE: Final = ["tests/contracts/test_rollout_engine_contract.py", "tests/actors/rollout"]
BACKEND: Final = ["tests/contracts/test_train_backend_contract.py", "tests/contracts/test_parkable_contract.py"]
ROWS: Final = ["tests/contracts/test_row_attention_contract.py"]
MEMORY: Final = [
    "tests/actors/trainer/backends/test_out_of_memory.py",
    "tests/actors/trainer/backends/test_recompute.py",
    "tests/actors/trainer/backends/test_device_sums.py",
]
WEIGHTS: Final = ["tests/contracts/test_weights_contract.py"]
OTHER_MODELS: Final = [
    "tests/actors/environments/test_model_scorer.py",
    "tests/actors/reward_training/test_training.py",
    "tests/contracts/test_length_model_contract.py",
]

PARTS: Final[dict[str, Part]] = {
    "engine": _suite(
        "the torch engine keeps its contract", ENGINE, on_cuda="not vllm", on_cpu="torch and contract and not vllm"
    ),
    "backend": _suite(
        "the train backend keeps its contract", BACKEND, on_cuda="not fsdp", on_cpu="torch and not service and not fsdp"
    ),
    "fsdp": _suite("the sharded train backend keeps its contract", BACKEND[:1], on_cuda="fsdp", on_cpu="fsdp"),
    "row_attention": _suite("packed rows see what sequences by themselves see, in blocks and by flex", ROWS),
    "long_rows": _measurement(
        "attention in blocks takes less than a dense mask", _long_rows("blocks"), _LONG_ROWS, under="group"
    ),
    "long_rows_flex": _measurement(
        "flex_attention takes less than a dense mask", _long_rows("flex"), _LONG_ROWS, under="group"
    ),
    "memory": _suite("what does not fit is halved, and what is measured to fit does", MEMORY),
    "weights": _suite("what is published is what is served, and scores alike", WEIGHTS),
    "other_models": _suite(
        "reward models score and are trained, and response lengths are predicted", OTHER_MODELS,
        on_cpu="each_gets or what_is_written or made",
    ),
    "quickstart": _bench_gpu("the quickstart learns, and nothing is lost or trained twice", "sync", _JOB),
    "weight_load": _bench_gpu(
        "a version is published, and mapped, verified and loaded, beside plain copies", "weights",
        {"bytes": "bytes", "publish_over_copies": "ratio_publish_stall", "load_over_copies": "ratio_map_and_load"},
    ),
    "adapter": _bench_gpu("an adapter is trained and served", "adapter", _JOB),
    "ppo": _bench_gpu("a reward model is trained and scores, a critic learns, a reference judges", "ppo", _JOB),
    "episodes": _bench_gpu("episodes of several turns are played and trained", "episodes", _JOB),
    "loop": _measurement(
        "whole jobs run beside a bare loop on the same device", _loop,
        {"ratio": "async.ratio", "samples/s": "async.ours_samples_per_second", "bare": "async.loop_samples_per_second"},
    ),
    "head": _measurement(
        "log-probabilities and their gradients take a part of the memory of whole logits", _head,
        {
            **{f"{name}_over_whole": f"bfloat16.{key}" for name, key in (("memory", "ratio"), ("time", "time_ratio"))},
            "apart": "bfloat16.apart", "growth": "growth.share", "float32_over_whole": "float32.ratio",
        },
    ),
    "compile": _measurement(
        "compiled layers learn what plain ones do, in a part of their time", _compile,
        {"of_plain_time": "ratio", "of_plain_memory": "memory_ratio", "start_s": "compiled.start_s", "apart": "apart"},
    ),
    "vllm": _suite(
        "the vLLM engine keeps its contract", ENGINE[:1], on_cuda="vllm and not server",
        on_cpu="vllm and not ranks and not server", missing=_no_vllm, limit_s=240.0,
    ),
    "server": _suite(
        "a worker that speaks to a vllm serve keeps the contract", ENGINE[:1], on_cuda="server",
        on_cpu="server and not vllm", missing=_no_vllm, limit_s=240.0,
    ),
}  # fmt: skip
"""By name, in the order in which they run."""
