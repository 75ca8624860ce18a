"""Predicts what one step on images makes of a network, in the client's precision and in double."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from fl.predict import predict
from fl.tensors import Tensors, dense
from fl.types import Candidate
from fl.view import ServerView


@dataclass(frozen=True)
class StepPredictor:
    """The prediction of an update from images, in a unit in which squares do not overflow.

    Attributes:
        view: of the client whose step it is.
    """

    view: ServerView

    def predict(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what one step on images makes in the client's precision, without decay, as numbers in double."""
        with torch.no_grad():
            guess = Candidate(images.to(self.view.device, self.view.dtype), labels.to(self.view.device))
            return self._in_unit(ObservedUpdate(self.view).in_double(predict(self.view, guess)))

    def predict_in_double(
        self, images: Tensor, labels: Tensor, weights: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return what one step on images makes, all computed in double precision, whatever the client computed in.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            weights: in place of the view's.
        """
        view = self.in_double if weights is None else replace(self.in_double, shared={**weights})
        with torch.no_grad():
            guess = Candidate(images.to(view.device, torch.float64), labels.to(view.device))
            return self._in_unit(ObservedUpdate(view).in_double(predict(view, guess)))

    def predict_pair(self, images: Tensor, away: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what pairs make that differ from images by so much, to either side.

        Where a network takes no such numbers, as the logarithm of a negative one, both are kept in [0, 1].
        """
        made = [self.predict_in_double(images + sign * away, labels) for sign in (1, -1)]
        if not all(bool(value.isfinite().all()) for each in made for value in each.values()):
            room = torch.minimum(images, 1 - images).clamp(min=0)
            away = torch.minimum(torch.maximum(away, -room), room)
            made = [self.predict_in_double(images + sign * away, labels) for sign in (1, -1)]
        return made[0], made[1]

    @property
    def unit(self) -> float:
        """The unit of all predictions, a power of two. One was made before."""
        return self._units[0]

    def _in_unit(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a prediction in the unit of all of them, a power of two, so that squares do not overflow."""
        if not self._units:
            self._units.append(rescale_to_unit({**made})[1])
        unit = self._units[0]
        return made if unit == 1 else {name: value / unit for name, value in made.items()}

    @cached_property
    def _units(self) -> list[float]:
        """The unit, once something was predicted."""
        return []

    @cached_property
    def in_double(self) -> ServerView:
        """The view in double precision, so that a prediction is not rounded as the weights are."""
        view = self.view
        return replace(
            view,
            task=view.task.to(dtype=torch.float64),
            shared={**_all_double(view.shared)},
            update={**_all_double(view.update)},
            buffers={n: v.double() if v.is_floating_point() else v for n, v in view.buffers.items()},
            received={name: {**_all_double(sent)} for name, sent in view.received.items()},
            history=(),
        )


def _all_double(values: Tensors) -> dict[str, Tensor]:
    """Return tensors, dense and in double precision."""
    return {name: dense(value).double() for name, value in values.items()}
