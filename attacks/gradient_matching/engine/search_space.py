"""What a search for images moves: the images themselves, or something smaller they are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl.types import Task


@dataclass(frozen=True)
class SearchSpace:
    """The images themselves, in the model's normalized units.

    Attributes:
        start: the one start that makes sense here, or None where all of `GradientMatching.init` do.
    """

    start: ClassVar[str | None] = None

    def shape(self, task: Task) -> tuple[int, int, int]:
        """Return the shape of one variable."""
        return task.input_shape

    def units(self, task: Task) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the offset and the scale of each channel that turn a variable into numbers in [0, 1]."""
        return task.mean, task.std

    def decode(self, values: Tensor) -> Tensor:
        """Return pixels (B, C, H, W) of variables in [0, 1] (B, *shape); differentiable."""
        return values


@dataclass(frozen=True)
class UpsampledSpace(SearchSpace):
    """Small images in [0, 1] that bicubic interpolation enlarges (ROG, Yue et al. 2023).

    Interpolation is linear in rows and in columns: `x = U_h z U_w^T`, which equals `F.interpolate(mode="bicubic")` and,
    unlike it, adds up in the same order on every device.

    Attributes:
        factor: how many times smaller than the images, rounded up.
        size: (H, W) of the images.
        clamped: whether their pixels are kept in [0, 1], so that a code that overshoots costs nothing.
    """

    factor: int
    size: tuple[int, int]
    clamped: bool = False

    def shape(self, task: Task) -> tuple[int, int, int]:
        """Return (C, ceil(H / factor), ceil(W / factor))."""
        height, width = (-(-side // self.factor) for side in self.size)
        return task.input_shape[0], height, width

    def units(self, task: Task) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return pixels as they are: the method knows no normalization."""
        channels = task.input_shape[0]
        return (0.0,) * channels, (1.0,) * channels

    def decode(self, values: Tensor) -> Tensor:
        """Return the enlarged images."""
        rows, columns = (_bicubic(side, self.factor).to(values) for side in self.size)
        images = rows @ values @ columns.mT
        return images.clamp(0, 1) if self.clamped else images

    def project(self, images: Tensor, steps: int = 1000) -> Tensor:
        """Return the images of this space that are closest to others in [0, 1] once clamped to [0, 1].

        What lies beyond a limit costs nothing then, so that black and white surfaces leave a code free for the rest.
        That is no convex problem: this is the best that a descent finds, a code closer still is not ruled out. A pixel
        beyond a limit keeps what it has while least squares fit the others anew, which never adds to the distance
        (majorization), in steps accelerated after Nesterov.

        Args:
            images: (N, C, H, W) in [0, 1].
            steps: of the descent; 0 is least squares without a clamp.

        Returns:
            Images (N, C, H, W) in float64 on the CPU, not clamped.
        """
        rows, columns = (_bicubic(side, self.factor) for side in self.size)
        reach = [u @ torch.linalg.pinv(u) for u in (rows, columns)]
        truth = images.detach().cpu().double()
        best = now = before = reach[0] @ truth @ reach[1].mT
        least = _clamped_error(best, truth)
        for step in range(steps):
            ahead = now + step / (step + 3) * (now - before)
            aim = torch.where((ahead < 0) | (ahead > 1), ahead, truth)
            before, now = now, reach[0] @ aim @ reach[1].mT
            missed = _clamped_error(now, truth)
            best = torch.where((missed < least)[:, None, None, None], now, best)
            least = torch.minimum(missed, least)
        return best


def _clamped_error(shown: Tensor, truth: Tensor) -> Tensor:
    """Return the squared distance (N,) of what is shown, clamped, to the truth (N, C, H, W)."""
    return (shown.clamp(0, 1) - truth).square().sum((1, 2, 3))


@cache
def _bicubic(side: int, factor: int) -> Tensor:
    """Return bicubic interpolation of a row of ceil(side / factor) numbers to `side`, as a matrix in float64."""
    small = -(-side // factor)
    identity = torch.eye(small, dtype=torch.float64)[None, None]
    return F.interpolate(identity, size=(side, small), mode="bicubic", align_corners=False)[0, 0]


@dataclass(frozen=True)
class DecodedSpace(SearchSpace):
    """Codes of a trained decoder, about N(0, 1).

    Attributes:
        network: (B, *code) to pixels (B, C, H, W); nothing of it is trained any more.
        code: shape of one code.
    """

    start: ClassVar[str | None] = "normal"

    network: Callable[[Tensor], Tensor]
    code: tuple[int, int, int]

    def shape(self, task: Task) -> tuple[int, int, int]:
        """Return the shape of one code."""
        return self.code

    def units(self, task: Task) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return codes as they are."""
        return (0.0,) * self.code[0], (1.0,) * self.code[0]

    def decode(self, values: Tensor) -> Tensor:
        """Return the decoder's images."""
        return self.network(values)


@dataclass(frozen=True)
class TableSpace(SearchSpace):
    """Rows of a table, whose categories are the softmax of their logits (TabLeak, Vero et al., ICML 2023, section 4).

    Attributes:
        categories: first column of each category and the one behind its last.
    """

    categories: tuple[tuple[int, int], ...]

    def units(self, task: Task) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return units of numbers as the task has them; of logits, such that [0, 1] reaches from -10 to 10."""
        offset, scale = list(task.mean), list(task.std)
        for start, stop in self.categories:
            for column in range(start, stop):
                offset[column], scale[column] = 0.5, 1 / (2 * MAX_LOGIT)
        return tuple(offset), tuple(scale)

    def decode(self, values: Tensor) -> Tensor:
        """Return rows (B, F, 1, 1) whose categories are probabilities."""
        parts, last = [], 0
        for start, stop in self.categories:
            logits = (values[:, start:stop] - 0.5) * (2 * MAX_LOGIT)
            parts += [values[:, last:start], logits.softmax(1)]
            last = stop
        return torch.cat([*parts, values[:, last:]], 1)


MAX_LOGIT = 10.0
"""Largest logit of a category in a search."""
PIXEL_SPACE = SearchSpace()
