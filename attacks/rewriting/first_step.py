"""Several local steps on the same images as the first of them: what the later ones added is simulated and taken off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result, ViewRewriter, attacks, runner
from attacks.labels.assignment import order_matters
from attacks.labels.recovery import fixed_labels
from attacks.rewriting.surrogate import ONE_STEP_SURROGATE, Surrogate, count_local_steps, mean_gradient, total_step_size
from attacks.search_control import SearchControl
from attacks.update.training_phases import training_phases
from fl.aggregated_view import sequential_order
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.ranges import CountFrom0
from fl.tensors import Tensors, add_scaled, dense, scale_tensors
from fl.types import Candidate
from fl.view import ServerView

MAX_UNEXPLAINED = 1e-5
"""Share of the update left unexplained below which a reconstruction is taken to explain all of it."""
PROGRESS_FACTOR = 0.7
"""Share of what was left unexplained that a correction has to come below to count as progress."""
MAX_PERMUTED_IMAGES = 4
"""Images up to which all arrangements are simulated: attacks return them in an order of their own."""
TINY = 1e-300
MAX_ORDERED_IMAGES = 3
"""Images up to which all orders are simulated, too, where nobody knows which was fed when: each with all labels."""
PATIENCE = 2
"""Corrections without progress after which the search ends."""


@attacks.register("first-step")
@dataclass(frozen=True, kw_only=True)
class FirstStep(ViewRewriter):
    """Takes all local steps for the first, then corrects that by what the reconstruction says of the others.

    The mean gradient along a round differs from the one at the network sent by what the network's moving adds. That
    depends on the images; so they are reconstructed from the mean gradient, the round is simulated on them, and what
    the simulated mean m differs from the simulated first gradient f by is taken off the observed mean:

        g <- c * observed + (f - c * m),  c = <f, m> / <m, m>,

    over and over (defect correction: Stetter, Numerische Mathematik 29, 1978). The error falls each time by
    about the share by which gradients turn along the round, so attacks that ask for a single step, exact
    ones too, reach what they reach there: `first-step+cascade`. The reconstruction that explains the update best is
    returned; `verified` only if no more than 1e-5 of the update is left. Of up to four images whose place in the round
    or whose label an attack leaves open all arrangements are simulated.

    Threat model: an honest server that knows the local optimizer, the schedule, and the order of the batches unless
    every step feeds all images, or each of up to three is fed once; the classifier is shared, and labels are known or
    read off its update.

    Attributes:
        corrections: at most; each is another reconstruction.
    """

    plain: ClassVar[str] = "works out what several training steps added to the first one, for attacks that need one."

    corrections: CountFrom0 = 12

    def __post_init__(self) -> None:
        if self.corrections < 0:
            raise ValueError(f"expected corrections >= 0, got {self.corrections}")

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of one step on all images along the mean gradient, not corrected yet."""
        easier = Surrogate(along=0.0).rewrite(view)
        if isinstance(easier, NotApplicable):
            return easier
        if count_local_steps(view) == 1:
            return view
        if easier.private:
            return NotApplicable("the classifier is private: what it made of later steps can't be simulated")
        if view.schedule is None:
            return NotApplicable("the number of local steps is unknown: they can't be simulated")
        if view.order is None and _feeds_parts(view) and not _is_order_searched(view):
            return NotApplicable("batches are smaller than all images and their order is unknown")
        size = _round_step_size(view)
        method = FedAvg(lr=size, steps=1, batch_size=None, train_mode=view.method.train_mode)
        return replace(easier, method=method, update=scale_tensors(easier.update, size), history=())

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result; if several steps are not corrected, a check tells only that the approximation fits."""
        if count_local_steps(view) == 1:
            return result
        return replace(result, knowledge=(*result.knowledge, ONE_STEP_SURROGATE), verified=None, fixed=None)

    def attack_rewritten(
        self, then: Attack, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl | None = None
    ) -> list[Result]:
        """Reconstruct and correct in turns, those still open in one batch."""
        searches = [self._begin(view, seed) for view, seed in zip(views, seeds, strict=True)]
        for _ in range(1 + self.corrections):
            active = [search for search in searches if isinstance(search, _DefectCorrection) and search.is_open]
            if not active:
                break
            found = runner(then, control)([search.easier for search in active], [search.seed for search in active])
            for search, result in zip(active, found, strict=True):
                search.correct_by(result)
        return [search.result() if isinstance(search, _DefectCorrection) else search for search in searches]

    def _begin(self, view: ServerView, seed: int) -> _DefectCorrection | NotApplicable:
        single = self.single_client_view(view)
        easier = self.rewrite(single) if isinstance(single, ServerView) else single
        if isinstance(easier, NotApplicable):
            return easier
        assert isinstance(single, ServerView)
        labels = None if count_local_steps(single) == 1 else fixed_labels(single, "auto")
        if labels is None and count_local_steps(single) != 1:
            return NotApplicable("the labels are unknown and not in the update: later steps can't be simulated")
        return _DefectCorrection(single, seed, easier, labels)


@dataclass
class _DefectCorrection:
    """One view under attack.

    Attributes:
        view: as it came in.
        seed: of the attack on it.
        easier: the view of one step, as far as it is corrected.
        labels: of the images (N,); None where there is one step only.
        best: the result that explains most of the update, or the first one.
        unexplained: share of the update that it leaves.
        futile_corrections: corrections since there was progress.
        is_over: whether there is nothing more to correct, or to correct it by.
        history: what every reconstruction left.
    """

    view: ServerView
    seed: int
    easier: ServerView
    labels: Tensor | None
    best: Result | None = None
    unexplained: float = math.inf
    futile_corrections: int = 0
    is_over: bool = False
    history: list[float] = field(default_factory=list)
    sent: Tensors = field(init=False)

    def __post_init__(self) -> None:
        self.sent = self.easier.update

    @property
    def is_open(self) -> bool:
        """Whether another reconstruction may help."""
        if self.is_over or self.futile_corrections > PATIENCE or self.unexplained <= 0.1 * MAX_UNEXPLAINED:
            return False
        best = self.best if isinstance(self.best, Reconstruction) else None
        settled = best is not None and best.verified and best.fixed is not None and bool(best.fixed.all())
        return not (settled and self.unexplained < MAX_UNEXPLAINED)  # else the same pictures would come again

    def correct_by(self, result: Result) -> None:
        """Compare a result with the update, and correct the view by it."""
        self.best = self.best or result
        if isinstance(result, NotApplicable) or result.inputs is None or self.labels is None:
            self.is_over = True  # nothing to simulate by, or nothing to correct
            return
        if len(result.inputs) != len(self.labels):
            self.is_over = True  # a round can't be simulated on some of its images
            return
        found = [(arranged, *self._simulate(arranged)) for arranged in self._arrangements(result)]
        arranged, mean, unit, left, guess = min(found, key=lambda one: (not one[2] > 0, one[3]))
        self.history.append(left)
        self.futile_corrections = 0 if left < PROGRESS_FACTOR * self.unexplained else self.futile_corrections + 1
        better = left < self.unexplained
        if better or (left < MAX_UNEXPLAINED and _is_verified(arranged) > _is_verified(self.best)):
            self.best, self.unexplained = arranged, left
        self.is_over = not unit > 0  # it would point back, or nowhere
        if not self.is_over:
            with torch.no_grad():
                first = predict(self.easier, replace(guess, order=None), defended=False)
            # at equal sizes: that gradients shrink along the round is no error of the image
            like = _best_factor(first, mean)
            corrected = add_scaled(scale_tensors(self.sent, like / unit), add_scaled(first, mean, -like))
            self.easier = replace(self.easier, update=corrected)

    def _arrangements(self, result: Reconstruction) -> list[Reconstruction]:
        """Return the result with labels, its images in each order that an attack may leave open, if these are few."""
        assert result.inputs is not None
        assert self.labels is not None
        own = result.labels is not None and self.view.labels is None
        labels = result.labels if own else self.labels
        assert labels is not None
        turns = list(permutations(range(len(labels)))) if len(labels) <= MAX_PERMUTED_IMAGES else []
        here = [tuple(range(len(labels)))]
        ordered = self.view.order is None and _feeds_parts(self.view)
        moves = turns if (ordered or order_matters(self.view) or not own) and turns else here
        relabelings = turns if ordered and not own else here
        made = []
        for turn in moves:
            index = torch.tensor(turn, device=labels.device)
            fixed = None if result.fixed is None else result.fixed[index]
            mine = labels[index] if own else labels
            made += [
                replace(result, inputs=result.inputs[index], labels=mine[list(other)], fixed=fixed)
                for other in relabelings
            ]
        return made

    def _simulate(self, result: Reconstruction) -> tuple[Tensors, float, float, Candidate]:
        """Return a result's mean gradient, the observed one's length over it, what it leaves, and its guess."""
        assert result.inputs is not None
        assert result.labels is not None
        order = self.view.order or sequential_order(self.view, len(result.labels))
        guess = Candidate(result.inputs, result.labels, order=order)
        with torch.no_grad():
            mean = _simulated_mean_gradient(self.view, predict(self.view, guess, defended=False))
        unit = _best_factor(self.sent, mean)  # clipping hides it
        return mean, unit, _missed_share(self.sent, mean, unit), guess

    def result(self) -> Result:
        """Return the best found, and whether it explains the update."""
        assert self.best is not None
        if isinstance(self.best, NotApplicable) or count_local_steps(self.view) == 1:
            return self.best
        used = {"labels": self.view.labels is not None, "order": order_matters(self.view)}
        known = tuple(name for name, was in used.items() if was and self.history and name not in self.best.knowledge)
        if not self.history:
            return replace(self.best, knowledge=(*self.best.knowledge, ONE_STEP_SURROGATE), verified=None, fixed=None)
        done = self.unexplained < MAX_UNEXPLAINED
        return replace(
            self.best,
            objective=self.unexplained,
            history=tuple(self.history),
            knowledge=(*self.best.knowledge, *known, *(() if done else (ONE_STEP_SURROGATE,))),
            verified=self.best.verified if done else False,
            fixed=self.best.fixed if done else None,
        )


def _feeds_parts(view: ServerView) -> bool:
    """Return whether some step feeds fewer than all images."""
    fed = {size for phase in training_phases(view)[1] or () for step in phase for size in step if size}
    return fed != {view.batch_size}


def _is_order_searched(view: ServerView) -> bool:
    """Return whether an unknown order is one of those that are simulated: of few images, each fed once."""
    fed = sum(size for phase in training_phases(view)[1] or () for step in phase for size in step)
    return fed == view.batch_size and fed <= MAX_ORDERED_IMAGES


def _is_verified(result: Result | None) -> bool:
    return isinstance(result, Reconstruction) and bool(result.verified)


def _best_factor(x: Tensors, y: Tensors) -> float:
    """Return by what y comes nearest to x.

    In double precision: sums over the millions of numbers of a network are off by a thousandth in single precision.
    """
    pairs = [(dense(value).double(), dense(y[name]).double()) for name, value in x.items()]
    return sum(float((a * b).sum()) for a, b in pairs) / max(sum(float(b.square().sum()) for _, b in pairs), TINY)


def _missed_share(x: Tensors, y: Tensors, factor: float) -> float:
    """Return the norm of what a multiple of y misses of x, relative to x; in double precision."""
    pairs = [(dense(value).double(), dense(y[name]).double()) for name, value in x.items()]
    missed = sum(float((a - factor * b).square().sum()) for a, b in pairs)
    return math.sqrt(missed / max(sum(float(a.square().sum()) for a, _ in pairs), TINY))


def _round_step_size(view: ServerView) -> float:
    """Return how far the round's steps move a parameter together.

    A single step of that size hides no rounding of the update.
    """
    phases, schedule = training_phases(view)
    owners = {tuple(phase.assign({name: 0}).get(name) for phase in phases) for name in view.update}
    return max(total_step_size(phases, schedule, mine) for mine in owners)


def _simulated_mean_gradient(view: ServerView, predicted: Tensors) -> Tensors:
    """Return the mean gradient of a simulated round, times `_round_step_size`; nothing was done to its update."""
    mean = mean_gradient(replace(view, update=predicted, defense=Defense()))
    assert not isinstance(mean, NotApplicable)
    return scale_tensors(mean, _round_step_size(view))
