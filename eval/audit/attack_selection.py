"""Which attacks an audit tries where none is named, in which order, and when one of them could add nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eval.io import jsonl
from eval.io.text import join
from eval.metrics.score import Row
from eval.metrics.self_verification import are_settled
from eval.run.attack_cell import IMAGES
from eval.run.plan import AttackTask, Plan, TrainingTask
from eval.run.run_directory import RunDir
from fl.method import Method
from fl.models.hypernetworks.hypernetwork import Hypernetwork

FOUND = (
    "recovered every image and confirmed it, or nearly all of its pixels; labels and private tensors that are not "
    "named were not searched for"
)
"""What an attack that settles every update leaves."""
PEELED, SEARCH = "peel+ig", "ig"
"""The search behind a peeled hypernetwork, and the one where nothing can be peeled."""


def defaults(method: Method, size: int) -> tuple[str, ...]:
    """The attacks for updates of `size` images: those that solve, and can tell that they are right, before a search.

    `rconv`, which also takes batches, is left out for them, and what tells images apart (`spear`) for one.
    `april` is for one image behind a vision transformer.
    """
    if isinstance(method.parametrization, Hypernetwork):
        return ("peel+cascade", PEELED, SEARCH)
    return ("analytic", *(("rconv", "cascade", "april") if size == 1 else ("spear", "cascade")), SEARCH)


def needless(label: str, before: Mapping[str, Sequence[Row]]) -> str:
    """Why an attack of the default ones could add nothing to those before it, or nothing.

    It never asks the truth: only what attacks have shown of their results themselves.

    Args:
        label: of the attack.
        before: the rows of the others that are done, by label.
    """
    if all_settled := _settling(before):
        return spared(all_settled)
    peeled = before.get(PEELED, ())
    # of a peel that did not confirm itself the plain search may know better
    if label == SEARCH and peeled and all(row.get("verified") for row in peeled):
        return f"not needed: {PEELED} searched for the same with more known"
    return ""


def spared(names: Sequence[str]) -> str:
    """In words, that these attacks leave nothing to find."""
    return f"not needed: {join(list(dict.fromkeys(names)))} {FOUND}"


def _settling(before: Mapping[str, Sequence[Row]]) -> list[str]:
    """The attacks that settle every update between them; nothing where one is open."""
    updates = dict.fromkeys(row["update"] for rows in before.values() for row in rows)
    first = [
        next((name for name, rows in before.items() if are_settled([row for row in rows if row["update"] == key])), "")
        for key in updates
    ]
    return first if all(first) else []


@dataclass
class Thrift:
    """Says in a run which attacks are still needed (`eval.run.runner.Needed`), and keeps which were not.

    Attributes:
        folder: of the run.
        spared: why an attack was left out, by the cell that it would have filled.
    """

    folder: RunDir
    spared: dict[str, str] = field(default_factory=dict)

    def __call__(self, one: TrainingTask, watch: AttackTask) -> bool:
        """Whether the attack may add something to those that stand before it."""
        done = [other for other in one.watches[: one.watches.index(watch)] if self.folder.finished(other.cell)]
        before = {other.attack.label: jsonl.read_rows(self.folder.file(other.cell, IMAGES)) for other in done}
        reason = needless(watch.attack.label, before)
        if reason:
            self.spared[watch.cell.id] = reason
        return not reason

    def without(self, plan: Plan) -> dict[str, str]:
        """Why attacks were left out of the whole plan, by label."""
        watches = [watch for one in plan.trainings for watch in one.watches]
        kept = {watch.attack.label for watch in watches if watch.cell.id not in self.spared}
        gone = [watch for watch in watches if watch.attack.label not in kept]
        return {watch.attack.label: self.spared[watch.cell.id] for watch in gone}

    def rest(self, plan: Plan) -> Plan:
        """The plan without what was left out."""
        trainings = [
            replace(one, watches=tuple(watch for watch in one.watches if watch.cell.id not in self.spared))
            for one in plan.trainings
        ]
        without = self.without(plan)
        attacks = tuple(entry for entry in plan.experiment.attack if entry.label not in without)
        return replace(plan, trainings=tuple(trainings), experiment=replace(plan.experiment, attack=attacks))
