"""``headrace bench hosts`` where it cannot measure; where it can: tests/hosts/test_slow_links.py."""

from __future__ import annotations

import os

import pytest

from benchmarks import hosts


def test_without_the_rights_to_make_hosts_the_benchmark_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.main(["--json"]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err) == (
        "",
        "headrace bench hosts: hosts are network namespaces, which root alone can make\n",
    )


def test_a_way_that_does_not_exist_is_refused_with_those_that_do(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hosts.main(["--ways", "plain,fast"])
    assert ended.value.code == 2
    assert "there is no 'fast'; expected some of plain, delta, relay, both" in capfd.readouterr().err
