"""A server's view as an optimization problem, alone or in a stack of equal shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attacks.gradient_matching.engine.objectives import OBJECTIVES, l2, normalize
from attacks.gradient_matching.engine.regularizers import Regularizer, total_variation
from attacks.gradient_matching.engine.search_space import PIXEL_SPACE, SearchSpace
from attacks.labels.recovery import recover_labels
from attacks.update.observed_update import ObservedUpdate, without_unsent_gradient
from fl.aggregated_view import sequential_order
from fl.client import Client
from fl.defense import ask_numbers, ask_surrogate, overrides
from fl.gradient import autograd_derivative, func_derivative
from fl.predict import predict
from fl.runtime.digests import digest
from fl.tensors import Tensors, dot, mul, rms, scale_tensors
from fl.types import Candidate, Order, frozen
from fl.view import ServerView

SCALE_FLOOR = 1e-3
"""Relative to the largest tensor's entries: those of a tensor may be rounding, and count as if they were so large."""
Variables = dict[str, Tensor]
Evaluation = Callable[[Variables], tuple[Tensor, Variables]]
"""Objectives (T,) of a stack and their gradients by variable."""
INPUTS, LABELS, PRIVATE = "inputs", "labels", "private:"
"""Names of the guessed images, in the units of the space searched, and of what stands for labels (`fl.losses`: logits
of classes, say); what a private tensor's begins with."""


def batching_key(view: ServerView) -> object:
    """Return what views must share for their problems to be solved in one batch, apart from tensors' shapes."""
    order = None if view.order is None else str(view.order)
    settings = (view.method, view.defense, view.threat, view.schedule, order, view.batch_size, view.round, view.parts)
    task = view.client.task
    held = {name: value for name, value in task.buffers.items() if name not in view.buffers}
    return (
        repr(settings),
        tuple(view.private.items()),
        str(task.model),
        task.loss,
        digest(frozen(task.model), held),  # the stack has one network, so what is no constant of a row must agree
    )


def tensor_form(constants: Any) -> object:
    """Return the form of a tree of tensors: equal for those that can be stacked."""
    leaves, tree = pytree.tree_flatten(constants)
    return str(tree), tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves)


def private_key(name: str) -> str:
    """Return the variable that stands for the private tensor `name`."""
    return PRIVATE + name


@dataclass(frozen=True)
class MatchingProblem:
    """One view, the labels the search may take as given, and what it compares.

    Attributes:
        view: what the server saw.
        labels: (N,) given or recovered, or None where they are searched for.
        objective: a name in `attacks.gradient_matching.engine.objectives.OBJECTIVES`.
        tv_weight: weight of the total variation.
        landmark_weight: weight of the squared distance at the method's landmarks.
        tv_units: whether the total variation is taken of "normalized" images or of their "pixels".
        space: what the images are made from.
        regularizers: what else the objective adds up.
        balance: how far tensors of small entries count as much as those of large ones, in [0, 1].
        earlier: the same client's earlier rounds on the same images, whose distances count alike.
    """

    view: ServerView
    labels: Tensor | None
    objective: str
    tv_weight: float = 0.0
    landmark_weight: float = 0.0
    tv_units: str = "normalized"
    space: SearchSpace = PIXEL_SPACE
    regularizers: tuple[Regularizer, ...] = ()
    balance: float = 0.0
    earlier: tuple[MatchingProblem, ...] = ()

    @cached_property
    def update(self) -> ObservedUpdate:
        """What the update is once weight decay and a known defense are accounted for."""
        return ObservedUpdate(self.view)

    @property
    def uses_surrogate(self) -> bool:
        """Whether a known defense's stand-ins lead the search: they look at what one client sent, not at a mean.

        Of a group, each client's prediction goes through the defense itself instead.
        """
        return self.view.threat.knows_defense and not self.view.parts

    @cached_property
    def observed(self) -> Tensors:
        """The update without its decay."""
        return self.update.change

    @cached_property
    def recovered_labels(self) -> Tensor | None:
        """The labels (N,) read off the classifier's update, in ascending order; None where it doesn't tell."""
        return recover_labels(self.update)

    @cached_property
    def default_order(self) -> Tensor | None:
        """The images fed (M,), batch by batch and in turn, where the true order matters and is unknown; else None."""
        view = self.view
        if view.order is not None or view.schedule is None or view.batch_size is None:
            return None
        order = sequential_order(view, view.batch_size) or ()
        batches = [b for steps in order for step in steps for b in step]
        if all(len(batch) == view.batch_size for batch in batches):
            return None
        return torch.cat(batches).to(view.device)

    def with_order(self, order: Tensor) -> MatchingProblem:
        """Return this problem with the images fed in `order` (M,), in place of `default_order`."""
        made = replace(self)
        made.__dict__.update({**self.__dict__, "constants": {**self.constants, "order": order}})
        return made

    def batch_contents(self, order: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return what an order (M,) comes to: the images of each batch, ascending."""
        return tuple(
            tuple(sorted(b.tolist())) for steps in self._split_into_batches(order) for step in steps for b in step
        )

    def _split_into_batches(self, order: Tensor) -> Order:
        """Return the images fed (M,) as batches of the schedule's sizes."""
        schedule = self.view.schedule or ()
        rest = iter(order.split([size for steps in schedule for step in steps for size in step]))
        return tuple(tuple(tuple(next(rest) for _ in step) for step in steps) for steps in schedule)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """All tensors of the problem, as one tree."""
        view, weights = self.view, self._tensor_weights()
        observed, size = normalize(_weigh_tensors(self.observed, weights))
        spread = view.task.std if self.tv_units == "normalized" else (1.0,) * len(view.task.std)
        offset, scale = (
            torch.tensor(x, dtype=view.dtype, device=view.device).view(-1, 1, 1) for x in self.space.units(view.task)
        )
        return {
            "shared": view.shared,
            "update": view.update,
            "observed": observed,
            "size": size,
            "marks": self._landmark_update(observed, size),
            "received": view.received,
            "buffers": view.buffers,
            "draws": view.draws,
            "order": self.default_order,
            "labels": self.labels,
            "weights": weights,
            "offset": offset,
            "scale": scale,
            "spread": torch.tensor(spread, dtype=view.dtype, device=view.device),
            "terms": tuple(term.constants(view) for term in self.regularizers),
            "earlier": tuple(past.constants for past in self.earlier),
        }

    def _tensor_weights(self) -> dict[str, Tensor] | None:
        """Return factors of every tensor on both sides, by a known defense's trust and the balance.

        It is None where all are 1.
        """
        view, observed = self.view, self.observed
        known: dict[str, float] = dict.fromkeys(observed, 1.0)
        trusted = view.threat.knows_defense and overrides(view.defense, "tensor_trust")
        if trusted:
            known |= ask_numbers(view.defense, "tensor_trust", view.update)
        if self.balance:
            sizes = {name: rms(value) for name, value in normalize(observed)[0].items()}
            floor = SCALE_FLOOR * max(sizes.values())
            known = {n: known[n] * (floor / max(size, floor)) ** self.balance for n, size in sizes.items()}
        if not trusted and not self.balance:
            return None
        return {n: torch.tensor(known[n], dtype=view.dtype, device=view.device) for n in observed}

    def _landmark_update(self, observed: Tensors, size: Tensor) -> tuple[Tensors, Tensor] | None:
        """Return the landmarks' part of the update, of norm 1, and the norm it had."""
        marks = {n: observed[n] for n in self.view.method.landmarks() if n in observed}
        if not marks or not self.landmark_weight:
            return None
        unit, share = normalize(marks)
        return unit, share * size

    @cached_property
    def key(self) -> object:
        """Equal for problems that can be solved in one stack."""
        return (
            batching_key(self.view),
            tensor_form(self.constants),
            self.objective,
            self.tv_weight,
            self.landmark_weight,
            self.tv_units,
            self.space,
            self.regularizers,
            self.balance,
            tuple(past.key for past in self.earlier),
        )

    def images_of(self, values: Tensor) -> Tensor:
        """Return the images (N, C, H, W) that the variable `INPUTS` stands for, in [0, 1] but for what no box holds."""
        return self._pixels(values, self.constants)

    def _pixels(self, values: Tensor, constants: dict[str, Any]) -> Tensor:
        return self.space.decode(values * constants["scale"] + constants["offset"])

    def cosine_misfit(self, variables: Variables) -> float:
        """Return 1 - cos between the update that one guess predicts and the one observed, in [0, 2]; no prior counts.

        Not a number where the prediction is none.
        """
        constants = {**self.constants, "marks": None}
        bare = replace(self, objective="cosine")
        with torch.enable_grad():  # the prediction is a gradient itself
            candidate = self._candidate(variables, constants)
            return float(bare._distance(candidate, constants, self.view.client, vmapped=False).detach())

    def _candidate(self, variables: Variables, constants: dict[str, Any]) -> Candidate:
        """Return one guess of what the client fed and kept."""
        labels = self.view.task.loss.relax(variables[LABELS]) if LABELS in variables else constants["labels"]
        private: Tensors = {name: variables[private_key(name)] for name in self.view.private}
        return Candidate(self._pixels(variables[INPUTS], constants), labels, private)

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return the objective of one guess: distance of the updates, plus the prior.

        Args:
            variables: the guess, by name.
            constants: tensors of the problem, perhaps of another in the batch.
            client: whose training is predicted.
            vmapped: whether this runs under `torch.vmap`.
        """
        view = self._view_with(constants)
        candidate = self._candidate(variables, constants)
        pixels = candidate.inputs
        value = self._distance(candidate, constants, client, vmapped=vmapped)
        if self.earlier:
            for past, mine in zip(self.earlier, constants["earlier"], strict=True):
                value = value + past._distance(candidate, mine, past.view.client, vmapped=vmapped)
            value = value / (1 + len(self.earlier))
        if self.tv_weight:
            value = value + self.tv_weight * total_variation(pixels, constants["spread"])
        for term, mine in zip(self.regularizers, constants["terms"], strict=True):
            value = value + term(view, candidate, client, mine)
        return value

    def _view_with(self, constants: dict[str, Any]) -> ServerView:
        """Return the view with the tensors of `constants`, which may be those of another problem in the stack."""
        names = ("shared", "update", "received", "buffers", "draws")
        return replace(self.view, **{name: constants[name] for name in names})

    def _distance(self, candidate: Candidate, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return how far what a guess predicts is from what was observed."""
        view = self._view_with(constants)
        derivative = func_derivative if vmapped else autograd_derivative
        if constants["order"] is not None:
            candidate = replace(candidate, order=self._split_into_batches(constants["order"]))
        predicted = predict(
            view,
            candidate,
            derivative=derivative,
            client=client,
            defended=not self.uses_surrogate,
            use_search_gradient=self.uses_surrogate,
        )
        if self.uses_surrogate:
            predicted = ask_surrogate(view.defense, predicted, view.update)
        predicted = _weigh_tensors(self.update.without_decay(predicted, view), constants["weights"])
        if self.uses_surrogate:
            predicted = without_unsent_gradient(view.defense, predicted, constants["observed"])
        if view.scale_unknown:
            predicted = scale_tensors(predicted, _best_factor(constants["observed"], predicted) * constants["size"])
        value = OBJECTIVES[self.objective](predicted, constants["observed"], constants["size"])
        if constants["marks"] is not None:
            marks, share = constants["marks"]
            value = value + self.landmark_weight * l2(predicted, marks, share)
        return value


def _best_factor(observed: Tensors, predicted: Tensors) -> Tensor:
    """Return the best factor for this guess, so that no distance depends on it.

    Where the guess points away, it makes the sizes equal.

    No factor is negative; the best would be 0 there, and nothing would tell the search where to turn. `observed` is of
    norm 1.
    """
    along, size = dot(observed, predicted), dot(predicted, predicted).clamp_min(1e-38)
    return torch.where(along > 0, along / size, size.rsqrt())


def _weigh_tensors(values: Tensors, weights: dict[str, Tensor] | None) -> Tensors:
    return values if weights is None else {name: mul(value, weights[name]) for name, value in values.items()}


def unsearchable_reason(view: ServerView) -> str | None:
    """Return why something private can't be searched for, or None."""
    model = view.client.task.model
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}
    for private in (view.private, *(part.private for part in view.parts)):
        for name in private:
            owner, _, statistic = name.rpartition(".")
            if owner in norms and statistic in {"running_mean", "running_var"}:
                return f"{name!r} is private, and torch takes no derivative by what batch norm at rest normalizes with"
    return None


def initial_private(name: str, size: torch.Size, draw: torch.Generator) -> Tensor:
    """Return a start for a private tensor: zero for memory, else as a layer is initialized (1 / sqrt of the fan-in).

    Args:
        name: of the tensor.
        size: its shape.
        draw: of random starts.
    """
    if "memory" in name.split("/"):
        return torch.zeros(size)
    scale = size[1:].numel() ** -0.5 if len(size) > 1 else 1.0
    return torch.randn(size, generator=draw) * scale
