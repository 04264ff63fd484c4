"""``make check-gpu``, in its smallest form: on a CPU, with one suite, and with parts that are broken on purpose."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.check_gpu import __main__ as check
from benchmarks.check_gpu import device
from benchmarks.check_gpu.device import Driver, Torch, unusable
from benchmarks.check_gpu.parts import PARTS, Part, Place
from benchmarks.check_gpu.running import Ended

ROOT = Path(__file__).parents[2]
H200 = Driver(("NVIDIA H200",), "570.1")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_with_the_cpu_in_the_devices_place_the_report_says_so_and_the_last_line_counts(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = ["make", "-s", "check-gpu", "CHECK_DEVICE=cpu", f"PYTHON={sys.executable}"]
    command += [f"CHECK_ARGS=--parts=weights --report={report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    text = report.read_text().splitlines()
    assert text[0] == "# GPU check with the CPU in the device's place: nothing of this has run on a GPU"
    assert any(line.startswith("| weights |") and "| passed |" in line and "tests 4" in line for line in text)
    assert any(line.startswith("| torch | 2.") for line in text)
    assert text[-1] == "2 passed, 0 failed, 0 skipped"


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: dict[str, Part], *, on: str = "cpu") -> tuple[int, str]:
    """The exit code of a check of ``parts`` alone, and its report."""
    monkeypatch.setattr(check, "PARTS", parts)
    report = tmp_path / "report.md"
    code = check.main(["--device", on, "--parts", ",".join(parts), "--report", str(report)])
    return code, report.read_text()


def runs(code: str, *, limit_s: float = 60.0, **more: object) -> Part:
    """A measurement that is this Python code."""
    read = PARTS["loop"].read
    return Part("it works", lambda place: [sys.executable, "-c", code], read, limit_s=limit_s, **more)  # type: ignore[arg-type]


def test_what_fails_or_hangs_is_counted_as_failed_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that hangs has a child with a session of its own, which is ended too."""
    noted = tmp_path / "pid"
    child = "['sleep', '300'], start_new_session=True"
    hangs = f"import pathlib, subprocess; p = subprocess.Popen({child}); "
    hangs += f"pathlib.Path({str(noted)!r}).write_text(str(p.pid)); print('begun', flush=True); p.wait()"
    code, report = run(
        monkeypatch, tmp_path,
        {
            "breaks": runs("import sys; sys.exit('out of memory')"),
            "hangs": runs(hangs, limit_s=2.0),
            "lacks": runs("", missing=lambda place: "vLLM is not installed"),
            "works": runs("print('{\"async\": {\"ratio\": 1.5}}')"),
        },
    )  # fmt: skip
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 2 failed, 1 skipped"
    assert "**breaks**: out of memory" in report
    assert "it was ended after 2 s\nbegun" in report
    assert "**lacks**: vLLM is not installed" in report
    assert "| works | it works | passed | 0 | ratio 1.5;" in report
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(int(noted.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(noted.read_text()))


def test_a_suite_names_the_tests_that_failed_and_one_that_ran_none_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(
        "import pytest\n\n\ndef test_it_adds():\n    assert 1 + 1 == 3\n\n\ndef test_it_holds():\n    pass\n\n\n"
        "@pytest.mark.skip(reason='torch finds no CUDA device')\ndef test_on_cuda():\n    pass\n"
    )
    suite, place = PARTS["weights"], Place("cpu", tmp_path)
    command = [
        word if word != "tests/contracts/test_weights_contract.py" else "test_broken.py"
        for word in suite.command(place)
    ]

    def result(*more: str):
        done = subprocess.run(
            [*command, "-c", "/dev/null", *more], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        return suite.read(place, Ended(done.returncode, 1.0, done.stdout, done.stderr))

    broken = result()
    assert broken.outcome == "failed"
    assert broken.figures == {"tests": 1, "tests_skipped": 1, "tests_failed": 1}
    assert broken.why == "test_it_adds: assert (1 + 1) == 3"
    none = result("-k", "on_cuda")
    assert (none.outcome, none.why) == ("skipped", "torch finds no CUDA device")


def test_without_a_device_there_is_one_sentence_and_all_else_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, report = run(monkeypatch, tmp_path, {"works": runs("print(1)")}, on="cuda")
    assert code == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "0 passed, 1 failed, 1 skipped"
    assert told.err.count("\n") == 1
    assert "there is no NVIDIA device here (there is no nvidia-smi): run this on a machine that has one" in told.err
    assert report.startswith("# GPU check: no device could be used")
    assert "**works**: there is no device to run on" in report


@pytest.mark.parametrize(
    ("driver", "torch", "visible", "said"),
    [
        (H200, Torch("2.11.0", "13.0"), None, ""),
        (Driver(), Torch("2.11.0", "13.0", "Found no NVIDIA driver"), None, "there is no NVIDIA device here"),
        (H200, Torch("2.13.0+cpu", None, "not compiled with CUDA"), None, "torch 2.13.0+cpu is built without CUDA"),
        (
            H200, Torch("2.11.0", "13.0", "The NVIDIA driver on your system is too old (found version 12040)"), None,
            "the driver 570.1 of NVIDIA H200 is too old for torch 2.11.0, which is built for CUDA 13.0: update",
        ),
        (H200, Torch("2.11.0", "13.0", "No CUDA GPUs are available"), "7", "CUDA_VISIBLE_DEVICES='7' hides NVIDIA"),
        (H200, Torch("2.11.0", "13.0", "no kernel image"), None, "cannot compute on NVIDIA H200: no kernel image"),
    ],
)  # fmt: skip
def test_one_sentence_says_why_a_device_cannot_be_used(
    driver: Driver, torch: Torch, visible: str | None, said: str
) -> None:
    sentence = unusable(driver, torch, visible)
    assert said in sentence
    assert bool(sentence) == bool(said)


def test_what_nvidia_smi_says_is_read_and_its_failure_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    smi = tmp_path / "nvidia-smi"

    def says(script: str) -> Driver:
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        return device.ask_driver()

    assert says("echo 'NVIDIA H200, 570.1'; echo 'NVIDIA H200, 570.1'") == Driver(("NVIDIA H200",) * 2, "570.1")
    failed = says("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert dataclasses.astuple(failed)[:2] == ((), "")
    assert "Driver/library version mismatch" in failed.said


def test_what_would_begin_after_the_end_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "CHECK_S", 0.0)
    code, report = run(monkeypatch, tmp_path, {"works": runs("print(1)")})
    assert code == 0
    assert "**works**: the 0 s of the whole check were over" in report


def test_every_part_has_a_command_on_either_device_and_the_limits_are_minutes() -> None:
    for part in PARTS.values():
        for on in ("cpu", "cuda"):
            command = part.command(Place(on, Path("/scratch")))
            files = [word for word in command if word.startswith("tests/")]
            assert all((ROOT / file).exists() for file in files)
        assert 0 < part.limit_s <= check.CHECK_S / 2


def test_an_unknown_part_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--parts", "engine,warp"])
    assert "there is no 'warp'; expected some of engine, backend" in capsys.readouterr().err
