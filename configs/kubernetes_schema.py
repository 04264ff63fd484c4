"""The section ``provider.kubernetes``: what the pods of a job's machines are made of, and where they are asked for.

Keys are named as in a pod's manifest where it has them. Keys that are not set are left to the cluster's defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import NonNegativeInt, PositiveFloat, Section

Quantity = str | int | float
"""A number, with a unit or without, such as ``64Gi``, ``500m`` or ``2``."""


class PodResources(Section):
    """What a machine asks of the cluster's nodes, as in a container's ``resources``."""

    requests: dict[str, Quantity] = {}
    """Reserved for it, such as ``{cpu: 8, memory: 64Gi}``. Unset: as many as ``limits``."""
    limits: dict[str, Quantity] = {}
    """It never has more, such as ``{memory: 64Gi, nvidia.com/gpu: 1}``. Devices are asked for here."""


class Toleration(Section):
    """A taint of nodes that does not keep machines away, as in a pod's ``tolerations``."""

    key: str | None = None
    """Taint's key; unset, with ``operator: Exists``: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """``Exists``: whatever its value; ``Equal``: if it has ``value``."""
    value: str | None = None
    """``Equal``: the taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint's effect; unset: every one."""
    tolerationSeconds: NonNegativeInt | None = None  # noqa: N815  a pod's manifest spells it so
    """``NoExecute``: how long such a node is borne; unset: for ever."""


class PodVolume(Section):
    """A directory of the machines, from one source: ``claim``, ``host_path``, ``secret`` or ``config_map``; none: an
    empty directory that ends with the machine.
    """

    mount: Annotated[str, Field(pattern=r"^/")]
    """Path in the machine."""
    claim: str | None = None
    """A PersistentVolumeClaim; one that many pods mount must be ReadWriteMany."""
    host_path: Annotated[str, Field(pattern=r"^/")] | None = None
    """A directory of the cluster's node."""
    secret: str | None = None
    """A Secret."""
    config_map: str | None = None
    """A ConfigMap."""
    sub_path: str | None = None
    """Only this directory of the source."""
    read_only: bool = False
    """Machines cannot write there."""

    @property
    def sources(self) -> list[str]:
        """Names of the sources that are set."""
        return [name for name in ("claim", "host_path", "secret", "config_map") if getattr(self, name) is not None]


class KubernetesConfig(Section):
    """Machines are pods of a Kubernetes cluster, each with one ``headrace node``."""

    image: Annotated[str, Field(min_length=1)]
    """Container image with headrace in it, in the version of the head."""
    namespace: str | None = None
    """Namespace of the pods. Unset: that of the head's own pod, or of the context."""
    context: str | None = None
    """Context of the kubeconfig (``KUBECONFIG``, ``~/.kube/config``). Unset: the current one; in a pod, its cluster."""
    command: Annotated[list[str], Field(min_length=1)] = ["headrace"]
    """How headrace is started in the image."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled. Unset: the cluster's rule."""
    image_pull_secrets: list[str] = []
    """Secrets with which it is pulled."""
    resources: PodResources = PodResources()
    node_selector: dict[str, str] = {}
    """Labels of the nodes that are chosen from, such as ``{cloud.google.com/gke-spot: "true"}``."""
    tolerations: list[Toleration] = []
    """Taints of nodes that are chosen all the same."""
    volumes: list[PodVolume] = []
    """Directories, such as the one with the model."""
    shared_memory: Quantity | None = None
    """Size of ``/dev/shm``, where weights lie; counts as the machine's memory. Unset: as much as its memory."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    service_account: str | None = None
    """ServiceAccount of the pods. Unset: the namespace's default, without a token."""
    run_as_user: NonNegativeInt | None = None
    """User of the process, without any capabilities. Unset: as the image says."""
    env: dict[str, str] = {}
    """Environment variables."""
    labels: dict[str, str] = {}
    """Further labels, such as ``{kueue.x-k8s.io/queue-name: rollout}``."""
    annotations: dict[str, str] = {}
    """Annotations of the pods."""
    keys_secret: str | None = None
    """Secret with ``node.secret``, ``node.public`` and ``head.public``, the key directory of the machines
    (``docs/guides/kubernetes.md``). It is mounted; the head never reads it."""
    start_s: PositiveFloat = 600.0
    """A pod that does not run by then is given back, with what the cluster says of it. An autoscaler needs minutes."""
