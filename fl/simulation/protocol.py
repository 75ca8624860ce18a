"""How a federation is scored beyond the usual: clients that never take part, fine-tuning, one test for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl.types import Batch

OPTIONAL_SCORES = ("tuned", "unseen", "unseen_tuned", "global")
"""Names of the scores that a protocol may ask for."""

Diagnostic = Literal["loss", "movement", "similarity", "divergence", "embeddings", "confidence", "server"]
"""What a protocol may ask for beside accuracies (see `fl.simulation.diagnostics`)."""

NOTHING_SENT = "the server sends nothing, so that clients that never took part have no trained network"
"""Why "unseen" is missing."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Who never takes part, and what is scored beside the model that the server sends.

    Attributes:
        held_out_clients: the last so many clients never take part.
        fine_tune_epochs: every client adapts what it received for so many epochs (`Method.fine_tuning_phases`) and is
            scored once more; 0 leaves that out.
        global_test: images on which every participant's model is scored, too.
        diagnostics: what is taken beside accuracies.

    Raises:
        ValueError: a number below 0.
    """

    held_out_clients: int = 0
    fine_tune_epochs: int = 0
    global_test: Batch | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    def __post_init__(self) -> None:
        for key in ("held_out_clients", "fine_tune_epochs"):
            if getattr(self, key) < 0:
                raise ValueError(f"expected {key} >= 0, got {getattr(self, key)}")


def n_participants(protocol: Protocol, clients: int) -> int:
    """Return how many of `clients` take part.

    Raises:
        ValueError: none would.
    """
    if protocol.held_out_clients >= clients:
        raise ValueError(f"expected fewer held-out clients than the {clients} clients, got {protocol.held_out_clients}")
    return clients - protocol.held_out_clients
