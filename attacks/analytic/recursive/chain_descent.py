"""Undoes a chain of layers with max pooling, from the top layer that tells its signal down to the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from attacks.analytic.maxpool.batch_separation import SeparatedBatch
from attacks.analytic.maxpool.determined_pixels import find_determined_pixels
from attacks.analytic.maxpool.solver import BATCH_NEARLY_SOLVED, solve_layer
from attacks.analytic.recursive.chain_obstacles import MAX_UNKNOWNS
from attacks.analytic.recursive.pooled_conv_equations import (
    ActivationOutputs,
    conv_equations,
    input_statistics,
)
from attacks.analytic.recursive.relu_batch_separation import separate_images
from attacks.base import NotApplicable, Reconstruction
from attacks.network.layer_chain import Stage
from attacks.search_control import StoppedError
from attacks.update.float_rounding import RMS_ROUNDING, relative_rounding
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.nearly_told import mark_nearly_told
from attacks.verification.words import LOADER
from fl.view import ServerView

LEFT_OUT = "not confirmed: numbers of {} that the defense left out count as zero, and may tell of pixels"
MAX_UNEXPLAINED = 1e-3
"""Share of a linear layer's gradient, unexplained, that is no longer rounding."""
MAX_FEATURE_UNCERTAINTY = 1e-3
"""Share of the root mean square by which each number of a layer's input may be off if it is returned with a picture."""
PIXEL_MARGIN = 1e-2
"""How far outside [0, 1] a pixel may come out of equations that are satisfied."""


def top_of_one_image(stages: Sequence[Stage], gradients: dict[str, Tensor], top: int) -> SeparatedBatch:
    """Return the signal and input of the top layer for one image: its gradient is their outer product."""
    weight, signal = (gradients[f"{stages[top].name}.{kind}"] for kind in ("weight", "bias"))
    values = (signal @ weight) / (signal @ signal)
    return SeparatedBatch(signal[None], values[None], 0.0, 0.0)


def top_of_batch(
    stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, count: int
) -> SeparatedBatch | NotApplicable:
    """Return signals and inputs of the top layer for the images of a batch, or why they can't be told apart."""
    for lower in stages[:top]:
        if isinstance(lower.layer, nn.Conv2d) and count * lower.layer_input_shape.numel() > MAX_UNKNOWNS:
            numbers = f"{count * lower.layer_input_shape.numel()} numbers, more than {MAX_UNKNOWNS} at once"
            return NotApplicable(f"{count} inputs of {lower.name} are {numbers}", limit=True)
    return separate_images(stages, gradients, top, count)


def invert_layers(
    view: ServerView, stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, first: SeparatedBatch
) -> Reconstruction:
    """Undo one stage after the other, from the top layer of the images in `first` down to the picture."""
    descent = ChainDescent.begin(view, stages, gradients, top, first)
    for number in range(top, -1, -1):
        if number < top:
            descent.undo_activation(number)
        if isinstance(stages[number].layer, nn.Linear):
            descent.undo_linear(number)
            continue
        try:
            stopped = descent.undo_convolution(number)
        except StoppedError as error:
            return descent.cut_short(stages[number].name, str(error))
        if stopped is not None:
            return stopped
    return descent.reconstruction()


@dataclass
class ChainDescent:
    """Where a descent stands, from the top layer down; tensors of all images, one by one (B, ...).

    Attributes:
        view: what the server saw.
        stages: of its network, bottom first.
        gradients: of the weights, by name.
        top: number of the stage it begins at.
        separated: signals and inputs of that stage.
        values: the input of the stage undone last.
        signal: what flows back into that stage's input, or, once its activation is undone, into a layer's output.
        std: how far each of the values may be off, relative to the root mean square of all.
        relative_error: how far the equations of the layers undone so far are off, at most.
        signal_noise: how far the signal may be off in every layer below, relative to its root mean square.
        verified: whether every layer is explained so far.
        activation_outputs: what is known of what the next layer returned.
        residuals: what the inputs found leave of each layer's equations.
        notes: on layers whose equations are not satisfied.
        visible_cells: rows and columns of a convolution's pooled outputs that the stage above saw.
        fixed: which pixels the equations determine, once the image is reached.
        features: the input of the lowest layer above the picture down to which all inputs are determined, by name.
    """

    view: ServerView
    stages: Sequence[Stage]
    gradients: dict[str, Tensor]
    top: int
    separated: SeparatedBatch
    values: Tensor
    signal: Tensor
    std: Tensor
    signal_noise: float
    verified: bool
    relative_error: float = 0.0
    activation_outputs: ActivationOutputs | None = None
    residuals: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    visible_cells: tuple[int, int] | None = None
    fixed: Tensor | None = None
    features: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, view: ServerView, stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, first: SeparatedBatch
    ) -> ChainDescent:
        """Begin at the stage `top`, with the signals and inputs of its layer."""
        names = [stages[top].parameter_name(kind) for kind in ("weight", "bias")]
        return cls(
            view,
            stages,
            gradients,
            top,
            first,
            values=first.inputs,
            signal=first.signals,
            std=torch.zeros_like(first.inputs),
            signal_noise=max(first.relative_error, relative_rounding(view, stages[top].parameter_name("bias"))),
            # an unknown defense may have shortened weight and bias apart, a known one may have left out all that tells
            # of a pixel: only a second layer shows it
            verified=top > 0 or (view.threat.knows_defense and ObservedUpdate(view).is_complete(*names)),
        )

    def undo_activation(self, number: int) -> None:
        """Go from the input of the stage above to what this stage's layer returned."""
        stage, above = self.stages[number], self.stages[number + 1]
        self.activation_outputs = ActivationOutputs.of(stage, above, self.values, self.signal, self.std)
        self.signal = self.activation_outputs.signal
        self.signal_noise = math.hypot(self.signal_noise, self.activation_outputs.signal_noise)

    def undo_linear(self, number: int) -> None:
        """Return the input of a linear layer: known at the top, and below the least squares of its gradient."""
        stage, is_top = self.stages[number], number == self.top
        assert isinstance(stage.layer, nn.Linear)
        weight = self.gradients[f"{stage.name}.weight"]
        if not is_top:
            self.values = torch.linalg.solve(self.signal @ self.signal.mT, self.signal @ weight)
        residual = weight - self.signal.mT @ self.values
        share = float(residual.norm() / weight.norm())
        self.residuals[stage.name] = torch.tensor([share, self.separated.unexplained * is_top], dtype=weight.dtype)
        self.relative_error = max(share, RMS_ROUNDING * torch.finfo(self.view.dtype).eps, self.separated.relative_error)
        if not self.relative_error < MAX_UNEXPLAINED:
            self.verified = False
            self.notes.append(f"{stage.name}: its gradient explained up to {self.relative_error:.1e}")
        self._keep_features(number)
        self.signal = self.signal @ stage.layer.weight.detach()
        self.std = torch.full_like(self.values, self.relative_error)

    def undo_convolution(self, number: int) -> Reconstruction | None:
        """Return the input of a convolution (`attacks.analytic.maxpool`); a result where the descent ends there."""
        stage = self.stages[number]
        assert self.activation_outputs is not None
        self.relative_error = max(self.relative_error, relative_rounding(self.view, stage.parameter_name("weight")))
        equations = conv_equations(
            self.view, stage, self.stages[number + 1], self.gradients, self.activation_outputs, self.visible_cells
        )
        equations = replace(equations, gradient_noise=self.relative_error, signal_noise=self.signal_noise)
        layer, scale = equations.layer, input_statistics(stage) if number == 0 else None
        solution = solve_layer(equations, scale)
        fit = solution.fit
        self.residuals[stage.name] = torch.tensor([fit.gradient_error, fit.output_error])
        self.verified = self.verified and solution.is_satisfied
        if not solution.is_satisfied:
            self.notes.append(f"{stage.name}: {solution.progress_description}")
        if len(self.values) > 1 and number > 0 and not fit.error < BATCH_NEARLY_SOLVED:
            return _partial_result(self.residuals, stage.name, layer.split_images(fit.x), self.notes)
        if number == 0 and self.verified:
            assert scale is not None
            self.fixed = layer.split_images(find_determined_pixels(solution, *scale))
            self.verified = bool(self.fixed.all())
        self.values, self.signal = layer.split_images(fit.x), layer.split_images(solution.input_signal)
        self.relative_error, self.visible_cells = max(fit.gradient_error, self.relative_error), layer.visible_input_size
        if number > 0:
            self.std = layer.split_images(solution.relative_uncertainty())
        self._keep_features(number)
        return None

    def _keep_features(self, number: int) -> None:
        """Keep the input of the layer undone last, if all equations down to it are satisfied and determine it."""
        if number > 0 and not self.notes and bool((self.std <= MAX_FEATURE_UNCERTAINTY).all()):
            self.features = {f"features/{self.stages[number].name}": self.values}

    def cut_short(self, name: str, reason: str) -> Reconstruction:
        """Return what was found above the layer `name`, at which the time was up."""
        words = f"not done before {reason}: ended at {name}"
        return Reconstruction(
            inputs=None,
            objective=_largest_residual(self.residuals) if self.residuals else float("nan"),
            private={**{f"residual/{layer}": value for layer, value in self.residuals.items()}, **self.features},
            verified=False,
            note="; ".join([*self.notes, words]),
            cut_short=words,
        )

    def reconstruction(self) -> Reconstruction:
        """Return the picture, once the first stage is undone."""
        view, image = self.view, self.stages[0].undo_input_maps(self.values)
        names = [self.stages[0].parameter_name(kind) for kind in ("weight", "bias")]
        if (
            not self.top
            and not self.notes
            and view.threat.knows_defense
            and not ObservedUpdate(view).is_complete(*names)
        ):
            self.notes.append(LEFT_OUT.format(self.stages[0].name))
        within = bool((image > -PIXEL_MARGIN).all() and (image < 1 + PIXEL_MARGIN).all())
        if not within:
            self.verified, self.fixed = False, None
            stated = "[0, 1]" if view.task.inputs.is_image else "the range that was stated for it"
            hint = f": {LOADER}" if view.task.inputs.is_image and not self.notes else ""
            self.notes.append(f"the picture came out beyond {stated} and was cut off there{hint}")
        found = Reconstruction(
            inputs=image.clamp(0, 1).to(view.device, view.dtype),
            knowledge=("labels",) if len(image) == 1 and view.labels is not None else (),
            objective=_largest_residual(self.residuals),
            private={**{f"residual/{name}": value for name, value in self.residuals.items()}, **self.features},
            verified=self.verified,
            fixed=None if self.fixed is None else self.fixed.to(view.device),
            note="; ".join(self.notes),
        )
        return mark_nearly_told(view, found, image)


def _largest_residual(residuals: dict[str, Tensor]) -> float:
    """Return the largest of all; what is not a number is worse than any."""
    return float(torch.cat(list(residuals.values())).nan_to_num(nan=math.inf).max())


def _partial_result(residuals: dict[str, Tensor], name: str, features: Tensor, notes: list[str]) -> Reconstruction:
    """Return what there is of a batch whose images could not be followed below the layer `name`."""
    return Reconstruction(
        inputs=None,
        objective=_largest_residual(residuals),
        private={**{f"residual/{n}": value for n, value in residuals.items()}, f"features/{name}": features},
        verified=False,
        note="; ".join([*notes, "the layers below it were not tried"]),
    )
