r"""Searches for pictures of features that are fewer than the pictures' numbers: smooth ones that meet them.

Where a network's equations end high up, what is known of a picture x are n numbers f(x) = t with n < N, the picture's
own. Steps that lower |f(x) - t|^2 alone end at any of the pictures that meet them. So the total variation of x goes
along to the end, and annealing fades it as far as features are met:

    min over x in [0, 1] of sum_k |f_k(x) - t_k|^2 / |t_k|^2 + w TV(x),  w falling to zero in a straight line.

Features alone count whose numbers say something of their own: those that the image reaches without passing through
another known tensor (`nearest_features`). What gradients say of the first layer that has too few equations counts, too
(`input_projections.weighted_projection`): nothing else tells more of the picture, and nothing could be checked.
"""

from __future__ import annotations

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
MAX_MISSING = 0.1
"""Share of the numbers that move features by which these may be fewer, or other pictures are taken to meet them. Zeros
of a ReLU's output count as none: they bound what goes into it, and beside the client's picture these bounds hold as
well."""


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


def count_moving_numbers(forward: Forward, shape: Sequence[int], device: torch.device, seed: int) -> int:
    """Return how many numbers of a picture move its features: a stride may pass over pixels, say.

    Args:
        forward: from pictures to features, in single precision.
        shape: (C, H, W) of a picture.
        device: where it is computed.
        seed: of the picture that is asked, and of the sum of features whose gradient tells.
    """
    generator = stream(seed, "moving numbers")
    image = torch.rand((1, *shape), generator=generator).to(device).requires_grad_()
    with torch.enable_grad():
        drawn = [(v * torch.randn(v.shape, generator=generator).to(v)).sum() for v in forward(image)]
        (slopes,) = torch.autograd.grad(torch.stack(drawn).sum(), image)
    return int((slopes != 0).sum())


def count_missing_numbers(targets: Sequence[FeatureTarget], moving: int) -> int:
    """Return by how many features that do not follow from each other are fewer than the numbers that move them.

    Args:
        targets: the features.
        moving: numbers of a picture that move features.
    """
    return max(0, moving - round(sum(target.equations for target in targets if target.counts)))


def are_too_few(missing: int, moving: int) -> bool:
    """Return whether features are so few that other pictures meet them as well.

    Args:
        missing: as `count_missing_numbers` returns it.
        moving: numbers of a picture that move features.
    """
    return missing > MAX_MISSING * moving


def search_smooth_pictures(
    forward: Forward, single_forward: Forward, targets: Sequence[FeatureTarget], shape: Sequence[int], seed: int
) -> InvertedImages:
    """Return smooth pictures (B, C, H, W) that meet few features, in as much time as their size is given.

    Args:
        forward: from pictures to features.
        single_forward: the same in single precision.
        targets: the features. All count alike, guides, too.
        shape: of the pictures.
        seed: of the start.
    """
    problem = FeatureProblem.of(forward, single_forward, targets)
    evenly = replace(problem, targets=tuple(target.going_along() for target in targets)).to(problem.work_type)
    end, steps = time.process_time() + search_seconds(shape), 0

    def late() -> bool:
        nonlocal steps
        if time.process_time() > end:
            return True
        steps += 1
        return False

    def misfit(images: Tensor) -> Tensor:
        residuals = evenly.residuals(tuple(evenly.single_forward(images)))
        return torch.stack([r.flatten(1).square().sum(1) for r in residuals]).sum(0) / len(residuals)

    value = targets[0].value
    noise = torch.randn(tuple(shape), generator=stream(seed, "smooth pictures"), dtype=torch.float64).to(value)
    start = (GRAY + SMOOTH_NOISE * noise).to(evenly.work_type)
    found = anneal(misfit, start, STEPS, late, SMOOTH).to(value)
    residual = problem.relative_residual(found)
    taken = torch.full((len(found),), steps, device=found.device)
    return InvertedImages(found, residual, residual <= AT_NOISE * problem.noise, taken, 0)
