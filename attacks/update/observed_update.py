"""What an update is once weight decay and the client's defence are accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from fl.defense import overrides
from fl.local.weight_decay import decay_shares, without_decay
from fl.tensors import Tensors
from fl.types import Part, ServerView


@dataclass(frozen=True)
class ObservedUpdate:
    """An update as an attack reads it.

    Attributes:
        view: the server's.
    """

    view: ServerView

    @cached_property
    def decay_shares(self) -> dict[str, float]:
        """The share of each shared parameter that weight decay takes away, whatever the data."""
        view, phases = self.view, self.view.method.phases(self.view.client.task, self.view.round)
        shares: dict[str, float] = {}
        if view.parts and view.threat.knows_defense and overrides(view.defense, "surrogate"):
            return {}  # every client's decay went through its own defence: it is left in on both sides
        for part in view.parts or (view,):
            weight = part.weight if isinstance(part, Part) else 1.0
            for name, share in decay_shares(phases, part.schedule, view.shared).items():
                shares[name] = shares.get(name, 0.0) + weight * share
        return {name: share for name, share in shares.items() if share and name in view.update}

    def without_decay(self, values: Tensors, view: ServerView | None = None) -> Tensors:
        """Return an update without the part that weight decay makes, as far as the defence lets that part through.

        Args:
            values: an observed or predicted update, by name.
            view: of the tensors sent and observed; None takes the update's own.
        """
        view = view or self.view
        known = self.view.threat.knows_defense and not self.view.parts
        passed = partial(self.view.defense.passed, observed=view.update) if known else None
        return without_decay(values, view.shared, self.decay_shares, passed)

    @cached_property
    def change(self) -> Tensors:
        """The update without the part that weight decay makes."""
        return self.without_decay(self.view.update)
