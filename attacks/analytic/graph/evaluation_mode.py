"""Solves for the pictures of a network in evaluation mode: from the top down for features, then for the pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import FeatureTarget, InversionSettings, InvertedImages, invert_features
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.propagation import Propagation
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from attacks.network.operation_trace import IMAGE, Ref
from attacks.result import NotApplicable

NUMBERS_PER_PIXEL = 10.0
"""Solved features that are compared, at least, for one number of the picture, where there are so many."""
MIN_FEATURE_NOISE = 3e-6
"""Relative error of features, at least, by sums in float32."""
MAX_SEARCH_SECONDS, SMALL_PICTURE = 30.0, 3072
"""CPU seconds after which no search for pictures goes on, for each one of so many numbers (32 by 32 pixels)."""
DOUBTFUL_VALUE = 1e-4
"""Share of the largest feature below which one that is not zero may be a closed activation's, and is not compared."""


@dataclass(frozen=True)
class SolvedPictures:
    """What a network's equations gave.

    Attributes:
        found: the pictures of the features.
        lowest: the solved features nearest to the picture.
        end: where the equations end, and why.
    """

    found: InvertedImages
    lowest: SolvedTensor
    end: str


def solve_in_evaluation_mode(
    network: NetworkGraph, count: int, shape: Sequence[int], seed: int
) -> SolvedPictures | NotApplicable:
    """Return the pictures whose features the network's equations give, or why they give none.

    Args:
        network: the graph, of a trace at the number of images.
        count: of the images.
        shape: of one, (C, H, W).
        seed: of the searches' starts.
    """
    solver = GraphSolver(network, count, Propagation(network))
    solver.run()
    if not solver.solved:
        return NotApplicable(_explain_end(solver), limit=True)
    targets = _choose_targets(solver)
    forward, single_forward = (_features_of(network, targets, dtype) for dtype in (torch.float64, torch.float32))
    wanted, size = [_as_target(network, target) for target in targets], (count, *shape)
    settings = InversionSettings(seed=seed, seconds=MAX_SEARCH_SECONDS * max(1.0, math.prod(size) / SMALL_PICTURE))
    found = invert_features(forward, wanted, size, settings=settings, single_forward=single_forward)
    return SolvedPictures(found, targets[0], _explain_end(solver))


def _features_of(
    network: NetworkGraph, targets: Sequence[SolvedTensor], dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """Return the function from images to what the targets are compared with: of ReLUs, what goes into them."""
    paths = [_path_around_activation(network, target) for target in targets]
    nodes, graph = network.operations_to([start for start, _, _ in paths]), network.graph_in_precision(dtype)

    def features(images: Tensor) -> list[Tensor]:
        values = graph.replay_values(nodes, {Ref(IMAGE): images})
        return [graph.replay(above, end, {skipped: values[start]}) if above else values[start]
                for (start, above, end), skipped in zip(paths, skips, strict=True)]  # fmt: skip

    skips = [network.flows_into(above[0])[0] if above else start for start, above, _ in paths]
    return features


def _path_around_activation(network: NetworkGraph, target: SolvedTensor) -> tuple[Ref, list[int], Ref]:
    """Return what goes into a target's ReLU, the max pooling between both if there is one, and the target."""
    activation = _rectifier(network, target)
    if activation is None:
        return target.ref, [], target.ref
    above = [] if activation == target.ref.node else [target.ref.node]
    return network.flows_into(activation)[0], above, target.ref


def _rectifier(network: NetworkGraph, target: SolvedTensor) -> int | None:
    """Return the ReLU that makes a target, or of which a max pooling makes it; both may change places."""
    number = target.ref.node
    if number >= 0 and network.is_max_pooling(number):
        number = network.flows_into(number)[0].node
    activation = network.activations.get(number)
    return number if activation is not None and activation.slope == 0 else None


def _as_target(network: NetworkGraph, target: SolvedTensor) -> FeatureTarget:
    small = DOUBTFUL_VALUE * target.values.abs().max()
    return FeatureTarget(
        target.values,
        known=(target.values == 0) | (target.values.abs() > small),
        noise=max(target.misfit, MIN_FEATURE_NOISE),
        rectified=_rectifier(network, target) is not None,
        unknown_scale=not target.scaled,
    )


def _choose_targets(solver: GraphSolver) -> list[SolvedTensor]:
    """Return the solved tensors nearest to the picture, as many as there must be numbers."""
    pixels = solver.network.graph.image.numel()
    chosen: list[SolvedTensor] = []
    for tensor in sorted(solver.solved, key=lambda solved: solved.ref.node):
        if chosen and sum(int((t.values != 0).sum()) for t in chosen) >= NUMBERS_PER_PIXEL * pixels:
            break
        chosen.append(tensor)
    return chosen


NO_LAYER = "no convolution's weight was sent as it is used: there is no layer to begin with"
"""Why nothing is solved where no layer could be asked."""


def _explain_end(solver: GraphSolver) -> str:
    """Say at which layer the solution ended and why."""
    lowest = solver.solved[-1].by[0] if solver.solved else ""
    reasons = [*solver.ends.items(), *solver.waiting.items()]
    return next((f"{name}: {reason}" for name, reason in reasons if name != lowest), NO_LAYER)
