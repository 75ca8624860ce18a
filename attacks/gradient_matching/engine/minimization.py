"""The loop of a search: evaluate, keep the best, take a step, put pixels back into their range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attacks.gradient_matching.engine.batching import BatchableProblem, ProblemBatch
from attacks.gradient_matching.engine.best_iterates import BestIterates, TrialResult
from attacks.gradient_matching.engine.optimizers import Optimizer
from attacks.gradient_matching.engine.problem import INPUTS, Variables
from attacks.search_control import INTERRUPT, SearchMonitor

BatchEvaluation = Callable[[ProblemBatch, Variables], tuple[Tensor, Variables]]
"""Objectives (T,) of a batch and their gradients by variable."""


@dataclass(frozen=True)
class StoppingRule:
    """When a trial ends.

    Attributes:
        iterations: steps taken at most.
        tolerance: a trial ends where its objective is at this share of its start, or below.
        patience: a trial ends after so many iterations without a better iterate; 0 never.
    """

    iterations: int
    tolerance: float = 0.0
    patience: int = 0


def minimize(
    batch: ProblemBatch,
    variables: Variables,
    optimizer: Optimizer,
    stopping: StoppingRule,
    evaluate: BatchEvaluation = ProblemBatch.evaluate,
    bounds: tuple[Tensor, Tensor] | None = None,
    monitor: SearchMonitor | None = None,
) -> list[TrialResult]:
    """Minimize the objectives of a batch of trials, each for itself; returns the best iterate of each.

    With the objective E_t of trial t at its variables z_t, which start at z_t^0, an iteration

    1. evaluates E_t(z_t) and its gradient for all active trials at once,
    2. records z_t where E_t / E_t(z_t^0) is the least so far (`BestIterates`),
    3. goes on with the trials that have not ended (`StoppingRule`),
    4. divides the gradient by E_t(z_t^0), so that no unit matters,
    5. takes a step (`optimizer`), and
    6. clamps the images of z_t to `bounds`.

    Args:
        batch: the problems, one for each trial.
        variables: where the trials start, one row for each.
        optimizer: takes the steps.
        stopping: when a trial ends.
        evaluate: in place of the batch's own evaluation, for trials whose objectives depend on each other.
        bounds: least and largest value of `INPUTS`, (C, 1, 1) each, or None.
        monitor: of the caller; may end the search, which is then noted in the results.
    """
    monitor = monitor or SearchMonitor()
    best = BestIterates(variables, optimizer.final_phase_start)
    iteration = 0
    try:
        for iteration in range(stopping.iterations + 1):
            batch.expect_iterations(stopping.iterations - iteration, variables)
            values, grads = evaluate(batch, variables)
            relative = best.update(iteration, values, variables)
            if iteration == stopping.iterations:
                break
            if reason := monitor.after(iteration):
                best.mark_cut_short(describe_cut(iteration, stopping.iterations, reason))
                break
            rows = best.still_active(relative, stopping.tolerance, stopping.patience)
            if rows is not None:
                if not len(rows):
                    break
                batch.select(rows)
                optimizer.select(rows)
                best.select(rows)
                variables = {k: v[rows] for k, v in variables.items()}
                grads = {k: v[rows] for k, v in grads.items()}
            scale = best.scale
            grads = {k: g / scale.view(-1, *[1] * (g.ndim - 1)) for k, g in grads.items()}
            variables = optimizer.step(variables, grads)
            if bounds is not None:
                variables[INPUTS] = variables[INPUTS].clamp(*bounds)
    except KeyboardInterrupt:
        if iteration == 0 or not monitor.control.take_interrupt():
            raise
        best.mark_cut_short(describe_cut(iteration, stopping.iterations, INTERRUPT))
    return best.results()


def describe_cut(iteration: int, iterations: int, reason: str) -> str:
    """Return the note of a trial that `reason` stopped after `iteration` of `iterations` iterations."""
    return f"the search was cut short by {reason} after {iteration} of {iterations} iterations"


def pixel_bounds(problem: BatchableProblem) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of pixels in the units searched, (C, 1, 1) each."""
    offset, scale = problem.constants["offset"], problem.constants["scale"]
    return (0 - offset) / scale, (1 - offset) / scale
