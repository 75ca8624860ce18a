r"""What images are to meet: features that are known, and by how much images miss them.

Known are feature tensors t_k of each image, exact up to a relative error; f_k is the network up to there. The residual
of an image x is

    r_k(x) = w_k known_k (f_k(x) - t_k) / |t_k|.

- **Rectified targets.** Where t_k is the output of a ReLU, f_k may return what goes into it. Then r = f - t where
  t > 0, and max(f, 0) where t = 0: no equation is lost where the activation is still closed.
- **Unknown scale.** A target known up to a positive factor of each image is compared with a f, where the best
  a = <f, t> / <f, f> is put in (variable projection; Golub and Pereyra, 1973).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.linearization import Forward, Linearization, RecordedFunction


@dataclass(frozen=True)
class FeatureTarget:
    """Features of every image that are known.

    Attributes:
        value: (B, ...), as `forward` returns them.
        known: which entries count, boolean, broadcastable to `value`; all where none is given.
        weight: of the whole tensor in the sum, relative to other targets. Each is divided by its norm first.
        noise: relative error of `value` (in norm). Where the residual is there, an image is done.
        rectified: `value` is the output of a ReLU, and `forward` returns the input of it.
        unknown_scale: `value` is known up to a positive factor of each image.
        projection: (B, N, N), of the features' numbers in each channel (B, K, N) the part that `value` is; None where
            it is all. It is symmetric.
        use: "equations" where images are to meet it, "guide" where a search may go by it on its way, and images need
            not meet it, "none" where it has no part at all.
    """

    value: Tensor
    known: Tensor | None = None
    weight: float = 1.0
    noise: float = 1e-6
    rectified: bool = False
    unknown_scale: bool = False
    projection: Tensor | None = None
    use: Literal["equations", "guide", "none"] = "equations"

    @property
    def counts(self) -> bool:
        """Whether images are to meet it."""
        return self.use == "equations"

    @property
    def share(self) -> float:
        """Its weight, or zero where images need not meet it."""
        return self.weight if self.counts else 0.0

    def going_along(self) -> FeatureTarget:
        """Return it as one that images are to meet, like all others, unless it has no part at all."""
        return replace(self, weight=1.0, use="none" if self.use == "none" else "equations")

    @property
    def equations(self) -> float:
        """Numbers of one image's features that are known, on average; zeros of a ReLU's output count as none."""
        if self.projection is not None:
            channels = self.value.shape[1]
            return channels * float(self.projection.diagonal(dim1=1, dim2=2).sum(1).mean())
        told = self.value > 0 if self.rectified else torch.ones_like(self.value, dtype=torch.bool)
        told = told if self.known is None else told & self.known
        return float(told.flatten(1).sum(1).double().mean())


@dataclass(frozen=True)
class FeatureProblem:
    """What the images are to meet.

    Attributes:
        forward: from images to features, in the images' type.
        single_forward: the same in the type in which products are computed.
        targets: the known features.
    """

    forward: RecordedFunction
    single_forward: RecordedFunction
    targets: tuple[FeatureTarget, ...]

    @classmethod
    def of(cls, forward: Forward, single_forward: Forward | None, targets: Sequence[FeatureTarget]) -> FeatureProblem:
        """Return the problem of functions that may have no records yet; the second may be missing, or be the first."""
        function = RecordedFunction.of(forward)
        single = function if single_forward in (None, forward) else RecordedFunction.of(single_forward)
        return cls(function, single, tuple(targets))

    @property
    def work_type(self) -> torch.dtype:
        """Type in which products are computed."""
        return torch.float32 if self.single_forward is not self.forward else self.targets[0].value.dtype

    @property
    def size(self) -> float:
        """Norm of the residuals where every target is missed by its own norm."""
        return sum(t.share**2 for t in self.targets) ** 0.5

    @property
    def noise(self) -> float:
        """Relative residual at the true images."""
        return sum((t.share * t.noise) ** 2 for t in self.targets) ** 0.5 / self.size

    def select(self, keep: Tensor) -> FeatureProblem:
        """Return the problem of some images."""

        def choose(t: FeatureTarget) -> FeatureTarget:
            shared = t.known is None or len(t.known) != len(t.value)
            projection = None if t.projection is None else t.projection[keep]
            known = t.known if shared or t.known is None else t.known[keep]
            return replace(t, value=t.value[keep], known=known, projection=projection)

        return replace(self, targets=tuple(choose(t) for t in self.targets))

    def of_first_targets(self, equations: float) -> FeatureProblem:
        """Return the problem of the first targets that give enough equations, guides too, all of the same weight.

        Args:
            equations: how many of one image suffice; zeros of a ReLU's output count as none.
        """
        chosen: list[FeatureTarget] = []
        found = 0.0
        for target in self.targets:
            chosen.append(target.going_along() if found < equations else replace(target, use="none"))
            found += target.equations
        return replace(self, targets=tuple(chosen))

    def to(self, dtype: torch.dtype) -> FeatureProblem:
        """Return the problem with targets of another type."""

        def convert(t: FeatureTarget) -> FeatureTarget:
            projection = None if t.projection is None else t.projection.to(dtype)
            return replace(t, value=t.value.to(dtype), projection=projection)

        return replace(self, targets=tuple(map(convert, self.targets)))

    def residuals(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one residual (b, ...) for each target."""
        return tuple(residual(f, t) for f, t in zip(features, self.targets, strict=True))

    def evaluate(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return all residuals at the images, in the targets' type, without a graph."""
        with torch.no_grad():
            return self.residuals(tuple(self.forward(images)))

    def relative_residual(self, images: Tensor) -> Tensor:
        """Return the length of each image's residuals (b,), relative, in the targets' type."""
        squares = torch.stack([r.reshape(len(images), -1).square().sum(1) for r in self.evaluate(images)])
        return squares.sum(0).sqrt() / self.size

    def linearize(self, images: Tensor) -> Linearization:
        """Return the features at the images, with products by their Jacobian."""
        return Linearization(self.single_forward, images, self.single_forward.record(images))


def residual(feature: Tensor, target: FeatureTarget) -> Tensor:
    """Return what features (b, ...) miss their target by, as a share of its norm, weighted."""
    value = target.value
    dims = tuple(range(1, value.ndim))
    if target.projection is not None:
        feature = (feature.flatten(2) @ target.projection).reshape(value.shape)
    if target.rectified:
        feature = torch.where(value > 0, feature, feature.relu())
    known = 1.0 if target.known is None else target.known.to(value.dtype)
    if target.unknown_scale:
        f, t = feature * known, value * known
        size = (f * f).sum(dims, keepdim=True).clamp_min(1e-30)
        best = (f * t).sum(dims, keepdim=True) / size
        # where features point away from the target no positive factor is best; 0 would leave no direction to go
        feature = feature * torch.where(best > 0, best, ((t * t).sum(dims, keepdim=True) / size).sqrt())
    norm = (value * known).square().sum(dims, keepdim=True).sqrt()
    norm = torch.where(norm > 0, norm, torch.ones_like(norm))
    return (feature - value) * known * (target.share / norm)


class ResidualJacobian:
    """Products with the Jacobian of the residuals at one point, for each problem on its own."""

    def __init__(self, problem: FeatureProblem, features: Linearization, smoothness: Tensor | None = None) -> None:
        self._smoothness = smoothness
        self._features = features
        self._residuals = [
            Linearization(lambda f, t=t: (residual(f, t),), f)  # type: ignore[misc]
            for f, t in zip(self._features.values, problem.targets, strict=True)
        ]

    def push(self, direction: Tensor) -> tuple[Tensor, ...]:
        """Return J v."""
        features = self._features.push(direction)
        pushed = tuple(r.push(f)[0] for r, f in zip(self._residuals, features, strict=True))
        return pushed if self._smoothness is None else (*pushed, *differences(direction, self._smoothness))

    def push_many(self, directions: Tensor) -> tuple[Tensor, ...]:
        """Return J v (n, ...) for n directions v (n, ...), without the smoothness."""
        features = self._features.push_many(directions)
        return tuple(r.push_many(f)[0] for r, f in zip(self._residuals, features, strict=True))

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        """Return J^T w."""
        pulled = self._features.pull([r.pull([w]) for r, w in zip(self._residuals, weights, strict=False)])
        if self._smoothness is not None:
            pulled = pulled + _transposed_differences(weights[-2], weights[-1], self._smoothness)
        return pulled


def differences(images: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences of neighboring pixels down and to the right, times a scale of each image."""
    images = images * scale
    return images[..., 1:, :] - images[..., :-1, :], images[..., 1:] - images[..., :-1]


def _transposed_differences(down: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    down = functional.pad(down, (0, 0, 1, 0)) - functional.pad(down, (0, 0, 0, 1))
    right = functional.pad(right, (1, 0)) - functional.pad(right, (0, 1))
    return (down + right) * scale
