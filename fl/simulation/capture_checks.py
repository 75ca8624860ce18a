"""What a user's own model, images and settings are checked for before anything is captured of them."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl.client import Client
from fl.defense import Defense, overrides
from fl.inputs.description import Range
from fl.inputs.form import Inputs, tensors_of
from fl.local import sampling
from fl.losses import Loss
from fl.method import Method
from fl.models.building_blocks.model_checks import FORWARD_ERRORS
from fl.runtime.module_copies import deep_copy
from fl.runtime.random_state import find_drawing_modules, preserve_global_rng, watch_draws
from fl.seeds import stream
from fl.view import ThreatModel

MOST_RUN = 2
"""Examples on which a network is tried that works out each by itself."""


def check_settings(method: object, defense: object, threat: object) -> None:
    """Refuse names, plain data and classes in place of what they stand for; None is each one's default.

    Raises:
        ValueError: says what makes one.
    """
    made: tuple[tuple[str, object, type, str], ...] = (
        ("method", method, Method, "fl.method.methods.build({})"),
        ("defense", defense, Defense, "defenses.defenses.build({})"),
        ("threat", threat, ThreatModel, "fl.types.ThreatModel(knows_labels=True, ...)"),
    )
    for what, value, kind, how in made:
        if value is not None and not isinstance(value, kind):
            shown = repr(value) if isinstance(value, str | dict) else "..."
            got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"
            raise ValueError(f"expected {what} as a {kind.__name__}, got {got}; {how.format(shown)} makes one")


AS_MODULES = (
    "masks of nn.Dropout, and of modules that leave out a branch as a whole, are read off a captured update of one "
    "step on one example: write functional dropout so"
)
"""What helps with dropout in a forward, of an update that is there already."""
MOST_PLACES = 4
"""Modules that a message names, at most."""
QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Where PyTorch has layers of integers."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the network itself, out of `DataParallel`, `DistributedDataParallel` and what `torch.compile` returns."""
    while isinstance(model, nn.Module):
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            inner = model._orig_mod
            assert isinstance(inner, nn.Module)
            model = inner
        else:
            break
    return model


class Plain(nn.Module):
    """A part of a network that `torch.compile` or `DataParallel` had taken, run as it is written, by the same names."""

    def __init__(self, name: str, part: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, part)

    def forward(self, *args: Any, **given: Any) -> Any:
        """Return what the part returns."""
        return self.get_submodule(self.name)(*args, **given)


def unwrap_parts(model: nn.Module) -> None:
    """Let parts of a copied network that were wrapped run as they are written; their parameters keep their names.

    Args:
        model: a copy, which is changed.
    """
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if unwrap_model(part) is part or isinstance(module, Plain):
                continue
            inner = "_orig_mod" if type(part).__name__ == "OptimizedModule" else "module"
            plain = Plain(inner, part.get_submodule(inner)).train(part.training)
            module._modules[name] = plain
            unwrap_parts(plain)


def rebind_forward(model: nn.Module) -> None:
    """Let each module of a copied network run the forward of its class where `torch.compile` took the original's.

    A function in the place of a forward is no part of what is copied, and goes on using what it was made for.

    Args:
        model: a copy, which is changed.

    Raises:
        ValueError: a module with parameters has a function as its forward that may use other objects; names it.
    """
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        compiled = getattr(forward, "_torchdynamo_orig_callable", None)
        if compiled is not None and getattr(inspect.unwrap(compiled), "__func__", None) is type(module).forward:
            del module.forward
        elif isinstance(forward, FunctionType) and _may_use_objects(forward) and any(True for _ in module.parameters()):
            place = repr(name) if name else "the model"
            raise ValueError(
                f"expected a model whose forward uses its own parameters, got a function as that of {place}, which a "
                "copy would share with the original: define it in the class, or bind it by types.MethodType"
            )


def _may_use_objects(function: FunctionType) -> bool:
    """Return whether a function may use objects that it is not given: it names others than Python's modules."""
    names = inspect.getclosurevars(function)
    known = [*names.nonlocals.values(), *names.globals.values(), *(function.__defaults__ or ())]
    return not all(isinstance(value, ModuleType) for value in known)


def check_model(model: object, given: Collection[str] = ()) -> None:
    """Refuse what is no network with numbers in all of its parameters, but for those that are `given` otherwise.

    Raises:
        ValueError: says what it is, or names a parameter.
    """
    if not isinstance(model, nn.Module):
        hint = "; model.load_state_dict(...) takes the weights in" if isinstance(model, Mapping) else ""
        raise ValueError(f"expected model as an nn.Module, got {type(model).__name__}{hint}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            place = f" in {name!r}" if name else ""
            raise ValueError(
                f"expected a model that runs in Python, got TorchScript{place}, which takes no weights but its own: "
                "give the nn.Module that was scripted or traced, with its weights "
                "(module.load_state_dict(scripted.state_dict()))"
            )
        if type(module).__module__.startswith(QUANTIZED):
            raise ValueError(
                f"expected a model of floating-point weights, got {type(module).__name__} in {name!r}, whose integers "
                "nobody trains: give the model before it was converted"
            )
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise ValueError(
                f"expected a model whose parameters have values, got {name!r} without (nn.LazyLinear, say): call the "
                "model once on images"
            )
    for name, value in model.named_parameters():
        if value.is_complex() and value.requires_grad:
            raise ValueError(
                f"expected trained parameters of real numbers, got {name!r} in {value.dtype}: keep it as "
                "torch.view_as_real(weight) and compute with torch.view_as_complex(...), or freeze it"
            )
        if value.is_inference() or value.is_meta:
            kind = "made under torch.inference_mode()" if value.is_inference() else "on the device meta"
            raise ValueError(
                f"expected a model whose parameters can be trained, got {name!r}, {kind}: build it elsewhere and load "
                "its weights there (load_state_dict)"
            )
        if name not in given and not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            raise ValueError(f"expected a model of finite numbers, got NaN or infinity in {name!r} ({bad} of them)")


def floating_weight(model: nn.Module) -> Tensor:
    """Return the first floating-point parameter, whose type and device inputs have; an empty one where none is."""
    return next((value for value in model.parameters() if value.is_floating_point()), torch.empty(0))


def choose_layout(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the images as they lie, or row by row where a network that flattens by `view` takes them only so."""
    probe, rows = deep_copy(model).eval(), torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    rows.copy_(inputs)
    if rows.stride() == inputs.stride():
        return inputs
    with torch.no_grad(), preserve_global_rng(inputs.device):
        for images in (inputs, rows):
            with suppress(*FORWARD_ERRORS):
                probe(images[:1].clone())
                return images
    return inputs


def protect_inputs(model: nn.Module, inputs: Tensor) -> None:
    """Let a network that writes into what it is given, as told by running copies on `inputs`, work on copies."""
    given = inputs.detach().clone()
    before = given._version
    with torch.no_grad(), preserve_global_rng(given.device):
        for training in (False, True):
            with suppress(*FORWARD_ERRORS):  # why it does not run is said where it has to
                deep_copy(model).train(training)(given)
    if given._version != before:
        model.register_forward_pre_hook(_copy_inputs)


def _copy_inputs(module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def refuse_secure_aggregation(defense: Defense | None) -> None:
    """Refuse secure aggregation, which there is none of with one client.

    Raises:
        ValueError: says what to do instead.
    """
    if defense is not None and defense.group_size > 1:
        name = next(part.name for part in defense.members() if part.group_size > 1)
        raise ValueError(
            f"{name}: a single client's batch or update has no group; leave the defense out and, where an update is "
            "the mean of N clients, say --clients N (clients=N of hyperleak.audit), or simulate a federation "
            "(hyperleak audit --method, fl.federation)"
        )


def check_training(client: Client, inputs: Tensor, *, default: bool, captured: bool = False) -> None:
    """Run copies of the network on the smallest batch of local training, in the mode it is trained in.

    In evaluation mode two examples are enough: a network works out each by itself.

    Args:
        client: the local rule.
        inputs: as many as the client holds.
        default: whether the user gave no method, so that the model's own mode counts.
        captured: whether the update is there already.

    Raises:
        ValueError: it does not run, or it draws random numbers, which no one could replay.
    """
    _check_renormalized(client.task.model)
    order = sampling.plan_batches(client.method.phases(client.task, 0), len(inputs), stream(0, "order", 0, 0))
    sizes = {len(index) for steps in order for step in steps for index in step} - {0}
    training = client.method.train_mode
    count = min(sizes, default=len(inputs))
    batch = inputs[: count if training else min(count, MOST_RUN)].detach()
    mode = f"in {'train' if training else 'evaluation'} mode"
    remedy = "call model.eval(), or pass method=FedAvg(steps=1, batch_size=None, train_mode=False)"
    if not default:
        remedy = "set train_mode=False in the method"
    copies = [copy.deepcopy(client.task.model) for _ in range(2)]
    with torch.no_grad(), watch_draws(*copies, device=batch.device) as has_drawn:
        try:
            first, second = (model(batch) for model in copies)
        except (RuntimeError, ValueError) as error:
            hint = f"; {remedy}" if training else ""
            raise ValueError(
                f"expected a model that runs {mode} on a batch of {len(batch)} image(s), got: {error}{hint}"
            ) from error
        drawn = has_drawn()
    if drawn or not torch.allclose(first, second, equal_nan=True):
        places = name_draws(copies[0], batch)
        if training and captured:
            remedy = (
                f"to attack the update as if nothing had been drawn, which confirms nothing, {remedy}; {AS_MODULES}"
            )
        always = (
            "draw them under `if self.training` alone (functional dropout: training=self.training; a VAE: mu + noise "
            "if self.training else mu), and put what always draws (nn.FractionalMaxPool2d, say) out of the network "
            "that is audited"
        )
        raise ValueError(
            f"expected a model without random numbers {mode}, got some in {places}, which nobody can draw again; "
            f"{remedy if training else always}"
        )
    _check_derivative(copies[0], batch[:MOST_RUN])


def _check_renormalized(model: nn.Module) -> None:
    """Refuse embeddings that shorten their rows as they are looked up: a prediction would change what the server sent.

    Raises:
        ValueError: says which.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [n for n, module in model.named_modules() if isinstance(module, kinds) and module.max_norm is not None]
    if found:
        raise ValueError(
            f"expected a model whose forward leaves its weights as they are, got max_norm in {found}, which shortens "
            "rows in place: let your function set it to None (module.max_norm = None). Which rows moved is then still "
            "read; a row that was shortened has moved by more than its gradient"
        )


def name_draws(model: nn.Module, inputs: Tensor) -> str:
    """Return in words in which modules a network draws random numbers as it is; where it does not tell, an example.

    A copy of the network is run.
    """
    probe, found = deep_copy(model), list[str]()
    with torch.no_grad(), suppress(*FORWARD_ERRORS):
        found = find_drawing_modules(probe, lambda: probe(inputs), inputs.device)
    more = f" and {len(found) - MOST_PLACES} more" if len(found) > MOST_PLACES else ""
    return (
        f"{', '.join(found[:MOST_PLACES])}{more}" if found else "its forward (functional dropout or a random flip, say)"
    )


def _check_derivative(model: nn.Module, inputs: Tensor) -> None:
    """Run a network forward and backward.

    Raises:
        ValueError: it runs forward alone, or without its own parameters.
    """
    with torch.enable_grad():
        returned: Tensor = model(inputs)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            return
        if not returned.requires_grad:
            raise ValueError(
                "expected a model that can be trained, but what it returns has no gradient: its forward runs under "
                "torch.no_grad() or torch.inference_mode(), or goes by .detach(), .data or NumPy"
            )
        try:
            slopes = torch.autograd.grad(returned.sum(), parameters, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            said = " ".join(str(error).split())
            raise ValueError(f"expected a model that can be trained, but its backward pass raises: {said}") from error
        if all(slope is None for slope in slopes):
            raise ValueError(
                "expected a model whose forward uses its own parameters, but none of a copy's gets a gradient: it may "
                "use those of another object, or detach what they make"
            )


def check_given(inputs: Inputs, labels: Tensor, input_range: Range | None, *, classes: bool = True) -> None:
    """Refuse what is no batch of inputs with a target each, and pictures that are not in [0, 1].

    Args:
        inputs: of the model.
        labels: a target for each.
        input_range: of the inputs, if one is stated.
        classes: whether targets are classes, as cross entropy takes them.

    Raises:
        ValueError: says which of both, and what it is.
    """
    if not isinstance(inputs, Tensor | Mapping | tuple | list):
        raise ValueError(f"expected inputs as a tensor, got {tensor_conversion_hint(inputs)}")
    if not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor, got {tensor_conversion_hint(labels)}")
    for value in tensors_of(inputs):
        if not isinstance(value, Tensor):
            raise ValueError(f"expected inputs as tensors, got {tensor_conversion_hint(value)}")
    first = next(iter(tensors_of(inputs)), None)
    if first is None or not first.ndim or not len(first):
        got = "none" if first is None else f"{first.dtype} {tuple(first.shape)}"
        raise ValueError(f"expected inputs (B, ...) of at least one example, got {got}")
    if not labels.ndim or len(labels) != len(first):
        alone = first.ndim == 3 and labels.numel() == 1
        hint = "; one picture needs a dimension of the batch: inputs[None]" if alone else ""
        wanted = f"labels int64 ({len(first)},)" if classes else f"targets ({len(first)}, ...), one for each example"
        raise ValueError(f"expected {wanted}, got {labels.dtype} {tuple(labels.shape)}{hint}")
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        _check_pictures(inputs, input_range)


def _check_pictures(inputs: Tensor, input_range: Range | None) -> None:
    if not inputs.is_floating_point():
        hint = "of whole numbers give inputs.float() / 255"
        if inputs.is_complex():
            hint = "give real and imaginary part as channels: torch.cat([inputs.real, inputs.imag], 1)"
        raise ValueError(
            f"expected floating-point inputs (B, C, H, W), got {inputs.dtype} {tuple(inputs.shape)}; {hint}"
        )
    low, high = float(inputs.min()), float(inputs.max())
    if input_range is None and not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected pixels in [0, 1], got [{low:.4g}, {high:.4g}]; a normalization belongs into "
            "the model: give it numbers in [0, 1], and undo the scaling in its first layer, or state input_range"
        )


def check_loss(loss: Loss, method: Method | None, defense: Defense | None) -> None:
    """Refuse a loss other than cross entropy for what has one of its own.

    Raises:
        ValueError: says which method or defense that is, and what to take instead.
    """
    if loss.is_cross_entropy:
        return
    if method is not None and not method.takes_any_loss:
        raise ValueError(
            f"{method.name} has a loss of its own, of cross entropy, which can't be {loss.name}; take fedavg, or leave "
            "the loss out"
        )
    if defense is not None and any(overrides(part, "transform_batch") for part in defense.members()):
        raise ValueError(
            f"{defense.name} mixes labels as cross entropy has them, which can't be done under {loss.name}; leave it "
            "out"
        )


def untie_parameters(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the first name of each parameter, where a state dictionary has tied ones by each of their names.

    Raises:
        ValueError: names of one parameter have different numbers.
    """
    found, first = dict(given), dict[int, str]()
    for name, value in model.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(value), name)
        if own == name or name not in found:
            continue
        alias = found.pop(name)
        if not torch.equal(torch.as_tensor(found.setdefault(own, alias)), torch.as_tensor(alias)):
            raise ValueError(f"expected the same numbers for {own!r} and {name!r}, which are one parameter, got two")
    return found


def tensor_conversion_hint(value: object) -> str:
    """Return the type of a value that should be a tensor and, for an array, how to convert it."""
    hint = "; torch.from_numpy makes one of it" if isinstance(value, np.ndarray) else ""
    return type(value).__name__ + hint


def layout_hint(wanted: Sequence[int], got: Sequence[int]) -> str:
    """Return how a tensor of another framework becomes one of PyTorch; empty where its shape is that of none.

    Args:
        wanted: the shape here, such as (out, in) or (out, in, height, width).
        got: that of the tensor.
    """
    kept = "Keras and Flax keep"
    if len(wanted) == 2 and tuple(got) == tuple(wanted[::-1]):
        return f"it is turned ({kept} matrices as (in, out)): transpose it"
    if len(wanted) == 4 and tuple(got) == (*wanted[2:], wanted[1], wanted[0]):
        return f"{kept} kernels as (height, width, in, out): permute(3, 2, 0, 1)"
    if len(wanted) != len(got) and math.prod(wanted) == math.prod(got):
        return f"it has as many numbers in another shape: reshape it to {tuple(wanted)}"
    return _part_hint(wanted, got)


def _part_hint(wanted: Sequence[int], got: Sequence[int]) -> str:
    """Return what to do where a tensor has a part of the rows or columns; empty where it has not."""
    if len(wanted) < 2 or len(wanted) != len(got) or any(a < b for a, b in zip(wanted, got, strict=True)):
        return ""
    short = [place for place, (a, b) in enumerate(zip(wanted, got, strict=True)) if a > b]
    if not set(short) <= {0, 1} or not all(got):
        return ""
    sides = " and ".join(f"{got[place]} of {wanted[place]} {('rows', 'columns')[place]}" for place in short)
    return (
        f"it has {sides}, as of a pruned or another model: give the one that the client trains; where that keeps its "
        "shapes and has masks (torch.nn.utils.prune), put what was sent at its place among zeros"
    )
