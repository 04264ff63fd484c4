"""The command line: ``app`` only maps names to commands.

With ``--json`` stdout carries JSON only; progress and logs go to stderr and to files. Everything heavy is imported by
the command that needs it, so that ``--help`` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from configs.version import version
from supervisors.cli.bench import bench
from supervisors.cli.console.command import console
from supervisors.cli.ctl import ctl
from supervisors.cli.keys import keys
from supervisors.cli.looking.check import check, schema
from supervisors.cli.looking.doctor import doctor
from supervisors.cli.looking.runs import runs
from supervisors.cli.looking.samples import samples
from supervisors.cli.models.evaluate import eval_
from supervisors.cli.models.merge import merge
from supervisors.cli.models.train_reward import train_reward
from supervisors.cli.new import new
from supervisors.cli.plot.command import plot
from supervisors.cli.running.run import run
from supervisors.cli.serve import head, node
from supervisors.cli.serve_models import serve
from supervisors.cli.simulate import simulate
from supervisors.cli.slurm import slurm

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
for command in (run, new, check, schema, runs, head, node, serve, doctor):
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
    from supervisors.machine.processes.child import run_child

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
