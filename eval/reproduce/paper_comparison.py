"""A run's figures beside those that a paper prints: difference, interval, and whether the paper's lies within."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from eval.experiment.scale_names import Scale
from eval.metrics import statistics
from eval.metrics.score import Row
from eval.metrics.statistics import Interval
from eval.report.formatting import ACCURACY_NAMES, NO_VALUE, format_number, lpips_name
from eval.report.load import Run
from eval.report.result_groups import ResultGroup, lpips_column
from eval.report.results_table import Table
from eval.report.sections.findings import subject_label
from eval.report.sections.published import is_about
from eval.report.sections.rounds_to_accuracy import communication_share
from eval.report.training_results import communication_costs

IMAGES, CLIENTS, SEEDS, NONE = "images", "clients", "seeds", ""
COLUMNS = ("method", "attack", "figure", "paper", "here", "difference", "95 % interval", "over", "paper within")
LEGEND = (
    "Here: of this run. Difference: here less the paper's; of accuracies in points of a percent.",
    "95 % interval: of the mean here, as in the report, over images, over clients, or over seeds where the figure of "
    "every client is not on file; each weighs the same however many seeds it has. It says how sure that mean is, not "
    "how far another partition, or the paper's own seeds, would lie.",
    "Paper within: whether the paper's figure lies in it; a dash where there is no interval, as of one seed.",
)
BEST = ", best round"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a paper beside ours.

    Attributes:
        method, attack: labels; `attack` is None for what a training gives.
        figure: what it is, in words.
        source: where the paper's stands.
        paper: the paper's.
        here: ours; None where the run has none.
        low, high: ends of our 95 % interval; None where there is none.
        over: what the interval is over: "images", "clients", "seeds", or nothing.
        is_share: whether the figures are shares in [0, 1], told in percent.
        note: why ours may differ.
    """

    method: str
    attack: str | None
    figure: str
    source: str
    paper: float
    here: float | None = None
    low: float | None = None
    high: float | None = None
    over: str = NONE
    is_share: bool = False
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Return ours less the paper's."""
        return None if self.here is None else self.here - self.paper

    @property
    def is_within(self) -> bool | None:
        """Return whether the paper's lies in our interval; None where there is none, or it has no width."""
        if self.low is None or self.high is None or self.low == self.high:
            return None
        return self.low <= self.paper <= self.high

    def to_plain(self) -> dict[str, Any]:
        """Return the figures as plain data, with difference and whether the paper's lies within."""
        return {**asdict(self), "difference": self.difference, "paper_within": self.is_within}


def compare_with_paper(run: Run) -> list[Comparison]:
    """Return every figure that the run's config gives of a paper, in its order, beside the run's own."""
    found: list[Comparison] = []
    for figures in run.settings.published:
        groups = [group for group in run.groups if is_about(group, figures)]
        if figures.get("attack") is None:  # what a training gives is the same under every attack
            groups = list({group.subject: group for group in reversed(groups)}.values())[::-1]
        for group in groups:
            found += _compared(run, group, figures)
        if not groups:
            found += _compared(run, None, figures)
    return found


def as_table(found: Sequence[Comparison], title: str, scale: Scale) -> Table:
    """Return the comparison as a table of words.

    Args:
        found: the figures.
        title: of the experiment.
        scale: at which it was run.
    """
    size = "the paper's size" if scale == "paper" else f"scale {scale}, less than the paper's: differences are expected"
    notes = dict.fromkeys(f"{one.method}: {one.note}" for one in found if one.note)
    return Table(
        title=f"{title}, beside the paper ({size})",
        columns=COLUMNS,
        rows=[_cells(one) for one in found],
        baselines=[],
        legend=[*LEGEND, *notes],
    )


def _compared(run: Run, group: ResultGroup | None, figures: Mapping[str, Any]) -> Iterator[Comparison]:
    """Yield the figures of one entry of `published`."""
    method = str(figures["method"]) if group is None else subject_label(group)
    attack = figures.get("attack")
    head: dict[str, Any] = {
        "method": method,
        "attack": attack if group is None or attack is None else group.attack,
        "source": str(figures["source"]),
        "note": str(figures.get("note") or ""),
    }
    rows = [] if group is None else group.image_rows
    for name, words in (("psnr", "PSNR (dB)"), ("ssim", "SSIM"), ("lpips", "LPIPS")):
        if (paper := figures.get(name)) is not None:
            column = lpips_column(rows) if name == "lpips" else name
            told = lpips_name(column) if name == "lpips" and column else words
            known = None if group is None or column is None else group.mean_interval(column)
            yield Comparison(**head, figure=told, paper=paper, **_interval(known, IMAGES))
    for name, words in ACCURACY_NAMES.items():
        if (paper := figures.get(name)) is not None:
            best = bool(figures.get("best"))
            ours = {} if group is None else _accuracy(run, group, name, best=best)
            told = f"accuracy {'' if best and name == 'accuracy' else words}{BEST if best else ''}".replace(" ,", ",")
            yield Comparison(**head, figure=told, paper=paper, is_share=True, **ours)
    yield from _costs(run, group, figures, head)


def _interval(found: Interval | None, over: str) -> dict[str, Any]:
    if found is None:
        return {}
    return {"here": found.value, "low": found.low, "high": found.high, "over": over if found.low is not None else NONE}


def _accuracy(run: Run, group: ResultGroup, name: str, *, best: bool) -> dict[str, Any]:
    """Return an accuracy with its interval over clients where every client's is on file, else over seeds."""
    by_seed = group.by_seed(f"{name}_{'best' if best else 'last'}")
    if not by_seed:
        return {}
    clients = [row for seed in by_seed for row in _clients(run, group, name, seed, best=best)]
    one_model = len({(row["seed"], row["accuracy"]) for row in clients}) == len(by_seed)  # for all, on one test
    if clients and not one_model and len({row["seed"] for row in clients}) == len(by_seed):
        found = statistics.mean_interval(clients, "accuracy", image="client")
        if abs(found.value - fmean(by_seed.values())) < 1e-6:
            return _interval(found, CLIENTS)
    seeds = [{"seed_as_image": seed, "accuracy": value} for seed, value in by_seed.items()]
    return _interval(statistics.mean_interval(seeds, "accuracy", image="seed_as_image"), SEEDS)


def _clients(run: Run, group: ResultGroup, name: str, seed: int, *, best: bool) -> list[Row]:
    """Return the accuracy of every client in the last round of a seed, or in its best; nothing where not on file."""
    own = [
        row
        for row in run.rounds
        if (row["method"], row["defense"], row["seed"]) == (*group.subject, seed) and row.get(name) is not None
    ]
    if best:
        number = group.by_seed(f"{name}_best_round").get(seed)
        own = [row for row in own if row["round"] == number]
    if not own:
        return []
    row = max(own, key=lambda one: one["round"])
    further = row.get("accuracies_further") or {}
    values = row.get("accuracies") if name == "accuracy" else further.get(name.removeprefix("accuracy_"))
    return [{"client": i, "seed": seed, "accuracy": value} for i, value in enumerate(values or []) if value is not None]


def _costs(
    run: Run, group: ResultGroup | None, figures: Mapping[str, Any], head: Mapping[str, Any]
) -> Iterator[Comparison]:
    """Yield figures of communication and time, which have no interval."""
    costs = communication_costs(run.rounds)
    cost = next((one for one in costs if group is not None and (one.method, one.defense) == group.subject), None)
    if figures.get("cpr") is not None:
        yield Comparison(
            **head,
            figure="numbers up and down a round",
            paper=figures["cpr"],
            here=None if cost is None else cost.up + cost.down,
        )
    if figures.get("communication_share") is not None:
        other = str(figures.get("reference_method"))
        share = None if group is None else communication_share(run, group.subject, other)
        yield Comparison(
            **head,
            figure=f"numbers until the best round, as a share of {other}'s",
            paper=figures["communication_share"],
            here=share,
            is_share=True,
        )
    if figures.get("seconds") is not None:
        seconds = None if cost is None else cost.seconds
        yield Comparison(**head, figure="seconds a round", paper=figures["seconds"], here=seconds)


def _cells(comparison: Comparison) -> tuple[str, ...]:
    factor, digits = (100.0, 2) if comparison.is_share else (1.0, _digits(comparison.figure))

    def told(value: float | None, *, sign: bool = False) -> str:
        if value is not None and digits == 0:
            return f"{factor * value:{'+' if sign else ''},.0f}".replace("-", "\N{MINUS SIGN}")
        return format_number(None if value is None else factor * value, digits, sign=sign)

    span = NO_VALUE if comparison.low is None else f"[{told(comparison.low)}, {told(comparison.high)}]"
    within = {True: "yes", False: "no", None: NO_VALUE}[comparison.is_within]
    figure = f"{comparison.figure} (%)" if comparison.is_share else comparison.figure
    return (
        *(
            comparison.method,
            comparison.attack or NO_VALUE,
            figure,
            told(comparison.paper),
            told(comparison.here) if comparison.here is not None else "not run",
        ),
        *(told(comparison.difference, sign=True), span, comparison.over or NO_VALUE, within),
    )


def _digits(figure: str) -> int:
    if figure.startswith("numbers"):
        return 0
    return 3 if figure.startswith(("SSIM", "LPIPS")) else 2
