"""What flows back into a convolution by the shifts of its gradient (`shift_structure`), by image (`unmixing`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.layer_solves import (
    NO_GRADIENT,
    KnownSignal,
    fit_in_turn,
    solve_input,
)
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.shift_structure import count_images, find_signal_columns
from attacks.analytic.graph.unmixing import unmix_sparse, unmix_two_valued
from attacks.analytic.graph.unsent_entries import complete_low_rank
from attacks.network.operation_trace import Ref

MIN_CHANNEL_SIGNAL, MAX_TWO_VALUE_ERROR = 3e-2, 1e-2
"""Share of the largest signal above which a channel counts, and how far from two values its signals may be."""
CLEAR_GAP = 1e4
"""How many times larger the gradient's last singular value that counts is than the next one, where noise counts for
nothing."""
MIN_DIRECTION = 1e-7
"""Share of the largest singular value of a gradient below which a direction is rounding."""
MIN_ROUNDS = 2
"""Rounds of unmixing, beside one for each image."""
UNSHIFTED = (
    "not a convolution of stride 1 with zeros at the rim that keeps the size: its gradient has no shifts of a map"
)
"""Why a layer cannot be begun with."""


@dataclass
class ShiftSignals:
    """Finds what flows back into a convolution by the shifts of its gradient alone, image by image.

    Attributes:
        network: the graph.
        images: how many there are.
        ends: why a layer can't be begun with, by its weight; added to.
        distinct: images that the first gradient with shifts is of, where these are fewer; or None.
    """

    network: NetworkGraph
    images: int
    ends: dict[str, str]
    distinct: int | None = None

    def find(self, number: int, *, is_first: bool) -> tuple[Tensor, bool] | None:
        """Return what flows back into a convolution, by image (C, P, B) up to factors, and whether it is two-valued.

        It is None where the gradient does not tell; `ends` says why.

        Args:
            number: of the convolution's operation.
            is_first: whether no other convolution was begun with.
        """
        layer = self.network.layers[number]
        if not layer.keeps_size:
            if is_first and max(layer.weight.shape[2:]) > 1:
                self.ends.setdefault(layer.name, UNSHIFTED)
            return None
        gradient = self._whole_gradient(layer)
        columns = None if gradient is None else self._find_columns(layer, gradient)
        return None if columns is None else self._tell_images_apart(number, columns)

    def _whole_gradient(self, layer: LayerEquations) -> Tensor | None:
        """Return a convolution's gradient with what the defense left out, or None where it tells too little."""
        if not bool(layer.gradient.any()):
            self.ends.setdefault(layer.name, NO_GRADIENT)
            return None
        positions = layer.output_shape[2] * layer.output_shape[3]
        rank = self.images * positions
        channels, inputs = layer.weight.shape[:2]
        if rank > channels or rank > 3 * inputs:
            equations = f"{min(channels, 3 * inputs)} directions for {rank} positions of {self.images} images"
            few = f"too few channels to tell positions apart: {equations}{self._count_equal(layer)}"
            self.ends.setdefault(layer.name, few)  # why what is known from above gave no input comes first
            return None
        gradient = layer.gradient
        if layer.sent is None:
            return gradient
        complete = complete_low_rank(gradient.flatten(1), layer.sent.flatten(1), rank)
        if complete is None:
            few = f"{int((gradient != 0).sum())} of its gradient's {gradient.numel()} entries are other than zero"
            self.ends.setdefault(
                layer.name, f"{few}, the defense left some out: too few to tell a matrix of rank {rank}"
            )
            return None
        return complete.reshape(gradient.shape)

    def _find_columns(self, layer: LayerEquations, gradient: Tensor) -> Tensor | None:
        """Return mixtures (C, P, B) of the images' signals, or None where too few directions flow back."""
        height, width = layer.output_shape[2:]
        found = find_signal_columns(gradient, (height, width), self.images)
        if not found.weakest > MIN_DIRECTION:
            few = f"what flows back has fewer than {self.images * height * width} independent directions"
            self.ends.setdefault(layer.name, few + self._count_equal(layer))
            return None
        is_noisy = found.gap < CLEAR_GAP or layer.sent is not None
        return self._fit_columns(layer, found.columns) if is_noisy else found.columns

    def _tell_images_apart(self, number: int, columns: Tensor) -> tuple[Tensor, bool] | None:
        """Return the signal of each image (C, P, B) out of mixtures, and whether it is two-valued; None if they don't.

        What is not confirmed is believed if it looks right: the equations below would contradict it.
        """
        layer, slope = self.network.layers[number], self._slope_above(number)
        two_valued = unmix_two_valued(columns, slope=slope, rounds=MIN_ROUNDS + self.images)
        if two_valued.directions.shape[1] == self.images:
            single = columns @ two_valued.directions
            if bool(two_valued.confirmed.all()) or _look_two_valued(single, slope):
                # of a leaky ReLU signals of one value may be of either, and of a curved activation they are not two
                return single, slope == 0 and self.network.gate(Ref(number)) is not None
        if self.images == 1:
            return columns, False
        told, positions = int(two_valued.confirmed.sum()), columns.shape[1]
        for rows in (columns, _neighbor_differences(columns)) if positions > 1 else (columns,):
            sparse = unmix_sparse(rows.flatten(0, 1), rounds=MIN_ROUNDS + self.images)
            if int(sparse.confirmed.sum()) == self.images:
                return columns @ sparse.directions, False
            told = max(told, int(sparse.confirmed.sum()))
        single_by_input = self._tell_apart_by_input(number, columns)
        if single_by_input is not None:
            return single_by_input, False
        few = f"the signals of {told} of {self.images} images could be told apart"
        self.ends.setdefault(layer.name, few + self._count_equal(layer))  # which rounding may have hidden further up
        return None

    def _tell_apart_by_input(self, number: int, columns: Tensor) -> Tensor | None:
        """Return the signal of each image (C, P, B) by the zeros of what a ReLU made for the layer, or None.

        With signals mixed by A^T inputs are mixed by A^-1: what takes single images out of the one, V, has its inverse
        transposed for the other.
        """
        layer = self.network.layers[number]
        if not self.network.is_rectified(self.network.layer_input(number)):
            return None
        mixed = solve_input([KnownSignal(layer, columns.permute(2, 0, 1).reshape(layer.output_shape))])
        if mixed is None:
            return None
        found = unmix_sparse(mixed.values.flatten(1).mT, nonnegative=True, rounds=MIN_ROUNDS + self.images)
        return columns @ torch.linalg.inv(found.directions).mT if found.complete else None

    @staticmethod
    def _fit_columns(layer: LayerEquations, columns: Tensor) -> Tensor:
        """Return columns (C, P, B) that explain all of a noisy gradient better."""
        fitted = fit_in_turn(layer, columns.permute(2, 0, 1).reshape(layer.output_shape))
        return fitted.flatten(2).permute(1, 2, 0)

    def _slope_above(self, number: int) -> float:
        """Return the slope below zero of the activation that takes a layer's output; 0 where there is none."""
        gate = self.network.gate(Ref(number))
        return 0.0 if gate is None else self.network.activations[gate[0]].slope

    def _count_equal(self, layer: LayerEquations) -> str:
        """Note how many distinct images a layer's gradient is of, where these are fewer, and say so."""
        if layer.sent is not None:
            return ""
        positions = layer.output_shape[2] * layer.output_shape[3]
        distinct = count_images(layer.gradient, positions, self.images)
        if distinct is None or distinct >= self.images:
            return ""
        self.distinct = self.distinct or distinct
        return f", as of {distinct} distinct images"


def _neighbor_differences(columns: Tensor) -> Tensor:
    """Return differences of disjoint pairs of positions (C, P / 2, B) of signals (C, P, B).

    An image's are zero where a curved activation, such as ELU, was above zero at both: its slope is 1 there.
    """
    even = columns[:, : columns.shape[1] // 2 * 2]
    return even[:, ::2] - even[:, 1::2]


def _look_two_valued(columns: Tensor, slope: float) -> bool:
    """Return whether in nearly all channels with a signal each image (C, P, B) has one number or `slope` times it."""
    for image in columns.unbind(2):
        largest = image.gather(1, image.abs().argmax(1, keepdim=True))
        heard = largest.abs()[:, 0] > MIN_CHANNEL_SIGNAL * largest.abs().max()
        share = (image / largest)[heard]
        off = torch.minimum((share - slope).abs(), (share - 1).abs()).amax(1)
        if float(off.quantile(0.9)) > MAX_TWO_VALUE_ERROR:
            return False
    return True
