"""A generator of what enters a network's classifier, from a label and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fl.tensors import Tensors

STATISTICS = ("norm.mean", "norm.var")
"""Names of the running statistics among the parameters."""


@dataclass(frozen=True, kw_only=True)
class FeatureGenerator:
    """FedGen's generator (Zhu et al., ICML 2021, as its code has it): linear, batch norm, ReLU, linear.

    Functional: an object holds sizes only.

    Attributes:
        classes: K.
        noise: numbers of noise Z.
        hidden: units.
        features: numbers D that enter the classifier.
    """

    classes: int
    noise: int
    hidden: int
    features: int

    def initial_parameters(self, generator: torch.Generator, like: Tensor) -> Tensors:
        """Return layers as `nn.Linear` starts, batch norm as the identity; of the type of `like`, and where it lies."""
        sizes = {"hidden": (self.hidden, self.noise + self.classes), "features": (self.features, self.hidden)}
        found: Tensors = {}
        for name, (outputs, inputs) in sizes.items():
            bound = 1 / math.sqrt(inputs)
            for part, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                found[f"{name}.{part}"] = torch.empty(shape).uniform_(-bound, bound, generator=generator).to(like)
        one = like.new_ones(self.hidden)
        return found | {"norm.weight": one, "norm.bias": 0 * one, "norm.mean": 0 * one, "norm.var": one.clone()}

    def make(self, params: Mapping[str, Tensor], labels: Tensor, noise: Tensor, *, training: bool = False) -> Tensor:
        """Return features (B, D).

        Args:
            params: as of `initial_parameters`; in training their running statistics change in place.
            labels: as probabilities (B, K).
            noise: (B, Z).
            training: whether batch norm takes the statistics of the batch.
        """
        x = functional.linear(torch.cat([noise, labels], 1), params["hidden.weight"], params["hidden.bias"])
        mean, var = (params[name] for name in STATISTICS)
        x = functional.batch_norm(x, mean, var, params["norm.weight"], params["norm.bias"], training=training)
        return functional.linear(x.relu(), params["features.weight"], params["features.bias"])
