"""What `benchmarks.hyperfl.several_steps` reads off updates without a search: labels, and a hypernetwork by `peel`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fl.data
import fl.models
from attacks.base import NotApplicable
from attacks.hypernetworks.peel import HypernetPeel
from attacks.labels.recovery import recover_labels
from attacks.update.observed_update import ObservedUpdate
from benchmarks.hyperfl.peel import error
from fl.client import Client
from fl.data.partitions.dominant_classes import DominantGroups
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.network import Network
from fl.tensors import Tensors, dense, norm
from fl.types import Batch, Task, Truth
from fl.view import ServerView

Row = dict[str, Any]
SET, NETWORK, CLASSES = "fashion_mnist", "hyperfl-grey", 10
CLIENTS = 8
SIZES, UPDATES, FIRST = (1, 4, 16, 64), 20, 1000
TRAINED = (0, 1, 10)
"""Rounds of training before the label is looked for."""
LIMIT = 50.0
"""HyperFL's clipping."""
EVEN = "dealt out evenly"
PEELED: dict[str, dict[str, Any]] = {
    "1 step of all": {"steps": 1, "batch_size": None},
    "1 epoch": {"epochs": 1},
    "5 epochs": {"epochs": 5},
}
OPTIMIZERS: dict[str, dict[str, float]] = {
    "plain": {"momentum": 0.0, "weight_decay": 0.0},
    "momentum .5, decay 5e-4": {"momentum": 0.5, "weight_decay": 5e-4},
}


def clients() -> list[ClientData]:
    """HyperFL's split."""
    images = fl.data.load(SET)
    split = DominantGroups(clients=CLIENTS, train_size=600, test_size=100)(images)
    pairs = zip(split.train, split.test, strict=True)
    return [ClientData(images.train.take(own), images.test.take(tests)) for own, tests in pairs]


@dataclass(frozen=True, kw_only=True)
class Recorded(Hypernetwork):
    """A hypernetwork that keeps the gradients of what it generated, step by step.

    Attributes:
        limit: at which the gradient of all that is shared is clipped.
        kept: so far, each a vector in the order of `generates`, shortened as clipping shortens it.
    """

    limit: float
    kept: list[Tensor] = field(default_factory=list, compare=False)

    def pull_back(self, params: Tensors, grads: dict[str, Tensor], task: Task, live: Collection[str]) -> Tensors:
        """As without."""
        pulled = super().pull_back(params, grads, task, live)
        length = float(norm({name: value for name, value in pulled.items() if name != EMBEDDING}))
        self.kept.append(flat(grads, self.generates(task)) * min(1.0, self.limit / length))
        return pulled

    def mean(self, momentum: float) -> Tensor:
        """Return the mean gradient of the steps kept, weighted as momentum does; forgets them."""
        steps, total = len(self.kept), torch.zeros_like(self.kept[0])
        for i, value in enumerate(self.kept):
            total += (1 - momentum ** (steps - i)) * value
        self.kept.clear()
        return total / steps


def peeled() -> list[Row]:
    """Return the relative errors of `peel` after a whole local round, client by client; None where it has none."""
    data, rows = clients(), []
    for optimizer, settings in OPTIMIZERS.items():
        for work, length in PEELED.items():
            generator = Recorded(init="scaled", limit=LIMIT)
            method = HyperFL(lr=0.01, head_epochs=0, max_norm=LIMIT, parametrization=generator, **settings, **length)  # type: ignore[arg-type]
            task = fl.models.build(NETWORK, num_classes=CLASSES, seed=0)
            run = Federation(Client(task, method), data)
            for number in range(CLIENTS):
                view, truth = run.observe(number)
                found = off(view, truth, task, generator.mean(settings["momentum"]))
                rows.append({"optimizer": optimizer, "work": work, "image": number, **found})
    return rows


def off(view: ServerView, truth: Truth, task: Task, mean: Tensor) -> Row:
    """Errors of one client's embedding, extractor, and its gradient: the mean along the round, that at its start."""
    found = HypernetPeel().solve(view)
    if isinstance(found, NotApplicable):
        raise ValueError(f"expected the update of a hypernetwork that can be peeled, got: {found.reason}")
    names = list(truth.extractor)
    known, true = flat(found.extractor, names), flat(truth.extractor, names)
    embedding = None
    if found.embedding is not None:
        embedding = error(found.embedding.float(), dense(truth.private[EMBEDDING]))
    return {
        "extractor": error(known, true),
        "embedding": embedding,
        "mean": turned(flat(found.gradient, names), mean),
        "start": turned(flat(found.gradient, names), gradient(task, truth)),
        "verified": found.verified,
    }


def flat(values: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """These tensors as one vector."""
    return torch.cat([values[name].flatten() for name in names])


def gradient(task: Task, truth: Truth) -> Tensor:
    """Of the mean loss over all of a client's images, by its extractor at the start of the round."""
    private = {name: dense(value) for name, value in truth.private.items() if name in task.parameters}
    weights = {name: value.clone().requires_grad_() for name, value in truth.extractor.items()}
    network = Network(task.model, {**private, **weights}, task.buffers)
    loss = cross_entropy(network(truth.inputs), truth.labels)
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(weights.values()))])


def turned(found: Tensor, true: Tensor) -> float:
    """Return the relative error of a gradient at the factor that suits it best; 1 where it is no better than none."""
    factor = float(found @ true / found.norm() ** 2)
    return error(max(factor, 0.0) * found, true)


def labels() -> list[Row]:
    """Return the share of an update's labels that each rule tells, update by update."""
    method = FedAvg(lr=0.01, momentum=0.5, weight_decay=5e-4, epochs=1, batch_size=50)
    task = fl.models.build(NETWORK, num_classes=CLASSES, seed=0)
    run = Federation(Client(task, method), clients())
    test = fl.data.load(SET).test
    rows: list[Row] = []
    for number in range(max(TRAINED) + 1):
        if number in TRAINED:
            accuracy = sum(run.accuracy()) / CLIENTS
            rows += [{"rounds": number, "accuracy": accuracy, **row} for row in label_shares(run, test)]
        if number < max(TRAINED):
            run.run_round()
    return rows


def label_shares(run: Federation, test: Batch) -> Iterator[Row]:
    """At one state of the network."""
    for size in SIZES:
        for update in range(UPDATES):
            begin = FIRST + update * size
            images = test.take(torch.arange(begin, begin + size))
            for rule, guess in guesses(run, images, update):
                known = 0.0 if guess is None else overlap(guess, images.labels)
                yield {"size": size, "rule": rule, "image": update, "known": known, "refused": guess is None}


def guesses(run: Federation, images: Batch, seed: int) -> Iterator[tuple[str, Tensor | None]]:
    """What every rule says of one batch."""

    def seen(lr: float, **work: Any) -> ServerView:
        client = Client(run.client.base, FedAvg(lr=lr, **work))
        return run.observe(0, data=images, client=client)[0]

    one = seen(0.01, steps=1, batch_size=None)
    bias = next(n for n, v in one.update.items() if n.startswith(one.task.head) and len(v.shape) == 1)
    yield "signs", (dense(one.update[bias]) < 0).nonzero().flatten()
    yield "counts", recover_labels(ObservedUpdate(one))
    rest = {name: value for name, value in one.update.items() if name != bias}
    yield "counts, no bias sent", recover_labels(ObservedUpdate(replace(one, update=rest)))
    for lr in (0.01, 0.1):
        many = seen(lr, steps=4, batch_size=max(len(images) // 4, 1))
        yield f"counts after 4 steps of {lr:g}", recover_labels(ObservedUpdate(many))
    draw = torch.Generator().manual_seed(seed)
    yield EVEN, torch.randperm(CLASSES, generator=draw).repeat(-(-len(images) // CLASSES))[: len(images)]


def overlap(guess: Tensor, true: Tensor) -> float:
    """Return the share of the true labels (N,) that are among the guessed ones (M,), counted with multiplicity."""
    return (Counter(guess.tolist()) & Counter(true.tolist())).total() / len(true)


QUESTIONS: dict[str, Callable[[], list[Row]]] = {"peel": peeled, "labels": labels}
