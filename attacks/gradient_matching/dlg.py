"""Deep Leakage from Gradients: images and soft labels together, by L-BFGS on the squared distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attacks.base import Preset, attacks
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.objectives import Objective
from fl.ranges import Count, CountFrom0, StepSize, Weight


@attacks.register("dlg")
@dataclass(frozen=True, kw_only=True)
class DLG(GradientMatching):
    """DLG (Zhu et al., NeurIPS 2019, Algorithm 1): L-BFGS with step 1 and no line search, no prior, no box.

    The search is the authors', with two changes that the preset `published` takes back. Directions are compared and
    not differences: `idlg` on their network found every image that way in 96 runs (32 images, 3 seeds), by the authors'
    distance in 80 % (benchmarks/results/idlg.md); with the label searched for as well, 32 of 32 images from one start
    (benchmarks/results/dlg.md). And steps are shortened to `max_step`: of 20 images looked at, those that diverged then
    went on towards the image. The distance either finds the image (41-55 dB) or diverges, so restarts pay.

    Threat model: an honest-but-curious server that sees one client's update and knows its local training and the
    number of its images.

    Attributes:
        iterations: evaluations of the objective (the authors' 300 x 20 = 6000; most searches end before).
        labels: searched for from random ones, as published; see `GradientMatching` for the others.
    """

    plain: ClassVar[str] = (
        "solves for the picture and its label together, until they would cause the update that was sent."
    )

    presets: ClassVar[dict[str, Preset]] = {
        "published": Preset(
            "Zhu et al. 2019, Algorithm 1, and the authors' code: 300 calls of L-BFGS, 20 evaluations each",
            {"iterations": 6000, "objective": "l2", "max_step": 1e6, "restarts": 1},
        )
    }

    iterations: Count = 10_000
    objective: Objective = "cosine"
    optimizer: Literal["adam", "lbfgs"] = "lbfgs"
    lr: StepSize = 1.0
    clamp_pixels: bool = False
    labels: Literal["auto", "joint", "random"] = "random"
    tolerance: Weight = 1e-10
    patience: CountFrom0 = 1000
    success_threshold: Weight = 3e-9
