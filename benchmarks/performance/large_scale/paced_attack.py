"""An attack that waits: cells of a known length, whatever else the machine does. Imported by file, as a user's own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from attacks.base import Attack, NotApplicable, Reconstruction, attacks
from fl.view import ServerView


@attacks.register("paced")
@dataclass(frozen=True, kw_only=True)
class Paced(Attack):
    """Waits and finds nothing; only to time how workers share a run.

    Attributes:
        seconds: that it waits for each update.
    """

    plain: ClassVar[str] = "waits, and finds nothing."

    seconds: float = 1.0

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Wait."""
        time.sleep(self.seconds)
        return NotApplicable("it only waits")
