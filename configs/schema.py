"""The job file, typed. Unknown keys fail with the nearest known name; every field says what it is and its unit."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from configs.adapter_schema import AdapterConfig
from configs.episode_schema import EnvironmentConfig, GatewayConfig
from configs.evaluation_schema import SEED_OFFSET, EvaluationConfig
from configs.learning_schema import AlgorithmConfig, CriticConfig
from configs.limits import Limits
from configs.provider_schema import ProviderConfig
from configs.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from configs.task_schema import DataConfig, RewardConfig

LrSchedule = Literal["constant", "linear", "cosine"]
SyncMode = Literal["sync", "minibatch", "dynamic", "one_step_barrier", "async"]


class ModelConfig(Section):
    """The policy."""

    source: Literal["hf", "tiny"] = "hf"
    """``hf``: the Hugging Face model that ``path`` names. ``tiny``: a small Qwen3 made on the spot, dense or with
    ``experts``."""
    path: str | None = None
    """A Hugging Face directory, or a hub name such as ``Qwen/Qwen3-0.6B``, fetched into the Hugging Face cache.
    For ``tiny``, where to keep the made model (default: inside the run directory)."""
    revision: str | None = None
    """A branch, a tag or a commit of a hub name; unset: the default branch. A resumed run keeps its commit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the forward pass and of published weights; the trainer keeps float32 master weights."""
    adapter: AdapterConfig | None = None
    """Train an adapter (LoRA) and leave the model as it is. ``{}``: one with the defaults. Unset: the whole model."""
    hidden: PositiveInt = 96
    """``tiny`` only: hidden size."""
    layers: PositiveInt = 3
    """``tiny`` only."""
    experts: Annotated[int, Field(ge=0, le=256)] = 0
    """``tiny`` only: experts of each layer, of which a token takes 2: a Qwen3 MoE. 0: one dense network, a Qwen3."""
    warm_start_steps: NonNegativeInt = 600
    """``tiny`` only: supervised steps on the data's own answers before RL, so that there is something to reinforce."""
    warm_start_noise: Annotated[float, Field(ge=0, le=1)] = 0.3
    """``tiny`` only: in the last fifth of the warm start, the part of prompts shown with another one's answer."""


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["torch", "vllm", "simulated"] = "torch"
    """``torch``: built in; ``vllm``: needs ``make vllm``; ``simulated``: random tokens at a modelled cost."""
    workers: NonNegativeInt = 2
    """Rollout worker processes at the start; ``headrace ctl scale`` changes it."""
    servers: list[str] = []
    """Addresses of ``vllm serve`` processes that you started, such as ``http://127.0.0.1:8000``. The first workers are
    on the head's machine and speak to one each, in this order; workers beyond them run ``engine``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device."""
    max_tokens: PositiveInt = 256
    """Response length limit."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; must be above 0 in a job, since equal siblings teach nothing."""
    stop: list[str] = []
    """Further stop tokens, by text, each of which must be one token; the model's own end token always stops."""
    max_running: PositiveInt | Literal["auto"] = 256
    """Sequences decoded together by one worker. ``auto``: as many as its engine finds memory for, for their keys and
    values; each worker tells its own number."""
    threads: NonNegativeInt = 0
    """Torch threads per worker; 0: cores (in async mode half of them) divided by workers."""
    tensor_parallel: PositiveInt = 1
    """Ranks of each worker that compute every step together, each in a process of its own with a part of every layer,
    all on one machine. For a model that one device cannot hold. Above 1 with ``engine: vllm`` or ``simulated`` only."""
    in_flight: Literal["keep", "recompute"] = "recompute"
    """What a weight update does to running sequences: keep their KV cache, or prefill it anew."""
    length_ranking: Literal["none", "history", "siblings", "learned"] = "none"
    """Who predicts how long responses get, so that the longest are begun first. ``history``: the same prompt in earlier
    epochs; ``siblings``: its own group so far; ``learned``: a small model, fine-tuned beside the run."""
    ranker_model: str | None = None
    """With ``length_ranking: learned``: the Hugging Face directory of a small encoder or language model to fine-tune;
    unset: a small encoder is made on the spot."""
    ranker_device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where that model computes."""
    dedicated_workers: Literal["none", "simulated"] = "simulated"
    """With ``length_ranking``: how many workers get long samples only. ``simulated``: as a replay of the last steps
    over their measured latencies says, none included."""
    engine_options: dict[str, Any] = {}
    """Passed to the engine (vLLM arguments such as ``gpu_memory_utilization``)."""

    def server_of(self, worker: str) -> str:
        """Address of the server to which ``worker`` (``rollout-0`` …) speaks; empty: it runs ``engine`` itself."""
        number = worker.removeprefix("rollout-")
        return self.servers[int(number)] if number.isdecimal() and int(number) < len(self.servers) else ""


RECOMPUTE_WAYS: Final = ("none", "selective", "whole", "offload")
"""Values of ``trainer.recompute`` but ``auto``, by their numbers in the metrics."""
MICRO_BATCH_TOKENS: Final = 16_384
"""Tokens of a micro-batch that is not measured."""


class TrainerConfig(Section):
    backend: Literal["torch", "fsdp", "simulated"] = "torch"
    """``torch``: AdamW on the whole model, on one device; ``fsdp``: the same on several, each with a part of the
    weights (``ranks``); ``simulated``: next to no arithmetic, in the time that a cost model says."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """``fsdp``: processes that train together, with a device each. Weights, gradients and moments are sharded over
    them, by torch's FSDP2. A run repeats bit for bit with the same number, and any number reads its checkpoints.
    ``simulated``: processes that take the time of each call together."""
    replicas: PositiveInt = 1
    """``fsdp``: copies of the weights, each sharded over ``ranks / replicas`` ranks. Layers travel within a copy, and
    between copies gradients alone; each takes the memory of a whole copy."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    """``fsdp``: machines over which ``ranks`` are divided evenly, machine by machine: the head's, then a node for each
    further part, where each rank takes a slot and a device. With more of them than ``replicas``, each copy of the
    weights spans several, and layers travel between them. Needs ``cluster.nodes``."""
    context_ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """``fsdp``: how many of the ``ranks`` share each row, for sequences whose activations do not fit onto one device.
    Each has two slices of a row, and in every layer is given keys and values of all of it; a group computes as many
    tokens at once as its ranks do apart. For models whose attention is computed in blocks (``attention``)."""
    offload: bool = False
    """``fsdp`` on CUDA: weights and moments stay in the CPU's memory, and come to the device a layer at a time. Takes
    less of its memory, and more time."""
    expert_parallel: bool = False
    """``fsdp``, mixtures of experts: each rank of a copy computes with the experts that it has, and tokens travel to
    them and back; else the experts travel to the tokens, as all other weights do."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """``adamw8bit``: AdamW by bitsandbytes, with a quarter of the memory for the moments of matrices (extra
    ``optimizers``), slow on a CPU. ``muon``: hidden matrices are updated by Muon, with half of AdamW's memory for them;
    embeddings, head and vectors by AdamW. ``lr`` and ``weight_decay`` mean the same for all. Both are for whole models
    with ``backend: torch`` alone."""
    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of a linear rise of the learning rate."""
    lr_schedule: LrSchedule = "constant"
    """Learning rate after the warm-up: ``lr`` itself, or a fall towards 0 over the rest of ``steps``, in a line or
    along half a cosine. A run that is resumed with more ``steps`` goes on along the longer schedule."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The two betas of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient is scaled down to this norm."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = MICRO_BATCH_TOKENS
    """Padded tokens in one forward and backward pass; ``fsdp``: of each rank. ``auto``: as many as fit, a power of two,
    from the free memory and two measured passes at the start. Out of memory halves either, for the rest of the run."""
    window_prompts: NonNegativeInt = 0
    """Groups that are cut into micro-batches together, in prompt order, as soon as all of them have arrived.
    0: chosen from ``sync.mode``. Smaller streams earlier; larger pads less."""
    saturation_tokens: NonNegativeInt = 0
    """``dynamic``: train on what has arrived as soon as it holds this many tokens, prompts included.
    0: as many as ``micro_batch_tokens``, but at most a quarter of the step before."""
    score_early: bool = True
    """``dynamic`` and ``async``, with ``algorithm.kl_coefficient``: while the trainer would wait, it computes reference
    log-probabilities of samples whose siblings are not finished."""
    threads: NonNegativeInt = 0
    """Torch threads, ``fsdp``: of each rank. 0: all cores, but for a tiny model all but one of them, in async mode
    half; shared out between ranks."""
    recompute: Literal["none", "selective", "whole", "offload", "auto"] = "none"
    """How the backward pass comes by activations; gradients are the same. ``none``: all are kept; ``selective``:
    products of matrices and attention are kept, the rest is computed again; ``whole``: each layer is computed again
    from its inputs; ``offload``: all are kept, in the host's pinned memory, CUDA only. ``auto``, with
    ``micro_batch_tokens: auto``: each is measured at the start, and the fastest that has room is taken."""
    compile: bool = False
    """Layers go through ``torch.compile``: fewer passes over memory between products of matrices, for a minute or more
    at the start, in which what is compiled is held against the model as written. Needs a C++ compiler on a CPU, triton
    on CUDA; for ``backend: torch`` without ``service``, with ``recompute: none`` or ``whole``."""
    attention: Literal["blocks", "flex"] = "blocks"
    """How attention is computed where siblings share a row of any length. ``blocks``: in blocks of query rows, by
    torch's SDPA. ``flex``: by torch's ``flex_attention``; CUDA only, compiled at the first step, without sliding
    windows. A model that does not take either has a dense mask, and rows of at most 2,048 tokens."""
    router_replay: bool = False
    """Mixtures of experts: the trainer sends each token of a response to the experts that the engine had chosen for it.
    Costs layers x experts a token bytes with each token, on the wire and in the journal, some 30 times what a token
    takes without; pays where the two would choose differently, which in float32 they hardly do. Needs
    ``rollout.engine: torch``."""
    service: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")] | None = None
    """A training service of the head's (``--services FILE``) that trains for this job and for others, each in the
    other's gaps; ``auto``: one that the placement chooses. Unset: a process of the job's own, which shares nothing."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """``service``: waiting jobs of a higher one are served and admitted first."""
    share: PositiveFloat = 1.0
    """``service``: weight among jobs of one priority; twice the share gets twice the time while both wait."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "default"
    """``service``: whose quota the job counts against."""

    @property
    def pass_tokens(self) -> int:
        """Padded tokens in one forward and backward pass of all ranks together, until measured or halved."""
        return self.ranks * (MICRO_BATCH_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens)


class SyncConfig(Section):
    mode: SyncMode = "sync"
    """How the trainer consumes what is generated. On-policy: ``sync``: all of a step is generated, then trained;
    ``minibatch``: in fixed chunks of ``trainer.window_prompts``, in order; ``dynamic``: whatever has arrived, once it
    saturates the trainer. Off-policy: ``one_step_barrier``: the next step is generated while this one is trained, and
    both wait for the weights; ``async``: generation runs ahead by at most ``max_staleness`` versions, and nobody
    waits."""
    max_staleness: NonNegativeInt = 1
    """``async``: how many versions older than the trained one a sample's tokens may be."""


class WeightsConfig(Section):
    """How new weights reach rollout workers on other machines; on the trainer's they are mapped."""

    delta: bool = True
    """Send what has changed since the version that the worker holds. Lossless; a version of which too much has changed
    is sent whole. Worth it on links below some 25 Gbit/s."""
    relay: bool = True
    """Have workers pass on what they have: the trainer's machine sends each version at most twice, whatever their
    number, and once to each other machine. Workers must be able to reach each other."""
    send_bytes_per_s: Annotated[int, Field(ge=1_000_000)] | None = None
    """No process, be it the weight server or a worker that passes on, sends more of the weights than this. Set it where
    the link between sites is shared with others. Unset: as fast as it goes."""


class PlanConfig(Section):
    """How ``scheduling.policy: planned`` plans a step."""

    choose: Literal["lambda", "pareto", "fixed"] = "lambda"
    """What decides how many workers generate, of ``workers_min`` to ``workers_max``. ``lambda``: the least weighted sum
    of predicted time and cost, both scaled to 0 to 1 over these numbers (RLHFless); ``pareto``: the cheapest that is no
    more than ``within`` slower than the fastest; ``fixed``: always ``workers_max``."""
    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.7
    """``choose: lambda``: weight of time; the rest is that of cost. 1: the fastest, 0: the cheapest."""
    within: Annotated[float, Field(ge=0)] = 0.05
    """``choose: pareto``: part of the fastest step's time by which the chosen one may be longer."""
    parts: Literal["even", "balanced"] = "balanced"
    """How prompts, sorted by expected length, are cut into one part for each worker. ``even``: equal numbers of prompts
    (RLHFless); ``balanced``: so few of the longest that all workers end together, as predicted."""
    cut_at: Annotated[float, Field(gt=0, le=1)] = 0.7
    """A worker that has finished this part of its samples hands over the rest as soon as others have room, and sleeps.
    1: never."""


class SchedulingConfig(Section):
    """Who generates what, and how many workers there are."""

    policy: Literal["assign", "rlboost", "planned"] = "assign"
    """``assign``: each sample goes to the least loaded worker with a free slot, and stays there. ``rlboost``: a worker
    is given few more than its engine runs at once, and samples, begun or not, move from workers that have too many to
    those that have too few. For workers that come and go, engines whose memory is the limit, and long tails.
    ``planned``: before each step it is planned how many workers generate it, and which prompts each of them gets; the
    others sleep. For workers that are paid for by the second. Needs ``workers_max``, ``rollout.length_ranking`` and
    ``sync.mode: sync`` or ``minibatch``."""
    plan: PlanConfig = PlanConfig()
    relief: bool = False
    """With ``policy: rlboost``: a worker that has nothing to do takes running samples of the oldest step, those with
    the most tokens, from workers on which they would take longer, as both have measured. Shortens the wait for a
    step's last samples where a decode step takes longer the more sequences it has; costs each of them a prefill."""
    workers_min: PositiveInt = 1
    """With ``workers_max``: never fewer rollout workers than this."""
    workers_max: PositiveInt | None = None
    """Set: after each step the number of rollout workers follows the measured gap between generation and training,
    between ``workers_min`` and this; with ``policy: planned``, the plan of each step says how many of them generate
    it. Unset: it is what the job file, the machines and ``headrace ctl scale`` say."""
    seeding: bool = False
    """The rollout workers on the head's machine generate during a window at the start of each step; then they hand over
    what is unfinished to those on other machines, their engines sleep, and the trainer trains. The window's length
    follows what both sides wait for. While there is no other worker it lasts until the step is generated. Needs
    ``cluster.place_rollout: elastic`` (or ``local``: no other worker ever), and any ``sync.mode`` but
    ``one_step_barrier``; with ``async`` the next steps' samples are generated in it, too."""
    seeding_first_s: PositiveFloat = 150.0
    """``seeding``: the window of the first step with workers on other machines."""
    seeding_floor_s: Annotated[float, Field(ge=0)] = 5.0
    """``seeding``: no window is shorter than this."""
    seeding_damping: Annotated[float, Field(ge=1)] = 3.0
    """``seeding``: the window changes by this part of the difference between what trainer and workers waited."""
    seeding_end: Literal["learned", "estimated"] = "learned"
    """``seeding``: what ends a window. ``learned``: its length, learned from step to step. ``estimated``: the trainer,
    starting now, would not have to wait, by the lengths that ``rollout.length_ranking`` expects and the pace of trainer
    and workers as measured, however long that takes; while too little is known, the learned length."""


class CheckpointConfig(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: PositiveInt = 2
    """Checkpoints that stay on disk; older ones are removed."""
    keep_best: bool = False
    """With ``eval``: take a checkpoint of every version that is evaluated, and keep the one with the best avg@k beside
    the newest; ``checkpoints/best`` leads to it."""


class ClusterConfig(Section):
    nodes: NonNegativeInt = 0
    """Remote nodes to wait for before rollout workers are placed; 0: all on the head's own machine."""
    place_rollout: Literal["local", "remote", "spread", "elastic"] = "spread"
    """Where workers run: on the head's machine, on other nodes, or on other nodes while there are any. ``elastic``:
    ``rollout.workers`` on the head's machine, and one on each slot of every other node while it is there."""
    place_replicas: Literal["local", "remote"] = "local"
    """Where the replicas of a trainer are (``trainer.replicas``). ``remote``: the first on the head's machine, each
    further one whole on some other node, where each of its ranks takes a slot and a device. Needs ``nodes``."""
    replicas_unencrypted: bool = False
    """Let ranks on several machines exchange weights and gradients over a network without keys and encryption: whoever
    reaches it can read them, alter them, or take a rank's place. ``place_replicas: remote`` and ``trainer.nodes`` need
    it beyond loopback."""
    listen: str = "tcp://127.0.0.1:7001"
    """``headrace run`` with ``nodes``, or a provider of other hosts: where they join; beyond loopback it needs
    ``--keys``."""
    wait_s: PositiveFloat = 120.0
    """How long to wait for those nodes, and for a place for a worker that lost its own."""
    prices: dict[str, Annotated[float, Field(ge=0)]] = {}
    """What a machine costs an hour, by kind: ``{reserved: 83.79, spot: 5.32}``. ``reserved`` is the head's machine and
    every node that says nothing else (``headrace node --kind``). With prices, each step tells what it has cost."""


class MetricsConfig(Section):
    samples: bool = True
    """Write some samples of each step, as text, into the run directory: ``headrace samples`` shows them."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    wandb_project: str | None = None
    """Also report to this Weights & Biases project."""
    wandb_entity: str | None = None
    """Team or user that the project belongs to; unset: your own."""
    wandb_name: str | None = None
    """Name of the run there; unset: the job's."""
    wandb_tags: list[str] = []
    """Tags of the run there."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Also serve gauges at this port of the loopback interface; 0: any free port."""


class JobConfig(Section):
    """One RL job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """What the job is called: its run directory and its actors carry it."""
    seed: NonNegativeInt = 0
    """Fixes the prompt order and every sampling stream."""
    steps: PositiveInt
    """Optimizer steps, a whole number of at least 1."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvaluationConfig | None = None
    """Held-out evaluation. Unset: none."""
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    gateway: GatewayConfig = GatewayConfig()
    sync: SyncConfig = SyncConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    provider: ProviderConfig = ProviderConfig()
    metrics: MetricsConfig = MetricsConfig()
    limits: Limits = Limits()

    @property
    def listen(self) -> str | None:
        """Address at which other machines may join ``headrace run``; None: none will."""
        return self.cluster.listen if self.cluster.nodes or self.provider.brings_hosts else None

    @property
    def trainer_machines(self) -> int:
        """Machines over which the trainer's ranks are divided evenly, machine by machine; the head's is the first."""
        return self.trainer.replicas if self.cluster.place_replicas == "remote" else self.trainer.nodes

    @property
    def ranks_here(self) -> int:
        """Ranks of the trainer on the head's machine, and on each other one that it has."""
        return self.trainer.ranks // self.trainer_machines

    @property
    def staleness(self) -> int:
        """The staleness bound in versions: 0 in the on-policy modes."""
        return {"async": self.sync.max_staleness, "one_step_barrier": 1}.get(self.sync.mode, 0)

    @property
    def evaluation(self) -> JobConfig:
        """The job as its evaluation sees it: with other data and another seed, and responses drawn as ``eval`` says."""
        if self.eval is None:
            return self
        drawn = {"max_tokens": self.eval.max_tokens or self.rollout.max_tokens, "temperature": self.eval.temperature}
        changed = {"data": self.eval.data.model_copy(update={"epochs": 1}), "seed": self.seed + SEED_OFFSET}
        return self.model_copy(update=changed | {"rollout": self.rollout.model_copy(update=drawn)})

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing is trained, and the model is only evaluated as it is."""
        return self.eval is not None and self.eval.only

    @property
    def all_sources(self) -> dict[str, DataConfig]:
        """Sources of prompts by name: of training, and of the evaluation if there is one."""
        return self.data.sources | (self.eval.sources if self.eval is not None else {})

    @property
    def has_episodes(self) -> bool:
        """Whether an environment speaks between the model's turns; else each prompt is answered once."""
        return self.environment.kind != "none"

    @property
    def episode_tokens(self) -> int:
        """Tokens of an episode, of model and environment together, at most."""
        return self.environment.episode_tokens or 4 * self.rollout.max_tokens

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence that the models read: prompt and response, or an episode in one context."""
        return self.episode_tokens if self.has_episodes else self.data.max_prompt_tokens + self.rollout.max_tokens

    @property
    def scores_early(self) -> bool:
        """Whether reference log-probabilities are computed as samples arrive, in modes that repeat up to rounding only.

        Episodes are not scored early.
        """
        wanted = self.trainer.score_early and self.algorithm.kl_coefficient > 0 and not self.has_episodes
        return wanted and self.sync.mode in ("dynamic", "async")
