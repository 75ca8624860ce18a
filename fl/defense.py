"""The hooks of a defense: what it does to a client, and what an attacker who knows it is given."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fl.gradient import Gradient
from fl.local.hook_results import expect_numbers, expect_tensors
from fl.method import Method
from fl.privacy_statement import PrivacyStatement
from fl.registry import FormerHooks, Registry
from fl.tensors import Tensors
from fl.types import Batch, Task

defenses: Registry[Defense] = Registry("defense", "defenses")


@defenses.register("none")
@dataclass(frozen=True, kw_only=True)
class Defense(FormerHooks):
    """The base of every defense: hooks that change nothing until a subclass overrides them.

    A hook that draws noise does so from the generator it is handed. A prediction hands it none: then the hook returns
    what it would without the noise, so that an attacker can differentiate through the rest.
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Defense]] = defenses
    former_hooks: ClassVar[Mapping[str, str]] = {
        "deviations": "noise_std",
        "group": "group_size",
        "guide": "search_gradient",
        "keeps_ratios": "preserves_norm_ratios",
        "passed": "transmit_known_part",
        "rescaled": "with_unknown_scale",
        "weights": "tensor_trust",
    }
    plain: ClassVar[str] = "the client sends its update as it is."
    """What it does, in words for a reader who knows none of the papers."""

    @property
    def group_size(self) -> int:
        """The number of clients of whom the server sees the mean alone."""
        return max((part.group_size for part in self.members() if part is not self), default=1)

    def members(self) -> tuple[Defense, ...]:
        """Return the defenses it is made of: itself, but for a chain."""
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
        """Return the network the client trains instead of `model`; what both have keeps its name."""
        return model

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        """Return the images and labels the client feeds instead of `batch`; labels may be probabilities (B, K)."""
        return batch

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draw the random numbers of one step, by the network's buffer that takes them; none without a generator.

        They are recorded, so that a round can be replayed. To an attacker who knows the defense they are private
        tensors of the client like any other, `draws/phase/step/defense/buffer`, to be searched for.
        """
        return {}

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        """Return the gradient a client steps along instead of `grad(params, batch)`.

        Args:
            grad: of the client's loss.
            params: the parameters that move, by name.
            batch: the images and labels of the step.
            generator: of the defense's noise; None leaves the noise out.
        """
        return grad(params, batch)

    def search_gradient(self, grad: Gradient, params: Tensors, batch: Batch) -> Tensors:
        """Return what an attacker's search takes for `gradient`, where that costs it too much."""
        return self.gradient(grad, params, batch, None)

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return what the client sends for `update`, which holds further payloads under `payload/name`."""
        return update

    def withholds(self, name: str) -> bool:
        """Return whether the tensor of that name is never sent: the view lacks it, and the server's stays as it was."""
        return any(part.withholds(name) for part in self.members() if part is not self)

    def release(self, update: Tensors) -> Tensors:
        """Return what a real client sends for `update`, with random numbers from a seed that nobody knows.

        In experiments the seed follows from public names, so that figures can be had again; that protects nobody. This
        draws a seed from the operating system, of which torch keeps 32 bits: a defense that hides something by what it
        draws overrides it.
        """
        return self.transform_update(update, torch.Generator().manual_seed(secrets.randbits(63)))

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return what an attacker's search compares with `observed` in place of `predicted`.

        It guides the search and is no prediction: it need not be what the defense would send (`transform_update`
        without a generator is that), but its distance from `observed` should fall smoothly towards the truth. Names may
        be fewer than all.
        """
        return predicted

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return what is left in `observed` of a known summand of the update, such as that of weight decay."""
        return ask_surrogate(self, known, observed)

    def preserves_norm_ratios(self) -> bool:
        """Say whether the norms of tensors keep their ratios to each other, but for noise and rounding."""
        return True

    def with_unknown_scale(self) -> Defense:
        """Return what an attacker knows of it where the update's scale is lost, as after a rewrite of the view."""
        return self

    def privacy(
        self, method: Method, task: Task, sizes: Sequence[int], rounds: int, *, beside: Sequence[Defense] = ()
    ) -> PrivacyStatement | None:
        """Return what differential privacy it gives the records of clients; None claims nothing.

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

    def tensor_trust(self, observed: Tensors) -> dict[str, float]:
        """Return how much the attacker trusts each tensor: a factor on both sides of its objective."""
        return dict.fromkeys(observed, 1.0)

    def gap_limit(self, observed: Tensors) -> float:
        """Return the largest size that a number can have had which came as zero, in units of the update.

        It is infinite where nothing is known of that.
        """
        return math.inf

    def noise_std(self, observed: Tensors) -> dict[str, float]:
        """Return the standard deviation of the noise in each tensor, in units of the update; 0 where none is known."""
        return dict.fromkeys(observed, 0.0)


@dataclass(frozen=True, kw_only=True)
class UnknownDefense(Defense):
    """A defense as an attacker has it who does not know it: the network alone, whose weights it sees.

    Attributes:
        wrapped: the defense.
    """

    wrapped: Defense

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the network as the wrapped defense makes it."""
        return self.wrapped.wrap_model(model)


def ask_surrogate(defense: Defense, predicted: Tensors, observed: Tensors) -> Tensors:
    """Return a defense's `surrogate` of a prediction, which is one of some of its tensors.

    Raises:
        TypeError, ValueError: it returns something else; says what.
    """
    return expect_tensors(defense.name, "surrogate", defense.surrogate(predicted, observed), predicted)


def ask_numbers(defense: Defense, hook: Literal["noise_std", "tensor_trust"], observed: Tensors) -> dict[str, float]:
    """Return what a hook of a defense says of each observed tensor.

    Raises:
        TypeError, ValueError: it returns something else; says what.
    """
    return expect_numbers(defense.name, hook, getattr(defense, hook)(observed), observed)


def overrides(defense: Defense, hook: str) -> bool:
    """Return whether `defense`, or one that it is made of, overrides the hook of that name."""
    found: list[Callable[..., object]] = [getattr(type(part), hook) for part in defense.members()]
    return any(mine is not getattr(Defense, hook) for mine in found)


def record_reader(defense: Defense) -> str:
    """Return the name of a defense that reads records beside the gradients it is handed; empty for others."""
    return defense.name if any(overrides(defense, hook) for hook in ("transform_batch", "gradient")) else ""
