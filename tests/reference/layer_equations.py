"""The equations of a convolution's input, written out row by row with padded values as unknowns (R-GAP, section 3)."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn


def equations(
    layer: nn.Conv2d, signal: Tensor, shape: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradient, weight and padding equations for the padded input (C, H + 2p, W + 2p), one per row.

    Args:
        layer: square kernel, stride and padding.
        signal: dL/d(output) (1, out, h, w).
        shape: of the input (C, H, W).

    Returns:
        K (out C k k, n), W (out h w, n), P (padded, n).
    """
    (p, _), (s, _), (d, _), (k, _) = layer.padding, layer.stride, layer.dilation, layer.kernel_size
    channels, height, width = shape
    flow, weight = signal[0].numpy(), layer.weight.detach().numpy()
    out, high, wide = flow.shape
    padded = (channels, height + 2 * p, width + 2 * p)

    gradient = np.zeros((out, channels, k, k, *padded))
    forward = np.zeros((out, high, wide, *padded))
    for o in range(out):
        for c in range(channels):
            for i in range(k):
                for j in range(k):
                    for y in range(high):
                        for x in range(wide):
                            gradient[o, c, i, j, c, y * s + i * d, x * s + j * d] += flow[o, y, x]
                            forward[o, y, x, c, y * s + i * d, x * s + j * d] += weight[o, c, i, j]
    inner = np.zeros(padded, dtype=bool)
    inner[:, p : p + height, p : p + width] = True
    size = inner.size
    return gradient.reshape(-1, size), forward.reshape(-1, size), np.eye(size)[~inner.flatten()]


def solution(
    layer: nn.Conv2d, signal: Tensor, gradient: Tensor, output: Tensor, shape: tuple[int, int, int]
) -> tuple[np.ndarray, int]:
    """The least-squares input (C, H, W) of a convolution without bias, and how many padded values have no freedom."""
    rows = equations(layer, signal, shape)
    right = [gradient.numpy().flatten(), output.numpy().flatten(), np.zeros(len(rows[2]))]
    found, _, rank, _ = np.linalg.lstsq(np.concatenate(rows), np.concatenate(right), rcond=1e-10)
    p = layer.padding[0]
    channels, height, width = shape
    values = found.reshape(channels, height + 2 * p, width + 2 * p)[:, p : p + height, p : p + width]
    return values, int(rank) - len(rows[2])
