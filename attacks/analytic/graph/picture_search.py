"""Searches for the pictures of features that were solved for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from attacks.analytic.graph.dense_least_squares import finish_densely
from attacks.analytic.graph.feature_inversion import InversionSettings, InvertedImages, invert_features
from attacks.analytic.graph.feature_residuals import FeatureTarget
from attacks.analytic.graph.linearization import Forward
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.solver import SolvedTensor
from attacks.network.operation_trace import Graph, Ref

MIN_FEATURE_NOISE = 3e-6
"""Relative error of features, at least, by sums in float32."""
MIN_SEARCH_SECONDS = 300.0
"""CPU seconds after which searches for pictures end, all pictures together."""
MAX_SEARCH_SECONDS = 30.0
"""The same for each picture of `SMALL_PICTURE` numbers, if that is more."""
SMALL_PICTURE = 3072
"""Numbers of a picture of 32 by 32 pixels."""
DOUBTFUL_VALUE, DOUBTFUL_NOISE = 1e-4, 30.0
"""Share of the largest feature, and multiple of the features' noise, below which one that is not zero may be a closed
activation's, and is not compared."""


@dataclass(frozen=True)
class SolvedPictures:
    """What a network's equations gave.

    Attributes:
        found: the pictures of the features.
        lowest: the solved features nearest to the picture.
        end: where the equations end, and why.
        unseen: numbers of the pictures that move none of the features, so that they may be any.
        labels: of the pictures, where counting equal ones told them.
        linear: what goes into each linear layer by the name of its weight (N, d), and what comes out (N, K), as far
            as these follow from what was solved for.
    """

    found: InvertedImages
    lowest: SolvedTensor
    end: str
    unseen: int
    labels: Tensor | None = None
    linear: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def repeat(self, counts: Tensor) -> SolvedPictures:
        """Return each picture as often as it is there.

        Args:
            counts: of each picture with each label (N, K).
        """
        image, label = counts.nonzero().T
        times = counts[image, label]
        at = image.repeat_interleave(times)
        found = replace(
            self.found,
            images=self.found.images[at],
            residual=self.found.residual[at],
            converged=self.found.converged[at],
            steps=self.found.steps[at],
        )
        lowest = replace(self.lowest, values=self.lowest.values[at])
        return replace(self, found=found, lowest=lowest, linear={}, labels=label.repeat_interleave(times))


@dataclass(frozen=True)
class FeaturePath:
    """How the network's values lead to what a target is compared with: of a ReLU's output, what goes into it.

    Attributes:
        start: what goes into the target's ReLU; the target itself where no ReLU made it.
        skipped: what the first of `above` takes, in whose place `start` is put.
        above: the max pooling between the ReLU and the target, if there is one; both may change places.
        end: the target.
    """

    start: Ref
    skipped: Ref
    above: tuple[int, ...]
    end: Ref

    def follow(self, graph: Graph, values: Mapping[Ref, Tensor]) -> Tensor:
        """Return what the target is compared with."""
        if not self.above:
            return values[self.start]
        return graph.replay(self.above, self.end, {self.skipped: values[self.start]})


def paths_around_activations(network: NetworkGraph, targets: Sequence[SolvedTensor]) -> list[FeaturePath]:
    """Return the path to what each target is compared with."""
    return [_path_to(network, target) for target in targets]


def _path_to(network: NetworkGraph, target: SolvedTensor) -> FeaturePath:
    end, activation = target.ref, _compared_rectifier(network, target)
    if activation is None:
        return FeaturePath(end, end, (), end)
    start = network.flows_into(activation)[0]
    if activation == end.node:
        return FeaturePath(start, start, (), end)
    return FeaturePath(start, network.flows_into(end.node)[0], (end.node,), end)


def _rectifier(network: NetworkGraph, ref: Ref) -> int | None:
    """Return the ReLU that makes a tensor, directly or before a max pooling; the two may change places."""
    number = ref.node
    if number >= 0 and network.is_max_pooling(number):
        number = network.flows_into(number)[0].node
    activation = network.activations.get(number)
    return number if activation is not None and activation.slope == 0 else None


def _compared_rectifier(network: NetworkGraph, target: SolvedTensor) -> int | None:
    """Return the ReLU whose inputs are compared with a target; a closed ReLU bounds single numbers only."""
    return None if target.projection is not None else _rectifier(network, target.ref)


def feature_noise(target: SolvedTensor) -> float:
    """Return by which share of themselves solved features may be off."""
    return max(target.misfit, MIN_FEATURE_NOISE)


def as_target(network: NetworkGraph, target: SolvedTensor) -> FeatureTarget:
    """Return a solved tensor as features to be met."""
    if target.projection is not None:
        noise, weight = feature_noise(target), MIN_FEATURE_NOISE / feature_noise(target)
        return FeatureTarget(target.values, weight=weight, noise=noise, projection=target.projection)
    small = max(DOUBTFUL_VALUE, DOUBTFUL_NOISE * target.misfit) * target.values.abs().max()
    return FeatureTarget(
        target.values,
        known=(target.values == 0) | (target.values.abs() > small),
        weight=MIN_FEATURE_NOISE / feature_noise(target),
        noise=feature_noise(target),
        rectified=_rectifier(network, target.ref) is not None,
        unknown_scale=not target.scaled,
    )


def as_guide(target: SolvedTensor) -> FeatureTarget:
    """Return what a search may go by on its way, and not at its end."""
    return FeatureTarget(target.values, projection=target.projection, use="guide")


def search_seconds(shape: Sequence[int]) -> float:
    """Return the CPU seconds that a search for pictures of this shape may take."""
    return max(MIN_SEARCH_SECONDS, MAX_SEARCH_SECONDS * math.prod(shape) / SMALL_PICTURE)


def search_pictures(
    forward: Forward,
    single_forward: Forward,
    targets: Sequence[FeatureTarget],
    shape: Sequence[int],
    seed: int,
    start: Tensor | None = None,
) -> InvertedImages:
    """Return the pictures (B, C, H, W) of the features, in as much time as their size is given.

    Args:
        forward: from pictures to features.
        single_forward: the same in single precision.
        targets: the features.
        shape: of the pictures.
        seed: of the starts.
        start: where to begin, if not at gray.
    """
    settings = InversionSettings(seed=seed, seconds=search_seconds(shape))
    found = invert_features(forward, targets, shape, settings=settings, single_forward=single_forward, start=start)
    return finish_densely(forward, single_forward, targets, found)
