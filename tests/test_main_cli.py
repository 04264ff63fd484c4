"""The command line: its surface is frozen, every end has its exit code, and --json leaves stdout to programs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner, Result

from actors.control.keys import load_control_keys
from actors.control.server import ControlServer
from actors.control.socket import open_control_socket, store_endpoint
from configs.limits import DEFAULT_LIMITS
from supervisors.cli.app import app
from tests.actors.control.control_fakes import FakeBackend
from tests.supervisors.machine.fake_driver import fake_nvidia_smi
from transport.errors import LinkTimeout
from transport.zmq.security import load_keys

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SUMMARY = {
    "job": "quickstart", "state": "finished", "steps": 2, "reward_first": 0.4, "reward_last": 0.9, "samples": 512,
    "tokens": 9000, "seconds": 3.2, "restarts": 0, "prompts_lost": 0, "samples_trained_twice": 0, "policy_version": 2,
    "checkpoint": "runs/quickstart/checkpoints/step_000002",
}  # fmt: skip
ROW = {
    "step": 1, "reward_mean": 0.5, "seconds": 2.0, "tokens_generated": 9000, "staleness_max": 1,
    "rollout_idle_fraction": 0.25, "trainer_idle_fraction": 0.5,
}  # fmt: skip


def test_the_command_line_is_frozen() -> None:
    """A new option is a decision: add it here and to the reference."""
    assert _surface(typer.main.get_command(app)) == {
        "run": [
            "--control",
            "--control-keys",
            "--devices",
            "--dir",
            "--faults",
            "--json",
            "--keys",
            "--resume",
            "--services",
            "--set",
            "job",
        ],
        "check": ["--faults", "--json", "--services", "--set", "job"],
        "new": ["--data", "--model", "--reward", "file"],
        "schema": [],
        "runs": ["--json", "root"],
        "head": [
            "--allow-functions",
            "--control",
            "--control-keys",
            "--devices",
            "--dir",
            "--keys",
            "--listen",
            "--serve",
            "--services",
        ],
        "node": ["--devices", "--join", "--keys", "--kind", "--name", "--notice", "--site", "--slots"],
        "serve": [
            "--devices",
            "--dir",
            "--listen",
            "--model",
            "--prometheus-port",
            "--services",
            "--tenant",
            "--tenants",
            "--tls",
            "--tls-key",
            "--workers",
        ],
        "doctor": ["--back-to", "--json", "--run"],
        "bench": ["name"],
        "keys": [
            "--allow",
            "--days",
            "--operator",
            "--read-only",
            "--reader",
            "--revoke",
            "--tenant",
            "directory",
        ],
        "plot": ["--json", "--out", "run_dir"],
        "merge": ["--base", "--json", "checkpoint", "out"],
        "samples": ["--best", "--count", "--json", "--prompt", "--random", "--step", "--worst", "run_dir"],
        "eval": ["--dir", "--json", "--set", "job", "model"],
        "console": ["--job", "--keys", "--listen", "--open", "run"],
        "simulate": ["--json", "--log", "--out", "--processes", "--seed", "--seeds", "scenario"],
        "train-reward": [
            "--batch-pairs",
            "--batch-tokens",
            "--device",
            "--epochs",
            "--held-out",
            "--json",
            "--lr",
            "--max-tokens",
            "--model",
            "--out",
            "--seed",
            "--steps",
            "preferences",
        ],
        "actor": [],
        "lead": [],
        "held": [],
        "slurm": [],
        "slurm template": ["--dir", "--keys", "job"],
        "ctl": ["--control", "--json", "--keys", "--timeout"],
        "ctl submit": ["--json", "--set", "job"],
        "ctl jobs": ["--json"],
        "ctl watch": ["--json", "job"],
        "ctl pause": ["--json", "job"],
        "ctl resume": ["--json", "job"],
        "ctl cancel": ["--json", "job"],
        "ctl scale": ["--job", "--json", "workers"],
        "ctl drain": ["--json", "target"],
        "ctl undrain": ["--json", "target"],
        "ctl services": ["--json"],
        "ctl queue": ["--json"],
        "ctl models": ["--json"],
        "ctl service": [],
        "ctl service add": ["--json", "file", "name"],
        "ctl service drain": ["--json", "name"],
        "ctl service remove": ["--json", "name"],
        "ctl tree": ["--job", "--json"],
        "ctl nodes": ["--json"],
        "ctl stalls": ["--json", "--longer-than"],
        "ctl dead-letters": ["--json"],
        "ctl metrics": ["--job", "--json", "--last"],
        "ctl logs": ["--job", "--json", "--lines", "actor"],
        "ctl checkpoint": ["--json", "job"],
        "ctl inject": ["--for", "--job", "--json", "--set", "kind", "target"],
    }


def _surface(group: Any, prefix: str = "") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        found[prefix + name] = sorted(
            option for parameter in command.params for option in parameter.opts if option != "--help"
        )
        if hasattr(command, "commands"):
            found |= _surface(command, f"{prefix}{name} ")
    return found


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """A stand-in for the running system that ends as it is told."""
    monkeypatch.chdir(tmp_path)
    fake = types.SimpleNamespace(end=SUMMARY, ends={}, seen=[], keys=[], devices=[])

    async def run_head(directory: Path, jobs: dict[Path, Any], **given: Any) -> Any:
        if [*jobs] == [directory]:
            (job,) = jobs.values()
            fake.seen.append((job, directory, given.get("resume"), given.get("control")))
            fake.devices.append(given["devices"])
            fake.keys.append((given.get("keys"), given.get("control_keys")))
        else:
            fake.seen.append((directory, jobs, given))
        for job in jobs.values():
            news = {"state": "running", "steps": job.steps, "workers": 2, "waiting_for": "rollout-0 to start"}
            given["on_progress"]({"of_job": job.name} | news)
            given["on_progress"]({"of_job": job.name} | ROW)
        await asyncio.sleep(0)
        if isinstance(fake.end, BaseException):
            raise fake.end
        ends = {job.name: fake.end | {"job": job.name} | fake.ends.get(job.name, {}) for job in jobs.values()}
        for run_dir, job in jobs.items():
            if run_dir != directory:
                (run_dir / "summary.json").write_text(json.dumps(ends[job.name]))
        return ends

    module = types.ModuleType("supervisors.trees")
    module.run_head = run_head  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "supervisors.trees", module)
    return fake


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_devices_that_the_machine_does_not_have_end_a_command_before_it_begins(
    trees: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path / "bin", [0, 0]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for arguments in (["run", QUICKSTART], ["head"], ["node", "--join", "tcp://127.0.0.1:7001"]):
        result = invoke(*arguments, "--devices", "0,5")
        assert (result.exit_code, "--devices names 5, but this machine has 0, 1" in result.output) == (2, True), result
    assert trees.seen == [] and not (tmp_path / "runs").exists()
    assert invoke("run", QUICKSTART, "--devices", "1,").exit_code == 0
    assert [found.ids for found in trees.devices] == [("1",)]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (SUMMARY, 0),
        (SUMMARY | {"state": "failed", "error": "the trainer gave up"}, 1),
        (SUMMARY | {"state": "cancelled"}, 1),
        (SUMMARY | {"state": "interrupted"}, 130),
        (LinkTimeout("the head is silent"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_end_of_a_run_has_its_exit_code(trees: types.SimpleNamespace, end: Any, code: int) -> None:
    trees.end = end
    result = invoke("run", QUICKSTART)
    assert result.exit_code == code, result.output


def test_with_json_stdout_is_the_summary_and_nothing_else(trees: types.SimpleNamespace) -> None:
    result = invoke("run", QUICKSTART, "--json")
    assert json.loads(result.stdout) == SUMMARY
    assert "reward 0.500" in result.stderr


def test_a_run_tells_each_step_and_where_its_files_lie(trees: types.SimpleNamespace) -> None:
    out = invoke("run", QUICKSTART, "--dir", "here", "--set", "steps=60").stdout
    assert "waiting for rollout-0 to start" in out
    assert "step 0 (1 of 60)  reward 0.500  4,500 tokens/s  staleness 1  idle rollout 25% trainer 50%" in out
    for path in (SUMMARY["checkpoint"], "here/metrics.jsonl", "here/trace.json"):
        assert str(path) in out


def test_a_run_directory_holds_the_resolved_job_and_can_be_resumed(
    trees: types.SimpleNamespace, tmp_path: Path
) -> None:
    invoke("run", QUICKSTART, "--set", "steps=60", "--set", "rollout.workers=3", "--control", "tcp://127.0.0.1:7000")
    invoke("run", "--resume", "runs/quickstart", "--set", "steps=90")
    (first, run_dir, resumed, control), (again, same_dir, resumed_again, _) = trees.seen
    assert (run_dir, resumed, control) == (Path("runs/quickstart"), False, "tcp://127.0.0.1:7000")
    assert (same_dir, resumed_again) == (Path("runs/quickstart"), True)
    assert first.rollout.workers == again.rollout.workers == 3
    assert (first.steps, again.steps) == (60, 90)
    assert "directory" not in invoke("run", QUICKSTART).stderr
    assert (tmp_path / "runs" / "quickstart-2" / "job.yaml").exists()


@pytest.mark.parametrize(
    ("older", "refusal"),
    [
        ({"rollout": {"top_p": 1.0, "top_k": 0}}, ""),
        ({"sync": {"mode": "colocated"}}, 'sync.mode: "colocated" is no longer a choice. Write sync instead'),
        ({"trainer": {"window_prompts": 4}}, "Set sync.mode to minibatch or async, or remove it"),
    ],
)
def test_a_run_of_an_older_version_goes_on_or_is_refused_in_one_sentence(
    older: dict[str, dict[str, object]], refusal: str, trees: types.SimpleNamespace
) -> None:
    """Older job files name every key of their time, also those that had one legal value and went."""
    invoke("run", QUICKSTART, "--dir", "here")
    file = Path("here/job.yaml")
    job = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(job | {section: job[section] | keys for section, keys in older.items()}))
    result = invoke("run", "--resume", "here")
    assert (result.exit_code, len(trees.seen)) == ((2, 1) if refusal else (0, 2))
    assert refusal in result.stderr
    if refusal:
        assert len(result.stderr.strip().splitlines()) == 1
        assert "here/job.yaml:" in result.stderr


def test_a_run_is_neither_overwritten_nor_changed_in_what_its_journal_tells_of(trees: types.SimpleNamespace) -> None:
    invoke("run", QUICKSTART, "--dir", "here")
    again = invoke("run", QUICKSTART, "--dir", "here")
    assert (again.exit_code, "--resume here" in again.stderr) == (2, True)
    changed = invoke("run", "--resume", "here", "--set", "algorithm.group_size=4")
    assert (changed.exit_code, "cannot change in mid-run" in changed.stderr) == (2, True)


def test_an_interrupted_run_says_how_to_go_on(trees: types.SimpleNamespace) -> None:
    trees.end = SUMMARY | {"state": "interrupted"}
    assert "headrace run --resume here" in invoke("run", QUICKSTART, "--dir", "here").stdout


SHARED = ROOT / "configs" / "shared"
PAIR = (str(SHARED / "first.yaml"), str(SHARED / "second.yaml"), "--services", str(SHARED / "services.yaml"))


def test_several_jobs_run_side_by_side_and_end_with_a_list_of_their_summaries(trees: types.SimpleNamespace) -> None:
    result = invoke("run", *PAIR, "--json", "--set", "steps=2")
    assert result.exit_code == 0, result.output
    assert [summary["job"] for summary in json.loads(result.stdout)] == ["first", "second"]
    ((directory, jobs, given),) = trees.seen
    assert directory == Path("runs/first+second")
    assert {str(run_dir): job.steps for run_dir, job in jobs.items()} == {
        "runs/first+second/first": 2, "runs/first+second/second": 2,
    }  # fmt: skip
    assert [service.name for service in given["services"].services] == ["train-0"]
    assert "second: step 0 (1 of 2)" in result.stderr


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({"first": {"state": "interrupted"}}, 130),
        ({"first": {"state": "interrupted"}, "second": {"state": "failed", "error": "gone"}}, 1),
    ],
)
def test_of_several_ends_the_worst_is_the_exit_code(
    trees: types.SimpleNamespace, ends: dict[str, Any], code: int
) -> None:
    trees.ends = ends
    assert invoke("run", *PAIR).exit_code == code


def test_of_several_jobs_those_that_have_not_finished_go_on(trees: types.SimpleNamespace) -> None:
    trees.ends = {"second": {"state": "interrupted"}}
    assert "headrace run --resume here" in invoke("run", *PAIR, "--dir", "here").stdout.replace("\n", " ")
    trees.ends = {}
    result = invoke("run", "--resume", "here", *PAIR[2:], "--json")
    assert [summary["state"] for summary in json.loads(result.stdout)] == ["finished", "finished"]
    _, jobs, given = trees.seen[-1]
    assert ([job.name for job in jobs.values()], given["resume"]) == (["second"], True)
    assert [s["job"] for s in json.loads(invoke("run", "--resume", "here", "--json").stdout)] == ["first", "second"]
    assert len(trees.seen) == 2, "nothing was left to run"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PAIR, "--set", "trainer.service=train-9"], "'train-9' is no service of this head. Did you mean 'train-0'?"),
        ([*PAIR, "--set", "trainer.threads=2"], "trainer.threads: 2, but the service train-0 computes with 1"),
        ([*PAIR[:2]], "trainer.service: train-0 is named, but there are no services. Add --services FILE"),
        ([PAIR[0], *PAIR], "first is the name of two of the jobs"),
        (
            [*PAIR, "--faults", "plan.yaml"],
            "target.job: is missing, and role rollout may be of any of the jobs 'first', ",
        ),
        ([*PAIR, "--faults", "other.yaml"], "faults.0.target.job: this run is of jobs 'first', 'second', not 'third'"),
        (
            [*PAIR, "--faults", "steps.yaml"],
            "faults.0.target.job: is missing, and after_step may count the steps of any",
        ),
        ([*PAIR, "--set", "name=logs"], "name"),
        ([*PAIR, "--services", "none.yaml"], "there is no such file"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused_before_anything_begins(
    trees: types.SimpleNamespace, arguments: list[str], says: str
) -> None:
    for name, fault in (("plan", "{role: rollout}}"), ("other", "{role: rollout, job: third}}"),
                        ("steps", "{role: head}, after_step: 1}")):  # fmt: skip
        Path(f"{name}.yaml").write_text(f"faults: [{{kind: kill, target: {fault}]\n")
    result = invoke("run", *arguments)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output
    assert trees.seen == []


def test_simulate_says_what_is_wrong_with_a_scenario_and_with_seeds(tmp_path: Path) -> None:
    missing = invoke("simulate", str(tmp_path / "none.yaml"))
    assert (missing.exit_code, "there is no such file" in missing.stderr) == (2, True)
    chaos = str(ROOT / "configs" / "chaos.yaml")
    for wrong in (["5"], ["5..3"], ["1..2", "--seed", "1"], ["1..2", "--log"]):
        result = invoke("simulate", chaos, "--seeds", *wrong)
        assert (result.exit_code, "--seeds" in result.stderr) == (2, True), wrong


@pytest.mark.parametrize(
    ("rows", "says"), [(None, "my.csv: cannot be read"), ("x,a,up,spot", "my.csv:1: has 4 fields")]
)
@pytest.mark.parametrize("seeds", [["--seed", "1"], ["--seeds", "1..2"], ["--seeds", "1..2", "--processes", "2"]])
def test_simulate_says_what_is_wrong_with_the_trace_of_a_scenario(
    tmp_path: Path, rows: str | None, says: str, seeds: list[str]
) -> None:
    if rows is not None:
        (tmp_path / "my.csv").write_text(rows)
    scenario = tmp_path / "spot.yaml"
    scenario.write_text("name: spot\njobs: [{name: a, place_rollout: elastic}]\nspot: {trace: my.csv}\n")
    result = invoke("simulate", str(scenario), *seeds)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_an_unknown_benchmark_is_told_what_there_is() -> None:
    result = invoke("bench", "nothing-of-that-name", "--json")
    assert (result.exit_code, "no benchmark 'nothing-of-that-name'" in result.stderr) == (2, True)


def test_bench_without_a_name_lists_what_there_is() -> None:
    result = invoke("bench")
    assert result.exit_code == 2
    listed = {line.split()[0]: line for line in result.stderr.splitlines()[1:]}
    assert {"ask", "loop", "recovery"} <= set(listed)
    assert "Recovery times on real processes" in listed["recovery"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--allow", "foo"], "--allow foo: expected NAME=PUBLIC"),
        (["--allow", "foo="], "--allow foo=: expected NAME=PUBLIC"),
        (["--read-only", "=x"], "--read-only =x: expected NAME=PUBLIC"),
        (["--operator", "file"], "file is a file: expected a directory of keys, or a name for a new one"),
    ],
)
def test_wrong_words_to_keys_are_told_before_any_key_is_made(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = invoke("keys", "k", *arguments)
    assert (result.exit_code, result.stderr) == (2, f"headrace: {says}\n")
    assert not (tmp_path / "k").exists()


def test_a_file_is_no_place_for_keys(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("keys", str(tmp_path / "file"))
    assert (result.exit_code, "is a file: expected a directory" in result.stderr) == (2, True)


def test_keys_are_made_once_and_shown(tmp_path: Path) -> None:
    first = invoke("keys", str(tmp_path / "a"))
    other = invoke("keys", str(tmp_path / "b"))
    again = invoke("keys", str(tmp_path / "a"), "--allow", f"b={other.stdout.strip()}")
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    assert first.stdout == again.stdout
    assert len(first.stdout.strip()) == 40
    assert "1 others are allowed" in again.stderr
    assert again.stderr.rstrip().endswith(f"take one away by removing its file in {tmp_path / 'a' / 'allowed'}")
    assert invoke("keys", str(tmp_path / "a"), "--allow", "b=short").exit_code == 2


def test_keys_of_control_clients_are_made_with_their_role(tmp_path: Path) -> None:
    command = (
        "keys",
        str(tmp_path / "control"),
        "--operator",
        str(tmp_path / "alice"),
        "--reader",
        str(tmp_path / "bob"),
    )
    first, again = invoke(*command), invoke(*command)  # what is there stays
    assert (first.exit_code, first.output) == (0, again.output)
    assert "1 others are allowed (alice), 1 may only look (bob)" in again.stderr
    assert f"{tmp_path / 'control' / 'allowed'} or {tmp_path / 'control' / 'read-only'}" in again.stderr
    keys = load_control_keys(tmp_path / "control")
    assert keys.pair.public.decode() == first.stdout.strip()
    assert keys.pair.allowed == {load_keys(tmp_path / "alice").public}
    assert keys.read_only == {load_keys(tmp_path / "bob").public}
    swapped = invoke("keys", str(tmp_path / "control"), "--operator", str(tmp_path / "bob"))
    assert (swapped.exit_code, "may only look as long as" in swapped.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", QUICKSTART, "--control", "tcp://0.0.0.0:7000"], "--control-keys control-keys"),
        (["run", QUICKSTART, "--control", "7000"], "expected tcp://HOST:PORT"),
        (["run", QUICKSTART, "--control-keys", "nowhere"], "make keys with `headrace keys`"),
        (["run", QUICKSTART, "--keys", "k", "--control-keys", "k"], "the control socket has keys of its own"),
        (["run", QUICKSTART, "--keys", "k", "--control-keys", "shares"], "the control socket has keys of its own"),
        (["run", QUICKSTART, "--keys", "loose"], "chmod 600"),
        (
            ["run", QUICKSTART, "--set", "cluster.nodes=1", "--set", "cluster.listen=tcp://0.0.0.0:7001"],
            "make keys with `headrace keys`",
        ),
        (["run", QUICKSTART, "--set", "cluster.nodes=1", "--set", "cluster.listen=foo"], "expected tcp://HOST:PORT"),
        (["head", "--listen", "foo"], "expected tcp://HOST:PORT"),
        (["node", "--join", "127.0.0.1:7001"], "expected tcp://HOST:PORT"),
        (["node", "--join", "tcp://127.0.0.1:70010"], "expected tcp://HOST:PORT"),
        (["node", "--join", "tcp://127.0.0.1:7001?key=abcd"], "hexadecimal as the listener printed it"),
        (["node", "--join", "tcp://10.9.8.7:7001"], "add --keys DIRECTORY"),
        (["node", "--join", "tcp://10.9.8.7:7001", "--keys", "nowhere"], "make keys with `headrace keys`"),
        (["head", "--control", "tcp://*:7000", "--keys", "k"], "--control-keys control-keys"),
        (["head", "--listen", "tcp://0.0.0.0:7001", "--control-keys", "k"], "make keys with `headrace keys`"),
        (["head", "--keys", "nowhere"], "make keys with `headrace keys`"),
    ],
)
def test_a_socket_that_would_be_open_or_has_the_wrong_keys_ends_with_code_2_before_anything_is_written(
    trees: types.SimpleNamespace, tmp_path: Path, arguments: list[str], says: str
) -> None:
    for name in ("k", "shares", "loose"):
        assert invoke("keys", name).exit_code == 0
    public = (tmp_path / "k" / "node.public").read_text().strip()
    assert invoke("keys", "shares", "--read-only", f"node={public}").exit_code == 0
    (tmp_path / "loose" / "node.secret").chmod(0o644)
    result = invoke(*arguments)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output
    assert trees.seen == []
    assert not (tmp_path / "runs").exists()


def test_keys_reach_the_run(trees: types.SimpleNamespace, tmp_path: Path) -> None:
    for name in ("nodes", "control"):
        invoke("keys", name)
    result = invoke(
        "run", QUICKSTART, "--keys", "nodes", "--control-keys", "control", "--control", "tcp://0.0.0.0:7000"
    )
    assert result.exit_code == 0, result.output
    assert trees.keys == [(Path("nodes"), Path("control"))]


def test_help_loads_neither_torch_nor_vllm_nor_zmq() -> None:
    program = (
        "import sys\n"
        "from supervisors.cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A control server in another thread, as ``ctl`` has its own loop."""
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        backend = FakeBackend()
        server = ControlServer(
            backend, open_control_socket(f"ipc://{tmp_path}/c.sock", DEFAULT_LIMITS), limits=DEFAULT_LIMITS
        )
        await server.start()
        store_endpoint(tmp_path, server.endpoint)
        backend.events.put_nowait({"kind": "step", "step": 1})
        backend.events.put_nowait(None)
        started.set()
        await asyncio.to_thread(stop.wait, 60)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    yield tmp_path
    stop.set()
    thread.join(10)


def test_ctl_speaks_every_verb_in_tables_and_in_json(run_dir: Path) -> None:
    def ctl(*arguments: str) -> Result:
        return invoke("ctl", "--control", str(run_dir), *arguments)

    tree = json.loads(ctl("tree", "--json").stdout)
    assert {"name", "role", "node", "pid", "state", "incarnation", "restarts"} <= set(tree[0])
    assert json.loads(invoke("ctl", "--control", str(run_dir), "--json", "tree").stdout) == tree
    assert "rollout-0" in ctl("tree").stdout
    assert json.loads(ctl("nodes", "--json").stdout)[0]["free"] == ["1"]
    assert "0: demo.trainer; 1: -" in ctl("nodes").stdout
    assert "demo" in ctl("jobs").stdout
    assert "state paused" in ctl("pause").stdout
    assert "state running" in ctl("resume", "demo").stdout
    assert "workers 4" in ctl("scale", "4", "--job", "demo").stdout
    assert "node-1" in ctl("drain", "node-1").stdout
    assert json.loads(ctl("stalls", "--longer-than", "3", "--json").stdout)[0]["waits_for"] == "trainer"
    assert "job.demo" in ctl("stalls").stdout
    assert "no_link" in ctl("dead-letters").stdout
    assert "0.2" in ctl("metrics", "--last", "2").stdout
    assert "trainer: line 0" in ctl("logs", "trainer").stdout
    assert "step_000003" in ctl("checkpoint").stdout
    assert json.loads(ctl("watch", "--json").stdout) == {"kind": "step", "step": 1}
    assert "job quickstart" in ctl("submit", QUICKSTART, "--set", "steps=3").stdout
    assert "rollout-0" in ctl("inject", "kill", "rollout-0").stdout
    assert json.loads(ctl("inject", "hang", "role=rollout", "--for", "2", "--json").stdout)["kind"] == "hang"
    assert "cancelled" in ctl("cancel", "quickstart").stdout


def test_ctl_says_no_with_the_reason_and_an_exit_code(run_dir: Path) -> None:
    gone = invoke("ctl", "--control", str(run_dir), "pause", "nobody")
    assert (gone.exit_code, gone.stderr) == (1, "headrace ctl: there is no job 'nobody'. Look with jobs\n")
    silent = invoke("ctl", "--control", f"ipc://{run_dir}/other.sock", "jobs")
    assert (silent.exit_code, "no control server answers" in silent.stderr) == (1, True)
    assert invoke("ctl", "--control", str(run_dir / "nowhere"), "jobs").exit_code == 2
    wrong = invoke("ctl", "--control", str(run_dir), "submit", QUICKSTART, "--set", "rollout.wokers=1")
    assert (wrong.exit_code, "rollout.workers" in wrong.stderr) == (2, True)
