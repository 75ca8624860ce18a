"""Exact inversion of convolutional networks with max pooling, layer by layer from the top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.exact.equations import Equations
from attacks.exact.fixed import fixed_pixels
from attacks.exact.invert import ROUGHLY, solve
from attacks.exact.layer import Layer
from attacks.exact.separate import Apart, Mixture, Sum, most, separate
from attacks.headless import exact_gradient
from attacks.layer_equations import Outputs, invert, slope_below
from attacks.rounding import ROUNDED, grain, rounding
from attacks.training import training
from attacks.unroll import Stage, unroll
from fl.tensors import dense
from fl.types import ServerView

RESHAPING = (nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d)
MOST = 12_288
"""Numbers of a batch's inputs of one convolution that are solved for: their covariance has so many rows."""
MISSED = 1e-3
"""Share of a linear layer's gradient, unexplained, that is no longer rounding."""
RANGE = 1e-2
"""How far outside [0, 1] a pixel may come out of equations that are satisfied."""


@attacks.register("cascade")
@dataclass(frozen=True, kw_only=True)
class Cascade(Attack):
    """Solves for the input of one layer after the other, from the last linear layer with a bias down to the pixels.

    In the spirit of R-GAP (Zhu and Blaschko, ICLR 2021), which needs layers without pooling; the equations are ours.
    Threat model: an honest-but-curious server that knows it was one step on one image or a small batch, and the weights
    of a chain of convolutions, pooling, activations and linear layers; no label, classifier or trained prior. What
    flows back into a linear layer is its bias gradient; its input follows from the weight's. Images are told apart
    first (`attacks.exact.separate`) and come back in no particular order, verified all or none. For a convolution
    whose outputs and their signal are known, the gradient of its weight and its own forward equations are linear in
    its input once it is known which position each pooling cell passed on; `attacks.exact` finds that out.

    `verified` needs no truth: every layer's input explains the layer's gradient and outputs up to rounding, and these
    fix every pixel to a level of 8 bits; `fixed` says which pixels they fix. At the rim, where few outputs see a pixel,
    they often leave a choice, so that most colour images are not verified for a few pixels in the corners. Where
    pooling never looked (corners of flat regions) a pixel counts as fixed if moving it, whatever else moves that no
    equation fixes, would have made another output the largest. What neither fixes comes from a smooth prior.

    `private` holds, under `residual/layer`, what the input found leaves of the layer's gradient and of its outputs.
    Every search is bounded (docs/sharp-edges.md says by what), and `note` names the layers whose equations it did not
    satisfy, and says where the picture left [0, 1]. Of a batch, a layer above the pixels that is left far from them is
    the end: its input is returned under `features/layer`, image by image, and no picture.
    """

    plain: ClassVar[str] = "solves for the input of one layer after the other, from the last one down to the picture."

    @classmethod
    def example(cls) -> Cascade:
        """It has no settings."""
        return cls()

    def one(self, view: ServerView, seed: int) -> Result:
        """Attack one view; nothing is random."""
        gradient = exact_gradient(view, batches=True)
        if isinstance(gradient, NotApplicable):
            return gradient
        stages = unroll(view, max_pooling=True)
        if isinstance(stages, NotApplicable):
            return stages
        gradients = {n: dense(g).detach().to("cpu", torch.float64) for n, g in gradient.items()}
        top = _top(stages, gradients)
        if top is None:
            there = any(isinstance(s.layer, nn.Linear) and f"{s.name}.bias" in gradients for s in stages)
            still = (
                "no linear layer's bias moved by more than rounding: no gradient reached it, as of an image that the "
                "network is certain of"
            )
            missing = "no linear layer with a bias is in the update: nothing says what flows back"
            return NotApplicable(still if there else missing)
        refused = _refusal(stages[: top + 1], gradients)
        if refused is not None:
            return NotApplicable(refused)
        count = sum(sum(step) for steps in training(view)[1] or () for step in steps)
        first = _single(stages, gradients, top) if count == 1 else _separated(stages, gradients, top, count)
        return first if isinstance(first, NotApplicable) else _descend(view, stages, gradients, top, first)


def _top(stages: Sequence[Stage], gradients: dict[str, Tensor]) -> int | None:
    """The first linear layer, counted from below, above which nothing is needed: its bias moved."""
    for i, stage in enumerate(stages):
        sent = gradients.get(f"{stage.name}.bias")
        if isinstance(stage.layer, nn.Linear) and sent is not None and bool(sent.any()):
            return i
    return None


def _refusal(stages: Sequence[Stage], gradients: dict[str, Tensor]) -> str | None:
    """Why the stages can't be undone, or None."""
    for below, stage in zip([None, *stages], stages, strict=False):
        weight = gradients.get(f"{stage.name}.weight")
        if weight is None or not bool(weight.any()):
            return f"the update says nothing of {stage.name}: its weight moved by no more than rounding"
        if not bool(weight.isfinite().all()):
            return f"the update of {stage.name} has numbers that are not finite"
        parts = (stage.before, stage.layer, stage.after)
        if not all(bool(value.isfinite().all()) for part in parts for value in part.state_dict().values()):
            return f"the model has numbers at {stage.name} that are not finite"
        bias = gradients.get(f"{stage.name}.bias")
        if isinstance(stage.layer, nn.Linear) and bias is not None and not bool(bias.any()):
            return f"the bias of {stage.name} did not move although its weight did: its update is lost (to rounding?)"
        if isinstance(stage.layer, nn.Conv2d) and tuple(stage.layer.dilation) != (1, 1):
            return f"{stage.name} is dilated, which is not handled; see the attack rconv"
        if below is not None and isinstance(below.layer, nn.Conv2d) and _pooling(below, stage) is None:
            return f"what lies between {below.name} and {stage.name} can't be undone: {SIMPLE}"
    return None


SIMPLE = "it takes at most one normalisation and one pooling whose windows do not overlap, averages before activations"
"""What may stand between two layers."""


@dataclass(frozen=True)
class _Pooling:
    window: tuple[int, int] = (1, 1)
    average: bool = False


def _pooling(stage: Stage, above: Stage) -> _Pooling | None:
    """How a convolution's outputs are pooled before the stage above takes them, or None where that can't be undone."""
    after = [m for m in stage.after if not isinstance(m, RESHAPING)]
    before = [m for m in above.before if not isinstance(m, RESHAPING)]
    norms = [m for m in after if isinstance(m, nn.BatchNorm2d)]
    pools = [m for m in [*after, *before] if isinstance(m, nn.MaxPool2d | nn.AvgPool2d)]
    if len(norms) + len(pools) != len(after) + len(before) or len(norms) > 1 or len(pools) > 1:
        return None
    if norms and after[0] is not norms[0]:
        return None
    if not pools:
        return _Pooling()
    (pool,) = pools
    window, stride = _pair(pool.kernel_size), _pair(pool.stride)
    average = isinstance(pool, nn.AvgPool2d)
    if (
        window != stride
        or _pair(pool.padding) != (0, 0)
        or pool.ceil_mode
        or _pair(getattr(pool, "dilation", 1)) != (1, 1)
    ):
        return None
    if average and pool in before and not isinstance(stage.activation, nn.Identity):
        return None  # averages of what an activation bent are not linear in the convolution's outputs
    return _Pooling(window, average)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _single(stages: Sequence[Stage], gradients: dict[str, Tensor], top: int) -> Apart:
    """Signal and input of the top layer for one image: its gradient is their outer product."""
    weight, signal = (gradients[f"{stages[top].name}.{kind}"] for kind in ("weight", "bias"))
    values = (signal @ weight) / (signal @ signal)
    return Apart(signal[None], values[None], 0.0, 0.0)


def _separated(stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, count: int) -> Apart | NotApplicable:
    """Signals and inputs of the top layer for the images of a batch, or why they can't be told apart."""
    reason = _inseparable(stages, gradients, top, count)
    if reason is not None:
        return NotApplicable(reason)
    above, stage = stages[top], stages[top - 1]
    weight, moved = (gradients[f"{above.name}.{kind}"] for kind in ("weight", "bias"))
    assert isinstance(above.layer, nn.Linear)
    offset, slope = _between(above, weight)
    below = gradients[f"{stage.name}.bias"]
    rises = isinstance(above.activation, nn.LeakyReLU | nn.ReLU)
    known = Sum(
        weight=above.layer.weight.detach(),
        bias=above.layer.bias.detach(),
        low=slope_below(above.activation) if rises else None,
        gradient=weight,
        moved=moved,
        offset=offset,
        slope=slope,
        gentle=slope_below(stage.activation),
        below=below,
        share=_normalisation(stage, below)[0],
    )
    if Mixture.of(known, count) is None:
        return NotApplicable(
            f"the gradient of {above.name} is not of rank {count}: of the {count} images of the batch some are alike "
            "or leave nothing, or more than these were fed"
        )
    found = separate(known, count)
    return NotApplicable(f"the {count} images of the batch could not be told apart") if found is None else found


def _between(above: Stage, like: Tensor) -> tuple[Tensor, Tensor]:
    """Offset and slope (n,) of the map from what is below a layer to its input, in the type of `like`.

    Max pooling may lie there, too: behind an activation that rises it passes on what that makes of the pooled outputs.
    """
    zero = torch.zeros(1, *above.shape, dtype=like.dtype)
    offset = above.given(zero).flatten()
    return offset, above.given(zero + 1).flatten() - offset


def _inseparable(stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, count: int) -> str | None:
    """Why the equations for telling `count` images apart are too few, or None."""
    if top == 0:
        return f"nothing below {stages[0].name} tells the {count} images of the batch apart"
    above, stage = stages[top], stages[top - 1]
    if not isinstance(stage.activation, nn.LeakyReLU | nn.ReLU):
        return f"it tells images apart by the bend of a (leaky) ReLU right below {above.name}: there is none"
    below = gradients.get(f"{stage.name}.bias")
    if below is None or not bool(below.any()):
        return f"the update says nothing of the bias of {stage.name}, by which images are told apart"
    if most(len(below)) < count:
        return f"the {len(below)} biases of {stage.name} tell at most {most(len(below))} images apart, not {count}"
    for lower in stages[:top]:
        if isinstance(lower.layer, nn.Conv2d) and count * lower.taken.numel() > MOST:
            return f"{count} inputs of {lower.name} are {count * lower.taken.numel()} numbers, more than {MOST} at once"
    return None


def _descend(
    view: ServerView, stages: Sequence[Stage], gradients: dict[str, Tensor], top: int, first: Apart
) -> Reconstruction:
    residuals: dict[str, Tensor] = {}
    # an unknown defence may have shortened weight and bias apart, which only a second layer shows
    verified, off = view.threat.knows_defense or top > 0, 0.0
    values, signal, fixed, count = first.inputs, first.signals, None, len(first.inputs)
    kept: tuple[int, int] | None = None
    spread = torch.zeros_like(values)
    flows = max(first.off, rounding(view, f"{stages[top].name}.bias"))  # off by this, in every layer below
    notes: list[str] = []
    for i in range(top, -1, -1):
        stage = stages[i]
        if i < top:
            given, signal, loose, doubt = _below(stage, stages[i + 1], values, signal, spread)
        weight = gradients[f"{stage.name}.weight"]
        if isinstance(stage.layer, nn.Linear):
            if i < top:
                values = torch.linalg.solve(signal @ signal.mT, signal @ weight)
            left = weight - signal.mT @ values
            residuals[stage.name] = torch.stack([left.norm() / weight.norm(), left.new_tensor(first.left * (i == top))])
            off = max(float(residuals[stage.name][0]), ROUNDED * torch.finfo(view.dtype).eps, first.off)
            if not off < MISSED:
                verified = False
                notes.append(f"{stage.name}: its gradient explained up to {off:.1e}")
            signal, spread = signal @ stage.layer.weight.detach(), torch.full_like(values, off)
        else:
            known = _equations(stage, stages[i + 1], gradients, given, (signal, loose, doubt), kept)
            off = max(off, rounding(view, f"{stage.name}.weight"))
            known = replace(known, noise=off, grain=_grain(view, stage), above=flows)
            solved = solve(known, _statistics(stage) if i == 0 else None)
            found = solved.found
            residuals[stage.name] = torch.tensor([found.gradient, found.forward])
            verified = verified and solved.satisfied
            notes += [] if solved.satisfied else [f"{stage.name}: {solved.progress}"]
            if count > 1 and i > 0 and not found.error < ROUGHLY:
                return _stopped(residuals, stage.name, known.layer.apart(found.x), notes)
            if i == 0 and verified:
                fixed = known.layer.apart(fixed_pixels(solved, *_statistics(stage)))
                verified = bool(fixed.all())
            values, signal = known.layer.apart(found.x), known.layer.apart(solved.signal)
            off, kept = max(found.gradient, off), known.layer.reached
            if i > 0:
                spread = known.layer.apart(solved.off())
    image = stages[0].undo(values)
    if not bool((image > -RANGE).all() and (image < 1 + RANGE).all()):
        verified, fixed = False, None
        notes.append("the picture came out beyond [0, 1] and was cut off there")
    return Reconstruction(
        inputs=image.clamp(0, 1).to(view.device, view.dtype),
        labels=view.labels if count == 1 else None,  # which image has which is not known
        knowledge=("labels",) if count == 1 and view.labels is not None else (),
        objective=max(float(r.max()) for r in residuals.values()),
        private={f"residual/{name}": value for name, value in residuals.items()},
        verified=verified,
        fixed=None if fixed is None else fixed.to(view.device),
        note="; ".join(notes),
    )


def _stopped(residuals: dict[str, Tensor], name: str, features: Tensor, notes: list[str]) -> Reconstruction:
    """What there is of a batch whose images could not be followed below the layer `name`."""
    return Reconstruction(
        inputs=None,
        objective=max(float(r.max()) for r in residuals.values()),
        private={**{f"residual/{n}": value for n, value in residuals.items()}, f"features/{name}": features},
        verified=False,
        note="; ".join([*notes, "the layers below it were not tried"]),
    )


def _below(
    stage: Stage, above: Stage, values: Tensor, signal: Tensor, off: Tensor
) -> tuple[Outputs, Tensor, Tensor, Tensor]:
    """What the activation of `stage` was given, pooled, and what flows back into it; image by image (B, .).

    And how far the first may be off, and the factor between the slopes on both sides of the bend where that leaves the
    side open; `off` is how far each of the values may be off, relative to the root mean square of all.
    """
    if above.pointwise:
        values, signal = above.undo(values), signal.flatten(1) * _between(above, values)[1]
    values, signal = values.flatten(1), signal.flatten(1)
    error = off.flatten(1) * values.square().mean().sqrt()
    given, slope = invert(stage.activation, values)
    doubt = torch.ones_like(slope)
    if isinstance(stage.activation, nn.LeakyReLU):
        gentle = stage.activation.negative_slope
        doubt = torch.where(values.abs() > 5 * error, doubt, torch.where(values >= 0, gentle, 1 / gentle).to(values))
    return given, signal * slope, error / slope.clamp_min(1e-6), doubt


def _equations(
    stage: Stage,
    above: Stage,
    gradients: dict[str, Tensor],
    given: Outputs,
    rest: tuple[Tensor, Tensor, Tensor],
    kept: tuple[int, int] | None,
) -> Equations:
    """What is known of a convolution.

    Args:
        stage: with it.
        above: what takes its outputs.
        gradients: of the weights.
        given: what the activation was given, as `_below` returns it.
        rest: the other things that it returns.
        kept: rows and columns of the outputs, pooled, that the layer above saw.
    """
    conv = stage.layer
    assert isinstance(conv, nn.Conv2d)
    pooling = _pooling(stage, above)
    assert pooling is not None
    weight = conv.weight.detach()
    bias = weight.new_zeros(len(weight)) if conv.bias is None else conv.bias.detach()
    scale, shift = _normalisation(stage, weight)
    count, (channels, height, width) = len(given.values), stage.taken
    layer = Layer(
        weight * scale[:, None, None, None],
        bias * scale + shift,
        (channels, count * height, width),
        _pair(conv.padding),  # type: ignore[arg-type]
        _pair(conv.stride),  # type: ignore[arg-type]
        pooling.window,
        pooling.average,
        count,
        kept,
    )
    rows, columns = replace(layer, kept=None).pooled
    gradient = gradients[f"{stage.name}.weight"]
    target, seen, signal, loose, doubt = (
        part.view(count, len(weight), rows, columns)[..., : layer.pooled[0], : layer.pooled[1]]
        .transpose(0, 1)
        .flatten(1)
        for part in (given.values, given.known, *rest)
    )
    return Equations(
        layer,
        gradient.flatten(1) / scale[:, None],
        target,
        signal,
        seen,
        loose,
        doubt,
    )


def _normalisation(stage: Stage, like: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and shift of each output (O,) by batch normalisation at rest."""
    norms = [m for m in stage.after if isinstance(m, nn.BatchNorm2d)]
    if not norms:
        return like.new_ones(len(like)), like.new_zeros(len(like))
    (norm,) = norms
    with torch.no_grad():
        shift = norm(like.new_zeros(1, len(like), 1, 1)).flatten()
        return norm(like.new_ones(1, len(like), 1, 1)).flatten() - shift, shift


def _grain(view: ServerView, stage: Stage) -> Tensor | None:
    """Rounding of each of the equations of a convolution's gradient (O, M), where no normalisation is between."""
    found = None if any(isinstance(m, nn.BatchNorm2d) for m in stage.after) else grain(view, f"{stage.name}.weight")
    return None if found is None else found.flatten(1)


def _statistics(stage: Stage) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the normalisation before the first layer, channel by channel (I,)."""
    zero = torch.zeros(1, *stage.shape, dtype=torch.float64)
    offset, slope = stage.given(zero), stage.given(zero + 1)
    std = 1 / (slope - offset).flatten(2)[0, :, 0]
    return -offset.flatten(2)[0, :, 0] * std, std
