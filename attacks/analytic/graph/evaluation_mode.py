"""Solves for the pictures of a network in evaluation mode: from the top down for features, then for the pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import InvertedImages
from attacks.analytic.graph.linearization import Forward, RecordedFunction, of_any_count
from attacks.analytic.graph.network_graph import NetworkGraph, in_type
from attacks.analytic.graph.picture_search import (
    MIN_FEATURE_NOISE,
    SolvedPictures,
    as_guide,
    as_target,
    feature_noise,
    paths_around_activations,
    search_pictures,
)
from attacks.analytic.graph.pooled_stem import invert_pooled_stem, read_pooled_stem
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.graph.second_descent import descend_again
from attacks.analytic.graph.smooth_search import (
    are_too_few,
    count_missing_numbers,
    count_moving_numbers,
    nearest_features,
    search_smooth_pictures,
)
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from attacks.analytic.graph.undetermined_numbers import count_undetermined
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.result import NotApplicable
from attacks.search_control import StoppedError

MIN_TOLD_SHARE = 0.25
"""As many numbers as this share of the picture's must be solved for where linear layers are begun with. A search
by fewer ends at some picture that says nothing of the client's."""
NUMBERS_PER_PIXEL, LESS_PRECISE_NUMBERS = 5.0, 10.0
"""Solved features that are compared, at least, for one number of the picture, where there are so many: of features as
precise as float32 is, and of others."""
AS_PRECISE = 3.0
"""Times the rounding of float32 up to which features are off that count as so precise."""
MAX_NOISE_RATIO = 10.0
"""Noise of features, relative to the most precise ones and to rounding, up to which they count as precise."""

NEAR = 0.1
"""Share of what is known of a stem that a search through its max pooling may leave, or features alone are asked."""

FEATURES_ALONE = 2.0
"""Numbers above zero for one of the picture that a pooled tensor must hold for it to be enough by itself."""


@dataclass(frozen=True)
class FewerImages:
    """A batch has equal images, so that the network has to be traced with the distinct ones.

    Attributes:
        count: of distinct images.
    """

    count: int


@dataclass(frozen=True)
class FeaturesAlone:
    """What was solved for when the time was up.

    Attributes:
        lowest: the solved features nearest to the picture.
        reason: what ended the solution, in words.
    """

    lowest: SolvedTensor
    reason: str


def solve_in_evaluation_mode(
    network: NetworkGraph, count: int, shape: Sequence[int], seed: int
) -> SolvedPictures | FeaturesAlone | FewerImages | NotApplicable:
    """Return the pictures whose features the network's equations give, or why they give none.

    Args:
        network: the graph, of a trace at the number of images.
        count: of the images.
        shape: of one, (C, H, W).
        seed: of the searches' starts.
    """
    solver = GraphSolver(network, count, Propagation(network))
    try:
        found = _solve_for_features(solver, shape)
        if not isinstance(found, GraphSolver):
            return found
        solver = found
        return _solve_for_pictures(solver, shape, seed)
    except StoppedError as stopped:
        if not solver.solved:
            raise
        return FeaturesAlone(_lowest(solver), str(stopped))


def _solve_for_features(solver: GraphSolver, shape: Sequence[int]) -> GraphSolver | FewerImages | NotApplicable:
    """Return a descent that has ended, of those that began otherwise the deepest or most precise, or why there is none.

    Args:
        solver: of a descent that has not begun.
        shape: of one image, (C, H, W).
    """
    count = solver.images
    solver.run()
    if not solver.solved and solver.shifts.distinct is not None:
        return FewerImages(solver.shifts.distinct)
    if not solver.solved and count == 1:
        end = _explain_end(solver)
        solver.begin_at_linear_layers()
        told, pixels = sum(tensor.count for tensor in solver.solved), math.prod(shape)
        if solver.solved and told < MIN_TOLD_SHARE * pixels:
            end = _explain_end(solver)
            few = f"from its linear layers down {told} numbers other than zero are solved for, too few for the {pixels}"
            return NotApplicable(f"{end}; {few} of the picture", limit=True)
    if not solver.solved:
        return NotApplicable(_explain_end(solver), limit=True)
    return descend_again(solver)


def _solve_for_pictures(solver: GraphSolver, shape: Sequence[int], seed: int) -> SolvedPictures | NotApplicable:
    """Return the pictures that make the features of a descent that has ended, or why there are none."""
    network, count = solver.network, solver.images
    stem = read_pooled_stem(solver)
    if stem is not None:
        found = invert_pooled_stem(stem, (count, *shape))
        if bool((found.residual <= NEAR).all()):
            explained = bool(found.converged.all())  # by the gradient, too, which may see what features do not
            found = _finish_by_features(network, stem.target, found, seed)
            unseen = 0
            if not explained:
                wanted, functions = [as_target(network, stem.target)], _features_of(network, [stem.target])
                unseen = count_undetermined(*functions, wanted, found, seed)
            return SolvedPictures(found, stem.target, stem.explain_end(), unseen)
    chosen = _choose_targets(solver)
    nearest = nearest_features(network, chosen)
    moving = count_moving_numbers(_features_of(network, nearest)[1], shape, nearest[0].values.device, seed)
    missing = count_missing_numbers([as_target(network, target) for target in nearest], moving)
    too_few = are_too_few(missing, moving)
    targets = sorted([*solver.guides, *(nearest if too_few else chosen)], key=lambda target: target.ref.node)
    wanted = [as_guide(t) if any(t is guide for guide in solver.guides) else as_target(network, t) for t in targets]
    forward, single_forward = _features_of(network, targets)
    if any(len(one.value) != count for one in wanted):
        other = "what was solved for has another dimension in the place of the images', as of one image taken out"
        return NotApplicable(other, limit=True)
    search = search_smooth_pictures if too_few else search_pictures
    found = search(forward, single_forward, wanted, (count, *shape), seed)
    unseen = count_undetermined(forward, single_forward, wanted, found, seed)
    unseen = max(unseen, count * (missing + math.prod(shape) - moving)) if too_few else unseen
    return SolvedPictures(found, _lowest(solver), _explain_end(solver), unseen, linear=_linear_layers(solver))


def _linear_layers(solver: GraphSolver) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what goes into each linear layer and comes out of it, by the name of its weight, where that is known."""
    network, found = solver.network, dict[str, tuple[Tensor, Tensor]]()
    for number, layer in network.layers.items():
        (before, *_) = network.flows_into(number)
        try:
            taken, made = solver.known.value(before), solver.known.value(Ref(number))
        except UnknownError:
            continue
        if taken.ndim == made.ndim == 2:
            found[layer.name] = taken, made
    return found


def _lowest(solver: GraphSolver) -> SolvedTensor:
    """Return the solved features nearest to the picture; none that are known in part."""
    return min(solver.solved, key=lambda solved: solved.ref.node)


def _finish_by_features(network: NetworkGraph, target: SolvedTensor, near: InvertedImages, seed: int) -> InvertedImages:
    """Return pictures whose features are met, found from near ones; these where features are few or it does not end."""
    enough = int((target.values > 0).sum()) >= FEATURES_ALONE * near.images.numel()
    if bool(near.converged.all()) or not enough:
        return near
    wanted = [as_target(network, target)]
    found = search_pictures(*_features_of(network, [target]), wanted, near.images.shape, seed, near.images)
    return found if bool(found.converged.all()) else near


def _features_of(network: NetworkGraph, targets: Sequence[SolvedTensor]) -> tuple[Forward, RecordedFunction]:
    """Return the function from images to what the targets are compared with, in double and in single precision.

    Of ReLUs that is what goes into them.
    """
    paths = paths_around_activations(network, targets)
    nodes = network.operations_to([path.start for path in paths])

    def features_of(graph: Graph, images: Tensor) -> list[Tensor]:
        values = graph.replay_values(nodes, {Ref(IMAGE): images})
        return [path.follow(graph, values) for path in paths]

    def in_precision(dtype: torch.dtype) -> Forward:
        batch = in_type(network.graph, dtype)
        several = len(batch.image) > 1
        single = partial(features_of, in_type(network.single, dtype)) if several else None
        return of_any_count(partial(features_of, batch), batch.image, single)

    return in_precision(torch.float64), RecordedFunction(in_precision(torch.float32))


def _choose_targets(solver: GraphSolver) -> list[SolvedTensor]:
    """Return the solved tensors nearest to the picture, as many as there must be precise numbers."""
    pixels = solver.network.graph.image.numel()
    chosen: list[SolvedTensor] = []
    precise = MAX_NOISE_RATIO * min(feature_noise(tensor) for tensor in solver.solved)
    for tensor in sorted([*solver.projections, *solver.solved], key=lambda solved: solved.ref.node):
        numbers = sum(t.count for t in chosen if feature_noise(t) <= precise)
        rounded = sum(t.count for t in chosen if feature_noise(t) <= AS_PRECISE * MIN_FEATURE_NOISE)
        if rounded >= NUMBERS_PER_PIXEL * pixels or numbers >= LESS_PRECISE_NUMBERS * pixels:
            break
        chosen.append(tensor)
    return chosen


NO_LAYER = "no convolution's weight was sent as it is used: there is no layer to begin with"
"""Why nothing is solved where no layer could be asked."""


def _explain_end(solver: GraphSolver) -> str:
    """Say at which layer the solution ended and why: the first one below what was solved for."""
    layers = solver.network.layers.items()
    places = {layer.name: solver.network.layer_input(number).node for number, layer in layers}
    lowest = min((solved.ref.node for solved in solver.solved), default=len(solver.network.graph.nodes))
    reasons = [*solver.ends.items(), *solver.waiting.items()]
    below = [(names, reason) for names, reason in reasons if places[names.split(" and ")[0]] < lowest]
    last = f"{solver.solved[-1].by[0]}: there is no layer below" if solver.solved else NO_LAYER
    return next((f"{names}: {reason}" for names, reason in below), last)
