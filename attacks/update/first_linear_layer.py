"""A fully connected layer as the server sees it: its weights, its gradient, and what is around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from attacks.network.linear_layers import PixelOrigin
from attacks.network.operation_trace import MODEL_ERRORS
from attacks.result import NotApplicable
from attacks.update.label_gradients import batches_of_targets
from attacks.update.layer_probe import LayerProbe, probe_count, probe_layers
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient
from attacks.update.update_rule import SIGNS_ONLY, hides_behind_signs
from fl.defense import ask_numbers, overrides
from fl.local.hook_results import expect_made
from fl.runtime.double_precision import PrecisionError
from fl.tensors import dense
from fl.view import ServerView

SIZE_TOLERANCE = 1e-3
"""Distance of two unit signals up to which a layer's input has the right size: about one percent of its brightness."""
MAX_COMBINATIONS = 64
"""Combinations of labels that are tried for a picture, at most: as many as six labels of 0 or 1 have."""


@dataclass(frozen=True)
class LinearLayer:
    """The first linear layer with a bias whose update was sent, in float64.

    Over a batch, its gradient is `sum of delta_i x_i^T` and `sum of delta_i`: both stand here up to one factor.

    Attributes:
        view: what the server saw.
        name: of the layer.
        weight: as the server sent it (m, n).
        bias: as the server sent it (m,).
        update: the weight's update without decay (m, n), divided by `unit`, so that its largest entry has size 1.
        bias_update: the bias's update (m,), divided by the same `unit`.
        transmitted: 1 where a known defense let an entry of the weight through, else 0 (m, n); None if it did for all.
        bias_transmitted: the same for the bias (m,).
        trust: how far a known defense lets the bias be trusted, relative to the weight.
        gap_limit: the largest size, in `unit`, of a number that a known defense sent as zero.
        noise: standard deviations, in `unit`, of a known defense's noise in the weight and in the bias.
        is_given_images: whether its input is the image itself, normalized.
        steps: optimizer steps in which it moves; None if unknown.
        scale: size of the updates, in `unit`, for a gradient of size 1 of the loss; None if unknown (several steps,
            clipping, a defense that changes sizes).
        origin: how its input is made of pixels, where the view's normalization does not say it.
        passed_over: linear layers below that the network uses more than once, so that their updates are sums.
        unit: what updates were divided by.
        masked: whether some numbers of the weight take no part in the layer's output, such as pruned ones.
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
    def _probe(self) -> LayerProbe:
        return probe_layers(self.view)

    @property
    def lies_as_images(self) -> bool:
        """Whether its input has the image's numbers in the image's order."""
        return self.is_given_images and self.origin is None

    @property
    def factors(self) -> Tensor | None:
        """The factor on each number of its weight before the layer uses it (m, n); None if it is used as it is."""
        return self._probe.factors(self.name)

    def arrange(self, kind: str, values: Tensor) -> Tensor:
        """Return a tensor of its "weight" or "bias" in the layer's layout, from that of the update."""
        return self._probe.arrange(self.name, kind, values)

    def to_pixels(self, inputs: Tensor) -> Tensor:
        """Return inputs of the layer (N, n) as pixels (N, C, H, W), which may lie outside [0, 1]."""
        if self.origin is None:
            return denormalize(self.view, inputs)
        return self.origin.pixels(inputs).view(len(inputs), *self.view.task.input_shape)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return inputs of the layer (N, n) as images (N, C, H, W) in [0, 1]."""
        return self.to_pixels(inputs).clamp(0, 1).to(self.view.dtype)

    def is_rectified(self) -> bool:
        """Return whether a ReLU follows: no signal flows back where the output is negative, but some elsewhere."""
        outputs, signals = self._probe.outputs_and_signals(self.name)
        silent = signals == 0
        return bool(silent[outputs < 0].all() and not silent[outputs > 0].all())

    def signals(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the layer's signals for its inputs under one target after the other, as far as the loss takes it.

        Args:
            inputs: of the layer (N, n).
            targets: that an image may have (K, ...).

        Yields:
            The numbers of the inputs' targets (N,), and the signals (N, m).
        """
        images = self.to_pixels(inputs)
        for numbers in batches_of_targets(self.view.task.loss, self._probe.outputs(images), targets):
            yield numbers, self._probe.signals(self.name, images, targets[numbers.to(targets.device)])

    @property
    def network_weights(self) -> dict[str, Tensor]:
        """All parameters of the network in double precision; those that the server can't know are drawn at random."""
        return self._probe.weights

    def weights_with_bias(self, row: int, change: float) -> dict[str, Tensor]:
        """Return all parameters of the network with `change` added to one number of the layer's bias."""
        name = self.parameter_names[1]
        bias = self.network_weights[name].clone()
        places = torch.arange(bias.numel(), dtype=torch.float64, device=bias.device).view_as(bias)
        bias.view(-1)[int(self.arrange("bias", places)[row])] += change
        return {**self.network_weights, name: bias}

    def gradients(
        self, inputs: Tensor, target: Tensor, weights: dict[str, Tensor] | None = None, *, others: bool = False
    ) -> dict[str, Tensor]:
        """Return the gradients of one picture's loss by all parameters.

        Args:
            inputs: the picture as the layer's input (n,).
            target: of the picture.
            weights: of the network; None takes those that were sent.
            others: whether the loss is that of a batch of the picture and random ones, all with its target.
        """
        images = self.to_pixels(inputs[None])
        images = torch.cat([images, self._probe.images.to(images)]) if others else images
        targets = target[None].expand(len(images), *target.shape)
        return self._probe.gradients(images, targets, weights or self.network_weights)

    def possible_labels(self) -> Tensor | None:
        """Return every label that an image may have (M, ...), or None if there are too many or it is a real number.

        Classes are always returned, however many there are.
        """
        task = self.view.task
        limit = max(task.num_classes, MAX_COMBINATIONS)
        return task.loss.every_target(task.output_shape, limit)

    def has_true_size(self, inputs: Tensor, signals: Tensor) -> bool:
        """Return whether `inputs` have their true size, which an unknown defense may have changed.

        They have it if some labels fit their signals, and none fit inputs half as bright. The second test is needed
        because signals of two outputs have the same direction whatever the input is.
        """
        if self.view.threat.knows_defense:
            return True
        seen, darker = (self.labels(x, signals, SIZE_TOLERANCE) for x in (inputs, inputs / 2))
        return seen is not None and darker is None

    def labels(self, inputs: Tensor, signals: Tensor, tolerance: float) -> Tensor | None:
        """Return the labels (N,) under which the layer's signals have the observed directions; None if none fit.

        Args:
            inputs: of the layer (N, n).
            signals: observed (N, m), up to a positive factor each.
            tolerance: distance of two unit signals up to which labels fit.
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
    """Return normalized images (N, n) as pixels (N, C, H, W), which may lie outside [0, 1]."""
    mean, std = view.task.normalization(inputs)
    return inputs.view(len(inputs), *view.task.input_shape) * std + mean


def first_linear(view: ServerView, *, scaled: bool = False) -> LinearLayer | NotApplicable:
    """Return the first linear layer with a bias whose update tells its input, or why there is none.

    Layers that the network uses more than once (recurrent ones, shared ones) are passed over.

    Args:
        view: what the server saw.
        scaled: whether layers count whose weight is multiplied by known factors before use, 0 where it is pruned. The
            update of the product is then returned, where it is known.
    """
    reason = _obstacle(view)
    if reason is not None:
        return NotApplicable(reason)
    observed = ObservedUpdate(view)
    if observed.unknown_decay:
        return NotApplicable("the number of local steps is unknown, so weight decay can't be taken off")
    probe = probe_layers(view)
    try:
        layers = probe.layers
    except PrecisionError as error:
        return NotApplicable(str(error), limit=True)
    except MODEL_ERRORS as error:
        return NotApplicable(f"the network does not run on a batch of {probe_count(view)} images: {error}", limit=True)
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
    """Return the linear layers with a bias that take one of a model's several inputs as it is, by the input's number.

    Args:
        view: what the server saw.
    """
    observed = ObservedUpdate(view)
    if len(view.task.inputs.parts) < 2 or _obstacle(view) is not None or observed.unknown_decay:
        return {}
    probe, found = probe_layers(view), dict[int, LinearLayer]()
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


def _read_layer(observed: ObservedUpdate, probe: LayerProbe, name: str, images: bool) -> LinearLayer | NotApplicable:
    """Return a linear layer whose update was sent, or why its update tells nothing.

    Args:
        observed: the update.
        probe: the network.
        name: of the layer.
        images: whether its input is the image, normalized as the view says.
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


def _layer_obstacle(view: ServerView, probe: LayerProbe, name: str) -> NotApplicable | None:
    """Return why a layer's update tells nothing, whatever its numbers are; None if it may tell something."""
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


def _moved(observed: ObservedUpdate, probe: LayerProbe, name: str) -> tuple[Tensor, Tensor] | NotApplicable:
    """Return the updates of a layer's weight (m, n) and bias (m,), or why they do not tell its input."""
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
    """Return by kind of tensor which entries a known defense let through as they were; None if it did all."""
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
    """Return the largest size that a number which came as zero can have had; infinite under weight decay."""
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
