"""The server's heads in a product with what all clients of a step have: hidden activations or gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.client import Client
from fl.models.hypernetworks.hyperfl_hypernetwork import TRUNK_BIAS, Hypernetwork, head_bias, head_weight
from fl.tensors import Tensors, dense


class Heads:
    """The server's heads on top of each other, P rows in all.

    Attributes:
        made: the parametrization.
        task: the client's.
        slices: where each generated tensor lies.
        like: (H,), of their type and on their device.
        shape: P, and the number of units: H, or 1 + H with the one that the biases belong to first.
    """

    def __init__(self, client: Client, shared: Tensors) -> None:
        made, task = client.method.parametrization, client.task
        assert isinstance(made, Hypernetwork)
        self.made, self.task, self.slices, end = made, task, dict[str, slice](), 0
        for name in made.generates(task):
            self.slices[name] = slice(end, end + task.parameters[name].numel())
            end = self.slices[name].stop
        self._weights = {name: dense(shared[head_weight(name)]) for name in self.slices}
        self._biases = {name: dense(shared[head_bias(name)]) for name in self.slices if made.bias}
        self.like = dense(shared[TRUNK_BIAS])
        self.shape = end, int(made.bias) + len(self.like)
        self._every = self._chosen = torch.arange(self.shape[1], device=self.like.device)
        self._part: Tensor | None = None

    def attend(self, activations: Tensor) -> None:
        """Restrict later products to units that are not zero in some row of `activations` (N, H or 1 + H)."""
        live = (activations != 0).any(0).nonzero().squeeze(1)
        enough = bool(torch.isin(live, self._chosen, assume_unique=True).all())
        if enough and 2 * len(live) >= len(self._chosen):  # a copy costs as much as the two products
            return
        few = 2 * len(live) < len(self._every)
        self._chosen, self._part = (live, self._columns(live)) if few else (self._every, None)

    def _columns(self, units: Tensor) -> Tensor:
        """Return the columns of `units` (R,), copied (R, P)."""
        biased = int(self.made.bias)
        chosen = self.like.new_empty(len(units), self.shape[0])
        for name, part in self.slices.items():
            chosen[:, part] = self._weights[name][:, (units - biased).clamp_min(0)].mT
            if biased:
                chosen[units == 0, part] = self._biases[name]
        return chosen

    def forward(self, activations: Tensor) -> Tensor:
        """Return all generated numbers (N, P) of `activations` (N, H or 1 + H) of units attended to."""
        if self._part is not None:
            return activations[:, self._chosen] @ self._part
        found = []
        for name, weight in self._weights.items():
            made = activations[:, -len(self.like) :] @ weight.mT
            found.append(made + activations[:, :1] * self._biases[name] if self.made.bias else made)
        return torch.cat(found, 1)

    def backward(self, grads: Tensor) -> Tensor:
        """Return (N, H or 1 + H) from gradients (N, P); 0 for units that are not attended to."""
        found = grads.new_zeros(len(grads), self.shape[1])
        if self._part is not None:
            found[:, self._chosen] = grads @ self._part.mT
            return found
        for name, part in self.slices.items():
            found[:, -len(self.like) :] += grads[:, part] @ self._weights[name]
            if self.made.bias:
                found[:, 0] += grads[:, part] @ self._biases[name]
        return found

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return generated tensors by name from all their numbers (P,)."""
        return {name: flat[part].view(self.task.parameters[name].shape) for name, part in self.slices.items()}

    def join(self, tensors: dict[str, Tensor], out: Tensor) -> None:
        """Write all numbers of the generated tensors into `out` (P,)."""
        torch.cat([tensors[name].reshape(-1) for name in self.slices], out=out)
