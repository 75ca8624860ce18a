"""`hyperleak audit`: what one method, one model or one captured update gives away."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from eval.commands.system_errors import stop_on_signals
from eval.commands.terminal import (
    FAILURE,
    LEAKED,
    STOPPED,
    UNDECIDED,
    USAGE,
    Imports,
    Json,
    Workers,
    console,
    emit,
    errors,
    progress,
    say,
    told,
    warnings_on,
)
from eval.commands.terminal import line as print_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from eval.audit.findings import Audit
    from eval.audit.request import Request

Target = Annotated[
    str | None, typer.Argument(help="MODULE:FUNCTION that returns your model, or (model, images, labels).")
]
Method = Annotated[
    str | None, typer.Option(help="A federated method, by name or as settings: '{name: fedavg, steps: 5}'.")
]
Dataset = Annotated[str | None, typer.Option(help="What the method is trained on, likewise.")]
Model = Annotated[
    str | None, typer.Option(help="Its network, likewise; or MODULE:FUNCTION of the model --update belongs to.")
]
Update = Annotated[
    Path | None, typer.Option(help="A captured update, weights before - after, by parameter name (.npz or .pt).")
]
Images = Annotated[
    str | None,
    typer.Option(
        help="True images for MODULE:FUNCTION or --update: a data set by name or settings, or an .npz file of images, "
        "uint8 [N, H, W, 1 or 3] or [N, H, W] for grey, and labels, integers [N] that count the model's outputs from 0."
    ),
]
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        help="An attack, by name or as settings; may be repeated. Without it: analytic, rconv (batches: spear) and "
        "cascade, behind a hypernetwork peel+cascade; then ig or peel+ig for what none of these confirmed."
    ),
]
Defense = Annotated[
    str, typer.Option(help="The client's defence, likewise; several one after the other: '[noise, prune]'.")
]
Count = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many images to attack, in whole batches; about 4 of --dataset or --images, all that MODULE:FUNCTION "
        "gives. Not with --update.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images in one update.")]
Rounds = Annotated[int, typer.Option(min=0, help="Rounds of training before the attack, with --method.")]
InputShape = Annotated[str | None, typer.Option(help="C,H,W of the images behind --update.")]
Mean = Annotated[str, typer.Option(help="Of the normalisation inside your model, per channel: 0.5,0.5,0.5.")]
Std = Annotated[str, typer.Option(help="Likewise.")]
MaxPsnr = Annotated[float | None, typer.Option(help="Exit with 3 if an image comes closer, in dB.")]
MaxSsim = Annotated[float | None, typer.Option(help="Exit with 3 if an image is more similar, from -1 to 1.")]
Seed = Annotated[int, typer.Option(help="Of all randomness.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder to keep pictures in (with --method, the whole run, with table and report).")
]


def audit(
    target: Target = None,
    method: Method = None,
    dataset: Dataset = None,
    model: Model = None,
    update: Update = None,
    images: Images = None,
    attack: Attacks = None,
    defense: Defense = "none",
    count: Count = None,
    batch_size: BatchSize = 1,
    rounds: Rounds = 0,
    input_shape: InputShape = None,
    mean: Mean = "",
    std: Std = "",
    max_psnr: MaxPsnr = None,
    max_ssim: MaxSsim = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    workers: Workers = None,
    import_: Imports = None,
    json: Json = False,
) -> None:
    """Attack what a client would send and say what leaked.

    Three things can be audited: a method (--method hyperfl --dataset faces), your own model (my_model:build), and an
    update that you captured (--update update.npz --model my_model:build).
    """
    from eval.audit.request import Request, limits
    from eval.experiment.plugins import import_plugins

    stop_on_signals()
    with errors(USAGE):
        imports = import_plugins(import_ or ())
        allowed = limits(psnr=max_psnr, ssim=max_ssim)
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
    _report(request, out, allowed, workers, imports, json=json)


def _report(
    request: Request,
    out: Path | None,
    limits: dict[str, float],
    workers: int | None,
    imports: tuple[str, ...],
    *,
    json: bool,
) -> None:
    """Carry the audit out, print it and leave with the code it comes to."""
    screen = console(as_json=json)
    own = request.target is not None or request.update is not None
    nothing = "nothing was found yet" if own else "nothing is kept without --out FOLDER"
    left = f"the same command goes on from here ({out})" if out and not own else nothing
    with _interrupted(left):
        found = (
            _of_own(request, out, workers, limited=bool(limits))
            if own
            else _of_method(request, out, workers, imports, screen)
        )
    best = {figure: found.best(figure) for figure in limits}
    above = [figure for figure, value in best.items() if value is not None and value > limits[figure]]
    unknown = [figure for figure, value in best.items() if value is None]
    undecided = found.undecided(limits)
    if json:
        open_ = [one.plain() for one in undecided]
        emit({**found.plain(), "limits": limits, "above": above, "unknown": unknown, "undecided": open_})
    else:
        _print(screen, found)
    for figure in above:
        say(f"above the limit: {found.above(figure, limits[figure])}")
    if found.stopped:
        left = "what was found before it stands above" if found.findings else "nothing was found before it"
        say(f"stopped at {found.stopped}; {left}")
        raise typer.Exit(STOPPED)
    failed = [finding for finding in found.findings if finding.failed]
    for finding in failed:
        kept = f"the traceback is in {finding.traceback}" if finding.traceback else "--out FOLDER keeps the traceback"
        say(f"error: {finding.attack} failed: {finding.failed} ({kept})")
    for one in undecided:
        again = one.why == found.mismatch and not json
        say(f"not decided: {f'{one.what} (see the first line). To decide it: {one.remedy}' if again else one}")
    if above or failed or undecided:
        raise typer.Exit(LEAKED if above else FAILURE if failed else UNDECIDED)


@contextmanager
def _interrupted(left: str) -> Iterator[None]:
    """Say of Ctrl-C, in a line, what it leaves of an audit."""
    try:
        yield
    except KeyboardInterrupt as error:
        say(f"stopped; {left}")
        raise typer.Exit(STOPPED) from error


def _of_own(request: Request, out: Path | None, workers: int | None, *, limited: bool) -> Audit:
    from eval.audit import findings
    from eval.audit import output_folder as kept
    from eval.audit.request import ONE, make_folder
    from eval.run.resources import choose_workers
    from eval.run.run_directory import hold_lock

    with ExitStack() as stack:
        with errors(USAGE):
            tried = request.attacks
            subjects, notes = request.subjects()
            if limited and subjects[0].truth is None:
                missing = "expected the true images (--images) beside a limit: nothing can be scored without them"
                raise ValueError(missing)
            several = len(subjects) > 1
            if not several and (workers or 1) > 1:
                raise ValueError(f"--workers {workers} {ONE}")
            if out is not None:
                kept.check(out, request.name, request.settings)
                make_folder(out)
                stack.enter_context(hold_lock(out))
                kept.check(out, request.name, request.settings)  # again: another audit may have come and gone
                kept.mark(out, request.name, request.settings)
        screen = console(as_json=True)  # on stderr: stdout is for what was found
        # one update has all threads to itself
        processes = choose_workers(workers, subjects[0].view.device) if several else 1
        with errors(FAILURE), warnings_on(screen), progress(screen) as seen:
            found = findings.examine(
                request.name,
                subjects,
                tried,
                seed=request.seed,
                out=out,
                told=seen,
                thrifty=not request.attack,
                workers=processes,
            )
    return replace(found, notes=(*notes, *_chosen(request), *found.notes))


def _chosen(request: Request) -> list[str]:
    """That other attacks than those asked for were not tried."""
    if not request.attack:
        return []
    usual = ", ".join(replace(request, attack=()).attacks)
    return [f"only {', '.join(request.attacks)} tried, as asked for by --attack; without it {usual} are"]


def _of_method(
    request: Request, out: Path | None, workers: int | None, imports: tuple[str, ...], screen: Console
) -> Audit:
    from eval.audit.request import carry_out, check_folder, make_folder
    from eval.run.resources import choose_workers
    from eval.run.run_directory import RunDir
    from eval.run.runner import Options

    with ExitStack() as stack:
        folder = RunDir(out or Path(stack.enter_context(TemporaryDirectory())) / "audit")
        with errors(USAGE):
            plan = request.plan()
            plan = replace(plan, experiment=replace(plan.experiment, imports=imports))
            check_folder(folder, plan)
            make_folder(folder.path)
        with errors(FAILURE), warnings_on(screen), progress(screen) as seen:
            options = Options(
                workers=choose_workers(workers, plan.device), name=request.name, command=told(sys.argv[1:])
            )
            found = carry_out(plan, folder, options, seen, kept=out is not None, thrifty=not request.attack)
    return replace(found, notes=(*_chosen(request), *found.notes))


def _print(screen: Console, found: Audit) -> None:
    from eval.audit import verdict
    from eval.metrics.self_verification import verification_words
    from eval.metrics.validity_flags import FLAGS

    def line(words: str) -> None:
        print_line(screen, words, wrapped=False)

    if found.mismatch:  # what stands below may be of something else
        line(f"contradiction: {found.mismatch}")
    print_line(screen, found.subject, "bold", wrapped=False)
    for note in found.notes:
        line(f"note: {note}")
    for finding in found.findings:
        line(f"{finding.attack}: {finding.verdict}")
        pictured = [(number, row) for number, row in enumerate(finding.rows) if row.get("psnr") is not None]
        for number, row in pictured:
            line(f"  {verdict.line(row, number)}")
        if finding.rows and not pictured and (own := verification_words(finding.verified)):
            line(f"  {own}")
        for note in finding.notes:
            line(f"  note: {note}")
        if not finding.rows and finding.labels:
            doubt = " (doubtful)" if finding.doubtful or found.mismatch else ""
            line(f"  recovered labels{doubt}: {', '.join(str(label) for labels in finding.labels for label in labels)}")
        if finding.flags:
            line(f"  flags: {', '.join(finding.flags)}")
    for flag in FLAGS:
        if any(flag in finding.flags for finding in found.findings):
            line(f"flag {flag}: {FLAGS[flag]}")
