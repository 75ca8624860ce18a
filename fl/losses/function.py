"""A loss of the user's own: a function of the outputs and the targets."""

from __future__ import annotations

import copy
import functools
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.loss import _WeightedLoss

from fl.losses import Loss, losses
from fl.losses.bce import BinaryCrossEntropy
from fl.losses.cross_entropy import CrossEntropy
from fl.losses.mse import SquaredError
from fl.losses.returned_value import expect_number
from fl.losses.segmentation import Segmentation
from fl.losses.target_bounds import TargetBoundsCheck
from fl.runtime import user_code
from fl.runtime.double_precision import KeepDouble, PrecisionError
from fl.seeds import stream
from fl.settings import declared, fit_value

TargetKind = Literal["known", "free", "binary", "probabilities", "classes"]
Function = Callable[[Tensor, Tensor], Tensor]
MOST_NUMBERS = 2**22
"""Size of outputs up to which a function is compared with known losses."""
TRIED_SIZES, SAME_LOSS = (1.0, 30.0), 1e-5
"""Standard deviations of these, and the relative difference of what is the same loss."""
TRIED_OUTPUTS = 8
"""Outputs with which it is tested whether all that flows back has one direction."""
MOST_DIRECTIONS = 32
"""Classes that this test tries, at most."""
SAME_DIRECTION = 1e-6
"""Relative distance of two directions that count as one."""
MISTAKES = (NameError, TypeError, AttributeError, LookupError, NotImplementedError)
"""What a function raises that is written wrong, rather than given numbers it is not for."""
IN_ONE_TYPE = "take its own tensors in the type of the outputs (weight.to(outputs))"
"""What helps where a function mixes types that PyTorch does not mix."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Loss):
    """What losses of the user's own have in common.

    Attributes:
        targets: what an unknown target is searched as, which has the shape of one example's outputs then: "free"
            numbers, "binary" ones, or "probabilities" over the last dimension. "classes": a target is the number of one
            of the outputs (K,); exact attacks try all, no search does. "known": the attacker has to know it.
    """

    outputs: ClassVar[str] = "whatever the function takes, as one tensor"

    targets: TargetKind = "known"

    def prepare(self, targets: Tensor, output_shape: torch.Size) -> Tensor:
        """Return targets as they are; in the outputs' shape where they may be searched for.

        Raises:
            ValueError: the function can't be called with outputs and such targets, as where it takes them in another
                order, or what it returns has no derivative.
        """
        prepared = targets if self.targets in {"known", "classes"} else super().prepare(targets, output_shape)
        _check_call(self, prepared, output_shape)
        return prepared

    def targets_in_words(self, count: int, output_shape: torch.Size) -> str:
        """Return that the first dimension is of examples; the form is the function's own affair."""
        if self.takes_classes:
            return f"labels int64 ({count},)"
        if self.targets == "known":
            return f"targets ({count}, ...), one for each example, as the loss function takes them"
        return super().targets_in_words(count, output_shape)

    def takes(self, outputs: Tensor, targets: Tensor) -> bool:
        """Return whether the function returns a finite number, and derivatives, for such targets of a batch."""
        return any(bool(found.isfinite().all()) for found in _tried(self, outputs, (targets.to(outputs.device),)))

    def variable_shape(self, output_shape: torch.Size) -> torch.Size | None:
        """Return the outputs' shape, or None."""
        return None if self.targets in {"known", "classes"} else output_shape

    def relax(self, variables: Tensor) -> Tensor:
        """Return targets of the kind stated."""
        if self.targets == "probabilities":
            return variables.softmax(-1)
        return variables.sigmoid() if self.targets == "binary" else variables

    def harden(self, variables: Tensor) -> Tensor:
        """Return targets of the kind stated; probabilities stay such."""
        return (variables > 0).to(variables.dtype) if self.targets == "binary" else self.relax(variables)

    def every_target(self, output_shape: torch.Size, limit: int) -> Tensor | None:
        """Return all classes, or the first `limit` of them; None for other targets."""
        return torch.arange(min(output_shape[0], limit)) if self.takes_classes and output_shape else None

    def errors(self, found: Tensor, true: Tensor) -> Tensor:
        """Return 1 for a wrong class; of other targets the root mean square of the difference."""
        if not self.takes_classes:
            return super().errors(found, true)
        return (found != (true.argmax(1) if true.ndim == 2 else true).to(found.device)).double()

    def sends_back_one_direction(self, output_shape: torch.Size) -> bool:
        """Return whether it has under some class, as far as trying tells; of other targets two outputs are too few.

        So it has where a function takes the class's own output alone, say. It may have where a function refuses to be
        tried.
        """
        if not self.takes_classes or output_shape[0] < 3:
            return output_shape.numel() < 3
        outputs = torch.randn(TRIED_OUTPUTS, *output_shape, generator=stream(0, "direction"), dtype=torch.float64)
        return any(_has_one_direction(self, outputs, label) for label in _some_classes(output_shape[0]))

    @property
    def takes_classes(self) -> bool:
        """Whether that was said of its targets, or found out (`known_loss`)."""
        return self.targets == "classes"

    @property
    def has_exact_targets(self) -> bool:
        """Whether they are classes; of others nobody knows what the function takes for right."""
        return self.takes_classes


class FunctionError(Exception):
    """A function of the user's own raised an error."""


def _check_call(loss: OwnLoss, targets: Tensor, output_shape: torch.Size) -> None:
    """Check that a function has no mistake that shows with whatever outputs; what it refuses of targets is no mistake.

    Raises:
        ValueError: names the mistake.
    """
    drawn = torch.randn(len(targets), *output_shape, generator=stream(0, "call of a loss")).to(targets.device)
    mistakes: list[Exception] = []
    for outputs in (drawn, drawn.sigmoid()):
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                value = copy.deepcopy(loss)(outputs.requires_grad_(), targets)
        except MISTAKES as error:
            mistakes.append(error)
            continue
        except Exception as error:  # noqa: BLE001  what else it refuses is said where that matters
            log.debug("%s does not take such outputs: %s", type(loss).__name__, error)
            return
        if value.requires_grad:
            return
        mistakes.append(ValueError("what it returns does not depend on the outputs (are they detached?)"))
    said = " ".join(str(mistakes[0]).split())
    raise ValueError(
        f"the loss can't be called as loss(outputs, targets) with outputs {tuple(drawn.shape)} and targets "
        f"{targets.dtype} {tuple(targets.shape)}: {type(mistakes[0]).__name__}: {said}"
    ) from mistakes[0]


@losses.register("function")
@dataclass(frozen=True, kw_only=True)
class NamedFunction(OwnLoss):
    """A function of the user's own by its name, `loss: my_losses:focal` (hyperleak, 2026).

    It is called with outputs and targets and returns the mean over the batch, differentiable twice.

    Attributes:
        function: `module:function`.
        targets: as above.
    """

    function: str

    def __post_init__(self) -> None:
        user_code.split_target(self.function)

    @classmethod
    def example(cls) -> NamedFunction:
        """Return the squared error of torch."""
        return cls(function="torch.nn.functional:mse_loss", targets="free")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what the function returns."""
        return expect_number(f"the loss {self.function}", _called(_find(self.function), outputs, targets))


@declared("loss")
@dataclass(frozen=True, kw_only=True)
class GivenFunction(OwnLoss):
    """A function of the user's own as an object.

    Attributes:
        call: the function.
        targets: as above.
    """

    name: ClassVar[str] = "function"

    call: Function

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what the function returns."""
        name = getattr(self.call, "__name__", type(self.call).__name__)
        return expect_number(f"the loss {name}", _called(self.call, outputs, targets))


def build_loss(given: object, targets: TargetKind | None = None) -> Loss:
    """Return the loss that a user named or gave.

    Args:
        given: a name ("bce"), settings ({"name": "bce", ...}), `module:function`, a loss of torch.nn with its default
            settings, a callable, or a loss. The `function` of {"name": "function"} may be a callable as well.
        targets: what the unknown targets of a function of the user's own are (`OwnLoss`); None leaves it to the loss.

    Raises:
        ValueError: it is none of these, or targets are stated of a loss that says itself what they are.
    """
    return _with_targets(_built(given), targets)


def _with_targets(loss: Loss, targets: TargetKind | None) -> Loss:
    """Return a loss with what its targets are."""
    if targets is None:
        return loss
    if not isinstance(loss, OwnLoss):
        raise ValueError(
            f"targets go with a loss function of your own alone: {loss.name} says itself what they are; leave them out"
        )
    if loss.targets not in {"known", targets}:
        raise ValueError(f"expected what targets are to be said once, got {loss.targets!r} of the loss and {targets!r}")
    checked = fit_value(OwnLoss, "targets", targets)
    return replace(loss, targets=checked)


def _built(given: object) -> Loss:
    """Return the loss that is given, with what it says itself of its targets."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, str) and ":" in given:
        return NamedFunction(function=given)
    if isinstance(given, Mapping) and given.get("name") == "function" and callable(given.get("function")):
        settings = {key: value for key, value in given.items() if key not in {"name", "function"}}
        if unknown := set(settings) - {"targets"}:
            raise ValueError(f"expected settings function and targets of the loss, got {min(unknown)!r}")
        return GivenFunction(call=given["function"], **settings)
    if isinstance(given, str | Mapping):
        return losses.build(given if isinstance(given, str) else dict(given))
    if isinstance(given, nn.Module):
        return _known_module(given) or GivenFunction(call=given)
    if callable(given) and not isinstance(given, type):
        return GivenFunction(call=given)
    raise ValueError(
        f"expected loss as a name ({', '.join(losses.names())}), module:function or a callable, got "
        f"{type(given).__name__} {given!r}"
    )


def _known_module(module: nn.Module) -> Loss | None:
    """Return the registered loss that a module of torch.nn with default settings is, or None."""
    kinds: dict[type, Loss] = {
        nn.CrossEntropyLoss: CrossEntropy(),
        nn.BCEWithLogitsLoss: BinaryCrossEntropy(),
        nn.BCELoss: BinaryCrossEntropy(logits=False),
        nn.MSELoss: SquaredError(),
    }
    plain = getattr(module, "reduction", "") == "mean" and not getattr(module, "label_smoothing", 0)
    weighed = any(isinstance(value, Tensor) for value in module.buffers())
    ignored = getattr(module, "ignore_index", -100) != -100
    return kinds.get(type(module)) if plain and not weighed and not ignored else None


def known_loss(loss: Loss, output_shape: torch.Size) -> Loss:
    """Return the registered loss that a function of the user's own is by what it returns, or the function.

    It is tried on random outputs of two numbers of examples, small and large ones, with all classes among the targets,
    unless these are too many numbers. More is known of a registered loss: which targets there are. Of any other
    function it is found out whether its targets are classes. Where the user says what targets are, that stands.

    Args:
        loss: any.
        output_shape: of one example.

    Raises:
        ValueError: the user says that targets are classes, and outputs are no logits of them; or there is no function
            of the name that was given.
    """
    if isinstance(loss, NamedFunction):
        _find(loss.function)  # of an update without labels nobody may call it later
    if not isinstance(loss, NamedFunction | GivenFunction) or loss.targets != "known":
        if isinstance(loss, OwnLoss) and loss.takes_classes and (len(output_shape) != 1 or output_shape[0] < 2):
            raise ValueError(
                f"expected a model that returns logits (B, K), K >= 2, under a loss with targets='classes', got "
                f"{tuple(output_shape)} for each example; say targets='known' of others"
            )
        return loss
    most = 2 if len(output_shape) > 1 else 2 * max(math.prod(output_shape), 2)
    found = _known_function(loss, output_shape, most) if most * math.prod(output_shape) <= MOST_NUMBERS else loss
    return replace(loss, targets="classes") if found is loss and _takes_classes(loss, output_shape) else found


def _known_function(loss: OwnLoss, output_shape: torch.Size, count: int) -> Loss:
    """Return the registered loss that a function is on so many examples and one more, or the function."""
    asked = [_trials(output_shape, number, size) for number in (count, count + 1) for size in TRIED_SIZES]
    matching = (known for known in asked[0] if all(_returns_the_same(loss, known, *trial[known]) for trial in asked))
    found = next(matching, loss)
    return loss if isinstance(found, Segmentation) and _takes_fewer_steps(loss, *asked[0][found]) else found


def _takes_fewer_steps(loss: OwnLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether a function takes targets of fewer steps than outputs have, as one of sequences (CTC) does.

    Of as many it may return what cross entropy does, as there is one way alone to align them.
    """
    return bool(_tried(loss, outputs, (targets[..., :-1],)))


def _has_one_direction(loss: Loss, outputs: Tensor, label: int) -> bool:
    """Return whether the gradients of a loss by outputs (B, K) of one class are multiples of one another, or may be.

    A class of which nothing flows back, or no number does, has no direction: one of weight 0, or an ignored one. A
    batch of a single class may be refused: then as many outputs of other classes are beside it.
    """
    alone = torch.full((len(outputs),), label)
    others = (label + 1 + torch.arange(len(outputs))) % outputs.shape[1]
    for given, targets in ((outputs, alone), (outputs.repeat(2, 1), torch.cat([alone, others]))):
        for found in _tried(loss, given, (targets,)):
            gradients = found[1:].view_as(given)[: len(outputs)]
            if not bool(gradients.isfinite().all() and gradients.any()):
                return False
            singular = torch.linalg.svdvals(gradients)
            return bool(singular[1] <= SAME_DIRECTION * singular[0])
    return True


def _takes_classes(loss: OwnLoss, output_shape: torch.Size) -> bool:
    """Return whether a function takes one class for each example, as far as trying it tells.

    Of classes it returns the same twice, it takes a batch of each alone, as attacks ask it, and it raises at the first
    one of which there is no output.
    """
    if len(output_shape) != 1 or output_shape[0] < 2:
        return False
    draw, number = stream(0, "classes"), output_shape[0]
    count = min(2 * number, max(MOST_NUMBERS // number, 2))
    outputs = torch.randn(count, number, generator=draw)
    classes = torch.randint(number, (count,), generator=draw)
    found = _tried(loss, outputs, (classes, classes))
    if len(found) != 2 or not bool(found[0].isfinite().all()) or not torch.equal(*found):
        return False
    labels = _some_classes(number)
    for few in (outputs[:1], outputs[:2]):
        alone = [torch.full((len(few),), label) for label in (*labels, number)]
        if len(_tried(loss, few, alone)) != len(labels):
            return False
    return True


def _some_classes(number: int) -> range:
    """Return some of so many classes, the first among them."""
    return range(0, number, max(number // MOST_DIRECTIONS, 1))


def _trials(output_shape: torch.Size, count: int, size: float) -> dict[Loss, tuple[Tensor, Tensor]]:
    """Return outputs of so many examples, and targets of each registered loss that takes such outputs."""
    draw = stream(0, "known loss")
    outputs = size * torch.randn(count, *output_shape, generator=draw)
    binary = torch.randint(2, outputs.shape, generator=draw).to(outputs)
    trials: dict[Loss, tuple[Tensor, Tensor]] = {}
    if output_shape and output_shape[0] > 1:
        classes = torch.arange(count * math.prod(output_shape[1:])) % output_shape[0]
        by_class = CrossEntropy() if len(output_shape) == 1 else Segmentation()
        trials[by_class] = outputs, classes.view(count, *output_shape[1:])
    trials[BinaryCrossEntropy()] = outputs, binary
    trials[BinaryCrossEntropy(logits=False)] = (outputs / size).sigmoid(), binary
    trials[SquaredError()] = outputs, size * torch.randn(outputs.shape, generator=draw)
    return trials


def _returns_the_same(loss: Loss, known: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Return whether two losses, and their derivatives, are the same but for rounding."""
    found = [one for asked in (loss, known) for one in _tried(asked, outputs, (targets,))]
    if len(found) < 2:
        return False
    own, other = (one.double() for one in found)
    return torch.allclose(own, other, rtol=SAME_LOSS, atol=SAME_LOSS * float(other.abs().max()))


def _tried(loss: Loss, outputs: Tensor, trials: Iterable[Tensor]) -> list[Tensor]:
    """Return what a loss returns for targets in turn, with its derivatives in a row, until it raises.

    A copy of a loss that is a module is asked, so that what it keeps of its calls stays as it was.
    """
    found: list[Tensor] = []
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            torch.enable_grad(),
            TargetBoundsCheck(),
        ):
            warnings.simplefilter("ignore")  # of targets that do not go with the outputs
            asked = copy.deepcopy(loss)
            for targets in trials:
                given = outputs.detach().clone().requires_grad_()
                value = asked(given, targets)
                found.append(torch.cat([value.detach().reshape(1), torch.autograd.grad(value, given)[0].flatten()]))
    except Exception as error:  # noqa: BLE001  whatever a function raises at targets that are not its own
        log.debug("%s does not take such targets: %s", type(loss).__name__, error)
    return found


@functools.cache
def _find(target: str) -> Callable[..., object]:
    return user_code.find_callable(target)


def _called(function: Callable[..., object], outputs: Tensor, targets: Tensor) -> object:
    """Return what a function returns, in double precision where outputs are, whatever it fixes (weights of classes).

    Weights of a loss of torch.nn are taken in the type of other outputs: PyTorch refuses those of another.
    """
    if outputs.dtype is not torch.float64:
        if isinstance(function, _WeightedLoss) and (weights := _weights_of_another_type(function, outputs.dtype)):
            return functional_call(function, weights, (outputs, targets))
        return function(outputs, targets)
    with KeepDouble():
        return function(outputs, targets)


def _weights_of_another_type(loss: nn.Module, kind: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a loss that are in another floating-point type, in this one."""
    other = {name: value for name, value in loss.named_buffers() if value.dtype is not kind}
    return {name: value.to(kind) for name, value in other.items() if value.is_floating_point()}


@contextmanager
def function_errors_named() -> Iterator[None]:
    """Raise what functions of the user's own raise within as one error.

    Raises:
        FunctionError: names the error.
    """
    try:
        yield
    except Exception as error:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if _called.__code__ in codes and not isinstance(error, torch.OutOfMemoryError | PrecisionError):
            said = " ".join(str(error).split())
            hint = f"; {IN_ONE_TYPE}" if "expected scalar type" in said else ""
            raise FunctionError(f"the loss function raised {type(error).__name__}: {said}{hint}") from error
        raise
