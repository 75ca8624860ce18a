"""An attack that takes its time, for runs whose workers are killed: imported by file, as a user's own would be."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from attacks.base import Attack, Reconstruction, Result, attacks
from fl.seeds import stream
from fl.view import ServerView


@attacks.register("slow-guess")
@dataclass(frozen=True, kw_only=True)
class SlowGuess(Attack):
    """Noise around mid gray, after some seconds."""

    spread: float = 0.1
    seconds: float = 0.02

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Return noise."""
        time.sleep(self.seconds)
        assert view.batch_size is not None
        noise = torch.randn(view.batch_size, *view.task.input_shape, generator=stream(seed, "guess")) * self.spread
        labels = torch.zeros(view.batch_size, dtype=torch.int64)
        return Reconstruction((0.5 + noise).clamp(0, 1).to(view.device), labels, 0.5, (1.0, 0.5))
