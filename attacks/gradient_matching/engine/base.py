"""The search that all gradient-matching attacks share: guess, predict the update, compare, improve.

The loop itself is `minimization.minimize`. Here views become problems, problems become batches of trials (views x
restarts), and the best trial of each view becomes its result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.gradient_matching.engine.batch_order import assign_labels, rank_orders
from attacks.gradient_matching.engine.batching import ProblemBatch, stack_variables
from attacks.gradient_matching.engine.best_iterates import TrialResult
from attacks.gradient_matching.engine.fit_check import SearchLength, note_misfit
from attacks.gradient_matching.engine.memory_estimate import GIB, bytes_per_trial, split_into_portions, trials_in_cache
from attacks.gradient_matching.engine.minimization import StoppingRule, minimize, pixel_bounds
from attacks.gradient_matching.engine.objectives import Objective
from attacks.gradient_matching.engine.optimizers import make_optimizer
from attacks.gradient_matching.engine.problem import (
    INPUTS,
    LABELS,
    MatchingProblem,
    Variables,
    initial_private,
    private_key,
    unsearchable_reason,
)
from attacks.gradient_matching.engine.regularizers import Regularizer
from attacks.gradient_matching.engine.search_space import PIXEL_SPACE, SearchSpace, TableSpace
from attacks.labels.assignment import order_matters
from attacks.labels.recovery import fixed_labels
from attacks.labels.targets import output_signal
from attacks.result import IDS_UNSEARCHABLE
from attacks.search_control import SearchControl, SearchMonitor
from attacks.update.earlier_rounds import EARLIER_ROUNDS, comparable_rounds
from attacks.update.training_phases import surrogate_hint
from attacks.verification.words import KNOWN_TARGETS
from fl.ranges import Count, CountFrom0, Limit, Share, StepSize, Weight
from fl.seeds import stream
from fl.simulation.nonfinite_updates import all_finite
from fl.tensors import Tensors, leaf_tensors
from fl.view import ServerView

PRIVATE_LR = 0.01
"""Step size of private tensors that no other is set for."""
FAR_TARGET = 100.0
"""How far from zero a number begins that is searched for as a target."""
CONFIDENT_LOGIT = 5.0
"""Logit of a class that was read off, where the search for labels begins there; the others' are 0."""

SIGN_WARNING = (
    "the sign of the update seems turned (after - before), or it is of more images or of another loss than is supposed "
    "(smoothed labels): where it is turned, give weights before - after"
)
"""What a result notes then: a search along an update of the wrong sign looks for something else."""
ESTIMATE_EVALUATIONS = 3
"""Evaluations timed for an estimate of how long a search takes."""


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Attack):
    """Gradient matching over images, labels and whatever is private, on batches of trials (views x restarts).

    Of an observed update u, each trial seeks the variables z = (x, y, p), images x, label logits y (where labels are
    unknown) and private tensors p (where there are any), that minimize

        E(z) = d(F(z), u) + tv_weight TV(x) + landmark_weight d_L(F(z), u) + sum_k R_k(x),

    where F(z) is the update that a client would send who had z (`fl.predict`: the local training, as far as the server
    knows it), d the `objective`, TV the total variation, d_L the squared distance at the method's landmarks, and R_k
    what a subclass adds (`regularizers`). The loop is in `attacks.gradient_matching.engine.minimization`.

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
        lr: step size for images, in normalized units.
        signed: move images by the sign of the gradient (adam only).
        schedule: of the step size (adam only): "step" divides it by 10 at 3/8, 5/8 and 7/8 of the search, "cosine"
            lets it fall to `last_lr`, "none" keeps it.
        warmup: iterations in which the step size first rises in equal parts, at most half of the search (adam only).
        last_lr: where the cosine ends, as a share of `lr`.
        langevin: noise added to every step on the images, as a multiple of the step size (adam only).
        tv_weight: weight of the total variation.
        tv_units: whether it is taken of "normalized" images, as most weights are published, or of their "pixels".
        landmark_weight: weight of the squared distance at the method's landmarks, such as a known input of a layer;
            most methods have none.
        clamp_pixels: keep pixels in [0, 1] during the search.
        init: "normal" starts from N(0, 1) in normalized units, "uniform" from uniform pixels, "gray" from mid gray.
        labels: "auto" takes labels as known, else as read off the classifier, else searches from random ones; "joint"
            searches from those read off, dealt out at random, unless they are known, and so does "auto" where it
            matters which image has which (known order of small batches, whose first restart deals them out as is
            likeliest; most groups of clients); "random" reads none off.
        label_lr: step size for label logits (adam only; these are never signed).
        private_lr: step size for private tensors (adam only; these are never signed): one for all, or one for each
            group of them, by how their names begin: `{"embedding": 0.1, "head": 0.01}`. The longest beginning counts,
            `""` begins all, and what none begins takes 0.01. Unused with "lbfgs".
        history_size: pairs kept by L-BFGS.
        max_step: longest step of L-BFGS, as the root of its mean square over all unknowns; infinity is no limit.
        tolerance: a trial ends where its objective falls below this share of its start.
        patience: a trial ends when its objective has not fallen for this many iterations; 0 never.
        success_threshold: no further restart of a view once one's objective has fallen to this share of its own start;
            0 never. From 1 on the first restart is the last, as with `restarts=1`, so infinity is refused.
        order_candidates: where it is unknown which image fed which batch, so many guesses are ranked by what the labels
            tell (where it is known, so many deals of the labels); each restart begins with the next best. 0 takes the
            images in turn.
        max_parallel_trials: trials evaluated at once, at most; fewer where a CPU is faster with fewer (large networks).
        memory_limit_gib: GiB that a batch's evaluation may keep, by an estimate: fewer trials share a batch then, and a
            view is refused if even one would not fit; infinity is no limit.
        compile: make machine code of searches of 2,000 iterations and more by torch.compile: on a CPU 1.4 to 2.5 times
            as fast after a minute or two of compiling. Takes a C++ compiler, and rounds differently.
    """

    supports_groups: ClassVar[bool] = True
    coupled_restarts: ClassVar[bool] = False
    """Whether the restarts of a view look at each other, and so have to feed their images in the same order."""
    former_names: ClassVar[Mapping[str, str]] = {
        "tv": "tv_weight",
        "landmarks": "landmark_weight",
        "boxed": "clamp_pixels",
        "start": "init",
        "history": "history_size",
        "enough": "success_threshold",
        "orders": "order_candidates",
        "stack": "max_parallel_trials",
        "memory": "memory_limit_gib",
        "compiled": "compile",
    }
    former_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = {
        "tv_units": {"normalised": "normalized"},
        "init": {"grey": "gray"},
    }

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
    tv_weight: Weight = 0.0
    tv_units: Literal["normalized", "pixels"] = "normalized"
    landmark_weight: Weight = 0.1
    clamp_pixels: bool = True
    init: Literal["normal", "uniform", "gray"] = "normal"
    labels: Literal["auto", "joint", "random"] = "auto"
    label_lr: StepSize = 0.1
    private_lr: StepSize | Mapping[str, StepSize] = PRIVATE_LR
    history_size: Count = 100
    max_step: Limit = 0.1
    tolerance: Weight = 0.0
    patience: CountFrom0 = 0
    success_threshold: Weight = 0.0
    order_candidates: CountFrom0 = 100
    max_parallel_trials: Count = 32
    memory_limit_gib: Limit = 8.0
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "max_parallel_trials", "history_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        for name in ("memory_limit_gib", "max_step"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0 (infinity is no limit), got {getattr(self, name)}")
        sizes = ("lr", "label_lr", "last_lr", "langevin", "tv_weight", "landmark_weight")
        names = (*sizes, "warmup", "tolerance", "patience", "success_threshold", "order_candidates")
        given = {name: getattr(self, name) for name in names}
        given |= {
            f"private_lr{begins and f' of {begins!r}'}": size for begins, size in self._private_step_sizes.items()
        }
        for name, value in given.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"expected {name} >= 0 and finite, got {value}")
        for name, what in (("last_lr", ", a share of lr,"), ("balance", "")):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected {name}{what} in [0, 1], got {getattr(self, name)}")

    @property
    def _private_step_sizes(self) -> dict[str, float]:
        """Step sizes for private tensors by how their names begin."""
        return dict(self.private_lr) if isinstance(self.private_lr, Mapping) else {"": self.private_lr}

    def _unused_steps(self, private: Iterable[str]) -> list[str]:
        """Return the step sizes, other than default ones, that are of no private tensor: slips of the pen."""
        own = next(field for field in fields(self) if field.name == "private_lr")
        default = own.default if own.default_factory is MISSING else own.default_factory()
        if self.private_lr == default:
            return []
        return [begins for begins in self._private_step_sizes if not any(name.startswith(begins) for name in private)]

    def private_step(self, name: str) -> float:
        """Return the step size for the private tensor `name`."""
        fits = [begins for begins in self._private_step_sizes if name.startswith(begins)]
        return self._private_step_sizes[max(fits, key=len)] if fits else PRIVATE_LR

    @classmethod
    def example(cls) -> GradientMatching:
        """Return a few iterations of two restarts."""
        return cls(iterations=5, restarts=2)

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        """Return the views' indices in portions that each fill one stack of trials."""
        return split_into_portions(views, self.max_parallel_trials, self.restarts)

    # ---- the search: views -> problems -> batches of trials -> the best trial of each view ---------------------------
    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Attack several views; those of equal shape share their batches."""
        return self.run_controlled(views, seeds, SearchControl())

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        """Attack several views within what `control` allows; a view that no trial was run for is not applicable."""
        results, groups = self._group(views, seeds)
        sized = {key: self._batch_size(members[0]) for key, members in groups.items()}
        for key, size in sized.items():
            if isinstance(size, NotApplicable):
                results |= {target.index: size for target in groups[key]}
        fitting = [(groups[key], size) for key, size in sized.items() if isinstance(size, int)]
        batches = sum(self._count_batches(len(members), size) for members, size in fitting)
        monitor = SearchMonitor(control, batches, self.iterations)
        for members, size in fitting:
            results |= self._search_group(members, size, monitor)
        return [results[i] for i in range(len(views))]

    def estimate_seconds(self, views: Sequence[ServerView]) -> float | None:
        """Return about how long `run` on these views takes here in one process, by timing a few iterations.

        An upper bound, as a rule: long searches become faster once they are traced, and trials may end early.
        """
        results, groups = self._group(views, [0] * len(views))
        total = 0.0
        for members in groups.values():
            size = self._batch_size(members[0])
            if isinstance(size, NotApplicable):
                continue
            chunk = [Trial(target, restart) for target in members for restart in range(self.restarts)][:size]
            batch = ProblemBatch([trial.target.problem for trial in chunk])
            variables = stack_variables(self._initial_variables(trial) for trial in chunk)
            self.evaluate_batch(batch, variables)  # whatever is set up once
            began = time.perf_counter()
            for _ in range(ESTIMATE_EVALUATIONS):
                self.evaluate_batch(batch, variables)
            each = (time.perf_counter() - began) / ESTIMATE_EVALUATIONS
            total += each * (self.iterations + 1) * self._count_batches(len(members), size)
        return total if len(results) < len(views) else 0.0

    def _group(
        self, views: Sequence[ServerView], seeds: Sequence[int]
    ) -> tuple[dict[int, Result], dict[object, list[Target]]]:
        """Return refusals by the view's index, and the other views as problems, by what they can share a batch by."""
        refused: dict[int, Result] = {}
        groups: dict[object, list[Target]] = {}
        for i, (view, seed) in enumerate(zip(views, seeds, strict=True)):
            reason = self.refuse(view)
            if reason is not None:
                refused[i] = reason
                continue
            problem = self.build_problem(view)
            groups.setdefault(problem.key, []).append(Target(i, problem, seed))
        return refused, groups

    def _search_group(self, members: Sequence[Target], size: int, monitor: SearchMonitor) -> dict[int, Result]:
        """Run the trials of views that can share batches of `size`; returns the results by the views' indices."""
        # trials that look at each other have to feed their images alike
        count = 1 if self.coupled_restarts else self.restarts
        orders = {target.index: rank_orders(target.problem, self.order_candidates, count) for target in members}
        best = {target.index: BestTrial() for target in members}
        stopped = ""
        for trials in self._trial_waves(members, best):
            for begin in range(0, len(trials), size):
                stopped = stopped or monitor.begin_batch()
                if stopped:
                    break
                chunk = trials[begin : begin + size]
                problems = [self._with_order(trial, orders) for trial in chunk]
                for trial, problem, found in zip(
                    chunk, problems, self._search_batch(chunk, problems, monitor), strict=True
                ):
                    best[trial.target.index].offer(self, trial.target.problem, problem, found)
        return {target.index: self._finalize(best[target.index], stopped) for target in members}

    def _with_order(self, trial: Trial, orders: Mapping[int, Sequence[MatchingProblem]]) -> MatchingProblem:
        """Return the trial's problem with the order of images that its restart begins with."""
        candidates = orders[trial.target.index]
        return candidates[trial.restart % len(candidates)]

    def _search_batch(
        self, trials: Sequence[Trial], problems: Sequence[MatchingProblem], monitor: SearchMonitor
    ) -> list[TrialResult]:
        """Minimize the objectives of one batch of trials."""
        variables = stack_variables(self._initial_variables(trial) for trial in trials)
        noise = [stream(trial.target.seed, "langevin", trial.restart) for trial in trials]
        return self.search(ProblemBatch(problems, compiled=self.compile), variables, noise, monitor)

    def _initial_variables(self, trial: Trial) -> Variables:
        return self.initial_variables(trial.target.problem, trial.target.seed, trial.restart)

    def search(
        self,
        batch: ProblemBatch,
        variables: Variables,
        noise: Sequence[torch.Generator],
        monitor: SearchMonitor | None = None,
    ) -> list[TrialResult]:
        """Minimize the objectives of a batch from `variables` on, each trial with its own generator of noise.

        Args:
            batch: the problems of T trials.
            variables: where they start, one row each.
            noise: a generator for each trial.
            monitor: follows the search; None for nobody.
        """
        return minimize(
            batch,
            variables,
            make_optimizer(self, noise),
            StoppingRule(self.iterations, self.tolerance, self.patience),
            evaluate=self.evaluate_batch,
            bounds=pixel_bounds(batch.problems[0]) if self.clamp_pixels else None,
            monitor=monitor,
        )

    def _trial_waves(self, members: Sequence[Target], best: Mapping[int, BestTrial]) -> Iterator[list[Trial]]:
        """Yield trials to run together: all, or restart by restart of views without success where it can be told."""
        if self.success_threshold == 0:
            yield [Trial(target, restart) for target in members for restart in range(self.restarts)]
            return
        for restart in range(self.restarts):
            yield [
                Trial(target, restart) for target in members if not best[target.index].least <= self.success_threshold
            ]

    def _count_batches(self, views: int, size: int) -> int:
        """Return how many batches of `size` the trials of so many views fill, at most."""
        if self.success_threshold == 0:
            return -(-views * self.restarts // size)
        return self.restarts * -(-views // size)

    def _batch_size(self, target: Target) -> int | NotApplicable:
        """Return how many trials share a batch: as many as go fastest, within the memory allowed."""
        # any restart is as large; the first may look for the likeliest labels beside
        problem = target.problem
        each = bytes_per_trial(problem, self._initial_variables(Trial(target, 1))) / GIB
        room = int(
            min(self.memory_limit_gib / max(each, 1 / GIB), self.max_parallel_trials, trials_in_cache(problem.view))
        )
        size = replace(self, max_parallel_trials=max(room, 1)).batch_capacity()
        if room and (size <= room or size * each <= self.memory_limit_gib):
            return size
        steps = sum(map(len, problem.view.schedule or ()))
        return NotApplicable(
            f"{size} trial(s) of {steps} local step(s) would keep about {size * each:.3g} GiB, above "
            f"memory_limit_gib={self.memory_limit_gib:g}: raise it{surrogate_hint(problem.view, ', or ')}",
            limit=True,
        )

    def _finalize(self, best: BestTrial, stopped: str) -> Result:
        """Return the result of a view's best trial with what is open about it, or why there is none."""
        result = best.result
        if result is None:
            reason = f"no trial was run before {stopped}" if stopped else "no trial was run"
            return NotApplicable(reason, limit=bool(stopped), cut_short=reason if stopped else "")
        cut_short = best.cut_short or (f"not all trials were run to their end before {stopped}" if stopped else "")
        cut_short = cut_short or best.other_cut_short
        if cut_short:
            result = replace(result, note="; ".join(filter(None, (result.note, cut_short))), cut_short=cut_short)
        assert best.problem is not None
        constant_lr = 3 / 8 if self.schedule == "step" and self.optimizer == "adam" else 1.0
        search = SearchLength(self.iterations, constant_lr, best.cut_short)
        result = note_misfit(result, best.problem, best.variables, search)
        if math.isfinite(result.objective):
            return result
        # nothing was compared: an iterate whose objective is no number is as good as any
        return NotApplicable(
            f"the objective ({self.objective}) of no iterate is a finite number: the network overflows, or the "
            "update is far smaller than what the method's step size makes; give the method that it was made with",
            limit=True,
            cut_short=cut_short,
        )

    def refuse(self, view: ServerView) -> NotApplicable | None:
        """Return why this attack says nothing about `view`, or None."""
        if not view.update:
            return NotApplicable(f"{view.method.name} shares nothing: there is no update to match")
        if view.task.inputs.has_ids:
            return NotApplicable(IDS_UNSEARCHABLE, limit=True)
        if view.batch_size is None:
            return NotApplicable("the number of images is unknown")
        if view.schedule is None:
            return NotApplicable(
                f"the local schedule is unknown, so no update can be predicted{surrogate_hint(view, ': ')}"
            )
        if (reason := unsearchable_reason(view)) is not None:
            return NotApplicable(reason, limit=True)
        if (reason := _unknown_targets(view)) is not None:
            return NotApplicable(reason, limit=True)
        if not all_finite(view.update):
            return NotApplicable("the update has numbers that are not finite")
        problem = MatchingProblem(view, None, self.objective)
        if not any(value.any() for value in leaf_tensors(problem.observed)):
            return NotApplicable("the update is zero, or nothing but weight decay: no gradient reached it")
        if view.batch_size == 0:
            return NotApplicable("no client of the group fed an image")
        return None

    # ---- what a subclass may change ----------------------------------------------------------------------------------
    def build_problem(self, view: ServerView) -> MatchingProblem:
        """Return what is searched for, and compared with what."""
        labels = fixed_labels(view, self.label_mode(view))
        space, terms = self.search_space(view), self.regularizers(view)
        compared = (self.objective, self.tv_weight, self.landmark_weight, self.tv_units, space, terms, self.balance)
        now = MatchingProblem(view, labels, *compared)
        searchable = [earlier for earlier in comparable_rounds(view) if self.refuse(earlier) is None]
        past = [replace(now, view=earlier, tv_weight=0.0, regularizers=()) for earlier in searchable]
        return replace(now, earlier=tuple(rank_orders(problem, self.order_candidates, 1)[0] for problem in past))

    def label_mode(self, view: ServerView) -> str:
        """Return the mode `labels`; "auto" becomes "joint" where it matters which image has which label."""
        return "joint" if self.labels == "auto" and order_matters(view) else self.labels

    def search_space(self, view: ServerView) -> SearchSpace:
        """Return what images are made from."""
        categories = view.task.inputs.categories
        return TableSpace(categories) if categories else PIXEL_SPACE

    def regularizers(self, view: ServerView) -> tuple[Regularizer, ...]:
        """Return further terms of the objective."""
        return ()

    def batch_capacity(self) -> int:
        """Return how many trials share a batch at most; the restarts of a view lie side by side."""
        return self.max_parallel_trials

    def evaluate_batch(self, batch: ProblemBatch, variables: Variables) -> tuple[Tensor, Variables]:
        """Return the objectives (T,) and their gradients by variable."""
        return batch.evaluate(variables)

    def initial_variables(self, problem: MatchingProblem, seed: int, restart: int) -> Variables:
        """Return where a trial starts: images, label logits where labels are searched for, and private tensors.

        Args:
            problem: of the view.
            seed: of the attack on it.
            restart: number of the trial; each starts elsewhere.
        """
        view = problem.view
        draw = stream(seed, "attack", restart)
        count = view.batch_size or 1
        offset, scale = (torch.tensor(x).view(-1, 1, 1) for x in problem.space.units(view.task))
        shape = (count, *problem.space.shape(view.task))
        start = problem.space.start or self.init
        if start == "normal":
            inputs = torch.randn(shape, generator=draw)
        elif start == "uniform":
            inputs = (torch.rand(shape, generator=draw) - offset) / scale
        else:
            inputs = ((torch.full(shape, 0.5) - offset) / scale).float()
        made = {INPUTS: inputs}
        if problem.labels is None:
            made[LABELS] = self._initial_logits(problem, draw, restart)
        for name, size in view.private.items():
            known = (view.private_init or {}).get(name)
            made[private_key(name)] = known if isinstance(known, Tensor) else initial_private(name, size, draw)
        return {k: v.to(dtype=view.dtype, device=view.device) for k, v in made.items()}

    def _initial_logits(self, problem: MatchingProblem, draw: torch.Generator, restart: int) -> Tensor:
        """Return where the search for labels begins (N, ...): those read off, dealt as is likeliest, then at random."""
        task, count, classes = problem.view.task, problem.view.batch_size or 1, problem.view.task.num_classes
        recovered = problem.recovered_labels if self.label_mode(problem.view) == "joint" else None
        if not task.loss.is_cross_entropy and not task.loss.has_exact_targets and self.objective == "cosine":
            signal = output_signal(problem.view)
            if signal is not None:  # a target far away: what flows back then keeps its direction, whatever the input is
                return -(FAR_TARGET / signal.norm()) * signal[None].cpu()
        if recovered is None:
            return torch.randn(count, *(task.loss.variable_shape(task.output_shape) or ()), generator=draw)
        likeliest = (
            assign_labels(problem, self.order_candidates) if restart == 0 and order_matters(problem.view) else None
        )
        own = recovered[torch.randperm(count, generator=draw)] if likeliest is None else likeliest
        return CONFIDENT_LOGIT * torch.nn.functional.one_hot(own.cpu(), classes)

    def build_result(
        self, problem: MatchingProblem, row: Variables, objective: float, history: tuple[float, ...]
    ) -> Reconstruction:
        """Return the result of one trial.

        Args:
            problem: that was searched.
            row: the best iterate.
            objective: there, relative to where the view's first trial began.
            history: the objective along the search, in the same unit.
        """
        view = problem.view
        labels = problem.labels
        if LABELS in row:
            labels = view.task.loss.harden(row[LABELS])
        flipped = problem.update.sign_flipped
        notes = [SIGN_WARNING] if flipped else []
        if view.private and (unused := self._unused_steps(view.private)):
            notes.append(f"private_lr: no private tensor begins with {' or '.join(unused)}: {', '.join(view.private)}")
        private: Tensors = {name: row[private_key(name)] for name in view.private}
        knowledge = {
            "labels": view.labels is not None,
            "order": view.order is not None,
            "draws": view.draws is not None,
            "private_init": bool(view.private and view.private_init),
            EARLIER_ROUNDS: bool(problem.earlier),
        }
        return Reconstruction(
            inputs=problem.images_of(row[INPUTS]).clamp(0, 1),
            labels=labels if view.method.uses_labels and (view.labels is not None or not flipped) else None,
            objective=objective,
            history=history,
            private=private,
            knowledge=tuple(name for name, used in knowledge.items() if used),
            note="; ".join(notes),
        )


def _unknown_targets(view: ServerView) -> str | None:
    """Return why the targets can't be searched for, where they are unknown; else None."""
    task = view.task
    known = view.labels is not None or not view.method.uses_labels
    if known or task.loss.variable_shape(task.output_shape) is not None:
        return None
    if task.loss.takes_classes:
        return f"the classes are unknown, and a search tries none under a loss of one's own: {KNOWN_TARGETS}"
    return (
        "the targets are unknown, and nothing says what they can be under a loss of one's own: state that they are "
        "numbers in the outputs' shape (--targets free, --targets binary or --targets probabilities), or "
        f"{KNOWN_TARGETS}"
    )


@dataclass(frozen=True)
class Target:
    """A view to be attacked: its index among those of the call, its problem and its seed."""

    index: int
    problem: MatchingProblem
    seed: int


@dataclass(frozen=True)
class Trial:
    """One search for a target; each restart starts elsewhere."""

    target: Target
    restart: int


@dataclass
class BestTrial:
    """The trial of one view with the smallest objective so far; not-a-number loses.

    Attributes:
        result: of the trial.
        problem: with the order of images that it fed.
        variables: its best iterate.
        cut_short: what cut it short, in words; empty where nothing did.
        other_cut_short: what cut another trial of the view short, which might have come further.
        least: the smallest objective of any trial, relative to its own start.
        reference: the objective where the view's first trial began, to which those of all trials are relative.
    """

    result: Reconstruction | None = None
    problem: MatchingProblem | None = None
    variables: Variables = field(default_factory=dict)
    cut_short: str = ""
    other_cut_short: str = ""
    least: float = math.inf
    reference: float | None = None

    def offer(
        self, attack: GradientMatching, target: MatchingProblem, problem: MatchingProblem, found: TrialResult
    ) -> None:
        """Take another trial's result where it is better; `problem` is `target` with the order of its restart."""
        if self.reference is None:
            self.reference = found.start_objective
        unit = found.start_objective / self.reference
        history = tuple(value * unit for value in found.history)
        result = attack.build_result(target, found.variables, found.objective * unit, history)
        self.least = min(self.least, found.objective)
        if found.cut_short:
            self.other_cut_short = f"of another trial {found.cut_short}"
        if self.result is None or result.objective < self.result.objective:
            self.result, self.problem = result, problem
            self.variables, self.cut_short = found.variables, found.cut_short
