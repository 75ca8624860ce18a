"""`hyperleak run`: train, attack, and say what leaked."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands import run_views
from eval.commands.system_errors import stop_on_signals
from eval.commands.terminal import (
    FAILURE,
    STOPPED,
    USAGE,
    Executor,
    ExecutorOptions,
    Imports,
    Json,
    Minutes,
    Offline,
    ProgressDisplay,
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
    show_table,
    show_warnings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from attacks.search_control import SearchControl
    from eval.experiment.spec import Experiment
    from eval.run.execute import RunOutcome
    from eval.run.executors.choice import ExecutorChoice
    from eval.run.plan import Plan
    from eval.run.run_directory import RunDir
    from eval.run.runner import Options

log = logging.getLogger(__name__)
WITH_WATCH = ("config", "watch", "json")
"""Parameters of `hyperleak run` that `--watch` takes, or that are refused by a name of their own."""


@dataclass(frozen=True, kw_only=True)
class _RunRequest:
    """What the command line asks for.

    Attributes:
        config: as it was written.
        path: of the config.
        overrides: settings in place of the config's.
        selection: labels by "imports", "without" and "only".
        out: folder of the run; None leaves it to the config.
        device: where tensors live.
        workers: processes; None leaves their number to the machine.
        executor: what starts them; None leaves it to the config.
        executor_options: of it, KEY=VALUE.
        plan_only: whether only the plan is asked for.
    """

    config: str
    path: Path
    overrides: Sequence[str]
    selection: Mapping[str, Sequence[str]]
    out: Path | None
    device: str
    workers: int | None
    executor: str | None
    executor_options: Sequence[str]
    plan_only: bool


@dataclass(frozen=True)
class _PreparedRun:
    """What is to be run.

    Attributes:
        experiment: its settings.
        plan: its cells.
        folder: of the run.
        choice: what starts the workers; None where this process does.
        workers: how many; None where their number has yet to be said.
        unlike_defaults: in which defaults the methods differ, if in any.
        notes: what was printed and is to be logged.
    """

    experiment: Experiment
    plan: Plan
    folder: RunDir
    choice: ExecutorChoice | None
    workers: int | None
    unlike_defaults: str | None
    notes: list[str]


def run(
    config: Annotated[str, typer.Argument(help="A YAML file, or a name that `hyperleak list configs` shows.")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting: attack.iterations=500; a list makes a grid: attack.lr=[0.03,0.1]. Repeatable.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Leave out a method, an attack or a defense. Repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Run this method, attack or defense and no other of its kind. Repeatable."),
    ] = None,
    import_: Imports = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default results/NAME.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seeds: Annotated[int | None, typer.Option(min=1, help="Repeat with the seeds 0 to N-1.")] = None,
    workers: Workers = None,
    minutes: Minutes = None,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep trained states, so that later attacks need no training.")
    ] = False,
    checkpoint_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 60.0,
    offline: Offline = False,
    executor: Executor = None,
    executor_option: ExecutorOptions = None,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Say which cells (trainings and attacks) are to be computed and what they cost; end there.",
        ),
    ] = False,
    watch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Show how far a run is that was started elsewhere, until it ends; takes --json alone."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train the methods of an experiment, attack what the server sees, and say what leaked.

    A run that was stopped goes on where it was when it is started again with the same folder. What is finished is not
    computed twice, also when attacks, methods or seeds are added.
    """
    given = dict(locals())
    if watch is not None:
        beside = [*([f"the config {config}"] if config else []), *run_views.options_unlike(run, given, *WITH_WATCH)]
        run_views.watch_run(watch, beside, as_json=json)
        return
    request = _RunRequest(
        config=config,
        path=_find_config(config, set_ or (), names_are_known=not import_),
        overrides=_overrides(set_, seeds, offline=offline),
        selection={"imports": import_ or (), "without": without or (), "only": only or ()},
        out=out,
        device=device,
        workers=workers,
        executor=executor,
        executor_options=executor_option or (),
        plan_only=plan_only,
    )
    stop_on_signals()  # so that a run ended politely ends its worker processes
    with exit_on_errors(USAGE), prints_aside(json):
        control = _time_limit(minutes)
        prepared = _prepare(request)
    if plan_only:
        run_views.print_plan(prepared.plan, prepared.folder, prepared.workers, as_json=json)
        return
    screen = console(as_json=json)
    # last: what is wrong in itself is said rather than that the folder is taken
    with _locked_folder(prepared.folder, shared=prepared.choice is not None):
        options = _run_options(prepared, request)
        kept = replace(options, control=control, checkpoint_seconds=checkpoint_every, keep_checkpoints=keep_checkpoints)
        _say_and_log(prepared)
        with prints_aside(json):
            outcome = _run_plan(prepared.plan, prepared.folder, kept, screen)
    _print_results(screen, prepared.folder, outcome, json=json)
    if outcome.failures:
        raise typer.Exit(FAILURE)


def _find_config(config: str, overrides: Sequence[str], *, names_are_known: bool) -> Path:
    """Return the file of a config; leave with a line, before what takes seconds to import, where something is wrong.

    Args:
        config: a file, or the name of a shipped one.
        overrides: of `--set`.
        names_are_known: whether no module of the user's may register further names.
    """
    from eval.experiment import config_catalog

    with exit_on_errors(USAGE):
        if not config:
            raise ValueError("expected a config: a YAML file, or a name that `hyperleak list configs` shows")
        path = config_catalog.find_config(config)
        if names_are_known:
            _check_names(path, overrides)
    return path


def _overrides(settings: Sequence[str] | None, seeds: int | None, *, offline: bool) -> list[str]:
    """Return the settings of the command line that stand in place of the config's."""
    return [
        *(settings or ()),
        *([f"seeds={list(range(seeds))}"] if seeds else []),
        *(["score.download=false"] if offline else []),
    ]


def _prepare(request: _RunRequest) -> _PreparedRun:
    """Read the experiment and plan it, without writing anything.

    Raises:
        ValueError: something is wrong in the config or the options, or they do not fit each other.
    """
    from eval.run import runner
    from eval.run.run_directory import RunDir, default_folder

    notes = list[str]()
    experiment = _load_experiment(request, notes)
    folder = RunDir(request.out or default_folder(request.path))
    unlike_defaults = _unlike_defaults(experiment, request.path, request.overrides, folder)
    choice = _executor_choice(request.path, request.executor, request.executor_options, request.workers)
    if choice is not None and not request.plan_only:
        choice.check()
    plan = runner.prepare(experiment, device=request.device, elsewhere=choice is not None and choice.is_elsewhere)
    workers = _count_workers(choice, request.workers, plan, plan_only=request.plan_only)
    return _PreparedRun(experiment, plan, folder, choice, workers, unlike_defaults, notes)


def _run_options(prepared: _PreparedRun, request: _RunRequest) -> Options:
    """Return how the plan is run, apart from its time and its checkpoints."""
    from eval.experiment.plugins import module_folder
    from eval.run import runner
    from eval.run.resources import choose_workers

    return runner.Options(
        workers=choose_workers(request.workers, prepared.plan.device),
        name=_run_name(request.path, prepared.folder, prepared.experiment.title),
        command=shareable_command(sys.argv[1:], request.config),
        unlike_defaults=prepared.unlike_defaults,
        module_folder=module_folder(prepared.experiment, request.path),
        executor=prepared.choice,
    )


def _say_and_log(prepared: _PreparedRun) -> None:
    """Print how the methods differ in their defaults, and log all notes, now that the log is open."""
    if prepared.unlike_defaults:
        _note(prepared.unlike_defaults, prepared.notes)
    for words in prepared.notes:
        log.info(words)


def _executor_choice(
    path: Path, name: str | None, options: Sequence[str], workers: int | None
) -> ExecutorChoice | None:
    """Return what starts the workers, as the command line and the config say it."""
    from eval.experiment import yaml_config
    from eval.io import yaml12
    from eval.run.executors.choice import choose_executor

    own = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--executor-option: expected KEY=VALUE such as partition=gpu, got {text!r}")
        try:
            own[key.strip()] = yaml12.parse(value)
        except ValueError as error:
            raise ValueError(f"--executor-option {key.strip()}: {error}") from error
    return choose_executor(name, yaml_config.executor_section(path), own, workers)


def _count_workers(choice: ExecutorChoice | None, workers: int | None, plan: Plan, *, plan_only: bool) -> int | None:
    """Return how many workers there will be; None where only a plan is asked for, and their number has yet to be said.

    Raises:
        ValueError: it has to be said, or is not possible.
    """
    from eval.run.resources import choose_workers

    if choice is None:
        return choose_workers(workers, plan.device)
    return None if plan_only and choice.needs_number else choice.count(plan.device_kind)


def _time_limit(minutes: float | None) -> SearchControl:
    """Return what ends all searches in time."""
    from attacks.search_control import SearchControl

    return SearchControl(time_limit=seconds_of(minutes))


def _load_experiment(request: _RunRequest, notes: list[str]) -> Experiment:
    """Read the experiment as the command line changes it; what there is to say of it is printed and kept in `notes`."""
    from eval.experiment import yaml_config

    def note(words: str) -> None:
        _note(words, notes)

    def note_imports(modules: Sequence[str]) -> bool:
        note(f"runs the code of {', '.join(modules)}, which {request.config} imports")
        return True

    return yaml_config.load(request.path, request.overrides, **request.selection, note=note, asked=note_imports)


def _unlike_defaults(experiment: Experiment, path: Path, overrides: Sequence[str], folder: RunDir) -> str | None:
    """Say in which defaults the methods differ; None for a run's own config, which has every default written down."""
    from eval.experiment.default_differences import differences_in_file

    if path.resolve().parent == folder.path.resolve():
        return None
    return differences_in_file(experiment, path, overrides)


def _note(words: str, notes: list[str]) -> None:
    """Print a note and keep it for the log of the run, which is not open yet."""
    notes.append(words)
    print_message(f"note: {words}")


def _print_results(screen: Console, folder: RunDir, outcome: RunOutcome, *, json: bool) -> None:
    """Print what came out, where it is, and what failed."""
    if json:
        print_json(_summary(folder, outcome))
    elif outcome.table is not None:
        show_table(screen, outcome.table)
    if outcome.table is not None:
        screen.print()
        print_line(screen, f"Written to {folder.path}; open {folder.path / 'report.html'}", wrapped=False)
    for name, begun in outcome.unfinished.items():
        print_message(
            f"{'cut short' if begun else 'not begun'} for --minutes: {name}; the same command without it computes it"
        )
    for failure in outcome.failures:
        origin = f"{failure.origin}; " if failure.origin else ""
        print_message(f"failed: {failure.name}: {failure.reason} ({origin}see {folder.path / failure.traceback})")
    if outcome.table is None:
        print_message(
            f"nothing is finished, so there is no table and no report; the same command goes on ({folder.path})"
        )


def _check_names(path: Path, overrides: Sequence[str]) -> None:
    """Refuse a misspelled name of a method, a data set or the like, before anything is imported.

    Raises:
        ValueError: says which and what is close; what else is wrong is left to who reads it all.
    """
    from eval.experiment import source_catalog
    from eval.io import yaml12
    from fl.settings import SettingError

    if not source_catalog.certain():
        return
    data: Any = None
    with suppress(ValueError, OSError):
        data = yaml12.parse(yaml12.read(path))
    if not isinstance(data, dict) or data.get("imports"):  # of modules that may register more
        return
    try:
        source_catalog.check_config_names(data)
    except SettingError as error:
        raise ValueError(f"{path}: {error}") from error
    for text in overrides:
        key, _, value = text.partition("=")
        changed: Any = None
        with suppress(ValueError):
            changed = yaml12.parse(value)
        for part in reversed(key.strip().split(".")):
            changed = {part: changed}
        try:
            source_catalog.check_config_names(changed)
        except SettingError as error:
            raise ValueError(f"{text}: {error.reason}") from error


@contextmanager
def _locked_folder(folder: RunDir, *, shared: bool = False) -> Iterator[None]:
    """Keep a folder from other processes, or from those that don't share it; says in one line why that can't be."""
    from eval.run.run_directory import BusyError

    with ExitStack() as stack:
        try:
            stack.enter_context(folder.shared() if shared else folder.locked())
            stack.enter_context(folder.logged())
        except BusyError as error:
            print_message(f"error: {error}")
            raise typer.Exit(FAILURE) from error
        except ValueError as error:
            print_message(f"error: {error}")
            raise typer.Exit(USAGE) from error
        except OSError as error:
            why = f"{folder.path} can't be written to ({error.strerror or error})"
            print_message(f"error: {why}; choose another --out")
            raise typer.Exit(USAGE) from error
        yield


def _run_name(path: Path, folder: RunDir, title: str) -> str:
    """Return the run's name: its config's, or the former one in the folder's own; warns of another run's files."""
    before = folder.about_run()
    if not before:
        return path.stem
    name = str(before.get("name") or path.stem)
    if path.resolve().parent != folder.path.resolve():
        name, old = path.stem, name
        if (old, before.get("title")) != (name, title):
            print_message(
                f"warning: {folder.path} holds the run {old!r} ({before.get('title') or 'no title'}): its table, "
                "report, rows and pictures are replaced by those of this run; finished cells stay"
            )
    return name


def _run_plan(plan: Plan, folder: RunDir, options: Options, screen: Console) -> RunOutcome:
    """Run the plan, write table and report, and show how far it is; leave with one line where that can't be done."""
    from eval.run.execute import run_and_publish

    try:
        with exit_on_errors(FAILURE), show_warnings(screen), show_progress(screen) as display:
            return run_and_publish(plan, folder, _shown_by(options, display), display.stage)
    except KeyboardInterrupt as error:
        print_message(f"stopped; the same command goes on from here ({folder.path})")
        raise typer.Exit(STOPPED) from error
    except SystemExit as error:  # by a signal
        print_message(f"stopped; the same command goes on from here ({folder.path})")
        raise typer.Exit(int(error.code or 0)) from error


def _shown_by(options: Options, display: ProgressDisplay) -> Options:
    """Return the options with who shows how far the run is."""
    return replace(options, on_search=display.search, on_run=display.run)


def _summary(folder: RunDir, outcome: RunOutcome) -> dict[str, Any]:
    """Return what `--json` prints of a run."""
    from eval.run.cache_keys import run_id

    unfinished = outcome.unfinished
    return {
        "id": run_id(outcome.plan.experiment),
        "folder": str(folder.path),
        "status": "failed" if outcome.failures else "cut short" if unfinished else "finished",
        "cut_short": [name for name, begun in unfinished.items() if begun],
        "not_begun": [name for name, begun in unfinished.items() if not begun],
        "failures": [asdict(failure) for failure in outcome.failures],
        "table": asdict(outcome.table) if outcome.table is not None else None,
    }
