"""The generated pages of the reference are what the code says today, and so is the page of metrics."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from actors.fleet.length_ranking import FRACTIONS
from actors.fleet.modes.planned import COLUMNS as PLAN_COLUMNS
from actors.fleet.modes.seeding import COLUMNS as SEEDING_COLUMNS
from actors.fleet.recovery import Recoveries
from actors.fleet.workers import WorkerTable
from actors.jobs.summary import cost_of
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.protocol.training import CallTimes
from actors.protocol.work import SamplingParams
from actors.scheduler.episode_meter import EpisodeMeter
from actors.scheduler.meter import StepMeter
from actors.trainer.accounts import StepAccounts
from actors.trainer.backend import StepResult
from actors.trainer.learning.step_estimates import shaped_columns
from configs.limits import DEFAULT_LIMITS
from configs.loader import schema_keys
from supervisors.nemesis.fault_schedule import STARTED

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference_generate", REFERENCE / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GENERATOR = _generator()


@pytest.mark.parametrize("page", sorted(GENERATOR.PAGES))
def test_a_generated_page_is_up_to_date(page: str) -> None:
    """If not: python docs/reference/generate.py."""
    written = (REFERENCE / page).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[page]().rstrip("\n") + "\n"


def test_every_key_and_every_limit_has_its_row_and_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", (REFERENCE / "job_file.md").read_text(), re.MULTILINE))
    keys = [key for key in schema_keys() if not key.startswith("limits.")]
    assert sorted(rows) == sorted(keys)
    assert [key for key, meaning in rows.items() if not meaning.strip()] == []
    limits = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "limits.md").read_text(), re.MULTILINE)
    assert [f"limits.{name}" for name in limits] == [key for key in schema_keys() if key.startswith("limits.")]


def test_the_page_of_metrics_names_every_column() -> None:
    """A row as the trainer's accounts and the scheduler's meter make it."""
    result = StepResult(grad_norm=1.0, learning_rate=1e-3, skipped=False)
    from_trainer = StepAccounts().metrics([], result, step=0, seconds=1.0) | {
        "grants_ignored": 0.0,
        "micro_batch_tokens": 0.0,
        "recompute": 0.0,
        "tokens_scored_early": 0.0,
        **CallTimes().metrics(),
        "expert_imbalance": 1.0,
        **StepAccounts().critic_metrics(StepResult(grad_norm=0.0, learning_rate=0.0, skipped=False)),
        **shaped_columns(np.zeros((1, 1)), None, 1),
        "explained_variance": 0.0,
    }
    ledger = Ledger()
    one = np.ones(1, np.int32)
    ledger.apply(ev.BatchIssued(0, 1, SamplingParams(max_tokens=4), np.zeros(1, np.int64), one, one, [b""]))
    row = StepMeter(ledger, WorkerTable(), 0.0).take(ledger.batches[0], 1, from_trainer, 1.0)
    row |= Recoveries(ledger).metrics()
    row |= dict.fromkeys(set(EpisodeMeter(ledger, DEFAULT_LIMITS).take(ledger.batches[0])), 0.0)
    row |= dict.fromkeys([*FRACTIONS, "length_known_fraction"], 0.0)
    row |= dict.fromkeys([*SEEDING_COLUMNS, *PLAN_COLUMNS], 0.0)
    row |= dict.fromkeys(["billed_worker_s", "compute_worker_s", "functions_started", "functions_cold_s"], 0.0)
    row |= cost_of({"tokens_generated": 1}, 1.0)
    named = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(row)


def test_the_page_of_events_names_every_event_that_code_records() -> None:
    """Names are written out where they are recorded; those of supervision follow from the kinds."""
    sources = [*(ROOT / "actors").rglob("*.py"), *(ROOT / "supervisors").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources if "simulation" not in path.parts)
    told = re.findall(r"(?:event|record|_event|_record|_write_event|_tell_metrics|_strand)\(\s*\"([a-z_]+)\"", code)
    told += re.findall(r"Event\(job=[^\n]*, name=\"([a-z_]+)\"", code)
    told += re.findall(r"Resize\([^\n]*, \"([a-z_]+)\", ", code)
    told += re.findall(r"Event\(job=[^)]*?name=\"([a-z_]+)\"", code)
    supervisor = (ROOT / "supervisors" / "tree" / "supervisor.py").read_text(encoding="utf-8")
    tells = re.findall(r"self\._tell\(([^,]*), child", supervisor)
    told += [f"child_{kind}" for tell in tells for kind in re.findall(r"\"([a-z_]+)\"", tell)]
    page = (REFERENCE / "events.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", page, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)]
    assert sorted(named) == sorted({*told, STARTED})
