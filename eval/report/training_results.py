"""What methods learned, with intervals, and what they sent: from `rounds.jsonl` and the rows of attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from eval.metrics import statistics
from eval.metrics.score import Row
from eval.metrics.statistics import Interval
from eval.report.formatting import format_percent, format_percent_interval
from eval.report.load import Run
from eval.report.result_groups import ResultGroup


def accuracy_interval(run: Run, group: ResultGroup, *, last: bool = False) -> Interval | None:
    """Return the group's accuracy over clients and seeds; None where the clients' own are not on file.

    Args:
        run: the run.
        group: one of its groups.
        last: whether after the last round of training rather than in the group's.
    """
    column = "accuracy_last" if last else "accuracy"
    clients: list[Row] = []
    for seed, accuracy in group.by_seed(column).items():
        rows = [
            row
            for row in run.rounds_of.get((*group.subject, seed), ())
            if row.get("accuracy") is not None and (last or row["round"] == group.round)
        ]
        own = max(rows, key=lambda row: row["round"], default=None)
        if own is None or abs(own["accuracy"] - accuracy) > 1e-9:  # of another model
            return None
        clients += [{"client": i, "seed": seed, "accuracy": a} for i, a in enumerate(own.get("accuracies") or [])]
    known = [row for row in clients if row["accuracy"] is not None]
    found = statistics.mean_interval(known, "accuracy", image="client") if known else None
    return found if found is not None and abs(found.value - (group.mean_over_seeds(column) or 0.0)) < 1e-6 else None


def format_accuracy(run: Run, group: ResultGroup, *, last: bool = False) -> str:
    """Return the group's accuracy in words, with its interval where there is one; as `accuracy_interval`.

    Args:
        run: the run.
        group: one of its groups.
        last: whether after the last round of training rather than in the group's.
    """
    clients = accuracy_interval(run, group, last=last)
    known = group.mean_over_seeds("accuracy_last") if last else group.accuracy
    return format_percent_interval(clients, 1) if clients else format_percent(known, 1)


@dataclass(frozen=True)
class CommunicationCost:
    """What a method under a defense sends and takes, per client and round where not said otherwise.

    Attributes:
        method, defense: of whom.
        up, down: numbers sent by and to one client.
        clients: that took part, on average.
        rounds: trained, of the seed with most.
        seconds: per round; None where it is not on file.
    """

    method: str
    defense: str
    up: float
    down: float
    clients: float
    rounds: int
    seconds: float | None


def communication_costs(rows: Sequence[Row]) -> list[CommunicationCost]:
    """Return the costs of every method under every defense that trained for at least one round."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["round"] > 0 and row.get("numbers_up") is not None and row.get("numbers_down") is not None:
            found.setdefault((row["method"], row["defense"]), []).append(row)
    return [
        CommunicationCost(
            *key,
            up=fmean(row["numbers_up"] for row in own),
            down=fmean(row["numbers_down"] for row in own),
            clients=fmean(_amount(row.get("clients")) for row in own),
            rounds=max(row["round"] for row in own),
            seconds=fmean(times)
            if (times := [row["seconds"] for row in own if row.get("seconds") is not None])
            else None,
        )
        for key, own in found.items()
    ]


def _amount(clients: object) -> int:
    """Return how many clients: `clients` holds their numbers, or how many there were."""
    return clients if isinstance(clients, int) else len(clients) if isinstance(clients, list) else 0
