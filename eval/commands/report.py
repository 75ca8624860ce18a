"""`hyperleak report DIR`: a run as a page to read and to send on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eval.commands.terminal import USAGE, Json, exit_on_errors, print_json, print_output


class Format(StrEnum):
    """Formats of figures."""

    PDF = "pdf"
    PNG = "png"
    SVG = "svg"


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `hyperleak run` has written.")],
    hide_pictures: Annotated[
        bool, typer.Option("--hide-pictures", help="Leave out pictures of private data, originals and recovered ones.")
    ] = False,
    figures: Annotated[
        list[Format] | None,
        typer.Option(help="Also write every chart to figures/, for papers and slides; may be given more than once."),
    ] = None,
    json: Json = False,
) -> None:
    """Write report.html and report.md into a run's folder."""
    with exit_on_errors(USAGE):
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}; expected one that `hyperleak run` has written")
        from eval.report.writer import write_figures, write_report
        from eval.run.run_directory import RunDir

        if why := RunDir(folder).unfinished():
            raise ValueError(why)
        paths = [*write_report(folder, show=not hide_pictures)]
        for kind in figures or []:
            paths += write_figures(folder, kind.value)
    if json:
        print_json([str(path) for path in paths])
        return
    for path in paths:
        print_output(f"Written to {path}")
