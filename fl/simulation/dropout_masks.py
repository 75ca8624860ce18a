"""Dropout in training mode: a client draws its masks anew in each step, and nobody can draw them again.

Whether a module draws is its own mode's to say: a client may freeze a part of a network in training mode by `eval()`.

Of one step on one example the update tells them where a layer takes what dropout returns, as it is or behind
activations and pooling: no gradient flows into the weights of an input that is zero, and weight decay that is stated is
taken off. Elsewhere each layer still obeys its own equations, whatever is drawn above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fl.defense import Defense
from fl.local import sampling
from fl.local.weight_decay import decay_shares
from fl.method import Method
from fl.runtime.module_copies import copy_model
from fl.runtime.random_state import draws_masks, watch_draws
from fl.runtime.user_code import RUN_ERRORS
from fl.seeds import stream
from fl.simulation.capture_checks import AS_MODULES, floating_weight, name_draws, unwrap_model
from fl.simulation.drop_paths import find_drop_paths, read_drop_paths
from fl.types import Task

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that leave whole channels out."""
MOST_PROBED = 2**25
"""Numbers up to which examples are made up that have one channel each."""
_ONE_STEP = (((1,),),)
"""The schedule of one step on one example."""
UNLIKELY = 1e-6
"""Probability below which it is no chance that dropout left nothing out."""


@dataclass(frozen=True)
class Silenced:
    """A network without random numbers in training mode.

    Attributes:
        model: a copy of the network.
        names: of the modules that drew; empty where none did.
        masked: whether all masks that were drawn are known, and stand in their place.
        places: where it draws in training mode all the same, so that it has to be in evaluation mode, in words; "" for
            nowhere.
        unread: those modules whose masks the update does not tell.
    """

    model: nn.Module
    names: tuple[str, ...] = ()
    masked: bool = False
    places: str = ""
    unread: tuple[str, ...] = ()

    @property
    def evaluating(self) -> bool:
        """Whether it draws in training mode all the same."""
        return bool(self.places)

    @property
    def replayable(self) -> bool:
        """Whether a step on an example can be taken again as the client took it."""
        return self.masked or not (self.names or self.evaluating)

    @property
    def note(self) -> str:
        """What a reader has to know of it; "" for nothing."""
        if self.replayable:
            return _say_masks(self.model, self.names)
        unheld = "what a layer's own equations tell was not held against the layers above it"
        if self.evaluating:
            return (
                f"the network draws random numbers in {self.places}, which nobody can draw again: an image that is "
                f"recovered is as these left it (turned, shifted or noisy, say), and {unheld}"
            )
        return f"dropout in training mode draws masks that nobody can draw again: {unheld}"


class Mask(nn.Module):
    """Multiplies features (B, ...) by numbers that stay.

    Attributes:
        values: the numbers, without the first dimension.
        of_pixels: whether the features are the pixels, each by itself.
    """

    def __init__(self, values: Tensor, *, of_pixels: bool = False) -> None:
        super().__init__()
        self.values, self.of_pixels = values, of_pixels

    def forward(self, x: Tensor) -> Tensor:
        """Return the features with those at zero left out."""
        return x * self.values.to(x)


def in_client_mode(model: nn.Module, stated: bool | None) -> nn.Module:
    """Return a network with its modules in the modes in which a client trained it.

    Args:
        model: as its user builds it, in whatever modes.
        stated: the mode that was stated. Where it is not the network's own, the client has put all modules into it.
    """
    return model if stated in {None, model.training} else copy_model(model).train(stated)


def equals_evaluation(model: nn.Module) -> bool:
    """Return whether a network without dropout computes as in evaluation mode, since parts of it are put into that.

    Of PyTorch's modules it is then batch normalization alone that the mode matters to.
    """
    modes = {module.training for module in model.modules()}
    return len(modes) > 1 and not any(module.training for module in model.modules() if isinstance(module, _NormBase))


def silence(model: nn.Module, shape: Sequence[int] | None, update: Mapping[str, Tensor] | None) -> Silenced:
    """Return a network in training mode without dropout, or with the masks that an update tells.

    Args:
        model: whose modules are in the modes in which the client trained.
        shape: of one example; None where no example can be made up.
        update: of one step on one example, by the names of the model; None where it is of more.
    """
    own = copy_model(model)
    dropping = [module for module in own.modules() if _draws(module)]
    drawing = drawing_modules(own)
    shares = {name: module.p for name, module in drawing.items() if _puts_zeros(module)}
    for module in dropping:
        setattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
    gray = None if shape is None else torch.full((1, *shape), 0.5).to(floating_weight(own))
    paths = {} if gray is None or update is None else read_drop_paths(own, gray, update)
    for name, factor in paths.items():
        _put(own, name, Mask(factor))
    if gray is not None and (places := draws_in_training(own, gray)):
        return Silenced(own, tuple(drawing), places=places)
    masks = _read_masks(own, gray, update, shares) if gray is not None and update is not None else {}
    for name in shares.keys() - masks.keys():
        if gray is not None and update is not None:
            whole = isinstance(drawing[name], CHANNELWISE)
            masks |= _read_behind(own, name, gray, update, shares[name], channels=whole)
    masks = {name: mask for name, mask in masks.items() if not _is_unlikely(mask, drawing[name], shares[name])}
    if not (drawing or paths) or masks.keys() != drawing.keys():
        unread = tuple(f"{name!r} ({type(drawing[name]).__name__})" for name in drawing if name not in masks)
        return Silenced(own, tuple(drawing), unread=unread)
    for name, mask in masks.items():
        _put(own, name, Mask(mask, of_pixels=gray is not None and _takes_pixels(own, name, gray)))
    return Silenced(own, (*drawing, *paths), masked=True)


def with_masks_read_off(
    task: Task, update: Mapping[str, Tensor] | None, method: Method | None, defense: Defense | None, examples: int
) -> Task:
    """Return a task whose network has the masks that a captured update tells in the place of dropout.

    Args:
        task: whose network is as its user built it.
        update: in the names of the network; None where there is none.
        method: by which the client trained; None is one step on all examples, in the network's own modes.
        defense: of the client.
        examples: that the update is made of.

    Raises:
        ValueError: random numbers were drawn that the update does not tell; says why not, and what to do.
    """
    model = in_client_mode(task.model, None if method is None else method.train_mode)
    why = _why_untold(task, update, method, defense, examples)
    if not drawing_modules(model) and (why or not _has_drop_paths(model, task.input_shape)):
        return task
    silenced = silence(model, task.input_shape, None if why else _without_decay(task, update, method))
    if not silenced.masked:
        if not silenced.evaluating and not _draws_at_all(model, task.input_shape):
            return task  # a number that a part of the user's own keeps under the name that PyTorch has for it
        remedy = "call model.eval()" if method is None else "set train_mode=False in the method"
        cause = _cause(silenced, why)
        raise ValueError(
            f"expected a model without dropout or other random numbers in train mode, {cause}. To attack the update as "
            f"if nothing had been drawn, which confirms nothing, {remedy}; or capture the update of a client that "
            "trains without them (dropout: p=0)"
        )
    if equals_evaluation(silenced.model):
        silenced.model.eval()
    return replace(task, model=silenced.model)


def with_masks_of(told: nn.Module, model: nn.Module) -> tuple[nn.Module, str]:
    """Return a network with the masks that stand in another of its kind, and what to say of them; "" for none.

    Args:
        told: with masks in the place of dropout (`with_masks_read_off`).
        model: as its user built it; never changed.
    """
    masks = {name: module for name, module in told.named_modules() if isinstance(module, Mask)}
    if not masks:
        return model, ""
    own = copy_model(unwrap_model(model))
    for name, mask in masks.items():
        _put(own, name, mask)
    return own if told.training else own.eval(), Silenced(own, tuple(masks), masked=True).note


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of that of a name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _cause(silenced: Silenced, why: str) -> str:
    """Return what was drawn, and why nobody can tell."""
    names = ", ".join(map(repr, silenced.names))
    if silenced.evaluating:
        return f"got some in {silenced.places} beside {names}, which nobody can draw again; {AS_MODULES}"
    if why:
        return (
            f"got dropout ({names}), whose masks are read off an update of one plain step on one example alone: {why}"
        )
    return (
        f"got dropout ({names}), whose masks are not read off this update: it does not tell those of "
        f"{', '.join(silenced.unread) or names}. They are read where a linear layer takes one row of what nn.Dropout "
        "returns (no tokens; a convolution: nn.Dropout2d), as it is or (nothing else taking it) behind activations and "
        "pooling, and show by weights that did not move (weight decay has to be stated). Masks inside attention and "
        "recurrent layers, and of AlphaDropout, are not read"
    )


def _why_untold(
    task: Task, update: Mapping[str, Tensor] | None, method: Method | None, defense: Defense | None, examples: int
) -> str:
    """Return why an update tells no masks, whatever the network; "" where it may."""
    if examples != 1:
        return f"here it is of {examples} examples, each with masks of its own"
    if defense is not None and type(defense) is not Defense:
        return f"here the defense {defense.name} may have changed which numbers are zero"
    if method is None:
        return ""
    phases = method.phases(task, 0)
    steps = sum(map(len, sampling.plan_batches(phases, examples, stream(0, "capture", "order"))))
    if steps != 1:
        return f"here it is of {steps} steps, each with masks of its own"
    shares = decay_shares(phases, _ONE_STEP, update or ())
    if any(name not in shares for name in update or ()):
        return f"here {getattr(method, 'optimizer', 'the optimizer')} mixes weight decay into every weight's step"
    return ""


def _without_decay(
    task: Task, update: Mapping[str, Tensor] | None, method: Method | None
) -> Mapping[str, Tensor] | None:
    """Return an update of one step without weight decay, with zeros where no more than rounding is left of a number."""
    if method is None or update is None:
        return update
    shares, left = decay_shares(method.phases(task, 0), _ONE_STEP, update), dict(update)
    sent = dict(task.model.named_parameters())
    for name, share in shares.items():
        if share and name in sent and update[name].shape == sent[name].shape:
            before = sent[name].detach().to(update[name])
            rest = update[name] - share * before
            spacing = torch.finfo(rest.dtype).eps * before.abs()
            left[name] = rest.masked_fill(rest.abs() <= spacing, 0.0)
    return left


def drawing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of PyTorch that draw masks in the modes in which they are, by name."""
    return {name: module for name, module in model.named_modules() if module.training and _draws(module)}


def _draws(module: nn.Module) -> bool:
    """Return whether a module draws a mask in training mode, or may: one of a user's own that names a share."""
    if isinstance(module, _DropoutNd | nn.MultiheadAttention | nn.RNNBase):
        return draws_masks(module)
    share = getattr(module, "dropout", 0.0)
    return isinstance(share, int | float) and share > 0


def _puts_zeros(module: nn.Module) -> TypeGuard[_DropoutNd]:
    """Return whether a module leaves numbers out by zeros, so that an update shows which: alpha dropout does not."""
    return isinstance(module, _DropoutNd) and not isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout)


def _say_masks(model: nn.Module, names: Sequence[str]) -> str:
    """Return which masks stand in a network, and what those of its pixels mean for what attacks find; "" for none."""
    if not names:
        return ""
    said = [f"masks of dropout were read off the update: {', '.join(names)}"]
    for name in names:
        mask = model.get_submodule(name)
        if isinstance(mask, Mask) and mask.of_pixels:
            left_out = int((mask.values == 0).sum())
            said.append(
                f"{name} drops numbers of the picture itself: {left_out} of {mask.values.numel()} were left out or "
                "were 0, no update tells them, and what the layer behind takes, which attacks call features, is the "
                "picture without them"
            )
    return "; ".join(said)


def _takes_pixels(model: nn.Module, name: str, inputs: Tensor) -> bool:
    """Return whether a module is given the pixels, each changed by itself at most."""
    probe, given = copy_model(model).eval(), list[Tensor]()
    probe.get_submodule(name).register_forward_pre_hook(lambda _, args: given.append(args[0].clone()))
    changed = torch.zeros(inputs.numel(), dtype=torch.bool, device=inputs.device)
    changed[::3] = True  # any part that is no row, column or channel
    with torch.no_grad(), suppress(*RUN_ERRORS):
        probe(inputs)
        probe(torch.where(changed.view_as(inputs), inputs + 0.25, inputs))
    if len(given) != 2 or given[0].numel() != inputs.numel():
        return False
    return torch.equal((given[0] != given[1]).flatten(), changed)


def _has_drop_paths(model: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether a network has modules that leave out a branch as a whole."""
    return bool(find_drop_paths(model, torch.full((1, *shape), 0.5).to(floating_weight(model))))


def _draws_at_all(model: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether a network may draw random numbers as it is; of PyTorch's own dropout nothing is tried."""
    if any(isinstance(module, _DropoutNd) for module in drawing_modules(model).values()):
        return True
    return _draws_numbers(model, torch.full((1, *shape), 0.5).to(floating_weight(model)))


def draws_in_training(model: nn.Module, inputs: Tensor) -> str:
    """Return in words in which modules a network draws random numbers as it is; "" where it draws none."""
    return name_draws(model, inputs) if _draws_numbers(model, inputs) else ""


def _draws_numbers(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether a network draws random numbers in the modes of its modules; False where it does not run."""
    probe = copy_model(model)
    with torch.no_grad(), watch_draws(probe, device=inputs.device) as has_drawn:
        try:
            probe(inputs)
        except RUN_ERRORS:  # of batch normalization, say, which takes no single example
            return False
        return has_drawn()


def _read_masks(
    model: nn.Module, inputs: Tensor, update: Mapping[str, Tensor], shares: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the masks of those modules whose output a linear layer takes as it is.

    Args:
        model: without dropout.
        inputs: one example that it takes.
        update: of one step on one example.
        shares: what each module of dropout leaves out, by name.
    """
    returned: dict[str, list[Tensor]] = {name: [] for name in shares}
    taken: dict[str, list[Tensor]] = {}

    def mark(name: str, output: Tensor) -> Tensor:
        returned[name].append(output.clone())  # kept, so that its place in memory is no other's
        return returned[name][-1]

    def take(name: str, given: Sequence[Tensor]) -> None:
        if given:
            taken.setdefault(name, []).append(given[0])

    probe = copy_model(model).eval()
    for name, layer in probe.named_modules():
        if name in shares:
            layer.register_forward_hook(lambda _, __, output, name=name: mark(name, output))
        elif isinstance(layer, nn.Linear) and f"{name}.weight" in update:
            layer.register_forward_pre_hook(lambda _, given, name=name: take(name, given))
    with torch.no_grad(), suppress(*RUN_ERRORS):  # why it does not run is said where it has to
        probe(inputs)
    found = {}
    for name, outputs in returned.items():
        once = {layer: given[0] for layer, given in taken.items() if len(given) == len(outputs) == 1}
        # of several rows, such as tokens, a column of the weight sums what each row left of it
        layers = [n for n, value in once.items() if _is_same(outputs[0], value) and value.numel() == value.shape[-1]]
        if layers:
            kept = (update[f"{layers[0]}.weight"] != 0).any(0)
            scale = 1 / (1 - shares[name]) if shares[name] < 1 else 0.0
            found[name] = scale * kept.view(outputs[0].shape[1:])
    return found


def _read_behind(
    model: nn.Module, name: str, inputs: Tensor, update: Mapping[str, Tensor], share: float, *, channels: bool
) -> dict[str, Tensor]:
    """Return the mask of a module that a layer further up shows, by the module's name; none where no layer does.

    A linear layer or a convolution shows it that takes of each number (or channel) what no other makes, and zeros where
    that is zero: behind activations and pooling, say. They are told apart by an example for each, of that one alone.
    Where it takes those of one sign alone, as behind a ReLU, nothing else may take the others.

    Args:
        model: without dropout.
        name: of the module.
        inputs: one example that it takes.
        update: of one step on one example.
        share: what the module leaves out.
        channels: whether it leaves out whole channels.
    """
    shapes: list[torch.Size] = []

    def note(output: Tensor) -> Tensor:
        shapes.append(output.shape)
        return output

    _run_with(model, name, inputs, note, update)
    if len(shapes) != 1 or len(shapes[0]) < 2 or shapes[0][0] != 1:
        return {}
    shape = shapes[0][1:]
    count = shape[0] if channels else shape.numel()
    if count * shape.numel() > MOST_PROBED:
        return {}
    own = (count, *(1 for _ in shape[1:])) if channels else tuple(shape)
    single = torch.eye(count).to(inputs).view(count, *own).expand(count, *shape)
    runs = [_run_with(model, name, inputs, partial(_instead, factor * single), update) for factor in (0, 1, -1)]
    for layer in [name for name in runs[0] if name]:
        if any(layer not in run or len(run[layer]) != count for run in runs) or bool(runs[0][layer].any()):
            continue
        signs = [_by_column(run[layer]).to(inputs.device) for run in runs[1:]]
        made = signs[0] | signs[1]  # (numbers, columns)
        if any(_is_seen(run, runs[0], ~shown.any(1)) for run, shown in zip(runs[1:], signs, strict=True)):
            continue
        weight = update[f"{layer}.weight"]
        moved = (weight != 0).transpose(0, 1).flatten(1).any(1).to(inputs.device)
        if made.shape[1] == len(moved) and bool((made.sum(0) <= 1).all()) and bool(made.any(1).all()):
            scale = 1 / (1 - share) if share < 1 else 0.0
            kept = (made & moved).any(1).view(own)
            return {name: scale * kept.expand(shape)}
    return {}


def _run_with(
    model: nn.Module, name: str, inputs: Tensor, change: Callable[[Tensor], Tensor], update: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what layers whose weights are in an update take, by name, where what a module returns is changed.

    What the network returns is under "", if it does, as a tensor.
    """
    probe, taken = copy_model(model).eval(), dict[str, Tensor]()

    def take(layer: str, given: Sequence[Tensor]) -> None:
        if given:
            taken.setdefault(layer, given[0].clone())

    probe.get_submodule(name).register_forward_hook(lambda _, __, output: change(output))
    for layer, module in probe.named_modules():
        plain = isinstance(module, nn.Linear) or (
            isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        )
        if plain and f"{layer}.weight" in update:
            module.register_forward_pre_hook(lambda _, given, layer=layer: take(layer, given))
    with torch.no_grad(), suppress(*RUN_ERRORS):  # behind the layer that is asked about it may be of any batch size
        returned = probe(inputs)
        if isinstance(returned, Tensor):
            taken[""] = returned
    return taken


def _is_seen(run: Mapping[str, Tensor], without: Mapping[str, Tensor], which: Tensor) -> bool:
    """Return whether some of the examples (n,) change what any layer takes from what it takes without them."""
    pairs = [(value, without[name]) for name, value in run.items() if name in without and len(value) == len(which)]
    return any(len(one) == len(which) and not torch.equal(value[which], one[which]) for value, one in pairs)


def _instead(given: Tensor, _output: Tensor) -> Tensor:
    return given


def _by_column(taken: Tensor) -> Tensor:
    """Return which columns of a layer's weight meet numbers that are not zero, for each example."""
    return (taken != 0).flatten(2).any(2) if taken.ndim > 2 else taken != 0


def _is_unlikely(mask: Tensor, module: nn.Module, share: float) -> bool:
    """Return whether nothing at all was left out where some would have been: something else moved all weights."""
    draws = mask.shape[0] if isinstance(module, CHANNELWISE) else mask.numel()
    kept = (1 - share) ** draws
    return bool(mask.all()) and kept < UNLIKELY


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are one, of whatever shapes."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.numel() == second.numel()
