"""What an experiment comes to: its cells in canonical order, checked as far as can be without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from attacks.base import Attack
from defenses import Defense
from eval.experiment import sweep
from eval.experiment.capture_spec import CaptureSpec
from eval.experiment.serialization import section_spec
from eval.experiment.spec import Entry, Experiment, FederationSpec, ObserveSpec, ScoreSpec
from eval.metrics.perceptual import Perceptual, load_lpips
from eval.run import auxiliary_overlap
from eval.run.assembly_check import ASSEMBLY_ERRORS, check_assembly
from eval.run.cache_keys import (
    CapturedUpdates,
    Cell,
    TrainedUpdates,
    attack_cell,
    capture_cell,
    dataset_sources,
    training_cell,
)
from eval.run.federation_data import FederationData, Target, dataset_digest, load, resolve_device
from eval.run.observation import Observation
from fl.aggregated_view import AggregationGroups
from fl.client import Client
from fl.data import Dataset, datasets
from fl.data.checked_loading import load_checked
from fl.federation import n_sampled
from fl.method import Method
from fl.settings import SettingError
from fl.types import Task
from fl.view import ThreatModel


@dataclass(frozen=True, eq=False)
class ObservationSpec:
    """Whom the attacker watches, and what they run while it does.

    Attributes:
        observe: the settings.
        targets: the watched updates.
        method: the method in the observed round.
        threat: what the server knows.
    """

    observe: ObserveSpec
    targets: tuple[Target, ...]
    method: Method
    threat: ThreatModel


@dataclass(frozen=True, eq=False)
class AttackTask:
    """One attack after a round.

    Attributes:
        attack: which.
        round: how many rounds were trained before.
        observation_spec: on whom.
        cell: where the results go.
        after: attacks before it; what one of them settles is not attacked again.
    """

    attack: Entry[Attack]
    round: int
    observation_spec: ObservationSpec
    cell: Cell
    after: tuple[AttackTask, ...] = ()

    @property
    def history_rounds(self) -> range:
        """Rounds before the attack's in which the attacker saw the same clients, oldest first."""
        return range(max(0, self.round - self.observation_spec.threat.history_rounds), self.round)


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """One method under one defense from one seed, and the attacks on it.

    Attributes:
        method: which, under its label.
        defense: likewise.
        seed: of the network and of everything random.
        data: the data.
        federation: for how long it is trained, and how.
        cell: where the results go.
        attack_tasks: by round, then as the attacks stand in the config.
        name: what the progress and the timings call it.
    """

    method: Entry[Method]
    defense: Entry[Defense]
    seed: int
    data: FederationData
    federation: FederationSpec
    cell: Cell
    attack_tasks: tuple[AttackTask, ...]
    name: str

    @staticmethod
    def observed_rounds(attack_tasks: Iterable[AttackTask]) -> set[int]:
        """Return after which rounds these attack tasks see clients."""
        return {number for attack_task in attack_tasks for number in (*attack_task.history_rounds, attack_task.round)}


@dataclass(frozen=True, eq=False)
class CaptureTask:
    """Updates that are there before anything is trained, and the attacks on them.

    They are those of a user's own model, or one that was captured.

    Attributes:
        method: what the client is taken to have trained by, under its label.
        defense: likewise.
        observation: the updates.
        digest: of all that makes them; says in a folder whether its cells are of the same ones.
        attack_tasks: as the attacks were asked for.
        name: what the progress and the timings call it.
    """

    method: Entry[Method]
    defense: Entry[Defense]
    observation: Observation
    digest: str
    attack_tasks: tuple[AttackTask, ...]
    name: str

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.observation.seed


Source = TrainingTask | CaptureTask
"""What attacked updates come from."""


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment with its data: ready to run.

    Attributes:
        experiment: the settings.
        trainings: in the order in which their results are listed.
        perceptual: LPIPS, or why there is none; None if it is off.
        device: where everything is computed, if it is here.
        captures: updates that need no training, behind those that do.
        notes: what a reader has to know of what is attacked.
        contradiction: in words, if settings and updates can't belong together.
        computed_on: kind of device of workers elsewhere, where this machine has none of it; empty is that of `device`.
    """

    experiment: Experiment | CaptureSpec
    trainings: tuple[TrainingTask, ...]
    perceptual: Perceptual | None
    device: torch.device
    captures: tuple[CaptureTask, ...] = ()
    notes: tuple[str, ...] = ()
    contradiction: str = ""
    computed_on: str = ""

    @property
    def device_kind(self) -> str:
        """Kind of device that everything is computed on, `cpu` or `cuda`."""
        return self.computed_on or self.device.type

    @property
    def attacked_tasks(self) -> tuple[Source, ...]:
        """Trainings and captures whose updates are attacked."""
        return (*self.trainings, *self.captures)

    @property
    def attacks(self) -> list[AttackTask]:
        """All attack tasks, in the order of their results."""
        return [task for source in self.attacked_tasks for task in source.attack_tasks]

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """Yield every cell under a name for people, in order."""
        for training in self.trainings:
            yield training.name, training.cell
            for attack_task in training.attack_tasks:
                yield f"{training.name}: {attack_task.attack.label} after round {attack_task.round}", attack_task.cell
        for capture in self.captures:
            for attack_task in capture.attack_tasks:
                yield f"{capture.name}: {attack_task.attack.label}", attack_task.cell


def prepare(experiment: Experiment, *, device: str = "auto", elsewhere: bool = False) -> Plan:
    """Load the data, split it, choose whom to watch, and check that everything fits together.

    Args:
        experiment: the settings.
        device: where everything is computed.
        elsewhere: whether other machines compute it, so that this one needs no such device.

    Raises:
        ValueError: settings that don't fit each other or the data; says which.
        FileNotFoundError: the data set is not there; says how to get it.
    """
    is_absent = elsewhere and device == "cuda" and not torch.cuda.is_available()
    maker = _PlanBuilder(
        experiment,
        resolve_device("cpu" if is_absent else device),
        load_perceptual(experiment.score),
        "cuda" if is_absent else "",
    )
    trainings = [
        maker.training(seed, method, defense)
        for seed in experiment.seeds
        for method in experiment.method
        for defense in experiment.defense
    ]
    return Plan(experiment, tuple(trainings), maker.perceptual, maker.device, computed_on=maker.computed_on)


def load_perceptual(score: ScoreSpec) -> Perceptual | None:
    """Load LPIPS as it is asked for, or say why it can't be taken; None where it is off."""
    if score.lpips == "off":
        return None
    return load_lpips(None if score.lpips == "auto" else score.lpips, allow_download=score.download)


def plan_capture(
    spec: CaptureSpec,
    observation: Observation,
    digest: str,
    *,
    device: str,
    notes: Sequence[str] = (),
    contradiction: str = "",
) -> Plan:
    """Return the plan of attacks on updates that are there already.

    Args:
        spec: the settings.
        observation: the updates.
        digest: of all that makes them.
        device: where everything is computed.
        notes: what a reader has to know of them.
        contradiction: in words, if settings and updates can't belong together.
    """
    perceptual, where = load_perceptual(spec.score), resolve_device(device)
    (method,), (defense,), (seed,) = spec.method, spec.defense, spec.seeds
    observe = ObserveSpec(images=spec.images, batch_size=spec.batch_size)
    observed = ObservationSpec(observe, (), method.item, spec.threat)
    tasks = tuple(
        AttackTask(
            attack,
            0,
            observed,
            capture_cell(
                digest,
                CapturedUpdates(method.item, defense.item, spec.threat, seed, where.type),
                attack.item,
                spec.score,
                perceptual,
                public=[dataset_digest(source.load()) for source in dataset_sources([attack.item])],
            ),
        )
        for attack in spec.attack
    )
    name = spec.source.get("update") or spec.source.get("model", "")
    capture = CaptureTask(method, defense, observation, digest, tasks, name)
    return Plan(spec, (), perceptual, where, (capture,), tuple(notes), contradiction)


def count_tasks(experiment: Experiment) -> tuple[int, int]:
    """Count the trainings and attacks (each after a round of a training) of an experiment; loads no data.

    Raises:
        ValueError: settings that don't fit each other.
    """
    attacked = 0
    for method in experiment.method:
        for attack in experiment.attack:
            if not attack.against or method.label in attack.against:
                attacked += len(watched_rounds(sweep.experiment_of(experiment, method, attack), method))
    times = len(experiment.seeds) * len(experiment.defense)
    return times * len(experiment.method), times * attacked


def watched_rounds(part: Experiment, method: Entry[Method]) -> tuple[int, ...]:
    """Return after how many rounds clients are watched: unless asked for, before the last update they send.

    Raises:
        ValueError: a round before which every client has sent its last update.
    """
    bound = method.item.max_participations
    if bound is None or part.federation.client_fraction < 1:
        return part.rounds
    if not part.observe.rounds:
        return (min(bound - 1, *part.rounds),)
    if late := [number for number in part.rounds if number >= bound]:
        raise SettingError(
            ("observe", "rounds"),
            f"expected at most {bound - 1} for {method.label!r}, whose clients send nothing after {bound} rounds "
            f"(method.rounds), got {late}",
        )
    return part.rounds


@dataclass(frozen=True)
class _PlanBuilder:
    """Makes the parts of a plan; what several of them share is made once."""

    experiment: Experiment
    device: torch.device
    perceptual: Perceptual | None
    computed_on: str = ""
    loaded: dict[str, Dataset] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    federation_data: dict[str, FederationData] = field(default_factory=dict)
    observation_specs: dict[str, ObservationSpec] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)

    def training(self, seed: int, method: Entry[Method], defense: Entry[Defense]) -> TrainingTask:
        """Plan one training with its attacks."""
        own = sweep.experiment_of(self.experiment, method, None)
        data = self._federation_data(own)
        task = data.task(self.experiment.seeds[0])
        every, outsiders = len(data.partition), own.federation.held_out_clients
        if outsiders >= every:
            reason = f"expected fewer than the {every} clients, got {outsiders}"
            raise SettingError(("federation", "held_out_clients"), reason)
        self._check(task, method.item, defense, f"method {method.label!r}", own.federation, every - outsiders)
        known = self._public(method.item, defense.item)
        cell = training_cell(data, own.federation, method.item, defense.item, seed, known)
        attack_tasks = []
        for attack in self.experiment.attack:
            if attack.against and method.label not in attack.against:
                continue
            part = sweep.experiment_of(self.experiment, method, attack)
            spec = self._observation_spec(part, data, method.label, defense.item.group_size)
            self._check(task, spec.method, defense, f"observe.method {method.label!r}")
            self._refuse(attack, spec, data)
            for number in watched_rounds(part, method):
                updates = TrainedUpdates(cell, number, spec.method, spec.threat, spec.observe)
                made = attack_cell(updates, attack.item, part.score, self.perceptual, self._public(attack.item))
                attack_tasks.append(AttackTask(attack, number, spec, made))
        attack_tasks.sort(key=lambda attack_task: attack_task.round)  # stable: attacks keep their order
        name = self._name(seed, method.label, defense.label)
        return TrainingTask(method, defense, seed, data, own.federation, cell, tuple(attack_tasks), name)

    def _refuse(self, attack: Entry[Attack], spec: ObservationSpec, data: FederationData) -> None:
        """Refuse attacks that were trained on watched images; checked once for all that watch the same ones."""
        key = f"{attack.item!r} {id(data)} {[target.key for target in spec.targets]}"
        if key not in self.checked:
            watched = (member.data.inputs for target in spec.targets for member in target.group)
            auxiliary_overlap.check_no_overlap(attack.item, attack.label, watched)
            self.checked.add(key)

    def _name(self, seed: int, method: str, defense: str) -> str:
        defended = "" if defense == "none" else f" + {defense}"
        return f"{method}{defended}" + (f" (seed {seed})" if len(self.experiment.seeds) > 1 else "")

    def _public(self, *named: object) -> list[str]:
        """Return digests of the data that methods, defenses or attacks name, as they are now."""
        found = []
        for source in dataset_sources(named):
            key = json.dumps(datasets.spec(source))
            if key not in self.digests:
                self.digests[key] = dataset_digest(self.loaded.get(key) or source.load())
            found.append(self.digests[key])
        return found

    def _federation_data(self, own: Experiment) -> FederationData:
        source = json.dumps(datasets.spec(own.task.dataset))
        federation = section_spec(own.federation)
        key = json.dumps([section_spec(own.task), federation["partition"], federation["augment"]])
        if key not in self.federation_data:
            if source not in self.loaded:
                self.loaded[source] = load_checked(own.task.dataset)
            data = load(own.task, own.federation, self.device, self.loaded[source])
            self.federation_data[key] = replace(data, computed_on=self.computed_on)
        return self.federation_data[key]

    def _observation_spec(self, part: Experiment, data: FederationData, method: str, size: int) -> ObservationSpec:
        participants = len(data.partition) - part.federation.held_out_clients
        division = AggregationGroups(
            size=size, participants=participants, asked=n_sampled(part.federation.client_fraction, participants)
        )
        key = json.dumps([id(data), method, section_spec(part.observe), asdict(division)])
        if key not in self.observation_specs:
            found = part.observed_methods()[method]
            targets = data.choose_targets(part.observe, division)
            self.observation_specs[key] = ObservationSpec(part.observe, targets, found, part.threat)
        return self.observation_specs[key]

    def _check(
        self,
        task: Task,
        method: Method,
        defense: Entry[Defense],
        where: str,
        federation: FederationSpec | None = None,
        clients: int = 1,
    ) -> None:
        """Put everything together as training does, so that what does not fit is said before any training.

        Raises:
            ValueError: a setting of the method or what it makes of the model; names the method.
        """
        key = f"{where} {defense.label} {method!r} {federation!r} {clients}"
        if key in self.checked:
            return
        try:
            if idle := [phase for phase in method.phases(task, 0) if phase.epochs == 0]:
                raise ValueError(f"expected epochs >= 1, got {idle[0].epochs}")
            client = Client(task, method, defense.item)
            if federation is not None:  # else it is observed alone, and nothing is trained by it
                check_assembly(client, federation, clients)
        except ASSEMBLY_ERRORS as error:
            raise ValueError(f"{where}: {error or type(error).__name__}") from error
        self.checked.add(key)
