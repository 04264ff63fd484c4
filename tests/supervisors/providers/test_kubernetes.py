"""Pods as machines, on answers that a real API server gave: what the cluster refuses, takes back, loses or forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from configs.limits import Limits
from supervisors.providers.kubernetes.api import ApiRefused
from supervisors.providers.kubernetes.provider import KubernetesProvider
from supervisors.tree.errors import ProviderError
from tests.kubernetes.kubelet import NO_NODE
from tests.kubernetes.recorded_api import RecordedApi
from tests.kubernetes.worlds import MARK, NAMESPACE, Cluster, recorded

LIMITS = Limits(stop_timeout_s=2.0, cluster_list_s=0.5, cluster_claim_s=0.6, cluster_end_s=0.2, backoff_first_s=0.01)
JOIN = "tcp://10.0.0.1:7001"
SLEEPS = ["/bin/sh", "-c", "exec sleep 60"]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Machines:
    """A provider and what it has told."""

    def __init__(self, cluster: Cluster, api: RecordedApi, provider: KubernetesProvider) -> None:
        self.cluster, self.api, self.provider = cluster, api, provider
        self.ends: list[tuple[str, str]] = []
        self.news: list[tuple[str, str]] = []
        provider.on_end = lambda node, how: self.ends.append((node, how))
        provider.on_news = lambda node, words: self.news.append((node, words))

    async def start(self, node: str) -> str:
        """Start it and wait until it runs; the name of its pod."""
        self.provider.start(node, "spot")
        await self.until(lambda: self.phase(node) == "Running")
        return self.cluster.kubelet.pod_of(node)

    def phase(self, node: str) -> str:
        found = (pod for pod in self.api.pods.values() if pod["metadata"]["labels"]["headrace/node"] == node)
        return next((pod["status"]["phase"] for pod in found), "")

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.01)


def play(scene: Callable[[Machines], Awaitable[None]], directory: Path, **changes: Any) -> None:
    """On a cluster of its own, whose pods sleep; nothing is left of them at the end."""

    async def main() -> None:
        api = RecordedApi()
        async with recorded(directory, api) as cluster:
            settings: dict[str, Any] = {"command": SLEEPS} | changes
            provider = cluster.provider(JOIN, limits=LIMITS, **settings)
            machines = Machines(cluster, api, provider)
            await provider.open()
            try:
                await scene(machines)
            finally:
                api.away, api.refusal = False, None
                await provider.close()
            assert (api.pods, api.leases) == ({}, {})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ("quota", 'pods "{}" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=0, limited: pods=0'),
        (
            "forbidden",
            'pods is forbidden: User "nobody" cannot create resource "pods" in API group',
        ),
        ("invalid", 'Pod "Demo_2" is invalid: metadata.name: Invalid value: "Demo_2": a lowercase RFC 1123 subdomain'),
        ("bad", 'Pod in version "v1" cannot be handled as a Pod'),
    ],
)
def test_what_the_cluster_refuses_has_failed_in_the_clusters_own_words(
    refusal: str, words: str, tmp_path: Path
) -> None:
    async def scene(machines: Machines) -> None:
        machines.api.refusal = refusal
        machines.provider.start("a", "spot")
        await machines.until(lambda: machines.ends)
        assert machines.ends == [("a", "failed")]
        assert [node for node, _ in machines.news] == ["a"]
        assert machines.news[0][1].startswith(words.format(f"{MARK}-4e5f-1"))

    play(scene, tmp_path)


def test_an_image_that_cannot_be_pulled_is_said_and_leaves_no_pod(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        machines.provider.start("a", "spot")
        await machines.until(lambda: machines.ends and not machines.api.pods)
        assert machines.ends == [("a", "failed")]
        assert machines.news == [("a", 'ImagePullBackOff: Back-off pulling image "missing/headrace:2": not found')]

    play(scene, tmp_path, image="missing/headrace:2")


def test_what_cannot_be_scheduled_is_said_at_once_and_given_back_when_its_time_to_start_is_over(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        machines.provider.start("a", "spot")
        await machines.until(lambda: machines.ends and not machines.api.pods)
        words = f"Unschedulable: {NO_NODE}"
        assert machines.news == [("a", words), ("a", f"its pod did not run within 0.4 s: {words}")]
        assert machines.ends == [("a", "failed")]

    play(scene, tmp_path, node_selector={"gpu": "h100"}, start_s=0.4)


def test_a_process_that_ends_has_failed_with_its_last_line(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        machines.provider.start("a", "spot")
        await machines.until(lambda: machines.ends and not machines.api.pods)
        assert machines.news == [("a", "Error, exit code 2: --join: nobody answers")]

    play(scene, tmp_path, command=["/bin/sh", "-c", "echo one; echo '--join: nobody answers'; exit 2"])


def test_what_the_cluster_takes_back_is_told_as_taken_with_its_reason(tmp_path: Path) -> None:
    """An eviction by its node, a preemption by the scheduler, and somebody's ``kubectl delete``."""

    async def scene(machines: Machines) -> None:
        evicted = await machines.start("a")
        low = "The node was low on resource: memory."
        await machines.cluster.kubelet.say(evicted, {"phase": "Failed", "reason": "Evicted", "message": low})
        await machines.until(lambda: machines.ends == [("a", "taken")])
        assert machines.news == [("a", f"Evicted: {low}")]

        preempted = await machines.start("b")
        why = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting"}
        await machines.cluster.kubelet.say(preempted, {"conditions": [why]})
        await machines.cluster.admin.request("DELETE", f"{PODS}/{preempted}", json={"gracePeriodSeconds": 5})
        await machines.until(lambda: machines.ends[1:] == [("b", "taken")])
        assert ("b", "PreemptionByScheduler: preempting") in machines.news

        deleted = await machines.start("c")
        await machines.cluster.admin.request("DELETE", f"{PODS}/{deleted}", json={"gracePeriodSeconds": 0})
        await machines.until(lambda: machines.ends[2:] == [("c", "taken")])
        assert machines.news[-1] == ("c", "its pod has been deleted")

    play(scene, tmp_path)


def test_one_that_is_given_up_has_failed_with_the_end_of_its_log_or_where_to_look_for_the_next_ones(
    tmp_path: Path,
) -> None:
    async def scene(machines: Machines) -> None:
        ran = list[str]()
        machines.provider.on_runs = ran.append
        pod = await machines.start("a")
        machines.api.logs[pod] = "one\npulling\n\n  retrying in 5 s\n"
        machines.provider.give_up("a", "it does nothing")
        await machines.until(lambda: machines.ends == [("a", "failed")] and not machines.api.pods)
        said = f"it does nothing; the log of its pod {pod} ends: one | pulling | retrying in 5 s"
        assert machines.news == [("a", said)]

        other = await machines.start("b")
        machines.provider.give_up("b", "it does nothing")
        await machines.until(lambda: machines.ends[1:] == [("b", "failed")] and not machines.api.pods)
        words = machines.news[-1][1]
        assert words.startswith(f"it does nothing; the log of its pod {other} cannot be read: pods ")
        assert words.endswith(f"look at the next one's: kubectl logs -f -n {NAMESPACE} -l headrace/run={MARK}")
        assert ran == ["a", "b"]

    play(scene, tmp_path)


def test_a_pod_whose_node_is_lost_is_given_up_once_its_grace_period_is_over(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        pod = await machines.start("a")
        await machines.cluster.kubelet.stop()  # nobody says any more that the pod has gone
        await machines.cluster.admin.request("DELETE", f"{PODS}/{pod}", json={"gracePeriodSeconds": 1})
        await machines.until(lambda: machines.ends and not machines.api.pods)
        assert machines.ends == [("a", "taken")]

    play(scene, tmp_path)


def test_an_api_server_that_is_away_is_no_news_and_what_is_wanted_meanwhile_is_done_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def scene(machines: Machines) -> None:
        await machines.start("a")
        pod = await machines.start("b")
        machines.api.away = True
        machines.api.break_watches()
        machines.provider.start("c", "spot")
        machines.provider.notice("a", 5.0)
        machines.cluster.kubelet.processes[pod].kill()  # which nobody can know yet
        await machines.until(lambda: machines.news)
        await asyncio.sleep(0.3)
        assert machines.ends == []
        assert [node for node, _ in machines.news] == ["the cluster"]
        assert "API server does not answer" in machines.news[0][1]

        machines.api.away = False
        await machines.until(lambda: machines.phase("c") == "Running" and len(machines.ends) == 2)
        assert sorted(machines.ends) == [("a", "notice"), ("b", "failed")]
        assert machines.news[1] == ("the cluster", "its API server answers again")
        assert set(machines.provider.running) == {"c"}

    play(scene, tmp_path)


def test_a_watch_that_is_too_old_begins_anew_and_nothing_between_is_missed(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        pod = await machines.start("a")
        await machines.start("b")
        del machines.api.pods[pod]  # nobody was told
        machines.api.break_watches()
        machines.api._tell("MODIFIED", next(iter(machines.api.pods.values())))
        await machines.until(lambda: machines.ends == [("a", "taken")])
        assert set(machines.provider.running) == {"b"}

    play(scene, tmp_path)


def test_a_pod_whose_creation_was_never_answered_is_not_created_twice(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        machines.api.answers_lost = 1
        await machines.start("a")
        await machines.until(lambda: machines.api.requests.count(f"POST {PODS}") == 2)
        assert (machines.ends, machines.news, len(machines.api.pods)) == ([], [], 1)

    play(scene, tmp_path)


def test_a_second_head_with_the_same_labels_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        pod = await machines.start("a")
        second = machines.cluster.provider(JOIN, life="ffff", limits=LIMITS)
        with pytest.raises(ProviderError, match=f"another head owns the machines of this run: .* lease {MARK} .*_4e5f"):
            await second.open()
        with pytest.raises(ProviderError, match="has not been opened"):
            second.start("b", "spot")
        await second.close()
        assert list(machines.api.pods) == [pod]

    play(scene, tmp_path)


def test_what_a_life_that_is_gone_has_left_is_removed_and_if_it_wakes_up_it_touches_nothing(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        await machines.start("a")
        for task in machines.provider._lives:
            task.cancel()  # as if its process were stopped
        second = machines.cluster.provider(JOIN, life="ffff", limits=LIMITS, command=SLEEPS)
        await second.open()
        await machines.until(lambda: not machines.api.pods)
        second.start("b", "spot")
        await machines.until(lambda: machines.phase("b") == "Running")

        await machines.provider._list()  # it wakes up, and does not know yet
        await machines.provider._claim.keep(machines.provider._lost)
        with pytest.raises(ProviderError, match="_ffff has taken the lease"):
            machines.provider.start("c", "spot")
        await machines.provider.close()
        assert (machines.phase("b"), list(machines.api.leases)) == ("Running", [MARK])
        await second.close()

    play(scene, tmp_path)


def test_a_life_that_is_closed_before_it_knows_of_the_next_one_leaves_it_the_lease(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        for task in machines.provider._lives:
            task.cancel()
        second = machines.cluster.provider(JOIN, life="ffff", limits=LIMITS)
        await second.open()
        await machines.provider.close()
        assert list(machines.api.leases) == [MARK]
        await second.close()

    play(scene, tmp_path)


def test_a_cluster_that_does_not_let_us_see_pods_is_said_and_no_lease_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(machines: Machines) -> None:
        second = Machines(machines.cluster, machines.api, machines.cluster.provider(JOIN, limits=LIMITS))
        second.provider._claim._name = "another"
        monkeypatch.setattr(second.provider._api, "list", always(ApiRefused(403, "pods is forbidden")))
        with pytest.raises(ProviderError, match="in namespace train: pods is forbidden"):
            await second.provider.open()
        assert list(machines.api.leases) == [MARK]

    play(scene, tmp_path)


def test_watches_that_are_refused_are_said_once_and_pods_are_listed_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(machines: Machines) -> None:
        monkeypatch.setattr(machines.provider._api, "watch", refused_watch)
        machines.api.break_watches()
        pod = await machines.start("a")
        await asyncio.sleep(1.0)
        assert {words for _, words in machines.news} == {
            "pods cannot be watched, and are listed instead: watch is forbidden"
        }
        assert machines.api.requests.count(f"GET {PODS}") < 30, "Pauses of 10 ms, doubled"
        machines.cluster.kubelet.processes[pod].kill()
        await machines.until(lambda: machines.ends == [("a", "failed")])

    play(scene, tmp_path)


def test_an_answer_that_nobody_understands_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(machines: Machines) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(machines.provider._api, "list", always(KeyError("metadata")))
            machines.api.break_watches()
            machines.api._tell("MODIFIED", {"metadata": {"name": "x"}})
            await machines.until(lambda: machines.news)
            assert "its answer is not understood" in machines.news[0][1]
        await machines.start("a")
        await machines.until(lambda: machines.provider._machines["a"].made)

    play(scene, tmp_path)


def test_a_pod_that_may_not_be_deleted_is_there_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(machines: Machines) -> None:
        pod = await machines.start("a")
        with monkeypatch.context() as patch:
            patch.setattr(machines.provider._api, "delete", always(ApiRefused(403, "delete is forbidden")))
            machines.provider.notice("a", 1.0)
            await asyncio.sleep(0.2)
            assert (machines.ends, list(machines.api.pods)) == ([], [pod])
            assert machines.news == [("the cluster", f"the pod {pod} cannot be deleted: delete is forbidden")]
        await machines.until(lambda: machines.ends == [("a", "notice")])

    play(scene, tmp_path)


def test_a_pod_is_not_late_while_nobody_can_see_whether_it_runs(tmp_path: Path) -> None:
    async def scene(machines: Machines) -> None:
        machines.api.away = True
        machines.api.break_watches()
        machines.provider.start("a", "spot")
        await asyncio.sleep(0.6)
        assert machines.ends == []
        machines.api.away = False
        await machines.until(lambda: machines.phase("a") == "Running")
        await asyncio.sleep(0.6)
        assert machines.ends == []

    play(scene, tmp_path, start_s=0.3)


def always(error: Exception) -> Callable[..., Awaitable[Any]]:
    """A method that fails."""

    async def fails(*args: object) -> Any:
        raise error

    return fails


async def refused_watch(*args: object) -> AsyncIterator[tuple[str, Any]]:
    raise ApiRefused(403, "watch is forbidden")
    yield "", {}
