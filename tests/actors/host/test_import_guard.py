"""Libraries that would bring torch along are imported without it where nothing needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("library", ["transformers", "tensorboard"])
def test_torch_stays_out_of_the_process_and_can_be_imported_later(library: str) -> None:
    lines = [
        "import sys",
        f"from actors.host.import_guard import import_{library}_without_torch as load",
        "load(); load()",
        "print('torch' in sys.modules)",
        "import importlib.util",
        "print(importlib.util.find_spec('torch') is not None)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False", "True"]


def test_the_tensorboard_sink_writes_without_torch() -> None:
    lines = [
        "import sys, tempfile",
        "from pathlib import Path",
        "from actors.metrics.sinks.sink import SinkSetup",
        "from actors.metrics.sinks.tensorboard_files import TensorBoardSink",
        "from configs.limits import DEFAULT_LIMITS",
        "from configs.schema import MetricsConfig",
        "folder = Path(tempfile.mkdtemp()); (folder / 'job.yaml').write_text('name: x')",
        "sink = TensorBoardSink(SinkSetup.of('x', folder, MetricsConfig(), DEFAULT_LIMITS))",
        "sink.write(1, {'step': 1, 'reward_mean': 0.5}); sink.close()",
        "print('torch' in sys.modules, len(list(folder.rglob('*tfevents*'))))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False", "1"]
