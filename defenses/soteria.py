"""Soteria: of the classifier's gradient, what says most about the image is not sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from defenses import defenses
from fl.client import LossGradient, client_loss_gradient
from fl.defense import Defense
from fl.gradient import Gradient
from fl.method import Method
from fl.ranges import ShareBelow1
from fl.tensors import LowRank, Tensors
from fl.types import Batch, Task

OFFSET = 0.1
"""Added to a unit of the representation before dividing by it, as in the authors' code (reconstruct_image.py)."""
UNSENT = 1e-3
"""Share of the largest number of the weight's update up to which a column counts as left out: weights that did not move
come back a last digit off, and where decay was taken off nothing is left but its rounding."""
UNITS_PER_CHUNK = 64
"""Units whose derivatives are taken at once."""


@defenses.register("soteria")
@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Cuts units of the representation r out of the gradient of the layer it enters (Sun et al., CVPR 2021, Eq. 8).

    The units pruned are those with the largest |r_i| / |dr_i/dx|: little of the image moves them, so that leaving them
    out moves an image found from r furthest. As in the authors' code only the weight gradient of the layer above is
    changed (the columns of these units are zero); everything below it gets its full gradient, and so does the bias.
    In every local step the units are chosen anew.

    The paper treats one image. For several the quotients |dr_i/dx| / |r_i + 0.1| of all of them are added up, as the
    authors' code does but for the sign of r + 0.1, and one set of units is pruned. Derivatives are by pixels in [0, 1],
    the authors' by normalized ones: for one channel that is a constant factor.

    An attacker who knows it sees which columns are zero and leaves them out of the comparison, where Balunovic et al.
    (ICLR 2022, section 5.1) leave out the whole layer; all other gradients are true, and that is why the defense
    fails. Its search takes the full gradient in every step, which is exact for one local step, since choosing units
    anew would cost a derivative for each of them. Where the layer's weights are generated, no column shows, and the
    layer is compared as it is.

    Attributes:
        ratio: share of the units pruned, in [0, 1); 0 is no defense. The number is rounded down.
        layer: name of the linear layer whose input is the representation; None is the network's last one.

    Raises:
        ValueError: if `ratio` is not in [0, 1).
    """

    plain: ClassVar[str] = "what the classifier's part of the update says most clearly about the picture is left out."

    ratio: ShareBelow1 = 0.6
    layer: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ValueError(f"expected ratio in [0, 1), got {self.ratio}")

    @classmethod
    def example(cls) -> Soteria:
        """Return pruning of half of the units."""
        return cls(ratio=0.5)

    def check(self, method: Method, task: Task) -> None:
        """Refuse a network without such a layer.

        Raises:
            ValueError: says which layers there are, or what the last one returns if it is no classifier.
        """
        found = task.model.get_submodule(self._layer_name(task.model))
        if self.layer is None and found.out_features != task.num_classes:
            raise ValueError(
                f"soteria: expected {task.num_classes} outputs of the last linear layer, got {found.out_features}; "
                "name the layer"
            )

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        """Return the gradient without the pruned units' columns."""
        name = self._layer_name(grad.model)
        if not len(batch):
            return grad(params, batch)
        weights = grad.weights(params)
        grads = grad.of_weights(weights, batch, grad.derivative)
        if f"{name}.weight" in grads:
            kept = self._transmitted_units(
                _representation(client_loss_gradient(grad), weights, name), batch.inputs.detach()
            )
            grads = {**grads, f"{name}.weight": grads[f"{name}.weight"] * kept}
        return grad.pull(params, grads)

    def search_gradient(self, grad: Gradient, params: Tensors, batch: Batch) -> Tensors:
        """Return the full gradient: what was pruned is read off the update."""
        return grad(params, batch)

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction without the columns that are zero in what was sent."""
        return PrunedColumns(layer=self.layer).surrogate(predicted, observed)

    def with_unknown_scale(self) -> Defense:
        """Return what shows in the update."""
        return PrunedColumns(layer=self.layer)

    def _layer_name(self, model: nn.Module) -> str:
        """Return the defended layer's name."""
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and isinstance(m.weight, Tensor)]
        if not linear or self.layer not in {None, *linear}:
            wanted = "a linear layer" if self.layer is None else repr(self.layer)
            raise ValueError(f"soteria: expected {wanted} in the network, got {', '.join(linear) or 'none'}")
        return linear[-1] if self.layer is None else self.layer

    def _transmitted_units(self, representation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return 1 for the units that are sent and 0 for the others (F,)."""
        units, pull = vjp(representation, inputs)[:2]

        def sensitivity(unit: Tensor) -> Tensor:
            return pull(unit.expand_as(units))[0].flatten(1).norm(dim=1)

        count = units.shape[1]
        slopes = vmap(sensitivity, chunk_size=UNITS_PER_CHUNK)(torch.eye(count, dtype=units.dtype, device=units.device))
        scores = (slopes.mT / (units + OFFSET).abs()).sum(0)
        pruned = scores.argsort(stable=True)[: int(self.ratio * count)]
        return torch.ones_like(scores).scatter(0, pruned, 0.0)


@dataclass(frozen=True, kw_only=True)
class PrunedColumns(Defense):
    """What shows of it in an update: that columns of one weight are zero.

    Attributes:
        layer: whose weight; None is the update's last matrix.
    """

    layer: str | None

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction without these columns."""
        name = next((n for n in reversed(observed) if self._is_layer_weight(n, observed)), None)
        if name is None or name not in predicted:
            return predicted
        seen, mine = observed[name], predicted[name]
        if isinstance(seen, LowRank) or isinstance(mine, LowRank):
            return predicted
        sizes = seen.abs().amax(0)
        return {**predicted, name: mine * (sizes > UNSENT * sizes.amax())}

    def _is_layer_weight(self, name: str, update: Tensors) -> bool:
        """Return whether a tensor of the update is that weight, as far as its name and shape tell."""
        if self.layer is not None:
            return name == f"{self.layer}.weight"
        return name.endswith(".weight") and len(update[name].shape) == 2


def _representation(grad: LossGradient, weights: dict[str, Tensor], layer: str) -> Callable[[Tensor], Tensor]:
    """Return what enters the layer (B, F), as a function of the images."""
    fixed = {name: weight.detach() for name, weight in weights.items()}
    model = grad.client.stackable  # runs wherever the gradient is taken, and keeps no statistics

    def run(inputs: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            replace(grad, model=model).network(fixed)(inputs)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0].ndim != 2:
            raise ValueError(f"soteria: expected one vector per image at {layer!r}, got {[x.shape for x in seen]}")
        return seen[0]

    return run
