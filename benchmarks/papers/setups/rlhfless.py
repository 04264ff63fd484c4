"""RLHFless's studies, typed: decode workers that are paid for while they decode, and what is varied.

The paper (arXiv 2602.22718) gives its algorithms and their parameters in full, of the evaluation devices, models and
ratios. It gives no batch size, no seconds of a step, no lengths but for what is quoted below, and no figure's values.
What is inferred, assumed or fitted says so; ``docs/papers/rlhfless.md`` tells the whole of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from benchmarks.papers.setups.hardware import DecodeCost, Device, Fraction, Transformer
from benchmarks.papers.setups.rlboost import H100
from configs.schema import PositiveFloat, PositiveInt, Section

L40S = Device(
    name="L40S", peak_flops=362e12, memory_bytes=48e9, bandwidth_bytes_s=864e9, network_bytes_s=50e9, machine_price=1.0
)
"""Device of g6e.48xlarge, eight a machine, 400 Gbps; no NVLink."""


class Site(Section):
    """Holds a cluster with the model that runs there."""

    device: Device
    transformer: Transformer
    """Model; ``tensor_parallel`` is the devices of a decode worker, as published."""
    machine_workers: PositiveInt
    """Decode workers that a machine has room for."""
    machines: PositiveInt
    cost: DecodeCost = DecodeCost()
    """Engine's overheads, as fitted to another paper's figure; all-reduces go over PCIe on L40S (assumed). Of the test
    bed's, ``prefill_use`` is fitted to the redundant part of a baseline's time: 22 % with four siblings."""


_PCIE = DecodeCost(all_reduce_s=30e-6, prefill_use=0.045)
SITES: dict[str, Site] = {
    "3B": Site(
        device=L40S, machine_workers=4, machines=2, cost=_PCIE,
        transformer=Transformer(
            name="Qwen2.5-3B", parameters=3.09e9, layers=36, hidden=2048, kv_heads=2, tensor_parallel=2
        ),
    ),
    "7B": Site(
        device=L40S, machine_workers=2, machines=2, cost=_PCIE,
        transformer=Transformer(
            name="Qwen2.5-7B", parameters=7.62e9, layers=28, hidden=3584, kv_heads=4, tensor_parallel=4
        ),
    ),
    "70B": Site(
        device=H100, machine_workers=4, machines=20, cost=DecodeCost(memory_use=0.95),
        transformer=Transformer(
            name="Llama2-70B", parameters=69e9, layers=80, hidden=8192, kv_heads=8, tensor_parallel=2
        ),
    ),
}  # fmt: skip
SiteName = Literal["3B", "7B", "70B"]


class Task(Section):
    """Says how long responses to a data set are. Log-normal over prompts, a few of them far longer."""

    prompt_tokens: PositiveInt
    mean_tokens: PositiveFloat
    variation: PositiveFloat
    """Coefficient of variation over prompts."""
    long_prompts: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Part of the prompts whose responses are anywhere from ``long_tokens`` to the limit."""
    long_tokens: PositiveFloat = 900.0
    noise: Annotated[float, Field(ge=0)] = 0.12
    """Standard deviation of the logarithm of a response's length about that of its prompt. Fitted to how many prompts
    change by no more than 50, and 100, tokens between two epochs."""
    drift: Annotated[float, Field(ge=0)] = 0.05
    """Part by which all lengths grow from one epoch to the next; assumed."""
    reference_noise: Annotated[float, Field(ge=0)] = 0.4
    """The same noise of the reference answer, which stands for the response in the first epoch; assumed."""
    max_tokens: PositiveInt = 2048


TASKS: dict[str, Task] = {
    "gsm8k": Task(prompt_tokens=150, mean_tokens=280, variation=0.45),
    "gpqa": Task(prompt_tokens=300, mean_tokens=600, variation=0.6),
    "livecodebench": Task(prompt_tokens=500, mean_tokens=700, variation=0.7),
    "long": Task(prompt_tokens=150, mean_tokens=4000, variation=0.35, long_prompts=0.0, max_tokens=8192),
}
"""Data sets of the evaluation, and the lengths of its simulation, 2,000 to 8,000 tokens. Means are assumed."""
TaskName = Literal["gsm8k", "gpqa", "livecodebench", "long"]


class Setup(Section):
    """Says what all policies have in common."""

    prompts: PositiveInt = 256
    """Prompts of a step; not published."""
    steps: PositiveInt = 2
    """Steps of an epoch: after so many the same prompts come again."""
    epochs: PositiveInt = 3
    """As published."""
    static_workers: PositiveInt = 3
    """Workers of the baseline, as published; all are held until the last one ends."""
    places: PositiveInt = 256
    """Samples that a worker decodes at once; vLLM's default."""
    pcie_bytes_s: PositiveFloat = 20e9
    """Rate at which weights get to another worker of the trainer's machine; assumed."""
    moves_cache: bool = True
    """Whether what is cut takes its KV cache along, as in the paper, at no cost; else it is prefilled anew, as live."""
    window: PositiveInt = 1
    """Epochs that the length of a prompt is averaged over; as published."""
    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.7
    cut_at: Annotated[float, Field(gt=0, le=1)] = 0.7
    within: Annotated[float, Field(ge=0)] = 0.05
    draws: PositiveInt = 2
    """Seeds, counted from the scenario's."""


class ScalingStudy(Section):
    """Plans every step, against as many workers all the time: all features, and one after the other."""

    kind: Literal["rlhfless_scaling"]
    sites: list[SiteName] = Field(default_factory=lambda: list[SiteName](("3B", "7B")))
    tasks: list[TaskName] = Field(default_factory=lambda: list[TaskName](("gsm8k", "gpqa", "livecodebench")))
    siblings: list[PositiveInt] = Field(default_factory=lambda: [1, 3])
    """Responses to a prompt: 1 is PPO, 3 GRPO."""
    setup: Setup = Setup()


class AssignStudy(Section):
    """Compares sorted parts that are cut one by one with equal parts that are all cut at once (RLHFuse)."""

    kind: Literal["rlhfless_assign"]
    merge_at: Fraction = 0.8
    """Part of all samples after which RLHFuse moves the rest to one worker, if it has room. From that paper's figures,
    about a fifth is left; not exact."""
    setup: Setup = Setup(draws=6)


class SweepStudy(Section):
    """Varies the window of the length history, where parts are cut, and the weight of time."""

    kind: Literal["rlhfless_sweeps"]
    windows: list[PositiveInt] = Field(default_factory=lambda: [1, 2, 3, 4])
    window_epochs: PositiveInt = 8
    cuts: list[Fraction] = Field(default_factory=lambda: [0.3, 0.5, 0.7, 0.9])
    weights: list[Fraction] = Field(default_factory=lambda: [0.3, 0.5, 0.7, 0.9])
    setup: Setup = Setup(draws=4)


class ClusterStudy(Section):
    """Plans steps of a large model on more and more machines."""

    kind: Literal["rlhfless_sim"]
    machines: list[PositiveInt] = Field(default_factory=lambda: [4, 8, 12, 16, 20])
    task: TaskName = "long"
    setup: Setup = Setup(prompts=512, steps=1, draws=2)
    """``static_workers`` is not used: the baseline has all workers of the cluster; the paper does not say how many."""


class BillStudy(Section):
    """Bills whole lives of workers, where starts take a while, instead of what was decoded."""

    kind: Literal["rlhfless_bill"]
    cold_starts_s: list[Annotated[float, Field(ge=0)]] = Field(
        default_factory=lambda: [0.0, 2.0, 7.0, 15.0, 30.0, 60.0]
    )
    rest: PositiveFloat = 0.5
    """Time of the rest of a step, training and scoring, over that of the baseline's generation; assumed."""
    buffer_s: Annotated[float, Field(ge=0)] = 0.5
    """Seconds by which a start is ordered earlier than it has to be; the paper does not give it."""
    rounding_s: PositiveFloat = 1.0
    asleep_prices: list[Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=lambda: [0.0, 0.1, 0.5, 1.0])
    """Prices of an asleep worker's second, as parts of an awake one's."""
    siblings: PositiveInt = 3
    setup: Setup = Setup(epochs=4)
