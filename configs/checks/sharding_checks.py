"""What the schema cannot see of a trainer of several ranks: numbers that do not divide, where it cannot be."""

from __future__ import annotations

from configs.schema import JobConfig

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_sharding(job: JobConfig) -> list[Found]:
    """Problems of ``trainer.backend: fsdp``, and of its keys with another backend. ``simulated`` has ranks, too."""
    trainer = job.trainer
    if trainer.backend != "fsdp":
        given = {"ranks": trainer.ranks, "replicas": trainer.replicas, "offload": trainer.offload}
        if trainer.backend == "simulated" and given.pop("ranks") > 1 and trainer.service is not None:
            wrong = f"{trainer.service!r}, but a training service shares one process, and trainer.ranks is more than 1"
            return [("trainer.service", wrong, "Leave it out, or trainer.ranks")]
        fix = "Set trainer.backend to fsdp, or leave it out"
        return [
            (f"trainer.{key}", f"{str(value).lower()}, which is for trainer.backend: fsdp, not {trainer.backend}", fix)
            for key, value in given.items()
            if value != type(trainer).model_fields[key].default
        ]
    found: list[Found] = []
    if trainer.ranks % trainer.replicas:
        wrong = (
            f"{trainer.replicas} copies of the weights do not share out {trainer.ranks} ranks (trainer.ranks) evenly"
        )
        divisors = ", ".join(str(n) for n in range(1, trainer.ranks + 1) if trainer.ranks % n == 0)
        found.append(("trainer.replicas", wrong, f"Set it to one of {divisors}"))
    if trainer.service is not None:
        wrong = f"{trainer.service!r}, but a training service shares one process, and trainer.backend is fsdp"
        found.append(("trainer.service", wrong, "Leave it out, or set trainer.backend to torch"))
    return found


def check_replica_places(job: JobConfig) -> list[Found]:
    """Problems of ``cluster.place_replicas: remote``."""
    field, trainer, cluster = "cluster.place_replicas", job.trainer, job.cluster
    if cluster.place_replicas == "local":
        return []
    found: list[Found] = []
    if trainer.backend != "fsdp" or trainer.replicas == 1:
        wrong = f"remote, but trainer.backend is {trainer.backend}, and trainer.replicas {trainer.replicas}"
        fix = "Set trainer.backend to fsdp and trainer.replicas to 2 or more, or leave it out"
        found.append((field, wrong, fix))
    if cluster.nodes == 0:
        wrong = "remote, but cluster.nodes is 0: no other machine would join"
        found.append((field, wrong, "Set cluster.nodes to how many will join"))
    if job.provider.kind == "functions":
        wrong = "remote, but provider.kind is functions, whose machines end whenever nothing is generated"
        found.append((field, wrong, "Set it to local, or take another provider"))
    return found
