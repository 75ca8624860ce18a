"""A paper's figures beside those of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.report.blocks import Block, Grid, Items
from eval.report.overview import Numbered
from eval.report.rounds import accuracy
from eval.report.summary import Group, lpips
from eval.report.words import NONE, interval, number, percent

FIGURES = {"psnr": "PSNR (dB)", "ssim": "SSIM", "lpips": "LPIPS", "accuracy": "accuracy"}


def blocks(numbered: Numbered) -> list[Block]:
    """A table of published figures and ours, and in words why they may differ; nothing where the config names none."""
    lines, notes = [], []
    for figures in numbered.run.setting.published:
        head = [str(figures["method"]), str(figures.get("attack") or NONE), str(figures["source"])]
        found = [group for group in numbered.run.groups if _about(group, figures)]
        given = _published(figures)
        for group in found:
            lines.append([*head, str(group.round), *_pairs(given, _ours(numbered, group))])
        if not found:
            lines.append([*head, NONE, *_pairs(given, dict.fromkeys(FIGURES, NONE))])
        if figures.get("note"):
            notes.append((" under ".join(word for word in head[:2] if word != NONE), str(figures["note"])))
    if not lines:
        return []
    columns = ["method", "attack", "source", ">after round"]
    columns += [name for figure in FIGURES.values() for name in (f">{figure} there", ">here")]
    kept = [*range(4)]
    for i in range(4, len(columns), 2):
        kept += [i, i + 1] if any(line[i] != NONE for line in lines) else []
    grid = Grid("Published figures and ours", [columns[i] for i in kept], [[line[i] for i in kept] for line in lines])
    return [grid, *([Items(notes)] if notes else [])]


def _about(group: Group, figures: Mapping[str, Any]) -> bool:
    """Whether a group is what the figures are of; a sweep's values (`ig@tv=0.01`) count as what they are made of."""
    method = figures["method"] in {group.method, group.method.partition("@")[0]}
    return method and figures.get("attack") in {None, group.attack, group.attack.partition("@")[0]}


def _published(figures: Mapping[str, Any]) -> dict[str, str]:
    return {
        "psnr": number(figures.get("psnr"), 2),
        "ssim": number(figures.get("ssim"), 3),
        "lpips": number(figures.get("lpips"), 3),
        "accuracy": percent(figures.get("accuracy"), 2),
    }


def _ours(numbered: Numbered, group: Group) -> dict[str, str]:
    perceptual = lpips(group.pictured)
    return {
        "psnr": interval(group.psnr, 2),
        "ssim": interval(group.interval("ssim"), 3),
        "lpips": interval(group.interval(perceptual), 3) if perceptual else NONE,
        "accuracy": accuracy(numbered.run, group),
    }


def _pairs(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [cell for name in FIGURES for cell in (there[name], here[name])]
