"""ROG: images are sought among those that a small code can make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from attacks.base import NotApplicable, Preset, Reconstruction, attacks
from attacks.gradient_matching.engine import image_networks
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.objectives import Objective
from attacks.gradient_matching.engine.problem import MatchingProblem, Variables
from attacks.gradient_matching.engine.search_space import DecodedSpace, SearchSpace, UpsampledSpace
from fl.ranges import Count, Share, StepSize, Weight
from fl.view import ServerView


@attacks.register("rog")
@dataclass(frozen=True, kw_only=True)
class ROG(GradientMatching):
    """ROG, reconstruction from obfuscated gradients (Yue et al., USENIX Security 2023).

    With observed update u, the result is E(D(z)) of the code z that minimizes d(update(D(z)), u) + tv_weight TV(D(z)).
    The image D(z) is `factor` times larger than z on each side: fewer unknowns, which noise, pruning and quantization
    of the update can't fill with nonsense. D is bicubic interpolation, or the decoder half of an auto-encoder; E is an
    enhancer, or nothing. Threat model: that of `IG`; a defense the server knows is applied to the prediction too.
    Labels are recovered, while the authors' code is given them. What D can't show can't be found:
    `eval.metrics.baselines.representable_bound` says how close to an image a code comes: for photographs of 32 x 32
    pixels 22 to 28 dB at factor 2, 16 to 25 at 4.

    The published code of a quarter a side in 100 iterations is for photographs of 128 x 128 pixels (`presets`). On
    small images half a side, a weak total variation, directions instead of squared distances and more iterations find
    more (benchmarks/results/settings.md). The preset called after a network has what was best for it while it was
    untrained, and is far worse after training (benchmarks/results/presets.md).

    The files of `decoder` and `enhancer` are trained on public images by `python -m
    attacks.gradient_matching.engine.image_networks`; the authors' enhancers are for 128 x 128 photographs only.

    Attributes:
        iterations: of the search.
        tv_weight: weight of the total variation, chosen with bicubic codes.
        factor: 1, 2 or 4; the images' sides need not be multiples of it. A decoder has its own.
        decoder: path of a trained decoder; None takes bicubic interpolation.
        enhancer: path of a trained enhancer, which sharpens the result after the search; None leaves it as it is.
        init: "uniform" and "gray" are meant for bicubic codes; a decoder's codes always start from N(0, 1).
        clamp_upsampled: show the network enlarged images with their pixels kept in [0, 1]. Codes may overshoot then,
            which brings far more of black and white strokes back, and less of photographs (settings.md).
    """

    images_only: ClassVar[bool] = True
    plain: ClassVar[str] = "guesses a small picture whose enlargement would cause the update that was sent."
    presets: ClassVar[dict[str, Preset]] = {
        "published": Preset(
            "Yue et al., USENIX Security 2023, and their code: 128 x 128 photographs",
            {
                "iterations": 100,
                "factor": 4,
                "tv_weight": 0.0,
                "objective": "l2",
                "lr": 0.05,
                "schedule": "cosine",
                "last_lr": 0.1,
            },
        ),
        "hyperfl-grey-untrained": Preset("our sweep on that network (settings.md)", {"objective": "l2", "factor": 1}),
    }

    former_names: ClassVar[Mapping[str, str]] = {"clamped": "clamp_upsampled"}

    iterations: Count = 500
    factor: Literal[1, 2, 4] = 2
    decoder: str | None = None
    enhancer: str | None = None
    objective: Objective = "cosine"
    lr: StepSize = 0.05
    signed: bool = False
    schedule: Literal["step", "cosine", "none"] = "cosine"
    last_lr: Share = 0.1
    tv_weight: Weight = 1e-2
    clamp_pixels: bool = False
    init: Literal["normal", "uniform", "gray"] = "uniform"
    clamp_upsampled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clamp_pixels and self.decoder is not None:
            raise ValueError("expected clamp_pixels=False with a decoder, whose codes are no pixels")
        if self.clamp_upsampled and (self.clamp_pixels or self.decoder is not None):
            raise ValueError(
                "expected clamp_upsampled=False with clamp_pixels, whose codes can't overshoot, and with a decoder"
            )

    @classmethod
    def example(cls) -> ROG:
        """Return a few iterations of two restarts."""
        return cls(iterations=5, restarts=2)

    def refuse(self, view: ServerView) -> NotApplicable | None:
        """Refuse images that do not fit the trained networks, where there are any."""
        reason = super().refuse(view)
        if reason is not None:
            return reason
        for kind, path in (("decoder", self.decoder), ("enhancer", self.enhancer)):
            if path is not None and (obstacle := image_networks.load(path, kind).shape_obstacle(view.task.input_shape)):
                return NotApplicable(f"the {kind} {path} does not fit: {obstacle}")
        return None

    def search_space(self, view: ServerView) -> SearchSpace:
        """Return the codes that images are made from."""
        shape = view.task.input_shape
        if self.decoder is None:
            return UpsampledSpace(self.factor, shape[1:], self.clamp_upsampled)
        decoder = image_networks.load(self.decoder, "decoder", view.dtype, view.device)
        return DecodedSpace(decoder, decoder.code_shape(shape))

    def build_result(
        self, problem: MatchingProblem, row: Variables, objective: float, history: tuple[float, ...]
    ) -> Reconstruction:
        """Return the result of one trial, sharpened by the enhancer where there is one."""
        result = super().build_result(problem, row, objective, history)
        used = tuple(kind for kind in ("decoder", "enhancer") if getattr(self, kind) is not None)
        result = replace(result, knowledge=(*result.knowledge, *(f"public images ({kind})" for kind in used)))
        if self.enhancer is None:
            return result
        assert isinstance(result.inputs, Tensor)
        enhancer = image_networks.load(self.enhancer, "enhancer", result.inputs.dtype, result.inputs.device)
        return replace(result, inputs=enhancer(result.inputs).clamp(0, 1))
