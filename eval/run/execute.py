"""Carry a plan out and write what readers get: one way for runs, audits and the Python interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from eval.metrics.score import Row
from eval.report.results_table import Table
from eval.run import results, runner
from eval.run.lpips_columns import with_finished_cells
from eval.run.plan import Plan
from eval.run.run_directory import RunDir
from eval.run.runner import Failure, Options, Progress, RunStopped
from eval.run.shared import caller


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What became of a plan that was carried out.

    Attributes:
        plan: the part of it that the files for readers are of.
        rows: of `images.jsonl`; none where nothing could be finished.
        table: as it was written; None where there are no rows, or none was asked for.
        failures: cells that could not be finished.
        unfinished: attacks that a time limit or Ctrl-C cut short (True) or came before (False), by name.
        is_stopped: whether Ctrl-C ended it.
    """

    plan: Plan
    rows: list[Row]
    table: Table | None
    failures: list[Failure]
    unfinished: Mapping[str, bool]
    is_stopped: bool


def whole_plan(plan: Plan) -> Plan:
    """Return the plan as it is."""
    return plan


def run_and_publish(
    plan: Plan,
    folder: RunDir,
    options: Options | None = None,
    progress: Progress = runner.silent,
    *,
    reported_part: Callable[[Plan], Plan] = whole_plan,
    with_report: bool = True,
    publish_when_stopped: bool = False,
) -> RunOutcome:
    """Compute the cells of a plan that are not finished, and write the files for readers from all that are.

    The caller holds the folder's lock (`folder_in_use`).

    Args:
        plan: of the run.
        folder: to run it in.
        options: how; they hold the time limit.
        progress: told how far it is.
        reported_part: asked when all is computed: what of the plan the files are of.
        with_report: whether table and report are written beside rows and pictures.
        publish_when_stopped: whether the files are written, too, when Ctrl-C has ended the run.

    Raises:
        RunStopped: Ctrl-C; without `publish_when_stopped` alone. What is finished stays.
        LostLockError: another process may be writing to the folder.
        UnguardedError: worker processes are asked for by a script that would start itself again in them.
    """
    is_stopped, plan = False, with_finished_cells(plan, folder)
    options = options or Options()
    try:
        failures = _compute(plan, folder, options, progress)
    except RunStopped as stop:
        if not publish_when_stopped:
            raise
        failures, is_stopped = stop.failures, True
    reported = reported_part(plan)
    with folder.publishing():
        rows = results.assemble(reported, folder)
        table = results.write_table_and_report(rows, failures, reported, folder) if rows and with_report else None
    return RunOutcome(
        plan=reported,
        rows=rows,
        table=table,
        failures=failures,
        unfinished=runner.unfinished_attacks(reported, folder, failures),
        is_stopped=is_stopped,
    )


def folder_in_use(folder: RunDir, options: Options) -> AbstractContextManager[object]:
    """Return what keeps a run's folder from others: from all, or from those that don't share its work."""
    return folder.locked() if options.executor is None else folder.shared()


def _compute(plan: Plan, folder: RunDir, options: Options, progress: Progress) -> list[Failure]:
    """Compute the cells of a plan in the way that the options ask for."""
    if options.executor is None:
        return runner.run(plan, folder, options, progress)
    return caller.run(plan, folder, options, options.executor, progress)
