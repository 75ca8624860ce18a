"""What the attacks share that undo a network one layer at a time, from the last to the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.analytic.recursive.layer_equations import (
    ActivationInputs,
    SolvedInput,
    invert_activation,
    negative_slope,
    solve_input,
)
from attacks.analytic.recursive.start_signal import Gradients, StartSignal, start_signals
from attacks.base import Attack
from attacks.labels.assignment import assign_labels
from attacks.labels.recovery import single_label
from attacks.network.layer_chain import Stage, extract_layer_chain, gradients_by_layer
from attacks.network.recurrent import recurrent_obstacle
from attacks.result import NotApplicable, Reconstruction, Result
from attacks.search_control import named_in_time
from attacks.update.classifier_update import SIGN_WARNING_NO_LABELS, is_sign_flipped
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from attacks.verification.nearly_told import mark_nearly_told
from fl.ranges import OpenShare, Positive
from fl.tensors import dense
from fl.view import ServerView

HALF_LEVEL = 0.5 / 255
"""Half a level of 8 bits, in pixel units."""
WORST_PIXEL_FACTOR = 5.0
"""How far the worst pixel may be off, in root mean squares of all: hardly one of some thousand Gaussian numbers is."""


@dataclass(frozen=True, kw_only=True)
class LayerwiseInversion(Attack):
    """Undoes a chain of layers from the top, for one step on one image, or on a few (`batches`).

    The last linear layer with a bias gives what flows back into it (its bias gradient) and its own input, as its weight
    gradient is the outer product of both; the classifier, label and loss above it play no part. Without any such layer,
    the logits follow from the loss (`attacks.analytic.recursive.bias_free_classifier`). Then, stage by stage: what a
    layer returned and what flows back into it follow from the input of the stage above; its own input solves linear
    equations (`attacks.analytic.recursive.layer_equations`). What flows back of each of several images is told apart
    first (`attacks.analytic.recursive.start_signal`); from there down, their inputs of a layer solve its equations
    together.

    All runs in float64 on the CPU. `private` holds for every layer, under `rank/name`, how many numbers come in, how
    many the layer's gradient equations determine, and how many all equations used do; under `condition/name` the
    condition number of the latter. No prior is used: what no equation determines is left at the shortest solution.

    Attributes:
        fits: verified where no layer's gradient of the recovered image is off by more than this share of the observed
            one, the input of every layer is determined, and what the gradient is off by, magnified by the condition
            number of the first layer's equations, puts the worst pixel off by less than half a level of 8 bits, as far
            as that can be estimated (it is no bound).
        cutoff: singular values below this share of the largest count as zero.
        gigabytes: size up to which one matrix of equations is built.
    """

    inverted_prefixes: ClassVar[frozenset[str]] = frozenset({"pixelwise", "normalized"})
    inverts: ClassVar[bool] = True
    """Whether it needs activations that can be inverted."""
    batches: ClassVar[bool] = False
    """Whether it takes several images."""

    fits: OpenShare = 1e-3
    cutoff: OpenShare = 1e-10
    gigabytes: Positive = 1.0

    def __post_init__(self) -> None:
        for name in ("fits", "cutoff"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"expected {name} in (0, 1), got {getattr(self, name)}")
        if not self.gigabytes > 0:
            raise ValueError(f"expected gigabytes > 0, got {self.gigabytes}")

    @property
    def gradient_trust(self) -> float | None:
        """How far gradient equations are trusted before weight equations (`layer_equations.solve_input`)."""
        return None

    def input_obstacle(self, view: ServerView) -> NotApplicable | None:
        """Refuse recurrent networks as well."""
        return super().input_obstacle(view) or recurrent_obstacle(view)

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Attack one view; nothing is random."""
        gradient = exact_step_gradient(view, batches=self.batches)
        if isinstance(gradient, NotApplicable):
            return gradient
        stages = extract_layer_chain(view)
        if isinstance(stages, NotApplicable):
            return stages
        observed = gradients_by_layer(
            stages, {n: dense(g).detach().to("cpu", torch.float64) for n, g in gradient.items()}
        )
        # the ratio of all is what counts: in a unit of their own no square overflows or runs under
        even, unit = rescale_to_unit({**observed})
        gradients = {n: dense(g) for n, g in even.items()}
        count = sum(sum(step) for steps in training_phases(view)[1] or () for step in steps)
        starts = start_signals(view, stages, observed, unit, count)
        if isinstance(starts, NotApplicable):
            return starts
        reason = self._refusal(stages[: starts[0].top + 1], gradients, count)
        if reason is not None:
            return reason
        found = [self._attempt(view, stages, gradients, start) for start in starts]
        best = min(found, key=lambda result: result.objective)
        if sum(result.objective <= self.fits for result in found) > 1:
            several = (
                f"not verified: {sum(result.objective <= self.fits for result in found)} pictures explain the update"
            )
            return replace(best.with_note(several), verified=False)
        return best

    def _refusal(self, stages: Sequence[Stage], gradients: Gradients, count: int) -> NotApplicable | None:
        """Return why the stages up to the first known signal can't be undone, or None."""
        for stage in stages:
            weight = gradients.get(f"{stage.name}.weight")
            if weight is None:
                return NotApplicable(f"the gradient of {stage.name} was not sent")
            if not bool(weight.any()):
                return NotApplicable(f"no signal flows back into {stage.name}: its weight did not move")
            needed = equation_gigabytes(stage, count)[0 if self.gradient_trust is None else 1]
            if needed > self.gigabytes:
                size = f"{needed:.2g} GB in one matrix (gigabytes={self.gigabytes})"
                return NotApplicable(f"the equations of {stage.name} take {size}", limit=True)
        if self.inverts:
            for stage in stages[:-1]:
                if negative_slope(stage.activation) == 0:
                    reason = f"the activation above {stage.name} can't be inverted; rconv does without"
                    return NotApplicable(reason, limit=True)
        return None

    def _attempt(
        self, view: ServerView, stages: Sequence[Stage], gradients: Gradients, start: StartSignal
    ) -> Reconstruction:
        solved = invert_layers(stages, gradients, start, self.gradient_trust, self.cutoff, self.gigabytes)
        names = [stage.name for stage in stages[: start.top + 1]]
        pixels = solved[0].values.nan_to_num(0.5, 1.0, 0.0).clamp(0, 1)
        again = layer_gradients(stages, start, pixels)
        off = max(_relative_distance(again[n], gradients[n]) for n in again if n in gradients)
        whole = all(layer.rank == layer.unknown_count for layer in solved)
        # what the gradient is off by, the equations of the pixels magnify by as much as their condition number
        doubt = max(off, start.relative_error) * solved[0].condition
        sharp = WORST_PIXEL_FACTOR * doubt * _input_scale(stages[0], pixels) <= HALF_LEVEL
        # an unknown defense may have shortened weight and bias apart, and a known one may have left out what belongs to
        # a pixel, which only a second layer shows
        tensors = [stages[start.top].parameter_name(kind) for kind in ("weight", "bias")]
        sized = start.top > 0 or (view.threat.knows_defense and ObservedUpdate(view).is_complete(*tensors))
        ranks = {
            f"rank/{n}": torch.tensor([s.unknown_count, s.gradient_rank, s.rank])
            for n, s in zip(names, solved, strict=True)
        }
        conditions = {f"condition/{n}": torch.tensor(s.condition) for n, s in zip(names, solved, strict=True)}
        found = Reconstruction(
            inputs=pixels.to(view.device, view.dtype),
            objective=off,
            private={**ranks, **conditions},
            verified=whole and sized and sharp and off <= self.fits,
            note=self._explain_doubt(names, solved, off, sharp=sharp, sized=sized),
        )
        if len(pixels) == 1:
            found = mark_nearly_told(view, found, solved[0].values) if whole else found
            return _with_label(found, view, stages, start)
        if start.labels is not None:
            known = () if view.labels is None else ("labels",)
            return replace(found, labels=start.labels.to(view.device), knowledge=known)
        sent = gradients.get(f"{stages[-1].name}.bias")
        odd = sent is not None and view.task.loss.is_cross_entropy and is_sign_flipped(sent, len(pixels))
        labels = named_in_time(lambda: assign_labels(view, gradients, pixels.to(view.device)), None)
        return _with_sign_warning(replace(found, labels=labels), odd=odd)

    def _explain_doubt(
        self, names: Sequence[str], solved: Sequence[SolvedInput], off: float, *, sharp: bool, sized: bool
    ) -> str:
        """Say why a picture is not verified; empty where it is."""
        few = [
            f"{layer.unknown_count - layer.rank} of the {layer.unknown_count} numbers that {name} is given are open"
            for name, layer in zip(names, solved, strict=True)
            if layer.rank < layer.unknown_count
        ]
        if few:
            return f"not verified: {', '.join(few)}"
        if not off <= self.fits:
            return f"not verified: {off:.1e} of the layers' gradients is left unexplained"
        if not sharp:
            magnified = f"magnified by the condition number of its equations, {solved[0].condition:.1e}"
            return (
                f"not verified: what the gradient of {names[0]} is off by, {magnified}, may be half a level of 8 bits"
            )
        if not sized:
            return "not verified: of one layer alone, a defense that is unknown, or left numbers out, may hide the size"
        return ""


def _with_label(found: Reconstruction, view: ServerView, stages: Sequence[Stage], start: StartSignal) -> Reconstruction:
    """Return the one image with its label, known or read off what flows back into the classifier."""
    last = start.top == len(stages) - 1 and not stages[-1].end_reason
    head = last and stages[start.top].parameter_name("weight").startswith(view.task.head)
    if not view.task.loss.is_cross_entropy:
        labels, _ = single_label(view)
        return replace(found, labels=labels, knowledge=() if view.labels is None else ("labels",))
    odd = head and is_sign_flipped(start.signal[0])
    labeled = replace(
        found,
        labels=start.signal.argmin(1).to(view.device) if head and not odd else view.labels,
        knowledge=() if (head and not odd) or view.labels is None else ("labels",),
    )
    return _with_sign_warning(labeled, odd=odd)


def _with_sign_warning(found: Reconstruction, *, odd: bool) -> Reconstruction:
    return replace(found, note="; ".join(filter(None, (SIGN_WARNING_NO_LABELS, found.note)))) if odd else found


def _input_scale(stage: Stage, pixels: Tensor) -> float:
    """Return the root mean square of the first layer's input (N, ...) in pixel units, the measure of errors."""
    if stage.pointwise:
        pixels = stage.layer_input(pixels) / stage.input_affine()[1]
    return float(pixels.square().mean().sqrt())


def invert_layers(
    stages: Sequence[Stage],
    gradients: Gradients,
    start: StartSignal,
    trust: float | None,
    cutoff: float,
    gigabytes: float,
) -> list[SolvedInput]:
    """Return the input of every stage up to the start's, bottom first.

    Args:
        stages: of the network, bottom first.
        gradients: dL/dweight by name.
        start: where to begin.
        trust: as in `attacks.analytic.recursive.layer_equations.solve_input`.
        cutoff: likewise.
        gigabytes: likewise; weight equations that take more are left out.
    """
    signal = start.signal
    outputs: ActivationInputs | None = None
    found: list[SolvedInput] = []
    for stage in reversed(stages[: start.top + 1]):
        gradient = gradients[f"{stage.name}.weight"]
        usable = outputs if equation_gigabytes(stage, len(signal))[2] <= gigabytes else None
        with torch.no_grad():
            solved = solve_input(stage, signal, gradient, usable, trust=trust, cutoff=cutoff)
        found.insert(0, solved)
        signal = _backpropagate(nn.Sequential(stage.before, stage.layer), stage.shape, signal)
        if len(found) <= start.top:
            below = stages[start.top - len(found)]
            outputs, slope = invert_activation(below.activation, solved.values)
            signal = _backpropagate(below.after, layer_output_shape(below), signal * slope)
    return found


def layer_gradients(stages: Sequence[Stage], start: StartSignal, pixels: Tensor) -> Gradients:
    """Return the gradient of <signal, output of the start's layer> at images (N, C, H, W), by parameter.

    Args:
        stages: of the network, bottom first.
        start: the layer and signal (N, out) at the top.
        pixels: the images (N, C, H, W).
    """
    values = pixels
    parameters: dict[str, nn.Parameter] = {}
    with torch.enable_grad():
        for i, stage in enumerate(stages[: start.top + 1]):
            mine = {f"{stage.name}.{n}": p for n, p in stage.layer.named_parameters() if p.requires_grad}  # none frozen
            parameters |= mine
            given = stage.layer_input(values)
            values = stage.layer(given) if i == start.top else stage.activation(stage.activation_input(given))
        grads = torch.autograd.grad((values * start.signal).sum(), list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def equation_gigabytes(stage: Stage, count: int = 1) -> tuple[float, float, float]:
    """Return gigabytes that a stage's equations take in one matrix: all, its gradient equations, its weight equations.

    Args:
        stage: the layer.
        count: of images, whose inputs are solved for together.
    """
    layer, unknowns, outputs = stage.layer, count * stage.shape.numel(), count * layer_output_shape(stage).numel()
    before = 0.0 if stage.pointwise else 8e-9 * unknowns**2  # its linear maps as a matrix
    if not isinstance(layer, nn.Conv2d):
        return before, before, 8e-9 * outputs * unknowns
    with torch.no_grad():
        positions = count * stage.layer_input(stage.zero_input())[0, 0].numel()
    whole = 8e-9 * unknowns * (positions * layer.in_channels + outputs)
    gradient = 8e-9 * layer.weight[:, 0].numel() * positions
    return max(whole, before), max(gradient, before), 8e-9 * outputs * unknowns


def _relative_distance(x: Tensor, y: Tensor) -> float:
    """Return the relative distance of two tensors, at most 2; 0 where both are zero."""
    size = max(float(x.norm()), float(y.norm()))
    return float((x - y).norm()) / size if size else 0.0


def layer_output_shape(stage: Stage) -> torch.Size:
    """Return the shape of what a stage's layer returns, without the batch."""
    with torch.no_grad():
        shape: torch.Size = stage.layer(stage.layer_input(stage.zero_input())).shape
    return shape[1:]


def _backpropagate(linear: Callable[[Tensor], Tensor], shape: torch.Size, signal: Tensor) -> Tensor:
    """Return what flows back into a linear map."""
    with torch.enable_grad():
        at = torch.zeros(len(signal), *shape, dtype=torch.float64, requires_grad=True)
        layer_output_shape = linear(at)
    (pulled,) = torch.autograd.grad(layer_output_shape, at, signal.view_as(layer_output_shape))
    return pulled
