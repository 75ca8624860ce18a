"""Finds other pictures for which the whole network returns the same outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.network.autograd_support import AUTOGRAD_ERRORS
from attacks.network.layer_chain import load_sent_weights, trace_view
from attacks.network.operation_trace import MODEL_ERRORS, Node
from attacks.result import NotApplicable
from attacks.search_control import check_time_limit
from attacks.verification.update_comparison import UNSEEN_SLOPE, UpdateComparison
from fl.seeds import stream
from fl.view import ServerView

SAME_OUTPUT = 1e-9
"""Relative to the largest output: what the order of sums may change."""
DIFFERENT = 1 / 510
"""Half a level of 8 bits: what a picture has to differ by somewhere to be another one."""
MARGIN = 1e-6
"""By how much numbers may lie beyond their range."""
LARGE = 2**11
"""Numbers of a picture from which on single precision is asked first."""
PROBES, FAR, CLEARLY = 3, 1e-3, 100.0
"""Changes of the last digit that tell what single precision does to outputs, and what those of another picture differ
by where double precision is not asked: at least such a share of the largest, and so many times that."""
COMPARING = frozenset({"gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "argsort", "sort", "topk", "heaviside"})
ROUNDING = frozenset({"round", "floor", "ceil", "trunc", "frac", "fmod", "remainder", "floor_divide", "bucketize"})
STEPS = COMPARING | ROUNDING | {"sign", "sgn", "to_copy", "threshold", "hardshrink", "logical_not"}
"""Operations that make large differences of small ones now and then, so that single precision tells nothing."""


@dataclass(frozen=True)
class WholeNetwork:
    """A network in double precision, and what it returns of some pictures.

    Attributes:
        model: the network; numbers that the server does not know are drawn at random.
        images: (N, C, H, W).
        outputs: of these.
        is_smooth: whether no operation of it makes large differences of small ones.
    """

    model: nn.Module
    images: Tensor
    outputs: Tensor
    is_smooth: bool = False

    @classmethod
    def of(cls, view: ServerView, images: Tensor) -> WholeNetwork | None:
        """Return the network of a view with pictures (N, C, H, W), or None where it does not run on them.

        A network that can't be traced is run as it is, if it returns the same for the same pictures.
        """
        found, images = trace_view(view, view.device), images.double()
        if isinstance(found, NotApplicable):
            model = load_sent_weights(view.client.network_in(torch.float64, view.device), view)
        else:
            model = copy.deepcopy(found[0])  # in training mode it counts statistics
        draw = stream(0, "private parameters")
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name in view.private:  # of which the server has zeros; large ones would close what comes above
                    drawn = torch.randn(value.shape, generator=draw, dtype=torch.float64)
                    value.copy_(drawn * value.shape[1:].numel() ** -0.5)
            if not isinstance(found, NotApplicable):
                return cls(model, images, model(images), not any(map(_has_steps, found[1].nodes)))
            try:
                outputs, again = model(images), model(images)
            except MODEL_ERRORS:
                return None
            network = cls(model, images, outputs)
            return network if outputs.shape == again.shape and bool(network.same(images).all()) else None

    @cached_property
    def _single(self) -> tuple[nn.Module, float] | None:
        """The network in single precision, and how far from the same its outputs count as others; None asks it not.

        It takes less than half of the time where pictures are not tiny, of which most others are far from the same.
        """
        if not self.is_smooth or self.images[0].numel() < LARGE:
            return None
        model, draw = copy.deepcopy(self.model).float(), stream(0, "single precision")
        near = [self.images]
        for _ in range(PROBES):
            drawn = torch.randn(self.images.shape, generator=draw, dtype=torch.float64).to(self.images)
            near.append(self.images * (1 + torch.finfo(torch.float32).eps * drawn))
        beside = torch.rand(self.images.shape, generator=draw, dtype=torch.float64).to(self.images)
        try:
            with torch.no_grad():  # together, as others are asked: whether one has a part in another's shows here
                made = model(torch.cat([*near, beside]).float()).double()
        except MODEL_ERRORS:  # which fixes its precision somewhere
            return None
        if len(made) != (len(near) + 1) * len(self.outputs):
            return None
        made = made[: -len(self.outputs)]
        error = (made - self.outputs.repeat(len(near), *[1] * (made.ndim - 1))).abs().max()
        limit = CLEARLY * float(error) + FAR * float(self.outputs.abs().max())
        return (model, limit) if math.isfinite(limit) else None

    def undecided(self, others: Sequence[Tensor], *, sign: int = 1, least: float = SAME_OUTPUT) -> list[Tensor]:
        """Return those of other pictures, each (N, C, H, W), of which single precision does not tell that all differ.

        Args:
            others: as many as are asked together.
            sign: as of `same`.
            least: likewise.
        """
        if self._single is None or any(len(other) != len(self.images) for other in others):
            return list(others)
        model, limit = self._single
        with torch.no_grad():
            made = model(torch.cat(list(others)).float()).double().unflatten(0, (len(others), -1))
        far = (made - sign * self.outputs).abs().reshape(len(others), len(self.images), -1).amax(2)
        clear = (far.isfinite() & (far > limit + least * self.outputs.abs().max())).all(1)
        return [other for other, differs in zip(others, clear.tolist(), strict=True) if not differs]

    def same(self, others: Tensor, *, sign: int = 1, least: float = SAME_OUTPUT) -> Tensor:
        """Return for which other pictures the network returns the same (N,), or the same times -1.

        Pictures count each by itself: a network may take one of a batch for another one, and the rest not.

        Args:
            others: (N, C, H, W).
            sign: 1 or -1.
            least: what outputs may differ by, relative to the largest, where that is more than the order of sums does.
        """
        check_time_limit()
        if not self.undecided([others], sign=sign, least=least):
            return torch.zeros(len(self.images), dtype=torch.bool, device=self.images.device)
        with torch.no_grad():
            far = (self.model(others) - sign * self.outputs).abs()
        limit, count = max(least, SAME_OUTPUT) * self.outputs.abs().max(), len(self.images)
        each = far.reshape(count, -1).amax(1) if len(far) == count else far.amax().expand(count)
        return each <= limit

    def count_unseen(self) -> int:
        """Return how many numbers of the images change no output, by one gradient of a random sum of these."""
        inputs, draw = self.images.detach().requires_grad_(), stream(0, "unseen")
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                drawn = torch.randn(self.outputs.shape, generator=draw, dtype=torch.float64).to(self.outputs)
                (slopes,) = torch.autograd.grad((self.model(inputs) * drawn).sum(), inputs, materialize_grads=True)
        except AUTOGRAD_ERRORS:  # nobody can tell without derivatives
            return 0
        largest = float(slopes.abs().max())
        return int((slopes.abs() <= UNSEEN_SLOPE * largest).sum()) if largest else 0

    def makes_update(self, view: ServerView, check: UpdateComparison, others: Tensor, labels: Tensor) -> bool:
        """Return whether others make the update or, where the server knows a part of the network, have the same output.

        Args:
            view: the view that was attacked.
            check: the comparison with the update.
            others: (N, C, H, W).
            labels: with which the images make it.
        """
        return bool(self.same(others).all()) if view.private else makes_update(check, others, labels)

    def put(self, others: Tensor, where: Tensor) -> Tensor:
        """Return the images with others in the places (N,) named."""
        return torch.where(where[:, None, None, None], others, self.images)


def _has_steps(node: Node) -> bool:
    """Return whether an operation makes large differences of small ones; division does where it is told to round."""
    rounds = node.op._overloadname.endswith("_mode") or "fake_quantize" in node.operation
    return rounds or node.operation in STEPS


def are_others(others: Tensor, images: Tensor) -> Tensor:
    """Return which of some pictures (N, C, H, W) can be ones, and are others than those given (N,)."""
    flat, before = others.flatten(1), images.to(others).flatten(1)
    inside = (flat >= -MARGIN).all(1) & (flat <= 1 + MARGIN).all(1)
    return inside & ((flat - before).abs().amax(1) > DIFFERENT)


def makes_update(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether images with labels make the update, to rounding or as closely as what was found.

    Args:
        check: the comparison with it.
        images: (N, C, H, W).
        labels: (N, ...).
    """
    return check.is_explained_to_rounding(images, labels) or bool(check.is_explained(images, labels))
