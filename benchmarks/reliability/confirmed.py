"""False "confirmed": updates made by many rules, none stated, attacked by everything that checks its own result.

`python -m benchmarks.reliability.confirmed` makes 5,000 updates of small networks: by torch.optim's optimizers, by sign
rules, clippings, normalizations and step sizes by layer of our own, and by plain SGD. They are handed to the exact
attacks without a word on how the client trained, some with a wrong one (plain SGD). A confirmation is false where
`verified` is True and a picture is below 40 dB (of pixels in [0, 1], root mean square error over 1 %). Right ones of
plain SGD are counted, too: a check that confirms nothing is no check.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, build
from benchmarks.reliability.page import Figure, record
from benchmarks.reliability.rules import PLAIN, RULES, Grads, Rule
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

log = logging.getLogger(__name__)
COUNT = 5000
WRONG = 40.0
"""A picture below this PSNR (dB) is none that may be confirmed."""
CLASSES = 10


# ---- networks --------------------------------------------------------------------------------------------------------
def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    """Linear layers with activations between."""
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        last = i == len(sizes) - 2
        layers += [nn.Linear(n, m, bias=bias or not last), *([] if last else [activation()])]
    return nn.Sequential(*layers)


def pooled() -> nn.Sequential:
    """Return a convolution with max pooling, as LeNet has them."""
    body = [nn.Conv2d(1, 16, 3), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(256, 24), nn.LeakyReLU(0.1), nn.Linear(24, CLASSES))


def convolved() -> nn.Sequential:
    """Convolutions whose activations can be inverted."""
    body = [nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(12, 8, 3, stride=2), nn.LeakyReLU(0.2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(128, CLASSES))


def normed() -> nn.Sequential:
    """Return a convolution with batch norm at rest, with statistics of its own."""
    body = [nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.LeakyReLU(0.2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(12 * 100, CLASSES))


@dataclass(frozen=True)
class Net:
    """A network, the images it takes, and the attacks that undo such ones."""

    build: Callable[[], nn.Sequential]
    shape: tuple[int, int, int]
    attacks: tuple[str, ...]
    most: int = 3


FLAT = ("analytic", "spear", "cascade", "rconv", "headless+analytic")
NETS: dict[str, Net] = {
    "one layer": Net(partial(mlp, 64, CLASSES), (1, 8, 8), FLAT),
    "MLP": Net(partial(mlp, 192, 48, CLASSES), (3, 8, 8), FLAT),
    "MLP, three layers": Net(partial(mlp, 64, 40, 24, CLASSES), (1, 8, 8), FLAT),
    "MLP, leaky": Net(partial(mlp, 64, 40, CLASSES, activation=nn.LeakyReLU), (1, 8, 8), (*FLAT, "rgap")),
    "MLP, tanh": Net(partial(mlp, 64, 40, CLASSES, activation=nn.Tanh), (1, 8, 8), (*FLAT, "rgap")),
    "MLP, bare head": Net(partial(mlp, 64, 40, CLASSES, bias=False), (1, 8, 8), FLAT),
    "CNN, strided": Net(convolved, (1, 10, 10), ("rgap", "rconv", "cascade", "headless+rconv")),
    "CNN, batch norm at rest": Net(normed, (1, 10, 10), ("rgap", "rconv")),
    "CNN, max pooling": Net(pooled, (1, 10, 10), ("cascade", "headless+cascade"), most=1),
}


# ---- cases -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One update.

    Attributes:
        number: of it, from which all that is random follows.
        rule: how the client trained.
        net: what it trained.
        lr: step size.
        kind: "update", a float32 difference of weights, or "gradient": what was sent over the step size.
        images: how many.
        stated: whether it is said to be plain SGD's.
    """

    number: int
    rule: str
    net: str
    lr: float
    kind: str
    images: int
    stated: bool = False


LRS = (1.0, 0.1, 0.01, 0.001)


def cases(count: int) -> list[Case]:
    """So many cases, rules and networks in turn; every fifth by plain SGD."""
    rules = list(RULES)
    plain = list(PLAIN)
    made = []
    for number in range(count):
        draw = stream(number, "case")
        rule = plain[number // 5 % len(plain)] if number % 5 == 0 else rules[(number - number // 5) % len(rules)]
        net = list(NETS)[_pick(draw, len(NETS))]
        images = 1 + (_pick(draw, NETS[net].most) if _pick(draw, 3) == 0 else 0)
        kind = ("update", "update", "gradient")[_pick(draw, 3)]
        stated = kind == "update" and rule in RULES and _pick(draw, 3) == 0
        made.append(Case(number, rule, net, LRS[_pick(draw, len(LRS))], kind, images, stated))
    return made


def _pick(draw: torch.Generator, count: int) -> int:
    return int(torch.randint(count, (), generator=draw))


def pictures(count: int, shape: tuple[int, int, int], draw: torch.Generator) -> Tensor:
    """Return images on levels of 8 bits: smooth ones, strokes on black, and noise."""
    found = []
    for _ in range(count):
        kind = _pick(draw, 4)
        rough = torch.rand(1, shape[0], 3 if kind else 32, 3 if kind else 32, generator=draw)
        image = functional.interpolate(rough, shape[1:], mode="bilinear", align_corners=True)[0]
        if kind == 1:
            image = image * (image > 0.55)
        found.append((image * 255).round() / 255)
    return torch.stack(found)


def captured(case: Case) -> tuple[ServerView, Tensor]:
    """Return the view of a case's update, and its images."""
    net, draw = NETS[case.net], stream(case.number, "update")
    model = net.build().eval()
    initialize(model, draw)
    for norm in (module for module in model if isinstance(module, nn.BatchNorm2d)):
        norm.running_mean = 0.2 * torch.randn(norm.num_features, generator=draw)
        norm.running_var = 0.5 + torch.rand(norm.num_features, generator=draw)
    images = pictures(case.images, net.shape, draw)
    labels = torch.randint(CLASSES, (case.images,), generator=draw)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    functional.cross_entropy(model(images), labels).backward()
    grads = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    rule = {**RULES, **PLAIN}[case.rule]
    if case.kind == "gradient":
        moved = _sharp(rule, weights, grads, case.lr, draw)
    else:
        moved = rule(weights, grads, case.lr, draw)
        moved = {name: value - (value - moved[name]) for name, value in weights.items()}
    view = from_update(
        copy.deepcopy(model),
        moved,
        input_shape=net.shape,
        num_classes=CLASSES,
        batch_size=case.images,
        method=FedAvg(lr=case.lr, steps=1, batch_size=None, train_mode=False) if case.stated else None,
        kind=case.kind,
    )
    return view, images


def _sharp(rule: Rule, weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
    """Return the direction of a rule's step, not rounded as a difference of weights is."""
    double, slope = ({name: value.double() for name, value in part.items()} for part in (weights, grads))
    return {name: (value / lr).float() for name, value in rule(double, slope, lr, draw).items()}


def psnr(found: Tensor, truth: Tensor) -> float:
    """Return the lowest of the found images, each against the true one nearest to it (dB)."""
    errors = (found[:, None].double() - truth[None].double()).square().flatten(2).mean(2)
    return -10 * math.log10(max(float(errors.min(1).values.max()), 1e-12))


@dataclass(frozen=True)
class Answer:
    """What an attack said of a case.

    Attributes:
        attack: its name.
        alone: whether it confirms its pictures by its own equations.
        verified: whether it still does once the whole update was asked.
        psnr: of the worst of its pictures (dB); None where it has none.
    """

    attack: str
    alone: bool
    verified: bool
    psnr: float | None

    @property
    def right(self) -> bool:
        """Whether all its pictures are."""
        return self.psnr is not None and self.psnr >= WRONG


def answers(case: Case) -> list[Answer]:
    """Return what every attack made of a case."""
    view, images = captured(case)
    found = []
    for name in NETS[case.net].attacks:
        attack = build({"name": name, "samples": 2000} if name == "spear" else name)
        raw = attack.run([view], [0])[0]
        result = attack.confirm(view, raw)
        if not isinstance(raw, Reconstruction) or not isinstance(result, Reconstruction) or raw.inputs is None:
            found.append(Answer(name, False, False, None))
            continue
        found.append(Answer(name, raw.verified is True, result.verified is True, psnr(raw.inputs, images)))
    return found


# ---- figures ---------------------------------------------------------------------------------------------------------
def figures(rows: Sequence[tuple[Case, list[Answer]]]) -> tuple[list[Figure], dict[str, Any]]:
    """Return what the experiment found, and the counts of every rule."""
    odd = [(case, answer) for case, found in rows for answer in found if case.rule in RULES]
    plain = [(case, answer) for case, found in rows for answer in found if case.rule in PLAIN]
    unstated = [(case, answer) for case, answer in odd if not case.stated]
    stated = [(case, answer) for case, answer in odd if case.stated]
    kept = [answer for _, answer in plain if answer.alone and answer.right]
    share = sum(answer.verified for answer in kept) / max(len(kept), 1)
    wrong = [(case, answer) for case, answer in plain if answer.verified and not answer.right]
    found = [
        _none("false confirmations: updates whose rule is not stated, and is not SGD", unstated),
        _none("false confirmations: updates stated to be SGD's that are not", stated),
        Figure(
            "false confirmations: updates of plain SGD, not stated",
            len({case.number for case, _ in plain}),
            "0",
            str(len(wrong)),
            not wrong,
        ),
        Figure(
            "right pictures of plain SGD that the attack confirms by itself, still confirmed though it is not stated",
            len(kept),
            "95 %",
            f"{100 * share:.1f} %",
            share >= 0.95,
        ),
    ]
    return found, {"rules": _by(odd + plain, lambda case: case.rule), "networks": _by(plain, lambda case: case.net)}


def _none(what: str, rows: Sequence[tuple[Case, Answer]]) -> Figure:
    false = sum(answer.verified and not answer.right for _, answer in rows)
    before = sum(answer.alone and not answer.right for _, answer in rows)
    said = f"{false} (of {len(rows)} results, {before} of which the attacks' own equations confirm wrongly)"
    return Figure(what, len({case.number for case, _ in rows}), "0", said, false == 0)


def _by(rows: Sequence[tuple[Case, Answer]], key: Callable[[Case], str]) -> dict[str, dict[str, int]]:
    """Counts by rule or network."""
    counts: dict[str, Counter[str]] = {}
    for case, answer in rows:
        mine = counts.setdefault(key(case), Counter(results=0, right=0, verified=0, false=0, alone_false=0))
        mine["results"] += 1
        mine["right"] += answer.right
        mine["verified"] += answer.verified and answer.right
        mine["false"] += answer.verified and not answer.right
        mine["alone_false"] += answer.alone and not answer.right
    return {name: dict(mine) for name, mine in sorted(counts.items())}


def main(count: int = COUNT) -> None:
    """Make so many updates, and write what the attacks said of them; a smaller number is shown alone."""
    rows = []
    for case in cases(count):
        rows.append((case, answers(case)))
        for answer in rows[-1][1]:
            if answer.verified and not answer.right:
                log.warning("false: %s %s", case, answer)
    found, details = figures(rows)
    for figure in found:
        log.info("%s: %s (goal %s, %d cases)", figure.what, figure.found, figure.goal, figure.tried)
    if count == COUNT:
        record("confirmed", "python -m benchmarks.reliability.confirmed", found, details)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=COUNT, help="updates to make")
    main(parser.parse_args().count)
