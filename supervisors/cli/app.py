"""The command line: ``app`` knows each command by its name, and no more.

With ``--json`` stdout carries JSON only; progress and logs go to stderr and to files. Everything heavy is imported by
the command that needs it, so that ``--help`` is fast.
"""

from __future__ import annotations

import typer

from supervisors.cli.bench import bench
from supervisors.cli.console.command import console
from supervisors.cli.ctl import ctl
from supervisors.cli.doctor import doctor
from supervisors.cli.keys import keys
from supervisors.cli.plot.command import plot
from supervisors.cli.run import run
from supervisors.cli.serve import head, node
from supervisors.cli.simulate import simulate

app = typer.Typer(name="headrace", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def headrace() -> None:
    """Generate, score and train on LLM rollouts, on machines that come and go."""


app.add_typer(ctl, name="ctl")
for command in (run, head, node, doctor):
    app.command()(command)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(bench)
for command in (keys, simulate, plot, console):
    app.command()(command)


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
