"""How the figures are made, on what machine, and how to make them again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from eval.io.text import to_sentence
from eval.metrics.tables import TOLERANCE
from eval.report.blocks import Block, CodeBlock, DefinitionList, Note, Omission, Paragraph, Section, TableBlock
from eval.report.glossary import glossary, papers_to_cite
from eval.report.load import Run
from eval.report.result_groups import CLEAR_MARGIN, RECOGNIZABLE_PSNR, RECOVERED_BELOW

ACCURACY = (
    "Accuracy",
    "What the method is for: share of its own test images that each client's model gets right, mean over clients and "
    "seeds.",
)
MEASURES = [
    (
        "PSNR",
        "Peak signal-to-noise ratio of a reconstruction in dB, on pixels in [0, 1]: 10 dB more is a tenth of the "
        "squared error. From about 20 dB a person recognizes the content, from 30 there is hardly a difference, "
        "100 is equality. Images of a batch are matched with their reconstructions once, so that the total squared "
        "error is least.",
    ),
    ("SSIM", "Similarity of structures, 1 for equal images (Wang et al., 2004: Gaussian window, sigma 1.5)."),
    (
        "LPIPS",
        "Perceptual distance, 0 for equal images (Zhang et al., CVPR 2018); only where its weights were at hand.",
    ),
    (
        "≥ 20, 25, 30 dB",
        "Share of images whose PSNR reaches that. Exact: every pixel is right after rounding to 8 bits.",
    ),
    (
        "Labels",
        "Share of images whose class was recovered, beside the share of the commonest class among them: what "
        "naming that class every time gets.",
    ),
    (
        "Private values",
        f"Relative error of what a method keeps from the server; below {RECOVERED_BELOW:g} it counts as recovered. An "
        "update that the attack applies to and of which nothing comes back counts as one that is not.",
    ),
    ACCURACY,
]
OF_TABLES = [
    (
        "Columns right",
        "Of a table: share of a row's columns that are right, a category by its likeliest value, a number within "
        f"{TOLERANCE:g} standard deviations of its column (TabLeak, Vero et al., ICML 2023).",
    ),
    (
        "Exact match rate",
        "Share of the rows all of whose columns are right so (Österberg Nilsson et al., 2026). The mean of columns can "
        "be high where no row came back whole.",
    ),
]
CRITERIA = [
    (
        "Baselines",
        "What a guess without any knowledge of the update scores on the same images: one color (the image's own "
        "mean, or mid gray), noise, and the most similar training image that no watched client holds. Two of them "
        "are chosen with the truth at hand, so they are upper bounds of what such a guess can do. A mean whose "
        "interval lies above all baselines has leaked.",
    ),
    (
        "Intervals",
        "95 %, with images as the units: of means Student's, widened for skewed figures and, where an attack solves "
        "some images and misses others, for how little is known of their shares; of shares Clopper and Pearson's. "
        "Differences from baselines are taken image by image. One image has none. An interval of a mean says nothing "
        "of successes that no image showed: those of shares do. Intervals speak of images like these, for this model "
        "and these settings.",
    ),
    (
        "Single images",
        f"An image counts as leaked by itself from {RECOGNIZABLE_PSNR:g} dB on, if it is at least {CLEAR_MARGIN:g} "
        "dB above every "
        "guess of that same image. A mean over many can hide it.",
    ),
    ("Failures", "An image that no reconstruction stands for counts with PSNR 0, not as a gap."),
    ("Choice", "Attacks pick their result by their own objective. The truth is used for scoring only."),
]


def section(run: Run) -> Section:
    """Return measures, criteria, glossary and papers."""
    measures = [*MEASURES, *(OF_TABLES if any(row.get("row_accuracy") is not None for row in run.rows) else ())]
    blocks: list[Block] = (
        [DefinitionList(measures), DefinitionList(CRITERIA)] if run.attacked else [DefinitionList([ACCURACY])]
    )
    if words := glossary(run.settings):
        blocks += [
            Paragraph("What was trained, and what was tried on it:"),
            DefinitionList([(n, to_sentence(w)) for n, w in words]),
        ]
    if cited := papers_to_cite(run.settings):
        blocks += [Paragraph("Papers to cite:"), DefinitionList([(name, to_sentence(words)) for name, words in cited])]
    return Section("method", "How the figures are made", blocks)


def reproduction_section(run: Run) -> Section:
    """Return commands, machine and configuration."""
    blocks: list[Block] = []
    rerun = "" if run.captured else "hyperleak run config.yaml --out ../again\n"
    if command := _command(run.metadata):
        blocks.append(CodeBlock("The command of this run", command))
    else:
        blocks.append(Omission("the command this run was started with", "there is no run.json that holds it"))
    what = "write this report again" if run.captured else "run it again from its settings; write this report again"
    blocks.append(CodeBlock(f"In this folder: {what}", f"{rerun}hyperleak report ."))
    blocks += _machine(run.environment)
    blocks.append(CodeBlock("All settings (config.yaml)", run.config_text.rstrip("\n"), folded=True))
    return Section("again", "To do it again", blocks)


def _command(about: Mapping[str, Any]) -> str:
    command = about.get("command")
    if isinstance(command, list):
        return shlex.join(str(word) for word in command)
    return str(command) if command else ""


def _machine(environment: Mapping[str, Any]) -> list[Block]:
    """Return versions and device, as far as they are on file."""
    if not environment:
        return [Omission("versions and machine", "there is no env.json")]
    blocks: list[Block] = []
    if str(environment.get("commit") or "").endswith("+changes"):
        words = "The program was run from a checkout with uncommitted changes: its commit alone does not give it back."
        blocks.append(Note("Not exactly reproducible", [("uncommitted changes", words)]))
    rows = []
    for key, value in environment.items():
        if key == "seconds":
            continue
        pairs = value.items() if isinstance(value, Mapping) else [(key, value)]
        rows += [[str(name), "not installed" if entry is None else str(entry)] for name, entry in pairs]
    blocks.append(TableBlock("Versions and machine", ["what", "value"], rows))
    seconds = environment.get("seconds")
    if isinstance(seconds, Mapping) and seconds:
        times = [[str(stage), f"{value:,.1f}"] for stage, value in seconds.items() if isinstance(value, int | float)]
        blocks.append(TableBlock("How long it took", ["stage", ">seconds"], times))
    return blocks
