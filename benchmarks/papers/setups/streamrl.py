"""StreamRL's studies, typed: workload, hardware and models of the published experiments, and what is varied in each.

Defaults are the paper's set-up (arXiv 2504.15930, section 7) where it is published; what is not is a calibration, and
its docstring says from which published number it was taken. ``docs/papers/streamrl.md`` tells the whole of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from benchmarks.papers.setups.hardware import DecodeCost, Device, Fraction, TrainCost, Transformer
from configs.schema import PositiveFloat, PositiveInt, Section


class LengthHistogram(Section):
    """Describes output lengths in bins of equal width, uniform within a bin."""

    first_tokens: PositiveInt = 800
    """Begin of the first bin."""
    bin_tokens: PositiveInt = 640
    """Width of a bin."""
    weights: tuple[Annotated[float, Field(ge=0)], ...] = (
        19.7, 26.6, 19.1, 18.3, 12.2, 9.8, 8.4, 4.9, 5.3, 3.4, 2.5, 3.6, 2.5, 0.8, 1.2,
        0.7, 1.1, 0.5, 2.0, 1.3, 1.3, 3.1, 1.0, 1.2, 1.3, 1.7, 1.3, 1.7, 1.0, 1.4,
    )  # fmt: skip
    """Weights of the bins, in any unit; the default is the paper's Fig. 7, read off to about 2 %."""
    scale: PositiveFloat = 1.0
    """Factor of every length; the 10K and 5K variants are 0.5 and 0.25."""


class Ranker(Section):
    """A ranker predicts lengths: it sees true ones through noise, estimate = length · exp(sigma · N(0, 1))."""

    sigma: Annotated[float, Field(ge=0)] = 0.27
    """Noise; 0 is an oracle. The default recalls 87 % of the longest 20 %, as the 7B ranker of Tab. 4."""
    knows: Literal["lengths", "order", "nothing"] = "lengths"
    """What it knows: ``lengths``: as above; ``order``: as above, but it only orders, and what is expected are the
    batch's own lengths in that order; ``nothing``: all the same is expected of everybody, the mean."""
    by_chance: bool = False
    """Whether it orders by lot instead."""


H800 = Device(
    name="H800", peak_flops=989.5e12, memory_bytes=80e9, bandwidth_bytes_s=3.35e12, network_bytes_s=200e9,
    machine_price=2.85,
)  # fmt: skip
H20 = Device(
    name="H20", peak_flops=148e12, memory_bytes=96e9, bandwidth_bytes_s=4.0e12, network_bytes_s=12.5e9,
    machine_price=1.0,
)  # fmt: skip
"""Devices of Tab. 1 and section 7.1: peak, memory, bandwidth, price of a machine of eight; 8 x 200 Gbps, and 100
Gbps."""


class PaperModel(Section):
    """Holds a model of the evaluation with the devices that it is given."""

    transformer: Transformer
    devices: PositiveInt
    """Devices of the job, all of them."""
    train_flops_use: Fraction
    """Part of the peak (MFU)."""


ModelName = Literal["7B", "32B", "72B"]
Variant = Literal["5K", "10K", "20K"]
MODELS: dict[ModelName, PaperModel] = {
    "7B": PaperModel(
        transformer=Transformer(
            name="7B", parameters=7.6e9, layers=28, hidden=3584, kv_heads=4, tensor_parallel=1
        ), devices=32, train_flops_use=0.39,
    ),
    "32B": PaperModel(
        transformer=Transformer(
            name="32B", parameters=32.8e9, layers=64, hidden=5120, kv_heads=8, tensor_parallel=4
        ), devices=64, train_flops_use=0.39,
    ),
    "72B": PaperModel(
        transformer=Transformer(
            name="72B", parameters=72.7e9, layers=80, hidden=8192, kv_heads=8, tensor_parallel=4
        ), devices=128, train_flops_use=0.36,
    ),
}  # fmt: skip
"""Models of Qwen2.5. Devices: section 7.1. Tensor parallelism is not published: the least that leaves room for 16
samples of full length. MFU: from the training times that Figs. 8 and 10 imply (32B on 24 devices 380 s, 72B on 48
devices 459 s); the 7B's is that of the 32B."""
SCALES: dict[Variant, float] = {"5K": 0.25, "10K": 0.5, "20K": 1.0}
"""Scales of the lengths of Fig. 7."""


class Workload(Section):
    """Describes one iteration's samples, and how engines and trainers take them."""

    samples: PositiveInt = 1024
    """Samples of the global batch."""
    prompt_tokens: PositiveInt = 400
    """Tokens of every prompt; most are below 800."""
    max_tokens: PositiveInt = 20_000
    """Longest response of the 20K variant; scaled with the lengths."""
    lengths: LengthHistogram = LengthHistogram()
    ranker: Ranker = Ranker()
    places: PositiveInt = 256
    """Samples that an instance decodes together at most."""
    reserve: Literal["longest", "none"] = "longest"
    """KV cache kept free for each admitted sample: the longest response, so that none is ever preempted, or nothing."""
    decode: DecodeCost = DecodeCost()
    train: TrainCost = TrainCost()
    switch_bytes_s: PositiveFloat = 0.93e9
    """Speed, colocated only, at which each device moves weights and optimizer states of actor and critic out and in
    again between the stages. All costs of switching in one number, fitted so that the geometric mean of our nine
    colocated iteration times is that of Fig. 8's nine."""
    split_variant: Variant = "20K"
    """Lengths for which Algorithm 1 splits the devices; the paper shows one split a model, for 20K (Fig. 10)."""
    iterations: PositiveInt = 10
    """Iterations that are simulated; the first two are warm-up, and of the combined policy the first four and the
    last."""
    profile_draws: PositiveInt = 6
    """Orders and estimates over which a profile of generation is averaged."""


def _has_a_middle(work: Workload) -> Workload:
    if work.iterations < 6:
        raise ValueError(
            f"iterations is {work.iterations}; the first four and the last are left out, so give 6 or more"
        )
    return work


SteadyWorkload = Annotated[Workload, AfterValidator(_has_a_middle)]
"""Workload of a study that tells the pace of steps in the middle of a job."""


class LengthsStudy(Section):
    """Takes statistics of the length histogram."""

    kind: Literal["streamrl_lengths"]
    lengths: LengthHistogram = LengthHistogram()
    samples: PositiveInt = 200_000
    """Samples that are drawn."""


class RankerStudy(Section):
    """Asks how much of the true longest the emulated ranker finds."""

    kind: Literal["streamrl_ranker"]
    lengths: LengthHistogram = LengthHistogram()
    ranker: Ranker = Ranker()
    samples: PositiveInt = 100_000
    """Samples that are ranked."""


class DecodeStudy(Section):
    """Holds the decode cost model against the published table of latencies."""

    kind: Literal["streamrl_decode"]
    decode: DecodeCost = DecodeCost()


class ThroughputStudy(Section):
    """Holds modes of StreamRL against a colocated baseline, for models and lengths."""

    kind: Literal["streamrl_throughput"]
    models: list[ModelName] = Field(default_factory=lambda: list(MODELS))
    """Models of the paper that are run."""
    variants: list[Variant] = Field(default_factory=lambda: list(SCALES))
    """Variants of lengths that are run."""
    workload: Workload = Workload()


class LadderStudy(Section):
    """Takes one model and length, and switches the parts of StreamRL on one after the other."""

    kind: Literal["streamrl_ladder"]
    model: ModelName = "72B"
    variant: Variant = "20K"
    workload: Workload = Workload()


class RankingStudy(Section):
    """Holds generation with ranked and with true lengths against random order and first come first served."""

    kind: Literal["streamrl_ranking"]
    models: list[ModelName] = Field(default_factory=lambda: list(MODELS))
    variant: Variant = "20K"
    workload: Workload = Workload()


class SplitStudy(Section):
    """Asks how many devices of the two stages Algorithm 1 chooses."""

    kind: Literal["streamrl_split"]
    models: list[ModelName] = Field(default_factory=lambda: list[ModelName](("32B", "72B")))
    variant: Variant = "20K"
    workload: Workload = Workload()


class GrowthStudy(Section):
    """Lets outputs lengthen from iteration to iteration, and asks when the rollout pool grows."""

    kind: Literal["streamrl_growth"]
    model: ModelName = "7B"
    rollout_devices: PositiveInt = 32
    """Devices that generate at the beginning."""
    from_variant: Variant = "10K"
    to_variant: Variant = "20K"
    steps: PositiveInt = 23
    """Iterations, over which lengths grow evenly from the one to the other."""
    workload: Workload = Workload()


class CostStudy(Section):
    """Weighs throughput by price: generation on H20 in another centre, against H800 for both."""

    kind: Literal["streamrl_cost"]
    model: ModelName = "7B"
    variants: list[Variant] = Field(default_factory=lambda: list(SCALES))
    rollout_devices: PositiveInt = 32
    """Devices that generate, H20."""
    train_devices: PositiveInt = 16
    """Devices that train, H800."""
    line_bytes_s: PositiveFloat = 10e9
    """Line between the centres."""
    workload: Workload = Workload()
