"""The tables of a report: every figure with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from eval.io.text import join_words, to_sentence
from eval.metrics import statistics, validity_flags
from eval.metrics.score import Row
from eval.report.blocks import Block, DefinitionList, Omission, Section, TableBlock
from eval.report.formatting import (
    ACCURACY_NAMES,
    FURTHER_ACCURACIES,
    NO_VALUE,
    format_error,
    format_interval,
    format_number,
    format_percent,
    format_percent_interval,
    lpips_name,
)
from eval.report.result_groups import (
    BASELINES,
    ResultGroup,
    baseline_scores,
    distinct_images,
    lpips_column,
    share_reaching,
)
from eval.report.sections import identification, published, rounds_to_accuracy
from eval.report.sections.numbered_groups import NumberedGroups
from eval.report.training_results import communication_costs, format_accuracy
from fl.simulation.protocol import NOTHING_SENT

BYTES, MEBI = 4, 2**20


def section(numbered: NumberedGroups) -> Section:
    """Return all tables, with the flags explained."""
    blocks: list[Block] = []
    if numbered.by_number:
        blocks += [_closeness(numbered), _successes(numbered), *_rows_of_tables(numbered)]
        blocks += identification.blocks(numbered)
    blocks += [
        *published.blocks(numbered),
        *_accuracies(numbered),
        *_secrets(numbered),
        *_refusals(numbered),
        *_costs(numbered),
        *rounds_to_accuracy.blocks(numbered.run),
        *_explained(numbered),
    ]
    return Section("tables", "All figures", blocks)


def _floor(numbered: NumberedGroups, guess: str) -> list[str]:
    return numbered.cells("", "baseline", "", BASELINES[guess], "")


def _closeness(numbered: NumberedGroups) -> TableBlock:
    """Return how close reconstructions are to the true images."""
    rows = _all_rows(numbered)
    perceptual = lpips_column(rows)
    extra = [f">{lpips_name(perceptual)}"] if perceptual else []
    limited = any("bound_psnr" in row for row in rows)
    columns = [
        *numbered.columns(),
        ">accuracy",
        ">PSNR (dB)",
        ">above best baseline (dB)",
        ">median (dB)",
        ">SSIM",
        *extra,
        *([">closest code (dB)"] if limited else []),
        ">images",
    ]
    lines = []
    for key, group in numbered.by_number.items():
        found = [group.mean_interval("ssim"), *([group.mean_interval(perceptual)] if perceptual else [])]
        lines.append(
            [
                *numbered.row(key, group),
                format_accuracy(numbered.run, group),
                format_interval(group.psnr),
                format_interval(group.gain, sign=True),
                _median(group.image_rows),
                *(format_interval(value, 2) for value in found),
                *([_mean_bound(group)] if limited else []),
                f"{group.n_images}",
            ]
        )
    lesser = []
    chosen = distinct_images(rows)
    measured = {
        metric: baseline_scores(rows, metric) for metric in ("psnr", "ssim", *([perceptual] if perceptual else []))
    }
    for guess, psnr in measured["psnr"].items():
        middle = _median(chosen, f"floor_{guess}_psnr")
        rest = [format_interval(measured[metric].get(guess), 2) for metric in measured if metric != "psnr"]
        own = [""] if limited else []
        lesser.append([*_floor(numbered, guess), "", format_interval(psnr), "", middle, *rest, *own, f"{psnr.images}"])
    return TableBlock("How close the pictures are", columns, lines, lesser)


def _mean_bound(group: ResultGroup) -> str:
    """Return what an attack that searches in a smaller space than all images could reach at best."""
    known = [row["bound_psnr"] for row in group.image_rows if "bound_psnr" in row]
    return format_number(fmean(known)) if known else NO_VALUE


def _median(rows: Sequence[Row], column: str = "psnr") -> str:
    known = [row[column] for row in rows if row.get(column) is not None]
    return format_number(statistics.median(known)) if known else NO_VALUE


def _successes(numbered: NumberedGroups) -> TableBlock:
    """Return shares of images."""
    columns = [*numbered.columns(), ">≥ 20 dB", ">≥ 25 dB", ">≥ 30 dB", ">exact"]
    columns += [">labels", ">commonest label"]
    lines = []
    for key, group in numbered.by_number.items():
        rates = [format_percent_interval(group.share_reaching(level)) for level in statistics.THRESHOLDS]
        exact = [float(row["exact8"]) for row in group.image_rows if row.get("exact8") is not None]
        labels = [format_percent_interval(group.label_recovery_rate), format_percent(group.commonest_label_share)]
        shares = [format_percent(fmean(exact)) if exact else NO_VALUE]
        lines.append([*numbered.row(key, group), *rates, *shares, *labels])
    chosen = distinct_images(_all_rows(numbered))
    lesser = []
    for guess in BASELINES:
        rates = [
            format_percent_interval(share_reaching(chosen, level, f"floor_{guess}_psnr"))
            for level in statistics.THRESHOLDS
        ]
        if any(rate != NO_VALUE for rate in rates):
            lesser.append([*_floor(numbered, guess), *rates, "", "", ""])
    return TableBlock("How many pictures and labels came back", columns, lines, lesser)


def _rows_of_tables(numbered: NumberedGroups) -> list[Block]:
    """Return how much of the rows came back where inputs are tables."""
    chosen = [row for row in distinct_images(_all_rows(numbered)) if row.get("row_accuracy") is not None]
    if not chosen:
        return []
    columns = [*numbered.columns(), ">columns right", ">categories", ">numbers", ">exact match rate"]
    lines = [
        [*numbered.row(key, group), *_shares_of_rows(group.image_rows)] for key, group in numbered.by_number.items()
    ]
    guesses = [
        [*_floor(numbered, guess), *_shares_of_rows(chosen, f"floor_{guess}_")]
        for guess in BASELINES
        if f"floor_{guess}_row_accuracy" in chosen[0]
    ]
    return [TableBlock("How much of a table's rows came back", columns, lines, guesses)]


def _all_rows(numbered: NumberedGroups) -> list[Row]:
    return [row for group in numbered.by_number.values() for row in group.image_rows]


def _shares_of_rows(rows: Sequence[Row], prefix: str = "") -> list[str]:
    """Return shares of columns that are right, of all and of each kind, and that of rows right in all columns."""
    cells = []
    for name in ("row_accuracy", "categories_right", "numbers_right"):
        known = [row[f"{prefix}{name}"] for row in rows if row.get(f"{prefix}{name}") is not None]
        cells.append(format_percent(fmean(known)) if known else NO_VALUE)
    return [*cells, format_percent_interval(share_reaching(rows, 1, f"{prefix}exact_match"))]


def _accuracies(numbered: NumberedGroups) -> list[Block]:
    """Return what every method under every defense learned, with its other readings where they are on file."""
    first: dict[tuple[str, str], ResultGroup] = {}
    for group in numbered.run.groups:
        if group.by_seed("accuracy_last"):
            first.setdefault(group.subject, group)
    lines = []
    further = [f"accuracy_{name}_last" for name in FURTHER_ACCURACIES]
    for (method, defense), group in first.items():
        ends = [format_percent(group.mean_over_seeds(column), 1) for column in ("accuracy_local_last", *further)]
        lines.append([method, defense, format_accuracy(numbered.run, group, last=True), *ends])
    columns = [
        "method",
        "defense",
        ">after the last round",
        ">after local training",
        *(f">{words}" for words in FURTHER_ACCURACIES.values()),
    ]
    if not lines:
        return []
    return [_filled("Accuracy", columns, lines), *_unscored(numbered), *_bests(first)]


def _filled(caption: str, columns: list[str], lines: list[list[str]]) -> TableBlock:
    """Return a grid without the columns, from the fourth on, that hold nothing."""
    kept = [i for i in range(len(columns)) if i < 3 or any(line[i] != NO_VALUE for line in lines)]
    return TableBlock(caption, [columns[i] for i in kept], [[line[i] for i in kept] for line in lines])


def _bests(first: Mapping[tuple[str, str], ResultGroup]) -> list[Block]:
    """Return every accuracy in its own best round, and which that is; nothing where none is after training."""
    lines, trained = [], False
    for (method, defense), group in first.items():
        cells = []
        for name in ACCURACY_NAMES:
            rounds = list(dict.fromkeys(group.by_seed(f"{name}_best_round").values()))
            trained = trained or any(rounds)
            best = format_percent(group.mean_over_seeds(f"{name}_best"), 1)
            cells.append(f"{best} ({join_words([str(number) for number in rounds])})" if rounds else best)
        lines.append([method, defense, *cells])
    if not trained:
        return []
    columns = ["method", "defense", *(f">{words}" for words in {**ACCURACY_NAMES, "accuracy": "as sent"}.values())]
    words = "picked by the same test images that score it, which makes it look better than it is; mean over seeds."
    return [_filled("Accuracy in the best round (which)", columns, lines), DefinitionList([("The best round", words)])]


def _unscored(numbered: NumberedGroups) -> list[Block]:
    """Return methods where clients that never take part can't be scored, and why."""
    if not numbered.run.settings.section("federation").get("held_out_clients"):
        return []
    silent = {cost.method: None for cost in communication_costs(numbered.run.rounds) if not cost.down}
    words = f"Accuracy {FURTHER_ACCURACIES['unseen']}: {NOTHING_SENT}."
    return [DefinitionList([(f"Missing for {join_words(list(silent))}", words)])] if silent else []


def _secrets(numbered: NumberedGroups) -> list[Block]:
    """Return private tensors that attacks recovered, or tried to."""
    lines = [
        [
            *numbered.row(key, group),
            name,
            secret.share_in_words,
            format_error(secret.best_error),
            format_error(secret.median_error),
            _verified(group),
        ]
        for key, group in numbered.by_number.items()
        for name, secret in group.private_tensors.items()
    ]
    if not lines:
        return []
    figures = ["recovered for", ">least relative error", ">median", "attack's own check"]
    columns = [*numbered.columns(), "private value", *figures]
    return [TableBlock("What else was private", columns, lines)]


def _verified(group: ResultGroup) -> str:
    """Return of how many images the attack could tell its own success."""
    known = [row["verified"] for row in group.attacked_rows if row.get("verified") is not None]
    return f"passed {sum(known)} of {len(known)}" if known else "none"


def _refusals(numbered: NumberedGroups) -> list[Block]:
    """Return attacks that said nothing, and why."""
    if not numbered.run.attacked:
        return []
    lines = [
        [
            group.method,
            group.defense,
            group.attack,
            str(group.round),
            str(amount),
            format_percent(group.accuracy, 1),
            reason,
        ]
        for group in numbered.run.groups
        for reason, amount in group.refusals.items()
    ]
    columns = ["method", "defense", "attack", ">round", ">updates", ">accuracy", "why"]
    return [TableBlock("Where no attack applied", columns, lines)] if lines else []


def _costs(numbered: NumberedGroups) -> list[Block]:
    """Return what a method sends; nothing where none was trained."""
    if numbered.run.captured:
        return []
    if not numbered.run.rounds:
        return [Omission("communication cost", "there is no rounds.jsonl")]
    found = communication_costs(numbered.run.rounds)
    if not found:
        return [Omission("communication cost", "rounds.jsonl holds none of a trained round")]
    lines = [
        [
            cost.method,
            cost.defense,
            f"{cost.up:,.0f}",
            f"{cost.down:,.0f}",
            format_number(BYTES * cost.up / MEBI, 2),
            format_number(BYTES * cost.down / MEBI, 2),
            format_number(cost.clients, 1).removesuffix(".0"),
            str(cost.rounds),
            format_number(cost.seconds, 2),
        ]
        for cost in found
    ]
    sizes = [">numbers up", ">numbers down", ">MiB up", ">MiB down"]
    return [
        TableBlock("Communication", ["method", "defense", *sizes, ">clients", ">rounds", ">seconds"], lines),
        DefinitionList(
            [
                ("Up, down", "numbers one client sends and receives in a round, mean over rounds and seeds."),
                ("MiB up, down", f"these numbers at {BYTES} bytes each."),
                ("Clients", "that take part in a round, on average."),
                ("Seconds", "per round, on the machine below, beside whatever else ran there."),
            ]
        ),
    ]


def _explained(numbered: NumberedGroups) -> list[Block]:
    """Return the flags of every attack, in words."""
    lines = [
        [*numbered.row(key, group), flag, validity_flags.FLAGS[flag]]
        for key, group in numbered.by_number.items()
        for flag in group.flags(numbered.run.settings)
    ]
    missing = _missing(numbered)
    notes: list[Block] = [DefinitionList([("Missing", to_sentence(reason)) for reason in missing])] if missing else []
    if not lines:
        return notes
    return [TableBlock("Flags", [*numbered.columns(), "flag", "what it means"], lines), *notes]


def _missing(numbered: NumberedGroups) -> list[str]:
    """Return why figures could not be taken."""
    reasons = [
        reason if reason.startswith("LPIPS") else f"{lpips_name(name).replace('ssim', 'SSIM')}: {reason}"
        for group in numbered.by_number.values()
        for row in group.attacked_rows
        for name, reason in row.get("missing", {}).items()
        if name == "ssim" or name.startswith("lpips_")
    ]
    return list(dict.fromkeys(reasons))
