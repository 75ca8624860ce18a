"""A paper's figures beside those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report.blocks import Block, Grid, Items
from eval.report.formatting import ACCURACIES, NONE, interval, number, percent
from eval.report.load import Run
from eval.report.result_groups import Group, lpips
from eval.report.round_series import accuracy, costs
from eval.report.sections.findings import subject
from eval.report.sections.overview import Numbered
from eval.report.sections.rounds_to_accuracy import alone, is_of, share

OF_PICTURES = {"psnr": "PSNR (dB)", "ssim": "SSIM", "lpips": "LPIPS"}
OF_MODELS = {name: f"accuracy {words}" for name, words in ACCURACIES.items()}
BEST = {f"{name}_best": f"{words}, best round" for name, words in {**OF_MODELS, "accuracy": "accuracy"}.items()}
OF_COSTS = {
    "cpr": "numbers up and down a round",
    "sent_share": "numbers until the best round, as a share of another's",
    "seconds": "seconds a round",
}
FIGURES = {**OF_PICTURES, **OF_MODELS, **BEST, **OF_COSTS}


def blocks(numbered: Numbered) -> list[Block]:
    """A table of published figures and ours, and in words why they may differ; nothing where the config names none."""
    lines, notes = [], []
    for figures in numbered.run.setting.published:
        method, attack, source = str(figures["method"]), str(figures.get("attack") or NONE), str(figures["source"])
        found = [group for group in numbered.run.groups if _about(group, figures)]
        given = _published(figures)
        if set(given.values()) == {NONE}:  # rounds until an accuracy have a table of their own
            found = []
        elif not any(figures.get(name) is not None for name in OF_PICTURES):
            for group in _trainings(found):
                ours = _of_model(numbered.run, group, figures)
                lines.append([subject(group), attack, source, NONE, *_pairs(given, ours)])
        else:
            for group in found:
                ours = {**_of_pictures(group), **_of_model(numbered.run, group, figures)}
                lines.append([subject(group), attack, source, str(group.round), *_pairs(given, ours)])
        if not found and set(given.values()) != {NONE}:
            lines.append([method, attack, source, NONE, *_pairs(given, {})])
        if figures.get("beside"):
            notes.append((method, f"its share is of the numbers of {figures['beside']}"))
        if figures.get("note") and not alone(figures):
            notes.append((" under ".join(word for word in (method, attack) if word != NONE), str(figures["note"])))
    if not lines:
        return []
    columns = ["method", "attack", "source", ">after round"]
    columns += [name for figure in FIGURES.values() for name in (f">{figure} there", ">here")]
    # a paper's figure that is not given has no columns; nor has the round, where none is named
    kept = [i for i in range(3 if all(line[3] == NONE for line in lines) else 4)]
    for i in range(4, len(columns), 2):
        kept += [i, i + 1] if any(line[i] != NONE for line in lines) else []
    grid = Grid("Published figures and ours", [columns[i] for i in kept], [[line[i] for i in kept] for line in lines])
    return [grid, *([Items(notes)] if notes else [])]


def _about(group: Group, figures: Mapping[str, Any]) -> bool:
    """Whether a group is what the figures are of; a sweep's values (`ig@tv=0.01`) count as what they are made of."""
    attack = figures.get("attack")
    return is_of(figures["method"], group.method) and (attack is None or is_of(attack, group.attack))


def _trainings(found: Sequence[Group]) -> list[Group]:
    """One group of every method under every defence: what the model learnt does not depend on the attack."""
    first: dict[tuple[str, str], Group] = {}
    for group in found:
        first.setdefault(group.subject, group)
    return list(first.values())


def _published(figures: Mapping[str, Any]) -> dict[str, str]:
    return {
        "psnr": number(figures.get("psnr"), 2),
        "ssim": number(figures.get("ssim"), 3),
        "lpips": number(figures.get("lpips"), 3),
        **{f"{name}_best" if figures.get("best") else name: percent(figures.get(name), 2) for name in OF_MODELS},
        "cpr": _whole(figures.get("cpr")),
        "sent_share": percent(figures.get("sent_share"), 2),
        "seconds": number(figures.get("seconds"), 2),
    }


def _of_pictures(group: Group) -> dict[str, str]:
    perceptual = lpips(group.pictured)
    return {
        "psnr": interval(group.psnr, 2),
        "ssim": interval(group.interval("ssim"), 3),
        "lpips": interval(group.interval(perceptual), 3) if perceptual else NONE,
    }


def _of_model(run: Run, group: Group, figures: Mapping[str, Any]) -> dict[str, str]:
    """What a method learnt, and what that took."""
    (cost, *_) = [*(cost for cost in costs(run.rounds) if (cost.method, cost.defense) == group.subject), None]
    return {
        **{name: percent(group.over_seeds(f"{name}_last"), 1) for name in OF_MODELS},
        "accuracy": accuracy(run, group, last=True),
        **{name: percent(group.over_seeds(name), 1) for name in BEST},
        "cpr": _whole(cost.up + cost.down if cost else None),
        "sent_share": percent(share(run, group.subject, str(figures.get("beside"))), 1),
        "seconds": number(cost.seconds if cost else None, 2),
    }


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _pairs(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Each figure there and here; one that is not given there is left out here, too."""
    return [
        cell
        for name in FIGURES
        for cell in ((there[name], here.get(name, NONE)) if there.get(name, NONE) != NONE else (NONE, NONE))
    ]
