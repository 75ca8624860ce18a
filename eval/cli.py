"""The command `hyperleak`; what its parts need is imported when they run, so that help is quick."""

from __future__ import annotations

import sys

import typer

from eval.commands import audit, compare, doctor, list_, report, run, show
from eval.commands.system_errors import Guarded
from fl.runtime.main_guard import leave_if_unguarded

app = typer.Typer(
    cls=Guarded,
    help="What a federated update gives away, and what each way of hiding it costs in accuracy.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich" if sys.stdout is not None and sys.stdout.isatty() else None,
)
app.callback()(leave_if_unguarded)
app.command()(run.run)
app.command()(audit.audit)
app.command()(report.report)
app.command()(compare.compare)
app.command("list")(list_.list_)
app.command()(show.show)
app.command()(doctor.doctor)
