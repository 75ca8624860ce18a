"""Finds pictures through the lowest max pooling of a network, whose outputs and signal are known.

Below it stand a ReLU, which may also come behind it, what is affine, a convolution, and above the picture nothing more
(ImageNet's ResNets) or further layers (VGG). Features below such a pooling say too little by themselves: of nine
positions one is passed on. The gradient of the convolution says more, and both are solved together
(`pooled_convolution`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.feature_inversion import GRAY, InvertedImages
from attacks.analytic.graph.linearization import Forward
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.pooled_convolution import (
    AnnealingSettings,
    InputMap,
    PooledConvolution,
    PooledObservation,
    invert_pooled_convolution,
    measure_misfit,
    relative_misses,
)
from attacks.analytic.graph.pooling_structure import (
    compose_scalings,
    follow_scalings,
    read_pooled_activation,
)
from attacks.analytic.graph.position_correction import Positions, correct_positions
from attacks.analytic.graph.propagation import UnknownError
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from attacks.network.operation_trace import IMAGE, Ref
from fl.seeds import stream

MIN_NOISE = 1e-6
"""Relative error of pooled outputs, at least, by sums in float32."""
MAX_MISFIT = 2e-5
"""Share of pooled outputs and gradient that a picture of whole levels may leave, at most."""
LEVEL_SHARE = 0.5
"""Share of what one level of the least telling pixel makes of these that a picture of whole levels may leave. In large
pictures that is less than `MAX_MISFIT`."""
PROBES = 16
"""Random signs by which it is estimated what pixels tell."""
LEVELS_SIGMA, FEW_WRONG = 3e-3, 1e-2
"""First standard deviation of outputs, relative to theirs, where a search goes on from whole levels, and the share of
the equations above which that is in vain, since too many pixels are at wrong ones."""
ROUGHNESS, COLOR_ROUGHNESS = 0.0125, 0.00375
"""Scale of differences of neighboring pixels in what all channels share, and in what sets them apart."""
ROUGHER = (3.0, 6.0)
"""Multiples of these scales for further searches, where the first one leaves equations unexplained: smooth pictures
come out best by the first, rough ones by the last."""
REHEATINGS, REHEATING_ROUGHNESS = ((0.05, 0.97, 170), (0.03, 0.98, 220), (0.02, 0.985, 260)), 3.0
"""First standard deviation, its decay and the steps of searches that go on from the best pictures, one after the other,
and the multiple of the scales then. Positions that were decided wrongly are given up by heat, and found by slow cooling
from no more of it than that takes: on pictures of 64 pixels, each gained 1 to 4 dB."""
SEARCH_SECONDS = 120.0
"""CPU seconds after which no further such search begins."""
CORRECTION_SECONDS = 100.0
"""CPU seconds after which positions are not corrected again."""
CORRECTIONS = 3
"""Corrections one after the other, at most."""
CORRECTED_SIGMA = 1e-2
"""First standard deviation of the search after a correction, if whole levels are too far off to start from."""
MAX_CORRECTED_NOISE = 1e-4
"""Relative error of pooled outputs above which the gradient does not tell a wrong position from noise."""


@dataclass(frozen=True)
class PooledStem:
    """A stem with what is known of it.

    Attributes:
        layer: a convolution with what stands behind it, up to pooled outputs.
        known: what was solved for.
        scale: (1, I, 1, 1), of the pixels, where these times `scale`, plus `shift`, are the convolution's input.
        shift: likewise.
        before: what makes the convolution's input of the pixels otherwise.
        target: the pooled outputs as they were solved for.
        name: of the convolution's weight.
    """

    layer: PooledConvolution
    known: PooledObservation
    scale: Tensor
    shift: Tensor
    before: InputMap | None
    target: SolvedTensor
    name: str

    def explain_end(self) -> str:
        """Say what is not known where pictures do not explain all, with counts."""
        opened = int((self.known.pooled > 0).sum())
        counts = f"{opened} pooled outputs above zero and {self.known.gradient.numel()} numbers of its gradient"
        return f"{self.name}: not all positions that max pooling passed on were found, by {counts}"


def read_pooled_stem(solver: GraphSolver) -> PooledStem | None:
    """Return the stem of a network whose pooled outputs and their signal are the lowest that is known, or None.

    Args:
        solver: after its run.
    """
    network, target = solver.network, min(solver.solved, key=lambda solved: solved.ref.node)
    for number, layer in network.layers.items():
        readable = layer.groups == 1 and layer.dilation == (1, 1) and layer.sent is None
        after = follow_scalings(network, number) if readable else None
        pooling = None if after is None else read_pooled_activation(network, after.end)
        if after is not None and pooling is not None and pooling.end == target.ref and target.scaled:
            break
    else:
        return None
    try:
        signal = solver.known.signal(target.ref)
    except UnknownError:
        return None
    slope = after.slope.reshape(-1, 1, 1, 1)
    convolution = PooledConvolution(
        layer.weight * slope,
        after.shift.flatten(),
        layer.stride,
        layer.padding,
        pooling.window,
        pooling.stride,
        pooling.padding,
    )
    noise = max(target.misfit, MIN_NOISE)
    known = PooledObservation(target.values, signal, layer.gradient / slope, noise)
    pixels, taken = compose_scalings(network, Ref(IMAGE)), network.layer_input(number)
    if pixels is not None and pixels.end == taken:
        return PooledStem(convolution, known, pixels.slope, pixels.shift, None, target, layer.name)
    one = torch.ones_like(network.graph.image[:1, :, :1, :1])
    return PooledStem(convolution, known, one, 0 * one, _input_map(network, taken), target, layer.name)


def _input_map(network: NetworkGraph, taken: Ref) -> InputMap:
    """Return what makes a tensor of the network's image."""
    nodes = network.operations_to([taken])

    def forward(dtype: torch.dtype) -> Forward:
        graph = network.graph_in_precision(dtype)
        return lambda images: [graph.replay(nodes, taken, {Ref(IMAGE): images})]

    return InputMap(forward(torch.float64), forward(torch.float32))


def invert_pooled_stem(stem: PooledStem, shape: Sequence[int]) -> InvertedImages:
    """Find the pictures of a stem.

    They count as converged where they come out at whole levels of 8 bits and these explain all equations.

    Args:
        stem: with what is known of it.
        shape: (B, I, H, W) of the pictures, with pixels in [0, 1].
    """
    usual = float(stem.scale.abs().mean())
    settings = AnnealingSettings(ROUGHNESS * usual, COLOR_ROUGHNESS * usual)
    images = _correct(stem, _search_from_gray(stem, shape, settings), settings)
    levels, missed = _to_levels(images), _measure(stem, images)
    missed_by_levels = _measure(stem, levels)
    explained = missed_by_levels <= MAX_MISFIT and missed_by_levels <= LEVEL_SHARE * _least_change(stem, levels)
    if explained:
        images, missed = levels, missed_by_levels
    each = images.new_ones(len(images))
    steps = torch.full((len(images),), settings.steps, device=images.device)
    return InvertedImages(images, missed * each, (each > 0) & explained, steps, settings.steps)


def _search_from_gray(stem: PooledStem, shape: Sequence[int], settings: AnnealingSettings) -> Tensor:
    """Return the pictures that leave least of the equations, of searches that take pictures to be smooth or rough."""
    gray = torch.full(tuple(shape), GRAY, dtype=stem.scale.dtype, device=stem.scale.device)
    began = time.process_time()
    images = _finish(stem, _search(stem, gray, settings), settings)

    def is_done() -> bool:
        late = time.process_time() - began > SEARCH_SECONDS
        return late or _measure(stem, _to_levels(images)) <= MAX_MISFIT

    for factor in ROUGHER:
        if is_done():
            return images
        images = _best(stem, images, _finish(stem, _search(stem, gray, _rougher(settings, factor)), settings))
    last, rough = images, _rougher(settings, REHEATING_ROUGHNESS)
    for sigma, decay, steps in REHEATINGS:
        if is_done():
            return images
        last = _search(stem, last, replace(rough, first_sigma=sigma, decay=decay, steps=steps))
        images = _best(stem, images, _finish(stem, last, settings))
    return images


def _correct(stem: PooledStem, images: Tensor, settings: AnnealingSettings) -> Tensor:
    """Correct positions and search anew by turns, and return the pictures whose whole levels leave least.

    Args:
        stem: with what is known of it; where further layers lie below it, nothing is corrected.
        images: that a search found.
        settings: of the searches between corrections, which go by rougher pictures.
    """
    began, best, least = time.process_time(), images, _measure(stem, _to_levels(images))
    rough = _rougher(settings, REHEATING_ROUGHNESS)
    if stem.before is not None or stem.known.noise > MAX_CORRECTED_NOISE:
        return images
    while least > MAX_MISFIT and time.process_time() - began < CORRECTION_SECONDS:
        taken = stem.scale * images + stem.shift
        positions = Positions.nearest(stem.layer, stem.known, taken)
        for _ in range(CORRECTIONS):
            if positions is None:
                return best
            taken, positions, moved = correct_positions(stem.layer, stem.known, taken, positions)
            images = (taken - stem.shift) / stem.scale
            missed = _measure(stem, _to_levels(images))
            if missed < least:
                best, least = images, missed
            if least <= MAX_MISFIT or not moved:
                break
        if least > MAX_MISFIT:
            near = missed < FEW_WRONG
            start, sigma = (_to_levels(images), LEVELS_SIGMA) if near else (images, CORRECTED_SIGMA)
            images = _search(stem, start, replace(rough, first_sigma=sigma))
    return best


def _finish(stem: PooledStem, images: Tensor, settings: AnnealingSettings) -> Tensor:
    """Return pictures that go on from whole levels, where few of these are wrong: the equations tell which."""
    levels = _to_levels(images)
    if not MAX_MISFIT < _measure(stem, levels) < FEW_WRONG:
        return images
    return _best(stem, images, _search(stem, levels, replace(settings, first_sigma=LEVELS_SIGMA)))


def _best(stem: PooledStem, images: Tensor, others: Tensor) -> Tensor:
    """Return the pictures that leave less of the equations, the first ones if both leave the same."""
    return others if _measure(stem, others) < _measure(stem, images) else images


def _rougher(settings: AnnealingSettings, factor: float) -> AnnealingSettings:
    return replace(settings, roughness=factor * settings.roughness, color_roughness=factor * settings.color_roughness)


def _search(stem: PooledStem, start: Tensor, settings: AnnealingSettings) -> Tensor:
    taken = stem.scale * start + stem.shift
    return (invert_pooled_convolution(stem.layer, stem.known, taken, settings, stem.before) - stem.shift) / stem.scale


def _to_levels(images: Tensor) -> Tensor:
    return (255 * images).round().clamp(0, 255) / 255


def _measure(stem: PooledStem, images: Tensor) -> float:
    """Return what pictures leave of the equations."""
    with torch.no_grad():
        return measure_misfit(stem.layer, stem.known, _layer_input(stem, images))


def _least_change(stem: PooledStem, images: Tensor) -> float:
    """Return how far one level of 8 bits moves the equations, of the number of the pictures that moves them least.

    The squares of the columns of their derivative are estimated by random signs (Hutchinson).
    """
    at = images.detach().requires_grad_()
    with torch.enable_grad():
        missed = relative_misses(stem.layer, stem.known, _layer_input(stem, at))
    generator = stream(0, "what pixels tell")
    squares = torch.zeros_like(images)
    for _ in range(PROBES):
        signs = [(2 * torch.randint(0, 2, m.shape, generator=generator) - 1).to(m) for m in missed]
        squares += torch.autograd.grad(missed, at, signs, retain_graph=True)[0].square()
    return float((squares.min() / PROBES).sqrt()) / 255


def _layer_input(stem: PooledStem, images: Tensor) -> Tensor:
    taken = stem.scale * images + stem.shift
    return taken if stem.before is None else stem.before.forward(taken)[0]
