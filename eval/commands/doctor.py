"""`hyperleak doctor`: what is at hand, and what to do about what is not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eval.terminal import FAILURE, USAGE, Json, emit, errors, say, tell


def doctor(
    download: Annotated[str | None, typer.Option(metavar="NAME", help="Get a data set first.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="Folder with the data set's files as published, instead of a download.")
    ] = None,
    json: Json = False,
) -> None:
    """What is installed and at hand, each problem with its remedy; exit code 1 if hyperleak can't work."""
    from eval import health
    from fl.data.download import WHERE
    from fl.data.download import download as fetch
    from fl.data.named import remedy
    from fl.registry import UnknownNameError

    if source is not None and download is None:
        say("error: expected --download NAME beside --source")
        raise typer.Exit(USAGE)
    if download in WHERE and source is None:
        say(f"error: {download} can't be downloaded: {remedy(download)}")
        raise typer.Exit(FAILURE)
    if download is not None:
        with errors(FAILURE):
            try:
                paths = fetch(download, source=source)
            except UnknownNameError as error:
                say(f"error: {error}")
                raise typer.Exit(USAGE) from error
        say(f"Written: {', '.join(map(str, paths))}")
    found = health.checks()
    if json:
        emit([asdict(check) for check in found])
    else:
        for check in found:
            tell(f"{check.state:6}  {check.what}: {check.found}")
            if check.remedy:
                tell(f"        -> {check.remedy}")
    if any(check.state == health.FAULT for check in found):
        raise typer.Exit(FAILURE)
