"""Other pictures with the same gradient, behind ImageNet's stem: `python -m benchmarks.exact.residual_twins`.

A picture reaches the rest of a ResNet by what max pooling passes on, and shows besides in the first convolution's
gradient. Where these are fewer numbers than the picture has, there are others (twins) that share all of them, and so
the whole gradient. This looks for one, beginning elsewhere, and says how far from the picture it is and by how much the
gradients differ, in double precision, beside what float32 makes of the picture's own.

With z = A x + a the outputs before the ReLU, S the positions that max pooling passed on, b what bounds each of the
others (the outputs of all windows that hold it), g(x) the first convolution's gradient with the signal of the picture
t, a twin is an x within [0, 1] with

    z_S(x) = z_S(t),    z(x) <= b elsewhere,    g(x) = g(t).

All are linear, so that x goes there by Newton's steps: the equations, and bounds that are exceeded, in least squares by
conjugate gradients, which move x by no more than they must. Needs HYPERLEAK_DATA. What has been measured is left as it
is.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from benchmarks.common import RowBenchmark, table
from benchmarks.exact.residual_stem import SIZES, bounds_of_windows
from benchmarks.exact.residual_victims import gradients, pictures_of
from eval.metrics import image
from fl.models.building_blocks.layers import Normalize
from fl.types import Batch

PAGE = "residual_twins"
VICTIMS = 5
STARTS = {
    "gray": lambda picture: torch.full_like(picture, 0.5),
    "blurred": lambda picture: F.avg_pool2d(F.pad(picture, (1, 1, 1, 1), mode="replicate"), 3, 1),
}
MAX_STEPS, ITERATIONS = 80, 150
"""Newton's steps, and conjugate gradients' iterations in each."""
MARGIN, TOLERANCE, TIE = 3e-6, 1e-5, 1e-7
"""Shares of the root mean square of pooled outputs: what is left to each bound, what equations may be off, and what a
bound may be exceeded by: in flat areas outputs are at theirs."""
GOAL = 40.0
"""PSNR (dB) that a picture through this stem is to come back with."""
Row = dict[str, Any]
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Passage:
    """What of a picture passes through a stem, as linear maps and bounds.

    Attributes:
        outputs: from a picture (1, 3, H, W) to what the ReLU takes (1, O, h, w).
        gradient: from a picture to the first convolution's gradient, at the signal of the true picture.
        passed: where max pooling passed an output above zero on (1, O, h, w).
        bounds: of the others, of the same shape.
        scale: root mean square of pooled outputs.
    """

    outputs: Linear
    gradient: Linear
    passed: Tensor
    bounds: Tensor
    scale: float

    @classmethod
    def of(cls, network: nn.Module, images: Batch) -> Passage:
        """Return a picture's passage through a ResNet's stem, in double precision."""
        network = network.double()
        body: Any = network.body
        pictures, normalize = images.inputs.double(), next(m for m in network.modules() if isinstance(m, Normalize))

        def outputs(pictures: Tensor) -> Tensor:
            first, dtype = body.conv1, pictures.dtype
            made = F.conv2d(
                normalize(pictures).to(dtype), first.weight.to(dtype), stride=first.stride, padding=first.padding
            )
            scale, shift = _affine(body.bn1)
            return made * scale.to(dtype) + shift.to(dtype)

        kept: list[Tensor] = []
        hook = body.bn1.register_forward_hook(lambda _, __, made: kept.append(made))
        loss = F.cross_entropy(network(pictures), images.labels)
        hook.remove()
        (signal,) = torch.autograd.grad(loss, kept)
        taken, pooling, first = kept[0].detach(), body.maxpool, body.conv1
        largest, places = F.max_pool2d(
            taken.relu(), pooling.kernel_size, pooling.stride, pooling.padding, return_indices=True
        )
        passed = torch.zeros_like(taken).flatten(2)
        passed.scatter_(2, places.flatten(2), (largest > 0).double().flatten(2))
        signal = signal * _affine(body.bn1)[0]
        weights = 1 / signal.flatten(2).norm(dim=2).clamp_min(1e-12 * float(signal.norm())).reshape(-1, 1, 1, 1)

        def gradient(pictures: Tensor) -> Tensor:
            given, flowing = normalize(pictures).to(pictures.dtype), signal.to(pictures.dtype)
            made = conv2d_weight(given, first.weight.shape, flowing, first.stride, first.padding)
            return made * weights.to(pictures.dtype)

        bounds = bounds_of_windows(largest, taken.shape, pooling)
        return cls(outputs, gradient, passed.reshape(taken.shape) > 0, bounds, float(largest.square().mean().sqrt()))


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Return by what batch norm in evaluation mode multiplies, and what it adds (O, 1, 1)."""
    scale = norm.weight.detach() * (norm.running_var + norm.eps).rsqrt()
    return scale[:, None, None], (norm.bias.detach() - norm.running_mean * scale)[:, None, None]


@torch.no_grad()
def find_twin(passage: Passage, truth: Tensor, begin: Tensor) -> tuple[Tensor, bool]:
    """Return a picture that passes as the true one does, near another, and whether nothing is left.

    Args:
        passage: of the true picture.
        truth: the picture (1, 3, H, W), in double precision.
        begin: where to begin.
    """
    wanted, wanted_gradient, at = passage.outputs(truth), passage.gradient(truth), begin.double()
    margin, tie, done = MARGIN * passage.scale, TIE * passage.scale, False
    tied = ~passage.passed & (wanted > passage.bounds - 2 * margin)
    limit = torch.where(tied, passage.bounds + tie, passage.bounds - margin)
    goal = torch.where(tied, passage.bounds, passage.bounds - 2 * margin)
    for _ in range(MAX_STEPS):
        made = passage.outputs(at)
        exceeding = ~passage.passed & (made > limit)
        off = torch.where(passage.passed, wanted - made, 0)
        off_gradient, outside = wanted_gradient - passage.gradient(at), at.clamp(0, 1) - at
        beyond = ~passage.passed & (made > passage.bounds + tie)
        within = not bool(beyond.any()) and float(outside.abs().max()) <= TIE
        done = within and float(off.abs().max()) <= TOLERANCE * passage.scale
        if done:
            break
        off = torch.where(exceeding, goal - made, off)
        asked = passage.passed | exceeding
        at = at + _least_move(passage, (off, off_gradient, outside), asked, outside != 0)
    return at.clamp(0, 1), done


def _least_move(passage: Passage, wanted: tuple[Tensor, ...], asked: Tensor, bounded: Tensor) -> Tensor:
    """Return the least move of a picture that changes outputs, gradient and pixels as wanted, in single precision.

    Args:
        passage: of the true picture.
        wanted: changes of outputs, of the gradient and of pixels.
        asked: the outputs that are to change so.
        bounded: the pixels that are.
    """
    none = torch.zeros_like(wanted[2], dtype=torch.float32)
    zero, zero_gradient = passage.outputs(none), passage.gradient(none)
    outputs_back, gradient_back = vjp(passage.outputs, none)[1], vjp(passage.gradient, none)[1]
    largest = max(float(part.abs().max()) for part in wanted) or 1.0

    def forward(move: Tensor) -> list[Tensor]:
        return [asked * (passage.outputs(move) - zero), passage.gradient(move) - zero_gradient, bounded * move]

    def back(changes: Sequence[Tensor]) -> Tensor:
        return outputs_back(asked * changes[0])[0] + gradient_back(changes[1])[0] + bounded * changes[2]

    left = [(t / largest).float() for t in wanted]
    move, slope = none.clone(), back(left)
    direction, size = slope.clone(), slope.square().sum()
    first = size
    for _ in range(ITERATIONS):
        change = forward(direction)
        length = size / sum(part.square().sum() for part in change)
        move += length * direction
        left = [a - length * b for a, b in zip(left, change, strict=True)]
        slope = back(left)
        size, last = slope.square().sum(), size
        if size <= 1e-10 * first:
            break
        direction = slope + size / last * direction
    return largest * move.double()


# ---- victims ---------------------------------------------------------------------------------------------------------
def measure(name: str, number: int, begin: str) -> Row:
    """Look for a twin of a victim's picture, and compare the two."""
    case = next(case for case in SIZES if case.name == name)
    images, network, began = pictures_of(case, number), case.network(number).eval(), time.process_time()
    rounded = gradients(network, images)
    passage = Passage.of(copy.deepcopy(network), images)
    truth = images.inputs.double()
    twin, done = find_twin(passage, truth, STARTS[begin](truth))
    network.double()
    own = gradients(network, Batch(truth, images.labels))
    others = gradients(network, Batch(twin, images.labels))
    names = [name for name, _ in network.named_parameters()]
    off = [_distance(a, b) for a, b in zip(others, own, strict=True)]
    rounding = [_distance(a.double(), b) for a, b in zip(rounded, own, strict=True)]
    worst = max(range(len(off)), key=lambda at: off[at] / rounding[at])
    return {
        "case": name,
        "victim": number,
        "start": begin,
        "numbers": truth.numel(),
        "equations": int(passage.passed.sum()) + own[0].numel(),
        "found": done,
        "psnr": float(image.psnr(twin.float(), images.inputs)),
        "off": statistics.median(off),
        "rounding": statistics.median(rounding),
        "worst": off[worst] / rounding[worst],
        "tensor": names[worst],
        "seconds": time.process_time() - began,
    }


def _distance(one: Tensor, other: Tensor) -> float:
    """Return by which share of a tensor another one differs from it."""
    return float((one - other).norm() / other.norm())


# ---- page ------------------------------------------------------------------------------------------------------------
HEAD = [
    "pixels",
    "begun at",
    "victims",
    "numbers of a picture",
    "equations (median)",
    "nothing left",
    "dB to the picture",
]
HEAD += ["gradients differ by (median)", "rounding of float32 (median)", "most, in roundings"]


def document(rows: Sequence[Row]) -> list[str]:
    """Return the twins in words."""
    lines = [
        _line(case.side, begin, own)
        for case in SIZES
        for begin in STARTS
        if (own := [row for row in rows if (row["case"], row["start"]) == (case.name, begin)])
    ]
    return [
        "# Other pictures with the same gradient",
        "",
        "An untrained ResNet-18 with ImageNet's stem sees of a picture what max pooling passes on. The gradient holds "
        "that, and the first convolution's own. [Counted](residual_stem.md), these are more numbers than a small "
        "picture has, and fewer than a large one has. So a large picture may have others that share its whole "
        "gradient. This looks for one of them, told all that passes.",
        "",
        *table(HEAD, lines),
        "",
        "- *dB to the picture*: median, least and most. A small picture's search ends at the picture itself.",
        "- *gradients differ by*: the distance of the two gradients as a share, in double precision: the median over "
        "tensors, then over victims. *most*: of any tensor, as a multiple of what float32 rounds off it.",
        "",
        *_far_twins(rows),
        "Where a twin is far, no attack can tell which of the two was the client's by the gradient alone. What it has "
        "beyond that it owes to what it takes pictures to be. Pixels are real numbers here. That they are whole "
        "numbers of 256 may rule a twin out. No search over so many whole numbers was tried.",
    ]


def _far_twins(rows: Sequence[Row]) -> list[str]:
    """Count victims with a twin below the goal, all tensors within float32's rounding."""
    lines = []
    for case in SIZES:
        own = [row for row in rows if row["case"] == case.name]
        twins = {row["victim"] for row in own if row["found"] and row["worst"] <= 1 and row["psnr"] < GOAL}
        if own:
            lines.append((f"{case.side} x {case.side}", len({row["victim"] for row in own}), len(twins)))
    said = "Such a twin's gradient differs in no tensor by more than float32 rounds off."
    return [*table(["pixels", "victims", f"with a twin below {GOAL:g} dB"], lines), "", said, ""]


def _line(side: int, begin: str, own: Sequence[Row]) -> list[object]:
    psnr = [float(row["psnr"]) for row in own]
    return [
        f"{side} x {side}",
        begin,
        len(own),
        own[0]["numbers"],
        f"{_median(own, 'equations'):.0f}",
        f"{sum(row['found'] for row in own)} of {len(own)}",
        f"{statistics.median(psnr):.1f} ({min(psnr):.1f} to {max(psnr):.1f})",
        f"{_median(own, 'off'):.1e}",
        f"{_median(own, 'rounding'):.1e}",
        f"{max(row['worst'] for row in own):.1f}",
    ]


def _median(rows: Sequence[Row], key: str) -> float:
    return statistics.median(float(row[key]) for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    benchmark = RowBenchmark(page=PAGE, keys=("case", "victim", "start"), measure=measure, document=document)
    cases = [(case.name, number, begin) for number in range(VICTIMS) for case in SIZES for begin in STARTS]
    benchmark.main(__doc__, cases, arguments)


if __name__ == "__main__":
    main()
