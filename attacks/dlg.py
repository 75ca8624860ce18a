"""Deep Leakage from Gradients: images and soft labels together, by L-BFGS on the squared distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attacks.base import attacks
from attacks.matching import Matching


@attacks.register("dlg")
@dataclass(frozen=True, kw_only=True)
class DLG(Matching):
    """DLG (Zhu et al., NeurIPS 2019, Algorithm 1): L-BFGS with step 1 and no line search, no prior, no box.

    A right DLG on a small sigmoid network either finds the image (41-55 dB) or diverges, so restarts pay. Steps are
    shortened to `max_step`, which the authors do not do: of 20 images looked at, those that diverged then went on
    towards the image.

    Attributes:
        iterations: evaluations of the objective (the authors' 300 x 20).
        labels: searched for from random ones, as published; see `Matching` for the others.
    """

    plain: ClassVar[str] = (
        "solves for the picture and its label together, until they would cause the update that was sent."
    )

    iterations: int = 6000
    objective: Literal["cosine", "l2"] = "l2"
    optimizer: Literal["adam", "lbfgs"] = "lbfgs"
    lr: float = 1.0
    boxed: bool = False
    labels: Literal["auto", "joint", "random"] = "random"
    tolerance: float = 1e-10
    patience: int = 1000
    enough: float = 3e-9
