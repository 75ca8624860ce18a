"""Inverting Gradients: cosine similarity, total variation, signed Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attacks.base import Preset, attacks
from attacks.gradient_matching.engine.base import GradientMatching
from fl.ranges import Count, Weight


@attacks.register("ig")
@dataclass(frozen=True, kw_only=True)
class InvertingGradients(GradientMatching):
    """IG (Geiping et al., NeurIPS 2020, Eq. 4): signed Adam at 0.1, step decay, pixels kept in their box.

    The published weights of the total variation run from 1e-6 (HyperFL's protocol, with 10,000 iterations) to 1e-1
    (`presets`). The default was better than 1e-4 on every set that it was tried on, gray and color, if not always the
    best: 1e-2 was in color, 1e-1 on a sigmoid LeNet, but 1e-2 is far worse for characters and on a trained network
    (benchmarks/results/settings.md). A preset that is called after a network has what was best for it while it was
    untrained, and is worse after training (benchmarks/results/presets.md). Private tensors, where a method has any, are
    searched for together with the images.

    Of the authors' code the costs "l1" and "simlocal" are made unit-free, so that a weight of the total variation means
    something else beside them; both are behind the cosine (benchmarks/results/settings.md). Left out are the cost
    "max", weights by layer (`weights`), a choice of tensors (`indices`), the median filter every 500 iterations, SGD,
    and restarts chosen by total variation or Inception score or averaged. Their scripts have none of these by default,
    and so none of the presets needs one.

    Threat model: an honest-but-curious server that sees one client's update and knows its local training and the
    number of its images. Labels are read off a shared classifier where they are not known, else searched for.

    Attributes:
        iterations: of the search.
        tv_weight: weight of the total variation.
    """

    plain: ClassVar[str] = "changes a guessed picture step by step until it would cause the update that was sent."
    presets: ClassVar[dict[str, Preset]] = {
        "untrained": Preset(
            "Geiping et al. 2020, appendix C: LeNet of Zhu et al., untrained",
            {"iterations": 4800, "tv_weight": 1e-2},
        ),
        "command": Preset(
            "the authors' reconstruct_image.py: defaults of its command line", {"iterations": 4000, "tv_weight": 1e-4}
        ),
        "tables": Preset(
            "the authors' rec_mult.py, which made the paper's tables, with its default weight",
            {"iterations": 4800, "tv_weight": 1e-4},
        ),
        "library": Preset(
            "the authors' DEFAULT_CONFIG: unsigned", {"iterations": 4800, "tv_weight": 1e-1, "signed": False}
        ),
        "hyperfl": Preset("HyperFL, Table 3 (50 images, batch 1)", {"iterations": 10_000, "tv_weight": 1e-6}),
        "breaching": Preset(
            "breaching 0.1.2, `invertinggradients`; its total variation also counts the image's border",
            {"iterations": 24_000, "tv_weight": 0.2},
        ),
        "hyperfl-colour-untrained": Preset("our sweep on that network (settings.md)", {"tv_weight": 1e-2, "lr": 0.3}),
        "lenet-zhu-untrained": Preset("our sweep on that network (settings.md)", {"tv_weight": 1e-1}),
    }

    iterations: Count = 3000
    tv_weight: Weight = 3e-3
