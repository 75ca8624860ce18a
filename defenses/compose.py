"""Several defenses, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from defenses import defenses
from fl.defense import Defense, ask_surrogate, overrides
from fl.gradient import Gradient
from fl.method import Method
from fl.tensors import Tensors
from fl.types import Batch, Task


@defenses.register("chain")
@dataclass(frozen=True, kw_only=True)
class Chain(Defense):
    """Each defense works on what the one before it leaves.

    An attacker who knows it passes its predictions through their stand-ins in the same order. Each stand-in looks at
    the update as it was sent, so one that reads something off it (which entries were pruned) can do so only where
    the defenses behind it leave that in place: `[noise, prune]`, `[prune, signsgd]`, but not `[prune, noise]`.

    Attributes:
        parts: defenses, the first one first.

    Raises:
        ValueError: if there are none, or more than one changes the gradient, which none can do to another's, or
            clients are aggregated (`secagg`) before the last.
    """

    plain: ClassVar[str] = "several defenses work on the update, one after the other."

    parts: tuple[Defense, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("expected at least 1 defense in a chain, got none")
        changing = [part.name for part in self.members() if overrides(part, "gradient")]
        if len(changing) > 1:
            raise ValueError(f"expected at most 1 defense that changes the gradient, got {', '.join(changing)}")
        if early := [part.name for part in self.members()[:-1] if part.group_size > 1]:
            raise ValueError(
                f"expected {early[0]} once, as the last of a chain: each client's update is defended before the mean "
                f"is taken, noise included; got {', '.join(part.name for part in self.members())}"
            )

    @classmethod
    def example(cls) -> Chain:
        """Return a chain that prunes half of every tensor and shortens the rest."""
        return cls(parts=(defenses.build({"name": "prune", "ratio": 0.5}), defenses.build({"name": "clip"})))

    def members(self) -> tuple[Defense, ...]:
        """Return the parts, and theirs."""
        return tuple(member for part in self.parts for member in part.members())

    def check(self, method: Method, task: Task) -> None:
        """Let every part refuse what it can't defend."""
        for part in self.parts:
            part.check(method, task)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the network in all its wrappings."""
        for part in self.parts:
            model = part.wrap_model(model)
        return model

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        """Return the batch, changed by each."""
        for part in self.parts:
            batch = part.transform_batch(batch, task, generator)
        return batch

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return what each draws."""
        return {name: value for part in self.parts for name, value in part.draw(batch, task, generator).items()}

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        """Return the gradient of the one that changes it."""
        return self._gradient_changing_part().gradient(grad, params, batch, generator)

    def search_gradient(self, grad: Gradient, params: Tensors, batch: Batch) -> Tensors:
        """Return what a search takes for it."""
        return self._gradient_changing_part().search_gradient(grad, params, batch)

    def _gradient_changing_part(self) -> Defense:
        return next((part for part in self.parts if overrides(part, "gradient")), Defense())

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update, changed by each."""
        for part in self.parts:
            update = part.transform_update(update, generator)
        return update

    def release(self, update: Tensors) -> Tensors:
        """Return the update, changed by each as a real client does it."""
        for part in self.parts:
            update = part.release(update)
        return update

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction through the stand-in of each."""
        for part in self.parts:
            predicted = ask_surrogate(part, predicted, observed)
        return predicted

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return what all of them let through."""
        for part in self.parts:
            known = part.transmit_known_part(known, observed)
        return known

    def preserves_norm_ratios(self) -> bool:
        """Return whether all of them do."""
        return all(part.preserves_norm_ratios() for part in self.parts)

    def with_unknown_scale(self) -> Defense:
        """Return the chain of what is left of each."""
        return Chain(parts=tuple(part.with_unknown_scale() for part in self.parts))

    def tensor_trust(self, observed: Tensors) -> dict[str, float]:
        """Return the product of their trust; the largest is 1."""
        each = [part.tensor_trust(observed) for part in self.parts]
        joint = {name: prod(weights[name] for weights in each) for name in observed}
        largest = max(joint.values(), default=1.0)
        return {name: weight / largest for name, weight in joint.items()}

    def noise_std(self, observed: Tensors) -> dict[str, float]:
        """Return the deviation of all the noise together; an upper bound where a later part shortens the noise, too."""
        each = [part.noise_std(observed) for part in self.parts]
        return {name: hypot(*(deviations[name] for deviations in each)) for name in observed}
