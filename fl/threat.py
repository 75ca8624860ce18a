"""What a server is taken to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fl.ranges import CountFrom0
from fl.settings import declared


@declared("threat")
@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """What an honest-but-curious server knows beside the update itself.

    Attributes:
        knows_labels: the labels of the images.
        knows_batch_size: how many images there are.
        knows_schedule: number and size of the local steps.
        knows_order: which image was in which step.
        knows_randomness: the method's own random numbers.
        knows_defense: the defence and its settings (an adaptive attacker).
        knows_optimizer: what clients train by. Where it is not known, views name plain SGD, and no result counts as
            verified unless the whole update bears out that it was.
        knows_private_init: the values private tensors started from before the first round.
        sees_buffers: shared buffers such as batch-norm statistics.
        history_rounds: how many earlier rounds of the same client it kept.

    Raises:
        ValueError: what it knows is neither True nor False, or a number of rounds that is none.
    """

    former_names: ClassVar[Mapping[str, str]] = {"knows_draws": "knows_randomness", "rounds": "history_rounds"}

    knows_labels: bool = False
    knows_batch_size: bool = True
    knows_schedule: bool = True
    knows_order: bool = False
    knows_randomness: bool = False
    knows_defense: bool = True
    knows_optimizer: bool = True
    knows_private_init: bool = False
    sees_buffers: bool = True
    history_rounds: CountFrom0 = 0

    @property
    def knows_sizes(self) -> bool:
        """Whether an update's tensors can be taken to have the sizes to each other that one rule gave them."""
        return self.knows_defense and self.knows_optimizer
