"""An experiment in plain dataclasses: what is trained, who watches, which attacks are run."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

from attacks.base import Attack
from defenses import Defense
from fl.data import Source
from fl.data.augment import Augmentation
from fl.data.partitions.partition import Iid, Partitioner
from fl.method import Method, methods
from fl.models import Network
from fl.ranges import Count, CountFrom0, Length, PositiveShare, Range, Seed, Share
from fl.registry import UnknownNameError
from fl.settings import SettingError, current_name, declared, format_value
from fl.simulation.protocol import Diagnostic
from fl.view import ThreatModel

T = TypeVar("T")
Accuracy = Literal[
    "accuracy", "accuracy_local", "accuracy_tuned", "accuracy_unseen", "accuracy_unseen_tuned", "accuracy_global"
]
ACCURACIES: tuple[Accuracy, ...] = get_args(Accuracy)
"""Columns of `rounds.jsonl` that hold shares of images classified right, each a mean over clients."""
NEEDED: Mapping[Accuracy, tuple[str, ...]] = {
    "accuracy_tuned": ("fine_tune_epochs",),
    "accuracy_unseen": ("held_out_clients",),
    "accuracy_unseen_tuned": ("held_out_clients", "fine_tune_epochs"),
    "accuracy_global": ("global_test",),
}
"""Settings of a federation without which an accuracy is not taken."""


@declared("task")
@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What is learned.

    Attributes:
        dataset: the images.
        model: the network.
    """

    dataset: Source
    model: Network


@declared("federation")
@dataclass(frozen=True, kw_only=True)
class FederationSpec:
    """Who learns it, and for how long.

    Attributes:
        partition: which client holds which image; the same for every seed.
        rounds: of training before the last observation; 0 leaves the network as it starts.
        client_fraction: share of clients that take part in a round, in (0, 1].
        full_last_round: whether all clients take part in the last round, whatever the fraction.
        engine: how clients are trained: "loop" one after the other, "factored" a hypernetwork's without its matrices,
            "vmap" stacked for a GPU (up to rounding the same numbers), "auto" the fastest that applies.
        augment: how images are changed before they are fed in training.
        evaluate_every: accuracy is measured every so many rounds; before the first and after the last it always is.
        held_out_clients: the last so many clients never take part; they are scored apart, on all their images.
        fine_tune_epochs: epochs for which clients adapt what they receive before they are scored once more; 0 leaves
            it out.
        global_test: whether every participant's model is also scored on the data set's whole test part.
        diagnostics: what is taken beside accuracies wherever these are (see Metrics): "loss" on training images,
            "movement" of weights in a round, their "similarity" and "divergence" between clients, "embeddings",
            "confidence" of answers, what a "server" says of its own step, client by client (hfedf's alignment).
    """

    former_names: ClassVar[Mapping[str, str]] = {
        "rate": "client_fraction",
        "everyone_last": "full_last_round",
        "outsiders": "held_out_clients",
        "fine_tune": "fine_tune_epochs",
        "whole_test": "global_test",
        "measures": "diagnostics",
    }

    partition: Partitioner = field(default_factory=Iid)
    rounds: CountFrom0 = 1
    client_fraction: PositiveShare = 1.0
    full_last_round: bool = True
    engine: Literal["auto", "loop", "factored", "vmap"] = "auto"
    augment: Augmentation = field(default_factory=Augmentation)
    evaluate_every: Count = 1
    held_out_clients: CountFrom0 = 0
    fine_tune_epochs: CountFrom0 = 0
    global_test: bool = False
    diagnostics: tuple[Diagnostic, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.diagnostics)) < len(self.diagnostics):
            raise SettingError(("federation", "diagnostics"), f"expected each once, got {list(self.diagnostics)}")


@declared("observe")
@dataclass(frozen=True, kw_only=True)
class ObserveSpec:
    """Which updates the attacker gets: one for each batch of a watched client's images.

    The observed updates are what the client would send; they don't enter training.

    Attributes:
        clients: numbers of the watched clients.
        rounds: after how many rounds of training they are watched; `()` is after the last, or before the last update
            that a method of bounded participation sends.
        split: whose images an update is computed from: those that the client trains on ("train"), or its test images,
            which no client has trained on ("test"): what it would send of a picture that is new to the network.
        images: how many of them of each client; None is all.
        batch_size: how many of these an update is computed from; None is all of them at once.
        classes: only images of these classes, by name or label; `()` is any.
        seed: of the choice of images.
        method: settings of the methods that differ in the observed round; each goes to every method that has it.
        augment: whether the images are changed as in training before they are fed.
    """

    former_names: ClassVar[Mapping[str, str]] = {"part": "split"}

    clients: Annotated[tuple[CountFrom0, ...], Length(1)] = (0,)
    rounds: tuple[CountFrom0, ...] = ()
    split: Literal["train", "test"] = "train"
    images: Count | None = 8
    batch_size: Count | None = 1
    classes: tuple[int | str, ...] = ()
    seed: Seed = 0
    method: dict[str, Any] = field(default_factory=dict)
    augment: bool = False

    def __post_init__(self) -> None:
        if self.images and self.batch_size and self.images % self.batch_size:
            wanted = f"expected a multiple of batch_size {self.batch_size}, got {self.images}"
            raise SettingError(("observe", "images"), wanted)
        for key in ("clients", "rounds"):
            value = getattr(self, key)
            if len(set(value)) < len(value):
                raise SettingError(
                    ("observe", key), f"expected different numbers from 0, got {format_value(list(value))}"
                )


@declared("score")
@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """Figures beyond those that are always taken.

    Attributes:
        lpips: "auto" takes LPIPS with the backbone that is at hand, AlexNet's or SqueezeNet's; "off", or the
            backbone's name.
        download: whether the backbone's weights may be downloaded where none is at hand, AlexNet's by "auto"; never
            where `HYPERLEAK_OFFLINE` is set.
        target_accuracies: accuracies in [0, 1] of which the report says in how many rounds, and with how many numbers
            sent, they were reached; `()` takes those that published figures have.
        target_metric: the accuracy that is meant.
    """

    former_names: ClassVar[Mapping[str, str]] = {"levels": "target_accuracies", "level_of": "target_metric"}

    lpips: Literal["auto", "off", "alex", "squeeze", "vgg"] = "auto"
    download: bool = True
    target_accuracies: tuple[Share, ...] = ()
    target_metric: Accuracy = "accuracy"


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """A method, a defense or an attack under the label it has in results.

    Attributes:
        label: its name, or what the config calls it by `as`.
        item: the object.
        against: labels of the methods an attack is run on; `()` is all.
        changes: settings of other sections that differ for this entry, by dotted key: `{"federation.rounds": 10}`.
    """

    label: str
    item: T
    against: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)


@declared("published")
@dataclass(frozen=True, kw_only=True)
class Published:
    """Figures of a paper that a report sets beside those of this run.

    Attributes:
        method: label of the method they are of.
        attack: label of the attack; None for an accuracy.
        source: where they stand: paper and table.
        psnr: in dB.
        ssim: by whatever convention the source has.
        lpips: likewise.
        accuracy: in [0, 1], of the aggregated model after the last round.
        accuracy_local: likewise, of the clients' models right after their training in the last round.
        accuracy_tuned: of models that clients fine-tuned (`federation.fine_tune_epochs`).
        accuracy_unseen: on all images of clients that never took part (`federation.held_out_clients`).
        accuracy_unseen_tuned: on the test images of those, after fine-tuning.
        accuracy_global: on the data set's whole test part (`federation.global_test`).
        best: whether these accuracies are each of its own best round, picked by itself, instead of the last.
        cpr: how many numbers a client that takes part sends and receives in a round, together.
        rounds_to_accuracy: in how many rounds an accuracy (`score.target_metric`) was reached, by level in [0, 1];
            None is never.
        communication_share: how many numbers a client sends and receives until the best round of
            `score.target_metric`, as a share of those of the method `reference_method`, from 0.
        reference_method: label of that method.
        seconds: per round.
        note: why ours may differ, in words.
    """

    former_names: ClassVar[Mapping[str, str]] = {
        "until": "rounds_to_accuracy",
        "sent_share": "communication_share",
        "beside": "reference_method",
    }

    method: str
    source: str
    attack: str | None = None
    psnr: float | None = None
    ssim: float | None = None
    lpips: float | None = None
    accuracy: Share | None = None
    accuracy_local: Share | None = None
    accuracy_tuned: Share | None = None
    accuracy_unseen: Share | None = None
    accuracy_unseen_tuned: Share | None = None
    accuracy_global: Share | None = None
    best: bool = False
    cpr: Annotated[float, Range(0)] | None = None
    rounds_to_accuracy: dict[Share, CountFrom0 | None] = field(default_factory=dict)
    communication_share: Annotated[float, Range(0)] | None = None
    reference_method: str = ""
    seconds: Annotated[float, Range(0)] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.best and all(getattr(self, key) is None for key in ACCURACIES):
            raise ValueError("published.best: expected an accuracy beside it, got none")
        if (self.communication_share is None) != (not self.reference_method):
            raise ValueError("published: expected both communication_share and reference_method, or neither; got one")


@declared("")
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run depends on; the attributes are the sections of the YAML file.

    `imports` names the modules that register what others name (`eval.experiment.plugins`); an experiment itself imports
    nothing.
    """

    task: TaskSpec
    method: tuple[Entry[Method], ...]
    attack: tuple[Entry[Attack], ...] = ()
    title: str = ""
    federation: FederationSpec = field(default_factory=FederationSpec)
    defense: tuple[Entry[Defense], ...] = (Entry(label="none", item=Defense()),)
    threat: ThreatModel = field(default_factory=ThreatModel)
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    seeds: tuple[Seed, ...] = (0,)
    score: ScoreSpec = field(default_factory=ScoreSpec)
    published: tuple[Published, ...] = ()
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        observed = {current_name((type(e.item) for e in self.method), k): v for k, v in self.observe.method.items()}
        object.__setattr__(self, "observe", replace(self.observe, method=observed))
        labels = [entry.label for entry in self.method]
        for attack in self.attack:
            for label in attack.against:
                if label not in labels:
                    note = f"; `against` is a setting of {attack.label!r} in the config: change the attacks first"
                    raise UnknownNameError(f"method in `against` of attack {attack.label!r}:", label, labels, note)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise SettingError(("seeds",), f"expected one or more different numbers, got {list(self.seeds)}")
        last = self.federation.rounds
        if late := [number for number in self.observe.rounds if number > last]:
            raise SettingError(("observe", "rounds"), f"expected at most {last} (federation.rounds), got {late}")
        target_metric = self.score.target_metric
        if lacking := [
            f"federation.{key}" for key in NEEDED.get(target_metric, ()) if not getattr(self.federation, key)
        ]:
            reason = f"{target_metric} is only taken with {' and '.join(lacking)}: set that first"
            raise SettingError(("score", "target_metric"), reason)
        self.observed_methods()
        check_published(self, swept=False)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Numbers of rounds after which clients are watched, ascending."""
        return tuple(sorted(self.observe.rounds)) or (self.federation.rounds,)

    def observed_methods(self) -> dict[str, Method]:
        """Return every method as it is in the observed round, by label.

        Raises:
            UnknownNameError: a key of `observe.method` that no method has.
            ValueError: a value that does not fit, or that another setting overrules.
        """
        if not self.observe.method:
            return {entry.label: entry.item for entry in self.method}
        own = {entry.label: {f.name for f in fields(entry.item) if f.init} for entry in self.method}
        known = {key for names in own.values() for key in names}
        for key in self.observe.method:
            if key not in known:
                raise UnknownNameError("key of observe.method", key, sorted(known))
        built = {}
        for entry in self.method:
            changes = {key: value for key, value in self.observe.method.items() if key in own[entry.label]}
            try:
                text = json.dumps(changes)
            except TypeError:  # numbers of numpy, say
                built[entry.label] = _change_method(entry.item, changes, entry.label)
            else:
                built[entry.label] = _read_and_change_method(_Same(entry.item), text, entry.label)
        return built


@dataclass(frozen=True, eq=False)
class _Same:
    """An object as a key that stands for no other one, were it equal."""

    item: Any

    def __hash__(self) -> int:
        return id(self.item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.item is self.item


@functools.lru_cache(maxsize=1024)  # an experiment is checked anew for each of its cells
def _read_and_change_method(method: _Same, changes: str, label: str) -> Method:
    """Return what `_change_method` does of settings in JSON."""
    return _change_method(method.item, json.loads(changes), label)


def _change_method(method: Method, changes: Mapping[str, Any], label: str) -> Method:
    """Return a method with the settings that differ in the observed round; `label` is for errors."""
    if not changes:
        return method
    try:
        built = methods.build({**methods.spec(method), **changes})
    except SettingError as error:
        raise error.with_prefix("observe", "method", instead=1) from error
    now = methods.spec(built)
    for key, value in changes.items():
        check_not_overruled(value, now[key], f"observe.method.{key} ({label})")
    return built


def check_published(experiment: Experiment, *, swept: bool = True) -> None:
    """Check that published figures are of existing entries, by label or by what a sweep made several entries of.

    Args:
        experiment: whose figures.
        swept: whether the labels are those after the sweep; before it, what follows "@" can't be known yet.

    Raises:
        UnknownNameError: one is not; says what is close.
    """
    for figures in experiment.published:
        if (found := find_unknown_label(experiment, figures, swept=swept)) is not None:
            place, label, known = found
            raise UnknownNameError(f"{place} in published", label, known)


def find_unknown_label(
    experiment: Experiment, figures: Published, *, swept: bool = True
) -> tuple[str, str, list[str]] | None:
    """Find a label in published figures that no entry has: its key, the label and those there are; None if all do."""
    places = (("method", experiment.method), ("reference_method", experiment.method), ("attack", experiment.attack))
    for place, entries in places:
        known = sorted({name for e in entries for name in (e.label, e.label.partition("@")[0])})
        label = getattr(figures, place)
        if label is None or (place == "reference_method" and not label):
            continue
        if (label if swept else label.partition("@")[0]) not in known:
            return place, label, known
    return None


def check_not_overruled(given: Any, new: Any, where: str) -> None:
    """Refuse a number that another setting overrules (`epochs` beside `steps`, say).

    Raises:
        ValueError: `given` was asked for and `new` came out.
    """
    if (given is None or isinstance(given, int | float)) and not isinstance(new, list) and new != given:
        raise ValueError(f"{where}: no effect, as another setting overrules it (steps go before epochs)")
