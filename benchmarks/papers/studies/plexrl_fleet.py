"""PlexRL: a cluster's jobs under each placement policy, on as many devices.

Isolated, a job has a training service of its own. Shared, the same devices make fewer services, and rollout devices for
up to ``jobs_max`` jobs each.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from actors.policies.sharing.job_profile import JobProfile
from actors.policies.sharing.placement_view import JobView, PlacementPolicy, PlacementRules, ServiceView
from benchmarks.papers.cluster.sharing_fleet import FleetJob, FleetOutcome, run_fleet
from benchmarks.papers.setups.plexrl import CLASSES, FleetClass, FleetStudy

_GB = 1e9


def fleet(study: FleetStudy, seed: int) -> dict[str, float]:
    """Completion times over those of isolated services, queueing and slowdown; means over jobs, then over draws."""
    policies = get_args(PlacementPolicy)
    draws = [[_all_classes(study, policy, one) for policy in policies] for one in range(seed, seed + study.draws)]
    values = np.array(draws)  # [draws, policies, figures]
    over = (values / values[:, :1]).mean(axis=0)
    means = values.mean(axis=0)
    measures: dict[str, float] = {}
    for i, policy in enumerate(policies):
        measures[f"{policy}.completion"] = float(over[i, 0])
        measures[f"{policy}.makespan"] = float(over[i, 1])
        measures[f"{policy}.queued_hours"] = float(means[i, 2]) / 3600
        measures[f"{policy}.slowdown"] = float(means[i, 3])
    for better, worse in (("pack", "isolated"), ("spread", "pack"), ("spread_backfill", "spread")):
        measures[f"{better}_over_{worse}"] = measures[f"{better}.completion"] / measures[f"{worse}.completion"]
    return measures


def _all_classes(study: FleetStudy, policy: PlacementPolicy, seed: int) -> list[float]:
    """Completion, makespan, time in the queue, and slowdown, all jobs together."""
    rules = PlacementRules(policy, duty_max=study.duty_max, slowdown_max=study.slowdown_max)
    outcomes = list[FleetOutcome]()
    counts = list[int]()
    for number, one in enumerate(CLASSES[name] for name in study.models):
        jobs = _trace(study, one, np.random.default_rng([seed, number]))
        outcomes.append(run_fleet(jobs, _services(study, one, isolated=policy == "isolated"), rules))
        counts.append(len(jobs))
    figures = [[one.completion_s, one.makespan_s, one.queued_s, one.slowdown] for one in outcomes]
    together = np.average(np.array(figures), axis=0, weights=counts).tolist()
    together[1] = max(one.makespan_s for one in outcomes)
    return together


def _services(study: FleetStudy, one: FleetClass, *, isolated: bool) -> list[ServiceView]:
    count, jobs_max = (one.isolated, 1) if isolated else (one.shared, study.jobs_max)
    parked = int(study.parked_gb * _GB)
    return [ServiceView(f"train-{i}", parked, parked, jobs_max) for i in range(count)]


def _trace(study: FleetStudy, one: FleetClass, rng: np.random.Generator) -> list[FleetJob]:
    """Jobs that arrive at random, with profiles that are known: their kind has run before."""
    span_s = study.days * 86400
    count = max(1, round(study.load * one.isolated * span_s / (study.job_hours * 3600)))
    arrivals = np.sort(rng.uniform(0, span_s, count))
    alone = study.job_hours * 3600 * rng.lognormal(-(study.job_spread**2) / 2, study.job_spread, count)
    steps = study.step_s * rng.lognormal(0, 0.4, count)
    duties = (1 - one.bubble) * rng.lognormal(-(study.duty_spread**2) / 2, study.duty_spread, count)
    sizes = rng.uniform(*study.state_gb, count) * _GB
    jobs = list[FleetJob]()
    for i in range(count):
        step_s, busy_s = float(steps[i]), float(steps[i] * min(0.6, max(0.05, duties[i])))
        profile = JobProfile(9, step_s, busy_s, 1.2 * busy_s, 0.3 * step_s, 0.01 * step_s)
        view = JobView(f"job-{i}", int(sizes[i]), submitted=float(i), profile=profile, remaining_s=float(alone[i]))
        jobs.append(FleetJob(float(arrivals[i]), view))
    return jobs
