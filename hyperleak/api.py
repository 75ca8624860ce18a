"""The Python face: run an experiment, audit a model, an update or a view, load what either left behind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

import attacks as attack_registry
from attacks.base import Attack
from attacks.search_control import SearchControl
from defenses import Defense, defenses
from eval.audit import attack_selection, captured_files, captured_update, user_model
from eval.audit.captured_files import CapturedUpdate, Part
from eval.audit.examples import Examples, check_examples
from eval.audit.execution import Execution, audit_updates
from eval.audit.findings import AuditReport
from eval.audit.input_shape import SCALED, hook_hint
from eval.audit.python_words import errors_in_python, report_in_python
from eval.audit.stated_training import with_open_step_size
from eval.audit.tensor_names import with_model_names
from eval.audit.user_model import Subject
from eval.experiment import config_catalog, default_differences, plugins, yaml_config
from eval.experiment.spec import Experiment
from eval.report.load import load as read_run
from eval.report.writer import write_figures
from eval.run import runner
from eval.run.execute import RunOutcome, folder_in_use, run_and_publish
from eval.run.executors.choice import ExecutorChoice, choose_executor
from eval.run.plan import prepare
from eval.run.resources import choose_workers
from eval.run.run_directory import RUN, RunDir, default_folder
from fl.capture import CapturedUpdateSettings, ClientSettings
from fl.inputs.description import Range
from fl.inputs.form import Inputs, tensors_of
from fl.losses import Loss
from fl.losses.function import TargetKind
from fl.method import Method, methods
from fl.models.building_blocks.model_outputs import Choice
from fl.ranges import Count, Seed
from fl.settings import fit_value, options_or_settings
from fl.types import Batch, Truth
from fl.view import ServerView, ThreatModel

if TYPE_CHECKING:
    import pandas as pd

Captured = Part | tuple[Part | None, Part] | Mapping[str, Part | None]
"""A captured update: itself, or weights (before, after), or those by the two words."""
NOTHING = "the experiment asks for nothing"
REPORT, TABLE = "report.html", "table.md"
ROW_KINDS = ("images", "rounds", "privacy")
"""What a run has rows of: attacked images, rounds of training, claims of differential privacy."""


@dataclass(frozen=True)
class RunResult:
    """What a run left in its folder.

    Attributes:
        folder: of the run.
        failures: one line for each cell that could not be finished; empty for a folder that was loaded.
        cut_short: the attacks that a time limit cut short or came before; likewise.
    """

    folder: Path
    failures: tuple[str, ...] = ()
    cut_short: tuple[str, ...] = ()

    @property
    def report(self) -> Path:
        """The report, a page for the browser."""
        return self.folder / REPORT

    @property
    def table(self) -> str:
        """The results table in Markdown."""
        return (self.folder / TABLE).read_text(encoding="utf-8")

    def rows(self, kind: str = "images") -> list[dict[str, Any]]:
        """Return the run's figures as one dictionary a row.

        Args:
            kind: "images" (a row for every attacked image), "rounds" (for every round of training) or "privacy" (for
                every claim of differential privacy).

        Raises:
            ValueError: an unknown kind, or files that are damaged.
        """
        if kind not in ROW_KINDS:
            raise ValueError(f"expected rows of {', '.join(ROW_KINDS)}, got {kind!r}")
        found = read_run(self.folder)
        chosen = {"images": found.rows, "rounds": found.rounds, "privacy": found.privacy}[kind]
        return [dict(row) for row in chosen]

    def frame(self, kind: str = "images") -> pd.DataFrame:
        """Return the run's figures as a pandas table, a row each as in `rows`.

        Raises:
            ImportError: pandas is not installed.
            ValueError: as `rows`.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("tables need pandas: pip install '.[frames]' in the folder of hyperleak") from error
        return pd.DataFrame(self.rows(kind))

    def figures(self, kind: str = "pdf") -> list[Path]:
        """Write the report's charts as files into `figures/` of the folder, for the width of a page and of a column.

        Args:
            kind: "pdf", "png" or "svg".

        Returns:
            The files; none where the report has no chart.

        Raises:
            ValueError: another kind, or files that are damaged.
        """
        return write_figures(self.folder, kind)


class RunSettings(TypedDict, total=False):
    """Further settings of `run`.

    Attributes:
        minutes: how long trainings and attacks may take, about: searches then end with their best so far, and what
            comes later is left out; called again without, it computes the rest. None is no limit.
        executor: what starts `workers` processes that compute the cells: `"local"`, `"slurm"`, `"dask"` or `"ray"`, or
            that as `name` beside the engine's options. None leaves it to a config's `executor`, or to this process.
    """

    minutes: float | None
    executor: str | Mapping[str, Any] | None


@errors_in_python()
def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    device: str = "auto",
    workers: int | None = None,
    progress: runner.Progress = runner.silent,
    **how: Unpack[RunSettings],
) -> RunResult:
    """Run an experiment: train its methods, attack what the server sees, write table and report.

    A run that was stopped goes on where it was when it is called again with the same folder.

    Args:
        experiment: the name of a shipped config (`"quickstart"`), a file, its content as plain data, or an object.
        out: folder of the run; `results/NAME` by default, for plain data `results/experiment`, and for the config that
            lies in a run's folder (`out/config.yaml`) that folder, where the run then goes on.
        overrides: settings as `"key=value"`, as `--set` of the command takes them; for names and files only.
        device: "auto", "cpu" or "cuda".
        workers: processes to spread clients and attacks over; None takes what the machine has.
        progress: called with the stage, how much of it is done, and how much there is.
        **how: `minutes` and `executor` (`RunSettings`).

    Returns:
        The folder's content; cells that failed are named in `failures`, those that `minutes` ended in `cut_short`.

    Raises:
        FileNotFoundError: no such config or data.
        TypeError: what is given as experiment or folder is none.
        ValueError: settings that are wrong or do not fit each other, or a folder that holds something else.
        RuntimeError: nothing could be finished; names the first cause.
    """
    if unknown := set(how) - set(RunSettings.__annotations__):
        raise TypeError(f"run() got an unexpected keyword argument {min(unknown)!r}")
    control = SearchControl(time_limit=_seconds(how.get("minutes")))
    target = None if out is None else _path("out", out)
    if isinstance(experiment, str | Path):
        source = _read_config(config_catalog.find_config(str(experiment)), overrides, target)
    elif overrides:
        raise ValueError("overrides go with the name of a config or a file; change plain data or the object itself")
    else:
        source = _take_experiment(experiment, target)
    choice = _executor(how.get("executor"), source.executor, workers)
    if choice is not None:
        choice.check()
    plan = prepare(source.experiment, device=device, elsewhere=choice is not None and choice.is_elsewhere)
    if choice is not None:
        choice.count(plan.device_kind)  # refuses a number that can't be, before anything is written
    options = runner.Options(
        workers=choose_workers(workers, plan.device),
        name=source.name,
        control=control,
        unlike_defaults=source.unlike_defaults,
        module_folder=source.module_folder,
        executor=choice,
    )
    with folder_in_use(source.folder, options), source.folder.logged():
        outcome = run_and_publish(plan, source.folder, options, progress)
    return _result_of(outcome, source.folder)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """An experiment, and what its config says of the run beside it.

    Attributes:
        experiment: the settings.
        name: of the run.
        folder: of the run.
        unlike_defaults: in which defaults the methods differ, if in any.
        module_folder: where modules are that the config imports.
        executor: the config's section of that name.
    """

    experiment: Experiment
    name: str
    folder: RunDir
    unlike_defaults: str | None = None
    module_folder: str = ""
    executor: Mapping[str, Any] = field(default_factory=dict)


def _read_config(path: Path, overrides: Sequence[str], out: Path | None) -> _Source:
    """Return the experiment of a file."""
    folder = default_folder(path) if out is None else out
    experiment = yaml_config.load(path, overrides)
    is_own = path.resolve().parent == folder.resolve()  # a run's own config has every default in it
    return _Source(
        experiment=experiment,
        name=path.stem,
        folder=RunDir(folder),
        unlike_defaults=None if is_own else default_differences.differences_in_file(experiment, path, overrides),
        module_folder=plugins.module_folder(experiment, path),
        executor=yaml_config.executor_section(path),
    )


def _take_experiment(given: Mapping[str, Any] | Experiment, out: Path | None) -> _Source:
    """Return the experiment that is given as an object or as plain data."""
    name = "experiment"
    folder = RunDir(Path("results") / name if out is None else out)
    if isinstance(given, Experiment):
        return _Source(experiment=given, name=name, folder=folder)
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise TypeError(f"expected an experiment as a config's name, a file, plain data or an Experiment, got {kind}")
    experiment = yaml_config.read(dict(given))
    return _Source(
        experiment=experiment,
        name=name,
        folder=folder,
        unlike_defaults=default_differences.differing_defaults(experiment, given),
        executor=yaml_config.executor_section(given),
    )


def _result_of(outcome: RunOutcome, folder: RunDir) -> RunResult:
    """Return what a run left, unless nothing could be finished."""
    failures = tuple(f"{failure.name}: {failure.reason}" for failure in outcome.failures)
    unfinished = tuple(outcome.unfinished)
    if not outcome.rows:
        why = failures[0] if failures else "the time limit came first" if unfinished else NOTHING
        raise RuntimeError(f"nothing could be finished: {why}")
    return RunResult(folder.path, failures, unfinished)


def _executor(
    asked: str | Mapping[str, Any] | None, section: Mapping[str, Any], workers: int | None
) -> ExecutorChoice | None:
    """Return what starts the workers of a run; None where this process computes it."""
    options = {"name": asked} if isinstance(asked, str) else dict(asked or {})
    return choose_executor(options.pop("name", None), section, options, workers)


def _seconds(minutes: float | None) -> float:
    """Return the seconds of a limit in minutes; infinity without."""
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if minutes is not None and not (number and 0 < minutes < math.inf):
        raise ValueError(f"expected minutes > 0, or None for no limit, got {minutes!r}")
    return math.inf if minutes is None else 60 * minutes


def _path(what: str, value: object) -> Path:
    """Return a path that a caller gave."""
    if not isinstance(value, str | Path):
        raise TypeError(f"{what}: expected a path, got {type(value).__name__}")
    return Path(value)


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """How a model or an update is audited, and by what.

    Attributes:
        attacks: names, settings or objects, or a single one of them; none takes those that fit the method and the batch
            size, and leaves out what can add nothing to the attacks before it.
        method: how the update is made; None is one step of plain SGD whose step size the attacker does not know.
        defense: what is done to the update before it is sent; a list is a chain, one after the other.
        batch_size: images in one update.
        input_shape: (channels, height, width); needed for a captured update without images.
        kind: "gradient" where a captured update is that and no difference of weights.
        clients: how many clients a captured update is the mean of, each of `batch_size` images.
        mean: per channel, of the normalization inside the model, in whose units attacks search. Where a data loader
            normalizes, put that in front of the model.
        std: per channel, what the model divides by, likewise.
        head: prefix of the names of the classifier's parameters; None takes the last linear layer.
        loss: what clients minimize: "cross-entropy", "bce", "mse", "segmentation", `module:function` or a callable.
        targets: of a loss function of your own, what targets are that the attacker does not know: "free" numbers,
            "binary" ones or "probabilities", in the outputs' shape, or "classes"; "known" where it has to know them.
        threat: what the attacker knows beside the update, as an object or settings: `{"knows_labels": True}`.
        output: which part of what the model returns that is taken of: a name, a place, or a function of the whole.
        input_range: least and largest number that inputs can have, where that is not [0, 1].
        categories: of a table, first column of each one-hot category and the one behind its last.
        column_std: of a table, the standard deviation of each column, by which numbers are scored.
        seed: of all randomness.
        workers: processes that updates are spread over; their number changes no result.
        minutes: how long attacks may take, about, from the first on: searches then end with their best so far, and
            attacks that come later are not tried; the report says so. Preparing the updates is not counted. None is no
            limit.
        out: folder for report, table and pictures; an audit that was stopped goes on there. Nothing is kept without.

    Raises:
        ValueError: a setting that is no number, or out of range.
        TypeError: attacks or a folder that are none.
    """

    attacks: str | Mapping[str, Any] | Attack | Sequence[str | Mapping[str, Any] | Attack] | None = ()
    method: str | Mapping[str, Any] | Method | None = None
    defense: str | Mapping[str, Any] | Defense | Sequence[str | Mapping[str, Any] | Defense] = "none"
    batch_size: Count = 1
    input_shape: Sequence[int] | Inputs | None = None
    kind: Literal["update", "gradient"] = "update"
    clients: Count = 1
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    head: str | None = None
    loss: str | Mapping[str, Any] | Loss | Callable[..., Tensor] = "cross-entropy"
    targets: TargetKind | None = None
    threat: ThreatModel | Mapping[str, Any] | None = None
    output: Choice = None
    input_range: Range | None = None
    categories: Sequence[tuple[int, int]] = ()
    column_std: Sequence[float] = ()
    seed: Seed = 0
    workers: Count = 1
    minutes: float | None = None
    out: str | Path | None = None

    def __post_init__(self) -> None:
        for key in ("batch_size", "clients", "seed", "workers"):
            object.__setattr__(self, key, fit_value(AuditOptions, key, getattr(self, key)))
        if isinstance(self.threat, Mapping):
            object.__setattr__(self, "threat", fit_value(ClientSettings, "threat", self.threat))
        if self.attacks is not None and not isinstance(self.attacks, str | Mapping | Attack | Sequence):
            raise TypeError(f"attacks: expected a name or a list of names, got {type(self.attacks).__name__}")
        if self.out is not None:
            _path("out", self.out)

    @property
    def named_attacks(self) -> Sequence[str | Mapping[str, Any] | Attack]:
        """The attacks as a list; empty where none is named."""
        if isinstance(self.attacks, str | Mapping | Attack):
            return (self.attacks,) if self.attacks else ()
        return self.attacks or ()

    @property
    def stated_method(self) -> Mapping[str, Any] | None:
        """The settings of the method that somebody stated, all of them of an object; None without a method."""
        if isinstance(self.method, Method):
            return methods.spec(self.method)
        return {"name": self.method} if isinstance(self.method, str) else self.method

    def client(self) -> ClientSettings:
        """Return how the client behind the updates trains."""
        return ClientSettings(
            method=None if self.method is None else methods.build(self.method),
            defense=defenses.build(_chained(self.defense)),
            mean=self.mean,
            std=self.std,
            head=self.head,
            loss=self.loss,
            targets=self.targets,
            threat=self.threat,  # type: ignore[arg-type]
            output=self.output,
            input_range=self.input_range,
            categories=self.categories,
            column_std=self.column_std,
        )


def audit(
    subject: nn.Module | ServerView,
    images: Inputs | Batch | None = None,
    labels: Tensor | Sequence[float] | None = None,
    *,
    update: Captured | None = None,
    truth: Truth | None = None,
    options: AuditOptions | None = None,
    **settings: Any,
) -> AuditReport:
    """Say what updates give away: those that a model would send of images, one that was captured, or a server's view.

    Args:
        subject: the model as it was when the update was made, or a view (`fl.capture`).
        images: (N, C, H, W) in [0, 1] as floats, or a batch; those behind the update, as far as they are known. Other
            inputs as `fl.capture.from_batch` takes them: tables, series, ids, several inputs.
        labels: int64 (N,) or a list of integers, beside images that are a tensor; or the targets of the loss. Beside an
            update without images: those that the attacker knows. Beside images it knows them under
            `threat={"knows_labels": True}`.
        update: weights before minus weights after, by parameter name, as a list of arrays in the order of
            `model.state_dict()` or as one vector of all their numbers, or the file that holds them; or (before, after),
            or {"before": ..., "after": ...}, each a file, a model, a state dictionary or a list, where None is the
            model itself. Without, the model computes one update for every `batch_size` images.
        truth: what is known to be behind a view; None where nothing is.
        options: how, and by which attacks.
        **settings: single ones of the options in their place: `hyperleak.audit(model, images, labels, out="a")`.

    Returns:
        Findings by attack; `plain()` has them as plain data, `best("psnr")` the highest figure.

    Raises:
        ValueError: what is given does not fit together; says what.
        TypeError: there is no such setting; says what is close. Images or labels that are no tensors, likewise.
        FileNotFoundError: the update's file is not there.
    """
    chosen = options_or_settings(AuditOptions, options, settings)
    with errors_in_python():
        alone = images is None and labels is not None and update is not None  # so that the attacker knows them
        stated = _as_tensor(labels) if alone else None
        known = None if alone else _examples(images, labels)
        return report_in_python(_audit(subject, known, update, truth, chosen, stated))


def _model_hint(subject: object) -> str:
    """Return how what somebody gave for a model becomes one."""
    if isinstance(subject, Mapping):
        return "; a captured update goes as update=, beside the model"
    if isinstance(subject, type) and issubclass(subject, nn.Module):
        return f"; that is the class: give an object of it, {subject.__name__}(...)"
    if type(subject).__name__ == "ExportedProgram":
        return (
            "; give the nn.Module that was exported, or program.module() where its batch size was exported as dynamic"
        )
    if type(subject).__name__ == "ModelProto":
        return (
            "; ONNX holds no nn.Module: convert it (onnx2torch.convert, say), or give the module it was exported from"
        )
    return (
        "; a function goes into the forward of an nn.Module, whose parameters are trained" if callable(subject) else ""
    )


def _audit(
    subject: nn.Module | ServerView,
    known: Examples | None,
    update: Captured | None,
    truth: Truth | None,
    chosen: AuditOptions,
    stated: Tensor | None,
) -> AuditReport:
    """Return what `audit` does, in the words of the command line; `stated` are labels without images."""
    seconds, began = _seconds(chosen.minutes), time.monotonic()
    if isinstance(subject, ServerView):
        if known is not None or update is not None:
            raise ValueError("a view holds its update: give what is known to be behind it as truth=")
        if chosen.threat is not None or chosen.targets is not None:
            raise ValueError(
                "a view holds its loss and what the attacker knows: say threat and targets where it is made"
            )
        subjects, method = [Subject(subject, truth, captured=True)], subject.method
        batch_size = subject.batch_size or 1
    else:
        if not isinstance(subject, nn.Module):
            hint = _model_hint(subject)
            raise TypeError(f"expected a model (nn.Module) or a server's view, got {type(subject).__name__}{hint}")
        if truth is not None:
            raise ValueError("truth goes with a view; give a model's images and labels")
        subjects, method = _subjects(subject, known, update, chosen, stated)
        batch_size = subjects[0].view.batch_size or chosen.batch_size
    ids = subjects[0].view.task.inputs.has_ids
    usual = attack_selection.ATTACKS_ON_IDS if ids else attack_selection.default_attacks(method, batch_size)
    named = chosen.named_attacks or usual
    preparation = time.monotonic() - began
    control = SearchControl(time_limit=seconds, keep_best_on_interrupt=True)
    options = runner.Options(workers=chosen.workers, control=control)
    return audit_updates(
        type(subject).__name__ if isinstance(subject, nn.Module) else "a view",
        subjects,
        {attack_registry.label(attack): attack for attack in map(attack_registry.build, named)},
        seed=chosen.seed,
        execution=Execution(options=options, early_stop=not chosen.named_attacks, preparation=preparation),
        out=None if chosen.out is None else Path(chosen.out),
    )


def _examples(images: Inputs | Batch | None, labels: Tensor | Sequence[float] | None) -> Examples | None:
    """Return inputs and their targets."""
    if images is None or isinstance(images, Batch):
        if labels is not None:
            raise ValueError(f"labels go with a tensor of images, got {'none' if images is None else 'a batch'}")
        return None if images is None else Examples.of(images)
    if labels is None:
        raise ValueError("expected labels beside images: int64, one for each")
    several: list[Any] = tensors_of(images) if isinstance(images, Mapping | tuple | list) else [images]
    for value in several:
        _check_tensor("images", value)
    labels = _as_tensor(labels)
    if isinstance(images, Tensor):
        _check_layout(images)
    return check_examples("images", images, labels)


def _as_tensor(labels: object) -> Tensor:
    """Return labels, which may be a list."""
    if isinstance(labels, (list, tuple)):
        try:
            labels = torch.tensor(labels)
        except (ValueError, TypeError, RuntimeError) as error:  # words, or lists of several lengths
            raise ValueError(f"labels: expected a number for each image, counted from 0, got {labels!r:.80}") from error
    _check_tensor("labels", labels)
    assert isinstance(labels, Tensor)
    return labels


def _check_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor."""
    if not isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise TypeError(f"{name}: expected a torch tensor, got {kind}; for arrays: torch.from_numpy({name})")


def _check_layout(images: Tensor) -> None:
    """Refuse pictures of bytes, and channels that come last."""
    if images.dtype == torch.uint8 and images.ndim == 4:
        raise ValueError(
            "images: expected floats in [0, 1], got torch.uint8; give images.float() / 255, and where the model "
            f"divides by 255 itself, {hook_hint(SCALED)} as well"
        )
    if images.ndim == 4 and images.shape[1] == images.shape[2] > 4 and images.shape[3] in (1, 3):
        shape = tuple(images.shape)
        raise ValueError(f"images: expected (N, C, H, W), got channels last, {shape}; give images.permute(0, 3, 1, 2)")


def _subjects(
    model: nn.Module,
    known: Examples | None,
    update: Captured | None,
    chosen: AuditOptions,
    stated: Tensor | None,
) -> tuple[list[Subject], Method]:
    """Return the updates of a user's model, and the method they are of.

    Args:
        model: the user's.
        known: inputs and targets, where they are known.
        update: a captured one.
        chosen: how it was made.
        stated: targets that the attacker of a captured update knows, without the inputs.
    """
    client = chosen.client()
    if known is not None:
        known = known.like(model)
    if update is None:
        if known is None:
            raise ValueError("expected images and labels, an update, or both; got neither")
        subjects = user_model.of_batches(
            model,
            known,
            chosen.batch_size,
            client,
            source="images",
            seed=chosen.seed,
        )
        return subjects, subjects[0].view.method
    captured = captured_files.described(_captured(update), chosen.kind, chosen.clients)
    shape = chosen.input_shape if chosen.input_shape is not None else None if known is None else known.stated()
    if shape is None:
        raise ValueError("expected input_shape=(channels, height, width) for an update without images, got none")
    facts, batch_size = captured.training, chosen.batch_size
    if facts is not None:
        client = client if client.method is not None else replace(client, method=facts.method(model))
        batch_size = facts.examples if batch_size == 1 and facts.examples is not None else batch_size
    if stated is not None:
        client = CapturedUpdateSettings(**vars(client), labels=stated)
    captured = with_model_names(captured, model, shape)
    client, captured, assumed = with_open_step_size(client, captured, chosen.stated_method)
    subject = captured_update.of_update(
        model,
        captured,
        client,
        input_shape=shape,
        batch_size=batch_size,
        given=known,
    )
    return [replace(subject, notes=(*subject.notes, *assumed))], subject.view.method


def _captured(update: Captured) -> CapturedUpdate:
    """Return a captured update as a caller in Python has it."""
    if isinstance(update, Mapping) and (pair := captured_files.pair_by_words(update)) is not None:
        return captured_files.load_pair(*pair)
    if (
        isinstance(update, tuple)
        and len(update) == 2
        and not all(isinstance(one, Tensor | np.ndarray) for one in update)  # which may be arrays of one update
    ):
        before, after = update
        return captured_files.load_pair(before, after)  # type: ignore[arg-type]
    if isinstance(update, str | Path):
        return captured_files.load_update(Path(update))
    if isinstance(update, nn.Module):
        raise TypeError("update: expected a change of weights, got a model; give (before, after)")
    if not isinstance(update, Mapping | list | tuple | Tensor | np.ndarray):
        kind = type(update).__name__
        hint = "; dict(...) makes tensors by name of named parameters, list(...) a list" if kind == "generator" else ""
        raise TypeError(f"update: expected a file, tensors by name, or (before, after), got {kind}{hint}")
    return captured_files.as_state(update, "update")


def load(folder: str | Path) -> RunResult:
    """Load what a run or an audit left in its folder.

    Raises:
        FileNotFoundError: there is no run in this folder.
    """
    path = _path("folder", folder)
    if not (path / RUN).is_file():
        raise FileNotFoundError(f"{path} holds no run: there is no {RUN} in it")
    return RunResult(path)


def _chained(
    defense: str | Mapping[str, Any] | Defense | Sequence[str | Mapping[str, Any] | Defense],
) -> str | Mapping[str, Any] | Defense:
    """Return a defense as it is, and a list of several as their chain."""
    if isinstance(defense, Sequence) and not isinstance(defense, str):
        return {"name": "chain", "parts": list(defense)}
    return defense
