"""Facts of training that may be right in place of those that were stated, as far as an update points to them.

A wrong fact hides a leak: a batch that a loader cut short, a step size of another run, an optimizer that was changed.
What such a guess explains is proved whatever was said, so that only what the whole update confirms may count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attacks.base import Reconstruction, Result
from attacks.labels.targets import outputs_of
from attacks.search_control import check_time_limit
from attacks.update.adaptive_first_step import read_step_size
from attacks.update.example_count import count_examples
from attacks.update.observed_update import ObservedUpdate
from attacks.update.update_rule import RuleKind, is_sign_compressed, kind_of_update_rule
from eval.audit.recorded_update import TrainingFacts
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.tensors import dense
from fl.types import Candidate
from fl.view import ServerView

ADAPTIVE_STEP, FIRST_ATTACK = "adaptive-step", "analytic"
"""The attack on a step of Adam and its like, and what is tried first of SGD's."""
SEVERAL_STEPS = "first-step+cascade"
"""What is tried of several steps on one example."""
BATCH_ATTACKS = ("analytic", "spear")
"""What is tried of several examples."""
USUAL_MOMENTUM = 0.9
"""What people give SGD where they give it any."""
MOST_STEPS, PASSES, SMALLEST_CHANGE = 10, 20, 1e-9
"""Steps whose size is worked out, at most; corrections of it, and the relative one that ends them."""
RATE_DIGITS, RATE_ERROR, MOST_RATE = 4, 1e-5, 1e3
"""In which people write a step size, how far that may be off, relative to it, and the largest that is tried."""


@dataclass(frozen=True)
class OtherFacts:
    """Facts that may be right.

    Attributes:
        facts: all of them.
        words: what they say that was not stated, for a note.
        attacks: that are tried under them.
        is_size_fitted: whether their step size was chosen so that the update has the size it has.
    """

    facts: TrainingFacts
    words: str
    attacks: tuple[str, ...]
    is_size_fitted: bool = False


def likely_facts(facts: TrainingFacts, view: ServerView, *, by_rank: bool = True) -> Iterator[OtherFacts]:
    """Yield facts that are tried before those that were stated.

    It may be one step on one example: clients say how many examples they hold, which may be more than they fed, and
    frameworks may count examples as steps. Or it is one step, as stated, on so many examples as its rank tells.

    Args:
        facts: as stated.
        view: of the update under them.
        by_rank: whether its rank tells anything, as of no update that was compressed.
    """
    count, length = facts.examples or facts.batch_size or 1, facts.epochs if facts.steps is None else facts.steps
    if (count, length) not in {(1, 1), (1, None)}:
        single = replace(facts, examples=1, batch_size=None, steps=None if length is None else 1, epochs=None)
        attack = ADAPTIVE_STEP if _is_adaptive(facts) else FIRST_ATTACK
        yield OtherFacts(single, "it is that of one step on one example", (attack,))
    if by_rank and length in {1, None} and not _is_adaptive(facts):
        yield from _of_rank(facts, view)


def other_facts(facts: TrainingFacts, view: ServerView) -> Iterator[OtherFacts]:
    """Yield facts that an update points to where those that were stated explain nothing of it.

    Args:
        facts: as stated.
        view: of the update under them.
    """
    if _is_adaptive(facts):
        yield from _of_adaptive(facts, view)
    elif is_sign_compressed(view) or kind_of_update_rule(view) == RuleKind.ADAPTIVE_FIRST_STEP:
        yield _with_read_step_size(replace(facts, optimizer="adam", weight_decay=0.0), view)
    elif (facts.epochs if facts.steps is None else facts.steps) not in {1, None}:
        yield from _of_rank(facts, view)


def _of_rank(facts: TrainingFacts, view: ServerView) -> Iterator[OtherFacts]:
    """Yield that it is one step on so many examples as the rank of the update tells, if that is another than stated."""
    count = count_examples(view)
    if count is None or count < 2 or (facts.examples or facts.batch_size or 1, facts.steps) == (count, 1):
        return
    unknown = facts.steps is None and facts.epochs is None
    several = replace(facts, examples=count, batch_size=None, steps=None if unknown else 1, epochs=None)
    yield OtherFacts(several, f"it is that of one step on {count} examples", BATCH_ATTACKS)


def _of_adaptive(facts: TrainingFacts, view: ServerView) -> Iterator[OtherFacts]:
    """Yield another step size, and one step of SGD on one example, where Adam or its like was stated."""
    single = (facts.examples or facts.batch_size or 1) == 1 and (facts.steps or facts.epochs) == 1
    if single:
        read = _with_read_step_size(facts, view)
        if read.facts.lr == facts.lr:
            return
        yield read
    plain = replace(facts, optimizer=None, lr=None, weight_decay=0.0, steps=None, epochs=None, examples=1)
    words = "it is that of one step of SGD" if single else "it is that of one step of SGD on one example"
    yield OtherFacts(replace(plain, batch_size=None), words, (FIRST_ATTACK,))


def _with_read_step_size(facts: TrainingFacts, view: ServerView) -> OtherFacts:
    optimizer = facts.optimizer or "adam"
    lr = read_step_size({name: dense(value) for name, value in view.update.items()}, optimizer)
    words = f"it is that of one step of {optimizer} at lr {lr:g}"
    single = replace(facts, optimizer=optimizer, momentum=0.0, lr=lr or None, steps=1, epochs=None)
    return OtherFacts(single, words, (ADAPTIVE_STEP,))


def _is_adaptive(facts: TrainingFacts) -> bool:
    return facts.optimizer not in {None, "sgd"}


def of_fitted_step_size(
    stated: TrainingFacts, facts: TrainingFacts, view: ServerView, result: Result
) -> OtherFacts | None:
    """Return the step size at which several steps on one picture make an update of the observed size.

    None where there is no picture, or no size does.

    Args:
        stated: facts.
        facts: that are asked for the step size.
        view: under these at any step size, of several steps of SGD on one example.
        result: of an attack, whose picture may be right.

    Raises:
        StoppedError: the time is up (`attacks.search_control`).
    """
    method = view.method
    if not isinstance(result, Reconstruction) or result.inputs is None or type(method) is not FedAvg:
        return None
    if view.batch_size != 1 or method.optimizer != "sgd" or not 1 < (method.steps or 1) <= MOST_STEPS:
        return None
    every = view.task.loss.every_target(view.task.output_shape, view.task.num_classes)
    labels = result.labels if result.labels is not None else every
    outputs = outputs_of(view, result.inputs.to(view.device, view.dtype))
    taken = [label[None] for label in (() if labels is None else labels) if view.task.loss.takes(outputs, label[None])]
    found = [_fit_rate(view, method, result.inputs, label) for label in taken]
    rate, left = min(found, key=lambda fit: fit[1], default=(0.0, math.inf))
    if not 0 < rate < math.inf or not math.isfinite(left):
        return None
    plain = float(f"{rate:.{RATE_DIGITS}g}")
    found_facts = replace(facts, lr=plain if abs(plain - rate) < RATE_ERROR * rate else rate)
    momentum = f" and its momentum {facts.momentum:g}" if facts.momentum != stated.momentum else ""
    words = f"its step size is {found_facts.lr:g}{momentum}"
    return None if found_facts == stated else OtherFacts(found_facts, words, (FIRST_ATTACK,), True)


def _fit_rate(view: ServerView, method: FedAvg, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the step size at which steps on an image make an update of the observed size, and what that leaves."""
    observed = torch.cat([value.flatten() for value in ObservedUpdate(view).in_double(view.update).values()])
    guess, rate, left = Candidate(images, labels.to(images.device)), method.lr, math.inf
    for _ in range(PASSES):
        check_time_limit()
        at_rate = replace(view, method=replace(method, lr=rate))
        with torch.no_grad():
            made = ObservedUpdate(at_rate).in_double(predict(at_rate, guess))
        flat = torch.cat([made[name].flatten() for name in view.update])
        size = float(flat.norm())
        if not 0 < size < math.inf:
            return 0.0, math.inf
        factor = float(observed.norm()) / size
        left = float((observed - factor * flat).norm())
        rate *= factor
        if abs(factor - 1) < SMALLEST_CHANGE or not 0 < rate < MOST_RATE:
            break
    return rate, left
