"""A fully connected layer as the server sees it: its weights, its gradient, and what is around it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attacks.network.kept_readings import kept_reading
from attacks.network.linear_layers import PixelOrigin, VectorLayer, VectorLayers, operation_outputs, vector_layers
from attacks.network.operation_trace import MODEL_ERRORS
from attacks.result import NotApplicable
from attacks.update.label_gradients import batches_of_targets
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient
from attacks.update.update_rule import SIGNS_ONLY, hides_behind_signs
from fl.defense import ask_numbers, overrides
from fl.local.hook_results import expect_made
from fl.losses.function import OwnLoss
from fl.method import Step
from fl.network import Network
from fl.runtime.double_precision import PrecisionError
from fl.runtime.module_copies import deep_copy
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch, frozen
from fl.view import ServerView

SIZE_TOLERANCE = 1e-3
"""Distance of a signal's directions up to which a layer's input is as bright as it seems: about one percent of it."""
MAX_COMBINATIONS = 64
"""Combinations of labels that are tried of a picture, at most: of six labels that may be 0 or 1."""
PROBE_IMAGES, LARGE_PROBES, LARGE = 8, 4, 2**15
"""Random images that tell what a layer is given and whether a ReLU follows it, and as many of such that each has so
many numbers, of which a pass takes long."""
SAME_GRADIENT = 1e-5
"""By how much of its length a gradient may be off another that is the same: a forward may fix single precision."""


@dataclass(frozen=True)
class LinearLayer:
    """The first linear layer with a bias whose update was sent, in float64.

    Over a batch, its gradient is `sum of delta_i x_i^T` and `sum of delta_i`: both stand here up to one factor.

    Attributes:
        view: the server's.
        name: of the layer.
        origin: how its input is made of the pixels, where that is otherwise than the view says.
        weight: as sent by the server (m, n).
        bias: likewise (m,).
        update: the weight's update without decay (m, n), its largest entry of size 1.
        bias_update: the bias's (m,), in the same unit.
        transmitted: 1 where a known defense let an entry through, 0 elsewhere (m, n); None is everywhere.
        bias_transmitted: likewise of the bias's (m,).
        trust: how far a known defense lets the bias be trusted, relative to the weight.
        gap_limit: largest size, in the same unit, that a number can have had which a known defense sent as zero.
        noise: standard deviations of a known defense's noise in the weight's and the bias's, in the same unit.
        is_given_images: whether its input is the image itself, normalized.
        steps: optimizer steps in which it moves; None if unknown.
        scale: size of the updates for a gradient of size 1 of the loss; None if unknown (several steps, clipping,
            a defense that changes sizes).
        passed_over: linear layers below that the network uses more than once, so that their updates are sums.
        unit: size in the update of what is of size 1 in `update` and `bias_update`.
        masked: whether numbers of the weight take no part in what the layer computes, such as pruned ones.
    """

    view: ServerView
    name: str
    weight: Tensor
    bias: Tensor
    update: Tensor
    bias_update: Tensor
    transmitted: Tensor | None
    bias_transmitted: Tensor | None
    trust: float
    gap_limit: float
    noise: tuple[float, float]
    is_given_images: bool
    steps: int | None
    scale: float | None
    origin: PixelOrigin | None = None
    passed_over: tuple[str, ...] = ()
    unit: float = 1.0
    masked: bool = False

    @property
    def parameter_names(self) -> tuple[str, str]:
        """The names of its weight and bias in the update."""
        return self._probe.parameter_names(self.name)

    @cached_property
    def _probe(self) -> _NetworkProbe:
        return _probe(self.view)

    @property
    def lies_as_images(self) -> bool:
        """Whether its input has the image's numbers in the image's order."""
        return self.is_given_images and self.origin is None

    @property
    def factors(self) -> Tensor | None:
        """By what each number of its weight is multiplied before it takes it; None as it is."""
        return self._probe.factors(self.name)

    def arrange(self, kind: str, values: Tensor) -> Tensor:
        """Return numbers of its "weight" or "bias", as they stand in the update, as they lie in the layer."""
        return self._probe.arrange(self.name, kind, values)

    def to_pixels(self, inputs: Tensor) -> Tensor:
        """Return inputs of the layer (N, n) as pixels (N, C, H, W), wherever they lie."""
        if self.origin is None:
            return denormalize(self.view, inputs)
        return self.origin.pixels(inputs).view(len(inputs), *self.view.task.input_shape)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return inputs of the layer (N, n) as images (N, C, H, W) in [0, 1]."""
        return self.to_pixels(inputs).clamp(0, 1).to(self.view.dtype)

    def is_rectified(self) -> bool:
        """Return whether no signal flows back where the layer's output is negative, but some where it is positive."""
        outputs, signals = self._probe.outputs_and_signals(self.name)
        silent = signals == 0
        return bool(silent[outputs < 0].all() and not silent[outputs > 0].all())

    def signals(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the signals into the layer (N, m) from each of its inputs (N, n), were the images' targets these.

        What they are comes first, by their numbers (N,): all targets in turn, as far as the loss takes them.

        Args:
            inputs: of the layer (N, n).
            targets: (K, ...).
        """
        images = self.to_pixels(inputs)
        for numbers in batches_of_targets(self.view.task.loss, self._probe.outputs(images), targets):
            yield numbers, self._probe.signals(self.name, images, targets[numbers.to(targets.device)])

    @property
    def network_weights(self) -> dict[str, Tensor]:
        """All parameters of the network in double precision, what the server can't know drawn at random."""
        return self._probe.weights

    def weights_with_bias(self, row: int, change: float) -> dict[str, Tensor]:
        """Return all parameters of the network with this added to one number of the layer's bias."""
        name = self.parameter_names[1]
        bias = self.network_weights[name].clone()
        places = torch.arange(bias.numel(), dtype=torch.float64, device=bias.device).view_as(bias)
        bias.view(-1)[int(self.arrange("bias", places)[row])] += change
        return {**self.network_weights, name: bias}

    def gradients(
        self, inputs: Tensor, target: Tensor, weights: dict[str, Tensor] | None = None, *, others: bool = False
    ) -> dict[str, Tensor]:
        """Return the gradients of all parameters of the loss of one picture.

        Args:
            inputs: what the layer takes of it (n,).
            target: of the picture.
            weights: of the network; None takes those that were sent.
            others: whether the loss is that of a batch of the picture and random ones, all with its target.
        """
        images = self.to_pixels(inputs[None])
        images = torch.cat([images, self._probe.images.to(images)]) if others else images
        targets = target[None].expand(len(images), *target.shape)
        return self._probe.gradients(images, targets, weights or self.network_weights)

    def possible_labels(self) -> Tensor | None:
        """Return every label that an image may have (M, ...), or None where there are too many, or any number may be.

        Of classes there are always all.
        """
        task = self.view.task
        limit = max(task.num_classes, MAX_COMBINATIONS)
        return task.loss.every_target(task.output_shape, limit)

    def has_true_size(self, inputs: Tensor, signals: Tensor) -> bool:
        """Return whether `inputs` have their true size: an unknown defense may have changed it, unless `labels` fit.

        They have to fit no input half as bright: signals of two outputs have one direction whatever the input is, and
        then numbers may even have been cut one by one.
        """
        if self.view.threat.knows_defense:
            return True
        seen, darker = (self.labels(x, signals, SIZE_TOLERANCE) for x in (inputs, inputs / 2))
        return seen is not None and darker is None

    def labels(self, inputs: Tensor, signals: Tensor, tolerance: float) -> Tensor | None:
        """Return the labels (N,) under which the network sends back `signals` (N, m), up to factors; None if none fit.

        Args:
            inputs: of the layer (N, n).
            signals: observed.
            tolerance: largest distance of two unit vectors that counts as none.
        """
        if self.view.private or not self.view.method.uses_labels or not self.is_given_images:
            return None
        possible = self.possible_labels()
        if possible is None:
            return None
        unit, wanted = nn.functional.normalize, nn.functional.normalize(signals, dim=-1)
        far, labels = signals.new_full((len(inputs),), math.inf), torch.zeros(len(inputs), dtype=torch.int64)
        labels = labels.to(signals.device)
        for numbers, made in self.signals(inputs, possible):
            off = (unit(made, dim=-1) - wanted).norm(dim=-1)
            labels = torch.where(off < far, numbers.to(labels.device), labels)
            far = torch.where(off < far, off, far)
        return possible.to(labels.device)[labels] if bool((far <= tolerance).all()) else None


def denormalize(view: ServerView, inputs: Tensor) -> Tensor:
    """Return normalized images (N, n) as pixels (N, C, H, W), wherever they lie."""
    mean, std = view.task.normalization(inputs)
    return inputs.view(len(inputs), *view.task.input_shape) * std + mean


def first_linear(view: ServerView, *, scaled: bool = False) -> LinearLayer | NotApplicable:
    """Return the first linear layer with a bias that the update says something of, or why there is none.

    Layers that the network uses more than once (recurrent ones, shared ones) are passed over.

    Args:
        view: the server's.
        scaled: whether layers count whose weight's numbers are each multiplied by a factor first, 0 where a number is
            pruned. Their update is that of what the layer takes, where that is known.
    """
    reason = _obstacle(view)
    if reason is not None:
        return NotApplicable(reason)
    observed = ObservedUpdate(view)
    if observed.unknown_decay:
        return NotApplicable("the number of local steps is unknown, so weight decay can't be taken off")
    probe = _probe(view)
    try:
        layers = probe.layers
    except PrecisionError as error:
        return NotApplicable(str(error), limit=True)
    except MODEL_ERRORS as error:
        return NotApplicable(f"the network does not run on a batch of {_probe_count(view)} images: {error}", limit=True)
    still: NotApplicable | None = None
    reused: list[str] = []
    for name, images in layers.items():
        names = probe.parameter_names(name)
        if not set(names) <= set(observed.change) or (probe.factors(name) is not None and not scaled):
            continue
        if not probe.is_used_once(name):
            still = still or NotApplicable(
                f"the network uses {name!r} more than once: its gradient is a sum", limit=True
            )
            reused.append(name)
            continue
        if not probe.has_own_gradient(name):
            still = still or NotApplicable(
                f"the weight that {name!r} uses is computed from {names[0]}, whose gradient is another than its own",
                limit=True,
            )
            continue
        layer = _read_layer(observed, probe, name, images)
        if isinstance(layer, LinearLayer):
            return replace(layer, passed_over=tuple(reused))
        if any(bool(dense(observed.change[n]).any()) for n in names):
            return layer
        still = still or layer  # it was frozen, or nothing flows through it: layers above may have moved
    nowhere = "no linear layer with a bias, given one vector per image, is in the update"
    return still or NotApplicable(nowhere, limit=True)


def layers_of_inputs(view: ServerView) -> dict[int, LinearLayer]:
    """Return, of a model with several inputs, the linear layer with a bias that is given each, by the input's number.

    Inputs that none is given as they are are left out.

    Args:
        view: the server's.
    """
    observed = ObservedUpdate(view)
    if len(view.task.inputs.parts) < 2 or _obstacle(view) is not None or observed.unknown_decay:
        return {}
    probe, found = _probe(view), dict[int, LinearLayer]()
    try:
        given = probe.inputs_of_layers
    except MODEL_ERRORS:
        return {}
    for name, number in given.items():
        if number not in found and set(probe.parameter_names(name)) <= set(observed.change):
            layer = _read_layer(observed, probe, name, images=False)
            if isinstance(layer, LinearLayer):
                found[number] = layer
    return found


def _read_layer(observed: ObservedUpdate, probe: _NetworkProbe, name: str, images: bool) -> LinearLayer | NotApplicable:
    """Return a linear layer whose update was sent, or why it says nothing.

    Args:
        observed: the update.
        probe: the network.
        name: of the layer.
        images: whether it is given the image, normalized as the view says.
    """
    if (refused := _layer_obstacle(observed.view, probe, name)) is not None:
        return refused
    view, names = observed.view, probe.parameter_names(name)
    kinds = dict(zip(("weight", "bias"), names, strict=True))
    moved = _moved(observed, probe, name)
    if isinstance(moved, NotApplicable):
        return moved
    weight, bias = moved
    factors, origin, steps = probe.factors(name), probe.origin(name), observed.steps(names[0])
    start, start_bias = (probe.arrange(name, kind, dense(view.shared[n]).double()) for kind, n in kinds.items())
    sent, sent_bias = (
        None if mask is None else probe.arrange(name, kind, mask) for kind, mask in _sent(view, kinds).items()
    )
    masked = factors is not None and not bool(factors.all())
    if factors is not None:
        # the gradient of what the layer takes; 0 where none of it is in the update
        weight = torch.where(factors != 0, weight / torch.where(factors != 0, factors, 1), 0)
        start = start * factors
        sent = (torch.ones_like(weight) if sent is None else sent) * (factors != 0)
    unit = float(weight.abs().max()) or float(bias.abs().max())
    scale = observed.scale(names[0]) if steps == 1 else None
    return LinearLayer(
        view=view,
        name=name,
        weight=start,
        bias=start_bias,
        update=weight / unit,
        bias_update=bias / unit,
        transmitted=sent,
        bias_transmitted=sent_bias,
        trust=_trust(view, *names),
        gap_limit=math.inf if masked else _gap_limit(observed, names) / unit,
        noise=_noise(view, names, unit),
        is_given_images=images or origin is not None,
        steps=steps,
        scale=None if scale is None else scale / unit,
        origin=origin,
        unit=unit,
        masked=masked,
    )


def _layer_obstacle(view: ServerView, probe: _NetworkProbe, name: str) -> NotApplicable | None:
    """Return why a layer says nothing, whatever its update holds; None where it may say something."""
    if not probe.reads_signals(name):
        reason = f"what flows back into {name!r} can't be told apart image by image from how forward is written"
        return NotApplicable(reason, limit=True)
    if hides_behind_signs(view):
        return NotApplicable(SIGNS_ONLY)
    names = dict.fromkeys(probe.parameter_names(name))
    phases = view.method.phases(view.client.task, view.round)
    if any(len({id(group) for group in p.assign(names).values()}) > 1 for p in phases):
        return NotApplicable(f"weight and bias of {name!r} are trained apart: their ratio is not the gradients'")
    return None


def _moved(observed: ObservedUpdate, probe: _NetworkProbe, name: str) -> tuple[Tensor, Tensor] | NotApplicable:
    """Return how a layer's weight (m, n) and bias (m,) moved, or why that says nothing of its input."""
    names = zip(("weight", "bias"), probe.parameter_names(name), strict=True)
    weight, bias = (probe.arrange(name, kind, dense(observed.change[n]).double()) for kind, n in names)
    if not bool(bias.any()) and bool(weight.any()):
        return NotApplicable(
            f"the bias of {name!r} did not move, though its weight did: it is not trained, or not sent, or all that "
            "flows back into it sums to zero (a loss that compares examples)"
        )
    if not bool(bias.any()) or not bool(weight.isfinite().all() and bias.isfinite().all()):
        return NotApplicable(f"the update of {name!r} is zero or not finite")
    factors = probe.factors(name)
    if factors is None or factors[factors != 0].allclose(factors.abs().max()):
        return weight, bias
    if observed.view.client.defense.name != "none":
        return NotApplicable(f"numbers of the weight of {name!r} are scaled apart, and a defense changed them")
    return weight, bias


def _obstacle(view: ServerView) -> str | None:
    if not view.update:
        return "nothing is shared"
    if (reason := deviation_from_loss_gradient(view)) is not None:
        return reason
    if not view.client.defense.preserves_norm_ratios():
        return f"the defense {view.defense.name} leaves no ratio of a weight's to a bias's update"
    return adaptive_optimizer_obstacle(view.method.phases(view.client.task, view.round))


def _sent(view: ServerView, names: Mapping[str, str]) -> dict[str, Tensor | None]:
    """Return by kind of tensor which entries of the update a known defense let through as they were; None is all."""
    if not overrides(view.client.defense, "surrogate"):
        return dict.fromkeys(names)
    return {kind: ObservedUpdate(view).transmitted(name).double() for kind, name in names.items()}


def _trust(view: ServerView, weight: str, bias: str) -> float:
    """Return how far a known defense lets the bias's update be trusted, relative to the weight's."""
    defense = view.client.defense
    trusts, noise = (ask_numbers(defense, hook, view.update) for hook in ("tensor_trust", "noise_std"))
    cleaner = noise[weight] / noise[bias] if noise[weight] > 0 and noise[bias] > 0 else 1.0
    return cleaner * trusts[bias] / trusts[weight]


def _gap_limit(observed: ObservedUpdate, names: Iterable[str]) -> float:
    """Return the largest size that a number can have had which came as zero; infinite beside weight decay."""
    if observed.decay_shares.keys() & set(names):
        return math.inf
    defense = observed.view.client.defense
    limit = defense.gap_limit(observed.view.update)
    return expect_made(defense.name, "gap_limit", float, float(limit) if isinstance(limit, int) else limit)


def _noise(view: ServerView, names: Iterable[str], unit: float) -> tuple[float, float]:
    """Return the standard deviation of a known defense's noise in weight and bias."""
    stds = ask_numbers(view.client.defense, "noise_std", view.update)
    weight, bias = (stds[name] / unit for name in names)
    return weight, bias


@dataclass
class _NetworkProbe:
    """The client's network in float64, with what the server can't know drawn at random."""

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
        """How many images the network takes at once, where it takes no other number; None where it takes any."""
        return self._first_pass[0]

    @cached_property
    def _first_pass(self) -> tuple[int | None, dict[str, Tensor]]:
        """The number of images that it is fixed to, and what linear layers are given of random ones.

        One pass tells both, and views that differ in what was sent back alone have it in common.
        """

        def size(found: tuple[int | None, dict[str, Tensor]]) -> int:
            return sum(value.numel() for value in found[1].values())

        return kept_reading(self.view, "first pass", self._run_first, size)

    def _run_first(self) -> tuple[int | None, dict[str, Tensor]]:
        count, fed = _probe_count(self.view), self.view.batch_size
        try:
            return None, self._inputs_of_linear(self._random_images(count))
        except MODEL_ERRORS:
            if not fed or fed == count:
                raise
            return fed, self._inputs_of_linear(self._random_images(fed))

    @property
    def images(self) -> Tensor:
        """Random pixels."""
        return self._random_images(self.fixed or _probe_count(self.view))

    def _random_images(self, count: int) -> Tensor:
        shape = (count, *self.view.task.input_shape)
        return torch.rand(shape, generator=stream(0, "images"), dtype=torch.float64).to(self.view.device)

    @property
    def layers(self) -> dict[str, bool]:
        """Every linear layer given one vector per image, in the order they run; True if that is the image itself.

        The image counts as normalized by the view's normalization; `origin` says so of any other.
        """
        seen, flat, order = self._module_inputs, list(self._vector_layers), list[str]()
        for name in seen:  # modules in the order they run; of some the weight is no parameter, and they are not in flat
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
        """Return whether the network uses a layer's tensors once, so that their gradients are those of one input."""
        return not self._traced.reused & set(self.parameter_names(name))

    def has_own_gradient(self, name: str) -> bool:
        """Return whether a layer's weight has the gradient of a matrix that takes what the layer is given.

        That is known of what was traced. Of a weight that the layer rounds first, as training for few bits does, it is
        so where rounding passes gradients on as they are.
        """
        if name in self._vector_layers or name not in self._module_inputs:
            return True
        weight = self.weights[self.parameter_names(name)[0]].detach().requires_grad_()
        with _OutputLeaf(self.model, name) as tap, torch.enable_grad():
            result = self._network(self.weights)(self.images)
            draw = torch.randn(result.shape, generator=stream(0, "signal"), dtype=torch.float64).to(result)
            (signal,) = torch.autograd.grad((result * draw).sum(), tap.outputs[:1])
        with torch.enable_grad():
            result = self._network({**self.weights, self.parameter_names(name)[0]: weight})(self.images)
            (made,) = torch.autograd.grad((result * draw).sum(), weight, materialize_grads=True, allow_unused=True)
        expected = signal.mT @ self._given[name].to(signal)
        return bool((made - expected).norm() <= SAME_GRADIENT * expected.norm())

    def origin(self, name: str) -> PixelOrigin | None:
        """Return how a layer's input is made of pixels, where that is otherwise than the view says."""
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
        """Return by what each number of a layer's weight is multiplied before the layer takes it; None as it is."""
        layer = self._vector_layers.get(name)
        return None if layer is None else layer.factors

    def arrange(self, name: str, kind: str, sent: Tensor) -> Tensor:
        """Return what was sent of a layer's "weight" or "bias", as it lies in the layer."""
        layer = self._vector_layers.get(name)
        return sent if layer is None else layer.arrange(kind, sent)

    def reads_signals(self, name: str) -> bool:
        """Return whether what flows back into a layer can be read image by image."""
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
        """What every linear layer is given that sees one vector per image, the first time it runs."""
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
        """Return what the loss is given (N, ...)."""
        with torch.no_grad():
            network = self._network(self.weights)
            return torch.cat([network(part) for part in self._parts(images)])[: len(images)]

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return examples (N, ...) in as many at once as the network takes, the last filled up with the first."""
        if self.fixed is None or len(values) == self.fixed:
            return (values,)
        missing = -len(values) % self.fixed
        return torch.cat([values, values[:1].expand(missing, *values.shape[1:])]).split(self.fixed)

    def outputs_and_signals(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return the layer's outputs for random images, and a random signal's way back to them, each (N, m)."""
        if layer not in self._module_inputs:
            return self._signals_by_bias(self._vector_layers[layer])
        with _OutputLeaf(self.model, layer) as tap, torch.enable_grad():
            result = self.run(self.images)
            weights = torch.randn(result.shape, generator=stream(0, "signal"), dtype=torch.float64).to(result)
            (grad,) = torch.autograd.grad((result * weights).sum(), tap.outputs)
        return tap.outputs[0].detach(), grad

    def _signals_by_bias(self, layer: VectorLayer) -> tuple[Tensor, Tensor]:
        """Return outputs and signals of a layer that is no module, by giving every image a bias of its own."""
        outputs = operation_outputs(self._model_as_sent, layer.node, self.images)
        if outputs is None:
            raise RuntimeError(f"what {layer.name!r} returns hangs on the image")
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
        """Return the weights with as many rows of a layer's bias as there are images, and those rows (N, m)."""
        name = layer.names["bias"]
        own = self.weights[name].flatten().expand(count, -1).clone().requires_grad_()
        return own, {**self.weights, name: own}

    def signals(self, layer: str, images: Tensor, targets: Tensor) -> Tensor:
        """Return gradients (N, m) of each image's own loss, with its own target (N, ...), at the layer's output."""
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
        with _OutputLeaf(self.model, layer) as tap, torch.enable_grad():
            loss = self._sum_of_losses(self._network(self.weights), batch)
            (grad,) = torch.autograd.grad(loss, tap.outputs)
        return grad

    def _sum_of_losses(self, network: Network, batch: Batch) -> Tensor:
        """Return the sum of the losses of images, each by itself where the user's own loss may weigh them together."""
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
        """Return the loss of images with one target; of a loss that refuses such batches what has its gradients.

        All other classes of the first image are beside it then, as in `signals`.
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


def _probe_count(view: ServerView) -> int:
    """Return how many random images a network is tried on."""
    return PROBE_IMAGES if math.prod(view.task.input_shape) < LARGE else LARGE_PROBES


def _probe(view: ServerView) -> _NetworkProbe:
    probe = kept_reading(
        view,
        "probe",
        lambda: _NetworkProbe(view),
        lambda probe: 2 * sum(value.numel() for value in probe.weights.values()),
    )
    if probe.view is view:
        return probe
    own = copy.copy(probe)  # the network is the same, but not what was sent back of it
    own.view = view
    return own


def _are_same(given: Tensor, expected: Tensor) -> bool:
    return given.shape == expected.shape and torch.allclose(given.to(expected), expected, atol=1e-5)


class _OutputLeaf:
    """Keeps a layer's output as the leaf that gradients are taken of."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        self.outputs: list[Tensor] = []
        self.handle = model.get_submodule(layer).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.outputs.append(output.detach().requires_grad_())
        return self.outputs[-1].clone()  # an activation may work in place, which a leaf can't bear

    def __enter__(self) -> _OutputLeaf:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
