"""`hyperleak doctor`: what is at hand, and what to do about what is not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eval.commands.terminal import FAILURE, USAGE, Json, exit_on_errors, print_json, print_message, print_output


def doctor(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A run's folder: say what is damaged in it instead.")
    ] = None,
    download: Annotated[str | None, typer.Option(metavar="NAME", help="Get a data set first.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="Folder with the data set's files as published, instead of a download.")
    ] = None,
    json: Json = False,
) -> None:
    """What is installed and at hand, each problem with its remedy; exit code 1 if hyperleak can't work.

    With a folder: whether its cells, checkpoints, pictures and files are as they were written; exit code 1 if not.
    """
    if folder is not None:
        _check_run_folder(folder, json=json)
        return
    from eval.commands import doctor_checks
    from fl.data.sources.benchmark_sets import download_hint
    from fl.data.sources.download import MANUAL_DOWNLOADS
    from fl.data.sources.download import download as fetch
    from fl.registry import UnknownNameError

    if source is not None and download is None:
        print_message("error: expected --download NAME beside --source")
        raise typer.Exit(USAGE)
    if download in MANUAL_DOWNLOADS and source is None:
        print_message(f"error: {download} can't be downloaded: {download_hint(download)}")
        raise typer.Exit(FAILURE)
    if download is not None:
        with exit_on_errors(FAILURE):
            try:
                paths = fetch(download, source=source)
            except UnknownNameError as error:
                print_message(f"error: {error}")
                raise typer.Exit(USAGE) from error
        print_message(f"Written: {', '.join(map(str, paths))}")
    found = doctor_checks.run_checks()
    if json:
        print_json([asdict(check) for check in found])
    else:
        for check in found:
            print_output(f"{check.state:6}  {check.what}: {check.found}")
            if check.remedy:
                print_output(f"        -> {check.remedy}")
    if any(check.state == doctor_checks.FAULT for check in found):
        raise typer.Exit(FAILURE)


def _check_run_folder(folder: Path, *, json: bool) -> None:
    """Say what is damaged in a run's folder, a line for each, and leave with a code of failure if anything is."""
    with exit_on_errors(USAGE):
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}; expected one that `hyperleak run` has written")
        from eval.run import folder_integrity

        found = folder_integrity.check_folder(folder)
    if json:
        print_json(asdict(found))
    else:
        for damaged in found.damaged:
            print_output(f"damaged  {damaged}")
        if found.unchecked:
            print_output(f"not checked, as nothing is stated of them: {', '.join(found.unchecked)}")
        print_output(f"{found.whole} thing(s) as they were written, {len(found.damaged)} damaged")
    if found.damaged:
        raise typer.Exit(FAILURE)
