"""The input of a linear layer, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, attacks
from attacks.labels.recovery import single_label
from attacks.update.first_linear_layer import LinearLayer, first_linear
from fl.ranges import OpenShare
from fl.tensors import Tensors
from fl.view import ServerView

ALTERNATIONS = 20
"""Rounds of the rank-one fit: under noise or a mask the bias alone is a poor guess of the signal."""


@attacks.register("analytic")
@dataclass(frozen=True, kw_only=True)
class Analytic(Attack):
    """Reads the input of the first linear layer with a bias off its gradient (Geiping et al., NeurIPS 2020, Prop. 3.1).

    The gradients are sums over the images, gW = sum of delta x^T, gb = sum of delta. One image: x = gW^T gb / |gb|^2,
    after any number of steps on it; where a defense is known, the rank-one fit of what it let through, each tensor at
    its trust. Several images, one step: a neuron that a ReLU silences for all images but one has x = gW_r / gb_r for
    that one. Which neurons do is not in the gradient, but can be checked: the network, given x and a label, sends back
    a signal u of its own, and u x^T is one of the gradient's summands only if taking it away lowers the rank by one,
    that is, if u lies in the columns of gW and x^T gW^+ u = 1 (Wedderburn, 1934). Only images that pass are handed out,
    with that label. Where the layer is given the image, x is it; else its input goes under `features`.

    An unknown defense may have shortened weight and bias apart: then a rank-one fit does not show how bright x is, and
    a single image counts as verified only if the network sends back the observed signal for it.

    Threat model: an honest server with the layer's update, and for several images all weights.

    Attributes:
        fits: share of the update that one image may leave unexplained, and of the rank test's equations that may miss,
            for the result to be `verified`.
    """

    plain: ClassVar[str] = "reads the picture off the update of the first fully connected layer, without guessing."

    fits: OpenShare = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.fits < 1:
            raise ValueError(f"expected fits in (0, 1), got {self.fits}")

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return the images, or the layer's input."""
        layer = first_linear(view)
        if isinstance(layer, NotApplicable):
            return layer
        if view.batch_size == 1:
            return self._invert_single_image(view, layer)
        reason = _obstacle(view, layer)
        if reason is not None or view.batch_size is None or layer.scale is None:
            return NotApplicable(reason or "the size of the gradient is unknown, so no image could be checked")
        return self._images_of_single_neurons(layer, view.batch_size, layer.scale / view.batch_size)

    def _invert_single_image(self, view: ServerView, layer: LinearLayer) -> Reconstruction | NotApplicable:
        if not layer.is_given_images and layer.steps != 1:
            return NotApplicable(f"{layer.name!r} is not given the image, and its input changes from step to step")
        x, known, left = _fit_rank_one(layer)
        labels, note = single_label(view)
        private: Tensors = {} if layer.is_given_images else {"features": x.to(view.dtype)}
        return Reconstruction(
            inputs=layer.pixels(x[None]) if layer.is_given_images else None,
            labels=labels,
            objective=left,
            private=private,
            knowledge=() if view.labels is None else ("labels",),
            verified=known and left <= self.fits and layer.has_true_size(x[None], layer.bias_update[None]),
            note=note,
        )

    def _images_of_single_neurons(self, layer: LinearLayer, count: int, unit: float) -> Reconstruction | NotApplicable:
        """Return images that one neuron sees alone, at most `count`.

        `unit` is what a gradient of size 1 of one image adds to the update.
        """
        rows = layer.bias_update.abs() > 1e-9 * layer.bias_update.abs().max()
        inputs = layer.update[rows] / layer.bias_update[rows, None]
        inputs = inputs[_within_pixel_range(layer, inputs, self.fits)]
        if not len(inputs):
            return NotApplicable("every neuron sees several images: no ratio of its gradients is a picture")
        whole = torch.cat([layer.update, layer.bias_update[:, None]], 1)
        left, singular, right = torch.linalg.svd(whole, full_matrices=False)
        rank = min(count, int((singular > 1e-12 * singular[0]).sum()))
        if rank >= min(whole.shape):
            return NotApplicable("the gradient has full rank: whether a neuron sees one image can't be checked")
        left, singular, right = left[:, :rank], singular[:rank], right[:rank]
        ones = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
        found: list[tuple[float, Tensor, int]] = []
        for label in range(layer.view.task.num_classes):
            signal = layer.signals(inputs, label) * unit
            inside = signal @ left
            off = (signal - inside @ left.mT).norm(dim=1) / signal.norm(dim=1)
            ratio = ((ones @ right.mT / singular) * inside).sum(1)
            miss = torch.maximum(off, (ratio - 1).abs())
            found += [(float(miss[i]), inputs[i], label) for i in (miss <= self.fits).nonzero().flatten().tolist()]
        return self._drop_duplicates(layer, found)

    def _drop_duplicates(
        self, layer: LinearLayer, found: list[tuple[float, Tensor, int]]
    ) -> Reconstruction | NotApplicable:
        """Return each image once, the neuron that fits best first."""
        kept: list[tuple[float, Tensor, int]] = []
        for entry in sorted(found, key=lambda item: item[0]):
            if all(float((entry[1] - x).norm()) > 10 * self.fits * float(x.norm()) for _, x, _ in kept):
                kept.append(entry)
        if not kept:
            return NotApplicable("no neuron is active for one image alone")
        return Reconstruction(
            inputs=layer.pixels(torch.stack([x for _, x, _ in kept])),
            labels=torch.tensor([label for _, _, label in kept], device=layer.view.device),
            objective=max(miss for miss, _, _ in kept),
            verified=True,
        )


def _fit_rank_one(layer: LinearLayer) -> tuple[Tensor, bool, float]:
    """Return the input x (n,), which of its entries were sent, and the unexplained share of the update."""
    moved, bias = layer.update, layer.bias_update
    sent = torch.ones_like(moved) if layer.transmitted is None else layer.transmitted
    moved, trust = moved * sent, layer.trust**2
    heard = (bias != 0).double() * trust
    signal = bias
    for _ in range(ALTERNATIONS):
        x = _ratio_or_zero(signal @ moved, signal.square() @ sent)
        signal = _ratio_or_zero(moved @ x + heard * bias, sent @ x.square() + heard)
    x, weight = _ratio_or_zero(signal @ moved, signal.square() @ sent), signal.square() @ sent
    # the fit knows x up to a factor that the bias alone fixes; at the optimum it is right already
    left = float((moved - sent * torch.outer(signal, x)).norm() / moved.norm()) if bool(moved.any()) else 0.0
    return x, bool((weight > 1e-6 * signal.square().sum()).all()), left


def _ratio_or_zero(top: Tensor, bottom: Tensor) -> Tensor:
    """Return `top / bottom`, zero where nothing was sent."""
    return torch.where(bottom > 0, top / bottom.where(bottom > 0, torch.ones_like(bottom)), torch.zeros_like(top))


def _within_pixel_range(layer: LinearLayer, inputs: Tensor, slack: float) -> Tensor:
    """Return which of the inputs (N, n) are pixels in [0, 1]."""
    pixels = layer.to_pixels(inputs).flatten(1)
    return (pixels.amin(1) >= -slack) & (pixels.amax(1) <= 1 + slack)


def _obstacle(view: ServerView, layer: LinearLayer) -> str | None:
    """Return why the images of a batch can't be told apart and checked, or None."""
    if view.batch_size is None:
        return "the number of images is unknown"
    if not view.batch_size:
        return "no image was fed"
    if layer.steps != 1:
        return "several images take one local step"
    if not layer.is_given_images:
        return f"{layer.name!r} is not given the image"
    if view.private or not view.method.uses_labels:
        return "what flows back can't be computed: the network above the layer is private"
    return None
