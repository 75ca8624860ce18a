"""The section's part on what was measured beside accuracy (`federation.diagnostics`).

Losses, distances and cosines of clients' weights have a figure over rounds each; so has every number of the server's
own step, client by client. Similarities and confidences are shown as they were after the last scored round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

from eval.io.text import join_words
from eval.metrics.score import Row
from eval.report.blocks import Block, FigureBlock, Omission, TableBlock
from eval.report.charts.specs import Heatmap
from eval.report.charts.style import SERIES as COLORS
from eval.report.formatting import format_number, format_percent
from eval.report.load import Run
from eval.report.round_series import Line, RoundSeries, RowValue, line_figure

MAX_CLIENTS = 50
"""Clients whose similarities are drawn."""
MAX_LINES = len(COLORS)
"""Clients in one figure: as many as there are looks of lines."""
EQUAL_WITHIN = 1e-6
"""How far below 1 the cosine of equal weights may come out."""
SERVER_STEP = "Numbers of the server's step"


def _loss(row: Row) -> float | None:
    value = row.get("loss")
    return float(value) if value is not None else None


def _movement(row: Row) -> float | None:
    return _mean(row.get("movement") or [])


def _similarity(row: Row) -> float | None:
    rows = row.get("similarity") or []
    return _mean([rows[i][j] for i, j in combinations(range(len(rows)), 2)])


def _divergence(row: Row) -> float | None:
    return _mean(list((row.get("divergence") or {}).values()))


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where there is nothing, or one of the values is no number."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


SERIES: Mapping[str, tuple[str, str, RowValue]] = {
    "loss": ("Loss on training images", "cross entropy (nats)", _loss),
    "movement": ("Movement of clients' weights in a round", "distance", _movement),
    "similarity": ("Similarity of clients' weights", "cosine, mean over pairs", _similarity),
    "divergence": ("Divergence of clients' weights", "distance, mean over pairs and layers", _divergence),
}
"""Title, name of the axis and value of everything that has a figure over rounds, by the figure's name."""


def series_of_methods(run: Run) -> list[tuple[str, str, str, RowValue]]:
    """Return (name, title, name of the axis, value) of the figures over rounds that have a line for each method."""
    names = dict.fromkeys(name for row in run.rounds for name in row.get("diagnostics") or {})
    own = []
    for i, name in enumerate(names, 1):
        words = name.replace("_", " ")
        own.append((f"diagnostic-{i}", f"{words.capitalize()} over rounds", words, partial(_diagnostic, name=name)))
    return [*own, *((name, *figure) for name, figure in SERIES.items())]


def _diagnostic(row: Row, name: str) -> float | None:
    """Return a number that the method itself names (`Method.diagnostics`)."""
    values = row.get("diagnostics")
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) else None


def blocks(run: Run) -> list[Block]:
    """Return similarities and confidences of the end of training, and figures of the server's step.

    The end is the last scored round of every training's first seed.
    """
    last: dict[tuple[str, str], Row] = {}
    for row in run.rounds:
        key = (row["method"], row["defense"])
        if row.get("accuracy") is not None and last.get(key, row)["seed"] == row["seed"]:
            last[key] = row
    maps = [
        _similarity_figure(i, row) for i, row in enumerate(last.values(), 1) if len(row.get("similarity") or []) > 1
    ]
    return [*maps, *_confidences(list(last.values())), *_server_step(run)]


def _similarity_figure(which: int, row: Row) -> Block:
    """Return a heat map of who resembles whom (HyperFedNet, Figure 5)."""
    title = (
        f"Similarity of clients' weights: {row['method']}, {row['defense']}, round {row['round']}, seed {row['seed']}"
    )
    if len(row["similarity"]) > MAX_CLIENTS:
        return Omission(title, f"more than {MAX_CLIENTS} clients; the figures are in rounds.jsonl")
    matrix = [[float(value) for value in line if value is not None] for line in row["similarity"]]
    if any(len(line) < len(matrix) for line in matrix):
        return Omission(title, "a client's weights are all zero or no numbers")
    low = min(value for line in matrix for value in line)
    least = _format_below_one(low)
    cosines, shades = f"Cosines from {least} to 1", f"Darker cells: more alike; white is {least}, full color 1"
    if 1 - low < EQUAL_WITHIN:
        cosines, shades = "All cosines are 1", "All are alike: full color is a cosine of 1"
    alt = f"{title}. {cosines}, clients 0 to {len(matrix) - 1} to the right and downwards."
    caption = f"{shades}. Clients by number, from 0."
    chart = Heatmap(matrix, 1.0 if 1 - low < EQUAL_WITHIN else low, 1.0)
    return FigureBlock(f"similarity-{which}", title, chart, alt, caption, widths=(420, 300))


def _format_below_one(low: float) -> str:
    """Return a number with three digits, or as many as it takes not to read as 1."""
    words = [format_number(low, digits) for digits in range(3, 8)]
    return next((word for word in words if not word.startswith("1")), words[-1])


def _confidences(rows: Sequence[Row]) -> list[Block]:
    """Return how sure models are where they are right and where they are wrong (hFedF, Figure 6b)."""
    lines, bins = [], 0
    for row in rows:
        for where, answers in (row.get("confidence") or {}).items():
            for answer, counts in answers.items():
                total, bins = sum(counts), len(counts)
                shares = [format_percent(count / total) if total else format_percent(None) for count in counts]
                lines.append([row["method"], row["defense"], where, answer, f"{total}", *shares])
    if not lines:
        return []
    ends = [f">{i / bins:g} to {(i + 1) / bins:g}" for i in range(bins)]
    columns = ["method", "defense", "images", "answer", ">how many", *ends]
    seeds = join_words(list(dict.fromkeys(f"{row['seed']}" for row in rows if row.get("confidence"))))
    return [TableBlock(f"Probability of the class named, after the last round (seed {seeds})", columns, lines)]


def _server_step(run: Run) -> list[Block]:
    """Return a figure of every number of every training that has some; one reason for those that have none."""
    asked: dict[tuple[str, str], list[Row]] = {}
    for row in run.rounds:
        if row.get("server") is not None:
            asked.setdefault((row["method"], row["defense"]), []).append(row)
    figures: list[Block] = []
    for subject, rows in asked.items():
        for name in dict.fromkeys(name for row in rows for name in row["server"]):
            figures.append(
                _client_figure(f"server-{len(figures) + 1}", f"{name.capitalize()}: {', '.join(subject)}", name, rows)
            )
    silent = [", ".join(subject) for subject, rows in asked.items() if not any(row["server"] for row in rows)]
    if silent:
        figures.append(
            Omission(f"{SERVER_STEP}: {join_words(silent)}", "the method says nothing of single clients there")
        )
    return figures


def _client_figure(key: str, title: str, name: str, rows: Sequence[Row]) -> Block:
    """Return one number over rounds, a line for each client."""
    by_client = _by_client(name, rows)
    if len(by_client) > MAX_LINES:
        return Omission(title, f"more than {MAX_LINES} clients; the figures are in rounds.jsonl")
    if not by_client:
        return Omission(title, "none of its values is a number")
    lines = [Line([f"client {client}"], look, series) for look, (client, series) in enumerate(by_client.items())]
    return line_figure(key, title, name, ["whose"], lines)


def _by_client(name: str, rows: Sequence[Row]) -> dict[int, RoundSeries]:
    """Return a number over rounds for every client that took part in a scored round, by its number, ascending."""
    by_client: dict[int, RoundSeries] = {}
    for row in rows:
        if name not in row["server"]:
            continue
        for client, value in zip(row["clients"], row["server"][name], strict=True):
            if value is not None:
                own = by_client.setdefault(client, RoundSeries(row["method"], row["defense"], {}))
                own.values.setdefault(int(row["round"]), {})[row["seed"]] = float(value)
    return dict(sorted(by_client.items()))
