"""`hyperleak compare DIR...`: several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.commands.terminal import USAGE, Json, exit_on_errors, print_json


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that `hyperleak run` has written.")],
    json: Json = False,
) -> None:
    """Set several runs side by side: settings that differ, scores, and differences with their intervals."""
    with exit_on_errors(USAGE):  # said before anything is imported
        for folder in folders:
            if not folder.is_dir():
                raise FileNotFoundError(f"no folder {folder}; expected one that `hyperleak run` has written")
    from eval.report import compare as comparing
    from eval.report.load import explain_damage
    from eval.run.run_directory import RunDir

    with exit_on_errors(USAGE):
        for folder in folders:
            if why := RunDir(folder).unfinished():
                raise ValueError(why)
        found = comparing.compare(folders)
        with explain_damage(" or ".join(map(str, folders))):  # figures are made of rows when they are asked for
            plain, text = (found.to_plain(), "") if json else ({}, found.to_text())
    if json:
        print_json(plain)
    else:
        typer.echo(text, nl=False)
