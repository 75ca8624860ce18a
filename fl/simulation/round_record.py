"""What a federation's rounds leave in figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fl.simulation.client_round import Round


@dataclass(frozen=True)
class Participation:
    """What a record says of one client's round: all that outlives it beside the client's own state.

    Attributes:
        client: its number.
        accuracy: of its model right after training, where it was asked for.
        numbers: how many it sent.
    """

    client: int
    accuracy: float | None
    numbers: int

    @classmethod
    def of(cls, done: Round) -> Participation:
        """Return the record of a round."""
        return cls(done.upload.client, done.accuracy, done.upload.numbers())


@dataclass(frozen=True)
class Record:
    """A federation after some rounds, in figures.

    Attributes:
        round: how many rounds are behind; 0 is before training.
        clients: who took part in the last of them.
        accuracy: for every participant, the share of its test images that what the server sends now, with the client's
            own private tensors, classifies right; None where it was not asked for.
        accuracy_local: likewise for those that took part, right after their training.
        diagnostics: the parametrization's own figures, means over clients ("active_units", say).
        numbers_up: how many numbers one client sent; 0 before training.
        numbers_down: how many a client is sent now: the most that one of the next round's is.
        seconds: of training, aggregation and evaluation.
        further: scores of the federation's protocol, by name (see `fl.simulation.scores.scores`).
        measured: what else its protocol asks for, in plain data (see `fl.simulation.diagnostics.measured`).
    """

    round: int
    clients: tuple[int, ...]
    accuracy: tuple[float, ...] | None
    accuracy_local: tuple[float, ...] | None
    diagnostics: dict[str, float]
    numbers_up: int
    numbers_down: int
    seconds: float
    further: dict[str, tuple[float, ...]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
