"""The table of results, in plain text first: what it says is decided here, how it looks elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from attacks.base import Chain
from eval.experiment import sweep, yaml_config
from eval.experiment.capture_spec import CaptureSpec
from eval.experiment.docstrings import summarize
from eval.experiment.spec import Experiment
from eval.io.sanitize import escape_markdown
from eval.metrics import validity_flags
from eval.metrics.lineup import BY_FEATURES, BY_PICTURE, BY_UPDATE
from eval.metrics.score import Row
from eval.metrics.statistics import Interval
from eval.report.formatting import lpips_name
from eval.report.result_groups import (
    BASELINES,
    CLEAR_MARGIN,
    MIN_IMAGES,
    NOT_ATTACKED,
    OWN_BASELINES,
    RECOGNIZABLE_PSNR,
    RECOVERED_BELOW,
    ResultGroup,
    baseline_scores,
    distinct_images,
    exceeds_baseline,
    group_rows,
    lpips_column,
    share_reaching,
)
from eval.report.sections.findings import subject_label
from eval.report.sections.overview import NO_ATTACK_ASKED
from eval.report.settings import RunSettings

PSNR = (
    "PSNR (dB): how close a reconstruction is to the true image, [95 % interval over images and seeds]. From about 20 "
    "a person recognizes the content, from 30 there is hardly a difference; 100 is equality."
)
BASELINE = (
    "Baseline: what a guess without any knowledge of the client scores on the same images: one color (the image's own "
    "mean, or mid gray), noise, the most similar image of other clients. A mean PSNR counts as "
    "leaked where its interval lies above all baselines."
)
SSIM = "SSIM: similarity of structures, 1 for equal images."
LPIPS = "LPIPS: perceptual distance, 0 for equal images."
RATES = "≥20, ≥30: share of images whose PSNR reaches that. Labels: share of images whose class was recovered."
ACCURACY = (
    "Accuracy: what the method learned: share of each client's test images that the aggregated model of {when} gets "
    "right, with the client's own private weights, mean over clients."
)
NAMED = (
    "Named: share of images told from up to 49 others of their class: by picture / by features of the attacked network "
    "/ by the update alone, which takes no reconstruction."
)
VALUE_COLUMNS = ("accuracy", "PSNR (dB)", "SSIM", "LPIPS", "≥20", "≥30", "labels", "named")
COLUMNS = ("method", "defense", "attack", *VALUE_COLUMNS, "flags")


@dataclass(frozen=True)
class Table:
    """A table of words.

    Attributes:
        title: above it.
        columns: their names.
        rows: the attacks.
        baselines: what guesses score, in the same columns.
        legend: what to know to read it, a sentence or two each.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    baselines: list[tuple[str, ...]]
    legend: list[str]


def build_table(rows: Sequence[Row], experiment: Experiment | CaptureSpec) -> Table:
    """Return the table of an experiment's rows.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("expected rows of at least one attack, got none; see `against` of the attacks")
    found, setting = group_rows(rows), RunSettings.from_plain(yaml_config.to_plain(experiment))
    several = len({group.round for group in found}) > 1
    raised: dict[str, None] = {}
    lines = [_line(group, setting, several, raised) for group in found]
    below = _baseline_lines(rows)
    idle = {"defense": "none", "LPIPS": "-", "named": "-"}  # a column that says only this is left out
    if not _attacked(found):
        idle |= {"attack": NOT_ATTACKED, **dict.fromkeys(VALUE_COLUMNS, "-")}
        lines = [(*line[:-1], "-") for line in lines]  # the legend says it once
    filled = [i for i, name in enumerate(COLUMNS) if any(line[i] != idle.get(name) for line in lines)]
    further = [name for name in ("LPIPS", "named") if COLUMNS.index(name) in filled]
    return Table(
        title=experiment.title or "What leaked",
        columns=tuple(_named_columns(rows)[i] for i in filled),
        rows=[tuple(line[i] for i in filled) for line in lines],
        baselines=[tuple(line[i] for i in filled) for line in below],
        legend=_legend(rows, experiment, raised, further),
    )


def _named_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns' names, LPIPS with its backbone."""
    perceptual = lpips_column(rows)
    return [lpips_name(perceptual) if perceptual and name == "LPIPS" else name for name in COLUMNS]


def to_markdown(content: Table) -> str:
    """Return the table in Markdown."""
    lines = [f"# {escape_markdown(content.title)}", "", _cells(content.columns), _rule(len(content.columns))]
    lines += [_cells(row) for row in (*content.rows, *content.baselines)]
    return "\n".join([*lines, "", *(f"- {escape_markdown(sentence)}" for sentence in content.legend)]) + "\n"


def _attacked(found: Sequence[ResultGroup]) -> bool:
    return any(group.attack != NOT_ATTACKED for group in found)


def _rule(columns: int) -> str:
    return f"| {' | '.join(['---'] * columns)} |"


def _cells(words: Sequence[str]) -> str:
    return f"| {' | '.join(escape_markdown(word) for word in words)} |"


def _line(group: ResultGroup, setting: RunSettings, several: bool, raised: dict[str, None]) -> tuple[str, ...]:
    """Return the figures of one setting, or why there are none."""
    name = f"{group.attack} (round {group.round})" if several else group.attack
    accuracy = "-" if group.accuracy is None else f"{group.accuracy:.1%}"
    head = (group.method, group.defense, name, accuracy)
    if group.attack == NOT_ATTACKED:
        return (*head, *["-"] * 7, next(iter(group.refusals)))
    if not group.attacked_rows:
        return (*head, "not applicable", *["-"] * 6, next(iter(group.refusals)))
    found = group.flags(setting)
    raised.update(dict.fromkeys(found))
    refused = sum(group.refusals.values())
    words = [*found, *([f"not applicable to {refused}"] if refused else [])]
    labels = "-" if group.label_recovery_rate is None else f"{group.label_recovery_rate.value:.0%}"
    return (*head, *_figures(group.attacked_rows, "", group.psnr), labels, _named(group), ", ".join(words) or "-")


def _named(group: ResultGroup) -> str:
    """Return the shares of images named, by picture / by features / by update."""
    ways = [group.identification_by(way) for way in (BY_PICTURE, BY_FEATURES, BY_UPDATE)]
    shares = ["-" if way is None else f"{way.hits / way.images:.0%}" for way in ways]
    return " / ".join(shares) if any(ways) else "-"


def _figures(rows: Sequence[Row], prefix: str, psnr: Interval | None) -> tuple[str, ...]:
    """Return PSNR, SSIM, LPIPS and success rates of the columns that begin with `prefix`."""
    if psnr is None:
        return ("-", "-", "-", "-", "-")
    interval = "" if psnr.low is None or psnr.high is None else f" [{psnr.low:.1f}, {psnr.high:.1f}]"
    rates = (share_reaching(rows, level, f"{prefix}psnr") for level in (20, 30))
    perceptual = lpips_column(rows)
    closeness = (_mean(rows, prefix + name) if name else "-" for name in ("ssim", perceptual))
    return (
        f"{psnr.value:.1f}{interval}",
        *closeness,
        *("-" if rate is None else f"{rate.value:.0%}" for rate in rates),
    )


def _mean(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows if row.get(column) is not None]
    return f"{fmean(values):.2f}" if values else "-"


def _verdicts(found: Sequence[ResultGroup], several: bool) -> list[str]:
    """Return what leaked, pictures and private tensors, in a sentence for every method and attack."""
    lines = []
    tests = Counter(subject_label(group) for group in found if group.identification is not None)
    for group in found:
        what = f"{subject_label(group)} under {group.attack}" + (f" (round {group.round})" if several else "")
        lines += [
            f"{what}: {said}." for said in (*_content_notes(group, tests[subject_label(group)]), *_secrets(group))
        ]
    return lines


def _content_notes(group: ResultGroup, tests: int) -> list[str]:
    """Return PSNR against the best baseline, and images named, as the most telling of so many `tests`."""
    gain, floor = group.gain, group.best_baseline
    if gain is None or floor is None:
        return []
    guess, score = floor
    if gain.low is None or gain.high is None or gain.images < MIN_IMAGES:
        verdict = "too few pictures to tell content from chance"
    elif gain.low > 0:
        verdict = "the update gives picture content away"
    elif gain.high < 0:
        verdict = "no more than a guess without the update"
    else:
        verdict = "not told apart from a guess without the update"
    lines = [f"{verdict} ({gain.value:+.1f} dB against the best baseline, {OWN_BASELINES[guess]} at {score:.1f} dB)"]
    named = group.identification
    if named is not None and named.excess_over_chance(tests) > 0 and not exceeds_baseline(gain):
        lines.append(
            f"but {named.hits} of {named.images} pictures were named among others of their class (by chance "
            f"{100 * named.chance:.0f} %)"
        )
    if group.leaked_rows and not exceeds_baseline(gain):
        lines.append(
            f"but {len(group.leaked_rows)} of {len(group.image_rows)} pictures came back recognizable "
            f"({RECOGNIZABLE_PSNR:g} dB or "
            f"more, {CLEAR_MARGIN:g} above every guess)"
        )
    return lines


def _secrets(group: ResultGroup) -> list[str]:
    """Return for how many updates the embedding and the generated extractor were recovered."""
    lines = []
    for what in ("embedding", "extractor"):
        if (secret := group.private_tensors.get(what)) is not None:
            best = "" if secret.best_error is None else f", at best {secret.best_error:.0e}"
            lines.append(
                f"the private {what} was recovered for {secret.share_in_words} (relative error below "
                f"{RECOVERED_BELOW:g}{best})"
            )
    return lines


def _accuracy(found: Sequence[ResultGroup], experiment: Experiment) -> str:
    """Return what the column of accuracies is of: every line has that of its own round."""
    last = {entry.label: sweep.experiment_of(experiment, entry, None).federation.rounds for entry in experiment.method}
    if all(group.round == last.get(group.method) for group in found):
        return ACCURACY.format(when="the last round")
    rounds = {group.round for group in found}
    return ACCURACY.format(when="the round in brackets" if len(rounds) > 1 else f"round {min(rounds)}")


def _baseline_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the baselines of all attacked images, each counted once per seed."""
    chosen, found = distinct_images(rows), baseline_scores(rows)
    return [
        ("baseline", "", BASELINES[guess], "", *_figures(chosen, f"floor_{guess}_", psnr), "-", "-", "-")
        for guess, psnr in found.items()
    ]


def _legend(
    rows: Sequence[Row], experiment: Experiment | CaptureSpec, raised: Mapping[str, None], further: Sequence[str]
) -> list[str]:
    """Return what leaked, and what to know of the columns, `further` ones among them."""
    found = group_rows(rows)
    several = len({group.round for group in found}) > 1
    leakage = [PSNR, BASELINE, SSIM, *([LPIPS] if "LPIPS" in further else []), RATES]
    leakage += [NAMED] if "named" in further else []
    lines = [
        *_verdicts(found, several),
        *(leakage if _attacked(found) else [NO_ATTACK_ASKED]),
        *([_accuracy(found, experiment)] if isinstance(experiment, Experiment) else []),
    ]
    lines += [f"Method {entry.label}: {summarize(type(entry.item))}." for entry in experiment.method]
    defenses = [entry for entry in experiment.defense if entry.item.name != "none"]
    lines += [f"Defense {entry.label}: {summarize(type(entry.item))}." for entry in defenses]
    for entry in experiment.attack:
        item = entry.item
        parts = [item.first, item.then] if isinstance(item, Chain) else [item]
        lines.append(f"Attack {entry.label}: {'; then '.join(summarize(type(part)) for part in parts)}.")
    lines += [f"Flag {name}: {validity_flags.FLAGS[name]}" for name in raised]
    reasons = {reason for row in rows for name, reason in row.get("missing", {}).items() if name.startswith("lpips_")}
    return [*lines, *sorted(reason for reason in reasons if reason.startswith("LPIPS not available"))]
