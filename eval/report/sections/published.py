"""A paper's figures beside those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report.blocks import Block, DefinitionList, TableBlock
from eval.report.formatting import ACCURACY_NAMES, NO_VALUE, format_interval, format_number, format_percent
from eval.report.load import Run
from eval.report.result_groups import ResultGroup, lpips_column
from eval.report.sections.findings import subject_label
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.sections.rounds_to_accuracy import communication_share, matches_label, only_rounds
from eval.report.training_results import communication_costs, format_accuracy

OF_PICTURES = {"psnr": "PSNR (dB)", "ssim": "SSIM", "lpips": "LPIPS"}
OF_MODELS = {name: f"accuracy {words}" for name, words in ACCURACY_NAMES.items()}
BEST = {f"{name}_best": f"{words}, best round" for name, words in {**OF_MODELS, "accuracy": "accuracy"}.items()}
OF_COSTS = {
    "cpr": "numbers up and down a round",
    "communication_share": "numbers until the best round, as a share of another's",
    "seconds": "seconds a round",
}
FIGURES = {**OF_PICTURES, **OF_MODELS, **BEST, **OF_COSTS}


def blocks(numbered: NumberedGroups) -> list[Block]:
    """Return published figures beside ours, and why they may differ; nothing where the config names none."""
    lines, notes = [], []
    for figures in numbered.run.settings.published:
        method, attack, source = str(figures["method"]), str(figures.get("attack") or NO_VALUE), str(figures["source"])
        found = [group for group in numbered.run.groups if is_about(group, figures)]
        given = _published(figures)
        if set(given.values()) == {NO_VALUE}:  # rounds until an accuracy have a table of their own
            found = []
        elif not any(figures.get(name) is not None for name in OF_PICTURES):
            for group in _trainings(found):
                ours = _of_model(numbered.run, group, figures)
                lines.append([subject_label(group), attack, source, NO_VALUE, *_pairs(given, ours)])
        else:
            for group in found:
                ours = {**_of_pictures(group), **_of_model(numbered.run, group, figures)}
                lines.append([subject_label(group), attack, source, str(group.round), *_pairs(given, ours)])
        if not found and set(given.values()) != {NO_VALUE}:
            lines.append([method, attack, source, NO_VALUE, *_pairs(given, {})])
        if figures.get("reference_method"):
            notes.append((method, f"its share is of the numbers of {figures['reference_method']}"))
        if figures.get("note") and not only_rounds(figures):
            notes.append((" under ".join(word for word in (method, attack) if word != NO_VALUE), str(figures["note"])))
    if not lines:
        return []
    columns = ["method", "attack", "source", ">after round"]
    columns += [name for figure in FIGURES.values() for name in (f">{figure} there", ">here")]
    # a paper's figure that is not given has no columns; nor has the round, where none is named
    kept = [i for i in range(3 if all(line[3] == NO_VALUE for line in lines) else 4)]
    for i in range(4, len(columns), 2):
        kept += [i, i + 1] if any(line[i] != NO_VALUE for line in lines) else []
    grid = TableBlock(
        "Published figures and ours", [columns[i] for i in kept], [[line[i] for i in kept] for line in lines]
    )
    return [grid, *([DefinitionList(notes)] if notes else [])]


def is_about(group: ResultGroup, figures: Mapping[str, Any]) -> bool:
    """Return whether a group is what the figures are of; `ig@tv_weight=0.01` of a sweep counts as `ig`."""
    attack = figures.get("attack")
    return matches_label(figures["method"], group.method) and (attack is None or matches_label(attack, group.attack))


def _trainings(found: Sequence[ResultGroup]) -> list[ResultGroup]:
    """Return one group of every method under every defense: what the model learned does not depend on the attack."""
    first: dict[tuple[str, str], ResultGroup] = {}
    for group in found:
        first.setdefault(group.subject, group)
    return list(first.values())


def _published(figures: Mapping[str, Any]) -> dict[str, str]:
    return {
        "psnr": format_number(figures.get("psnr"), 2),
        "ssim": format_number(figures.get("ssim"), 3),
        "lpips": format_number(figures.get("lpips"), 3),
        **{f"{name}_best" if figures.get("best") else name: format_percent(figures.get(name), 2) for name in OF_MODELS},
        "cpr": _whole(figures.get("cpr")),
        "communication_share": format_percent(figures.get("communication_share"), 2),
        "seconds": format_number(figures.get("seconds"), 2),
    }


def _of_pictures(group: ResultGroup) -> dict[str, str]:
    perceptual = lpips_column(group.image_rows)
    return {
        "psnr": format_interval(group.psnr, 2),
        "ssim": format_interval(group.mean_interval("ssim"), 3),
        "lpips": format_interval(group.mean_interval(perceptual), 3) if perceptual else NO_VALUE,
    }


def _of_model(run: Run, group: ResultGroup, figures: Mapping[str, Any]) -> dict[str, str]:
    """Return what a method learned, and what that took."""
    (cost, *_) = [
        *(cost for cost in communication_costs(run.rounds) if (cost.method, cost.defense) == group.subject),
        None,
    ]
    return {
        **{name: format_percent(group.mean_over_seeds(f"{name}_last"), 1) for name in OF_MODELS},
        "accuracy": format_accuracy(run, group, last=True),
        **{name: format_percent(group.mean_over_seeds(name), 1) for name in BEST},
        "cpr": _whole(cost.up + cost.down if cost else None),
        "communication_share": format_percent(
            communication_share(run, group.subject, str(figures.get("reference_method"))), 1
        ),
        "seconds": format_number(cost.seconds if cost else None, 2),
    }


def _whole(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:,.0f}"


def _pairs(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return each figure there and here; one that is not given there is left out here, too."""
    return [
        cell
        for name in FIGURES
        for cell in (
            (there[name], here.get(name, NO_VALUE)) if there.get(name, NO_VALUE) != NO_VALUE else (NO_VALUE, NO_VALUE)
        )
    ]
