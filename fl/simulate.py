"""One round of one client, and what the server sees of it: the public names of `fl.simulation.client_round`."""

from fl.simulation.client_round import (
    ClientState,
    Round,
    Start,
    finish,
    observe,
    prepare,
    public,
    settled,
    train,
    train_client,
)
from fl.types import Truth

__all__ = [
    "ClientState",
    "Round",
    "Start",
    "Truth",
    "finish",
    "observe",
    "prepare",
    "public",
    "settled",
    "train",
    "train_client",
]
