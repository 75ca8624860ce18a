"""HyperFL with differential privacy: noise on what the network's weights or the hypernetwork's parameters get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from fl.method import methods
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.parametrization import Parametrization
from fl.privacy.dp_sgd import ClipTarget
from fl.privacy.private_method import PrivateMethod

if TYPE_CHECKING:
    pass


@methods.register("dp-hyperfl")
@dataclass(frozen=True, kw_only=True)
class DPHyperFL(PrivateMethod, HyperFL):
    """HyperFL (Guo et al., AAAI 2025) by DP-SGD; ours, the paper has none.

    `noise_on: extractor` clips and noises the gradient of the generated weights and pulls the noisy sum back through
    the hypernetwork, which is post-processing: 115,776 noisy numbers instead of 14.9 million, and outer products stay
    so. `noise_on: hypernetwork` clips the gradient of hypernetwork and embedding together: at equal epsilon eleven
    times as much noise for the signal there is. The classifier's gradient is clipped and noised in its own phase.

    Attributes:
        noise_on: what is clipped and gets the noise.
    """

    plain: ClassVar[str] = (
        "as hyperfl, but trained under random noise, so that a single picture hardly shows in what a client sends."
    )
    trains_private_tensors: ClassVar[bool] = True

    noise_on: Literal["extractor", "hypernetwork"] = "extractor"
    parametrization: Parametrization = field(default_factory=Hypernetwork)
    train_mode: bool = False

    @property
    def clip_target(self) -> ClipTarget:  # type: ignore[override]
        """Where a sample's gradient is clipped."""
        return "weights" if self.noise_on == "extractor" else "parameters"

    @property
    def released(self) -> str:  # type: ignore[override]
        """What gets the noise."""
        what = "the generated extractor" if self.noise_on == "extractor" else "hypernetwork and embedding"
        return f"the gradients of the classifier and then of {what}" if self.head_epochs else f"the gradient of {what}"

    @property
    def deviation_reason(self) -> str:  # type: ignore[override]
        """What its noise leaves of an update's equations."""
        if self.noise_on == "extractor":
            return (
                "each image's gradient of the generated weights is clipped and noise is added to their sum, of which "
                "no equation below the hypernetwork survives; `peel` takes the hypernetwork off, for a search "
                "(peel+joint)"
            )
        return (
            "each image's gradient is clipped and noise is added to every number that the hypernetwork gets, which "
            "leaves no outer product; search with joint"
        )

    def _no_epsilon_reason(self, sigma: float, record_reader: str) -> str:
        """Return the reason as in any private method, or that of an embedding that moved without noise."""
        found = super()._no_epsilon_reason(sigma, record_reader)
        if found and self.mode == "as-published" and self.learn_embedding and sigma and self.noise_on == "extractor":
            return f"{found}; the update also gives the embedding away (`peel`), which moved without noise"
        return found

    @classmethod
    def example(cls) -> DPHyperFL:
        """Return a tiny hypernetwork, both phases."""
        tiny = Hypernetwork.example()
        return cls(parametrization=tiny, epochs=2, batch_size=2, images=4, noise_multiplier=0.5, clip=1.0)
