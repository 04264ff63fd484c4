"""Weights over slow links: the same job on three hosts, its versions told plain, as deltas, relayed, and both.

    host head ══ 20 ms each way, 100 Mbit/s ══ switch ── host one, host two        two sites, with the slow link between

    a version is announced ─▶ … ─▶ the last of the four workers has it        until_last_s
    what has left the head's host for it / rate + delay                       limit_s

Hosts are network namespaces of this machine (``namespaces/network.py``), which root can make on Linux. ``--links all``
makes the nodes' links as slow as the head's, and each node a site of its own. Bytes are counted by both ends: by the
links, all that a host sends and receives in a step, and by the workers, the weights of a version alone. Times are
medians of the steps after the first few.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks._command import Result, add_job_options, command_line, measured, show
from benchmarks._harm import with_vocabulary
from benchmarks._jobs import BenchmarkFailed, hardware, job_text, prepare_job, use_cores
from benchmarks._processes import ROOT
from benchmarks.namespaces.cluster import ClusterOfHosts
from benchmarks.namespaces.network import USUAL_CONGESTION, Cable, Network, why_not
from configs.loader import load_job
from supervisors.cli.command import EXIT_BAD_CONFIG

WAYS: Final = {"plain": (False, False), "delta": (True, False), "relay": (False, True), "both": (True, True)}
"""``weights.delta`` and ``weights.relay`` of each way."""
NODES: Final = ("one", "two")
RUN_S: Final = 400.0
"""One run: far longer than it takes on a busy machine over links of 1 Mbit/s."""


def run_over(directory: Path, job: dict[str, Any], cable: Cable, options: argparse.Namespace) -> Result:
    """The job's run on hosts of its own, from its step ``--skip`` on.

    Raises:
        BenchmarkFailed: it has not finished, or has lost something.
    """
    sites = {node: ("--site", "far" if options.links == "head" else node) for node in NODES}
    slow: list[str] = ["head", *(NODES if options.links == "all" else ())]
    try:
        with Network(directory, congestion=options.congestion) as network:
            cluster = ClusterOfHosts(directory, network, job, nodes=sites, cables=dict.fromkeys(slow, cable))
            try:
                return _figures(cluster, options.skip)
            finally:
                cluster.run.close()
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error


def _figures(cluster: ClusterOfHosts, skip: int) -> Result:
    run, network, hosts = cluster.run, cluster.network, cluster.hosts
    run.wait_for_step(skip - 1)
    before = {name: (network.bytes_from(host), network.bytes_to(host)) for name, host in hosts.items()}
    begun = len(run.rows())
    summary = run.finish(timeout_s=RUN_S)
    steps = len(run.rows()) - begun
    went = {
        name: (network.bytes_from(host) - before[name][0], network.bytes_to(host) - before[name][1])
        for name, host in hosts.items()
    }
    return {
        **_of_versions(cluster, begun),
        "step_s": round(statistics.median(row["seconds"] for row in run.rows()[begun:]), 3),
        "link_mb": {
            name: {"sent": _mb(sent / steps), "received": _mb(received / steps)}
            for name, (sent, received) in went.items()
        },
        "prompts_lost": summary["prompts_lost"],
        "samples_trained_twice": summary["samples_trained_twice"],
    }


def _of_versions(cluster: ClusterOfHosts, begun: int) -> Result:
    """What the workers say of the versions that were announced after step ``begun``, and that all of them have had."""
    events = cluster.run.events()
    announced = {row["version"]: row["time_s"] for row in events if row["event"] == "version_available"}
    nodes = {row["worker"]: row["node"] for row in events if row["event"] == "worker_registered"}
    if (elsewhere := set(nodes.values())) != {*NODES}:
        raise BenchmarkFailed(f"its workers were on {', '.join(sorted(elsewhere))}, expected {' and '.join(NODES)}")
    loads: dict[int, dict[str, dict[str, Any]]] = {}
    for row in events:
        if row["event"] == "worker_version" and row["version"] > begun:
            loads.setdefault(row["version"], {})[row["worker"]] = row
    whole = {version: rows for version, rows in loads.items() if len(rows) == len(nodes) and version in announced}
    if not whole:
        raise BenchmarkFailed("no version was loaded by all workers: give it more --steps")
    last = [max(row["time_s"] for row in rows.values()) - announced[version] for version, rows in whole.items()]
    told = {
        node: [sum(row["wire_bytes"] for name, row in rows.items() if nodes[name] == node) for rows in whole.values()]
        for node in NODES
    }
    return {
        "versions": len(whole),
        "until_last_s": round(statistics.median(last), 3),
        "weights_mb": {node: _mb(statistics.median(sizes)) for node, sizes in told.items()},
        "each": {"until_last_s": [round(value, 3) for value in last]},
    }


def _mb(size_bytes: float) -> float:
    return round(size_bytes / 1e6, 3)


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Each way once, on hosts of its own."""
    use_cores(options.cores)
    result: Result = {"hardware": hardware()}
    file = prepare_job(options.job, [*(options.set or []), f"steps={options.steps}"], directory, options.model)
    file_with = [*with_vocabulary(file)] if load_job(file).rollout.engine == "simulated" else []
    job = load_job(file, file_with)
    plain: dict[str, Any] = yaml.safe_load(file.read_text("utf-8")) | {"rollout": job.rollout.model_dump(mode="json")}
    del plain["cluster"]  # the hosts say where its workers are
    cable = Cable(delay_s=options.delay_ms / 1e3, rate=f"{options.mbit:g}mbit", loss=options.loss)
    ways: dict[str, Result] = {}
    for way in options.ways.split(","):
        print(f"weights told: {way}", file=sys.stderr)
        delta, relay = WAYS[way]
        weights = {**plain["weights"], "delta": delta, "relay": relay}
        there = directory / way
        there.mkdir()
        ways[way] = run_over(there, {**plain, "weights": weights}, cable, options)
        limit_s = ways[way]["link_mb"]["head"]["sent"] * 8 / options.mbit + options.delay_ms / 1e3
        ways[way] |= {"limit_s": round(limit_s, 3), "ratio": round(ways[way]["until_last_s"] / limit_s, 2)}
    return result | {
        "link": {name: getattr(options, name) for name in ("delay_ms", "mbit", "loss", "links", "congestion")},
        "ways": ways,
        "job": f"{job_text(job)}; {job.rollout.workers} workers on {len(NODES)} nodes",
        "steps": options.steps,
    }


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("hosts", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "hosts.yaml")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="first steps that do not count")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="each way")
    parser.add_argument("--mbit", type=float, default=100.0, help="a second, in each direction")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets that get lost: 0.01")
    parser.add_argument("--congestion", default=USUAL_CONGESTION, help="how TCP slows down: cubic, bbr, …")
    parser.add_argument("--links", choices=("head", "all"), default="head", help="which hosts' links are slow")
    parser.add_argument("--ways", default=",".join(WAYS), help="names, with commas")
    options = parser.parse_args(args)
    if unknown := [way for way in options.ways.split(",") if way not in WAYS]:
        parser.error(f"--ways: there is no {unknown[0]!r}; expected some of {', '.join(WAYS)}")
    for option in ("steps", "skip", "mbit"):
        if getattr(options, option) <= 0:
            parser.error(f"--{option}: {getattr(options, option):g}; expected more than 0")
    if options.steps <= options.skip:
        parser.error(f"--steps: {options.steps}, of which --skip leaves out {options.skip}; expected more")
    if not (0 <= options.loss < 1 and options.delay_ms >= 0):
        said = f"--loss: {options.loss:g}, --delay-ms: {options.delay_ms:g}"
        parser.error(f"{said}; expected a share from 0 to below 1, and milliseconds from 0")
    return options


def main(args: list[str]) -> int:
    """Measure and print; exit code 2 where no hosts can be made."""
    options = parse(args)
    if why := why_not():
        print(f"headrace bench hosts: {why}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    show(measured(measure, options), options, _print_table)
    return 0


def _print_table(result: Result) -> None:
    link = result["link"]
    print(f"{result['job']}; {link['delay_ms']:g} ms, {link['mbit']:g} Mbit/s; {result['hardware']['class']}")
    print("  way     MB a node  MB from head  until last  limit  ratio    step")
    for way, row in result["ways"].items():
        node = max(row["weights_mb"].values())
        sent, last = row["link_mb"]["head"]["sent"], row["until_last_s"]
        print(
            f"  {way:<7} {node:>9.3f}  {sent:>12.3f}  {last:>8.3f} s  {row['limit_s']:>5.3f}  {row['ratio']:>5.2f}"
            f"  {row['step_s']:>6.3f} s"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
