"""The peel: a hypernetwork's update gives embedding, extractor and the extractor's gradient away, without a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, Result, ViewRewriter, attacks
from attacks.hypernetworks.hypernet_view import HypernetView, parse_hypernet_view
from attacks.hypernetworks.rank_one_equations import HypernetUpdate
from attacks.hypernetworks.route_evidence import left_by_routes, route_disagreement
from attacks.rewriting.headless import Headless
from attacks.update.earlier_rounds import with_history
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, freeze_untrained, training_phases
from attacks.update.view_below_classifier import LayerSignal
from fl.defense import Defense
from fl.method import Method
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.models.building_blocks.adapters import ConvAdapter
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, TRUNK_BIAS
from fl.privacy.private_method import PrivateMethod
from fl.tensors import Tensors, dense, norm
from fl.types import Scope
from fl.view import ServerView

MAX_RESIDUAL = 1e-2
"""Equations that the update satisfies up to this share of itself confirm their solution."""

INACTIVE = (
    "no gradient reached the hypernetwork: its update is its decay and rounding, as of images that the network is "
    "certain of"
)
PEELED = "peeled"
"""The payload of a rewritten view that holds what the peel recovered: read off the update, not sent by the server."""


@dataclass(frozen=True)
class SolvedHypernet:
    """A view whose hypernetwork is solved for: what it generated, and the gradient that came back.

    Attributes:
        hypernet_view: the view.
        hidden: hidden activations (hidden,), float64.
        embedding: (embedding,) float64, or None where the update says nothing of it.
        route: which layer gave the activations: "trunk", "heads", or "biases" if no unit was active.
        residual: what the equations of that route leave of the update, relative to it; for "biases" how far, relative
            to them, the extractor may be off by activations too small to be told from rounding. Where equations are too
            few to leave anything, what those of the other layer leave. There, and where the defense is unknown, no less
            than the relative distance of the activations that both layers give.
        complete: whether every number of the solution shows in the update: a known defense may have cut some.
    """

    hypernet_view: HypernetView
    hidden: Tensor
    embedding: Tensor | None
    route: str
    residual: float
    complete: bool = True

    @property
    def view(self) -> ServerView:
        """The server's."""
        return self.hypernet_view.view

    @property
    def update(self) -> HypernetUpdate:
        """The hypernetwork's equations."""
        return self.hypernet_view.update

    @cached_property
    def extractor(self) -> dict[str, Tensor]:
        """The generated weights at the start of the round, by the network's names."""
        return self._in_shape(self.update.extractor(self.hidden))

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The weights' gradient times step size (summed over the steps, with momentum) and clip factor."""
        return self._in_shape(self.update.gradient(self.hidden))

    @property
    def verified(self) -> bool:
        """Whether the peel confirms itself without the truth."""
        return self.residual < MAX_RESIDUAL and self.complete

    def private(self) -> Tensors:
        """Return what was recovered, as in `Reconstruction.private`."""
        found: Tensors = {f"extractor/{n}": w for n, w in self.extractor.items()}
        if self.embedding is not None:
            found[EMBEDDING] = self.embedding.to(self.view.dtype)
        return found

    def with_layer_inputs(self) -> Tensors:
        """Return `private()` and, where one step without noise tells them, the inputs of layers (`layer_inputs`)."""
        if self.hypernet_view.steps != 1 or deviation_from_loss_gradient(self.view) is not None:
            return self.private()
        return {**self.private(), **layer_inputs(self.view, self.extractor, self.gradient)}

    def _in_shape(self, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        like = self.view.client.task.parameters
        return {n: value.to(self.view.dtype).view(like[n].shape) for n, value in flat.items()}


@attacks.register("peel")
@dataclass(frozen=True, kw_only=True)
class HypernetPeel(ViewRewriter):
    """Reads embedding, extractor and its gradient off the update of a hypernetwork that sees one embedding.

    A linear layer with one input x and bias sends (delta x^T, delta), so x = dW^T db / |db|^2. HyperFL's hypernetwork
    is such layers throughout, and keeping embedding and classifier private does not change that. With weight decay
    taken off (it is known), up to the common factor of step size and clipping:

    - trunk: v = dW0^T db0 / |db0|^2, then the server evaluates its own hypernetwork: theta_k = W_k a + b_k with
      a = relu(W0 v + b0). Exact for one step while one hidden unit is active, with or without head biases.
    - heads: db_k is the extractor's gradient, and a = sum_k dW_k^T db_k / sum_k |db_k|^2; without head biases, a is
      the leading singular vector of the dW_k, and db0 gives its length.
    - with no unit active theta_k = b_k, which the server holds; the embedding then does nothing and can't be read.
      Whether that is so is decided by how large an activation could hide in the rounding of the update.

    Of an update that a known defense has pruned, the fits take the entries that were sent.

    Of a network with generated adapters (hyperfl-lpm) it gives these and their gradient: the rest is known to all. In
    one step it also reads what layers were given (`attacks.hypernetworks.peel`).

    Noise that a method adds to the generated weights' gradient (dp-hyperfl) leaves all of that exact: what is pulled
    back through the hypernetwork is an outer product, whatever it is made of. Only the gradient that comes out has it.

    Over several steps both are weighted means over the round, and the fits' residuals say how far to trust them.
    As a rewrite, the view becomes that of the network itself: extractor shared, classifier private (`peel+ig`).

    Threat model: an honest-but-curious server that sees one client's update and knows its local training (step
    size, decay); embedding, classifier, images and labels are the client's own.

    Attributes:
        route: "trunk" or "heads", or "auto" for the one whose equations fit better.
        classifier: "free" cuts the unknown classifier off as well (see `headless`; one step on one image), "joint"
            leaves it to the next attack, "auto" cuts it off where that is possible.
    """

    plain: ClassVar[str] = "computes the secret code and the hidden weights from the update, without guessing."

    route: Literal["auto", "trunk", "heads"] = "auto"
    classifier: Literal["auto", "free", "joint"] = "auto"

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return the embedding and extractor, without images."""
        peeled = self.solve(view)
        if isinstance(peeled, NotApplicable):
            return peeled
        return Reconstruction(inputs=None, private=peeled.with_layer_inputs(), verified=peeled.verified)

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of the generated network, its classifier private or cut off.

        Where it is cut off, the view has earlier rounds.
        """
        easier = self._rewrite(view)
        return with_history(view, easier, self._rewrite) if isinstance(easier, ServerView) else easier

    def _rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        peeled = self.solve(view)
        if isinstance(peeled, NotApplicable):
            return peeled
        plain = network_view(peeled)
        if isinstance(plain, NotApplicable):
            return plain
        cut = plain if self.classifier == "joint" else Headless().rewrite(plain)
        chosen = plain if isinstance(cut, NotApplicable) and self.classifier == "auto" else cut
        if isinstance(chosen, NotApplicable):
            return chosen
        return replace(chosen, received={**chosen.received, PEELED: peeled.with_layer_inputs()})

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result, with the recovered embedding and extractor."""
        if isinstance(rewritten.method, LayerSignal):
            result = Headless().lift_result(view, rewritten, result)
        return replace(result, private={**result.private, **rewritten.received[PEELED]})

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result as it is.

        Where sizes between tensors are open, `route_disagreement` has asked both layers.
        """
        return result

    def solve(self, view: ServerView) -> SolvedHypernet | NotApplicable:
        """Return activations, extractor and its gradient, or why they can't be had."""
        hypernet = parse_hypernet_view(view)
        return hypernet if isinstance(hypernet, NotApplicable) else self._solve(hypernet)

    def _solve(self, hypernet: HypernetView) -> SolvedHypernet | NotApplicable:
        update = hypernet.update
        embedding = None if update.is_trunk_inactive else update.embedding()
        drowned = embedding is None and (update.are_biases_inactive if update.bias else update.are_heads_inactive)
        if drowned and update.are_heads_inactive:
            return NotApplicable(INACTIVE)
        if embedding is None and update.are_heads_inactive:
            nothing = torch.zeros_like(dense(update.change[TRUNK_BIAS]))
            return SolvedHypernet(hypernet, nothing, None, "biases", update.rounding_bound())
        if embedding is None and (self.route == "trunk" or not update.bias):
            return NotApplicable("the first layer did not move, and this route reads it")
        heads = update.hidden_from_head_gradients()
        usable = bool(heads.any())
        apart = 0.0 if hypernet.view.threat.knows_sizes else route_disagreement(update, embedding, heads)
        if (
            embedding is not None
            and usable
            and hypernet.steps == 1
            and self.route == "auto"
            and update.sent is None
            and apart < MAX_RESIDUAL
        ):
            embedding, heads = update.fuse_trunk_and_heads(embedding, heads)
        residual = math.hypot(update.heads_residual(heads), update.length_residual(heads))
        trunk, misfit = torch.zeros_like(heads), 1.0
        if embedding is not None:
            trunk, misfit = update.hidden(embedding), update.trunk_residual(embedding)
        trunk_left, heads_left = left_by_routes(hypernet, embedding, heads, (misfit, residual))
        if drowned and not (usable and residual < 1):  # of outer products the factors may be had all the same
            return NotApplicable(INACTIVE)
        if embedding is not None and (
            self.route == "trunk" or (self.route == "auto" and misfit <= residual and bool(trunk.any()))
        ):
            return SolvedHypernet(
                hypernet, trunk, embedding, "trunk", max(trunk_left, apart), update.is_complete("trunk")
            )
        if not usable:
            return NotApplicable("the heads' equations have no solution: what they pull back runs against db0")
        complete = update.is_complete("heads") and (embedding is None or update.is_complete("trunk"))
        return SolvedHypernet(hypernet, heads, embedding, "heads", max(heads_left, apart), complete)


def network_view(peeled: SolvedHypernet) -> ServerView | NotApplicable:
    """Return the view of the generated network, its classifier private unless it is shared."""
    view, hypernet = peeled.view, peeled.hypernet_view
    if not view.method.minimizes_task_loss(view.client.task, view.round):
        return NotApplicable(f"{view.method.name} has a loss of its own that a plain view does not have")
    names = view.client.task.parameters
    direct = [n for n in view.shared if n in names]  # a shared classifier
    if direct and hypernet.steps != 1:
        return NotApplicable("a shared classifier moves at another rate than the generated weights: one step only")
    noisy = deviation_from_loss_gradient(view) is not None
    if noisy and any(view.method.scope(n, view.client.task) is Scope.PRIVATE for n in hypernet.moving_names(names)):
        return NotApplicable("each image's gradient is clipped together with that of the private classifier")
    method, update = _one_step_rule(peeled, direct) if hypernet.steps == 1 else _several_steps_rule(peeled)
    kept = [n for n in view.private if n in names or n in view.client.task.buffers]
    private = {n: view.private[n] for n in kept if method.scope(n, view.client.task) is Scope.PRIVATE}
    start = view.private_init if len(training_phases(view)[0]) == 1 else None  # else the classifier has moved on before
    part = slice(hypernet.phase, hypernet.phase + 1)
    return replace(
        view,
        task=freeze_untrained(view),
        method=method,
        defense=view.defense.with_unknown_scale(),
        shared={**peeled.extractor, **{n: view.shared[n] for n in direct}},
        update=update,
        scale_unknown=hypernet.steps == 1 and _may_be_clipped(hypernet),
        private=private,
        private_init=None if start is None else {n: v for n, v in start.items() if n in private},
        schedule=None if view.schedule is None else view.schedule[part],
        order=None if view.order is None else view.order[part],
        draws=view.draws[part] if noisy and view.draws is not None else None,  # of a private method: its noise
        received={},
        history=(),
    )


def _may_be_clipped(hypernet: HypernetView) -> bool:
    """Return whether clipping may have shortened the one step: not where what came is shorter than the bound."""
    group, view, phase = hypernet.group, hypernet.view, hypernet.phases[hypernet.phase]
    if group.max_norm is None:
        return False
    if type(view.client.defense) is not Defense or any(group.covers(name) for name in view.private):
        return True  # a defense may have shortened it, or what is private made up for the rest
    length = norm({name: value for name, value in hypernet.change.items() if group.covers(name)})
    return float(length) >= 0.999 * group.max_norm * phase.first_step_size(group)


def _one_step_rule(peeled: SolvedHypernet, direct: list[str]) -> tuple[Method, Tensors]:
    """Return the gradient itself: a step of size 1 without momentum, decay and clipping."""
    hypernet, view = peeled.hypernet_view, peeled.view
    phase = hypernet.phases[hypernet.phase]
    gradient: Tensors = {n: g / phase.first_step_size(hypernet.group) for n, g in peeled.gradient.items()}
    groups = phase.assign(dict.fromkeys(direct))
    gradient.update({n: hypernet.change[n] * (1 / phase.first_step_size(groups[n])) for n in groups})
    settings = {"lr": 1.0, "steps": 1, "batch_size": None, "momentum": 0.0, "weight_decay": 0.0}
    return _network_method(view.method, FedAvg if direct else FedPer, settings), gradient


def _network_method(method: Method, kind: type[FedAvg], settings: dict[str, Any]) -> Method:
    """Return a method of that kind on the network itself, with the clipping and noise of a private method."""
    if not isinstance(method, PrivateMethod) or method.follows_loss_gradient(None):
        return kind(**settings, train_mode=method.train_mode)
    ours = {field.name for field in fields(PrivateMethod)} - {"parametrization", "epochs", "steps"}
    kept = {**settings, **{name: getattr(method, name) for name in ours}}  # the noise, and what the sum is divided by
    return DPFedAvg(**kept) if kind is FedAvg else Centaur(**{**kept, "head_epochs": 0})


def _several_steps_rule(peeled: SolvedHypernet) -> tuple[Method, Tensors]:
    """Return the method that trains the extractor itself as the client did, classifier at rest, and its update.

    With the activations at rest, W_k and b_k together move theta_k = W_k a + b_k by |a|^2 + 1 times what g_k moves
    b_k: that is the step size of plain training, and its inverse square root scales the norm that gradients are
    clipped at.
    """
    hypernet, view = peeled.hypernet_view, peeled.view
    phase, group = hypernet.phases[hypernet.phase], hypernet.group
    gain = float(peeled.hidden @ peeled.hidden) + (1.0 if peeled.update.bias else 0.0)
    settings = {
        "lr": group.lr * gain,
        "head_lr": 0.0,
        "momentum": phase.momentum,
        "weight_decay": group.weight_decay / gain,
        "max_norm": None if group.max_norm is None else group.max_norm / gain**0.5,
        "epochs": phase.epochs,
        "steps": phase.steps,
        "batch_size": phase.batch_size,
        "sampler": phase.sampler,
    }
    plain = _network_method(view.method, FedPer, settings)
    schedule = None if view.schedule is None else view.schedule[hypernet.phase : hypernet.phase + 1]
    change = {n: moved * gain for n, moved in peeled.gradient.items()}
    trained = replace(view, method=plain, shared={**peeled.extractor}, update={**change}, schedule=schedule)
    shares = ObservedUpdate(trained).decay_shares
    decayed = {n: w * shares.get(n, 0.0) for n, w in peeled.extractor.items()}
    return plain, {n: moved + decayed[n] for n, moved in change.items()}


MAX_RANK_ONE_RESIDUAL = 1e-3
"""A gradient is an outer product if that explains all of it but this share."""


def layer_inputs(view: ServerView, weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> Tensors:
    """Return the inputs of the layers whose gradient of one step is one outer product, under `features/layer`.

    A linear layer's gradients are sum_p delta_p x_p^T and sum_p delta_p over images and positions p. Where all delta_p
    point in one direction, the weight's has rank one and gives the mean of x_p, weighted by their lengths: the input
    itself if there is one image and one position that counts, as in a vision transformer's last block, of which the
    classifier sees the class token alone. In a `ConvAdapter` the bias of the last norm takes the place of the layer's,
    and what comes out is the input of the adapter. Below global average pooling, where every position gets the same
    delta, that is the mean over the map: the pooled features of the network below.

    Args:
        view: of one step.
        weights: of the network, as far as known, by name.
        gradient: likewise, up to one common factor.
    """
    found: Tensors = {}
    for name, module in view.client.task.model.named_modules():
        if isinstance(module, nn.Linear):
            x = _linear_input(name, gradient)
        elif isinstance(module, ConvAdapter) and not view.method.train_mode:  # batch statistics couple the positions
            x = _adapter_input(name, module, {**weights, **view.client.task.buffers, **view.buffers}, gradient)
        else:
            continue
        if x is not None:
            found[f"features/{name}"] = x.to(view.dtype)
    return found


def _linear_input(name: str, gradient: Mapping[str, Tensor]) -> Tensor | None:
    if not {f"{name}.weight", f"{name}.bias"} <= gradient.keys():
        return None
    return _rank_one_input(gradient[f"{name}.weight"], gradient[f"{name}.bias"])


def _adapter_input(
    name: str, module: ConvAdapter, known: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the mean input (C,) of the adapter from that of its convolution, through the norm before."""
    first, last = f"{name}.before", f"{name}.after"
    matrix = f"{name}.conv.weight"
    if not {matrix, f"{last}.bias"} <= gradient.keys():
        return None
    slope, offset = _batch_norm_affine(module.after, last, known)[0], gradient[f"{last}.bias"].double()
    x = _rank_one_input(gradient[matrix].flatten(1), slope * offset)
    if x is None:
        return None
    slope, offset = _batch_norm_affine(module.before, first, known)
    return (x - offset) / slope


def _batch_norm_affine(norm: nn.BatchNorm2d, name: str, known: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the slope and offset (C,) of batch norm with fixed statistics."""
    kinds = ("weight", "bias", "running_mean", "running_var")
    weight, bias, mean, variance = (dense(known[f"{name}.{kind}"]).double() for kind in kinds)
    slope = weight / (variance + norm.eps).sqrt()
    return slope, bias - mean * slope


def _rank_one_input(matrix: Tensor, delta: Tensor) -> Tensor | None:
    """Return the x of `delta x^T`, or None if `matrix` is nothing of the kind; both (n, m) and (n,) of any unit."""
    matrix, delta = matrix.double(), delta.double()
    if not bool(delta.any()) or not bool(matrix.any()):
        return None
    unit = delta / delta.norm()
    row = unit @ matrix
    if float((matrix - torch.outer(unit, row)).norm()) > MAX_RANK_ONE_RESIDUAL * float(matrix.norm()):
        return None
    return row / delta.norm()
