"""A report put together from a run directory; how it looks is decided elsewhere."""

from __future__ import annotations

from pathlib import Path

from eval.report.blocks import Block, Omission, Paragraph, Report, Section
from eval.report.load import load
from eval.report.sections import figures, gallery, methodology, overview, privacy, tables
from eval.report.sections.findings import lead_sentence
from eval.report.sections.numbered_groups import NumberedGroups

MAX_GALLERIES = 24
"""Attacks whose pictures are shown."""


def build_report(folder: str | Path, *, show: bool = True) -> Report:
    """Return the report of a run directory, as data.

    Args:
        folder: that `hyperleak run` has written.
        show: whether private pictures are shown.

    Raises:
        FileNotFoundError: it is no run directory.
        ValueError: a file in it is damaged; says which.
    """
    run = load(folder)
    numbered = NumberedGroups.from_run(run)
    first, found = overview.verdict_section(numbered)
    told = lead_sentence(found) if run.attacked else overview.NO_ATTACK_ASKED
    sections = [
        first,
        *([overview.attacker_section(numbered)] if run.attacked else []),
        *privacy.section(numbered),
        figures.section(numbered),
        *([_pictures(numbered, show)] if run.attacked else []),
        tables.section(numbered),
        methodology.section(run),
        methodology.reproduction_section(run),
    ]
    facts = [
        *overview.facts(run),
        *([("Differential privacy", words)] if (words := privacy.claims_at_a_glance(run)) else []),
    ]
    return Report(run.title, told, facts, sections, privacy.alarms(numbered))


def _pictures(numbered: NumberedGroups, show: bool) -> Section:
    blind = not any(group.image_rows for group in numbered.charted.values())
    title = "Reconstructions" if blind else "Originals and reconstructions"
    if not show:
        return Section(
            "pictures", title, [Omission("pictures", "they were left out on request, as they are private data")]
        )
    blocks: list[Block] = []
    for key, group in list(numbered.charted.items())[:MAX_GALLERIES]:
        try:
            blocks.append(
                gallery.build_gallery(numbered.run, group, f"picture-{key}", f"{key}  {numbered.label(group)}")
            )
        except ValueError as error:
            blocks.append(Omission(f"pictures of {numbered.label(group)}", str(error)))
    if not blocks:
        return Section("pictures", title, [Omission("pictures", "no attack applied")])
    words = (
        "Originals above, reconstructions below, with their PSNR. Which are shown is a rule, not a choice: of all "
        "images and seeds of an attack the one with the highest PSNR, the median (the lower of two) and the lowest."
    )
    if blind:
        words = (
            f"What attacks brought, at most {gallery.MAX_UNJUDGED} images of each. Nobody gave the true images, so "
            "none stands beside them, and no PSNR says how close they are."
        )
    if (left := len(numbered.charted) - MAX_GALLERIES) > 0:
        words += f" The first {MAX_GALLERIES} attacks are shown; {left} more are in images/."
    private = (
        "These are images of the watched clients: private data, unless the data set is public. Whoever "
        "gets this report gets them."
    )
    return Section("pictures", title, [Paragraph(words), Paragraph(private), *blocks])
