"""Reads the inputs of single layers off their gradients: exact where those have rank one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl.models.building_blocks.adapters import ConvAdapter
from fl.tensors import Tensors, dense
from fl.view import ServerView

MAX_RESIDUAL = 1e-3
"""A gradient is an outer product if that explains all of it but this share."""


def layer_inputs(view: ServerView, weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> Tensors:
    """Return the inputs of the layers whose gradient of one step is one outer product, under `features/layer`.

    A linear layer's gradients are sum_p delta_p x_p^T and sum_p delta_p over images and positions p. Where all delta_p
    point in one direction, the weight's has rank one and gives the mean of x_p, weighted by their lengths: the input
    itself if there is one image and one position that counts, as in a vision transformer's last block, of which the
    classifier sees the class token alone. In a `ConvAdapter` the bias of the last norm takes the place of the layer's,
    and what comes out is the input of the adapter. Below global average pooling, where every position gets the same
    delta, that is the mean over the map: the pooled features of the network below.

    Args:
        view: of one step.
        weights: of the network, as far as known, by name.
        gradient: likewise, up to one common factor.
    """
    found: Tensors = {}
    for name, module in view.client.task.model.named_modules():
        if isinstance(module, nn.Linear):
            x = _linear_input(name, gradient)
        elif isinstance(module, ConvAdapter) and not view.method.train_mode:  # batch statistics couple the positions
            x = _adapter_input(name, module, {**weights, **view.client.task.buffers, **view.buffers}, gradient)
        else:
            continue
        if x is not None:
            found[f"features/{name}"] = x.to(view.dtype)
    return found


def _linear_input(name: str, gradient: Mapping[str, Tensor]) -> Tensor | None:
    if not {f"{name}.weight", f"{name}.bias"} <= gradient.keys():
        return None
    return _rank_one_input(gradient[f"{name}.weight"], gradient[f"{name}.bias"])


def _adapter_input(
    name: str, module: ConvAdapter, known: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the mean input (C,) of the adapter from that of its convolution, through the norm before."""
    first, last = f"{name}.before", f"{name}.after"
    matrix = f"{name}.conv.weight"
    if not {matrix, f"{last}.bias"} <= gradient.keys():
        return None
    slope, offset = _batch_norm_affine(module.after, last, known)[0], gradient[f"{last}.bias"].double()
    x = _rank_one_input(gradient[matrix].flatten(1), slope * offset)
    if x is None:
        return None
    slope, offset = _batch_norm_affine(module.before, first, known)
    return (x - offset) / slope


def _batch_norm_affine(norm: nn.BatchNorm2d, name: str, known: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the slope and offset (C,) of batch norm with fixed statistics."""
    kinds = ("weight", "bias", "running_mean", "running_var")
    weight, bias, mean, variance = (dense(known[f"{name}.{kind}"]).double() for kind in kinds)
    slope = weight / (variance + norm.eps).sqrt()
    return slope, bias - mean * slope


def _rank_one_input(matrix: Tensor, delta: Tensor) -> Tensor | None:
    """Return the x of `delta x^T`, or None if `matrix` is nothing of the kind; both (n, m) and (n,) of any unit."""
    matrix, delta = matrix.double(), delta.double()
    if not bool(delta.any()) or not bool(matrix.any()):
        return None
    unit = delta / delta.norm()
    row = unit @ matrix
    if float((matrix - torch.outer(unit, row)).norm()) > MAX_RESIDUAL * float(matrix.norm()):
        return None
    return row / delta.norm()
