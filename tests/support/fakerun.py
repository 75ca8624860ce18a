"""Run directories made up for tests: small, quick to write, and as a run would leave them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """
title: A made-up run
task: {dataset: {name: faces, size: 12}, model: {name: tiny, input_shape: [1, 12, 12]}}
federation: {partition: {name: iid, clients: 3}, rounds: 10}
threat: {knows_labels: false, knows_batch_size: true, knows_defense: true, sees_buffers: true, history_rounds: 0}
observe: {clients: [0], images: 4, batch_size: 1, method: {steps: 1}}
method:
- {name: fedavg, lr: 0.1}
- {name: hyperfl, parametrization: {name: hypernetwork}}
defense: [{name: none}]
attack: [{name: ig}, {name: peel+ig, against: [hyperfl]}]
seeds: [0]
score: {lpips: auto}
"""


@dataclass
class FakeRun:
    """A run directory in the making.

    Attributes:
        config: text of `config.yaml`.
        shape: (C, H, W) of the images.
        rows: of `images.jsonl`.
        rounds: of `rounds.jsonl`.
        about, environment: `run.json` and `env.json`, where not empty.
        pictures: arrays of `images/*.npz` by name.
    """

    config: str = CONFIG
    shape: tuple[int, int, int] = (1, 12, 12)
    rows: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(
        default_factory=lambda: {"python": "3.11", "versions": {"torch": "2", "lpips": None}}
    )
    pictures: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def truth(self, image: int) -> np.ndarray:
        """A true image (C, H, W), the same whenever it is asked for."""
        return np.random.default_rng(image).random(self.shape).astype(np.float32)

    def attack(
        self,
        method: str,
        attack: str,
        psnr: Sequence[float],
        *,
        defense: str = "none",
        round: int = 10,
        seed: int = 0,
        accuracy: float | None = 0.5,
        **more: Any,
    ) -> FakeRun:
        """Add an attack that reached these PSNRs, image by image; `more` goes to every row."""
        originals, found = [], []
        for image, value in enumerate(psnr):
            true = self.truth(image)
            sign = np.where(true > 0.5, -1, 1)
            guess = (true + sign * 10 ** (-value / 20)).astype(np.float32)
            originals.append(true)
            found.append(guess)
            row = self.row(method, attack, image, guess)
            head = {"defense": defense, "round": round, "seed": seed, "accuracy": accuracy}
            head["accuracy_last"] = accuracy
            self.rows.append({**row, **head, **more})
        self.pictures[f"{method}-{defense}-{attack}-round{round}-seed{seed}"] = (np.stack(originals), np.stack(found))
        return self

    def row(self, method: str, attack: str, image: int, guess: np.ndarray) -> dict[str, Any]:
        """The row of one image."""
        true = self.truth(image).astype(np.float64)
        floors = {
            "mean": np.broadcast_to(true.mean((1, 2), keepdims=True), true.shape),
            "grey": np.full(true.shape, 0.5),
            "noise": np.random.default_rng(1000 + image).random(true.shape),
            "nearest": self.truth(500 + image),
        }
        scores: dict[str, Any] = {}
        for name, picture in {"": guess, **{f"floor_{name}_": picture for name, picture in floors.items()}}.items():
            error = float(np.square(np.clip(picture, 0, 1).astype(np.float64) - true).mean())
            scores |= {f"{name}mse": error, f"{name}psnr": -10 * float(np.log10(max(error, 1e-10)))}
            scores |= {f"{name}ssim": 1 - error, f"{name}exact8": error < 1e-6}
        missing = {"lpips_alex@64": "LPIPS not available: no weights; put them there"}
        return {
            **{"method": method, "attack": attack, "client": 0, "update": f"0:{image}", "picture": f"0:{image}"},
            **{"image": 0, "matched": 0, "images": 1, "candidates": 1, "failure": None, "forward_error": 0.0},
            **scores,
            **{"label": image % 2, "label_correct": True, "label_overlap": 1.0, "objective": 0.1},
            **{"private_errors": {}, "extractor_error": None, "lpips_alex@64": None, "missing": missing},
            **{"knowledge": [], "verified": None, "history": [1.0, 0.1]},
        }

    def refuse(self, method: str, attack: str, reason: str, *, accuracy: float = 0.5) -> FakeRun:
        """Add an attack that does not apply."""
        head = {"seed": 0, "method": method, "defense": "none", "attack": attack, "round": 10, "accuracy": accuracy}
        self.rows.append({**head, "accuracy_last": accuracy, "not_applicable": reason})
        return self

    def train(self, method: str, course: Sequence[float], *, defense: str = "none", seed: int = 0) -> FakeRun:
        """Add a training whose accuracy ran like this from round 0 to round 10, over three clients."""
        for step, accuracy in enumerate(course):
            number = step * 10 // (len(course) - 1)
            self.rounds.append(
                {
                    **{"method": method, "defense": defense, "seed": seed, "round": number, "clients": [0, 1, 2]},
                    **{"accuracy": accuracy, "accuracies": [accuracy - 0.1, accuracy, accuracy + 0.1]},
                    **{"accuracy_local": accuracy + 0.05 if number else None},
                    **{"diagnostics": {"active_units": 64.0 / (1 + number)} if method == "hyperfl" else {}},
                    **{"numbers_up": 1000, "numbers_down": 2000, "seconds": 0.5},
                }
            )
        return self

    def write(self, folder: Path) -> Path:
        """All files."""
        (folder / "images").mkdir(parents=True)
        (folder / "config.yaml").write_text(self.config)
        for name, rows in (("images.jsonl", self.rows), ("rounds.jsonl", self.rounds)):
            if rows or name == "images.jsonl":
                (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, content in (("run.json", self.about), ("env.json", self.environment)):
            if content:
                (folder / name).write_text(json.dumps(content))
        for name, (original, found) in self.pictures.items():
            np.savez_compressed(folder / "images" / f"{name}.npz", original=original, reconstruction=found)
        return folder
