"""RLBoost's studies, typed: models, machines and prices of the published experiments, and what is varied in each.

Defaults are the paper's set-up (arXiv 2510.19225, section "evaluation") or its code's where they are published; what is
not is an assumption or a calibration, and its docstring says which. ``docs/papers/rlboost.md`` tells the whole of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from benchmarks.papers.setups.hardware import DecodeCost, Device, TrainCost, Transformer
from configs.schema import NonNegativeInt, PositiveFloat, PositiveInt, Section

H100 = Device(
    name="H100", peak_flops=989.5e12, memory_bytes=80e9, bandwidth_bytes_s=3.35e12, network_bytes_s=25e9,
    machine_price=83.79,
)  # fmt: skip
"""Device of eight a machine, on demand, dollars an hour; the machine's front-end link of 200 Gbps carries the
weights."""


class Lengths(Section):
    """Response lengths are log-normal, those of a prompt alike, cut at the limit."""

    median_tokens: PositiveFloat
    """Median before the cut."""
    sigma: PositiveFloat = 0.75
    """Deviation of the logarithm. Assumed: the paper prints no distribution; with it a tenth to a fifth reach the
    limit."""
    of_prompt: Annotated[float, Field(ge=0, le=1)] = 0.87
    """Part of the variance that all responses of a prompt share. From StreamRL's Tab. 4: a predictor that sees only
    the prompt recalls 87 % of the longest fifth, which leaves a deviation of 0.27 to the responses themselves."""
    max_tokens: PositiveInt = 14_336
    """Limit of a response."""


class HybridModel(Section):
    """Holds a model of the evaluation, with the reserved machines that it gets and the lengths of its responses."""

    transformer: Transformer
    machines: PositiveInt
    """Reserved machines, of eight devices each."""
    lengths: Lengths
    train_flops_use: Annotated[float, Field(gt=0, le=1)]
    """Part of the peak (MFU)."""


HybridName = Literal["8B", "14B", "32B"]
HYBRID: dict[HybridName, HybridModel] = {
    "8B": HybridModel(
        transformer=Transformer(name="8B", parameters=8.2e9, layers=36, hidden=4096, kv_heads=8, tensor_parallel=2),
        machines=1, lengths=Lengths(median_tokens=3400), train_flops_use=0.49,
    ),
    "14B": HybridModel(
        transformer=Transformer(name="14B", parameters=14.8e9, layers=40, hidden=5120, kv_heads=8, tensor_parallel=2),
        machines=1, lengths=Lengths(median_tokens=5150), train_flops_use=0.385,
    ),
    "32B": HybridModel(
        transformer=Transformer(name="32B", parameters=32.8e9, layers=64, hidden=5120, kv_heads=8, tensor_parallel=2),
        machines=2, lengths=Lengths(median_tokens=5150), train_flops_use=0.385,
    ),
}  # fmt: skip
"""Models of Qwen3. Median and MFU of a model are calibrations, by two numbers that its code's constants imply (work
conservation over T_seed): training time, 411 to 458 s for 14B and 130 to 140 s for 8B, and the step of the reserved
machines alone, 950 to 1040 s and 410 to 430 s, and a tenth more for the tail that work conservation leaves out. Nothing
is published of 32B: it has 14B's. Its tensor parallelism is not published either."""


class HybridSetup(Section):
    """Describes one step's samples, and what each part of a hybrid cluster takes."""

    prompts: PositiveInt = 128
    """Prompts of a step."""
    group_size: PositiveInt = 8
    """Responses of a prompt; they are trained together, since their advantages are relative to each other."""
    prompt_tokens: PositiveInt = 256
    """Tokens of every prompt; the limit is 512."""
    places: PositiveInt = 256
    """Requests that an engine runs together at most."""
    decode: DecodeCost = DecodeCost(memory_use=0.6)
    """Costs that StreamRL's engine was fitted with on the same generation of devices, with RLBoost's fraction of
    memory."""
    train: TrainCost = TrainCost(flops_per_parameter=12, step_s=4.0)
    """Costs of GRPO with gradient checkpointing: 8 for the actor, 2 each for old and reference log-probabilities.
    ``flops_use`` is the model's own."""
    log_prob_flops_per_parameter: PositiveFloat = 4
    """Part of these that needs no advantage: old and reference log-probabilities."""
    micro_batch_responses: PositiveInt = 16
    """Responses with which the trainer begins (m_b of the code)."""
    switch_s: PositiveFloat = 5.0
    """Seconds between generating and training on the reserved machines, each way. Assumed."""
    reserved_network_bytes_s: PositiveFloat = 25e9
    """Network of a reserved machine, from which others pull: 200 Gbps."""
    remote_network_bytes_s: PositiveFloat = 6.25e9
    """Network of a spot machine: 50 Gbps."""
    load_s: PositiveFloat = 3.0
    """Seconds from the last byte of a version until an engine serves it. Assumed."""
    boot_s: PositiveFloat = 60.0
    """Seconds from the moment a spot machine is there until its engine can pull. Assumed."""
    pending_cap: PositiveInt = 8
    """Samples that wait at one engine at most (theta). Not published."""
    balance_every_s: PositiveFloat = 1.0
    """Seconds between two looks of the balancer."""
    reserved_price: PositiveFloat = 83.79
    """Price of a machine of eight devices, on demand, an hour."""
    spot_price: PositiveFloat = 5.32
    """Price of a spot machine of two devices, an hour."""
    damping: PositiveFloat = 3.0
    """Divisor of the window's change (eta of the code)."""
    first_seed_s: PositiveFloat = 150.0
    """First window (T_init of the code)."""
    steps: PositiveInt = 24
    """Steps simulated with a fixed number of workers; what is measured is the mean of the last third."""

    @property
    def early(self) -> float:
        """The part of a sample's training that need not wait for its group."""
        return self.log_prob_flops_per_parameter / self.train.flops_per_parameter


class StaticStudy(Section):
    """Compares fixed numbers of remote workers with none: throughput, cost, seeding window and capacity target."""

    kind: Literal["rlboost_static"]
    model: HybridName = "14B"
    workers: list[NonNegativeInt] = Field(default_factory=lambda: [1, 2, 3, 4, 5, 6])
    """Remote workers, one run each."""
    setup: HybridSetup = HybridSetup()


class SeedingStudy(Section):
    """Loses all but one of the workers, which come back one by one: with seeding, without it, without its memory."""

    kind: Literal["rlboost_seeding"]
    model: HybridName = "14B"
    workers: PositiveInt = 6
    lost: PositiveInt = 5
    warm_steps: PositiveInt = 16
    """Steps with all of them, before the loss; the window and its memory settle."""
    rounds: PositiveInt = 3
    """Losses in a row. The first teaches what the others remember; the last one is measured."""
    return_every_s: PositiveFloat = 2400.0
    """Seconds between the loss and the first return, and between two returns. Not published; with one worker a step
    without seeding takes 2000 s, and a window is remembered only of a step in which nobody came or went."""
    setup: HybridSetup = HybridSetup()


class MigrationStudy(Section):
    """Preempts some workers in mid-step: samples go on with their tokens, or start anew."""

    kind: Literal["rlboost_migration"]
    model: HybridName = "14B"
    workers: PositiveInt = 6
    lost: PositiveInt = 3
    at_s: list[PositiveFloat] = Field(default_factory=lambda: [100.0, 200.0])
    """Seconds after the step's begin."""
    warm_steps: PositiveInt = 12
    repeats: PositiveInt = 6
    """Steps over which an overhead is averaged."""
    setup: HybridSetup = HybridSetup()


class SpotStudy(Section):
    """Follows a real trace of spot machines: tokens a second and a dollar against reserved machines only."""

    kind: Literal["rlboost_spot"]
    trace: str = "configs/traces/bamboo_g4dn.csv"
    """Path from the repository's root."""
    part: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the trace's machines, drawn."""
    segment_s: PositiveFloat = 7200.0
    models: list[HybridName] = Field(default_factory=lambda: list(HYBRID))
    setup: HybridSetup = HybridSetup()
