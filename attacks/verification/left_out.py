"""Holds what was found to the numbers that a known defense let through, where it left others out.

An attack that solves layer by layer may take a number that was left out for zero, and the equations of a single layer
may hold for a picture that is wrong where all that tells of a pixel was left out. What was let through depends on the
whole picture, and one step on it must make just that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.result import Reconstruction
from attacks.update.float_rounding import rounding_of_numbers
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.comparison import can_replay
from attacks.verification.eight_bit_pixels import at_levels
from attacks.verification.possible_labels import taken_labels
from attacks.verification.step_prediction import StepPredictor
from attacks.verification.update_comparison import UpdateComparison
from attacks.verification.words import LEFT_OUT, LEFT_OUT_LABELS, LEFT_OUT_NEARLY
from fl.defense import Defense, ask_numbers, ask_surrogate, overrides
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.view import ServerView

FEW_SPACINGS = 4.0
"""Spacings of its type up to which a number may be no more than rounding."""
SAME_SHARE = 1e-4
"""How far a defense's surrogate may be from a prediction where numbers were sent, relative to it, to leave it alone."""


@dataclass(frozen=True)
class SentPredictor(StepPredictor):
    """The prediction of the numbers of an update that a known defense let through.

    Attributes:
        sent: 1 where a number was let through, 0 elsewhere, by tensor.
    """

    sent: Mapping[str, Tensor]

    def predict(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what one step on images makes, in the client's precision."""
        return _masked(super().predict(images, labels), self.sent)

    def predict_in_double(
        self, images: Tensor, labels: Tensor, weights: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return what one step on images makes, computed in double precision."""
        return _masked(super().predict_in_double(images, labels, weights), self.sent)


@dataclass(frozen=True)
class SentComparison(UpdateComparison):
    """The comparison of an update with what images make, in the numbers that a known defense let through.

    Attributes:
        defended: the view as it is; `view` is that of a client without a defense.
        sent: 1 where a number was let through, 0 elsewhere, by tensor.
    """

    defended: ServerView | None = None
    sent: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def observed(self) -> dict[str, Tensor]:
        """The update without decay, in double precision and in a unit of its own."""
        update = ObservedUpdate(self.defended or self.view)
        whole = {name: value / self.unit for name, value in update.in_double(self.view.update).items()}
        return _masked(whole, self.sent)

    @cached_property
    def predictor(self) -> SentPredictor:
        """The predictor of what one step on images makes, in the same numbers."""
        return SentPredictor(self.view, self.sent)


def require_transmitted_entries(view: ServerView, result: Reconstruction) -> Reconstruction:
    """Return a result, not verified where one step on it does not make what a known defense let through.

    Where nothing was left out, or such a step can't be taken, it is returned as it is.

    Args:
        view: the view that was attacked.
        result: of the attack on the view.
    """
    if not result.verified or result.inputs is None or len(result.inputs) != view.batch_size:
        return result
    check = _comparison(view)
    if check is None:
        return result
    images = result.inputs
    whole = at_levels(images) if view.task.inputs.is_image else None
    near = [images] if whole is None else [images, whole]
    guesses = list(taken_labels(check.view, result, images))
    if not guesses:
        return replace(result.with_note(LEFT_OUT_LABELS), verified=None, fixed=None)
    if any(check.is_explained_to_rounding(one, labels) for labels in guesses for one in near):
        return result
    if any(check.is_explained(images, labels) for labels in guesses):
        note = "; ".join(filter(None, (result.note, LEFT_OUT_NEARLY)))
        return replace(result, verified=None, fixed=None, note=note, approximate=True)
    return replace(result.with_note(LEFT_OUT), verified=False, fixed=None)


def _comparison(view: ServerView) -> SentComparison | None:
    """Return the comparison with what was let through; None where nothing was left out or it can't be taken."""
    defense, update = view.client.defense, ObservedUpdate(view)
    if not view.threat.knows_defense or update.is_complete(*view.update) or update.altered() is not None:
        return None
    each_gradient = [part for part in defense.members() if overrides(part, "gradient")]
    own_gradient = any(not overrides(part, "search_gradient") for part in each_gradient)
    changed = own_gradient or any(overrides(defense, hook) for hook in ("transform_batch", "wrap_model"))
    if changed or any(ask_numbers(defense, "noise_std", view.update).values()) or not _leaves_rest_alone(view):
        return None
    bare = replace(view, defense=Defense())
    if view.private or not can_replay(bare):
        return None
    # weights that did not move may come back a last digit off: that is nothing that was let through
    spacings = {name: math.sqrt(12) * deviation for name, deviation in rounding_of_numbers(view).items()}
    heard = {n: dense(v).double().abs() > FEW_SPACINGS * spacings[n] for n, v in view.update.items()}
    sent = {name: (update.transmitted(name) & heard[name]).double() for name in view.update}
    return SentComparison(bare, update.relative_rounding, True, defended=view, sent=sent)


def _leaves_rest_alone(view: ServerView) -> bool:
    """Return whether a known defense changes no number that it lets through but by one factor for all."""
    draw = stream(0, "left out")
    probe: Tensors = {n: torch.randn(dense(v).shape, generator=draw).to(dense(v)) for n, v in view.update.items()}
    passed = ask_surrogate(view.client.defense, probe, view.update)
    if passed.keys() != probe.keys():
        return False
    sent = {name: ObservedUpdate(view).transmitted(name) for name in probe}
    before = torch.cat([dense(probe[name])[which].double() for name, which in sent.items()])
    after = torch.cat([dense(passed[name])[which].double() for name, which in sent.items()])
    size = float(before.square().sum())
    factor = float(before @ after) / size if size else 0.0
    return factor > 0 and float((after - factor * before).norm()) <= SAME_SHARE * float(after.norm())


def _masked(values: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * sent[name] for name, value in values.items()}
