"""Which attacks an audit tries where none is named, in which order, and when one of them could add nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eval.io import jsonl
from eval.metrics.score import Row
from eval.metrics.self_verification import are_settled, not_needed_words
from eval.run.attack_cell import IMAGES
from eval.run.cache_keys import cell_after_attacks
from eval.run.plan import AttackTask, Plan, Source
from eval.run.run_directory import RunDir
from fl.method import Method
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork

ATTACKS_ON_IDS = ("tokens", "analytic")
"""The attacks where ids are among the inputs: nothing else takes such networks."""
PEELED, SEARCH = "peel+ig", "ig"
"""The search behind a peeled hypernetwork, and the one where nothing can be peeled."""
SIZED, SIZED_SEARCH = "adaptive-step", "adaptive-step+ig"
"""What reads sizes off the first step of an adaptive optimizer, and the search by these."""


def default_attacks(method: Method, size: int) -> tuple[str, ...]:
    """Return the attacks for updates of `size` images: before a search, those that solve and can tell they are right.

    `rconv`, which also takes batches, is left out for them, and what tells images apart (`spear`) for one.
    `april` is for vision transformers. After an adaptive optimizer no equation of gradients holds: what its first step
    shows of sizes is read instead.
    """
    if isinstance(method.parametrization, Hypernetwork):
        return ("peel+cascade", PEELED, SEARCH)
    if getattr(method, "optimizer", "sgd") != "sgd":
        return (*((SIZED,) if size == 1 else ()), SIZED_SEARCH, SEARCH)
    return ("analytic", *(("rconv", "cascade", "april") if size == 1 else ("spear", "cascade", "april")), SEARCH)


def redundant_reason(label: str, before: Mapping[str, Sequence[Row]]) -> str:
    """Return why an attack of the default ones could add nothing to those before it, or nothing.

    It never asks the truth: only what attacks have shown of their results themselves.

    Args:
        label: of the attack.
        before: the rows of the others that are done, by label.
    """
    if all_settled := _settling(before):
        return not_needed_words(all_settled)
    if label == SEARCH and any(row.get("misfit") is not None for row in before.get(SIZED_SEARCH, ())):
        return f"not needed: {SIZED_SEARCH} searched by signs and sizes"
    peeled = before.get(PEELED, ())
    # of a peel that did not confirm itself the plain search may know better
    if label == SEARCH and peeled and all(row.get("verified") for row in peeled):
        return f"not needed: {PEELED} searched for the same with more known"
    return ""


def _settling(before: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the attacks that settle every update between them; nothing where one is open."""
    updates = dict.fromkeys(row["update"] for rows in before.values() for row in rows)
    first = [
        next((name for name, rows in before.items() if are_settled([row for row in rows if row["update"] == key])), "")
        for key in updates
    ]
    return first if all(first) else []


@dataclass
class EarlyStopping:
    """Says in a run which attacks are still needed (`eval.run.runner.AttackFilter`), and keeps which were not.

    Attributes:
        folder: of the run.
        reasons: why an attack was left out, by the cell that it would have filled.
    """

    folder: RunDir
    reasons: dict[str, str] = field(default_factory=dict)

    def __call__(self, source: Source, task: AttackTask) -> bool:
        """Return whether the attack may add something to those that stand before it."""
        earlier = source.attack_tasks[: source.attack_tasks.index(task)]
        done = {other.attack.label: cell for other in earlier if (cell := self.folder.latest(other.cell)) is not None}
        before = {label: jsonl.read_rows(self.folder.file(cell, IMAGES)) for label, cell in done.items()}
        reason = redundant_reason(task.attack.label, before)
        if reason:
            self.reasons[task.cell.id] = reason
        return not reason

    def left_out(self, plan: Plan) -> dict[str, str]:
        """Return why attacks were left out of the whole plan, by label."""
        kept = {task.attack.label for task in plan.attacks if task.cell.id not in self.reasons}
        gone = [task for task in plan.attacks if task.attack.label not in kept]
        return {task.attack.label: self.reasons[task.cell.id] for task in gone}

    def remaining(self, plan: Plan) -> Plan:
        """Return the plan without what was left out."""

        def kept(source: Source) -> tuple[AttackTask, ...]:
            return tuple(task for task in source.attack_tasks if task.cell.id not in self.reasons)

        trainings = tuple(replace(one, attack_tasks=kept(one)) for one in plan.trainings)
        captures = tuple(replace(one, attack_tasks=kept(one)) for one in plan.captures)
        gone = self.left_out(plan)
        attacks = tuple(entry for entry in plan.experiment.attack if entry.label not in gone)
        return replace(
            plan, trainings=trainings, captures=captures, experiment=replace(plan.experiment, attack=attacks)
        )


def leave_out_settled(plan: Plan) -> Plan:
    """Return the plan in which no attack is tried on an update that one before it has settled."""
    trainings = tuple(replace(one, attack_tasks=_in_turn(one.attack_tasks)) for one in plan.trainings)
    captures = tuple(replace(one, attack_tasks=_in_turn(one.attack_tasks)) for one in plan.captures)
    return replace(plan, trainings=trainings, captures=captures)


def _in_turn(tasks: Sequence[AttackTask]) -> tuple[AttackTask, ...]:
    """Return every attack behind those that stand before it and see the same round."""
    found: list[AttackTask] = []
    for task in tasks:
        before = tuple(other for other in found if other.round == task.round)
        found.append(replace(task, after=before, cell=cell_after_attacks(task.cell, [other.cell for other in before])))
    return tuple(found)
