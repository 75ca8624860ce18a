"""Networks under weight norm as the same with plain weights, whose gradient follows from those of both parts.

Weight norm takes w = g v / |v|, with one norm for each row (or along whatever dimension it was told). From

    grad_g = <grad_w, v / |v|>,        grad_v = g / |v| (grad_w - grad_g v / |v|)

follows grad_w = |v| / g grad_v + grad_g v / |v|. An update is as linear in these only where it is one step of plain
SGD, with the same step size for both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, remove_weight_norm
from torch.nn.utils.weight_norm import WeightNorm

from attacks.result import NotApplicable
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, training_phases
from fl.defense import Defense
from fl.runtime.module_copies import deep_copy, forget_kept
from fl.tensors import dense
from fl.view import ServerView

NORM_MODULE = "_WeightNorm"
"""Name of the class by which torch's parametrization computes a weight."""


@dataclass(frozen=True)
class _NormedWeight:
    """A weight under weight norm.

    Attributes:
        module: path of the module that has it.
        name: of the weight there.
        size: name of g among the network's parameters.
        direction: name of v likewise.
        dim: along which norms are not taken; -1 takes one of all numbers.
        is_parametrization: whether it is torch's parametrization, rather than the hook that came before.
    """

    module: str
    name: str
    size: str
    direction: str
    dim: int
    is_parametrization: bool

    @property
    def whole(self) -> str:
        """Name of the weight among the network's parameters."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def weight(self, size: Tensor, direction: Tensor) -> Tensor:
        """Return w, of g and v."""
        return size * direction / torch.norm_except_dim(direction, 2, self.dim)

    def gradient(self, size: Tensor, direction: Tensor, by_size: Tensor, by_direction: Tensor) -> Tensor:
        """Return the gradient by w, of g and v and the gradients by them."""
        norm = torch.norm_except_dim(direction, 2, self.dim)
        return norm / size * by_direction + by_size * direction / norm


def with_plain_weights(view: ServerView) -> ServerView:
    """Return the view of the same network with plain weights in place of those under weight norm.

    It is the view itself where there are none, or where the update tells no gradient of them.

    Args:
        view: what the server saw.
    """
    found = [one for one in _normed_weights(view.task.model) if _is_told(view, one)]
    if not found or not _is_plain_step(view, found):
        return view
    shared, update = dict(view.shared), dict(view.update)
    model = deep_copy(view.task.model)
    for one in found:
        parts = [
            dense(tensors.pop(name)).double() for tensors in (shared, update) for name in (one.size, one.direction)
        ]
        kind = dense(view.shared[one.direction]).dtype
        shared[one.whole] = one.weight(*parts[:2]).to(kind)
        gradient = one.gradient(*parts).to(kind)
        update[one.whole] = gradient
        if not bool(gradient.isfinite().all()):  # g is zero
            return view
        _make_plain(model, one)
    order = [name for name, _ in model.named_parameters()]
    shared, update = ({n: part[n] for n in sorted(part, key=_place_in(order))} for part in (shared, update))
    return replace(view, task=replace(view.task, model=model), shared=shared, update=update, history=())


def _place_in(order: list[str]) -> Callable[[str], int]:
    places = {name: number for number, name in enumerate(order)}
    return lambda name: places.get(name, len(places))


def _normed_weights(model: nn.Module) -> Iterator[_NormedWeight]:
    """Yield the weights of a network that weight norm alone computes."""
    for path, module in model.named_modules():
        before = f"{path}." if path else ""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                names = f"{before}{hook.name}_g", f"{before}{hook.name}_v"
                yield _NormedWeight(path, hook.name, *names, hook.dim, False)
        if not parametrize.is_parametrized(module):
            continue
        assert isinstance(module.parametrizations, nn.ModuleDict)
        if len(module.parametrizations) > 1:
            continue
        for name, chain in module.parametrizations.items():
            if len(chain) == 1 and type(chain[0]).__name__ == NORM_MODULE:  # type: ignore[arg-type, index]
                start = f"{before}parametrizations.{name}."
                dim = chain[0].dim  # type: ignore[index]
                yield _NormedWeight(path, name, f"{start}original0", f"{start}original1", dim, True)


def _is_told(view: ServerView, one: _NormedWeight) -> bool:
    names = {one.size, one.direction}
    return names <= view.shared.keys() and names <= view.update.keys()


def _is_plain_step(view: ServerView, found: list[_NormedWeight]) -> bool:
    """Return whether the update of these weights is a gradient's, all of them by one factor."""
    if deviation_from_loss_gradient(view) is not None or view.parts or view.sent_as:
        return False
    if type(view.defense) is not Defense or not view.threat.knows_defense:
        return False
    steps = [step for phase in training_phases(view)[1] or () for step in phase if any(step)]
    observed = ObservedUpdate(view)
    if len(steps) != 1 or observed.unknown_decay or observed.decay_shares:
        return False
    if isinstance(observed.gradient, NotApplicable):  # adaptive, or signs alone
        return False
    groups = {
        id(phase.assign({name: None})[name]): phase.assign({name: None})[name]
        for one in found
        for name in (one.size, one.direction)
        for phase, _ in observed.moving_phases(name)
    }
    return len({group.lr for group in groups.values()}) == 1 and all(g.max_norm is None for g in groups.values())


def _make_plain(model: nn.Module, one: _NormedWeight) -> None:
    """Put a plain weight in the place of one under weight norm."""
    module = model.get_submodule(one.module)
    forget_kept(module, one.name)
    if not one.is_parametrization:
        remove_weight_norm(module, one.name)
        return
    weight = getattr(module, one.name).detach().clone()
    # remove_parametrizations takes the weight off the class, which copies of a network share
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    module.register_parameter(one.name, nn.Parameter(weight))
