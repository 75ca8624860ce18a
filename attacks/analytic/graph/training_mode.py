"""Solves for the pictures of a network whose batch normalization is in training mode.

Its residual blocks are solved from the top down (`batch_statistics_blocks`). Then the pictures with the lowest solved
features are searched for. Means and variances of the batch came back with the buffers. By these each picture is
searched for by itself first, as in evaluation mode. From there on all pictures of a batch are one problem: its
statistics tie them, and are targets like any other. Without them the scale of a picture would be free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.batch_normalization import (
    BatchStatistics,
    TracedNormalization,
    read_statistics,
)
from attacks.analytic.graph.batch_statistics_blocks import Descent, descend_blocks
from attacks.analytic.graph.feature_inversion import InvertedImages
from attacks.analytic.graph.feature_residuals import FeatureTarget
from attacks.analytic.graph.linearization import Forward, RecordedFunction
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.picture_search import (
    FeaturePath,
    SolvedPictures,
    as_target,
    paths_around_activations,
    search_pictures,
)
from attacks.analytic.graph.residual_blocks import BlockChain, cut_into_blocks
from attacks.analytic.graph.solver import SolvedTensor
from attacks.analytic.graph.undetermined_numbers import count_undetermined
from attacks.network.operation_trace import IMAGE, Ref
from attacks.result import NotApplicable
from fl.view import ServerView

MAX_TARGETS = 2
"""Solved features that the pictures are compared with, the lowest ones."""
STATISTICS_WEIGHT, STATISTICS_NOISE = 0.3, 1e-6
"""Weight of the batch's statistics beside features, and their relative error."""
NO_BUFFERS = (
    "batch normalization is in training mode and ties all images: what it normalized by is in the buffers that came "
    "back with the update (buffers_after: running means and variances after the step), which are missing"
)
"""Why nothing is solved where the batch's statistics are unknown."""
OWN_STATISTICS = (
    "batch normalization is in training mode, and each client of the group normalized by its own batch: the mean of "
    "their statistics is no batch's"
)
"""Why nothing is solved of a group."""


def solve_in_training_mode(
    view: ServerView, network: NetworkGraph, norms: Mapping[int, TracedNormalization], seed: int
) -> SolvedPictures | NotApplicable:
    """Return the pictures whose features the network's equations give, or why they give none.

    Args:
        view: what the server saw.
        network: the graph, of a trace at the number of images.
        norms: its normalizations in training mode (`find_normalizations`).
        seed: of the searches' starts.
    """
    if view.buffers_after is None:
        return NotApplicable(NO_BUFFERS)
    if view.parts:
        return NotApplicable(OWN_STATISTICS)
    statistics = read_statistics(view, network.graph.image)
    chain = cut_into_blocks(network, norms, statistics)
    if not chain.blocks:
        return NotApplicable(f"no residual block of two normalized convolutions: {chain.end}", limit=True)
    descent = descend_blocks([traced.block for traced in chain.blocks])
    end = descent.end or chain.end
    solved = _solved_tensors(chain, descent)
    if not solved:
        return NotApplicable(end, limit=True)
    targets = solved[-MAX_TARGETS:][::-1]
    found, unseen = _find_pictures(network, norms, statistics, targets, seed)
    return SolvedPictures(found, targets[0], end, unseen)


def _solved_tensors(chain: BlockChain, descent: Descent) -> list[SolvedTensor]:
    """Return what was solved for, the lowest last."""
    found: list[SolvedTensor] = []
    for traced, features in zip(chain.blocks, descent.features, strict=False):
        block = traced.block
        tensors = [(traced.hidden, features.hidden, block.second), (traced.taken, features.inputs, block.first)]
        found += [
            SolvedTensor(ref, solved.inputs, solved.residual, True, (layer.name,))
            for ref, solved, layer in tensors
            if solved is not None
        ]
    return found


def _find_pictures(
    network: NetworkGraph,
    norms: Mapping[int, TracedNormalization],
    statistics: BatchStatistics,
    targets: Sequence[SolvedTensor],
    seed: int,
) -> tuple[InvertedImages, int]:
    """Return the pictures of features and statistics, and how many of their numbers move neither.

    Together they are one problem: a picture of as many times the colors. It begins where each ended by itself.
    """
    shape = network.graph.image.shape
    joint = _JointPicture.of(network, norms, statistics, targets)
    wanted = [as_target(network, target) for target in targets]
    fixed = _FixedStatistics.of(network, joint.nodes, norms, joint.known) if shape[0] > 1 else None
    alone, start = None, None
    if fixed is not None:
        double, single = (fixed.features(joint.paths, dtype) for dtype in (torch.float64, torch.float32))
        single = RecordedFunction(single)
        alone = search_pictures(double, single, wanted, shape, seed)
        start = alone.images.reshape(joint.shape)
    whole, whole_single = joint.features(torch.float64), RecordedFunction(joint.features(torch.float32))
    tied = joint.targets(wanted)
    found = search_pictures(whole, whole_single, tied, joint.shape, seed, start)
    if alone is not None and not bool(found.converged.all()):
        # one picture that was not found spoils all where they are one problem
        return alone, count_undetermined(double, single, wanted, alone, seed)
    unseen = count_undetermined(whole, whole_single, tied, found, seed)
    return _split(found, shape), unseen


def _split(found: InvertedImages, shape: torch.Size) -> InvertedImages:
    """Return the pictures (B, C, H, W) of a batch that were found as one."""
    count = shape[0]
    return InvertedImages(
        found.images.reshape(shape),
        found.residual.expand(count),
        found.converged.expand(count),
        found.steps.expand(count),
        found.iterations,
    )


@dataclass(frozen=True)
class _JointPicture:
    """All pictures of a batch as one of as many times the colors, as its statistics tie them.

    Attributes:
        network: the graph.
        paths: to what targets are compared with.
        nodes: operations on the way there.
        known: mean and variance of the batch by what a convolution returns, where they came back.
    """

    network: NetworkGraph
    paths: Sequence[FeaturePath]
    nodes: Sequence[int]
    known: Mapping[Ref, tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls,
        network: NetworkGraph,
        norms: Mapping[int, TracedNormalization],
        statistics: BatchStatistics,
        targets: Sequence[SolvedTensor],
    ) -> _JointPicture:
        """Return the batch of a network as one picture, to be compared with these targets."""
        paths = paths_around_activations(network, targets)
        nodes = network.operations_to([path.start for path in paths])
        known = {
            Ref(number): moments
            for number in norms
            if number in nodes and (moments := statistics.moments(network.graph.value(Ref(number)))) is not None
        }
        return cls(network, paths, nodes, known)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the one picture, (1, B C, H, W)."""
        count, channels, *sides = self.network.graph.image.shape
        return (1, count * channels, *sides)

    def targets(self, wanted: Sequence[FeatureTarget]) -> list[FeatureTarget]:
        """Return the targets of single pictures as those of one, and the batch's statistics as the last."""
        joint = [
            FeatureTarget(
                t.value[None], None if t.known is None else t.known[None], noise=t.noise, rectified=t.rectified
            )
            for t in wanted
        ]
        scaled = torch.cat([_scaled(*moments, moments) for moments in self.known.values()])
        return [*joint, FeatureTarget(scaled[None], weight=STATISTICS_WEIGHT, noise=STATISTICS_NOISE)]

    def features(self, dtype: torch.dtype) -> Forward:
        """Return the function from the one picture to what its targets are compared with."""
        graph, shape = self.network.graph_in_precision(dtype), self.network.graph.image.shape
        sizes = {ref: (moments[0].to(dtype), moments[1].to(dtype)) for ref, moments in self.known.items()}

        def forward(images: Tensor) -> list[Tensor]:
            values = graph.replay_values(self.nodes, {Ref(IMAGE): images.reshape(shape)})
            moments = [
                _scaled(values[ref].mean((0, 2, 3)), values[ref].var((0, 2, 3), unbiased=False), sizes[ref])
                for ref in self.known
            ]
            return [*(path.follow(graph, values)[None] for path in self.paths), torch.cat(moments)[None]]

        return forward


@dataclass(frozen=True)
class _FixedStatistics:
    """The network with normalizations by statistics that are known, so that images do not interact.

    Attributes:
        network: the graph.
        parts: operations from one normalization to the next, in order, each with the normalization that follows.
        known: mean and variance by what a convolution returns.
    """

    network: NetworkGraph
    parts: tuple[tuple[tuple[int, ...], TracedNormalization | None], ...]
    known: Mapping[Ref, tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls,
        network: NetworkGraph,
        nodes: Sequence[int],
        norms: Mapping[int, TracedNormalization],
        known: Mapping[Ref, tuple[Tensor, Tensor]],
    ) -> _FixedStatistics | None:
        """Return the operations `nodes` so, or None where the statistics of a normalization are unknown."""
        used = [norm for number, norm in norms.items() if number in nodes]
        if not all(Ref(norm.convolution) in known for norm in used):
            return None
        behind = network.graph.operations_behind
        inside = {n for norm in used for n in set(behind(norm.returned)) - set(behind(Ref(norm.convolution)))}
        parts, part = [], list[int]()
        for number in (n for n in nodes if n not in inside):
            part.append(number)
            if number in norms:
                parts.append((tuple(part), norms[number]))
                part = []
        return cls(network, (*parts, (tuple(part), None)), known)

    def features(self, paths: Sequence[FeaturePath], dtype: torch.dtype) -> Forward:
        """Return the function from images to what targets are compared with."""
        graph = self.network.graph_in_precision(dtype)

        def forward(images: Tensor) -> list[Tensor]:
            values = {Ref(IMAGE): images}
            for nodes, norm in self.parts:
                values |= graph.replay_values(nodes, values)
                if norm is not None:
                    at = Ref(norm.convolution)
                    mean, variance = self.known[at]
                    slope = norm.gamma / (variance + norm.eps).sqrt()
                    slope, offset = (t.to(dtype)[:, None, None] for t in (slope, norm.beta - slope * mean))
                    values[norm.returned] = slope * values[at] + offset
            return [path.follow(graph, values) for path in paths]

        return forward


def _scaled(mean: Tensor, variance: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
    """Return means and variances of a normalization's channels in units of the batch's, (2 C,)."""
    return torch.cat([mean / known[1].sqrt(), variance / known[1]])
