"""``headrace bench hosts`` where it cannot measure; where it can: tests/hosts/test_slow_links.py."""

from __future__ import annotations

import os

import pytest

from benchmarks.jobs import hosts


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--mbit", "0"], "--mbit: 0; expected more than 0"),
        (["--steps", "3", "--skip", "3"], "--steps: 3, of which --skip leaves out 3; expected more"),
        (["--loss", "1"], "--loss: 1, --delay-ms: 20; expected a share from 0 to below 1"),
    ],
)
def test_numbers_of_which_no_figure_can_be_made_are_refused(
    given: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        hosts.main(given)
    assert ended.value.code == 2
    assert said in capfd.readouterr().err
