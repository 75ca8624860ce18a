"""The tables and figures of the five papers that configs redo, by name.

What reads a config is imported where it is needed: their names alone take no second.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from eval.experiment import config_catalog

if TYPE_CHECKING:
    from eval.experiment.scale_names import Scale
    from eval.experiment.scales import OwnScales
    from eval.experiment.spec import Entry, Experiment
    from fl.method import Method

FOLDER = "reproduce"
"""Folder in `configs` with a folder for each paper."""
CELLS = Path(__file__).parents[2] / "docs" / "results" / "cells"
"""Archives of committed cells; an installation without the documents has none."""
NEAREST = 3
"""Names that a message suggests at most."""


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table, or of what a config makes of a figure.

    Attributes:
        method: label of the method.
        attack: label of the attack; None for what a training gives.
    """

    method: str
    attack: str | None = None


@dataclass(frozen=True)
class Item:
    """A table or figure and the config that redoes it.

    Attributes:
        name: of the config, below `reproduce`: `hyperfl/table3-emnist`.
    """

    name: str

    @property
    def paper(self) -> str:
        """The paper's folder: `hyperfl`."""
        return self.name.partition("/")[0]

    @property
    def path(self) -> Path:
        """The config's file."""
        return config_catalog.CONFIGS / FOLDER / f"{self.name}.yaml"

    @property
    def title(self) -> str:
        """What the config calls itself."""
        return config_catalog.read_title(f"{FOLDER}/{self.name}")

    @cached_property
    def own_scales(self) -> OwnScales:
        """What the config says of scales itself."""
        from eval.experiment.scales import read_scales

        return read_scales(self.path)

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment as the config stands."""
        from eval.experiment import yaml_config

        return yaml_config.load(self.path)

    def at(self, scale: Scale) -> Experiment:
        """Return the experiment of a scale's size.

        Raises:
            ValueError: as `eval.experiment.scales.at_scale`.
        """
        from eval.experiment.scales import at_scale

        return at_scale(self.experiment, scale, self.own_scales)

    def default_folder(self, scale: Scale) -> Path:
        """Return the folder of a run at a scale, the same every time, so that the run goes on there."""
        return Path("results") / FOLDER / self.name / scale


def list_items(beginning: str = "") -> list[Item]:
    """Return all items, or those whose names begin so: a paper, `hyperfl`, or `hyperfl/table3`.

    Raises:
        UnknownItemError: there is none; says what is close.
    """
    names = [name.removeprefix(f"{FOLDER}/") for name in config_catalog.list_config_names() if _is_item(name)]
    found = [Item(name) for name in names if config_catalog.in_folder_or_named(name, beginning)]
    if not found:
        raise UnknownItemError(f"no paper, table or figure is called {beginning!r}", beginning, names)
    return found


def find_item(name: str) -> Item:
    """Return the item of a name, whose paper may be left out where no other's ends so.

    Raises:
        UnknownItemError: there is none, or there are several; says which are close.
    """
    names = [item.name for item in list_items()]
    whole = name.removesuffix(".yaml").removeprefix("configs/").removeprefix(f"{FOLDER}/")
    ending = [other for other in names if f"/{other}".endswith(f"/{whole}")]
    if len(ending) == 1:
        return Item(ending[0])
    inside = sum(other.startswith(f"{whole}/") for other in names)
    if inside:
        raise UnknownItemError(f"{whole!r} is a paper with {inside} tables and figures", whole, names)
    if ending:
        raise UnknownItemError(f"{len(ending)} tables and figures are called {whole!r}", whole, ending)
    raise UnknownItemError(f"no table or figure is called {whole!r}", whole, names)


class UnknownItemError(ValueError):
    """A name that stands for no single table or figure; the message says which are close, and how to list all.

    Args:
        what: what is wrong with the name.
        name: as it was given.
        names: of all that it may be meant for.
    """

    def __init__(self, what: str, name: str, names: Sequence[str]) -> None:
        papers = list(dict.fromkeys(other.partition("/")[0] for other in names))
        hint = f"did you mean {' or '.join(near)}? " if (near := _nearest(name, [*papers, *names])) else ""
        shown = f" {name}" if name in papers else ""
        super().__init__(f"{what}; {hint}`hyperleak reproduce --list{shown}` shows {'them' if shown else 'all'}")


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Return up to `NEAREST` names that are meant by `name`, perhaps: that hold it, else that look like it.

    A paper's own name is none of its tables.
    """
    if name in names:
        return []
    if holding := [other for other in names if name in other]:
        return sorted(holding, key=lambda other: f"{name}-" not in other)[:NEAREST]  # of table1 rather than of table11
    ends = {other.rpartition("/")[2]: other for other in reversed(names)} | {other: other for other in names}
    alike = difflib.get_close_matches(name, list(ends), NEAREST)
    return list(dict.fromkeys(ends[other] for other in alike))


def rows_of(experiment: Experiment) -> list[PaperRow]:
    """Return the rows: those that the paper prints, else each method and each attack on it."""
    printed = [PaperRow(figures.method, figures.attack) for figures in experiment.published]
    if printed:
        return list(dict.fromkeys(printed))
    return [row for method in experiment.method for row in _own_rows(experiment, method)]


def matching(experiment: Experiment, row: PaperRow) -> list[PaperRow]:
    """Return what a row is made of by whole labels: a sweep may have made several methods or attacks of one."""
    from eval.report.sections.rounds_to_accuracy import matches_label

    found = []
    for method in experiment.method:
        if not matches_label(row.method, method.label):
            continue
        if row.attack is None:
            found.append(PaperRow(method.label))
        else:
            own = _own_rows(experiment, method)
            found += [one for one in own if one.attack and matches_label(row.attack, one.attack)]
    return found


def _own_rows(experiment: Experiment, method: Entry[Method]) -> Iterator[PaperRow]:
    attacked = False
    for attack in experiment.attack:
        if not attack.against or method.label in attack.against:
            attacked = True
            yield PaperRow(method.label, attack.label)
    if not attacked:
        yield PaperRow(method.label)


def _is_item(name: str) -> bool:
    """Return whether a config is of a table or figure; courses of training (`curves-*`) are of none."""
    return name.startswith(f"{FOLDER}/") and not name.rpartition("/")[2].startswith("curves-")
