"""What is told of pictures behind ImageNet's stem, by counts: `python -m benchmarks.exact.residual_stem`.

For each size this counts whether `backsolve` can solve down to the stem, and how many equations it has of a picture
then. Beside it stands a search that is told much more than any attack knows: every output of the first convolution that
max pooling passed on, at its position, and what flows back there. Needs HYPERLEAK_DATA. What has been measured is left
as it is.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from benchmarks.common import known_rows, publish, results_parser, rewrite, start, table
from benchmarks.exact.residual_victims import CASES, Case, Victim, observe
from eval.metrics import image
from fl.seeds import stream

PAGE = "residual_stem"
VICTIMS = 8
SIZES = tuple(case for case in CASES if case.name.startswith("resnet18-imagenet-"))
STEPS, FIRST_STEP, LAST_STEP = 600, 0.05, 5e-4
"""Of Adam, in pixels, falling geometrically."""
FIRST_PRIOR, LAST_PRIOR = 0.2, 2e-5
"""Weight of total variation beside the relative misfit, likewise."""
Row = dict[str, Any]
log = logging.getLogger(__name__)


def measure(case: Case, number: int) -> Row:
    """Count what is known of a victim, and search with all positions told."""
    victim = observe(case, number)
    outputs = stem_outputs(victim)
    began = time.process_time()
    found = search_with_positions(victim, outputs)
    return {
        "case": case.name,
        "victim": number,
        "numbers": victim.images.inputs.numel(),
        "inputs": outputs["inputs"].numel(),
        "equations": block_equations(victim, outputs),
        "first_gradient": outputs["weight"].numel(),
        "passed": int(outputs["passed"].sum()),
        "psnr_told": float(image.psnr(found, victim.images.inputs)),
        "seconds": time.process_time() - began,
    }


def block_equations(victim: Victim, outputs: dict[str, Tensor]) -> int:
    """Count the equations of the block's input: gradients of the two layers that take it, and outputs above zero."""
    network: Any = victim.model
    block = network.body.layer2[0]
    gradients = block.conv1.weight.numel() + block.downsample[0].weight.numel()
    return gradients + sum(int((outputs[name] > 0).sum()) for name in ("inner", "block"))


def stem_outputs(victim: Victim) -> dict[str, Tensor]:
    """Return the tensors of the stem at the truth.

    Returns:
        weight: of the first convolution (64, 3, 7, 7).
        values: its outputs without what does not depend on the picture (1, 64, H / 2, W / 2).
        passed: 1 where max pooling passed an output above zero on, else 0; of the same shape.
        signal: the gradient of the loss by these outputs, of the same shape.
        inputs: of the lowest block with 128 channels (1, 64, H / 4, W / 4).
        inner: what that block's second convolution takes (1, 128, H / 8, W / 8).
        block: its outputs, of the same shape.
    """
    network: Any = victim.model
    block = network.body.layer2[0]
    kept: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: kept.__setitem__(name, output))
        for name, module in (("active", network.body.relu), ("inputs", network.body.layer1), ("block", block))
    ]
    hooks.append(block.conv2.register_forward_hook(lambda _, given, __: kept.__setitem__("inner", given[0])))
    loss = F.cross_entropy(network(victim.images.inputs), victim.images.labels)
    for hook in hooks:
        hook.remove()
    (signal,) = torch.autograd.grad(loss, kept["active"])
    active, weight = kept["active"].detach(), network.body.conv1.weight.detach()
    largest, places = F.max_pool2d(active, 3, 2, 1, return_indices=True)
    passed = torch.zeros_like(active).flatten(2).scatter_(2, places.flatten(2), (largest > 0).float().flatten(2))
    passed = passed.reshape(active.shape)
    values = convolved(network, victim.images.inputs)
    return {
        "weight": weight,
        "values": values,
        "passed": passed,
        "signal": signal * passed,
        **{name: kept[name].detach() for name in ("inputs", "inner", "block")},
    }


def _std(network: Any) -> Tensor:
    return torch.tensor(network.normalize.values[1])[:, None, None]


def convolved(network: nn.Module, images: Tensor) -> Tensor:
    """Return what the first convolution makes of pictures, but for what does not depend on them."""
    body: Any = network.body
    return F.conv2d(images / _std(network), body.conv1.weight.detach(), stride=2, padding=3)


def search_with_positions(victim: Victim, outputs: dict[str, Tensor]) -> Tensor:
    """Search for the picture by equations that are all linear, with total variation that fades."""
    truth, weight, passed = victim.images.inputs, outputs["weight"], outputs["passed"]
    network = victim.model

    def gradient(images: Tensor) -> Tensor:
        return conv2d_weight(images / _std(network), weight.shape, outputs["signal"], stride=2, padding=3)

    values, wanted = outputs["values"] * passed, gradient(truth)
    at = torch.rand(truth.shape, generator=stream(0, "start")) * 0.2 + 0.4
    at.requires_grad_()
    optimizer = torch.optim.Adam([at], lr=FIRST_STEP, betas=(0.9, 0.99))
    for step in range(STEPS):
        done = step / STEPS
        optimizer.param_groups[0]["lr"] = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** done
        optimizer.zero_grad()
        misfit = _relative(convolved(network, at) * passed, values) + _relative(gradient(at), wanted)
        objective = misfit + FIRST_PRIOR * (LAST_PRIOR / FIRST_PRIOR) ** done * variation(at)
        objective.backward()
        optimizer.step()
        at.data.clamp_(0, 1)
    return at.detach()


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum() / wanted.square().sum()


def variation(images: Tensor) -> Tensor:
    """Return a smoothed total variation: of brightness, and four times as much of its two color differences."""
    basis = images.new_tensor([[1, 1, 1], [1, -1, 0], [1, 1, -2]])
    basis = F.normalize(basis, dim=1) * images.new_tensor([0.5, 2, 2])[:, None]
    mixed = torch.einsum("kc,bchw->bkhw", basis, images)
    return torch.stack([(mixed.diff(dim=axis).square() + 1e-6).sqrt().mean((0, 2, 3)).sum() for axis in (2, 3)]).sum()


# ---- page ------------------------------------------------------------------------------------------------------------
def document(rows: Sequence[Row]) -> list[str]:
    """The counts in words."""
    lines = []
    for case in SIZES:
        own = [row for row in rows if row["case"] == case.name]
        if own:
            lines.append(_line(case, own))
    head = ["pixels", "victims", "numbers of the block's input", "equations", "for each number", "numbers of a picture"]
    head += ["equations", "for each number", "positions told: equations", "for each number"]
    head += ["median dB (least to most)"]
    return [
        "# What ImageNet's stem tells of a picture",
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
        "that max pooling passed on, at its position, and what flows back there. All its equations are linear. Total "
        "variation fades to nothing.",
        "",
        *table(head, lines),
        "",
        "A larger picture has more numbers, and gradients have as many as before. Of the larger size the block's input "
        "has fewer equations than numbers, so it is not solved for. Its equations are more than the numbers of a "
        "picture, but not by much, and not linear in it. "
        "[Searches by them](residual.md) end far below the one that is told positions. Gradients of the layers between "
        "are further equations, of signals that are not known.",
    ]


def _line(case: Case, own: Sequence[Row]) -> list[object]:
    told = [row["psnr_told"] for row in own]
    inputs, numbers = own[0]["inputs"], own[0]["numbers"]
    block = statistics.median(row["equations"] for row in own)
    stem = statistics.median(row["passed"] for row in own) + own[0]["first_gradient"]
    of_picture = stem if block >= inputs else block
    return [
        f"{case.side} x {case.side}",
        len(own),
        inputs,
        f"{block:.0f}",
        f"{block / inputs:.2f}",
        numbers,
        f"{of_picture:.0f}",
        f"{of_picture / numbers:.2f}",
        f"{stem:.0f}",
        f"{stem / numbers:.2f}",
        f"{statistics.median(told):.0f} ({min(told):.0f} to {max(told):.0f})",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    chosen = start(results_parser(__doc__), arguments)
    if chosen.rewrite:
        rewrite(PAGE, lambda results: document(results["rows"]))
        return
    rows = [] if chosen.again else known_rows(PAGE)
    known = {(row["case"], row["victim"]) for row in rows}
    for case in SIZES:
        for number in range(VICTIMS):
            if (case.name, number) not in known:
                rows.append(measure(case, number))
                publish(PAGE, {"rows": rows}, document(rows))
                log.info("%s", json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
