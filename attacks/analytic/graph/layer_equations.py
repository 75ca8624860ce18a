"""The equations of one weighted layer: its gradient is linear in its input and in what flows back into it.

A convolution with input x (n, K, H, W) and signal s (n, C, h, w) has the gradient

    G[c, k, i, j] = sum over images and positions q of s[n, c, q] x[n, k, stride q + dilation (i, j) - padding].

Of a known signal that is for every input channel k a system A x_k = G_k with one matrix A for all of them; of a known
input, for every output channel c, a system X^T s_c = G_c with one matrix X, the patches. A linear layer is a
convolution of one position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input


@dataclass(frozen=True)
class LayerEquations:
    """A weighted layer with its gradient, as a convolution.

    Attributes:
        name: of its weight in the update.
        weight: (C, K / groups, kh, kw).
        gradient: like the weight.
        stride: rows, columns.
        padding: likewise.
        dilation: likewise.
        groups: of channels.
        input_shape: (n, K, H, W).
        output_shape: (n, C, h, w).
        sent: (C, K / groups, kh, kw) bool, which entries of the gradient are known; None where all are.
    """

    name: str
    weight: Tensor
    gradient: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    input_shape: torch.Size
    output_shape: torch.Size
    sent: Tensor | None = None

    @property
    def unknown_inputs(self) -> int:
        """Return the numbers of one input channel, those that no output sees included."""
        return self.input_shape[0] * self.input_shape[2] * self.input_shape[3]

    @property
    def unknown_signals(self) -> int:
        """Return the numbers of one output channel."""
        return self.output_shape[0] * self.output_shape[2] * self.output_shape[3]

    @property
    def input_equations(self) -> int:
        """Return the equations for one input channel where the signal is known, on average where some were not sent."""
        every = self.output_shape[1] // self.groups * self.weight.shape[2] * self.weight.shape[3]
        return int(self.sent_share * every)

    @property
    def sent_share(self) -> float:
        """Return the share of the gradient's entries that are known."""
        return 1.0 if self.sent is None else float(self.sent.double().mean())

    @property
    def signal_equations(self) -> int:
        """Return the equations for one output channel's signal where the input is known, likewise."""
        return int(self.sent_share * self.weight[0].numel())

    @property
    def keeps_size(self) -> bool:
        """Return whether it is a convolution of stride 1 with zeros at the rim, so that its output is as large."""
        kernel = self.weight.shape[2:]
        return (
            self.groups == 1
            and min(kernel) >= 3
            and all(k % 2 == 1 for k in kernel)
            and self.stride == self.dilation == (1, 1)
            and self.padding == (kernel[0] // 2, kernel[1] // 2)
        )

    @property
    def is_pointwise(self) -> bool:
        """Return whether it takes single positions, and several of them."""
        return self.groups == 1 and max(self.weight.shape[2:]) == 1 and self.unknown_signals > 1

    def count_factors(self) -> tuple[int, int]:
        """Return how many independent equations there are at most for the input and the signal of a pointwise layer.

        At N positions of all images the gradient is a product of matrices (C, N) and (N, K), of rank r. A bias behind
        it is that of (C, N) and ones. Where r is N, the columns of (C, N) are known but for their mixing, of which it
        tells N numbers; else it tells C.

        Returns:
            The equations, and the N (C + K) numbers that they are for.
        """
        positions, (channels, inputs) = self.unknown_signals, self.weight.shape[:2]
        rank = min(positions, channels, inputs)
        sums = positions if rank == positions else channels
        return rank * (channels + inputs - rank) + sums, positions * (channels + inputs)

    def pull_back(self, signal: Tensor) -> Tensor:
        """Return what flows back into the input (n, K, H, W) from the signal (n, C, h, w)."""
        found: Tensor = conv2d_input(
            self.input_shape, self.weight, signal, self.stride, self.padding, self.dilation, self.groups
        )
        return found

    def signal_matrix(self, signal: Tensor) -> Tensor:
        """Return A (C, kh kw, n H W), the equations of one input channel's numbers; for one group of channels."""
        n, c, h, w = signal.shape
        kh, kw = self.weight.shape[2:]
        (sy, sx), (py, px), (dy, dx) = self.stride, self.padding, self.dilation
        rows, columns = self.input_shape[2:]
        wide = signal.new_zeros(n, c, kh, kw, rows + 2 * py, columns + 2 * px)
        for i in range(kh):
            for j in range(kw):
                top, first = i * dy, j * dx
                wide[:, :, i, j, top : top + sy * (h - 1) + 1 : sy, first : first + sx * (w - 1) + 1 : sx] = signal
        inner = wide[..., py : py + rows, px : px + columns]
        return inner.reshape(n, c, kh * kw, -1).permute(1, 2, 0, 3).reshape(c, kh * kw, -1)

    def patches(self, values: Tensor) -> Tensor:
        """Return X (n h w, K kh kw), what each output position sees."""
        found = functional.unfold(values, self.weight.shape[2:], self.dilation, self.padding, self.stride)
        return found.transpose(1, 2).reshape(-1, found.shape[1])

    def as_channels(self, values: Tensor) -> Tensor:
        """Return (n, C, h, w) as a row for each channel (C, n h w)."""
        return values.transpose(0, 1).flatten(1)

    def as_images(self, channels: Tensor, like: torch.Size) -> Tensor:
        """Return rows of channels (C, n h w) as (n, C, h, w)."""
        return channels.reshape(like[1], like[0], *like[2:]).transpose(0, 1)

    def right_side(self) -> Tensor:
        """Return G (C, kh kw, K), the right-hand side of the systems of all input channels; for one group."""
        return self.gradient.flatten(2).transpose(1, 2)

    def sent_equations(self) -> Tensor | None:
        """Return which entries of `right_side` are known (C, kh kw, K), or None where all are."""
        return None if self.sent is None else self.sent.flatten(2).transpose(1, 2)

    def unexplained(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Return what is left of the known entries of G (C, kh kw, K), 0 elsewhere.

        Args:
            matrix: A (C, kh kw, n H W).
            x: (n H W, K).
        """
        residual = self.right_side() - matrix @ x
        known = self.sent_equations()
        return residual if known is None else residual * known
