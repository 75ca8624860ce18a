"""The published attack on HyperFL: everything unknown is learnable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from attacks.base import NotApplicable, Preset, attacks
from attacks.gradient_matching.ig import InvertingGradients
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING
from fl.ranges import Count, StepSize, Weight
from fl.view import ServerView


@attacks.register("joint")
@dataclass(frozen=True, kw_only=True)
class JointGradientMatching(InvertingGradients):
    """IG with embedding, classifier and labels searched for together with the image (HyperFL, appendix D.1).

    The paper's settings, by the name `published`: 10,000 iterations, total variation 1e-6, step size 0.1 for images.
    The default weight of the total variation was better in short searches (benchmarks/results/settings.md). The
    paper gives no step sizes for labels and private tensors; a signed step of 0.1 on an unknown classifier ruins the
    search: they take plain Adam at 0.01, and an embedding at 0.1, since at 0.01 it hardly leaves its start in a few
    hundred steps (the same page).

    Threat model: as of `IG`, with everything searched for that the client keeps to itself: on HyperFL (objective 8)
    embedding, classifier and label.

    Attributes:
        iterations: of the search.
        tv_weight: weight of the total variation.
        private_lr: step size for private tensors, one for all or by how their names begin.
        label_lr: step size for label logits, that of all that is private but an embedding.
    """

    plain: ClassVar[str] = (
        "guesses picture, label and everything the client kept private all at once, as the paper of hyperfl did."
    )

    presets: ClassVar[dict[str, Preset]] = {
        "published": Preset(
            "HyperFL (Guo et al., AAAI 2025), appendix D.1; it gives no step size for what is private",
            {"iterations": 10_000, "tv_weight": 1e-6, "lr": 0.1, "private_lr": 0.01},
        ),
    }

    iterations: Count = 10_000
    tv_weight: Weight = 1e-2
    private_lr: StepSize | Mapping[str, StepSize] = field(default_factory=lambda: {EMBEDDING: 0.1})
    label_lr: StepSize = 0.01

    def refuse(self, view: ServerView) -> NotApplicable | None:
        """Refuse views without anything private."""
        if view.update and not view.private:
            return NotApplicable(f"{view.method.name} keeps nothing private: run ig")
        return super().refuse(view)
