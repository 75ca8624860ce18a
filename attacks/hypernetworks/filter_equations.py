"""The equations of HyperFedNet's update: one hypernetwork makes many filters, and its update is a sum over them.

Symbols. J basic filters with embeddings v_j (v,) of the client; for each input channel i a first layer W_i (d, v),
B_i (d,), whose outputs a_ji = W_i v_j + B_i go through no activation; a last layer W_out (n, d), B_out (n,) makes the n
numbers of filter j at channel i from a_ji. G_ji (n,) is the loss's gradient by them, delta_ji = W_out^T G_ji what flows
back, dX the change of X. One step of SGD gives, up to a common factor,

    (1)  dW_i = sum_j delta_ji v_j^T      (2)  dB_i = sum_j delta_ji
    (3)  dW_out = sum_ji G_ji a_ji^T      (4)  dB_out = sum_ji G_ji.

- Embeddings. By (1) and (2) the rows of [dW_i, dB_i] are combinations of the rows [v_j, 1]: they span the affine hull
  of the embeddings. Of one filter that is v = sum_i dW_i^T dB_i / sum_i |dB_i|^2.
- Ambiguity. For any M (J, J) whose rows sum to 1, v' = M v and G' = M^-T G explain the update as well, so that beyond
  one filter the embeddings show up to J (J - 1) numbers at best. Known starting values select among them.
- Gradients. With embeddings known, (3) and (4) are linear in G, and determine it where the activations [a_ji, 1] are
  independent: of at most d + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl.models.hypernetworks.filter_hypernetwork import Shape, basic_filters, hidden_activations, layer_names
from fl.tensors import Tensors, dense

MIN_SINGULAR_VALUE = 1e-5
"""Singular values below this share of the largest one are taken for rounding."""


@dataclass(frozen=True)
class FilterUpdate:
    """One hypernetwork of `fl.models.hypernetworks.filter_hypernetwork` and its change by one client, decay taken off.

    Attributes:
        shape: of a basic filter.
        filters: how many basic filters it makes (J).
        layers: W (in, d, v), B (in, d), W_out (n, d), B_out (n,), float64.
        change: theirs, likewise.
        rounding: relative size of what rounding alone may leave in the change.
    """

    shape: Shape
    filters: int
    layers: tuple[Tensor, Tensor, Tensor, Tensor]
    change: tuple[Tensor, Tensor, Tensor, Tensor]
    rounding: float = 0.0

    @classmethod
    def of(cls, shape: Shape, filters: int, shared: Tensors, change: Tensors, *, rounding: float = 0.0) -> FilterUpdate:
        """Return the equations, from the server's parameters and their change by name.

        Args:
            shape: of the basic filter (out, in, h, w).
            filters: number of filters J.
            shared: the server's parameters.
            change: how they moved, without decay.
            rounding: how far a number may be off, relative to its start.
        """
        weight, bias, last, offset = layer_names(shape)
        names = (weight, bias, last, offset)
        first, second, third, fourth = (dense(shared[n]).double() for n in names)
        moved = [dense(change[n]).double() for n in names]
        return cls(shape, filters, (first, second, third, fourth), (moved[0], moved[1], moved[2], moved[3]), rounding)

    @property
    def is_inactive(self) -> bool:
        """Whether the first layer did not move by more than rounding."""
        moved = zip(self.change[:2], self.layers[:2], strict=True)
        return any(float(change.norm()) <= self.rounding * float(layer.norm()) for change, layer in moved)

    @cached_property
    def independent_numbers(self) -> int:
        """How many of the numbers received are independent of each other, at most.

        The layers' changes agree on sum_i dB_i and on sum_ji delta_ji a_ji^T: d + d^2 relations. Few filters make no
        more numbers than their embeddings and gradients have, less those of M.
        """
        sent = sum(part.numel() for part in self.change)
        inside, d, v = self.layers[0].shape
        made = self.filters * (v + inside * len(self.layers[3])) - self.undetermined_numbers
        return min(sent - d - d * d, made)

    @property
    def undetermined_numbers(self) -> int:
        """How many numbers of the embeddings no update tells: those of M, or all of them."""
        size = self.layers[0].shape[2]
        return self.filters * min(self.filters - 1, size)

    @cached_property
    def _first_layer_rows(self) -> Tensor:
        """[dW_i, dB_i], row by row (in * d, v + 1), in a unit of its own."""
        weight, bias = self.change[0], self.change[1]
        rows = torch.cat([weight.flatten(0, 1), bias.flatten()[:, None]], 1)
        return rows / rows.abs().max()

    def single_embedding(self) -> Tensor:
        """Return the embedding (1, v) of a single filter: v = sum_i dW_i^T dB_i / sum_i |dB_i|^2."""
        rows = self._first_layer_rows
        delta = rows[:, -1]
        return (delta @ rows[:, :-1] / (delta @ delta))[None]

    def nearest_embeddings(self, guesses: Tensor) -> Tensor:
        """Return the points (J, v) nearest to `guesses` (J, v) of the affine hull of the embeddings.

        The rows [v_j, 1] span the rows of [dW_i, dB_i]; with more filters than v the hull is the whole space.
        """
        _, sizes, right = torch.linalg.svd(self._first_layer_rows, full_matrices=False)
        rank = min(self.filters, int((sizes > MIN_SINGULAR_VALUE * sizes[0]).sum()))
        if rank > guesses.shape[1]:
            return guesses
        basis = right[:rank]
        last = basis[:, -1]
        own = torch.cat([guesses, guesses.new_ones(len(guesses), 1)], 1) @ basis.mT
        own = own + (1 - own @ last)[:, None] * last / (last @ last)
        return (own @ basis)[:, :-1]

    def misfit(self, embeddings: Tensor) -> float:
        """Return what the first layer's equations leave of its change with these embeddings (J, v), relative to it."""
        known = torch.cat([embeddings, embeddings.new_ones(len(embeddings), 1)], 1)
        solved = self._first_layer_rows @ torch.linalg.pinv(known, rtol=MIN_SINGULAR_VALUE)
        return float((solved @ known - self._first_layer_rows).norm() / self._first_layer_rows.norm())

    def gradient(self, embeddings: Tensor) -> Tensor | None:
        """Return the gradient (J, *shape) of every basic filter, in the change's own factor.

        It is None where it is not determined.

        The last layer's change is linear in it, and determines it where the activations [a_ji, 1] are independent:
        J * in <= d + 1 of them.
        """
        known = hidden_activations(embeddings, self.layers[0], self.layers[1]).flatten(0, 1)
        known = torch.cat([known, known.new_ones(len(known), 1)], 1)
        sizes = torch.linalg.svdvals(known)
        if known.shape[0] > known.shape[1] or float(sizes[-1]) < MIN_SINGULAR_VALUE * float(sizes[0]):
            return None
        seen = torch.cat([self.change[2], self.change[3][:, None]], 1)
        rows = (seen @ torch.linalg.pinv(known)).mT  # (J * in, n)
        out, inside, height, width = self.shape
        return rows.reshape(self.filters, inside, out, height, width).transpose(1, 2)

    def gradient_misfit(self, embeddings: Tensor, gradient: Tensor) -> float:
        """Return the share of the last layer's change, or of the first one's biases' if larger, that these leave."""
        rows = gradient.transpose(1, 2).flatten(2)  # (J, in, n)
        known = hidden_activations(embeddings, self.layers[0], self.layers[1])
        weight = torch.einsum("jin,jid->nd", rows, known) - self.change[2]
        bias = rows.sum(0) @ self.layers[2] - self.change[1]
        parts = ((weight, self.change[2]), (bias, self.change[1]))
        return max(float(residual.norm() / whole.norm()) for residual, whole in parts)

    def weights(self, embeddings: Tensor) -> Tensor:
        """Return the basic filters (J, *shape) that embeddings (J, v) make."""
        return basic_filters(embeddings, list(self.layers), self.shape)
