"""The command `hyperleak`; what its parts need is imported when they run, so that help is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eval.commands import audit, compare, doctor, list_, report, reproduce, run, show
from eval.commands.system_errors import GuardedGroup
from fl.runtime.main_guard import leave_if_unguarded

app = typer.Typer(
    cls=GuardedGroup,
    help="What a federated update gives away, and what each way of hiding it costs in accuracy.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich" if sys.stdout is not None and sys.stdout.isatty() else None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hyperleak {version('hyperleak')}")
        raise typer.Exit


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    leave_if_unguarded()


app.command()(run.run)
app.add_typer(audit.build_audit_app(), name="audit")
app.command()(reproduce.reproduce)
app.command()(report.report)
app.command()(compare.compare)
app.command("list")(list_.list_)
app.command()(show.show)
app.command()(doctor.doctor)
