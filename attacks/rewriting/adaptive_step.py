"""The first step of Adam and its like, attacked for the sizes that it shows beside the signs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import NotApplicable, Reconstruction, ViewRewriter, attacks
from attacks.labels.recovery import single_label
from attacks.update.adaptive_first_step import MAX_SIGMAS, MIN_SIGMAS, AdaptiveFirstStep
from attacks.update.first_linear_layer import LinearLayer, first_linear
from fl.methods.fedavg import FedAvg
from fl.ranges import Positive
from fl.tensors import Tensors, dense
from fl.view import ServerView

FIT_ROUNDS = 100
"""Rounds of the fit of an outer product, each a least-squares solution for one of its factors."""
OFFSET_ERROR = 1e-7
"""Standard deviation of what all steps may be off by alike, relative to their size: how an optimizer computes."""
RATE_ERROR, LEAST_RATE_ERROR, MIN_RATE_SIGMAS = 1e-5, 1e-6, 5.0
"""How far a step size may be off its stated one, relative to it, as left out digits put it; from where on, and by how
many standard errors, the fit says that it is."""
MAX_MISFIT = 2.0
"""Standard errors, root mean square, up to which sizes count as those of one image's gradient."""
MIN_SHARE_OF_SIZES = 0.01
"""Share of numbers whose size shows below which there are next to signs alone."""

OTHER_DIGITS = (
    "the sizes of the first linear layer are nearer to one image's gradient where lr is off in a later digit, by a "
    "share of about {:.1g}: give it in full, or the number of images, if there were several"
)
"""Why nothing is read where another step size explains it better."""
MIN_SPREAD, MIN_SPREAD_SIGMAS = 1e-3, 1.5
"""How far the sizes of an input differ, relative to their mean and in standard errors, where they are no mere signs."""
SIGNS_OR_PLAIN = (
    "all that {!r} seems to take is of one size: signs with a size of each tensor's or row's own look so, too (state "
    "the defense signsgd), or the example is of one color"
)
"""Why nothing is read then."""


@attacks.register("adaptive-step")
@dataclass(frozen=True, kw_only=True)
class AdaptiveStep(ViewRewriter):
    """Reads sizes off the first step of Adam, AdamW, RMSprop or Adagrad, which are said to show signs alone.

    From a state of zero a number moves by T d / (|d| + E) (Kingma and Ba, ICLR 2015, Algorithm 1; see
    `attacks.update.adaptive_first_step`): short of T by the share E / |d|, which float32 resolves up to gradients of
    about a hundredth at eps 1e-8. That the sizes can be read so is this library's own observation.

    By itself, of one image: the reciprocals 1 / d of the first linear layer are an outer product of those of its
    signals and of its inputs, with errors of known size. It is fitted by weighted least squares, together with an
    offset that all reciprocals have in common (how the optimizer's arithmetic rounds), and the bias's tell the scale,
    as in `analytic`. The note says how large a pixel's standard error is; nothing is `verified`.

    In front of a search (`adaptive-step+ig`), of any number of images: the view is rewritten into that of the same
    client with a larger eps, `smoothing` times the gradient whose size is as large as its error. Its step is nearly the
    gradient where sizes are known and nearly the sign where they are not, so that no error is larger than a sign's.

    Threat model: an honest server that knows the optimizer, its step size and eps, and that there was one step, from a
    fresh state. Under momentum of an earlier round or with clipping none of this holds.

    Attributes:
        smoothing: of the rewritten view.
    """

    plain: ClassVar[str] = "reads from the last digits of Adam's first step how large the gradient was."

    smoothing: Positive = 1.0

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of the same step with a larger eps."""
        read = AdaptiveFirstStep.of(view)
        if isinstance(read, NotApplicable):
            return read
        if not isinstance(view.method, FedAvg):
            return NotApplicable(f"{view.method.name} has no eps to set", limit=True)
        if (reason := _too_few_sizes(read)) is not None:
            return reason
        eps = self.smoothing * read.resolved_size
        found = read.gradients(limit=eps / torch.finfo(torch.float32).eps)
        factor = eps / read.eps  # of what RMSprop adds, likewise
        step = {
            name: (read.largest_step(name) * value / (value.abs() + eps)).to(view.dtype)
            for name, value in found.items()
        }
        decay = {name: dense(view.update[name]) - dense(read.change[name]) for name in found}
        update: Tensors = {**view.update, **{name: step[name] + decay[name] for name in found}}
        return replace(
            view, method=replace(view.method, eps=factor * read.own_eps), update=update, rounded=False, history=()
        )

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return the input of the first linear layer."""
        read = AdaptiveFirstStep.of(view)
        if isinstance(read, NotApplicable):
            return read
        if view.batch_size != 1:
            return NotApplicable("it takes a batch of one by itself; for several images: adaptive-step+ig")
        if read.phase.optimizer != "adamw" and any(group.weight_decay for group in read.phase.groups):
            return NotApplicable("weight decay is mixed into the sizes; for that: adaptive-step+ig")
        if (reason := _too_few_sizes(read)) is not None:
            return reason
        layer = first_linear(_plain_view(view, read))
        if isinstance(layer, NotApplicable):
            return layer
        parts = _layer_reciprocals(read, layer)
        fit = _fit_outer_product(*parts)
        if isinstance(fit, NotApplicable):
            return fit
        sizes, moved = fit[0].abs(), fit[0] != 0  # a zero has no size: black pixels are zeros of signs, too
        spread = float(sizes[moved].std(correction=0))
        if not spread > MIN_SPREAD * float(sizes[moved].mean()) or not _differ(sizes[moved], fit[1][moved]):
            return NotApplicable(SIGNS_OR_PLAIN.format(layer.name))
        inputs, errors, misfit = fit
        rate = min(RATE_ERROR, MAX_SIGMAS * read.usual_error)  # what is off by more contradicts the step size
        if (doubt := _rate_doubt(misfit, parts, rate, rate / read.eps)) is not None:
            return doubt
        labels, note = single_label(view)
        read_words = (
            f"sizes show in {read.share_of_sizes:.0%} of the numbers; an input's standard error is "
            f"{float(errors.median()):.2g} (median), and the fit is off by {misfit:.2g} standard errors"
        )
        images = layer.is_given_images
        return Reconstruction(
            inputs=layer.pixels(inputs[None]) if images else None,
            labels=labels,
            objective=misfit,
            private={} if images else {"features": inputs.to(view.dtype)},
            knowledge=() if view.labels is None else ("labels",),
            note="; ".join(filter(None, (read_words, note))),
            relative_error=float(errors.norm() / inputs.norm()),
        )


def _differ(sizes: Tensor, errors: Tensor) -> bool:
    """Return whether sizes differ from each other by more than their errors."""
    weights = errors.square().reciprocal()
    mean = (weights * sizes).sum() / weights.sum()
    return float((weights * (sizes - mean).square()).mean()) > MIN_SPREAD_SIGMAS**2


def _too_few_sizes(read: AdaptiveFirstStep) -> NotApplicable | None:
    """Return why the step shows next to nothing but signs, or None."""
    share = read.share_of_sizes
    if share >= MIN_SHARE_OF_SIZES:
        return None
    return NotApplicable(
        f"sizes show in {share:.2%} of the numbers, by {MIN_SIGMAS:g} standard errors: all others are larger than "
        f"{read.resolved_size:.2g}, where {read.phase.optimizer} at this step size shows signs alone"
    )


def _plain_view(view: ServerView, read: AdaptiveFirstStep) -> ServerView:
    """Return the view of a step of SGD along what is known of the gradient, to find its first linear layer by."""
    known: Tensors = {**read.gradients(limit=read.resolved_size)}
    method = FedAvg(lr=1.0, steps=1, batch_size=None, train_mode=view.method.train_mode)
    return replace(view, method=method, update=known, rounded=False, history=())


def _layer_reciprocals(read: AdaptiveFirstStep, layer: LinearLayer) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return a layer's reciprocals (m, n + 1), the bias's last, their errors, their signs, and the offset's error."""
    parts: list[list[Tensor]] = [[], [], []]
    for kind, name in zip(("weight", "bias"), layer.parameter_names, strict=True):
        found = (*read.reciprocals(name), read.steps[name].sign())
        for part, value in zip(parts, found, strict=True):
            arranged = layer.arrange(kind, value)
            part.append(arranged if kind == "weight" else arranged[:, None])
    values, errors, signs = (torch.cat(part, 1) for part in parts)
    return values, errors, signs, OFFSET_ERROR / read.eps


def _fit_outer_product(
    values: Tensor, errors: Tensor, signs: Tensor, offset_error: float, *, limit: float | None = MAX_MISFIT
) -> tuple[Tensor, Tensor, float] | NotApplicable:
    """Fit values_ij = a_j b_i + c signs_ij, b of the last column being 1.

    Args:
        values: (m, n + 1), infinite where nothing moved.
        errors: their standard errors, likewise.
        signs: of the steps.
        offset_error: standard deviation of c.
        limit: misfit above which there is no fit; None takes any, with inputs of 0 where the bias tells no brightness.

    Returns:
        1 / b (n,), its standard errors with that of the scale, and the root mean square of the misfit in standard
        errors; or why there is none.
    """
    moved = signs[:, -1] != 0
    if not bool(moved.any()):
        return NotApplicable("no unit of the first linear layer is active")
    values, errors, signs = values[moved], errors[moved], signs[moved]
    there = (signs != 0) & values.isfinite() & errors.isfinite()
    weights = torch.where(there, errors.square().reciprocal(), 0.0)
    values = torch.where(there, values, 0.0)
    middle = torch.where(there, values.abs(), torch.nan).nanmedian(1).values * signs[:, -1]
    starts = (values[:, -1], middle, signs[:, -1])
    fits = [_alternate(values, weights, signs, start, offset_error) for start in starts]
    left, right, misfit = min(fits, key=lambda fit: fit[2])
    if limit is not None and not misfit <= limit:
        return NotApplicable(
            f"the sizes of the first linear layer are not those of one image's gradient: they are {misfit:.2g} "
            "standard errors off an outer product; check the optimizer, lr (to its last digit), eps and the number of "
            "images"
        )
    scale = float(right[-1])
    if not scale > 0 and limit is None:
        return values.new_zeros(values.shape[1] - 1), values.new_zeros(values.shape[1] - 1), misfit
    if not scale > 0:
        return NotApplicable("the bias of the first linear layer does not tell how bright its input is")
    spread = (weights * left[:, None] ** 2).sum(0).rsqrt() / scale  # of b
    inverse = scale / right[:-1]
    inverse = torch.where(there[:, :-1].any(0), inverse, 0.0)
    return inverse, (inverse.square() * spread[:-1]).hypot(inverse * spread[-1]).nan_to_num(), misfit


def _rate_doubt(
    misfit: float, parts: tuple[Tensor, Tensor, Tensor, float], rate: float, shift: float
) -> NotApplicable | None:
    """Return that the fit asks for another step size than stated, in a later digit; None where it does not.

    A step size that is off by a share e puts all reciprocals off by e / E, in the direction of their signs. The misfits
    of two more fits with them shifted so tell where it is least: they are squares of what is linear in the shift.

    Args:
        misfit: of the reciprocals as they are.
        parts: values, errors, signs and the offset's error, as `_fit_outer_product` takes them.
        rate: the share that the step size may be off.
        shift: of the reciprocals by that, `rate` / E.
    """
    values, errors, signs, offset_error = parts
    count, worse = int(((signs != 0) & values.isfinite() & errors.isfinite()).sum()), list[float]()
    for side in (-1.0, 1.0):
        other = _fit_outer_product(values + side * shift * signs, errors, signs, offset_error, limit=None)
        worse.append(0.0 if isinstance(other, NotApplicable) else (other[2] ** 2 - misfit**2) * count)
    curve, slope = sum(worse), (worse[1] - worse[0]) / 2
    if curve > 0:
        best, drop = abs(slope) / curve * rate, slope**2 / (2 * curve)
    else:  # far from the least misfit, where it is none of a parabola
        best, drop = rate, -min(worse)
    found = best > LEAST_RATE_ERROR and drop > MIN_RATE_SIGMAS**2
    return NotApplicable(OTHER_DIGITS.format(best)) if found else None


def _alternate(
    values: Tensor, weights: Tensor, signs: Tensor, left: Tensor, offset_error: float
) -> tuple[Tensor, Tensor, float]:
    """Return both factors of the fit that begins at `left` (m,), and its misfit in standard errors."""
    offset, right = values.new_zeros(()), values.new_zeros(values.shape[1])
    for _ in range(FIT_ROUNDS):
        rest = values - offset * signs
        right = _ratio((weights * left[:, None] * rest).sum(0), (weights * left[:, None] ** 2).sum(0))
        left = _ratio((weights * right * rest).sum(1), (weights * right**2).sum(1))
        rest = values - left[:, None] * right
        offset = (weights * signs * rest).sum() / ((weights * signs**2).sum() + offset_error**-2)
    squares = weights * (values - left[:, None] * right - offset * signs) ** 2
    return left, right, float(squares.sum() / (weights > 0).sum()) ** 0.5


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where(bottom > 0, top / bottom.clamp_min(1e-300), 0.0)
