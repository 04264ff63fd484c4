"""PlexRL: what two jobs save on one training pool, what a slice should be, and which queue to use.

saving = 1 - slowdown · (k · rollout + train) / (k · (rollout + train)): each of k jobs has its own rollout devices, all
of them one training pool. The slowdown comes from slices as the service's own policy gives them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.policies.sharing.job_profile import JobProfile, predict
from actors.policies.sharing.slices import PolicyName, SliceRules
from benchmarks.papers.cluster.shared_service import Shared, SharingJob, random_rollouts_s, share
from benchmarks.papers.setups.plexrl import MODELS, SharingStudy, SliceSetup, SlicesStudy


def sharing(study: SharingStudy, seed: int) -> dict[str, float]:
    """Slowdown and saving in percent of each model, and the saving that there would be without slowdown."""
    measures: dict[str, float] = {}
    for model in (MODELS[name] for name in study.models):
        rng = np.random.default_rng(seed)
        jobs = [_job(study.setup, 1.0, 1 - model.bubble, rng, lag=model.lag) for _ in range(study.jobs)]
        slowdown = share(jobs, _rules(study.setup, study.setup.policy)).mean_slowdown
        all_devices = study.jobs * (model.rollout_devices + model.train_devices)
        part = (study.jobs * model.rollout_devices + model.train_devices) / all_devices
        measures[f"{model.name}.slowdown"] = slowdown
        measures[f"{model.name}.saving_percent"] = 100 * (1 - slowdown * part)
        measures[f"{model.name}.bound_percent"] = 100 * (1 - part)
    return measures


def slices(study: SlicesStudy, seed: int) -> dict[str, float]:
    """Mean slowdowns of bursts and micro-batches, what placement predicts of bursts; unequal jobs under each queue."""
    setup, measures = study.setup, dict[str, float]()
    for count, duty in study.mixes:
        at = f"{count}x{duty:g}"
        for policy in ("fifo", "hrrs"):
            for name, parts in (("bursts", 1), ("micro_batches", study.micro_batches)):
                jobs = [_job(setup, 1.0, duty, rng) for rng in np.random.default_rng(seed).spawn(count)]
                outcome = share(jobs, _rules(setup, policy), micro_batches=parts)
                measures[f"{at}.{name}.{policy}"] = outcome.mean_slowdown
        profile = JobProfile(9, 1.0, duty, duty, setup.variation * (1 - duty), setup.switch)
        measures[f"{at}.predicted"] = float(np.mean(predict([profile] * (count - 1), profile).slowdowns))
        measures[f"{at}.prediction_off"] = abs(measures[f"{at}.predicted"] - measures[f"{at}.bursts.hrrs"])
    for policy in ("fifo", "round_robin", "hrrs"):
        measures |= {
            f"unequal.{policy}.{name}": value for name, value in _figures(_unequal(study, policy, seed)).items()
        }
    for name in ("mean_slowdown", "worst_slowdown", "switching"):
        measures[f"unequal.{name}.hrrs_over_fifo"] = measures[f"unequal.hrrs.{name}"] / measures[f"unequal.fifo.{name}"]
    return measures


def _unequal(study: SlicesStudy, policy: PolicyName, seed: int) -> Shared:
    """As many steps as go into one time, which is a quarter of that of the equal jobs': short jobs do more of them."""
    longest = max(step for step, _ in study.unequal)
    streams: Sequence[np.random.Generator] = np.random.default_rng(seed).spawn(len(study.unequal))
    jobs = [
        _job(study.setup, step, duty, rng, steps=max(1, round(study.setup.steps / 4 * longest / step)))
        for (step, duty), rng in zip(study.unequal, streams, strict=True)
    ]
    return share(jobs, _rules(study.setup, policy, longest))


def _figures(outcome: Shared) -> dict[str, float]:
    return {
        "mean_slowdown": outcome.mean_slowdown,
        "worst_slowdown": max(outcome.slowdowns),
        "switching": outcome.switching,
    }


def _rules(setup: SliceSetup, policy: PolicyName, step_s: float = 1.0) -> SliceRules:
    return SliceRules(policy, starvation_s=setup.starvation * step_s, gap_s=step_s, hysteresis=setup.hysteresis)


def _job(
    setup: SliceSetup, step_s: float, duty: float, rng: np.random.Generator, *, lag: int = 0, steps: int = 0
) -> SharingJob:
    """A step alone takes ``step_s``: with lag, generation takes all of it, and training goes on meanwhile."""
    rollouts = random_rollouts_s(step_s * (1.0 if lag else 1 - duty), setup.variation, steps or setup.steps, rng)
    return SharingJob(rollouts, step_s * duty, step_s * setup.switch, lag)
