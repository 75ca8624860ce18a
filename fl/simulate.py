"""The public import of one client's round, and of what the server sees of it (code: `fl.simulation.client_round`)."""

from fl.simulation.client_round import (
    ClientState,
    PreparedRound,
    Round,
    RoundKey,
    finish,
    observe,
    prepare,
    public_task,
    to_contiguous,
    train,
)
from fl.types import Truth

__all__ = [
    "ClientState",
    "PreparedRound",
    "Round",
    "RoundKey",
    "Truth",
    "finish",
    "observe",
    "prepare",
    "public_task",
    "to_contiguous",
    "train",
]
