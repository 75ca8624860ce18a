"""How the clients of a round are trained: every engine gives the numbers of `local_update`, client by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fl.simulation.client_round import Round
from fl.simulation.federation_state import FederationState


class Engine:
    """One client after the other, by the local rule itself: the reference, and what works for every method."""

    name = "loop"
    chunk = 1
    """Clients whose numbers are computed together: others never touch a bit of them."""

    def train(self, run: FederationState, numbers: Sequence[int], *, evaluate: bool = False) -> Iterable[Round]:
        """Return what the clients `numbers` do in the present round, in this order; changes nothing in `run`.

        Clients train as their rounds are asked for, so that no more of these need be kept than the caller wants.

        Args:
            run: server, clients and data.
            numbers: of the clients.
            evaluate: whether to score each client's model right after training, too.
        """
        return (run.with_accuracy(run.train(number)) if evaluate else run.train(number) for number in numbers)

    def accuracy(self, run: FederationState, numbers: Sequence[int]) -> list[float]:
        """Return the share of each client's test images classified right by what the server sends now."""
        return [run.score(number) for number in numbers]

    def close(self) -> None:
        """Give back what the engine holds."""
