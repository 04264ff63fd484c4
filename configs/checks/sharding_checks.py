"""What the schema cannot see of a trainer of several ranks: numbers that do not divide, and what it is not beside."""

from __future__ import annotations

from configs.schema import JobConfig

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_sharding(job: JobConfig) -> list[Found]:
    """Problems of ``trainer.backend: fsdp``, and of its keys with another backend."""
    trainer = job.trainer
    if trainer.backend != "fsdp":
        given = {"ranks": trainer.ranks, "replicas": trainer.replicas, "offload": trainer.offload}
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
