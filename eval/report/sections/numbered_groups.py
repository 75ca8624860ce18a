"""The groups of results under the numbers, names and marks that they have all through a report."""

from __future__ import annotations

from dataclasses import dataclass

from eval.report.charts.specs import Marker
from eval.report.load import Run
from eval.report.result_groups import ResultGroup
from eval.report.sections.findings import strongest_attack, subject_label


@dataclass(frozen=True)
class NumberedGroups:
    """The settings that were attacked, under the numbers they have all through the report.

    Attributes:
        run: read from its folder.
        numbers: of the groups that an attack applied to, counted from 1.
        shown: of every method, defense and attack the round in which it leaked most.
        rounds: whether several rounds were watched.
    """

    run: Run
    by_number: dict[int, ResultGroup]
    charted: dict[int, ResultGroup]
    several_rounds: bool

    @property
    def defended(self) -> bool:
        """Return whether there is any defense."""
        return any(self.run.settings.defense_name(group.defense) != "none" for group in self.run.groups)

    @classmethod
    def from_run(cls, run: Run) -> NumberedGroups:
        """Number the groups of a run in the order of its file."""
        numbers = dict(enumerate((group for group in run.groups if group.attacked_rows), 1))
        lots: dict[tuple[str, str, str], dict[int, ResultGroup]] = {}
        for number, group in numbers.items():
            lots.setdefault((*group.subject, group.attack), {})[number] = group
        shown: dict[int, ResultGroup] = {}
        for lot in lots.values():
            best = strongest_attack(list(lot.values())) or next(reversed(lot.values()))
            shown |= {number: group for number, group in lot.items() if group is best}
        return cls(run, numbers, shown, len({group.round for group in numbers.values()}) > 1)

    def columns(self) -> list[str]:
        """Return the first columns of a table by attack; defense and round only where they tell rows apart."""
        return self.cells(">no.", "method", "defense", "attack", ">round")

    def row(self, key: int, group: ResultGroup) -> list[str]:
        """Return a group's first cells, under `columns`."""
        return self.cells(str(key), group.method, group.defense, group.attack, str(group.round))

    def cells(self, key: str, method: str, defense: str, attack: str, at: str) -> list[str]:
        """Return the cells that there are columns for.

        Args:
            key: the group's number.
            method: its method.
            defense: its defense; left out where there is none at all.
            attack: its attack.
            at: its round; left out where there is only one.
        """
        return [key, method, *([defense] if self.defended else []), attack, *([at] if self.several_rounds else [])]

    def marker(self, group: ResultGroup) -> Marker:
        """Return shape and color of the group's method; hollow under a defense."""
        methods = list(dict.fromkeys(other.method for other in self.run.groups))
        defended = self.run.settings.defense_name(group.defense) != "none"
        return Marker(methods.index(group.method), hollow=defended)

    def label(self, group: ResultGroup) -> str:
        """Return words such as `hyperfl under peel+ig`, with the round where several were watched."""
        return f"{subject_label(group)} under {group.attack}" + (
            f", round {group.round}" if self.several_rounds else ""
        )
