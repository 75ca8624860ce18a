"""`hyperleak audit`: what one method, one model or one captured update gives away."""

from __future__ import annotations

import inspect
import math
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from eval.commands.system_errors import explain_os_error, first_interrupt_ends_search, stop_on_signals
from eval.commands.terminal import (
    FAILURE,
    LEAKED,
    STOPPED,
    UNDECIDED,
    USAGE,
    Imports,
    Json,
    Minutes,
    Offline,
    Workers,
    console,
    exit_on_errors,
    print_json,
    print_line,
    print_message,
    prints_aside,
    seconds_of,
    shareable_command,
    show_progress,
    show_warnings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from eval.audit.ci_files import CIFiles
    from eval.audit.findings import AuditReport
    from eval.audit.judgment import Judgment
    from eval.audit.request import AuditRequest

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
Before = Annotated[
    Path | None, typer.Option(help="Weights that the server sent, beside --after; without it those of your model.")
]
After = Annotated[Path | None, typer.Option(help="Weights that came back, in place of an update.")]
Kind = Annotated[
    str, typer.Option(help="'gradient' if the file holds a gradient that was sent as such, not a change of weights.")
]
Clients = Annotated[
    int | None,
    typer.Option(min=1, help="How many clients the update is the mean of, each of --batch-size images."),
]
Images = Annotated[
    str | None,
    typer.Option(
        help="True images for MODULE:FUNCTION or --update: a data set by name or settings, a folder with "
        "pictures in a folder for each label, or an .npz file of images, uint8 [N, H, W, 1 or 3] or [N, H, W] for gray "
        "(or inputs as the model takes them, in a floating-point type), and labels, integers [N] that count the "
        "model's outputs from 0."
    ),
]
Labels = Annotated[
    str, typer.Option(help="Labels that the attacker knows, of an update without --images: 3,0 (their images' order).")
]
Attacks = Annotated[
    list[str] | None,
    typer.Option(
        help="An attack, by name or as settings; may be repeated. Without it: analytic, rconv (batches: spear) and "
        "cascade, behind a hypernetwork peel+cascade; then ig or peel+ig for what none of these confirmed."
    ),
]
Defense = Annotated[
    str, typer.Option(help="The client's defense, likewise; several one after the other: '[noise, prune]'.")
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
InputShape = Annotated[
    str | None, typer.Option(help="C,H,W of the images behind --update; C,T of a series, F of a table.")
]
Mean = Annotated[str, typer.Option(help="Of the normalization inside your model, per channel: 0.5,0.5,0.5.")]
Std = Annotated[str, typer.Option(help="Likewise.")]
Loss = Annotated[
    str,
    typer.Option(help="What clients minimize: cross-entropy (without it), bce, mse, segmentation or MODULE:FUNCTION."),
]
Targets = Annotated[
    str,
    typer.Option(
        help="Of a --loss MODULE:FUNCTION, what targets are that the attacker does not know: free, binary, "
        "probabilities or classes; or known."
    ),
]
Threat = Annotated[
    str, typer.Option(help="What the attacker knows beside the update, as settings: '{knows_labels: true}'.")
]
Output = Annotated[
    str | None,
    typer.Option(help="Which of several outputs of your model the loss is of: a name, a place or MODULE:FUNCTION."),
]
Head = Annotated[
    str | None, typer.Option(help="How the names of the classifier's parameters begin, if not the last linear layer's.")
]
InputRange = Annotated[str, typer.Option(help="LOW,HIGH of inputs that are not in [0, 1], as attackers know it.")]
Categories = Annotated[str, typer.Option(help="Columns of one-hot categories in a table: 3:7,7:14.")]
MaxPsnr = Annotated[float | None, typer.Option(help="Exit with 3 if an image comes closer, in dB.")]
MaxSsim = Annotated[float | None, typer.Option(help="Exit with 3 if an image is more similar, from -1 to 1.")]
Seed = Annotated[int, typer.Option(help="Of all randomness.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the report, the table, the pictures and all that is needed to go on.")
]
Junit = Annotated[
    Path | None, typer.Option(help="Write the findings as JUnit XML, for Jenkins, GitLab and others: FILE.xml.")
]
Sarif = Annotated[Path | None, typer.Option(help="Write them as SARIF 2.1.0, for code scanning: FILE.sarif.")]


_ANY = "any"
"""The hidden command that takes the options of every source."""
_NOTHING = "expected MODULE:FUNCTION, --update with --model, or --method with --dataset"
_NO_FILE = "expected FILE, the update, or --after FILE, the weights that came back (`hyperleak audit update --help`)"
_NO_DATASET = "expected --dataset beside --method: what the method is trained on (`hyperleak list datasets`)"
MISSPELLED = 0.8
"""Similarity of words from which one is taken for a slip in the other."""
_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "model": (
        "target",
        Annotated[str, typer.Argument(help="MODULE:FUNCTION that returns your model, or (model, images, labels).")],
    ),
    "update": (
        "update",
        Annotated[
            Path | None,
            typer.Argument(help="A captured update, weights before - after (.npz, .pt, .safetensors); or see --after."),
        ],
    ),
    "method": (
        "method",
        Annotated[str, typer.Argument(help="A federated method, by name or as settings: '{name: fedavg, steps: 5}'.")],
    ),
}
_SUMMARIES = {
    "model": "Attack what a client would send of your own model and say what leaked.",
    "update": "Attack an update that you captured and say what leaked.",
    "method": "Train a federated method, attack what a client would send and say what leaked.",
}
_FOREIGN = {
    "model": {"dataset", "model", "update", "rounds", "input_shape", "before", "after", "kind", "clients", "labels"},
    "update": {"target", "dataset", "rounds", "count", "workers"},
    "method": {
        *("target", "update", "images", "input_shape", "mean", "std", "before", "after", "kind", "clients", "labels"),
        *("loss", "targets", "output", "head", "input_range", "categories"),
    },
}
"""Options that do nothing for a source (`eval.audit.request.IDLE_OPTIONS`)."""
_UNKEPT = "nothing is kept without --out FOLDER"


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is to become of an audit's findings, and how many processes work on them.

    Attributes:
        out: folder for the run, with table and report; nothing is kept without.
        limits: by figure, what no image may exceed.
        workers: processes; as many as there are cores where none is given.
        time_limit: seconds that attacks may take, and the trainings before them.
        json: whether findings are printed as JSON.
        files: where else findings are written.
    """

    out: Path | None = None
    limits: dict[str, float] = field(default_factory=dict)
    workers: int | None = None
    time_limit: float = math.inf
    json: bool = False
    files: CIFiles | None = None


def audit(
    target: Target = None,
    method: Method = None,
    dataset: Dataset = None,
    model: Model = None,
    update: Update = None,
    before: Before = None,
    after: After = None,
    kind: Kind = "",
    clients: Clients = None,
    images: Images = None,
    labels: Labels = "",
    attack: Attacks = None,
    defense: Defense = "none",
    count: Count = None,
    batch_size: BatchSize = 1,
    rounds: Rounds = 0,
    input_shape: InputShape = None,
    mean: Mean = "",
    std: Std = "",
    loss: Loss = "",
    targets: Targets = "",
    threat: Threat = "",
    output: Output = None,
    head: Head = None,
    input_range: InputRange = "",
    categories: Categories = "",
    max_psnr: MaxPsnr = None,
    max_ssim: MaxSsim = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    junit: Junit = None,
    sarif: Sarif = None,
    workers: Workers = None,
    minutes: Minutes = None,
    import_: Imports = None,
    offline: Offline = False,
    json: Json = False,
) -> None:
    """Attack what a client would send and say what leaked.

    Three things can be audited: your own model (audit model my_model:build), an update that you captured (audit update
    update.npz --model my_model:build), and a method (audit method hyperfl --dataset faces). Without these words: audit
    my_model:build, audit --update update.npz ..., audit --method hyperfl ....
    """
    given = dict(locals())  # its options go into the request by their names
    of_method = all(source is None for source in (update, before, after, target))
    if of_method:
        _check_source(method, dataset)
    if not import_:
        _check_names("methods", method)
        _check_names("datasets", dataset)
        _check_names("models", model if of_method else None)
        _check_names("attacks", *(attack or ()))
        _check_names("defenses", defense)
    stop_on_signals()
    with exit_on_errors(USAGE):
        imports = _import_plugins(import_)
        outputs = _output_options(out, workers, minutes, {"psnr": max_psnr, "ssim": max_ssim}, json=json)
        outputs = replace(outputs, files=_ci_files(junit, sarif))
    request = _request({**given, "attack": tuple(attack or ()), "imports": imports, "download": not offline})
    _audit(request, outputs)


def _request(given: Mapping[str, Any]) -> AuditRequest:
    """Return the settings among the command's options; others say what is to become of the findings."""
    from eval.audit.request import AuditRequest

    return AuditRequest(**{setting.name: given[setting.name] for setting in fields(AuditRequest)})


def _check_source(method: str | None, dataset: str | None) -> None:
    """Leave with a line, before anything is imported, where a method that is to be audited is not described in full."""
    if method is None or dataset is None:
        print_message(f"error: {_NOTHING if method is None else _NO_DATASET}")
        raise typer.Exit(USAGE)


def _import_plugins(words: Sequence[str] | None) -> tuple[str, ...]:
    """Import the user's own files and modules."""
    from eval.experiment.plugins import import_plugins

    return import_plugins(words or ())


def _output_options(
    out: Path | None, workers: int | None, minutes: float | None, limits: Mapping[str, float | None], *, json: bool
) -> OutputOptions:
    """Check and gather what is to become of the findings."""
    from eval.audit.request import check_limits

    allowed = check_limits(**limits)
    return OutputOptions(out=out, limits=allowed, workers=workers, time_limit=seconds_of(minutes), json=json)


def _ci_files(junit: Path | None, sarif: Path | None) -> CIFiles:
    """Check and gather the files that findings go to."""
    from eval.audit.ci_files import CIFiles

    files = CIFiles(junit=junit, sarif=sarif)
    files.check()
    files.remove_old()
    return files


def _check_names(kind: str, *words: str | None) -> None:
    """Leave with a line where a name is misspelled, before anything is imported.

    Args:
        kind: of the names, in the plural.
        words: names, or settings in YAML; what can't be read is left to who reads all.
    """
    from eval.experiment import source_catalog
    from eval.io import yaml12

    if not source_catalog.certain():
        return
    for word in filter(None, words):
        spec: Any = None
        with suppress(ValueError):
            spec = yaml12.parse(word)
            spec = spec if isinstance(spec, dict | list) else word
        with exit_on_errors(USAGE):
            source_catalog.check_names(kind, spec)


def _command_of_source(source: str) -> Callable[..., None]:
    """Return `audit` with the options of one source alone, that source as its argument."""
    whole = inspect.signature(audit, eval_str=True).parameters
    own = {name: parameter for name, parameter in whole.items() if name not in _FOREIGN[source]}
    name, annotation = _ARGUMENTS[source]
    default = None if source == "update" else inspect.Parameter.empty  # --after stands for it, too
    argument = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)
    parameters = [argument, *(parameter for other, parameter in own.items() if other != name)]

    def command(**given: Any) -> None:
        if source == "update" and not any(given[key] for key in ("update", "before", "after")):
            print_message(f"error: {_NO_FILE}")
            raise typer.Exit(USAGE)
        audit(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = _SUMMARIES[source]
    return command


class SourceGroup(TyperGroup):
    """`hyperleak audit model|update|method ...`; what begins otherwise is read as before there were these."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line."""
        word = args[0] if args and ":" not in args[0] and not args[0].startswith("-") else ""
        meant = get_close_matches(word, _ARGUMENTS, n=1, cutoff=MISSPELLED)
        if word not in self.commands and meant:
            print_message(f"error: no source {word!r}; did you mean {meant[0]!r}?")
            raise typer.Exit(USAGE)
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [_ANY, *args]
        return super().parse_args(ctx, args)


def build_audit_app() -> typer.Typer:
    """Return the command `audit` with a command for each source of updates."""
    app = typer.Typer(cls=SourceGroup, help=audit.__doc__, add_completion=False)
    for source in _ARGUMENTS:
        app.command(source)(_command_of_source(source))
    app.command(_ANY, hidden=True)(audit)
    return app


def _audit(request: AuditRequest, outcome: OutputOptions) -> None:
    """Carry the audit out, print what it found and leave with the code that it comes to."""
    began = datetime.now(UTC)
    with _exit_on_interrupt():
        report = _run_request(request, outcome)
    from eval.audit.judgment import Judgment

    judgment = Judgment(report, outcome.limits)
    code = _exit_code(judgment)
    written = _write_files(judgment, request, outcome, began, code)  # first: nobody may be reading stdout
    _print_judgment(judgment, outcome)
    if not written and code not in {LEAKED, STOPPED}:
        code = FAILURE
    if code:
        raise typer.Exit(code)


def _exit_code(judgment: Judgment) -> int:
    """Return the code that an audit comes to; an image above a limit weighs more than an attack that failed."""
    if judgment.report.stopped:
        return STOPPED
    if judgment.above:
        return LEAKED
    if judgment.failed:
        return FAILURE
    return UNDECIDED if judgment.undecided else 0


def _write_files(judgment: Judgment, request: AuditRequest, outcome: OutputOptions, began: datetime, code: int) -> bool:
    """Write the files for CI; return whether all that were asked for are there, and say which is not."""
    if outcome.files is None or not outcome.files.asked_for:
        return True
    from eval.audit.ci_files import Invocation

    called = Invocation(version=metadata.version("hyperleak"), exit_code=code, began=began)
    try:
        outcome.files.write(judgment, request.place(), called)
    except OSError as error:
        print_message(f"error: the findings could not be written: {explain_os_error(error)}")
        return False
    return True


def _print_judgment(judgment: Judgment, outcome: OutputOptions) -> None:
    """Print what an audit found and what it comes to."""
    report, screen = judgment.report, console(as_json=outcome.json)
    if outcome.json:
        print_json(judgment.plain())
    else:
        _print_report(screen, report)
    for figure in judgment.above:
        print_message(f"above the limit: {report.describe_excess(figure, outcome.limits[figure])}")
    if report.stopped:
        stands = "what was found before it stands above" if report.findings else "nothing was found before it"
        if any(finding.cut_short and finding.attack == report.stopped for finding in report.findings):
            stands = "what was found by then stands above"
        again = f"the same command goes on from here ({outcome.out})" if outcome.out else _UNKEPT
        print_message(f"stopped at {report.stopped}; {stands}; {again}")
        return
    for finding in judgment.failed:
        kept = f"the traceback is in {finding.traceback}" if finding.traceback else "--out FOLDER keeps the traceback"
        origin = f"{finding.origin}; " if finding.origin else ""
        print_message(f"error: {finding.attack} failed: {finding.failed} ({origin}{kept})")
    for one in judgment.undecided:
        repeated = one.why == report.mismatch and not outcome.json
        print_message(
            f"not decided: {f'{one.what} (see the first line). To decide it: {one.remedy}' if repeated else one}"
        )
    if outcome.out is not None and (outcome.out / "report.html").is_file():
        print_message(f"Written to {outcome.out}; open {outcome.out / 'report.html'}")


@contextmanager
def _exit_on_interrupt() -> Iterator[None]:
    """Say of Ctrl-C before any attack, in a line, what it leaves of an audit."""
    try:
        yield
    except KeyboardInterrupt as error:
        print_message("stopped; nothing was found yet")
        raise typer.Exit(STOPPED) from error


def _run_request(request: AuditRequest, outcome: OutputOptions) -> AuditReport:
    from attacks.search_control import SearchControl
    from eval.audit.execution import Execution, check_folder, make_folder, run_audit
    from eval.run.resources import choose_workers
    from eval.run.run_directory import RunDir
    from eval.run.runner import Options

    screen = console(as_json=True)  # on stderr: stdout is for what was found
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(prints_aside())  # what a model of the user's own prints is nothing found
        folder = RunDir(outcome.out or Path(stack.enter_context(TemporaryDirectory())) / "audit")
        with exit_on_errors(USAGE):
            plan = request.plan()
            updates = sum(len(capture.observation.updates) for capture in plan.captures)
            request.check_plan(plan, limited=bool(outcome.limits), workers=outcome.workers or 1)
            check_folder(folder, plan)
            make_folder(folder.path)
            # one update has all threads to itself
            processes = 1 if updates == 1 else choose_workers(outcome.workers, plan.device)
        preparation, control = time.monotonic() - began, SearchControl(time_limit=outcome.time_limit)
        with (
            exit_on_errors(FAILURE),
            show_warnings(screen),
            show_progress(screen) as seen,
            first_interrupt_ends_search(control),
        ):
            options = Options(
                workers=processes,
                name=request.name,
                command=shareable_command(sys.argv[1:]),
                control=control,
                on_search=seen.search,
            )
            keep, early_stop = outcome.out is not None, not request.attack
            execution = Execution(
                options=options,
                progress=seen.stage,
                keep_outputs=keep,
                early_stop=early_stop,
                preparation=preparation,
            )
            report = run_audit(plan, folder, execution)
    return replace(report, notes=(*report.notes, *_untried_note(request)))


def _untried_note(request: AuditRequest) -> list[str]:
    """Say that other attacks than those asked for were not tried."""
    if not request.attack:
        return []
    usual = ", ".join(replace(request, attack=()).attacks)
    return [f"only {', '.join(request.attacks)} tried, as asked for by --attack; without it {usual} are"]


def _print_report(screen: Console, found: AuditReport) -> None:
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
            line(f"  {verdict.image_line(row, number)}")
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
