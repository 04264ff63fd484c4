"""The command line: ``app`` knows each command by its name, and no more.

With ``--json`` stdout carries JSON only; progress and logs go to stderr and to files. Everything heavy is imported by
the command that needs it, so that ``--help`` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from supervisors.cli.bench import bench
from supervisors.cli.check import check
from supervisors.cli.console.command import console
from supervisors.cli.ctl import ctl
from supervisors.cli.doctor import doctor
from supervisors.cli.evaluate import eval_
from supervisors.cli.keys import keys
from supervisors.cli.merge import merge
from supervisors.cli.new import new
from supervisors.cli.plot.command import plot
from supervisors.cli.run import run
from supervisors.cli.runs import runs
from supervisors.cli.samples import samples
from supervisors.cli.schema import schema
from supervisors.cli.serve import head, node
from supervisors.cli.simulate import simulate
from supervisors.cli.slurm import slurm
from supervisors.cli.train_reward import train_reward
from supervisors.cli.version import version

app = typer.Typer(name="headrace", no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {version()}")
        raise typer.Exit


@app.callback()
def headrace(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Generate, score and train on LLM rollouts, on machines that come and go."""


app.add_typer(ctl, name="ctl")
app.add_typer(slurm, name="slurm")
for command in (run, new, check, schema, runs, head, node, doctor):
    app.command()(command)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(bench)
for command in (keys, simulate, train_reward, merge, plot, samples, console):
    app.command()(command)
app.command("eval")(eval_)


@app.command(hidden=True)
def actor() -> None:
    """Be a role process; node agents start it and write its orders to its standard input."""
    from supervisors.machine.child import run_child

    run_child()


@app.command(hidden=True)
def lead() -> None:
    """Be the head's process; headrace run and headrace head start it and write its orders to its standard input."""
    from supervisors.head.head_process import run_head_process

    run_head_process()


@app.command(hidden=True)
def held() -> None:
    """Be the process of a run that a program has started (docs/guides/python.md) and holds by its standard input."""
    from supervisors.api.held_run import run_held

    run_held()
