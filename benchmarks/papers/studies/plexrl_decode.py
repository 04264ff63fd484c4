"""PlexRL: how well replicas with many samples decode, and how well where the same batch is spread over more of them.

Efficiency = what a replica decodes over what it would at the pace of its full batch, until its last sample ends (the
paper's AUC ratio, as we read it). A decode step takes 1 + batch / half_batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.policies.assigning.generation_time import Instance, finish_times_s
from benchmarks.papers.cluster.lengths import draw_lengths
from benchmarks.papers.setups.plexrl import DecodeEfficiencyStudy


@dataclass(frozen=True, slots=True)
class _Linear:
    half_batch: float

    def step_s(self, batch: float, context_tokens: float) -> float:
        return 1 + batch / self.half_batch


def decode_efficiency(study: DecodeEfficiencyStudy, seed: int) -> dict[str, float]:
    """Percent, of replicas on rollout devices alone, and of those that all devices of the job make."""
    few, many = study.replica_samples, max(1, study.replica_samples // study.more_replicas)
    return {
        "small_dp_percent": 100 * _efficiency(study, few, seed),
        "colocated_percent": 100 * _efficiency(study, many, seed),
    }


def _efficiency(study: DecodeEfficiencyStudy, samples: int, seed: int) -> float:
    pace = _Linear(study.half_batch)
    found = list[float]()
    for rng in np.random.default_rng(seed).spawn(study.draws):
        lengths = draw_lengths(study.lengths, samples, rng)
        ends_s = finish_times_s(Instance(pace, samples), [0] * samples, lengths.tolist())
        found.append(float(lengths.sum() / ends_s.max() * pace.step_s(samples, 0) / samples))
    return float(np.mean(found))
