"""What the first layers tell of a picture, by counts: `python -m benchmarks.exact.residual_stem`.

For each size behind ImageNet's stem this counts whether `backsolve` can solve down to the stem, and how many equations
it has of a picture then; of Flower's quickstart network, what `cascade` has. Beside it stands a search that is told
much more than an attack knows: which outputs of the first convolution max pooling passed on. Needs HYPERLEAK_DATA. What
has been measured is left as it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from benchmarks.common import RowBenchmark, table
from benchmarks.exact import cascade_ends
from benchmarks.exact.residual_victims import CASES, observe, pictures_of
from eval.metrics import image
from fl.models.building_blocks.layers import Normalize
from fl.seeds import stream
from fl.types import Batch

PAGE = "residual_stem"
SIZES = tuple(case for case in CASES if case.name.startswith("resnet18-imagenet-"))
FLOWER = "Flower's quickstart, step 1"
VICTIMS = {**{case.name: 8 for case in SIZES}, FLOWER: 25}
STEPS, FIRST_STEP, LAST_STEP = 600, 0.05, 5e-4
"""Of Adam, in pixels, falling geometrically."""
FIRST_PRIOR, LAST_PRIOR = 0.2, 2e-5
"""Weight of total variation beside the relative misfit, likewise."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Stem:
    """A convolution, a ReLU and max pooling, and what passes through them at the truth.

    Pixels are divided by `std` before the convolution. What is subtracted from them, and the bias, are left out: they
    do not depend on the picture.

    Attributes:
        std: of the channels (3, 1, 1).
        weight: of the convolution (O, 3, k, k).
        stride: of the convolution.
        padding: of the convolution.
        passed: 1 where max pooling passed an output above zero on, else 0 (1, O, H, W).
        values: outputs of the convolution (1, O, H, W).
        room: by how much an output may rise until one that was passed on would be less, or the ReLU would open, of the
            same shape.
        signal: the gradient of the loss by the outputs, of the same shape.
    """

    std: Tensor
    weight: Tensor
    stride: int
    padding: int
    passed: Tensor
    values: Tensor
    room: Tensor
    signal: Tensor

    @classmethod
    def of(cls, network: nn.Module, images: Batch, first: nn.Conv2d, normalized: nn.Module, pooling: Any) -> Stem:
        """Return a network's stem.

        Args:
            network: with a `Normalize` before all.
            images: the truth.
            first: its first convolution.
            normalized: the layer whose outputs the ReLU takes: the convolution, or untrained batch norm behind it.
            pooling: the first max pooling.
        """
        kept: dict[str, Tensor] = {}
        hook = normalized.register_forward_hook(lambda _, __, output: kept.__setitem__("outputs", output))
        loss = F.cross_entropy(network(images.inputs), images.labels)
        hook.remove()
        (signal,) = torch.autograd.grad(loss, kept["outputs"])
        outputs = kept["outputs"].detach()
        largest, places = F.max_pool2d(
            outputs.relu(), pooling.kernel_size, pooling.stride, pooling.padding, return_indices=True
        )
        passed = torch.zeros_like(outputs).flatten(2)
        passed = passed.scatter_(2, places.flatten(2), (largest > 0).float().flatten(2)).reshape(outputs.shape)
        std = torch.tensor(next(m for m in network.modules() if isinstance(m, Normalize)).values[1])[:, None, None]
        weight, stride, padding = first.weight.detach(), first.stride[0], int(first.padding[0])
        values = F.conv2d(images.inputs / std, weight, stride=stride, padding=padding)
        room = bounds_of_windows(largest, outputs.shape, pooling) - outputs
        return cls(std, weight, stride, padding, passed, values, room, signal)

    def convolve(self, images: Tensor) -> Tensor:
        """Return the convolution's outputs of pictures, but for what does not depend on them."""
        return F.conv2d(images / self.std, self.weight, stride=self.stride, padding=self.padding)

    def gradient(self, images: Tensor) -> Tensor:
        """Return the convolution's gradient at pictures with the true signal, likewise."""
        return conv2d_weight(
            images / self.std, self.weight.shape, self.signal, stride=self.stride, padding=self.padding
        )


def bounds_of_windows(largest: Tensor, shape: torch.Size, pooling: Any) -> Tensor:
    """Return what each input of a max pooling is at most, by the outputs of all windows that hold it.

    Args:
        largest: outputs of the pooling (1, O, h, w).
        shape: of its inputs.
        pooling: the layer.
    """
    size, stride, padding = (int(getattr(pooling, name)) for name in ("kernel_size", "stride", "padding"))
    height, width = shape[-2:]
    numbers = torch.arange(1, height * width + 1.0, dtype=torch.float64).reshape(1, 1, height, width)
    windows = F.unfold(numbers, size, padding=padding, stride=stride)[0].long()  # (size^2, h w), 0 beyond the rim
    flat = largest.flatten(2)
    bounds = torch.full((*shape[:2], height * width + 1), torch.inf, dtype=largest.dtype)
    for places in windows:
        bounds.scatter_reduce_(2, places.expand(flat.shape), flat, "amin")
    return bounds[..., 1:].reshape(shape)


def search(stem: Stem, truth: Tensor) -> Tensor:
    """Search for the picture by linear equations and bounds, with total variation that fades.

    Args:
        stem: of the picture.
        truth: the picture (1, 3, H, W) that makes the gradient.
    """
    wanted, size = stem.gradient(truth), (stem.values * stem.passed).square().sum()
    at = torch.rand(truth.shape, generator=stream(0, "start")) * 0.2 + 0.4
    at.requires_grad_()
    optimizer = torch.optim.Adam([at], lr=FIRST_STEP, betas=(0.9, 0.99))
    for step in range(STEPS):
        done = step / STEPS
        optimizer.param_groups[0]["lr"] = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** done
        optimizer.zero_grad()
        off = stem.convolve(at) - stem.values
        exceeding = (off - stem.room).clamp_min(0) * (1 - stem.passed)
        misfit = ((off * stem.passed).square().sum() + exceeding.square().sum()) / size
        misfit = misfit + (stem.gradient(at) - wanted).square().sum() / wanted.square().sum()
        (misfit + FIRST_PRIOR * (LAST_PRIOR / FIRST_PRIOR) ** done * variation(at)).backward()
        optimizer.step()
        at.data.clamp_(0, 1)
    return at.detach()


def variation(images: Tensor) -> Tensor:
    """Return a smoothed total variation: of brightness, and four times as much of its two color differences."""
    basis = images.new_tensor([[1, 1, 1], [1, -1, 0], [1, 1, -2]])
    basis = F.normalize(basis, dim=1) * images.new_tensor([0.5, 2, 2])[:, None]
    mixed = torch.einsum("kc,bchw->bkhw", basis, images)
    return torch.stack([(mixed.diff(dim=axis).square() + 1e-6).sqrt().mean((0, 2, 3)).sum() for axis in (2, 3)]).sum()


# ---- victims ---------------------------------------------------------------------------------------------------------
def measure(name: str, number: int) -> Row:
    """Count what is known of a victim, and search with all positions told."""
    stem, truth, counts = flower(number) if name == FLOWER else imagenet(name, number)
    began = time.process_time()
    found = search(stem, truth)
    return {
        "case": name,
        "victim": number,
        "numbers": truth.numel(),
        **counts,
        "first_gradient": stem.weight.numel(),
        "passed": int(stem.passed.sum()),
        "psnr_told": float(image.psnr(found, truth)),
        "seconds": time.process_time() - began,
    }


def flower(number: int) -> tuple[Stem, Tensor, Row]:
    """Return the stem and the picture of a victim of `benchmarks.exact.cascade_ends`, image by image the same."""
    kind = cascade_ends.KINDS[FLOWER]
    images = pictures_of(CASES[0], number)
    network = cascade_ends.task_of(kind, images, cascade_ends.FIRST + number).model
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    pooling = next(module for module in network.modules() if isinstance(module, nn.MaxPool2d))
    return Stem.of(network, images, first, first, pooling), images.inputs, {}


def imagenet(name: str, number: int) -> tuple[Stem, Tensor, Row]:
    """Return the stem and the picture of a ResNet-18's victim, and the counts of the lowest block of 128 channels.

    Its input's equations are gradients of the two layers that take it, and outputs above zero: of its first convolution
    and of the block.
    """
    victim = observe(next(case for case in SIZES if case.name == name), number)
    network: Any = victim.model
    body, block = network.body, network.body.layer2[0]
    kept: dict[str, Tensor] = {}
    hooks = [
        block.register_forward_hook(lambda _, given, output: kept.update(inputs=given[0], outputs=output)),
        block.conv2.register_forward_hook(lambda _, given, __: kept.__setitem__("inner", given[0])),
    ]
    stem = Stem.of(network, victim.images, body.conv1, body.bn1, body.maxpool)
    for hook in hooks:
        hook.remove()
    gradients = block.conv1.weight.numel() + block.downsample[0].weight.numel()
    above = sum(int((kept[key] > 0).sum()) for key in ("inner", "outputs"))
    return stem, victim.images.inputs, {"inputs": kept["inputs"].numel(), "equations": gradients + above}


# ---- page ------------------------------------------------------------------------------------------------------------
def document(rows: Sequence[Row]) -> list[str]:
    """Return the counts in words."""
    head = ["pixels", "victims", "numbers of the block's input", "equations", "for each number", "numbers of a picture"]
    head += ["equations", "for each number", *TOLD]
    lines = [_size_line(case.side, _of(rows, case.name)) for case in SIZES if _of(rows, case.name)]
    flower = _of(rows, FLOWER)
    return [
        "# What the first layers tell of a picture",
        "",
        "## ImageNet's stem",
        "",
        "[`backsolve`](residual.md) solves an untrained ResNet-18 down to the first block with 128 channels. Equations "
        "of that block's input are the gradients of the two layers that take it, and outputs that are above zero.",
        "",
        "- Where these are enough, it solves on down to the outputs of the stem's max pooling. Those above zero and "
        "the first convolution's gradient are the picture's equations. They are linear once positions are known. An "
        "output that two windows of the pooling share counts once.",
        "- Where they are not, they are the picture's equations themselves, and a stage of convolutions lies between.",
        "",
        "The last columns are of a search that is told more than an attack knows: each output of the first convolution "
        "that max pooling passed on, at its position, and what flows back there. All its equations are linear. Other "
        "outputs bound the picture. Total variation fades to nothing.",
        "",
        *table(head, lines),
        "",
        "A larger picture has more numbers, and gradients have as many as before. Of the larger size the block's input "
        "has fewer equations than numbers, so it is not solved for. Its equations are more than the numbers of a "
        "picture, but not by much, and not linear in it. [Searches by them](residual.md) end far below the one that is "
        "told positions. Gradients of the layers between are further equations, of signals that are not known.",
        "",
        "## Flower's quickstart network",
        "",
        "[`cascade`](cascade_ends.md) has the outputs of the first max pooling, what flows back into them, and the "
        "first convolution's gradient. That is less than the numbers of a picture, even for the search that is told "
        "positions. So its result is about the most that a search without another prior can reach. Victims are those "
        "of that page, with a step of size 1.",
        "",
        *table(["victims", "numbers of a picture", *TOLD], [_flower_line(flower)] if flower else []),
    ]


TOLD = ("positions told: equations", "for each number", "median dB (least to most)")


def _of(rows: Sequence[Row], name: str) -> Sequence[Row]:
    return [row for row in rows if row["case"] == name]


def _size_line(side: int, own: Sequence[Row]) -> list[object]:
    inputs, numbers = own[0]["inputs"], own[0]["numbers"]
    block = statistics.median(row["equations"] for row in own)
    of_picture = _stem_equations(own) if block >= inputs else block
    counts = [inputs, f"{block:.0f}", f"{block / inputs:.2f}", numbers, f"{of_picture:.0f}"]
    return [f"{side} x {side}", len(own), *counts, f"{of_picture / numbers:.2f}", *_told(own)]


def _flower_line(own: Sequence[Row]) -> list[object]:
    return [len(own), own[0]["numbers"], *_told(own)]


def _told(own: Sequence[Row]) -> list[object]:
    psnr, equations = [row["psnr_told"] for row in own], _stem_equations(own)
    shown = f"{statistics.median(psnr):.0f} ({min(psnr):.0f} to {max(psnr):.0f})"
    return [f"{equations:.0f}", f"{equations / own[0]['numbers']:.2f}", shown]


def _stem_equations(own: Sequence[Row]) -> float:
    return statistics.median(row["passed"] for row in own) + own[0]["first_gradient"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    benchmark = RowBenchmark(page=PAGE, keys=("case", "victim"), measure=measure, document=document)
    cases = [(name, number) for name, count in VICTIMS.items() for number in range(count)]
    benchmark.main(__doc__, cases, arguments)


if __name__ == "__main__":
    main()
