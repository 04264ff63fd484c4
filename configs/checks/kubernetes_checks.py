"""What the schema cannot see of ``provider.kubernetes``. Whether there is such an image or claim, the cluster says."""

from __future__ import annotations

import re
from typing import Final

from configs.kubernetes_schema import KubernetesConfig, Quantity

Found = tuple[str, str, str]
"""Field, what is wrong, what to do: as in ``configs.checks.checks``."""

_QUANTITY: Final = re.compile(r"\d+(\.\d+)?([mkMGTPE]|[KMGTPE]i)?")
_OURS: Final = "headrace/"
_SECTION: Final = "provider.kubernetes"


def check_kubernetes(kubernetes: KubernetesConfig | None) -> list[Found]:
    """The section of a job whose machines are pods."""
    if kubernetes is None:
        return [(_SECTION, "is missing, and provider.kind is kubernetes", "Add it; image is the least that it needs")]
    found: list[Found] = []
    if kubernetes.keys_secret is None:
        wrong = "is missing, and machines on other hosts join with keys only"
        found.append((f"{_SECTION}.keys_secret", wrong, "Name the Secret that docs/guides/kubernetes.md makes"))
    resources = kubernetes.resources
    for where, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            found += _check_quantity(f"{_SECTION}.resources.{where}.{name}", amount)
    if kubernetes.shared_memory is not None:
        found += _check_quantity(f"{_SECTION}.shared_memory", kubernetes.shared_memory)
    for index, volume in enumerate(kubernetes.volumes):
        if len(volume.sources) > 1:
            wrong = f"has {' and '.join(volume.sources)}; expected one source"
            found.append((f"{_SECTION}.volumes[{index}]", wrong, "Write an item for each of them"))
    for index, toleration in enumerate(kubernetes.tolerations):
        if toleration.operator == "Exists" and toleration.value is not None:
            wrong = f"is {toleration.value}, but operator: Exists takes whatever value"
            found.append((f"{_SECTION}.tolerations[{index}].value", wrong, "Remove it, or set operator to Equal"))
        if toleration.operator == "Equal" and toleration.key is None:
            wrong = "is missing, and operator is Equal"
            found.append((f"{_SECTION}.tolerations[{index}].key", wrong, "Name the taint, or set operator to Exists"))
    for name in kubernetes.labels:
        if name.startswith(_OURS) or name == "app.kubernetes.io/name":
            wrong = f"{name} is set by Headrace, which knows its pods by it"
            found.append((f"{_SECTION}.labels", wrong, "Remove it"))
    return found


def _check_quantity(field: str, amount: Quantity) -> list[Found]:
    if _QUANTITY.fullmatch(str(amount)):
        return []
    return [(field, f"{amount!r} is no quantity", "Write a number with a unit or without, such as 500m, 64Gi or 2")]
