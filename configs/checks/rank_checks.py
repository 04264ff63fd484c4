"""Checks of a trainer or an engine with several ranks: numbers that do not divide, places where ranks cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from configs.checks.environment_checks import is_loopback
from configs.errors import Found
from configs.model_files import ModelFileBroken, text_config
from configs.schema import JobConfig, TrainerConfig

_LAYOUT: Final = ("replicas", "offload", "expert_parallel", "context_ranks")
"""Keys that say how ranks of one machine share a model."""
_CONTEXT: Final = "trainer.context_ranks"
_ATTENTION_LAYERS: Final = ("full_attention", "sliding_attention")


def check_sharding(job: JobConfig) -> list[Found]:
    """Problems of ``trainer.backend: fsdp``, and of its keys with another backend. ``simulated`` has ranks, too."""
    trainer = job.trainer
    if trainer.backend == "fsdp":
        return _indivisible(trainer) + _context(job) + _shared(trainer)
    keys, found = ("ranks", "nodes", *_LAYOUT), list[Found]()
    if trainer.backend == "simulated":
        if trainer.ranks > 1 and trainer.service is not None:
            wrong = f"{trainer.service!r}, but a simulated training service has one process, and trainer.ranks is more"
            return [("trainer.service", wrong, "Leave it out, or trainer.ranks")]
        keys, found = _LAYOUT, _indivisible(trainer)
    fix = "Set trainer.backend to fsdp, or leave it out"
    return found + [
        (field, f"{value}, which is for trainer.backend: fsdp, not {trainer.backend}", fix)
        for field, value in _given(trainer, keys)
    ]


def _given(trainer: TrainerConfig, keys: Iterable[str]) -> list[tuple[str, str]]:
    """Those of ``keys`` that the job sets, and their values as the job file has them."""
    fields = type(trainer).model_fields
    values = ((key, getattr(trainer, key)) for key in keys)
    return [(f"trainer.{key}", str(value).lower()) for key, value in values if value != fields[key].default]


def _shared(trainer: TrainerConfig) -> list[Found]:
    """Keys that a training service does not offer: its ranks share one copy of the weights on one machine."""
    if trainer.service is None:
        return []
    why = "but trainer.service is set, and the ranks of a service share one copy of the weights on the head's machine"
    fix = "Leave it out, or trainer.service"
    return [(field, f"{value}, {why}", fix) for field, value in _given(trainer, ("nodes", *_LAYOUT))]


def _context(job: JobConfig) -> list[Found]:
    """Problems of ranks that share rows: ``trainer.context_ranks``."""
    trainer, count = job.trainer, job.trainer.context_ranks
    if count == 1:
        return []
    fix, found = "Leave it out", list[Found]()
    together = trainer.ranks // max(trainer.replicas, job.trainer_machines)
    if together % count:
        wrong = f"{count}, but a copy of the weights has {together} ranks on a machine, which is no multiple of it"
        divisors = ", ".join(str(n) for n in range(1, together + 1) if together % n == 0)
        found.append((_CONTEXT, wrong, f"Set it to one of {divisors}, or trainer.ranks to a multiple"))
    if trainer.attention == "flex":
        wrong = f"{count}, but trainer.attention is flex, which computes whole rows"
        found.append((_CONTEXT, wrong, f"{fix}, or set trainer.attention to blocks"))
    if trainer.expert_parallel:
        wrong = f"{count}, but trainer.expert_parallel is set: tokens of a shared row do not travel to experts"
        found.append((_CONTEXT, wrong, f"{fix}, or trainer.expert_parallel"))
    if job.algorithm.load_balancing is not None:
        wrong = f"{count}, but algorithm.load_balancing is set, which looks at the experts of whole rows"
        found.append((_CONTEXT, wrong, f"{fix}, or algorithm.load_balancing"))
    if kind := _other_layers(Path(job.model.path or "").expanduser()):
        wrong = f"{count}, but the model has layers of {kind}, which pass a state along the whole row"
        found.append((_CONTEXT, wrong, fix))
    return found


def _other_layers(directory: Path) -> str:
    """A kind of layers, by config.json, that looks at other tokens by something else than attention; empty: none."""
    try:
        kinds = text_config(directory).get("layer_types") if directory.is_dir() else None
    except ModelFileBroken:  # check_model reports it
        return ""
    return next((str(kind) for kind in kinds or () if kind not in _ATTENTION_LAYERS), "")


def _indivisible(trainer: TrainerConfig) -> list[Found]:
    """Numbers of copies and machines that do not share out the ranks evenly, or each other."""
    ranks, replicas, nodes = trainer.ranks, trainer.replicas, trainer.nodes
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    found: list[Found] = []
    if ranks % replicas:
        wrong = f"{replicas} copies of the weights do not share out {ranks} ranks (trainer.ranks) evenly"
        found.append(("trainer.replicas", wrong, f"Set it to one of {divisors}"))
    if ranks % nodes:
        wrong = f"{nodes} machines do not share out {ranks} ranks (trainer.ranks) evenly"
        found.append(("trainer.nodes", wrong, f"Set it to one of {divisors}"))
    elif nodes % replicas and replicas % nodes:
        wrong = f"{nodes} machines and {replicas} copies of the weights (trainer.replicas): neither divides the other"
        found.append(("trainer.nodes", wrong, "Give each copy as many machines, or each machine as many copies"))
    return found


def check_rank_places(job: JobConfig) -> list[Found]:
    """Problems of a trainer over several machines: ``cluster.place_replicas: remote``, or ``trainer.nodes``."""
    trainer, cluster = job.trainer, job.cluster
    field, value = _apart(job)
    if not field:
        return []
    found: list[Found] = []
    if cluster.place_replicas == "remote" and trainer.nodes > 1:
        wrong = f"remote, and trainer.nodes is {trainer.nodes}, which divides the ranks over machines already"
        found.append((field, wrong, "Leave one of them out"))
    if cluster.place_replicas == "remote" and (trainer.backend != "fsdp" or trainer.replicas == 1):
        wrong = f"remote, but trainer.backend is {trainer.backend}, and trainer.replicas {trainer.replicas}"
        fix = "Set trainer.backend to fsdp and trainer.replicas to 2 or more, or leave it out"
        found.append((field, wrong, fix))
    if cluster.nodes == 0:
        wrong = f"{value}, but cluster.nodes is 0: no other machine would join"
        found.append((field, wrong, "Set cluster.nodes to how many will join"))
    if job.provider.kind == "functions":
        wrong = f"{value}, but provider.kind is functions, whose machines end whenever nothing is generated"
        found.append((field, wrong, "Leave it out, or take another provider"))
    return found + check_rank_network(job, cluster.listen)


def check_rank_network(job: JobConfig, endpoint: str) -> list[Found]:
    """Problems of ranks on machines that reach the head at ``endpoint``. Simulated ones exchange nothing."""
    at, (field, value) = urlsplit(endpoint), _apart(job)
    host = at.hostname or ""
    if not field or job.cluster.replicas_unencrypted or at.scheme != "tcp" or is_loopback(host):
        return []
    if job.trainer.backend == "simulated":
        return []
    wrong = (
        f"{value}, and nodes reach the head at {host}: what ranks exchange between machines has no keys and no "
        "encryption, so whoever reaches that network can read and alter weights and gradients, or take a rank's place"
    )
    fix = "Set cluster.replicas_unencrypted to true if the network is yours alone, or keep the trainer on one machine"
    return [(field, wrong, fix)]


def _apart(job: JobConfig) -> tuple[str, str]:
    """The key that has ranks on several machines, and its value; both empty if all are on the head's."""
    if job.cluster.place_replicas == "remote":
        return "cluster.place_replicas", "remote"
    return ("trainer.nodes", str(job.trainer.nodes)) if job.trainer.nodes > 1 else ("", "")


_FIELD: Final = "rollout.tensor_parallel"
_HEADS: Final = ("num_attention_heads", "n_head")
_KEY_HEADS: Final = ("num_key_value_heads",)
_MLP: Final = ("intermediate_size", "n_inner", "ffn_dim")
_VOCABULARY_MULTIPLE: Final = 64
"""Multiple to which vLLM pads a vocabulary before it is divided among ranks."""


def check_tensor_parallel(job: JobConfig) -> list[Found]:
    """Problems of a job whose workers have several ranks."""
    ranks, engine = job.rollout.tensor_parallel, job.rollout.engine
    if ranks == 1:
        return []
    if engine == "simulated":
        return []
    if engine != "vllm":
        wrong = f"{ranks}, but rollout.engine is {engine}, which computes in one rank"
        return [(_FIELD, wrong, "Set rollout.engine to vllm, or tensor_parallel to 1")]
    path = Path(job.model.path or "").expanduser()
    if job.model.source != "hf" or not job.model.path or not path.is_dir():
        return []
    try:
        wrong = why_indivisible(path, ranks)
    except ModelFileBroken:  # check_model reports it
        return []
    return [(_FIELD, wrong, "Set it to a number that divides all of them, or to 1")] if wrong else []


def why_indivisible(directory: Path, ranks: int) -> str:
    """Which number in config.json keeps vLLM from dividing the model among ``ranks``; empty: none."""
    config = text_config(directory)

    def first(keys: tuple[str, ...]) -> tuple[str, int] | None:
        return next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), None)

    for keys in (_HEADS, _MLP):
        if (found := first(keys)) is not None and found[1] % ranks:
            return _said(ranks, *found, directory)
    if (found := first(_KEY_HEADS)) is not None and found[1] % ranks and ranks % found[1]:
        return f"{_said(ranks, *found, directory)}, nor they it"
    if (found := first(("vocab_size",))) is not None:
        padded = -(-found[1] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        if padded % ranks:
            return f"{_said(ranks, *found, directory)}, padded to {padded}"
    return ""


def _said(ranks: int, key: str, count: int, directory: Path) -> str:
    return f"{ranks} ranks do not divide {key} = {count} of {directory / 'config.json'}"
