"""What is handed to a cluster is valid there: the files of ``deploy/kubernetes``, and the pods of machines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")

from configs.kubernetes_schema import KubernetesConfig
from configs.loader import load_job
from supervisors.providers.kubernetes.pods import LIFE, RUN, Order, Owner, manifest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
OWNER = Owner("My_job.1", "headrace-my-job-1-0a1b2c3d", "4e5f", ("headrace-head-x", "0-1-2"))
ORDER = Order("my-job-1-7", "spot", "tcp://10.0.0.1:7001?key=ab", 2, 90.0)
EVERYTHING = KubernetesConfig.model_validate({
    "image": "registry.example/headrace:1",
    "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"],
    "resources": {"requests": {"cpu": 0.5, "memory": "4Gi"}, "limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}},
    "node_selector": {"cloud.google.com/gke-spot": "true"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists"}],
    "volumes": [
        {"mount": "/work", "claim": "work", "sub_path": "me"},
        {"mount": "/models", "host_path": "/models", "read_only": True},
        {"mount": "/token", "secret": "hub"},
        {"mount": "/rewards", "config_map": "rewards"},
        {"mount": "/scratch"},
    ],
    "shared_memory": "8Gi",
    "priority_class": "low",
    "service_account": "machines",
    "run_as_user": 1000,
    "env": {"HF_HOME": "/models"},
    "labels": {"kueue.x-k8s.io/queue-name": "rollout"},
    "annotations": {"a": "b"},
    "keys_secret": "headrace-node-keys",
})  # fmt: skip


def preset() -> KubernetesConfig:
    section = load_job(ROOT / "configs" / "kubernetes.yaml", []).provider.kubernetes
    assert section is not None
    return section


def objects(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_file_fits_the_schema(file: Path, version: str) -> None:
    found = objects(file)
    assert found, "an empty file would fit any schema"
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pod_of_a_machine_fits_the_schema_and_a_misspelt_key_would_not(version: str) -> None:
    for config in (KubernetesConfig(image="i"), EVERYTHING, preset()):
        kubernetes_validate.validate(manifest(config, OWNER, ORDER, OWNER.pod_name(1)), version, strict=True)
    wrong = copy.deepcopy(manifest(EVERYTHING, OWNER, ORDER, OWNER.pod_name(1)))
    wrong["spec"]["nodeSelektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="nodeSelektor"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_a_pod_has_what_the_section_asks_for_and_what_a_machine_needs() -> None:
    pod = manifest(EVERYTHING, OWNER, ORDER, OWNER.pod_name(3))
    metadata, spec = pod["metadata"], pod["spec"]
    container = spec["containers"][0]
    assert metadata["name"] == "headrace-my-job-1-0a1b2c3d-4e5f-3"
    assert (metadata["labels"][RUN], metadata["labels"][LIFE]) == (OWNER.mark, "4e5f")
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "rollout"
    assert metadata["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "headrace-head-x", "uid": "0-1-2"}
    ]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 90)
    assert spec["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert spec["tolerations"] == [
        {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}, {"operator": "Exists"},
    ]  # fmt: skip
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("low", "machines")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "4Gi"}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {"/work", "/models", "/token", "/rewards", "/scratch", "/dev/shm", "/etc/headrace/keys"} <= mounts.keys()
    assert mounts["/models"]["readOnly"] is True
    node = ["headrace", "node", "--join", ORDER.join, "--name", "my-job-1-7", "--kind", "spot", "--slots", "2"]
    assert container["command"][-13:] == [*node, "--notice", "90", "--keys", "/run/headrace/keys"][-13:]
    assert container["command"][:2] == ["/bin/sh", "-c"]


def test_the_presets_volumes_secret_and_names_are_those_of_the_heads_manifest() -> None:
    head = {one["kind"]: one for one in objects(ROOT / "deploy" / "kubernetes" / "head.yaml")}
    config = preset()
    assert [volume.claim for volume in config.volumes] == [head["PersistentVolumeClaim"]["metadata"]["name"]]
    keys = next(v for v in head["Job"]["spec"]["template"]["spec"]["volumes"] if v["name"] == "keys")["secret"]
    job = load_job(ROOT / "configs" / "kubernetes.yaml", [])
    assert {"key": "nodes.public", "path": f"allowed/{job.name}.public"} in keys["items"]
    assert f"run=/work/runs/{job.name}" in head["Job"]["spec"]["template"]["spec"]["containers"][0]["args"][0]


def test_the_guide_shows_the_files_as_they_are() -> None:
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    for file in [*FILES, ROOT / "deploy" / "Dockerfile", ROOT / "configs" / "kubernetes.yaml"]:
        assert file.read_text().strip() in guide, f"{file.name} differs from the guide"
