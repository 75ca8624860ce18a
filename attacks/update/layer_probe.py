"""Runs a client's network on random images, to read what its linear layers take, return and get back.

The server does not know some of the weights (those of a private classifier, say): these are drawn at random. What is
read here holds whatever they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attacks.network.linear_layers import PixelOrigin, VectorLayer, VectorLayers, operation_outputs, vector_layers
from attacks.network.operation_trace import MODEL_ERRORS
from attacks.network.reading_cache import cached_reading
from fl.losses.function import OwnLoss
from fl.method import Step
from fl.network import Network
from fl.runtime.module_copies import deep_copy
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch, frozen
from fl.view import ServerView

PROBE_IMAGES = 8
"""Random images on which a network runs."""
LARGE_PROBES = 4
"""The same where images are large, since a pass takes long."""
LARGE = 2**15
"""Numbers of an image from which on it counts as large."""
SAME_GRADIENT = 1e-5
"""Relative difference of two gradients that count as one: a forward may fix single precision."""


@dataclass
class LayerProbe:
    """The client's network in float64, with weights that the server can't know drawn at random.

    Attributes:
        view: what the server saw.
        model: the network.
        weights: all parameters, by name.
        buffers: all buffers, by name.
    """

    view: ServerView
    model: nn.Module = field(init=False)
    weights: dict[str, Tensor] = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        view = self.view
        self.model = view.client.network_in(torch.float64)
        draw = stream(0, "probe")
        self.weights, known = {}, {**frozen(self.model), **view.shared}
        for name, value in self.model.named_parameters():
            if name in known:
                self.weights[name] = dense(known[name]).to(value).detach()
                continue
            guess = torch.randn(value.shape, generator=draw, dtype=torch.float64) * value.shape[1:].numel() ** -0.5
            self.weights[name] = guess.to(value)
        own = {**dict(self.model.named_buffers()), **view.buffers}
        self.buffers = {n: v.double() if v.is_floating_point() else v for n, v in own.items()}

    @property
    def fixed(self) -> int | None:
        """The batch size that the network is fixed to; None if it takes any."""
        return self._first_pass[0]

    @cached_property
    def _first_pass(self) -> tuple[int | None, dict[str, Tensor]]:
        """The batch size that the network is fixed to, and the inputs (N, n) of linear layers for random images.

        One pass tells both. Views that differ only in the update share it.
        """

        def size(found: tuple[int | None, dict[str, Tensor]]) -> int:
            return sum(value.numel() for value in found[1].values())

        return cached_reading(self.view, "first pass", self._run_first, size)

    def _run_first(self) -> tuple[int | None, dict[str, Tensor]]:
        count, fed = probe_count(self.view), self.view.batch_size
        try:
            return None, self._inputs_of_linear(self._random_images(count))
        except MODEL_ERRORS:
            if not fed or fed == count:
                raise
            return fed, self._inputs_of_linear(self._random_images(fed))

    @property
    def images(self) -> Tensor:
        """Random pixels."""
        return self._random_images(self.fixed or probe_count(self.view))

    def _random_images(self, count: int) -> Tensor:
        shape = (count, *self.view.task.input_shape)
        return torch.rand(shape, generator=stream(0, "images"), dtype=torch.float64).to(self.view.device)

    @property
    def layers(self) -> dict[str, bool]:
        """Every linear layer whose input is one vector per image, in running order; True if that is the image itself.

        "The image itself" is normalized as the view says. `origin` describes inputs under any other normalization.
        """
        seen, flat, order = self._module_inputs, list(self._vector_layers), list[str]()
        for name in seen:  # modules in running order; those whose weight is no parameter are not in `flat`
            before = flat.index(name) + 1 if name in flat else 0
            order += [*(other for other in flat[:before] if other not in order), name]
        return {name: seen.get(name, False) for name in (*order, *flat)}

    @cached_property
    def _traced(self) -> VectorLayers:
        return vector_layers(self.view)

    @property
    def _vector_layers(self) -> Mapping[str, VectorLayer]:
        return self._traced.layers

    def is_used_once(self, name: str) -> bool:
        """Return whether the network uses a layer's tensors once, so that their gradient is of one input."""
        return not self._traced.reused & set(self.parameter_names(name))

    def has_own_gradient(self, name: str) -> bool:
        """Return whether the gradient of a layer's weight is signal times input, as that of a plain matrix.

        Traced layers are plain. A layer may also round its weight first, as quantization-aware training does. Its
        gradient is plain if rounding passes gradients through unchanged.
        """
        if name in self._vector_layers or name not in self._module_inputs:
            return True
        weight = self.weights[self.parameter_names(name)[0]].detach().requires_grad_()
        with OutputLeaf(self.model, name) as tap, torch.enable_grad():
            result = self._network(self.weights)(self.images)
            draw = torch.randn(result.shape, generator=stream(0, "signal"), dtype=torch.float64).to(result)
            (signal,) = torch.autograd.grad((result * draw).sum(), tap.outputs[:1])
        with torch.enable_grad():
            result = self._network({**self.weights, self.parameter_names(name)[0]: weight})(self.images)
            (made,) = torch.autograd.grad((result * draw).sum(), weight, materialize_grads=True, allow_unused=True)
        expected = signal.mT @ self._given[name].to(signal)
        return bool((made - expected).norm() <= SAME_GRADIENT * expected.norm())

    def origin(self, name: str) -> PixelOrigin | None:
        """Return how a layer's input is made of pixels, where the view's normalization does not say it."""
        return (
            None
            if self._module_inputs.get(name) or name not in self._vector_layers
            else self._vector_layers[name].origin
        )

    def parameter_names(self, name: str) -> tuple[str, str]:
        """Return the names of a layer's weight and bias in the update."""
        layer = self._vector_layers.get(name)
        return (f"{name}.weight", f"{name}.bias") if layer is None else (layer.names["weight"], layer.names["bias"])

    def factors(self, name: str) -> Tensor | None:
        """Return the factor on each number of a layer's weight before use (m, n); None if it is used as it is."""
        layer = self._vector_layers.get(name)
        return None if layer is None else layer.factors

    def arrange(self, name: str, kind: str, sent: Tensor) -> Tensor:
        """Return a tensor of a layer's "weight" or "bias" in the layer's layout, from that of the update."""
        layer = self._vector_layers.get(name)
        return sent if layer is None else layer.arrange(kind, sent)

    def reads_signals(self, name: str) -> bool:
        """Return whether a layer's signals can be read for each image by itself."""
        if name in self._module_inputs:
            return True
        try:
            self.outputs_and_signals(name)
        except MODEL_ERRORS:
            return False
        return True

    @cached_property
    def _module_inputs(self) -> dict[str, bool]:
        mean, std = self.view.task.normalization(self.images)
        flat = ((self.images - mean) / std).flatten(1)
        return {name: _are_same(given, flat) for name, given in self._given.items()}

    @property
    def inputs_of_layers(self) -> dict[str, int]:
        """The linear layers that are given one of several inputs as it is, by name, with the input's number."""
        parts = dict(enumerate(self.view.task.inputs.unpack(self.images)))
        real = {number: part.flatten(1) for number, part in parts.items() if part.is_floating_point()}
        return {n: i for n, given in self._given.items() for i, part in real.items() if _are_same(given, part)}

    @property
    def _given(self) -> dict[str, Tensor]:
        """The input (N, n) of every linear layer that sees one vector per image, the first time it runs."""
        return self._first_pass[1]

    def _inputs_of_linear(self, images: Tensor) -> dict[str, Tensor]:
        seen = dict[str, Tensor]()

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
                value = (*args, *named.values())[0]
                if value.ndim == 2 and len(value) == len(images) and name not in seen:
                    seen[name] = value.detach()

            return hook

        linear = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        handles = [module.register_forward_hook(note(name), with_kwargs=True) for name, module in linear]
        try:
            with torch.no_grad():
                self.run(images)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def run(self, images: Tensor) -> Any:
        """Return what the network returns."""
        return self._network(self.weights)(images)

    def _network(self, weights: dict[str, Tensor]) -> Network:
        return Network(self.model, weights, self.buffers, writes=False)

    def outputs(self, images: Tensor) -> Tensor:
        """Return the network's outputs (N, ...)."""
        with torch.no_grad():
            network = self._network(self.weights)
            return torch.cat([network(part) for part in self._parts(images)])[: len(images)]

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return examples (N, ...) in batches that the network takes, the last one filled up with the first example."""
        if self.fixed is None or len(values) == self.fixed:
            return (values,)
        missing = -len(values) % self.fixed
        return torch.cat([values, values[:1].expand(missing, *values.shape[1:])]).split(self.fixed)

    def outputs_and_signals(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return a layer's outputs for random images, and its signals from a random gradient on top, each (N, m)."""
        if layer not in self._module_inputs:
            return self._signals_by_bias(self._vector_layers[layer])
        with OutputLeaf(self.model, layer) as tap, torch.enable_grad():
            result = self.run(self.images)
            weights = torch.randn(result.shape, generator=stream(0, "signal"), dtype=torch.float64).to(result)
            (grad,) = torch.autograd.grad((result * weights).sum(), tap.outputs)
        return tap.outputs[0].detach(), grad

    def _signals_by_bias(self, layer: VectorLayer) -> tuple[Tensor, Tensor]:
        """Return outputs and signals of a layer that is no module, from the gradient of a bias for each image."""
        outputs = operation_outputs(self._model_as_sent, layer.node, self.images)
        if outputs is None:
            raise RuntimeError(
                f"the operations of the network depend on the image: {layer.name!r} can't be found in them"
            )
        own, weights = self._with_biases(layer, len(outputs))
        with torch.enable_grad():
            result = self._network(weights)(self.images)
            if not torch.allclose(result, self.run(self.images)):
                raise RuntimeError(f"the bias of {layer.name!r} is not added to one vector per image")
            draw = torch.randn(result.shape, generator=stream(0, "signal"), dtype=torch.float64).to(result)
            (grad,) = torch.autograd.grad((result * draw).sum(), own)
        return outputs, grad

    @cached_property
    def _model_as_sent(self) -> nn.Module:
        model = deep_copy(self.model)
        with torch.no_grad():
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                value.copy_({**self.weights, **self.buffers}[name])
        return model

    def _with_biases(self, layer: VectorLayer, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a copy of a layer's bias for each image (N, m), and the network's weights with it."""
        name = layer.names["bias"]
        own = self.weights[name].flatten().expand(count, -1).clone().requires_grad_()
        return own, {**self.weights, name: own}

    def signals(self, layer: str, images: Tensor, targets: Tensor) -> Tensor:
        """Return a layer's signals (N, m): the gradient of each image's own loss, with its own target (N, ...)."""
        if self.fixed is not None and len(images) != self.fixed:
            parts = zip(self._parts(images), self._parts(targets), strict=True)
            return torch.cat([self.signals(layer, *part) for part in parts])[: len(images)]
        count, batch = len(images), Batch(images, targets.to(images.device))
        if layer not in self._module_inputs:
            own, weights = self._with_biases(self._vector_layers[layer], count)
            with torch.enable_grad():
                loss = self._sum_of_losses(self._network(weights), batch)
                (grad,) = torch.autograd.grad(loss, own)
            return grad
        with OutputLeaf(self.model, layer) as tap, torch.enable_grad():
            loss = self._sum_of_losses(self._network(self.weights), batch)
            (grad,) = torch.autograd.grad(loss, tap.outputs)
        return grad

    def _sum_of_losses(self, network: Network, batch: Batch) -> Tensor:
        """Return the sum of the images' losses, one by one where the user's own loss may couple images of a batch."""
        view, own = self.view, self.view.task.loss
        if isinstance(own, OwnLoss) and own.takes_classes:
            outputs = network(batch.inputs)
            pairs = list(zip(outputs.split(1), batch.labels.split(1), strict=True))
            if own.takes(pairs[0][0].detach(), pairs[0][1]):
                return torch.stack([own(*pair) for pair in pairs]).sum()
            return own(outputs, batch.labels) * len(outputs)  # it takes no example of this class alone
        step = Step(view.client.task, view.shared, view.received, {}, {}, view.round)
        return view.method.loss(network, batch, step) * len(batch.inputs)

    def _mean_loss(self, network: Network, batch: Batch) -> Tensor:
        """Return the mean loss of images that have one target in common.

        Some losses refuse a batch of one class. Then an expression with the same gradients is returned, made from the
        loss of the first image beside copies with all other classes.
        """
        view, own = self.view, self.view.task.loss
        step = Step(view.client.task, view.shared, view.received, {}, {}, view.round)
        if not (isinstance(own, OwnLoss) and own.takes_classes):
            return view.method.loss(network, batch, step)
        outputs = network(batch.inputs)
        if own.takes(outputs.detach(), batch.labels):
            return own(outputs, batch.labels)
        classes = outputs.shape[1]
        given = outputs[:1].detach().repeat(classes, 1).requires_grad_()
        every = (batch.labels[:1] + torch.arange(classes, device=batch.labels.device)) % classes
        (slope,) = torch.autograd.grad(own(given, every), given)
        return classes * (outputs @ slope[0]).mean()

    def gradients(self, images: Tensor, targets: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of all parameters of the loss of these images (N, C, H, W) with targets (N, ...)."""
        if self.fixed is not None and len(images) != self.fixed:
            parts = zip(self._parts(images), self._parts(targets), strict=True)  # copies have the picture's gradient
            each = [self.gradients(*part, weights) for part in parts]
            return {name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]}
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        batch = Batch(images, targets.to(images.device))
        with torch.enable_grad():
            loss = self._mean_loss(self._network(leaves), batch)
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
        return dict(zip(leaves, found, strict=True))


def probe_count(view: ServerView) -> int:
    """Return on how many random images a network runs."""
    return PROBE_IMAGES if math.prod(view.task.input_shape) < LARGE else LARGE_PROBES


def probe_layers(view: ServerView) -> LayerProbe:
    """Return the probe of the view's network; views of one network share what it has read."""
    probe = cached_reading(
        view,
        "probe",
        lambda: LayerProbe(view),
        lambda probe: 2 * sum(value.numel() for value in probe.weights.values()),
    )
    if probe.view is view:
        return probe
    own = copy.copy(probe)  # the network is the same, but not what was sent back of it
    own.view = view
    return own


def _are_same(given: Tensor, expected: Tensor) -> bool:
    return given.shape == expected.shape and torch.allclose(given.to(expected), expected, atol=1e-5)


class OutputLeaf:
    """Keeps a layer's output as the leaf that gradients are taken of."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        self.outputs: list[Tensor] = []
        self.handle = model.get_submodule(layer).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.outputs.append(output.detach().requires_grad_())
        return self.outputs[-1].clone()  # an activation may work in place, which a leaf can't bear

    def __enter__(self) -> OutputLeaf:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
