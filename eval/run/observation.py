"""What a server sees of the updates it watches, and what is true of them: all that attacking and scoring them takes.

An audit has three sources of observations. A registered method is trained first and then watched
(`eval.run.attack_cell.observe_targets`); a model of the user's own is fed its images, and a captured update is read
from a file (`eval.audit.capture_plan`). From here on there is one way: `eval.run.attack_cell.run_attack_cell` attacks
and scores an `Observation`, whichever source it came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from attacks.base import NotApplicable
from eval.metrics.lineup import IdentificationLineup
from eval.metrics.matching import first_equal
from eval.metrics.validity_flags import TOLERANCE
from fl.types import Batch, Truth
from fl.view import ServerView


@dataclass(frozen=True, eq=False)
class WatchedUpdate:
    """One update that the server watches.

    Attributes:
        key: names it in rows, and in the seeds of what is drawn for it.
        client: number of the client that sends it.
        view: what the server sees, or why nothing is sent.
        truth: what the client fed; None where nobody knows.
        forward_error: how far the attacker's own model of training is from what was observed; None if it can't be told.
        pictures: which image every true image is, by name.
        tolerance: from which on the forward error says that view, truth and update do not belong together.
    """

    key: str | int
    client: int
    view: ServerView | NotApplicable
    truth: Truth | None
    forward_error: float | None = None
    pictures: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    @property
    def size(self) -> int | None:
        """How many images the update is computed from; None if the server does not know."""
        return self.view.batch_size if isinstance(self.view, ServerView) else None


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server sees at one time of all the updates that it watches.

    Attributes:
        updates: one after the other.
        seed: of everything drawn for them.
        reference: images that the attacker may have had before, or None.
        lineups: by number of an update its images among others, made when an attack first asks.
        closest: likewise, those of the reference images that are closest to its own.
    """

    updates: tuple[WatchedUpdate, ...]
    seed: int
    reference: Batch | None = None
    lineups: dict[int, IdentificationLineup] = field(default_factory=dict)
    closest: dict[int, Tensor] = field(default_factory=dict)

    @property
    def views(self) -> tuple[ServerView | NotApplicable, ...]:
        """What the server sees of every update."""
        return tuple(update.view for update in self.updates)

    @cached_property
    def copies(self) -> dict[str, str]:
        """By name of a true image that equals an earlier one of another name, the name of that one."""
        known = [(update.pictures, update.truth.inputs) for update in self.updates if update.truth is not None]
        named = [pair for names, images in known for pair in zip(names, images, strict=True)]
        firsts = first_equal(image for _, image in named)
        pairs = zip(named, firsts, strict=True)
        return {name: named[first][0] for (name, _), first in pairs if named[first][0] != name}
