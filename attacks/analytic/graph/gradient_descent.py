r"""Searches over pixels by the gradient of the misfit alone, where Gauss and Newton's steps get stuck or are slow.

The misfit |r(x)|^2 of deep features has a kink wherever an activation opens or closes. Far from the picture there are
so many that steps which lower it get stuck between them, however they are found. Two searches go on from there:

- **Annealing** takes steps of Adam (Kingma and Ba, 2015), whose size hangs on no slope, and clips to the pixels' range
  [0, 1]. Wide steps are nearly half the range at first, so pixels jump far and kinks are jumped over; they shrink to
  nothing in a straight line. The slower, the lower it ends. Smooth steps are short, and total variation (Rudin, Osher
  and Fatemi, 1992) is added to the misfit and fades. A trained network hardly responds to the finest patterns, so
  what a start has of them stays otherwise.
- **Descent** is L-BFGS (Liu and Nocedal, 1989) in the coordinates u of x = x_0 + S^-1 C^T D^-1/2 u, in which the
  misfit's curvature is about the same in all directions (`pixel_curvature`). It follows the pieces at every step, where
  a step of Gauss and Newton takes tens of products with the Jacobian of pieces that are wrong at its end.

Images do not interact: each has its own inner products, step lengths and history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.pixel_curvature import PixelCurvature
from attacks.search_control import check_time_limit
from fl.tensors import per_image

Misfit = Callable[[Tensor], Tensor]
"""From images (b, C, H, W) to the squared misfit of each (b,), differentiable."""
Late = Callable[[], bool]
"""Whether the time of a search is up."""


@dataclass(frozen=True)
class AnnealingCourse:
    """How annealing goes.

    Attributes:
        first_step: size of the first steps, in units of the pixels' range.
        last_step: of the last ones, to which sizes fall by the same factor each; 0 where they fall in a straight line.
        total_variation: its weight beside the squared misfit at first; it fades in a straight line.
    """

    first_step: float
    last_step: float = 0.0
    total_variation: float = 0.0

    def step_size(self, done: float) -> float:
        """Return the size of a step after such a share of them."""
        if self.last_step == 0:
            return self.first_step * (1 - done)
        return self.first_step * (self.last_step / self.first_step) ** done


WIDE = AnnealingCourse(0.4)
"""The annealing for a network that responds to every pattern alike, as untrained ones do."""
SMOOTH = AnnealingCourse(0.05, 0.001, 0.2)
"""The annealing for a network that was trained on natural pictures, and such a picture."""
EDGE = 1e-3
"""Difference of neighboring pixels below which total variation has no kink."""
MEAN_DECAY, SQUARE_DECAY = 0.9, 0.99
"""Decay of Adam's running means of slopes and of their squares."""
HISTORY = 50
"""Steps that L-BFGS remembers."""
SUFFICIENT = 1e-4
"""Share of the fall along the slope that a step of the descent must bring, at least."""
SHORTEST = 2.0**-30
"""The shortest share of a step of the descent that is tried."""
LOOK_BACK, LEAST_FALL = 25, 0.02
"""Over so many steps the misfit's root has to fall by such a share, or the descent ends."""


def anneal(misfit: Misfit, images: Tensor, steps: int, late: Late, course: AnnealingCourse = WIDE) -> Tensor:
    """Return the images least in misfit of a search by Adam's steps, large at first, within [0, 1].

    Args:
        misfit: of each image.
        images: (b, C, H, W), where to begin.
        steps: how many, each one evaluation of misfit and gradient.
        late: after which no further step begins.
        course: sizes of the steps, and what is added to the misfit.
    """
    at = images.clamp(0, 1)
    mean, square = torch.zeros_like(at), torch.zeros_like(at)
    best, least = at, torch.full((len(at),), float("inf"), dtype=at.dtype, device=at.device)
    for k in range(steps):
        check_time_limit()
        if late():
            break
        value, slope = _evaluate(misfit, at)
        if course.total_variation:
            slope = slope + course.total_variation * (1 - k / steps) * _evaluate(_total_variation, at)[1]
        lower = value < least
        best, least = torch.where(per_image(lower, at), at, best), torch.where(lower, value, least)
        mean = MEAN_DECAY * mean + (1 - MEAN_DECAY) * slope
        square = SQUARE_DECAY * square + (1 - SQUARE_DECAY) * slope.square()
        unit = mean / (1 - MEAN_DECAY ** (k + 1)) / (square / (1 - SQUARE_DECAY ** (k + 1))).sqrt().clamp_min(1e-30)
        at = (at - course.step_size(k / steps) * unit).clamp(0, 1)
    return best


def descend(misfit: Misfit, images: Tensor, curvature: PixelCurvature, steps: int, floor: float, late: Late) -> Tensor:
    """Return images to which L-BFGS leads.

    Args:
        misfit: of each image.
        images: (b, C, H, W), where to begin.
        curvature: half the misfit's curvature, about.
        steps: how many, at most.
        floor: of the squared misfit, below which an image is done.
        late: after which no further step begins.
    """
    at = torch.zeros_like(images)

    def of(point: Tensor) -> Tensor:
        return misfit(images + curvature.color(point))

    memory: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=HISTORY)
    value, slope = _evaluate(of, at)
    values = [value]
    while len(values) <= steps and not late() and bool((value > floor).any()):
        direction = _quasi_newton_direction(slope, memory)
        along = _dot(direction, slope)
        share = torch.where(value > floor, torch.ones_like(value), torch.zeros_like(value))
        while True:
            trial = at + per_image(share, at) * direction
            found, steeper = _evaluate(of, trial)
            worse = ~(found <= value + SUFFICIENT * share * along) & (share > 0)
            if not bool(worse.any()):
                break
            fit = -along * share / (2 * ((found - value) / share - along)).nan_to_num(float("inf"))
            share = torch.where(worse, fit.clamp(0.1 * share, 0.5 * share), share)
            share = torch.where(share < SHORTEST, torch.zeros_like(share), share)
        step, bend = trial - at, steeper - slope
        inner = _dot(step, bend)
        kept = inner > 1e-10 * _dot(bend, bend)
        memory.append((step, bend, torch.where(kept, 1 / inner, torch.zeros_like(inner))))
        at, value, slope = trial, found, steeper
        values.append(value)
        if len(values) > LOOK_BACK and not bool((value < (1 - LEAST_FALL) ** 2 * values[-1 - LOOK_BACK]).any()):
            break
    return images + curvature.color(at)


def _quasi_newton_direction(slope: Tensor, memory: deque[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return minus the slope times the inverse curvature that the steps so far tell; 1/2 where there are none."""
    direction, factors = -slope, []
    for step, bend, inverse in reversed(memory):
        factors.append(inverse * _dot(step, direction))
        direction = direction - per_image(factors[-1], bend) * bend
    scale = torch.full_like(_dot(slope, slope), 0.5)
    for _, bend, inverse in memory:  # the last that is kept counts
        scale = torch.where(inverse > 0, 1 / (inverse * _dot(bend, bend)).clamp_min(1e-30), scale)
    direction = per_image(scale, direction) * direction
    for (step, bend, inverse), factor in zip(memory, reversed(factors), strict=True):
        direction = direction + per_image(factor - inverse * _dot(bend, direction), step) * step
    return direction


def _total_variation(images: Tensor) -> Tensor:
    """Return the mean size of the differences of neighboring pixels, of each image, kinks rounded off."""
    total = images.new_zeros(len(images))
    for dim in range(2, images.ndim):
        total = total + (images.diff(dim=dim).square() + EDGE**2).sqrt().flatten(1).mean(1)
    return total


def _evaluate(misfit: Misfit, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the misfit of each image and its slope."""
    point = images.detach().requires_grad_()
    with torch.enable_grad():
        value = misfit(point)
        (slope,) = torch.autograd.grad(value.sum(), point)
    return value.detach(), slope


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).flatten(1).sum(1)
