"""`hyperleak audit`: what one method, one model or one captured update gives away."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from eval.terminal import FAILURE, LEAKED, USAGE, Json, console, emit, errors, progress, say, warnings_on

if TYPE_CHECKING:
    from rich.console import Console

    from eval.auditing import Audit
    from eval.request import Request


def audit(
    target: Annotated[
        str | None, typer.Argument(help="MODULE:FUNCTION that returns your model, or (model, images, labels).")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A federated method, by name or as settings: '{name: fedavg, steps: 5}'.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="What the method is trained on, likewise.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Its network, likewise; or MODULE:FUNCTION of the model --update belongs to.")
    ] = None,
    update: Annotated[
        Path | None, typer.Option(help="A captured update, weights before - after, by parameter name (.npz or .pt).")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="True images for MODULE:FUNCTION or --update: an .npz file or a data set's name.")
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="An attack, by name or as settings; may be repeated.")
    ] = None,
    defense: Annotated[str, typer.Option(help="The client's defence, likewise.")] = "none",
    count: Annotated[int, typer.Option(min=1, help="How many images to attack, of --dataset or --images.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in one update.")] = 1,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of training before the attack, with --method.")] = 0,
    input_shape: Annotated[str | None, typer.Option(help="C,H,W of the images behind --update.")] = None,
    mean: Annotated[str, typer.Option(help="Of the normalisation inside your model, per channel: 0.5,0.5,0.5.")] = "",
    std: Annotated[str, typer.Option(help="Likewise.")] = "",
    max_psnr: Annotated[float | None, typer.Option(help="Exit with 3 if an image comes closer, in dB.")] = None,
    max_ssim: Annotated[float | None, typer.Option(help="Exit with 3 if an image is more similar.")] = None,
    seed: Annotated[int, typer.Option(help="Of all randomness.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder to keep pictures in (with --method, the whole run).")] = None,
    json: Json = False,
) -> None:
    """Attack what a client would send and say what leaked.

    Three things can be audited: a method (--method hyperfl --dataset faces), your own model (my_model:build), and an
    update that you captured (--update update.npz --model my_model:build).
    """
    from eval.request import Request

    screen = console(as_json=json)
    request = Request(
        target=target,
        method=method,
        dataset=dataset,
        model=model,
        update=update,
        images=images,
        attack=tuple(attack or ()),
        defense=defense,
        count=count,
        batch_size=batch_size,
        rounds=rounds,
        input_shape=input_shape,
        mean=mean,
        std=std,
        seed=seed,
        device=device,
    )
    limits = {name: limit for name, limit in (("psnr", max_psnr), ("ssim", max_ssim)) if limit is not None}
    own = target is not None or update is not None
    found = _of_own(request, out, limits) if own else _of_method(request, out, screen)
    best = {figure: found.best(figure) for figure in limits}
    above = [figure for figure, value in best.items() if value is not None and value > limits[figure]]
    unknown = [figure for figure, value in best.items() if value is None]
    if json:
        emit({**found.plain(), "limits": limits, "above": above, "unknown": unknown})
    else:
        _print(screen, found)
    for figure in above:
        say(f"above the limit: {figure.upper()} {best[figure]:.4g} > {limits[figure]:g}")
    for figure in unknown:
        say(f"error: no {figure.upper()} could be taken, so nothing can be said about the limit {limits[figure]:g}")
    if above or unknown:
        raise typer.Exit(LEAKED if above else FAILURE)


def _of_own(request: Request, out: Path | None, limits: Mapping[str, float]) -> Audit:
    from eval import auditing

    with errors(USAGE):
        tried, subjects = request.attacks, request.subjects()
        if limits and subjects[0].truth is None:
            raise ValueError("expected the true images (--images) beside a limit: nothing can be scored without them")
    with errors(FAILURE):
        return auditing.examine(request.name, subjects, tried, seed=request.seed, out=out)


def _of_method(request: Request, out: Path | None, screen: Console) -> Audit:
    from eval.request import carry_out
    from eval.rundir import RunDir

    with ExitStack() as stack:
        folder = RunDir(out or Path(stack.enter_context(TemporaryDirectory())) / "audit")
        with errors(USAGE):
            plan = request.plan()
            folder.check()
        with errors(FAILURE), warnings_on(screen), progress(screen) as told:
            return carry_out(plan, folder, request.name, told)


def _print(screen: Console, found: Audit) -> None:
    from eval.auditing import floor

    screen.print(found.subject, style="bold", highlight=False, markup=False)
    for finding in found.findings:
        screen.print(f"{finding.attack}: {finding.verdict}", highlight=False, markup=False, soft_wrap=True)
        for number, row in enumerate(finding.rows):
            if row.get("psnr") is not None:
                label = {True: ", label recovered", False: ", label missed", None: ""}[row["label_correct"]]
                words = f"PSNR {row['psnr']:.1f} dB (best guess {floor(row):.1f} dB){label}"
                screen.print(f"  image {number}: {words}", highlight=False, markup=False, soft_wrap=True)
        if not finding.rows and finding.labels:
            labels = ", ".join(map(str, (label for labels in finding.labels for label in labels)))
            screen.print(f"  recovered labels: {labels}", highlight=False, markup=False, soft_wrap=True)
