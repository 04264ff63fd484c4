"""Pods as plain data: makes the manifest of a machine, and interprets the status of a pod.

    job file ─▶ manifest ─▶ API server ─▶ kubelet ─▶ headrace node        a pod's status ─▶ read ─▶ Reading

Invariants
- ``restartPolicy: Never``, and a pod's name is used once: a machine that has ended does not come back.
- A pod's labels name its owner: ``headrace/run`` has the mark of the run, ``headrace/life`` says which process of that
  run has asked for it. Pods with another run's mark are never touched.
- A machine's keys are copied out of the mounted Secret, since a key file that others can read would be refused.
- The pod's grace period is the machine's notice: if the cluster takes the pod away, it has that long to hand over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from configs.kubernetes_schema import KubernetesConfig, PodVolume

RUN: Final = "headrace/run"
LIFE: Final = "headrace/life"
JOB: Final = "headrace/job"
NODE: Final = "headrace/node"
CONTAINER: Final = "node"
_KEYS_MOUNT: Final = "/etc/headrace/keys"
_OWN: Final = "/run/headrace"
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  the path at which weights are mapped
_KEY_FILES: Final = {"node.secret": "node.secret", "node.public": "node.public", "head.public": "allowed/head.public"}
_COPY_KEYS: Final = (
    'umask 077 && mkdir -p "$1/allowed" && cp -L "$0/node.secret" "$0/node.public" "$1" '
    '&& cp -L "$0/allowed/head.public" "$1/allowed" && shift && exec "$@"'
)
_GRACE_DEFAULT: Final = 30
"""Kubernetes' own default in seconds, which is used for machines without notice."""
_CANNOT_START: Final = frozenset({
    "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError",
})  # fmt: skip
"""Reasons for which a container waits that do not pass by themselves. ``ErrImagePull`` becomes ``ImagePullBackOff``."""


_TAKEN: Final = frozenset({"Evicted", "Preempting", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"})
"""Reasons of a pod's end which mean that the cluster has taken it away."""

_SIGNALLED: Final = 128
"""Lowest exit code of a process that was killed by a signal, so that its last line does not say why it ended."""
DELETED: Final = "its pod has been deleted"


@dataclass(frozen=True)
class Owner:
    """The owner of pods is one process of a run."""

    job: str
    mark: str
    """Random mark of the run, from ``ownership.py``."""
    life: str
    """Random name of this process."""
    head_pod: tuple[str, str] | None = None
    """Name and uid of the pod in which the head runs; when it is gone, the cluster removes the pods that it owns."""

    @property
    def selector(self) -> dict[str, str]:
        """Labels of all pods of the run, whichever life has asked for them."""
        return {RUN: self.mark}

    def metadata(self, name: str) -> dict[str, Any]:
        """Metadata for an object of this owner."""
        labels = {"app.kubernetes.io/name": "headrace", JOB: _label(self.job), RUN: self.mark, LIFE: self.life}
        metadata: dict[str, Any] = {"name": name, "labels": labels}
        if self.head_pod is not None:
            pod, uid = self.head_pod
            metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}]
        return metadata

    def pod_name(self, number: int) -> str:
        """Name of the ``number``-th pod of this life; no other pod has it."""
        return f"{self.mark}-{self.life}-{number}"


@dataclass(frozen=True)
class Order:
    """An order says how the process on a machine is to be started."""

    node: str
    kind: str
    join: str
    slots: int
    notice_s: float


def manifest(config: KubernetesConfig, owner: Owner, order: Order, name: str) -> dict[str, Any]:
    """The pod of one machine."""
    volumes, mounts = _volumes(config)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": config.image,
        "command": _command(config, order),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    resources = {"requests": _quantities(config.resources.requests), "limits": _quantities(config.resources.limits)}
    if filled := {key: value for key, value in resources.items() if value}:
        container["resources"] = filled
    if config.env:
        container["env"] = [{"name": key, "value": value} for key, value in config.env.items()]
    if config.image_pull_policy is not None:
        container["imagePullPolicy"] = config.image_pull_policy
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s(order.notice_s),
        "shareProcessNamespace": True,  # so that orphaned processes are reaped
        "enableServiceLinks": False,
        "automountServiceAccountToken": config.service_account is not None,
        "containers": [container],
        "volumes": volumes,
    }
    if config.run_as_user is not None:
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        user = config.run_as_user
        spec["securityContext"] = {
            "runAsUser": user, "runAsNonRoot": user != 0, "fsGroup": user, "seccompProfile": {"type": "RuntimeDefault"},
        }  # fmt: skip
    optional = {
        "nodeSelector": config.node_selector,
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in config.tolerations],
        "priorityClassName": config.priority_class,
        "serviceAccountName": config.service_account,
        "imagePullSecrets": [{"name": secret} for secret in config.image_pull_secrets],
    }
    spec |= {key: value for key, value in optional.items() if value}
    metadata = owner.metadata(name)
    metadata["labels"] = config.labels | metadata["labels"] | {NODE: _label(order.node)}
    if config.annotations:
        metadata["annotations"] = dict(config.annotations)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def grace_s(window_s: float) -> int:
    """A grace period in whole seconds, at least 1, since 0 would kill the pod without SIGTERM."""
    return max(1, int(window_s)) if window_s else _GRACE_DEFAULT


def _command(config: KubernetesConfig, order: Order) -> list[str]:
    command = [*config.command, "node", "--join", order.join, "--name", order.node, "--kind", order.kind]
    command += ["--slots", str(order.slots)]
    command += ["--notice", f"{order.notice_s:g}"] if order.notice_s else []
    if config.keys_secret is None:
        return command
    keys = f"{_OWN}/keys"
    return ["/bin/sh", "-c", _COPY_KEYS, _KEYS_MOUNT, keys, *command, "--keys", keys]


def _volumes(config: KubernetesConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    sources: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (_source(volume), {"mountPath": volume.mount} | _mount_options(volume)) for volume in config.volumes
    ]
    if all(volume.mount != _SHARED_MEMORY for volume in config.volumes):  # runtimes give only 64 MB
        size = {} if config.shared_memory is None else {"sizeLimit": _quantity(config.shared_memory)}
        sources.append(({"emptyDir": {"medium": "Memory", **size}}, {"mountPath": _SHARED_MEMORY}))
    if config.keys_secret is not None:
        items = [{"key": key, "path": path} for key, path in _KEY_FILES.items()]
        secret = {"secretName": config.keys_secret, "items": items, "defaultMode": 0o440}
        sources.append(({"secret": secret}, {"mountPath": _KEYS_MOUNT, "readOnly": True}))
        sources.append(({"emptyDir": {"medium": "Memory"}}, {"mountPath": _OWN}))
    named = [(f"volume-{index}", source, mount) for index, (source, mount) in enumerate(sources)]
    return [{"name": name} | source for name, source, _ in named], [{"name": name} | mount for name, _, mount in named]


def _source(volume: PodVolume) -> dict[str, Any]:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    return {"configMap": {"name": volume.config_map}} if volume.config_map is not None else {"emptyDir": {}}


def _mount_options(volume: PodVolume) -> dict[str, Any]:
    how: dict[str, Any] = {"readOnly": True} if volume.read_only else {}
    return how | ({"subPath": volume.sub_path} if volume.sub_path is not None else {})


def _quantities(amounts: dict[str, str | int | float]) -> dict[str, str]:
    return {name: _quantity(amount) for name, amount in amounts.items()}


def _quantity(amount: str | float) -> str:
    return amount if isinstance(amount, str) else f"{amount:g}" if isinstance(amount, float) else str(amount)


def _label(text: str) -> str:
    """``text`` as a valid label value: other characters are replaced, and it is cut at 63."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")


# ------------------------------------------------------------ what the cluster says


@dataclass(frozen=True)
class Reading:
    """A reading of a pod's status says what it means to us."""

    name: str
    life: str
    node: str
    runs: bool
    ended: bool
    """Whether its container will not run any more."""
    hopeless: bool
    """Whether it waits for something that will not happen by itself, such as an image that cannot be pulled."""
    taken: bool
    """Whether the cluster has taken it away, as far as its status says."""
    leaves_s: float | None
    """Grace period in seconds, if the pod was told to end; else None."""
    words: str
    """The cluster's own sentence on why the pod waits, ends or has ended; may be empty."""


def read(pod: dict[str, Any]) -> Reading:
    """Interpret ``pod``, as the API server returns it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    phase = status.get("phase", "Pending")
    states = [container.get("state") or {} for container in status.get("containerStatuses") or []]
    waiting = [state["waiting"] for state in states if state.get("waiting")]
    leaving = metadata.get("deletionTimestamp") is not None
    disrupted = _conditions(status).get("DisruptionTarget", {}).get("status") == "True"
    return Reading(
        name=metadata["name"],
        life=labels.get(LIFE, ""),
        node=labels.get(NODE, ""),
        runs=phase == "Running",
        ended=phase in ("Succeeded", "Failed"),
        hopeless=phase == "Pending" and any(wait.get("reason") in _CANNOT_START for wait in waiting),
        taken=leaving or disrupted or status.get("reason") in _TAKEN,
        leaves_s=float(metadata.get("deletionGracePeriodSeconds") or 0) if leaving else None,
        words=DELETED if leaving and not disrupted else _why(status, states),
    )


def _why(status: dict[str, Any], states: list[dict[str, Any]]) -> str:
    """The most useful sentence of a status: why the pod was taken away, how its process ended, or what it waits for."""
    conditions = _conditions(status)
    disrupted = conditions.get("DisruptionTarget", {})
    if disrupted.get("status") == "True":
        return _sentence(disrupted)
    if status.get("reason") or status.get("message"):
        return _sentence(status)
    for state in states:
        if ended := state.get("terminated"):
            code = ended.get("exitCode", 0)
            said = (ended.get("message") or "").strip().splitlines()
            how = f"{ended.get('reason') or 'Ended'}, exit code {code}"
            return f"{how}: {said[-1].strip()}" if said and code < _SIGNALLED else how
        if (wait := state.get("waiting")) and wait.get("reason") != "ContainerCreating":
            return _sentence(wait)
    scheduled = conditions.get("PodScheduled", {})
    return _sentence(scheduled) if scheduled.get("status") == "False" else ""


def _conditions(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def _sentence(said: dict[str, Any]) -> str:
    return ": ".join(" ".join(part.split()) for part in (said.get("reason"), said.get("message")) if part)
