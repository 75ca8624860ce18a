"""Per-sample gradients from one pass: what enters each layer, and what flows back out of it, say them all.

The gradient of a linear layer's weight for sample i is the outer product d_i a_i^T, so its norm is |d_i| |a_i| and a
weighted sum of all samples' is one product ("ghost clipping", Goodfellow, 2015; Li et al., ICLR 2022, Section 4). Other
layers follow Opacus' rules for their kind. Opacus' own module wrapper goes through the network a second time for that
sum, and takes convolutions' inputs for contiguous: with channels innermost in memory its norms are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import vmap

from fl.client import LossGradient
from fl.method import Method
from fl.privacy import conv_per_sample
from fl.types import Batch

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.LayerNorm)
"""Layers whose per-sample gradients are known from what enters them and what flows back."""


@dataclass(frozen=True)
class LayerPass:
    """One layer in one pass.

    Attributes:
        layer: the module.
        names: of its weights that are asked for, by their names in it.
        activations: its input (B, ...).
        output_grads: the gradient of the summed loss with respect to its output (B, ...).
    """

    layer: nn.Module
    names: dict[str, str]
    activations: Tensor
    output_grads: Tensor

    def squared_norms(self) -> Tensor:
        """Return the squared norms (B,) of the samples' gradients, over all its weights."""
        if not self._input_and_output_vectors:
            return torch.stack([_flat_view(part).square().sum(1) for part in self.per_sample_gradients.values()]).sum(0)
        back, entered = self.output_grads.square().sum(1), self.activations.square().sum(1)
        return torch.stack([back * entered if key == "weight" else back for key in self.names]).sum(0)

    def weighted_sums(self, factors: Tensor) -> dict[str, Tensor]:
        """Return the sum of the samples' gradients, each times its own factor (B,), by name."""
        if not self._input_and_output_vectors:
            return {name: _weighted_sum(factors, part) for name, part in self.per_sample_gradients.items()}
        back = self.output_grads * factors[:, None]
        return {n: back.mT @ self.activations if key == "weight" else back.sum(0) for key, n in self.names.items()}

    @cached_property
    def per_sample_gradients(self) -> dict[str, Tensor]:
        """The samples' gradients (B, ...), by name."""
        if conv_per_sample.is_supported(self.layer):
            assert isinstance(self.layer, nn.Conv2d)
            weight = conv_per_sample.per_sample_weight_gradients(self.layer, self.activations, self.output_grads)
            return {n: weight if key == "weight" else self.output_grads.sum((2, 3)) for key, n in self.names.items()}
        from opacus.grad_sample import GradSampleModule  # seconds to import, so not before it is used

        rule = GradSampleModule.GRAD_SAMPLERS[type(self.layer)]
        found = rule(self.layer, [self.activations.contiguous()], self.output_grads.contiguous())
        return {name: found[self.layer.get_parameter(key)] for key, name in self.names.items()}

    @property
    def _input_and_output_vectors(self) -> bool:
        return type(self.layer) is nn.Linear and self.activations.ndim == 2


def _flat_view(part: Tensor) -> Tensor:
    """Return the entries of each sample's gradient (B, ...) as they lie in memory, as a view (B, N)."""
    return part.permute(0, *_memory_order(part)).flatten(1)


def _memory_order(part: Tensor) -> list[int]:
    return sorted(range(1, part.ndim), key=part.stride, reverse=True)


def _weighted_sum(factors: Tensor, part: Tensor) -> Tensor:
    """Return the sum of the samples' gradients (B, ...), each times its factor (B,), without moving them in memory."""
    order = _memory_order(part)
    total = torch.tensordot(factors, _flat_view(part), 1).view([part.shape[i] for i in order])
    return total.permute([order.index(i) for i in range(1, part.ndim)]).contiguous()


def obstacle(grad: LossGradient) -> str | None:
    """Return why the per-sample gradients of what moves can't be read off the layers, or None."""
    if grad.loss is not None:
        return "the defense changes the loss"
    if type(grad.client.method).loss is not Method.loss:
        return "the method's loss may look at more than what the network returns"
    if any(getattr(module, "inplace", False) for module in grad.model.modules()):
        return "its network changes activations in place"
    for name, (layer, _) in _layers(grad).items():
        if type(layer) not in LAYERS or getattr(layer, "padding_mode", "zeros") != "zeros":
            return f"no rule for the layer {name!r} ({type(layer).__name__})"
        if any(True for _ in layer.buffers(recurse=False)):
            return f"the layer {name!r} trains beside buffers"
    return None


def layer_passes(grad: LossGradient, weights: dict[str, Tensor], batch: Batch) -> list[LayerPass]:
    """Run one pass of `batch` through the network with `weights`, layer by layer.

    The method's loss may look at the network's outputs only.

    Raises:
        ValueError: a layer that runs twice, that does not keep the samples apart in its first dimension, or whose
            output is changed in place.
    """
    layers = _layers(grad)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    versions: dict[str, int] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def keep(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            if name in seen or not len(batch) == len(given[0]) == len(out):
                raise ValueError(f"expected {name!r} to run once, on all images at once: use private_gradient")
            if not out.requires_grad:  # nothing before it moves
                out.requires_grad_()
            seen[name], versions[name] = (given[0].detach(), out), out._version

        return keep

    handles = [layer.register_forward_hook(hook(name)) for name, (layer, _) in layers.items()]
    try:
        with torch.enable_grad():
            fixed = {name: weight.detach() for name, weight in weights.items()}
            total = _per_sample_losses(grad, grad.network(fixed)(batch.inputs.detach()), batch).sum()
    finally:
        for handle in handles:
            handle.remove()
    if any(out._version != versions[name] for name, (_, out) in seen.items()):
        raise ValueError("expected a network that changes no activation in place: use private_gradient")
    outs = [out for _, out in seen.values()]
    backs = torch.autograd.grad(total, outs, materialize_grads=True)
    return [
        LayerPass(layers[name][0], layers[name][1], entered, back)
        for (name, (entered, _)), back in zip(seen.items(), backs, strict=True)
    ]


def per_sample_gradients(grad: LossGradient, weights: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return the samples' gradients with respect to the network's weights that what moves needs (B, ...), by name."""
    found = {
        name: part for one in layer_passes(grad, weights, batch) for name, part in one.per_sample_gradients.items()
    }
    client = grad.client
    return {name: found[name] for name in client.method.parametrization.sources(client.task, grad.live)}


def _layers(grad: LossGradient) -> dict[str, tuple[nn.Module, dict[str, str]]]:
    """Return the layers with weights whose gradients are wanted, and their names inside and outside of them."""
    client = grad.client
    found: dict[str, tuple[nn.Module, dict[str, str]]] = {}
    for name in client.method.parametrization.sources(client.task, grad.live):
        owner, _, key = name.rpartition(".")
        found.setdefault(owner, (grad.model.get_submodule(owner), {}))[1][key] = name
    return found


def _per_sample_losses(grad: LossGradient, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the method's loss of each sample (B,), from what the network returned for it."""
    loss = grad.loss or grad.client.method.loss

    def one(output: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return loss(lambda inputs: output[None], Batch(image[None], label[None]), grad.step)  # type: ignore[arg-type]

    return vmap(one)(outputs, batch.inputs, batch.labels)
