"""An experiment that takes a second: 8x8 images, a small network, attacks that guess."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from fl.seeds import stream
from fl.view import ServerView

CONFIG = """
title: A tiny experiment
task:
  dataset: {name: faces, size: 8}
  model: tiny
federation: {partition: {name: iid, clients: 3, train_size: 12, test_size: 6}, rounds: 2}
method:
  - {name: fedavg, lr: 0.1, batch_size: 6}
  - name: hyperfl
    batch_size: 6
    epochs: 1
    parametrization: {name: hypernetwork, embedding: 3, hidden: 6, init: scaled}
attack:
  - guess
  - {name: refuse, against: fedavg}
observe: {images: 4, batch_size: 2, method: {steps: 1, head_epochs: 0}}
score: {lpips: off}
"""


class Registered:
    """The attacks of this file, entered while a test runs."""

    def __enter__(self) -> None:
        attacks.names()
        for name, kind in (("guess", Guess), ("refuse", Refuse), ("crash", Crash)):
            attacks.register(name)(kind)

    def __exit__(self, *_: object) -> None:
        for name in ("guess", "refuse", "crash"):
            del attacks._entries[name]


@dataclass(frozen=True, kw_only=True)
class Guess(Attack):
    """Noise around mid gray."""

    spread: float = 0.1

    def attack_view(self, view: ServerView, seed: int) -> Result:
        assert view.batch_size is not None
        noise = torch.randn(view.batch_size, *view.task.input_shape, generator=stream(seed, "guess")) * self.spread
        labels = torch.zeros(view.batch_size, dtype=torch.int64)
        return Reconstruction((0.5 + noise).clamp(0, 1).to(view.device), labels, 0.5, (1.0, 0.5))


@dataclass(frozen=True, kw_only=True)
class Refuse(Attack):
    """Never says anything."""

    def attack_view(self, view: ServerView, seed: int) -> Result:
        return NotApplicable("not in the mood")


@dataclass(frozen=True, kw_only=True)
class Crash(Attack):
    """Fails in the middle of a run."""

    fault: bool = False

    def attack_view(self, view: ServerView, seed: int) -> Result:
        raise (RuntimeError if self.fault else ValueError)("expected the sky to hold, got rain")
