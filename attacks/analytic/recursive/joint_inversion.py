r"""The picture below the lowest linear layer, by all equations of the layers beneath it at once.

A linear layer with a bias gives its input h = dW^T db / |db|^2 and what flows back into it, v = W^T db. Both are exact.
With f the network up to that input and theta its weights, the picture x answers

    (1) features:  f(x; theta) = h,
    (2) gradients: d <v, f(x; theta)> / d theta = the update of theta,

which takes no label, no loss and nothing of what lies above. Layer by layer these are linear only where pooling and
activations can be undone one by one. Taken together they are nonlinear least squares, each equation weighed by its
rounding, whatever stands between the layers: several convolutions before a pooling, pooling with padding or that
averages what an activation bent, activations that rise and fall. They are solved by Levenberg and Marquardt's steps
from gray, with the whole matrix: diagonals leave it too ill-conditioned for conjugate gradients. Smooth networks lead
from gray to the picture; of those made of lines the search may end elsewhere, and says so. Weights that are used step
after step have gradients that are sums over the steps; that is no matter here.

A smooth Gaussian prior counts beside the equations, and decides where rounding leaves them nothing to say. Pixels of
the solution are put on levels, and moved by single levels for as long as that explains more. They count as
fixed where the least squares' own matrix says that none may be off by half a level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior, choice_prior
from attacks.analytic.maxpool.integer_decoding import MAX_ROUNDABLE_STD
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.network.layer_chain import trace_view
from attacks.network.layer_sequence import read_layer
from attacks.network.linear_layers import reused_parameters
from attacks.network.operation_recognition import PRODUCTS, contains_weighted_branch, has_trained_weight
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.result import NotApplicable, Reconstruction
from attacks.search_control import check_time_limit
from attacks.update.float_rounding import RMS_ROUNDING, relative_rounding
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from fl.view import ServerView

MAX_PIXELS = 4_096
"""Numbers of a picture that are solved for: their matrix has so many rows."""
MAX_MATRIX = 2**29
"""Numbers of the matrix of derivatives, 4 GiB: gradients that are too large for it are left out."""
MAX_OUTER_PRODUCT_ERROR = 1e-3
"""Share of a linear layer's gradient that is not the outer product of one input: more is no single vector."""
AUTOGRAD_NOISE = 1e-6
"""What a float32 gradient is off by, relative to its norm, beside the update's rounding."""
EXPLAINED = 5.0
"""Times the expected error up to which a tensor counts as explained."""
MAX_BELIEVED_ERROR = 0.05
"""Share of the features, left unexplained, from which on what was found is no picture."""
MAX_STEPS, MAX_SECONDS = 40, 60.0
"""CPU seconds after which a search takes no further step; there are four searches at most."""
FIRST_DAMPING, MAX_DAMPING = 1e-2, 1e6
"""Share of the matrix's diagonal that is added to it, at first and at most."""
STALLED = 0.999
"""Share of what was left above which a step brought nothing."""
CHUNK = 64
"""Columns of the Jacobian that are computed at once."""


@dataclass(frozen=True)
class JointEquations:
    """What is known below a linear layer.

    Attributes:
        graph: of the network.
        features: where in it the layer's input h is.
        layer: its name.
        value: h (n,).
        signal: v, what flows back into h (n,).
        gradients: of the weights below, by name.
        noise: how far each of them may be off, relative to its norm.
        value_noise: the same of h.
    """

    graph: Graph
    features: Ref
    layer: str
    value: Tensor
    signal: Tensor
    gradients: Mapping[str, Tensor]
    noise: Mapping[str, float]
    value_noise: float

    @property
    def count(self) -> int:
        """How many equations there are, without the features and the gradients' numbers that are zero.

        A feature that a ReLU made zero is a bound alone, and a unit that is silent says nothing.
        """
        return int((self.value != 0).sum()) + sum(int((gradient != 0).sum()) for gradient in self.gradients.values())

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return f(x) and the gradients of <v, f(x)> for one picture (1, C, H, W), each behind a first axis of 1."""
        graph = self.graph
        leaves = {n: graph.tensors[n].detach().to(images).requires_grad_() for n in self.gradients}
        known = {Ref(number): leaves[name] for number, name in graph.sources.items() if name in leaves}
        with torch.enable_grad():
            end = graph.replay(graph.operations_behind(self.features), self.features, {Ref(IMAGE): images, **known})
            flat = end.flatten()
            if not leaves:
                return (flat[None],)
            made = torch.autograd.grad(
                (flat * self.signal).sum(),
                list(leaves.values()),
                create_graph=True,
                allow_unused=True,  # of what a network detaches, say
                materialize_grads=True,
            )
        return flat[None], *(one[None] for one in made)

    @property
    def known(self) -> dict[str, Tensor]:
        """The features h and the gradients, by name."""
        return {self.layer: self.value, **self.gradients}

    @cached_property
    def std(self) -> tuple[Tensor, ...]:
        """How far a number of each tensor may be off by rounding, in the order of `known`."""
        return tuple(
            self.noise.get(name, self.value_noise) * value.square().mean().sqrt() for name, value in self.known.items()
        )

    @cached_property
    def weighed(self) -> Tensor:
        """All that is known (M,), in deviations by rounding."""
        return self.weigh(self.known.values())

    def weigh(self, parts: Iterable[Tensor]) -> Tensor:
        """Return tensors in the order of `known` as one (M,), each number divided by its deviation by rounding."""
        return torch.cat([(part / off).flatten() for part, off in zip(parts, self.std, strict=True)])

    def residual(self, images: Tensor) -> Tensor:
        """Return what a picture leaves of the equations (M,), in deviations by rounding."""
        return self.weighed - self.weigh(part.detach() for part in self.forward(images))

    def linearize(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a picture leaves of the equations (M,), and the derivative of what it makes of them (N, M)."""
        point = images.detach().requires_grad_()
        with torch.enable_grad():
            made = self.weigh(self.forward(point))
            weights = torch.zeros_like(made).requires_grad_()
            (pulled,) = torch.autograd.grad(made, point, weights, create_graph=True)
        units = torch.eye(images.numel()).to(images)
        rows = [
            torch.autograd.grad(
                pulled, weights, part.view(-1, *images.shape), retain_graph=True, is_grads_batched=True
            )[0]
            for part in units.split(CHUNK)
        ]
        return self.weighed - made.detach(), torch.cat(rows)

    def errors(self, images: Tensor) -> dict[str, float]:
        """Return what a picture leaves of h and of each gradient, relative to their norms."""
        made = [part[0].detach() for part in self.forward(images)]
        return {n: float((a - b).norm() / b.norm()) for (n, b), a in zip(self.known.items(), made, strict=True)}

    def explains(self, errors: Mapping[str, float]) -> bool:
        """Return whether no more than rounding is left of any tensor."""
        return all(off <= EXPLAINED * self.noise.get(name, self.value_noise) for name, off in errors.items())


def joint_equations(
    view: ServerView, gradient: Mapping[str, Tensor], device: torch.device
) -> JointEquations | NotApplicable:
    """Return what the lowest linear layer with a bias and the layers below it say of the picture, or why nothing.

    Args:
        view: what the server saw, of one step on one image.
        gradient: of that step, by parameter, up to one factor.
        device: where to solve.
    """
    found = trace_view(view, device)
    if isinstance(found, NotApplicable):
        return found
    _, graph = found
    reused = reused_parameters(graph)
    if not reused and any(contains_weighted_branch(graph, segment) for segment in graph.segments()):
        return NotApplicable("layers stand beside each other", limit=True)
    for number in graph.used_operations():
        node = graph.nodes[number]
        if node.operation not in PRODUCTS or not has_trained_weight(graph, node):
            continue
        piece, _ = read_layer(graph, number)
        if not reused.isdisjoint(piece.names.values()) or (reused and piece.input.shape[:-1].numel() > 1):
            continue  # a recurrent network's, say: its gradient is a sum over steps
        features = next(ref for ref in node.refs if graph.depends_on_image(ref))
        names = {kind: piece.names.get(kind, f"{piece.name}.{kind}") for kind in ("weight", "bias")}
        if piece.refusal or not piece.name or not all(name in gradient for name in names.values()):
            return NotApplicable(f"{node} has no weight and bias in the update", limit=True)
        if len(graph.value(features).flatten()) != piece.input.shape[-1]:
            return NotApplicable(f"{node} sees more than one input", limit=True)
        return _equations_below(view, gradient, graph, features, names, piece.places)
    return NotApplicable("the network has no linear layer", limit=True)


def _equations_below(
    view: ServerView,
    gradient: Mapping[str, Tensor],
    graph: Graph,
    features: Ref,
    names: Mapping[str, str],
    places: Mapping[str, Tensor],
) -> JointEquations | NotApplicable:
    def arranged(kind: str, sent: Tensor) -> Tensor:
        return sent.flatten()[places[kind]] if kind in places else sent

    weight, bias = (arranged(kind, gradient[names[kind]]) for kind in ("weight", "bias"))
    if not bool(bias.any()):
        return NotApplicable(f"{names['bias']} did not move")
    value = bias @ weight / (bias @ bias)
    residual = float((weight - bias[:, None] * value).norm() / weight.norm())
    if not residual < MAX_OUTER_PRODUCT_ERROR:
        return NotApplicable(f"the gradient of {names['weight']} is that of more than one input (up to {residual:.1e})")
    start = arranged("weight", graph.tensors[names["weight"]].detach())
    used = frozenset[str]().union(*(graph.nodes[n].sources for n in graph.operations_behind(features)))
    below = sorted(name for name in used & graph.parameters if name in gradient and bool(gradient[name].any()))
    least = RMS_ROUNDING * torch.finfo(view.dtype).eps
    own = max(residual, relative_rounding(view, names["bias"]), least)
    noise = {name: max(relative_rounding(view, name), own, least) for name in below}
    if view.dtype != torch.float64:
        noise = {name: max(off, AUTOGRAD_NOISE) for name, off in noise.items()}
    layer = names["weight"].removesuffix(".weight")
    gradients = _as_many_as_fit({name: gradient[name] for name in below}, len(value), math.prod(view.task.input_shape))
    return JointEquations(graph, features, layer, value, bias @ start, gradients, noise, max(own, 1e-9))


def _as_many_as_fit(gradients: Mapping[str, Tensor], features: int, pixels: int) -> dict[str, Tensor]:
    """Return gradients whose equations fit into the matrix that is built, without the largest of them."""
    kept = dict(gradients)
    while kept and (features + sum(one.numel() for one in kept.values())) * pixels > MAX_MATRIX:
        del kept[max(kept, key=lambda name: kept[name].numel())]
    return kept


class TooFewEquations(NotApplicable):
    """The refusal of a picture that has more pixels than there are equations."""


def measure_misfits(
    view: ServerView, gradient: Mapping[str, Tensor], device: torch.device, pictures: Sequence[Tensor]
) -> list[float] | None:
    """Return the largest share of a tensor's norm that each picture leaves of all equations together, or None.

    Args:
        view: what the server saw, of one step on one image.
        gradient: of that step, by parameter, in double precision.
        device: where to solve.
        pictures: (1, C, H, W) each.
    """
    equations = joint_equations(view, gradient, device)
    if isinstance(equations, NotApplicable):
        return None
    return [max(equations.errors(picture.to(equations.value)).values()) for picture in pictures]


def invert_jointly(
    view: ServerView,
    gradient: Mapping[str, Tensor],
    device: torch.device,
    refusal: NotApplicable,
    start: Tensor | None = None,
) -> Reconstruction | NotApplicable:
    """Return the picture, or why there is none: too few equations, too many pixels, or a search that led nowhere.

    Args:
        view: what the server saw, of one step on one image.
        gradient: of that step, by parameter, in double precision.
        device: where to solve.
        refusal: why the layers can't be undone one by one.
        start: a picture (1, C, H, W) to begin at before gray, found otherwise.
    """
    equations = joint_equations(view, gradient, device)
    if isinstance(equations, NotApplicable):
        return refusal
    pixels = math.prod(view.task.input_shape)
    counts = f"{equations.count} equations below {equations.layer} for {pixels} pixels"
    together = f"{refusal.reason}; all equations together are {counts}"
    if equations.count < pixels:
        return TooFewEquations(f"{together}: too few", limit=True)
    if pixels > MAX_PIXELS:
        return NotApplicable(f"{together}: more pixels than the {MAX_PIXELS} that are solved for", limit=True)
    shape = view.task.input_shape
    prior = _smooth_prior(shape, equations.value)
    images = _search_from(equations, prior, start, torch.full((1, *shape), 0.5).to(equations.value))
    errors, fixed, verified = equations.errors(images), None, False
    if not (far := errors[equations.layer]) < MAX_BELIEVED_ERROR:
        ended = f"solved together, {counts}, they led to no picture ({far:.1e} left unexplained of what comes in there)"
        return NotApplicable(f"{refusal.reason}; {ended}", limit=True)
    on_levels, matrix = _put_on_levels(equations, images)
    level_errors = equations.errors(on_levels)
    if equations.explains(level_errors):
        images, errors = on_levels, level_errors
        fixed = (_deviations(matrix) < MAX_ROUNDABLE_STD / 255).view_as(images)
        # an unknown defense may have shortened weight and bias apart, and a known one may have left out numbers
        verified = bool(fixed.all()) and view.threat.knows_defense and ObservedUpdate(view).is_complete(*view.update)
    elif not view.task.inputs.is_image and equations.explains(errors):  # numbers at no levels
        verified = bool((_deviations(matrix) < MAX_PIXEL_ERROR).all()) and view.threat.knows_defense
    off = max(errors.values())
    note = f"{counts}, of which {off:.1e} is left unexplained"
    if equations.explains(errors):
        note = "" if verified or fixed is not None else _say_what_is_open(_deviations(matrix))
    return Reconstruction(
        inputs=images.clamp(0, 1).to(view.device, view.dtype),
        objective=off,
        private={f"residual/{name}": torch.tensor([left]) for name, left in errors.items()},
        verified=verified,
        fixed=None if fixed is None else fixed.to(view.device),
        note=note,
    )


def _say_what_is_open(deviations: Tensor) -> str:
    """Say why a picture that explains its equations has no levels, by its numbers' standard deviations (N,)."""
    count = int((~(deviations < MAX_ROUNDABLE_STD / 255)).sum())
    if not count:
        return "not verified: at whole levels of 8 bits the picture leaves more than rounding of its equations"
    rounding = "which rounding of the update may put on another level of 8 bits"
    return f"not verified: {count} of the {len(deviations)} numbers of the picture are open, {rounding}"


def _smooth_prior(shape: Sequence[int], like: Tensor) -> GaussianPrior:
    """Return what is expected of a picture (C, H, W) in [0, 1]."""
    channels, height, width = shape
    layer = ConvPoolLayer(like.new_ones(1, channels, 1, 1), like.new_zeros(1), (channels, height, width))
    return choice_prior(layer, like.new_zeros(channels), like.new_ones(channels))


def _search_from(equations: JointEquations, prior: GaussianPrior, start: Tensor | None, gray: Tensor) -> Tensor:
    """Return the picture that leaves least of the equations, from a start and, where it explains too little, gray."""
    if start is None:
        return _search_from_gray(equations, prior, gray)
    one = _search(equations, prior, start.to(gray))
    if equations.explains(equations.errors(one)):
        return one
    other = _search_from_gray(equations, prior, gray)
    return min(one, other, key=lambda images: float(equations.residual(images).square().sum()))


def _search_from_gray(equations: JointEquations, prior: GaussianPrior, gray: Tensor) -> Tensor:
    """Return the picture that leaves least of the equations, from gray or from what the features alone lead to."""
    one = _search(equations, prior, gray)
    if equations.explains(equations.errors(one)):
        return one
    other = _search(equations, prior, _search(replace(equations, gradients={}), prior, gray))
    return min(one, other, key=lambda images: float(equations.residual(images).square().sum()))


def _search(equations: JointEquations, prior: GaussianPrior, images: Tensor) -> Tensor:
    """Return the picture that leaves least of the equations, by steps from another one (1, C, H, W)."""
    began, damping = time.process_time(), FIRST_DAMPING
    expected = prior.dense

    def misfit(moved: Tensor) -> float:
        return float(equations.residual(moved).square().sum()) + prior.penalty(moved[0])

    after = misfit(images)
    for _ in range(MAX_STEPS):
        check_time_limit()
        if time.process_time() - began > MAX_SECONDS:
            break
        residual, jacobian = equations.linearize(images)
        before = after
        matrix = jacobian @ jacobian.mT + expected
        rhs = jacobian @ residual + prior.shift.flatten() - expected @ images.flatten()
        images, after, damping = _damped_step(misfit, images, matrix, rhs, before, damping)
        if not after < STALLED * before:
            break
    return images


def _damped_step(
    misfit: Callable[[Tensor], float], images: Tensor, matrix: Tensor, rhs: Tensor, before: float, damping: float
) -> tuple[Tensor, float, float]:
    """Return the picture after a step, what it leaves, and the damping of the next; damped until it leaves less."""
    diagonal = matrix.diagonal().clone()
    while damping < MAX_DAMPING:
        raised = matrix.clone()
        raised.diagonal().add_(damping * diagonal)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not bool(failed):
            moved = images + torch.cholesky_solve(rhs[:, None], factor).view_as(images)
            after = misfit(moved)
            if after < before:
                return moved, after, max(damping / 5, 1e-12)
        damping *= 4
    return images, before, damping


def _put_on_levels(equations: JointEquations, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the picture on levels that leaves least, next to one (1, C, H, W), and the matrix of its equations."""
    channels = images.shape[1]
    levels = PixelLevels.of(torch.zeros(channels).to(images), torch.ones(channels).to(images))
    residual, jacobian = equations.linearize(images)
    matrix = jacobian @ jacobian.mT
    rhs = jacobian @ residual + matrix @ images.flatten()
    near = levels.coordinate_descent(levels.nearest(images[0]), matrix, rhs.view_as(images[0]).flatten(1))
    return near[None], matrix


def _deviations(matrix: Tensor) -> Tensor:
    """Return the standard deviation of each pixel (N,); infinite where nothing fixes some of them."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        return torch.full_like(matrix.diagonal(), torch.inf)
    return torch.cholesky_inverse(factor).diagonal().sqrt()
