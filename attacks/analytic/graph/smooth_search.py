r"""Searches for pictures of features that are fewer than the pictures' numbers: smooth ones that meet them.

Where a network's equations end high up, what is known of a picture x are n numbers f(x) = t with n < N, the picture's
own. Steps that lower |f(x) - t|^2 alone end at any of the pictures that meet them. So the total variation of x goes
along to the end, and annealing fades it as far as features are met:

    min over x in [0, 1] of sum_k |f_k(x) - t_k|^2 / |t_k|^2 + w TV(x),  w falling to zero in a straight line.

Features alone count whose numbers say something of their own: those that the image reaches without passing through
another known tensor (`nearest_features`). What gradients say of the first layer that has too few equations counts, too
(`input_projections.hear_part`): nothing else tells more of the picture, and here nothing could be checked anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import AT_NOISE, GRAY, SMOOTH_NOISE, InvertedImages
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget
from attacks.analytic.graph.gradient_descent import SMOOTH, anneal
from attacks.analytic.graph.linearization import Forward
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.picture_search import search_seconds
from attacks.analytic.graph.solver import SolvedTensor
from attacks.network.operation_trace import IMAGE, Ref
from fl.seeds import stream

STEPS = 1600
"""Steps of the annealing."""
MAX_MISSING = 0.25
"""Share of a picture's numbers by which features may be fewer, or other pictures are taken to meet them: zeros of a
ReLU's output count as none, though they bound what goes into it."""


def nearest_features(network: NetworkGraph, targets: Sequence[SolvedTensor]) -> list[SolvedTensor]:
    """Return the tensors that the image reaches without passing through another one of them.

    All others follow from these.

    Args:
        network: the graph.
        targets: known tensors.
    """
    known, reached, seen = {target.ref for target in targets}, set[Ref](), set[Ref]()
    waiting = [Ref(IMAGE)]
    while waiting:
        ref = waiting.pop()
        if ref in seen:
            continue
        seen.add(ref)
        if ref in known:
            reached.add(ref)
            continue
        for number in network.consumers.get(ref, []):
            waiting.extend(Ref(number, output) for output in range(len(network.graph.nodes[number].outputs)))
    return [target for target in targets if target.ref in reached]


def count_missing_numbers(targets: Sequence[FeatureTarget], shape: Sequence[int]) -> int:
    """Return by how many features that do not follow from each other are fewer than the numbers of a picture.

    Args:
        targets: the features.
        shape: (C, H, W) of a picture.
    """
    return max(0, math.prod(shape) - round(sum(target.equations for target in targets if target.weight)))


def search_smooth_pictures(
    forward: Forward, single_forward: Forward, targets: Sequence[FeatureTarget], shape: Sequence[int], seed: int
) -> InvertedImages:
    """Return smooth pictures (B, C, H, W) that meet few features, in as much time as their size is given.

    Args:
        forward: from pictures to features.
        single_forward: the same in single precision.
        targets: the features. All count alike, those of weight zero, too.
        shape: of the pictures.
        seed: of the start.
    """
    problem = FeatureProblem.of(forward, single_forward, targets)
    evenly = replace(problem, targets=tuple(replace(target, weight=1.0) for target in targets)).to(problem.work_type)
    end = time.process_time() + search_seconds(shape)

    def misfit(images: Tensor) -> Tensor:
        residuals = evenly.residuals(tuple(evenly.single_forward(images)))
        return torch.stack([r.flatten(1).square().sum(1) for r in residuals]).sum(0) / len(residuals)

    value = targets[0].value
    noise = torch.randn(tuple(shape), generator=stream(seed, "smooth pictures"), dtype=torch.float64).to(value)
    start = (GRAY + SMOOTH_NOISE * noise).to(evenly.work_type)
    found = anneal(misfit, start, STEPS, lambda: time.process_time() > end, SMOOTH).to(value)
    residual = problem.relative_residual(found)
    steps = torch.full((len(found),), STEPS, device=found.device)
    return InvertedImages(found, residual, residual <= AT_NOISE * problem.noise, steps, 0)
