"""The search all gradient-matching attacks share: guess, predict the update, compare, improve."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.gradient_matching.engine.batch_order import dealt, ranked
from attacks.gradient_matching.engine.batching import Posed, Stack, stacked
from attacks.gradient_matching.engine.best_iterates import Found, Watch
from attacks.gradient_matching.engine.fit_check import doubted
from attacks.gradient_matching.engine.memory_estimate import GIB, cached, per_trial, portions
from attacks.gradient_matching.engine.objectives import Objective
from attacks.gradient_matching.engine.optimizers import Adam, Quasi
from attacks.gradient_matching.engine.problem import INPUTS, LABELS, Problem, Variables, guess, opaque, private_key
from attacks.gradient_matching.engine.regularizers import Term
from attacks.gradient_matching.engine.search_space import IMAGES, Space
from attacks.labels.assignment import told_apart
from attacks.labels.recovery import fixed_labels
from attacks.update.earlier_rounds import USED, repeated
from attacks.update.hints import surrogate_hint
from fl.ranges import Count, CountFrom0, Limit, Share, StepSize, Weight
from fl.seeds import stream
from fl.simulation.nonfinite_updates import finite
from fl.tensors import Tensors, parts
from fl.view import ServerView

PRIVATE_LR = 0.01
"""Step size of private tensors that no other is set for."""
SURE = 5.0
"""Logit of a class that was read off, where the search for labels begins there; the others' are 0."""

SUSPECT = (
    "the sign of the update seems turned (after - before), or it is of more images or of another loss than is supposed "
    "(smoothed labels): where it is turned, give weights before - after"
)
"""What a result notes then: a search along a turned update looks for something else."""


@dataclass(frozen=True, kw_only=True)
class Matching(Attack):
    """Gradient matching over images, labels and whatever is private, on stacks of trials (images x restarts).

    The objective is divided by its value at the start of each trial and no tolerance is absolute, so results do not
    depend on the unit of the update. The iterate and the restart with the smallest finite objective are kept; where the
    step size falls, of the last eighth of the search: with max pooling the objective jumps, and an iterate that large
    steps made by chance fits better than it looks. Restarts are compared, and the result's objective is given, relative
    to where the first one of the view began.

    Attributes:
        iterations: of the search.
        restarts: trials per view, from different random starts.
        objective: "cosine", "l2", "l1" or "simlocal" (`attacks.gradient_matching.engine.objectives`).
        balance: how much tensors of small entries count: each is divided by the power `balance` of the root mean square
            of what was observed of it, a thousandth of the largest at least. 0 compares updates as they are; 1 gives
            every number of every tensor the same say, and is the likelihood under noise relative to each tensor's size.
            Which is better depends on network and images, not on the noise (benchmarks/results/settings.md).
        optimizer: "adam", or "lbfgs" without line search.
        lr: step size for images, in normalised units.
        signed: move images by the sign of the gradient (adam only).
        schedule: of the step size (adam only): "step" divides it by 10 at 3/8, 5/8 and 7/8 of the search, "cosine"
            lets it fall to `last_lr`, "none" keeps it.
        warmup: iterations in which the step size first rises in equal parts, at most half of the search (adam only).
        last_lr: where the cosine ends, as a share of `lr`.
        langevin: noise added to every step on the images, as a multiple of the step size (adam only).
        tv: weight of the total variation.
        tv_units: whether it is taken of "normalised" images, as most weights are published, or of their "pixels".
        landmarks: weight of the squared distance at the method's landmarks, such as a known input of a layer; most
            methods have none.
        boxed: keep pixels in [0, 1] during the search.
        start: "normal" starts from N(0, 1) in normalised units, "uniform" from uniform pixels, "grey" from mid grey.
        labels: "auto" takes labels as known, else as read off the classifier, else searches from random ones; "joint"
            searches from those read off, dealt out at random, unless they are known, and so does "auto" where it
            matters which image has which (known order of small batches, whose first restart deals them out as is
            likeliest; most groups of clients); "random" reads none off.
        label_lr: step size for label logits (adam only; these are never signed).
        private_lr: step size for private tensors (adam only; these are never signed): one for all, or one for each
            group of them, by how their names begin: `{"embedding": 0.1, "head": 0.01}`. The longest beginning counts,
            `""` begins all, and what none begins takes 0.01. Unused with "lbfgs".
        history: pairs kept by L-BFGS.
        max_step: longest step of L-BFGS, as the root of its mean square over all unknowns; infinity is no limit.
        tolerance: a trial ends where its objective falls below this share of its start.
        patience: a trial ends when its objective has not fallen for this many iterations; 0 never.
        enough: no further restart of a view once one's objective has fallen to this share of its own start; 0 never.
            From 1 on the first restart is the last, as with `restarts=1`, so infinity is refused.
        orders: where it is unknown which image fed which batch, so many guesses are ranked by what the labels tell
            (where it is known, so many deals of the labels);
            each restart begins with the next best. 0 takes the images in turn.
        stack: trials evaluated at once, at most; fewer where a CPU is faster with fewer (large networks).
        memory: GiB that a stack's evaluation may keep, by an estimate: fewer trials share a stack then, and a view of
            which even one would not fit is refused; infinity is no limit.
        compiled: make machine code of searches of 2,000 iterations and more by torch.compile: on a CPU 1.4 to 2.5 times
            as fast after a minute or two of compiling. Takes a C++ compiler, and rounds differently.
    """

    groups: ClassVar[bool] = True

    iterations: Count = 1000
    restarts: Count = 1
    objective: Objective = "cosine"
    balance: Share = 0.0
    optimizer: Literal["adam", "lbfgs"] = "adam"
    lr: StepSize = 0.1
    signed: bool = True
    schedule: Literal["step", "cosine", "none"] = "step"
    warmup: CountFrom0 = 0
    last_lr: Share = 0.0
    langevin: Weight = 0.0
    tv: Weight = 0.0
    tv_units: Literal["normalised", "pixels"] = "normalised"
    landmarks: Weight = 0.1
    boxed: bool = True
    start: Literal["normal", "uniform", "grey"] = "normal"
    labels: Literal["auto", "joint", "random"] = "auto"
    label_lr: StepSize = 0.1
    private_lr: StepSize | Mapping[str, StepSize] = PRIVATE_LR
    history: Count = 100
    max_step: Limit = 0.1
    tolerance: Weight = 0.0
    patience: CountFrom0 = 0
    enough: Weight = 0.0
    orders: CountFrom0 = 100
    stack: Count = 32
    memory: Limit = 8.0
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "stack", "history"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        for name in ("memory", "max_step"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0 (infinity is no limit), got {getattr(self, name)}")
        sizes = ("lr", "label_lr", "last_lr", "langevin", "tv", "landmarks")
        names = (*sizes, "warmup", "tolerance", "patience", "enough", "orders")
        given = {name: getattr(self, name) for name in names}
        given |= {f"private_lr{begins and f' of {begins!r}'}": size for begins, size in self._steps.items()}
        for name, value in given.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"expected {name} >= 0 and finite, got {value}")
        for name, what in (("last_lr", ", a share of lr,"), ("balance", "")):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected {name}{what} in [0, 1], got {getattr(self, name)}")

    @property
    def _steps(self) -> dict[str, float]:
        """Step sizes for private tensors by how their names begin."""
        return dict(self.private_lr) if isinstance(self.private_lr, Mapping) else {"": self.private_lr}

    def _idle(self, private: Iterable[str]) -> list[str]:
        """Which step sizes, if not those by default, are of no private tensor: slips of the pen."""
        own = next(field for field in fields(self) if field.name == "private_lr")
        default = own.default if own.default_factory is MISSING else own.default_factory()
        if self.private_lr == default:
            return []
        return [begins for begins in self._steps if not any(name.startswith(begins) for name in private)]

    def private_step(self, name: str) -> float:
        """The step size for the private tensor `name`."""
        fits = [begins for begins in self._steps if name.startswith(begins)]
        return self._steps[max(fits, key=len)] if fits else PRIVATE_LR

    @classmethod
    def example(cls) -> Matching:
        """A few iterations of two restarts."""
        return cls(iterations=5, restarts=2)

    def portions(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        """Those that fill a stack."""
        return portions(views, self.stack, self.restarts)

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Attack several views; those of equal shape share their stacks."""
        results: list[Result | None] = [self.refuse(view) for view in views]
        groups: dict[object, list[tuple[int, Problem]]] = {}
        for i, view in enumerate(views):
            if results[i] is None:
                problem = self._problem(view)
                groups.setdefault(problem.key, []).append((i, problem))
        for members in groups.values():
            size = self._fitting(*members[0], seeds)
            if isinstance(size, NotApplicable):
                results = [size if i in dict(members) else result for i, result in enumerate(results)]
                continue
            # trials that look at each other have to feed their images alike
            apart = self.restarts if type(self)._evaluate is Matching._evaluate else 1
            guesses = {i: ranked(problem, self.orders, apart) for i, problem in members}
            starts: dict[int, float] = {}
            done: set[int] = set()
            ends: dict[int, tuple[Problem, Variables]] = {}  # of the best trials
            for trials in self._waves(members, done):
                for begin in range(0, len(trials), size):
                    chunk = trials[begin : begin + size]
                    rows = [self._start(problem, seeds[i], r) for i, problem, r in chunk]
                    noise = [stream(seeds[i], "langevin", r) for i, _, r in chunk]
                    fed = Stack([guesses[i][r % len(guesses[i])] for i, _, r in chunk], compiled=self.compiled)
                    found = self.search(fed, stacked(rows), noise)
                    for (i, problem, r), (row, value, history, start) in zip(chunk, found, strict=True):
                        unit = start / starts.setdefault(i, start)
                        result = self._result(problem, row, value * unit, tuple(past * unit for past in history))
                        before, results[i] = results[i], _better(results[i], result)
                        if results[i] is not before:
                            ends[i] = guesses[i][r % len(guesses[i])], row
                        if value <= self.enough:
                            done.add(i)
            fixed = 3 / 8 if self.schedule == "step" and self.optimizer == "adam" else 1.0
            for i, end in ends.items():
                results[i] = doubted(results[i], *end, self.iterations, fixed=fixed)
        return [self._told(result) for result in results]

    def _told(self, result: Result | None) -> Result:
        """The result, unless nothing was compared: an iterate whose objective is no number is as good as any."""
        if isinstance(result, Reconstruction) and not math.isfinite(result.objective):
            return NotApplicable(
                f"the objective ({self.objective}) of no iterate is a finite number: the network overflows, or the "
                "update is far smaller than what the method's step size makes; give the method that it was made with",
                limit=True,
            )
        return NotApplicable("no trial was run") if result is None else result

    def _fitting(self, index: int, problem: Problem, seeds: Sequence[int]) -> int | NotApplicable:
        """How many trials share a stack: as many as go fastest, within the memory allowed."""
        # any restart is as large; the first may look for the likeliest labels beside
        each = per_trial(problem, self._start(problem, seeds[index], 1)) / GIB
        room = int(min(self.memory / max(each, 1 / GIB), self.stack, cached(problem.view)))
        size = replace(self, stack=max(room, 1))._chunk()
        if room and (size <= room or size * each <= self.memory):
            return size
        steps = sum(map(len, problem.view.schedule or ()))
        return NotApplicable(
            f"{size} trial(s) of {steps} local step(s) would keep about {size * each:.3g} GiB, above "
            f"memory={self.memory:g}: raise it{surrogate_hint(problem.view, ', or ')}",
            limit=True,
        )

    def _waves(
        self, members: Sequence[tuple[int, Problem]], done: Container[int]
    ) -> Iterator[list[tuple[int, Problem, int]]]:
        """Trials to run together: all at once, or restart by restart of views not `done` where success can be told."""
        if self.enough == 0:
            yield [(i, problem, r) for i, problem in members for r in range(self.restarts)]
            return
        for r in range(self.restarts):
            yield [(i, problem, r) for i, problem in members if i not in done]

    def refuse(self, view: ServerView) -> NotApplicable | None:
        """Why this attack says nothing about `view`, or None."""
        if not view.update:
            return NotApplicable(f"{view.method.name} shares nothing: there is no update to match")
        if view.batch_size is None:
            return NotApplicable("the number of images is unknown")
        if view.schedule is None:
            return NotApplicable(
                f"the local schedule is unknown, so no update can be predicted{surrogate_hint(view, ': ')}"
            )
        if (reason := opaque(view)) is not None:
            return NotApplicable(reason, limit=True)
        if not finite(view.update):
            return NotApplicable("the update has numbers that are not finite")
        problem = Problem(view, None, self.objective)
        if not any(value.any() for value in parts(problem.observed)):
            return NotApplicable("the update is zero, or nothing but weight decay: no gradient reached it")
        if view.batch_size == 0:
            return NotApplicable("no client of the group fed an image")
        return None

    # ---- what a subclass may change ----------------------------------------------------------------------------------
    def _problem(self, view: ServerView) -> Problem:
        """What is searched for, and compared with what."""
        labels = fixed_labels(view, self._rule(view))
        space, terms = self._space(view), self._terms(view)
        compared = (self.objective, self.tv, self.landmarks, self.tv_units, space, terms, self.balance)
        now = Problem(view, labels, *compared)
        told = [earlier for earlier in repeated(view) if self.refuse(earlier) is None]
        past = [replace(now, view=earlier, tv=0.0, terms=()) for earlier in told]
        return replace(now, earlier=tuple(ranked(problem, self.orders, 1)[0] for problem in past))

    def _rule(self, view: ServerView) -> str:
        """`labels`, but that those read off are dealt out where it matters which image has which."""
        return "joint" if self.labels == "auto" and told_apart(view) else self.labels

    def _space(self, view: ServerView) -> Space:
        """What images are made from."""
        return IMAGES

    def _terms(self, view: ServerView) -> tuple[Term, ...]:
        """Further terms of the objective."""
        return ()

    def _chunk(self) -> int:
        """How many trials share a stack; the restarts of a view lie side by side."""
        return self.stack

    def _evaluate(self, stack: Stack, variables: Variables) -> tuple[Tensor, Variables]:
        """Objectives (T,) and their gradients by variable."""
        return stack.evaluate(variables)

    # ---- one trial ---------------------------------------------------------------------------------------------------
    def _start(self, problem: Problem, seed: int, restart: int) -> Variables:
        view = problem.view
        draw = stream(seed, "attack", restart)
        count = view.batch_size or 1
        offset, scale = (torch.tensor(x).view(-1, 1, 1) for x in problem.space.units(view.task))
        shape = (count, *problem.space.shape(view.task))
        start = problem.space.start or self.start
        if start == "normal":
            inputs = torch.randn(shape, generator=draw)
        elif start == "uniform":
            inputs = (torch.rand(shape, generator=draw) - offset) / scale
        else:
            inputs = ((torch.full(shape, 0.5) - offset) / scale).float()
        made = {INPUTS: inputs}
        if problem.labels is None:
            made[LABELS] = self._logits(problem, draw, restart)
        for name, size in view.private.items():
            known = (view.private_init or {}).get(name)
            made[private_key(name)] = known if isinstance(known, Tensor) else guess(name, size, draw)
        return {k: v.to(dtype=view.dtype, device=view.device) for k, v in made.items()}

    def _logits(self, problem: Problem, draw: torch.Generator, restart: int) -> Tensor:
        """Where the search for labels begins (N, K): those read off, dealt out as is likeliest, then at random."""
        count, classes = problem.view.batch_size or 1, problem.view.task.num_classes
        counted = problem.counted if self._rule(problem.view) == "joint" else None
        if counted is None:
            return torch.randn(count, classes, generator=draw)
        likeliest = dealt(problem, self.orders) if restart == 0 and told_apart(problem.view) else None
        mine = counted[torch.randperm(count, generator=draw)] if likeliest is None else likeliest
        return SURE * torch.nn.functional.one_hot(mine.cpu(), classes)

    def _result(self, problem: Problem, row: Variables, objective: float, history: tuple[float, ...]) -> Reconstruction:
        view = problem.view
        labels = problem.labels
        if LABELS in row:
            labels = row[LABELS].argmax(-1)
        odd = problem.update.sign_flipped
        notes = [SUSPECT] if odd else []
        if view.private and (idle := self._idle(view.private)):
            notes.append(f"private_lr: no private tensor begins with {' or '.join(idle)}: {', '.join(view.private)}")
        private: Tensors = {name: row[private_key(name)] for name in view.private}
        known = {
            "labels": view.labels is not None,
            "order": view.order is not None,
            "draws": view.draws is not None,
            "private_init": bool(view.private and view.private_init),
            USED: bool(problem.earlier),
        }
        return Reconstruction(
            inputs=problem.pixels(row[INPUTS]).clamp(0, 1),
            labels=labels if view.method.uses_labels and (view.labels is not None or not odd) else None,
            objective=objective,
            history=history,
            private=private,
            knowledge=tuple(name for name, used in known.items() if used),
            note="; ".join(notes),
        )

    # ---- the search --------------------------------------------------------------------------------------------------
    def search(self, stack: Stack, variables: Variables, noise: Sequence[torch.Generator]) -> list[Found]:
        """The stack's trials from `variables` on, each with its own generator of noise."""
        limits = box(stack.problems[0]) if self.boxed else None
        mover = Adam(self, noise) if self.optimizer == "adam" else Quasi(self)
        watch = Watch(variables, mover.settled)
        for iteration in range(self.iterations + 1):
            stack.ahead(self.iterations - iteration, variables)
            values, grads = self._evaluate(stack, variables)
            relative = watch.note(iteration, values, variables)
            if iteration == self.iterations:
                break
            rows = watch.going(relative, self.tolerance, self.patience)
            if rows is not None:
                if not len(rows):
                    break
                stack.keep(rows)
                mover.keep(rows)
                watch.keep(rows)
                variables = {k: v[rows] for k, v in variables.items()}
                grads = {k: v[rows] for k, v in grads.items()}
            scale = watch.scale
            grads = {k: g / scale.view(-1, *[1] * (g.ndim - 1)) for k, g in grads.items()}
            variables = mover.move(variables, grads)
            if limits is not None:
                variables[INPUTS] = variables[INPUTS].clamp(*limits)
        return watch.results()


def box(problem: Posed) -> tuple[Tensor, Tensor]:
    """The least and the largest value of pixels in the units searched, (C, 1, 1) each."""
    offset, scale = problem.constants["offset"], problem.constants["scale"]
    return (0 - offset) / scale, (1 - offset) / scale


def _better(old: Result | None, new: Reconstruction) -> Reconstruction:
    """The restart with the smaller objective; not-a-number loses."""
    return old if isinstance(old, Reconstruction) and not new.objective < old.objective else new
