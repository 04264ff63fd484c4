"""Which function runs a study: its section of the scenario and a seed in, measures by name out.

A function reads no published number, so it cannot lean towards one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.papers.studies import (
    combined_rlboost,
    combined_streamrl,
    plexrl_decode,
    plexrl_fleet,
    plexrl_share,
    rlboost,
    rlhfless,
    rlhfless_bill,
    rlhfless_sweeps,
    sensitivity_bandwidth,
    sensitivity_pools,
    sensitivity_preemptions,
    sensitivity_ranker,
    streamrl_lengths,
    streamrl_stages,
    streamrl_throughput,
)
from benchmarks.papers.sweep import Sweep

Measures = Mapping[str, float]
"""Name → what came out; a name says its unit, or is a ratio."""

STUDIES: dict[str, Callable[[Any, int], Measures | Sweep]] = {
    "streamrl_lengths": streamrl_lengths.length_statistics,
    "streamrl_ranker": streamrl_lengths.ranker_recall,
    "streamrl_decode": streamrl_stages.decode,
    "streamrl_throughput": streamrl_throughput.throughput,
    "streamrl_ladder": streamrl_throughput.ladder,
    "streamrl_ranking": streamrl_stages.ranking,
    "streamrl_split": streamrl_stages.split,
    "streamrl_growth": streamrl_stages.growth,
    "streamrl_cost": streamrl_throughput.cost,
    "rlboost_static": rlboost.static,
    "rlboost_seeding": rlboost.seeding,
    "rlboost_migration": rlboost.migration,
    "rlboost_spot": rlboost.spot,
    "combined_streamrl": combined_streamrl.streamrl,
    "combined_static": combined_rlboost.static,
    "combined_spot": combined_rlboost.spot,
    "sensitivity_ranker": sensitivity_ranker.dispatch,
    "sensitivity_ranker_combined": sensitivity_ranker.combined_policy,
    "sensitivity_bandwidth": sensitivity_bandwidth.bandwidth,
    "sensitivity_preemptions": sensitivity_preemptions.preemptions,
    "sensitivity_pools": sensitivity_pools.pools,
    "plexrl_share": plexrl_share.sharing,
    "plexrl_slices": plexrl_share.slices,
    "plexrl_fleet": plexrl_fleet.fleet,
    "plexrl_decode": plexrl_decode.decode_efficiency,
    "rlhfless_scaling": rlhfless.scaling,
    "rlhfless_assign": rlhfless.assign,
    "rlhfless_sweeps": rlhfless_sweeps.sweeps,
    "rlhfless_sim": rlhfless.cluster,
    "rlhfless_bill": rlhfless_bill.bills,
}
"""Functions by ``study.kind``. One that varies a parameter gives a sweep, whose measures are its points."""
