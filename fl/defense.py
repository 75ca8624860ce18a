"""What a defense may do to a client, and what an attacker who knows it does about that; nothing until overridden."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl.gradient import Gradient
from fl.method import Method
from fl.privacy_statement import PrivacyStatement
from fl.registry import Registry
from fl.tensors import Tensors
from fl.types import Batch, Task

defenses: Registry[Defense] = Registry("defense", "defenses")


@defenses.register("none")
@dataclass(frozen=True, kw_only=True)
class Defense:
    """The base of every defense, and no defense at all.

    A hook that draws noise does so from the generator it is handed. A prediction hands it none: then the hook returns
    what it would without the noise, so that an attacker can differentiate through the rest.
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Defense]] = defenses
    plain: ClassVar[str] = "the client sends its update as it is."
    """What it does, in words for a reader who knows none of the papers."""

    @property
    def group(self) -> int:
        """Over how many clients the server sees the mean alone."""
        return max((part.group for part in self.members() if part is not self), default=1)

    def members(self) -> tuple[Defense, ...]:
        """The defenses it is made of: itself, but for a chain."""
        return (self,)

    def check(self, method: Method, task: Task) -> None:
        """Refuse what it can't defend, before any training.

        Args:
            method: the client's.
            task: with the network that the client trains.

        Raises:
            ValueError: says what does not fit.
        """

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """The network the client trains instead of `model`; what both have keeps its name."""
        return model

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        """The images and labels the client feeds instead of `batch`; labels may come back as probabilities (B, K)."""
        return batch

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Random numbers of one step, each for the buffer of the network of its name; none without a generator.

        They are recorded, so that a round can be replayed. To an attacker who knows the defense they are private
        tensors of the client like any other, `draws/phase/step/defense/buffer`, to be searched for.
        """
        return {}

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        """The gradient a client steps along instead of `grad(params, batch)`."""
        return grad(params, batch)

    def guide(self, grad: Gradient, params: Tensors, batch: Batch) -> Tensors:
        """What a search of an attacker who knows the defense takes for `gradient`, where that costs it too much."""
        return self.gradient(grad, params, batch, None)

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """What the client sends instead of `update`, which holds further payloads under `payload/name`."""
        return update

    def release(self, update: Tensors) -> Tensors:
        """What a real client sends instead of `update`: what chance there is follows from no seed that anybody knows.

        In experiments it does, by public names, so that figures can be had again; that protects nobody. This draws a
        seed from the operating system, of which torch keeps 32 bits: a defense that hides something by what it draws
        overrides it.
        """
        return self.transform_update(update, torch.Generator().manual_seed(secrets.randbits(63)))

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """What a search of an attacker who knows the defense compares with `observed`, in place of `predicted`.

        A guide and no prediction: it need not be what the defense would send (`transform_update` without a generator
        is that), but its distance from `observed` should fall smoothly towards the truth. Names may be fewer than all.
        """
        return predicted

    def passed(self, known: Tensors, observed: Tensors) -> Tensors:
        """What is left in `observed` of a known part of the update that adds to the rest, such as weight decay."""
        return self.surrogate(known, observed)

    def keeps_ratios(self) -> bool:
        """Whether tensors keep their lengths relative to each other, but for noise and rounding."""
        return True

    def rescaled(self) -> Defense:
        """What an attacker knows of it where the update's unit is lost, as after an attack that rewrites a view."""
        return self

    def privacy(
        self, method: Method, task: Task, sizes: Sequence[int], rounds: int, *, beside: Sequence[Defense] = ()
    ) -> PrivacyStatement | None:
        """What differential privacy it gives the records of clients; None claims nothing.

        Args:
            method: of all clients.
            task: with the network that they train.
            sizes: their numbers of images.
            rounds: how many a client took part in, at most.
            beside: all defenses of the chain that it is part of.
        """
        parts = [part for part in self.members() if part is not self]
        said = (part.privacy(method, task, sizes, rounds, beside=self.members()) for part in parts)
        return next((one for one in said if one is not None), None)

    def weights(self, observed: Tensors) -> dict[str, float]:
        """How much an attacker who knows the defense trusts each tensor: factors on both sides of its objective."""
        return dict.fromkeys(observed, 1.0)

    def deviations(self, observed: Tensors) -> dict[str, float]:
        """Standard deviation of the noise in each tensor, in units of the update; 0 where none is known."""
        return dict.fromkeys(observed, 0.0)


@dataclass(frozen=True, kw_only=True)
class Unknown(Defense):
    """What is left of a defense for an attacker who does not know it: the network, whose weights it sees.

    Attributes:
        wrapped: the defense.
    """

    wrapped: Defense

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """As the defense does."""
        return self.wrapped.wrap_model(model)


def overrides(defense: Defense, hook: str) -> bool:
    """Whether `defense`, or one that it is made of, changes the hook of that name."""
    found: list[Callable[..., object]] = [getattr(type(part), hook) for part in defense.members()]
    return any(mine is not getattr(Defense, hook) for mine in found)


def record_reader(defense: Defense) -> str:
    """The name of a defense that looks at a client's records beside the gradients it is handed; empty for others."""
    return defense.name if any(overrides(defense, hook) for hook in ("transform_batch", "gradient")) else ""
