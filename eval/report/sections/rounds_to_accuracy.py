"""How many rounds, and numbers sent, an accuracy took: of every method, beside what papers print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from eval.metrics.score import Row
from eval.report.blocks import Block, DefinitionList, TableBlock
from eval.report.formatting import ACCURACY_NAMES, NO_VALUE, format_number, format_percent
from eval.report.load import Run

Key = tuple[str, str]
"""Method and defense."""
BYTES = 4
"""Bytes of a number that is sent."""
OURS = "here"


@dataclass(frozen=True)
class Milestone:
    """When a training came somewhere, and what that took.

    Attributes:
        round: how many rounds were behind, from 0.
        numbers: how many one client sends and receives until then if it takes part in every round.
    """

    round: int
    numbers: int


def first_reaching(rows: Sequence[Row], column: str, level: float) -> Milestone | None:
    """Return when an accuracy was first at `level` or above among scored rounds; None where it never was.

    Args:
        rows: of `rounds.jsonl`, all rounds of one training in order.
        column: the accuracy.
        level: in [0, 1].
    """
    return next((_at(rows, row) for row in rows if row.get(column) is not None and row[column] >= level), None)


def best_round(rows: Sequence[Row], column: str) -> Milestone | None:
    """Return when an accuracy was highest, the first time; None where it was never taken."""
    scored = [row for row in rows if row.get(column) is not None]
    return _at(rows, max(scored, key=lambda row: row[column])) if scored else None


def _at(rows: Sequence[Row], row: Row) -> Milestone:
    """Return where a row stands; what is received in a round stands in the row before it."""
    behind = [pair for pair in pairwise(rows) if pair[1]["round"] <= row["round"]]
    return Milestone(row["round"], sum(before["numbers_down"] + after["numbers_up"] for before, after in behind))


def rows_by_training(rows: Sequence[Row]) -> dict[Key, list[list[Row]]]:
    """Return the rounds of every method under every defense, in order, by seed."""
    found: dict[Key, dict[int, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        if row.get("numbers_up") is not None and row.get("numbers_down") is not None:
            found.setdefault((row["method"], row["defense"]), {}).setdefault(row["seed"], []).append(row)
    return {key: list(seeds.values()) for key, seeds in found.items()}


def communication_share(run: Run, key: Key, beside: str) -> float | None:
    """Return a method's numbers until its best round as a share of those of `beside`, means over seeds.

    None where one of them was not scored, or where `beside` was best before training.

    Args:
        run: the run.
        key: method and defense.
        beside: label of the method to compare with.
    """
    known, column, means = rows_by_training(run.rounds), _column(run), list[float]()
    for one in (key, (_other(known, key, beside), key[1])):
        ends = [end.numbers for rows in known.get(one, []) if (end := best_round(rows, column)) is not None]
        if not ends:
            return None
        means.append(fmean(ends))
    return means[0] / means[1] if means[1] else None


def matches_label(name: str, label: str) -> bool:
    """Return whether a label is `name`, or what a sweep made of it (`fedavg@lr=0.1` of `fedavg`)."""
    return name in {label, label.partition("@")[0]}


def _other(known: Mapping[Key, Any], key: Key, beside: str) -> str:
    """Return the label of `beside` among trainings: as it is, with `key`'s sweep value, or the only one.

    Empty where there is none, or can't be told which.
    """
    made = [method for method, defense in known if defense == key[1] and matches_label(beside, method)]
    _, at, value = key[0].partition("@")
    return next(
        (label for label in (beside, f"{beside}{at}{value}") if label in made), made[0] if len(made) == 1 else ""
    )


def only_rounds(figures: Mapping[str, Any]) -> bool:
    """Return whether a paper's figures are nothing but rounds until accuracies: these have a table of their own."""
    words = {"method", "attack", "source", "note", "rounds_to_accuracy", "best", "reference_method"}
    return bool(figures.get("rounds_to_accuracy")) and not any(
        figures[key] is not None for key in figures if key not in words
    )


def blocks(run: Run) -> list[Block]:
    """Return the table, where a config or a paper names levels; nothing without."""
    printed = [figures for figures in run.settings.published if figures.get("rounds_to_accuracy")]
    named = run.settings.section("score").get("target_accuracies") or [
        level for figures in printed for level in figures["rounds_to_accuracy"]
    ]
    wanted, column = sorted({float(level) for level in named}), _column(run)
    if not wanted:
        return []
    lines = []
    for (method, defense), seeds in rows_by_training(run.rounds).items():
        own = [_cell([first_reaching(rows, column, level) for rows in seeds]) for level in wanted]
        best = _cell([best_round(rows, column) for rows in seeds])
        lines.append([method, defense, OURS, *own, best])
        lines += [
            _line(figures, method, defense, wanted) for figures in printed if matches_label(figures["method"], method)
        ]
    meant = {**ACCURACY_NAMES, "accuracy": "of what the server sends, with what each client keeps"}
    notes = [
        (f"{figures['method']}, {figures['source']}", str(figures["note"]))
        for figures in printed
        if only_rounds(figures) and figures.get("note")
    ]
    columns = ["method", "defense", "source", *(f">{format_percent(level)}" for level in wanted), ">its best"]
    return [
        TableBlock("Rounds until an accuracy", columns, lines),
        DefinitionList(
            [
                ("Cells", "rounds, and in brackets millions of numbers that a client sends and receives until then."),
                ("MiB", f"a million numbers are {format_number(BYTES * 1e6 / 2**20, 2)} MiB at {BYTES} bytes each."),
                ("Accuracy", f"{meant.get(column, column)}; only rounds that were scored are looked at."),
                *notes,
            ]
        ),
    ]


def _column(run: Run) -> str:
    return str(run.settings.section("score").get("target_metric") or "accuracy")


def _cell(found: Sequence[Milestone | None]) -> str:
    """Return means over seeds; where not all of them got there, how many did."""
    there = [one for one in found if one is not None]
    if len(there) < len(found) or not there:
        return f"{len(there)} of {len(found)} seeds" if there else NO_VALUE
    return _words(fmean(one.round for one in there), fmean(one.numbers for one in there))


def _line(figures: Mapping[str, Any], method: str, defense: str, wanted: Sequence[float]) -> list[str]:
    """Return a paper's row: numbers follow from rounds."""
    rounds = {float(level): value for level, value in figures["rounds_to_accuracy"].items()}
    cells = [
        NO_VALUE if (value := rounds.get(level)) is None else _words(value, figures.get("cpr"), value)
        for level in wanted
    ]
    return [method, defense, str(figures["source"]), *cells, NO_VALUE]


def _words(rounds: float, numbers: float | None, times: float = 1) -> str:
    words = format_number(rounds).removesuffix(".0")
    return words if numbers is None else f"{words} ({format_number(numbers * times / 1e6, 2)} M)"
