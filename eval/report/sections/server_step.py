"""Numbers of the server's own step (`federation.diagnostics: server`), client by client over rounds."""

from __future__ import annotations

from collections.abc import Sequence

from eval.io.text import join
from eval.metrics.score import Row
from eval.report import curves
from eval.report.blocks import Block, Omission
from eval.report.load import Run
from eval.report.round_series import RoundSeries

MAX_LINES = 8
"""Clients in one figure: as many as there are looks of lines."""
TITLE = "Numbers of the server's step"


def blocks(run: Run) -> list[Block]:
    """A figure of every number of every training that has some; one reason for those that have none."""
    asked: dict[tuple[str, str], list[Row]] = {}
    for row in run.rounds:
        if row.get("server") is not None:
            asked.setdefault((row["method"], row["defense"]), []).append(row)
    found: list[Block] = []
    for subject, rows in asked.items():
        for name in dict.fromkeys(name for row in rows for name in row["server"]):
            found.append(_block(f"server-{len(found) + 1}", f"{name.capitalize()}: {', '.join(subject)}", name, rows))
    silent = [", ".join(subject) for subject, rows in asked.items() if not any(row["server"] for row in rows)]
    if silent:
        found.append(Omission(f"{TITLE}: {join(silent)}", "the method says nothing of single clients there"))
    return found


def _block(key: str, title: str, name: str, rows: Sequence[Row]) -> Block:
    """One number over rounds, a line for each client."""
    by_client = _by_client(name, rows)
    if len(by_client) > MAX_LINES:
        return Omission(title, f"more than {MAX_LINES} clients; the figures are in rounds.jsonl")
    if not by_client:
        return Omission(title, "none of its values is a number")
    labels = {"whose": [f"client {client}" for client in by_client]}
    return curves.line_figure(key, title, name, labels, list(by_client.values()), range(len(by_client)))


def _by_client(name: str, rows: Sequence[Row]) -> dict[int, RoundSeries]:
    """The course of a number for every client that took part in a scored round, by its number, ascending."""
    found: dict[int, RoundSeries] = {}
    for row in rows:
        if name not in row["server"]:
            continue
        for client, value in zip(row["clients"], row["server"][name], strict=True):
            if value is not None:
                own = found.setdefault(client, RoundSeries(row["method"], row["defense"], {}))
                own.values.setdefault(int(row["round"]), {})[row["seed"]] = float(value)
    return dict(sorted(found.items()))
