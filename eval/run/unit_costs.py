"""What trainings and attacks cost on one core: counts, from the settings, times unit costs that were measured.

Nothing is computed and no image read for it. A client's steps are those of its method's phases; each is a number of
images times the layers' multiplications, and what a method does beyond a gradient of FedAvg's is a factor or a term of
its own: a search through a hypernetwork, one classifier for every image, what a server distills.

Unit costs were fitted to the 703 cells of `docs/results/cells` that a CPU computed, and for methods without any there
to single steps of theirs. Of these cells 78 % come out within a factor of two, of trainings 84 %, as
`tests/eval/reproduce/test_estimates.py` checks. Seconds of two cells of one kind differ by up to ten times there, as
other work ran beside some of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import ceil, prod, sqrt
from typing import Any

import torch
from torch import nn

from attacks.base import Attack, Chain
from defenses import Defense, defenses
from eval.experiment.serialization import attack_spec
from eval.experiment.spec import FederationSpec
from eval.io.errors import RUN_ERRORS
from fl.federation import n_sampled
from fl.method import Method, methods
from fl.methods.fedavg import FedAvg
from fl.methods.hfedf import HFedF
from fl.methods.hyperfedzero import HyperFedZero
from fl.methods.pfedhn import PFedHN
from fl.models import Network
from fl.models.hyperfedzero import build_extractor
from fl.models.hypernetworks.chunked import fitting_chunk
from fl.types import Phase, Scope, Task

MACS_A_SECOND = 2.5e10
"""Multiplications and additions of one core in layers of `CHANNELS` channels."""
CHANNELS = 24
"""The root of a layer's channels before it times those behind; with more or fewer it is faster or slower."""
SLOWEST, FASTEST = 0.5, 4.0
"""Bounds of what that factor comes to."""
BACKWARD = 3.0
"""A pass back and forth, in passes forth."""
SECOND_ORDER = 12.0
"""A step of a search, which differentiates a gradient, in passes forth."""
TRAINING_SECONDS = 0.4
"""Seconds in which a training is set up and written, beside its work."""
ATTACK_SECONDS = 0.05
"""The same for an attack."""
CLIENT_SECONDS = 5e-3
"""Seconds of a client's round beside its steps."""
STEP_SECONDS = 2e-4
"""Seconds of a training step beside products, for each layer."""
PARAMETER_SECONDS = 5e-9
"""Seconds for each number of the network, in a training step and in the server's mean of an update."""
ITERATION_SECONDS = 1.9e-3
"""Seconds of a search's iteration for a stack of updates, for each layer and step of the client."""
STACK = 16
"""Updates that are searched for together."""
UPDATE_SECONDS = 2.4e-3
"""Further seconds of an iteration for each update and step."""
GENERATED_MACS_A_SECOND = 2e10
"""Products a second in hypernetworks that make a network for every image."""
HYPERNETWORK_SECONDS = 1.2e-8
"""Seconds of a server's hypernetwork in a round, for each of its numbers and each client: pull-back and step."""
ALIGNED_FACTOR = 2.0
"""The same of hFedF, whose server also compares the clients' gradients."""
GENERATOR_SECONDS = 2e-3
"""Seconds of a step of FedGen's generator."""
STEP_FACTORS: Mapping[str, float] = {
    "centaur": 1.9,
    "ditto": 2.0,
    "dp-fedavg": 2.0,
    "dp-hyperfl": 2.9,
    "fedgen": 1.5,
    "fedjets": 2.4,
    "fedsam": 2.0,
    "fedsr": 1.3,
    "hyperfednet": 0.8,
    "hyperfl": 1.5,
    "hyperfl-lpm": 1.5,
    "moon": 1.3,
    "per-fedavg": 1.3,
    "pfedme": 4.5,
    "ppsgd": 1.8,
}
"""A step of a client, in steps of FedAvg on as many images of the same network; others count as FedAvg."""
PRIVATE_FACTORS: Mapping[str, float] = {"dp-sgd": 2.0}
"""A step of a client under a defense, likewise."""
SEARCH_FACTORS: Mapping[tuple[str, str], float] = {
    ("dp-hyperfl", "*"): 4.0,
    ("hyperfl", "joint"): 1.5,
    ("hyperfl", "rog"): 4.0,
    ("*", "latent-payload"): 0.07,
}
"""An iteration of a search by method and attack, in those of the same attack on FedAvg; `*` is any."""
EXACT_SECONDS: Mapping[str, float] = {
    "april": 10.0,
    "backsolve": 60.0,
    "peel": 0.8,
    "spear": 30.0,
    **dict.fromkeys(("adaptive-step", "analytic", "filters", "first-step", "headless"), 0.03),
    **dict.fromkeys(("rconv", "rgap", "surrogate", "tokens", "unembed"), 0.03),
}
"""An update of one step under an attack that does not search in iterations; of others nobody can tell."""
CASCADE_SECONDS = 8.4e-3
"""An update under `cascade`, for each number of the image."""
CLASSES = 10
"""Classes of the classifier of a network that is counted without its data."""
PUBLIC_IMAGES = 5_000
"""Images that a server distills on where the method does not limit them."""


@dataclass(frozen=True, kw_only=True)
class NetworkWork:
    """What a network costs.

    Attributes:
        seconds: of one image's way through it, on one core.
        layers: that multiply.
        parameters: numbers that are trained, by name; without storage.
        inputs: numbers of an image.
    """

    seconds: float
    layers: int
    parameters: Mapping[str, torch.Tensor]
    inputs: int

    @property
    def numbers(self) -> int:
        """How many numbers are trained."""
        return sum(value.numel() for value in self.parameters.values())


@dataclass(frozen=True, kw_only=True)
class ClientImages:
    """How many images clients have, as far as costs depend on it.

    Attributes:
        clients: that take part.
        train: training images of a client, in the mean.
        test: test images likewise.
        held_out: clients that never take part, which are scored on all their images.
        global_test: images on which every client's model is scored, too.
    """

    clients: int
    train: float
    test: float
    held_out: int = 0
    global_test: float = 0.0


def template_task(model: Network) -> Task | None:
    """Return a network without storage or values, which computes shapes alone; None where it can't be built."""
    found = _template(model)
    return None if found is None else found[0]


def network_work(model: Network) -> NetworkWork | None:
    """Return what a network costs; None where that is not known."""
    found = _template(model)
    return None if found is None else found[1]


@cache
def _template(model: Network) -> tuple[Task, NetworkWork] | None:
    """Return both, by one image's way through the network; its classifier has ten classes."""
    try:
        with torch.device("meta"), torch.no_grad():
            body = model.body()
            layers, features = _pass_through(body, model.input_shape)
            whole = nn.Sequential()
            whole.add_module("body", body)
            whole.add_module("head", nn.Linear(features.shape[-1], CLASSES, bias=model.head_bias))
            head, _ = _pass_through(whole.get_submodule("head"), features.shape[1:])
            task = Task(whole, model.input_shape, CLASSES, "head.")
    except RUN_ERRORS:  # weights that are not there, or a network that can't be called by itself
        return None
    return task, _work([*layers, *head], task)


def work_of(task: Task) -> NetworkWork | None:
    """Return what a task's network costs, by one image's way through it; None where it has no layer that multiplies.

    Convolutions and linear layers are counted.
    """
    try:
        layers, _ = _pass_through(copy.deepcopy(task.model).to("meta"), task.input_shape)
    except RUN_ERRORS:  # one of other inputs, say
        return None
    return _work(layers, task) if layers else None


def _work(layers: Sequence[float], task: Task) -> NetworkWork:
    inputs = prod(task.input_shape)
    return NetworkWork(seconds=sum(layers), layers=len(layers), parameters=task.parameters, inputs=inputs)


def _pass_through(model: nn.Module, shape: Sequence[int]) -> tuple[list[float], torch.Tensor]:
    """Return the seconds of every layer that multiplies, and what comes out, of one image; there is no storage."""
    seconds: list[float] = []

    def count(module: nn.Module, _: Any, out: Any) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        channels = sqrt(prod(weight.shape[:2]))
        rate = MACS_A_SECOND * min(max(channels / CHANNELS, SLOWEST), FASTEST)
        seconds.append(float(out.numel()) * weight[0].numel() / rate)

    counted = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)]
    hooks = [module.register_forward_hook(count) for module in counted]
    kind = next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)
    with torch.no_grad():
        out = model.eval()(torch.zeros(1, *shape, device="meta", dtype=kind))
    for hook in hooks:
        hook.remove()
    return seconds, out


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """A training, as far as its cost depends on it.

    Attributes:
        task: the network, perhaps without storage.
        network: what it costs.
        federation: for how long it is trained, and how often it is scored.
        method: whose steps they are.
        defense: of the clients.
        images: of the clients.
    """

    task: Task
    network: NetworkWork
    federation: FederationSpec
    method: Method
    defense: Defense
    images: ClientImages


def training_seconds(work: TrainingWork) -> float:
    """Return what a training takes on one core, with its scores."""
    federation, images, method = work.federation, work.images, work.method
    asked = n_sampled(federation.client_fraction, images.clients)
    factor = PRIVATE_FACTORS.get(defenses.spec(work.defense)["name"], 1.0)
    local = CLIENT_SECONDS + factor * local_seconds(work, method, images.train)
    server = asked * work.network.numbers * PARAMETER_SECONDS + _server_seconds(work, asked)
    scored = ceil(federation.rounds / federation.evaluate_every) + 1
    return TRAINING_SECONDS + federation.rounds * (asked * local + server) + scored * _scoring_seconds(work)


def local_seconds(work: TrainingWork, method: Method, images: float, epochs: int | None = None) -> float:
    """Return what a client's steps in a round take.

    Args:
        work: the training.
        method: whose steps they are: that of the training, or as it is in an observed round.
        images: of the client.
        epochs: of fine-tuning; None is a round's training.
    """
    first = method.first_round
    phases = method.phases(work.task, first) if epochs is None else method.fine_tuning_phases(work.task, epochs)
    network, total = work.network, 0.0
    factor = STEP_FACTORS.get(getattr(method, "name", ""), 1.0)
    for phase, size, steps in _steps(phases, images):
        forth = size * phase.batches_per_step * network.seconds
        generated = size * generated_macs(method, work.task) / GENERATED_MACS_A_SECOND
        step = factor * (BACKWARD * (forth + generated) + STEP_SECONDS * network.layers)
        total += steps * (step + network.numbers * PARAMETER_SECONDS)
    return total


def _steps(phases: Iterable[Phase], images: float) -> Iterable[tuple[Phase, float, float]]:
    """Yield phases with the images of a step and how many steps there are."""
    for phase in phases:
        size = min(phase.batch_size or images, images)
        if size:
            yield phase, size, float(phase.steps or (phase.epochs or 0) * ceil(images / size))


def generated_macs(method: Method, task: Task) -> float:
    """Return multiplications that make a network for one image; 0 for all methods but HyperFedZero."""
    if not isinstance(method, HyperFedZero) or method.condition != "parameters":
        return 0.0
    return _chunked_macs(replace(method, lr=1.0, steps=1, epochs=None), task)


@cache
def _chunked_macs(method: HyperFedZero, task: Task) -> float:
    total = sum(value.numel() for value in task.parameters.values())
    with torch.device("meta"):
        extractor = build_extractor(method.extractor, task.input_shape, method.embedding)
    rest = total - 2 * sum(value.numel() for value in extractor.parameters())  # the noise network is as large
    sizes = (method.embedding, total, method.chunk_embedding, method.hidden)
    chunk = method.chunk or fitting_chunk(rest, *sizes)
    return float(ceil(total / chunk) * sum(before * after for before, after in pairwise((*method.hidden, chunk))))


def _server_seconds(work: TrainingWork, asked: int) -> float:
    """Return what the server's own rule takes in a round, beside the mean of what arrived."""
    settings, total = methods.spec(work.method), 0.0
    if isinstance(work.method, PFedHN | HFedF):
        made = work.method.generator(work.task, work.images.clients)
        each = HYPERNETWORK_SECONDS * (ALIGNED_FACTOR if isinstance(work.method, HFedF) else 1.0)
        total += asked * each * sum(shape.numel() for shape in made.shapes.values()) * made.hidden[-1]
    batch, forth = float(settings.get("server_batch") or 0), work.network.seconds
    if settings["name"] == "fedgen":
        total += settings["server_steps"] * GENERATOR_SECONDS
    elif batch:  # it learns from images of its own what clients' networks answer
        steps = settings.get("server_steps")
        if steps is None:
            steps = settings["server_epochs"] * ceil(float(settings.get("images") or PUBLIC_IMAGES) / batch)
        teachers = asked + float(settings.get("drawn_models", 0))
        step = batch * forth * (BACKWARD + (teachers if settings["name"] == "feddf" else 0.0))
        step += work.network.numbers * PARAMETER_SECONDS * (asked if settings["name"] == "fedlaw" else 1)
        total += steps * (step + STEP_SECONDS * work.network.layers)
    return total


def _scoring_seconds(work: TrainingWork) -> float:
    """Return what it takes to score all clients once."""
    images, forth = work.images, work.network.seconds
    forth += generated_macs(work.method, work.task) / GENERATED_MACS_A_SECOND
    total = (images.clients * images.test + images.held_out * (images.train + images.test)) * forth
    total += images.global_test * forth * (images.clients if _keeps_own_model(work) else 1)
    if epochs := work.federation.fine_tune_epochs:
        tuned = local_seconds(work, work.method.fine_tuning_method(), images.train, epochs)
        total += (images.clients + images.held_out) * (CLIENT_SECONDS + tuned + images.test * forth)
    if (adapting := work.method.adaptation_method()) is not None:
        total += images.clients * local_seconds(work, adapting, images.train)
    return total


def _keeps_own_model(work: TrainingWork) -> bool:
    """Return whether clients predict by models of their own, so that each is scored on the images of all."""
    method, names = work.method, work.task.parameters
    private = any(method.scope(name, work.task) is not Scope.SHARED for name in names)
    return private or method.personal_method() is not None or type(method).serve is not Method.serve


def attack_seconds(work: TrainingWork, attack: Attack, method: Method, updates: int, batch: float) -> float | None:
    """Return what an attack takes on one core; None where nobody can tell, of one that is not this package's.

    Args:
        work: the training that is attacked.
        attack: which.
        method: of the observed round, whose steps a search makes again.
        updates: how many are attacked.
        batch: images in each.
    """
    phases = method.phases(work.task, method.first_round)
    steps = [(size * phase.batches_per_step, count) for phase, size, count in _steps(phases, batch)]
    parts, by = list[float | None](), method
    while isinstance(attack, Chain):
        parts.append(_part_seconds(work, attack.first, by, updates, steps))
        attack, by = attack.then, FedAvg()  # an update of which is what remains
    parts.append(_part_seconds(work, attack, by, updates, steps))
    known = [seconds for seconds in parts if seconds is not None]
    return ATTACK_SECONDS + sum(known) if len(known) == len(parts) else None


def _part_seconds(
    work: TrainingWork, attack: Attack, method: Method, updates: int, steps: Sequence[tuple[float, float]]
) -> float | None:
    """Return what one attack of a chain takes, given images and number of the client's steps, phase by phase."""
    settings, trained_by = attack_spec(attack), getattr(method, "name", "")
    name, iterations = settings["name"], search_iterations(settings)
    count = max(sum(number for _, number in steps), 1.0)
    if name == "cascade":
        return updates * CASCADE_SECONDS * work.network.inputs
    if iterations is None:
        return updates * count * EXACT_SECONDS[name] if name in EXACT_SECONDS else None
    forth = work.network.seconds + generated_macs(method, work.task) / GENERATED_MACS_A_SECOND
    images = sum(size * number for size, number in steps)
    each = updates * (count * UPDATE_SECONDS + images * SECOND_ORDER * forth)
    each += ceil(updates / STACK) * count * ITERATION_SECONDS * work.network.layers
    keys = (trained_by, name), (trained_by, "*"), ("*", name)
    return iterations * each * next((SEARCH_FACTORS[key] for key in keys if key in SEARCH_FACTORS), 1.0)


def search_iterations(settings: object) -> int | None:
    """Return the iterations of a search, of all its trials together; None where it is none.

    Args:
        settings: of an attack, as `eval.experiment.serialization.attack_spec` has them.
    """
    if not isinstance(settings, dict):
        return None
    if isinstance(own := settings.get("iterations"), int):
        trials = [value for key in ("trials", "restarts") if isinstance(value := settings.get(key), int)]
        return own * prod(trials)
    inner: Iterable[int | None] = map(search_iterations, settings.values())
    return max((count for count in inner if count is not None), default=None)


def gradient_seconds(network: NetworkWork, images: float) -> float:
    """Return what one gradient of a network takes: what can be timed, to tell how fast a machine is."""
    return images * BACKWARD * network.seconds + STEP_SECONDS * network.layers
