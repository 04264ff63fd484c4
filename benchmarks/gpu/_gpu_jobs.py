"""The parts of `bench gpu` that run a whole job: python -m benchmarks.gpu._gpu_jobs PART ARGS, ARGS being JSON.

    sync, async   configs/quickstart.yaml with engines and trainer on the device
    killed        the same in sync mode, and SIGKILL to a rollout worker that serves, in mid-run
    adapter       configs/lora.yaml: an adapter is trained and served
    ppo           benchmarks/jobs/ppo.yaml: a reward model, trained on the device too, a critic and a reference
    episodes      configs/episodes.yaml: several turns an episode

A run that has lost a prompt or trained a sample twice fails its part, and so does one of the quickstart whose reward
has not risen. The last three are short: they show that these jobs run there, and not how far they get.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result
from benchmarks._harm import HarmedRun, Row
from benchmarks._jobs import BenchmarkFailed, prepare_job, run_headrace, samples_per_second
from benchmarks._processes import ROOT

STEPS: Final = 150
_FEW_STEPS: Final = 20
_KILL_AFTER: Final = 10
_SKIP: Final = 5
"""First steps that do not count as speed, and how many of either end make a reward."""
OTHERS: Final = {
    "adapter": (ROOT / "configs" / "lora.yaml", ()),
    "ppo": (ROOT / "benchmarks" / "jobs" / "ppo.yaml", ("reward.train.pairs=1000", "reward.train.steps=60")),
    "episodes": (ROOT / "configs" / "episodes.yaml", ()),
}
"""Jobs other than the quickstart, and what of them is shorter."""
SHORT: Final = ("model.hidden=32", "model.layers=1", "model.warm_start_steps=30", "algorithm.prompts_per_step=4")


def measure(name: str, device: str, scratch: Path, model: Path | None, *, small: bool) -> Result:
    """One run of the job; ``model``: instead of making the quickstart's."""
    learns = name not in OTHERS
    preset, shorter = OTHERS.get(name, (ROOT / "configs" / "quickstart.yaml", ()))
    file = scratch / f"job_{preset.stem}" / "bench_job.yaml"
    if not file.exists():
        places = (f"reward.device={device}",) if name == "ppo" else ()
        prepare_job(preset, (*shorter, *places, *(SHORT if small else ())), file.parent, model if learns else None)
    mode = "async" if name == "async" else "sync"
    settings = [f"rollout.device={device}", f"trainer.device={device}", f"sync.mode={mode}"]
    settings.append(f"steps={_steps(learns=learns, small=small)}")
    if name == "killed":
        summary, rows, more = _killed(file, scratch / name, settings)
    else:
        run = run_headrace(file, scratch / name, settings)
        summary, rows, more = run.summary, run.rows, Result()
    found = {
        "steps": len(rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "samples_per_second": round(samples_per_second(rows, _SKIP), 1),
        "reward_first": _reward(rows[:_SKIP]),
        "reward_last": _reward(rows[-_SKIP:]),
        "engine_mismatch": next((m for row in reversed(rows) if (m := row["engine_mismatch"]) is not None), None),
        "prompts_lost": summary["prompts_lost"],
        "samples_trained_twice": summary["samples_trained_twice"],
        **more,
    }
    lost = found["prompts_lost"] or found["samples_trained_twice"]
    if lost or (found["reward_last"] <= found["reward_first"] and learns and not small):
        raise BenchmarkFailed(f"a prompt was lost, a sample trained twice, or the reward has not risen: {found}")
    return found


def _steps(*, learns: bool, small: bool) -> int:
    if learns:
        return 40 if small else STEPS
    return 6 if small else _FEW_STEPS


def _killed(file: Path, run_dir: Path, settings: Sequence[str]) -> tuple[Row, list[Row], Result]:
    """Every checker must be content with the run's record at its end."""
    run = HarmedRun(run_dir, file, settings=settings)
    try:
        run.wait_for_step(_KILL_AFTER)
        run.wait_serving(2)
        harm = run.harm("rollout-0", signal.SIGKILL)
        down = run.after(harm, "worker_down", worker="rollout-0")
        summary = run.finish()
        back = run.look_after(harm.at_s, "worker_version", worker="rollout-0")
        return summary, run.rows(), {
            "detected_s": round(down["time_s"] - harm.at_s, 3),
            "serves_again_s": None if back is None else round(back["time_s"] - harm.at_s, 1),
        }  # fmt: skip
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        run.close()


def _reward(rows: Sequence[Row]) -> float:
    return round(statistics.fmean(row["reward_mean"] for row in rows), 3)


def main(name: str, args: dict[str, Any]) -> None:
    """Run the part ``name``."""
    model = Path(args["tiny"]) if args["tiny"] else None
    print(json.dumps(measure(name, args["device"], Path(args["scratch"]), model, small=args["small"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
