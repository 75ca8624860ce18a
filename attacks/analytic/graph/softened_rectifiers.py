r"""A network whose ReLUs have their kink rounded off, so that a search can pass it.

A sum of squares behind ReLUs has a kink wherever an activation opens or closes. Steps of Gauss and Newton know the
pieces where they stand, and along directions that features hardly tell they cross many kinks before they are through.
So they get stuck, even close to the picture. With a width t the ReLU of u becomes

    r_t(u) = 0 for u <= -t,    (u + t)^2 / (4 t) for |u| < t,    u for u >= t,

which has a derivative everywhere and misses ReLU by t / 4 at most. A search follows the minimum while t goes to zero (a
homotopy, as in Chen and Mangasarian, 1996). Widths are shares of the root mean square of what a ReLU gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attacks.analytic.graph.linearization import Forward

RECTIFIERS = frozenset(
    {torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, functional.relu, functional.relu_, torch.ops.aten.relu.default}
)
"""Functions that are ReLU."""


def rectifier_sizes(forward: Forward, images: Tensor) -> list[float]:
    """Return the root mean square of what each ReLU gets, in the order of their calls.

    Args:
        forward: from images to features.
        images: (B, C, H, W), at which to evaluate.
    """
    sizes: list[float] = []

    def note(value: Tensor) -> Tensor:
        sizes.append(float(value.double().square().mean().sqrt()))
        return value.relu()

    with torch.no_grad(), _RectifiersReplaced(note):
        forward(images)
    return sizes


def soften_rectifiers(forward: Forward, widths: Sequence[float]) -> Forward:
    """Return a function whose ReLUs are r_t.

    Args:
        forward: from images to features; it calls the same ReLUs in the same order for all images.
        widths: t of each call, at least one; further calls have the last. Zero leaves a ReLU as it is.
    """

    def softened(images: Tensor) -> Sequence[Tensor]:
        left = iter(widths)
        with _RectifiersReplaced(lambda value: _soft(value, next(left, widths[-1]))):
            return forward(images)

    return softened


def _soft(value: Tensor, width: float) -> Tensor:
    if width == 0:
        return value.relu()
    return torch.where(value > width, value, (value + width).clamp_min(0).square() / (4 * width))


class _RectifiersReplaced(TorchFunctionMode):
    """Calls another function wherever a ReLU is called."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the other function for a ReLU, and every other function as it is."""
        kwargs = kwargs or {}
        if function in RECTIFIERS:
            return self.function(args[0] if args else kwargs["input"])
        return function(*args, **kwargs)
