"""Brings tensors of Keras, Flax, Haiku and ONNX exports into the names and layouts of a torch model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from eval.audit.captured_files import CapturedUpdate
from eval.audit.flatten_order import flattened_channels
from eval.audit.unnamed_arrays import match_places
from fl.inputs.form import Inputs

ROLES = {
    **dict.fromkeys(("kernel", "depthwise_kernel", "pointwise_kernel", "w"), "kernel"),
    **dict.fromkeys(("bias", "beta", "b", "offset"), "bias"),
    **dict.fromkeys(("gamma", "scale"), "scale"),
    **dict.fromkeys(("moving_mean", "mean"), "running_mean"),
    **dict.fromkeys(("moving_variance", "var"), "running_var"),
    **dict.fromkeys(("embeddings", "embedding"), "table"),
}
"""What Keras, Flax and Haiku call the tensors of a layer, and what they are."""
MARKERS = {"kernel", "depthwise_kernel", "pointwise_kernel", "recurrent_kernel", "embeddings", "moving_variance"}
"""Words of their names that no layer of torch has."""
HAIKU_LAYER = re.compile(r"(?:^|[/.])(?:linear|conv\d_d|mlp|embed)[\w/.~]*[/.]w$")
ONNX = re.compile(r"^onnx::(?P<kind>MatMul|Gemm|Conv)_\d+$")
AROUND = re.compile(r":0$|[/.]\.ATTRIBUTES[/.]VARIABLE_VALUE$|[/.](?:raw_)?value$")
"""What TensorFlow and Flax's NNX write behind a variable's name."""
COLLECTION = re.compile(r"^(?:\W*(?:params|batch_stats|model_weights)\b\W*)+")
"""What Flax and Keras write in front of the names of all layers."""
UNLIKE = "kernel of a transposed convolution"
"""What other frameworks have in another orientation."""
KINDS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    (_ConvTransposeNd, UNLIKE),
    ((nn.Linear, _ConvNd), "kernel"),
    ((_NormBase, nn.LayerNorm, nn.GroupNorm), "scale"),
    (nn.Embedding, "table"),
)
"""Layers of torch, and the tensor by which theirs are known."""
WEIGHTS = ("kernel", "scale", "table")
"""Tensors that torch calls `weight`."""
SHOWN = 3
"""How many tensors a note or a recipe names."""


@dataclass(frozen=True)
class _Layer:
    """A layer of the file or of the model.

    Attributes:
        name: of the layer.
        tensors: names of its tensors by what they are (`ROLES`).
        shapes: of these as torch has them, likewise.
    """

    name: str
    tensors: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @property
    def key(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What a layer of the file and one of the model have in common."""
        return tuple(sorted(item for item in self.shapes.items() if not item[0].startswith("running")))


def with_torch_layout(
    captured: CapturedUpdate, model: nn.Module, input_shape: Sequence[int] | Inputs | None = None
) -> CapturedUpdate:
    """Return an update in torch's names and layouts, where its names are those of another framework; else as it is.

    Layers are told apart by kind and shapes, those that have both in common by the numbers in their names. Kernels
    lie as (in, out), and of convolutions as (height, width, in, out); square ones count as lying so as well. Where
    the model flattens channels first, the rows of the matrix behind are put into that order.

    Args:
        captured: with the names of a file.
        model: whose names are wanted.
        input_shape: (C, H, W) of pictures, where it is known.

    Raises:
        ValueError: the names are another framework's, and which layer is which can't be told; says how to bring them
            over.
    """
    names, known = list(captured.update), model.state_dict()
    if captured.nameless:
        return _places_brought_over(captured, model, input_shape)
    framework = _framework(names, known)
    if not framework:
        return captured
    onnx = framework == "ONNX"
    mine = {name: name for name in names if onnx and name in known}
    theirs = {name: value for name, value in captured.update.items() if name not in mine}
    free = _model_layers(model, mine)
    problems = []
    for turned in (True, False):
        try:
            layers = _onnx_layers(theirs, turned) if onnx else _layers(theirs, turned)
            pairs = _pairs(layers, free, framework)
        except ValueError as error:
            problems.append(str(error))
            continue
        own = mine | {layer.tensors[role]: found.tensors[role] for layer, found in pairs for role in layer.tensors}
        kernels = {layer.tensors["kernel"] for layer, _ in pairs if "kernel" in layer.tensors}
        return _brought_over(captured, own, kernels if turned else set(), (framework, model, input_shape))
    raise ValueError(f"{problems[0]}; {_recipe(names, list(known), onnx=onnx)}")


def _framework(names: Sequence[str], known: Collection[str]) -> str:
    """Return whose convention names follow; empty where they are the model's own, or nobody's that is known."""
    last = {name.rpartition(".")[2] for name in known}
    if set(names) <= set(known):
        return ""
    if any(map(ONNX.match, names)):
        return "ONNX"
    plain = {_parts(name)[-1] for name in names}
    if plain & MARKERS - last:
        flax = any(re.search(r"\bparams\b|(?:^|[/.])[A-Z]\w*_\d+[/.]", name) for name in names)
        return "Flax" if flax else "Keras"
    if any(re.search(r"[/.]vars[/.]\d+$", name) for name in names):
        return "Keras"
    return "Haiku" if "w" not in last and any(map(HAIKU_LAYER.search, names)) else ""


def _parts(name: str) -> list[str]:
    """Return the parts of a name, without what frameworks write around it."""
    plain = COLLECTION.sub("", AROUND.sub("", name))
    return [part for part in re.split(r"[\[\]'\"./]+", plain) if part] or [name]


def _places_brought_over(
    captured: CapturedUpdate, model: nn.Module, input_shape: Sequence[int] | Inputs | None
) -> CapturedUpdate:
    """Return arrays without names in torch's layouts where Keras's or Flax's alone have their shapes; else as they are.

    Keras's `get_weights()` goes layer by layer, and Flax's leaves come by sorted names, a bias before its kernel.
    """
    try:
        match_places(captured, model)
    except ValueError:
        arrays = list(captured.update.values())
    else:
        return captured
    layers = _model_layers(model, ())
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    by_role = [[(role, name) for role, name in layer.tensors.items()] for layer in layers]
    by_letter = [sorted(layer, key=lambda item: item[0] != "bias") for layer in by_role]
    whole = [(role, name) for layer in by_role for role, name in layer]
    orders = {
        "Keras": (whole, [(role, name) for role, name in whole if name in trained]),
        "Flax": ([(role, name) for layer in by_letter for role, name in layer if name in trained],),
    }
    shapes = {name: layer.shapes[role] for layer in layers for role, name in layer.tensors.items()}
    for framework, tried in orders.items():
        for order in tried:
            theirs = [
                _turned(array, False) if role == "kernel" else array
                for array, (role, _) in zip(arrays, order, strict=False)
            ]
            if len(order) == len(arrays) and [tuple(one.shape) for one in theirs] == [shapes[n] for _, n in order]:
                own = dict(zip(captured.update, (name for _, name in order), strict=True))
                kernels = {place for place, (role, _) in zip(captured.update, order, strict=True) if role == "kernel"}
                named = replace(captured, nameless=False)
                return _brought_over(named, own, kernels, (framework, model, input_shape))
    return captured


# ---- layers ----------------------------------------------------------------------------------------------------------
def _layers(tensors: Mapping[str, Tensor], turned: bool) -> list[_Layer]:
    """Return the layers of a file in the order of its names; its kernels lie as theirs, or as torch's already.

    Raises:
        ValueError: a tensor is none of those that are known.
    """
    grouped: dict[str, dict[str, str]] = {}
    for name in tensors:
        *layer, last = _parts(name)
        if layer and layer[-1] == "vars":
            layer, last = layer[:-1], f"vars/{last}"
        if "recurrent_kernel" in last:
            raise ValueError(
                f"expected layers that torch has alike, got a recurrent one ({name!r}): its single bias stands for two "
                "of torch; of an LSTM give kernel.T as weight_ih_l0, recurrent_kernel.T as weight_hh_l0 and the bias "
                "as both; the gates of a GRU stand in another order"
            )
        grouped.setdefault("/".join(layer), {})[last] = name
    layers = []
    for layer_name, inside in grouped.items():
        numbered = _numbered({last: tensors[name] for last, name in inside.items()})
        roles: dict[str, str] = {}
        for last, name in inside.items():
            role = numbered.get(last, ROLES.get(last, ""))
            if not role or role in roles:
                raise ValueError(f"expected tensors of known layers, got {name!r}")
            roles[role] = name
        depthwise = "depthwise" in "/".join((layer_name, *inside))
        shapes = {role: tuple(tensors[name].shape) for role, name in roles.items()}
        if "kernel" in shapes and turned:
            shapes["kernel"] = tuple(_turned(tensors[roles["kernel"]], depthwise).shape)
        layers.append(_Layer(layer_name, roles, shapes))
    return layers


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what the tensors of a layer are that Keras's files number (`vars/0`)."""
    if not all(re.fullmatch(r"vars/\d+", last) for last in tensors):
        return {}
    ordered = sorted(tensors, key=lambda last: int(last[5:]))
    matrix = tensors[ordered[0]].ndim > 1
    roles = ("kernel", "bias") if matrix else ("scale", "bias", "running_mean", "running_var")
    return dict(zip(ordered, roles, strict=False))


def _onnx_layers(tensors: Mapping[str, Tensor], turned: bool) -> list[_Layer]:
    """Return a layer for each tensor whose name the exporter made up: a weight of `onnx::Conv_1`, turned of a MatMul.

    Raises:
        ValueError: a tensor is no weight, as where batch normalization was folded into convolutions.
    """
    layers = []
    for name, value in tensors.items():
        found = ONNX.match(name)
        if found is None:
            raise ValueError(f"expected the model's names, or those that ONNX's exporter makes up, got {name!r}")
        if value.ndim < 2:
            raise ValueError(
                f"expected weights under names that ONNX's exporter made up, got {name!r} in one dimension: batch "
                "normalization was folded into a convolution, and nothing tells its part; export with "
                "training=TrainingMode.TRAINING"
            )
        shape = _turned(value, False).shape if turned and found["kind"] == "MatMul" else value.shape
        layers.append(_Layer(name, {"kernel": name}, {"kernel": tuple(shape)}))
    return layers


def _model_layers(model: nn.Module, taken: Collection[str]) -> list[_Layer]:
    """Return the model's layers, of those with tensors that are taken what is left."""
    layers, known = [], set(model.state_dict())
    for name, module in model.named_modules():
        kind = next((kind for types, kind in KINDS if isinstance(module, types)), "")
        if not kind:
            continue
        roles = {
            kind if own == "weight" else own: (f"{name}.{own}".lstrip("."), tuple(value.shape))
            for own, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if own in {"weight", "bias", "running_mean", "running_var"}
        }
        roles = {role: held for role, held in roles.items() if held[0] in known and held[0] not in taken}
        if roles:
            tensors = {role: held[0] for role, held in roles.items()}
            layers.append(_Layer(name, tensors, {role: held[1] for role, held in roles.items()}))
    return layers


def _pairs(layers: Sequence[_Layer], free: Sequence[_Layer], framework: str) -> list[tuple[_Layer, _Layer]]:
    """Return each layer of a file with the model's.

    Raises:
        ValueError: one fits none, or fits several and nothing tells which.
    """
    pairs = []
    for key in dict.fromkeys(layer.key for layer in layers):
        alike = [layer for layer in layers if layer.key == key]
        found = [layer for layer in free if layer.key == key]
        named = ", ".join(repr(next(iter(layer.tensors.values()))) for layer in alike[:SHOWN])
        wanted = " and ".join(f"{role} {shape}" for role, shape in alike[0].shapes.items())
        if not found and any(layer.shapes.keys() & {UNLIKE} for layer in free):
            raise ValueError(
                f"expected the model's names, got those of {framework} ({named}), and the model has a transposed "
                "convolution: whether its kernel is mirrored differs between frameworks, so that it is not brought over"
            )
        if len(found) != len(alike):
            raise ValueError(
                f"expected the model's names, got those of {framework} ({named}): as torch has them these are layers "
                f"with {wanted}, of which the model has {len(found)} and the file {len(alike)}"
            )
        if len({re.sub(r"_?\d+", "", layer.name) for layer in alike}) > 1:
            raise ValueError(
                f"expected the model's names, got those of {framework} ({named}), whose layers have one shape and no "
                "numbers in their names: nothing tells which is which"
            )
        for layer, own in zip(sorted(alike, key=_numbers), found, strict=True):
            if not layer.tensors.keys() <= own.tensors.keys():
                raise ValueError(f"expected the model's names, got {named}, which have more tensors than {own.name!r}")
            pairs.append((layer, own))
    return pairs


def _numbers(layer: _Layer) -> list[int]:
    """Return the numbers in a layer's name; `dense` comes before `dense_1`."""
    return [int(part) for part in re.findall(r"\d+", layer.name)]


# ---- tensors ---------------------------------------------------------------------------------------------------------
def _turned(kernel: Tensor, depthwise: bool) -> Tensor:
    """Return a kernel (height, width, in, out), or with fewer sides, as torch has it: (out, in, height, width)."""
    if depthwise and kernel.ndim > 2:  # (height, width, in, multiplier)
        return kernel.movedim((-2, -1), (0, 1)).flatten(0, 1).unsqueeze(1)
    return kernel.movedim((-1, -2), (0, 1)) if kernel.ndim > 1 else kernel


def _brought_over(
    captured: CapturedUpdate,
    own: Mapping[str, str],
    kernels: Collection[str],
    where: tuple[str, nn.Module, Sequence[int] | Inputs | None],
) -> CapturedUpdate:
    """Return the update under the model's names, with kernels turned.

    Args:
        captured: with the names of a file.
        own: the model's names by those.
        kernels: names in the file of what is turned.
        where: whose names they are, the model, and the shape of its inputs.

    Raises:
        ValueError: a matrix takes flattened channels, and nothing tells in which order.
    """
    framework, model, input_shape = where
    onnx = framework == "ONNX"
    turned = {n for n in kernels if not onnx or (ONNX.match(n) and "MatMul" in n)}
    channels = {} if onnx or not turned else flattened_channels(model, input_shape, [own[name] for name in turned])
    if unknown := sorted(name for name, shape in channels.items() if shape is None):
        raise ValueError(
            f"expected the model's names, got those of {framework}, where {unknown[0]!r} takes flattened channels: "
            f"{framework} flattens (height, width, channel) and torch (channel, height, width), and the model's "
            "forward shows no such step (for an input of the shape that was given); give the matrix as torch has it, "
            "kernel.reshape(H, W, C, out).permute(3, 2, 0, 1).reshape(out, -1), and all by the model's names"
        )

    def change(name: str, value: Tensor) -> Tensor:
        if name not in turned:
            return value
        shape = channels.get(own[name])
        if shape:  # rows from (height, width, channel) to (channel, height, width)
            value = value.reshape(*shape[1:], shape[0], -1).movedim(-2, 0).flatten(0, -2)
        return _turned(value, "depthwise" in name).contiguous()

    def all_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {own.get(name, name): change(name, value) for name, value in tensors.items()}

    said = _said(framework, own, turned, [name for name, shape in channels.items() if shape])
    if any("running" in name for name in own.values()):
        said += "; statistics of batch norm move by the model's own momentum and eps, which have to be the client's"
    parts: dict[str, Any] = {part: all_of(getattr(captured, part)) for part in ("update", "before", "rounding")}
    return replace(captured, **parts, notes=(*captured.notes, said))


def _said(framework: str, own: Mapping[str, str], turned: Collection[str], reordered: Sequence[str]) -> str:
    """Return what was done, in words."""
    pairs = [f"{name} is {mine}" for name, mine in own.items() if name != mine]
    places = all(name.isdigit() for name in own)
    said = (
        f"{len(own)} arrays without names: taken in {framework}'s order, whose shapes they have, as "
        f"{_listed(own.values())}"
        if places
        else f"names are those of {framework}: {_listed(pairs)}"
    )
    if turned:
        axes = "(in, out)" if framework == "ONNX" else "(in, out), or (height, width, in, out)"
        said += f"; {len(turned)} kernel(s) turned from {axes}, as {framework} has them, square ones as well"
    else:
        said += "; no kernel was turned, since their shapes are torch's"
    if reordered:
        said += f"; rows of {_listed(reordered)} put from (height, width, channel) into (channel, height, width)"
    return said


def _listed(words: Iterable[str]) -> str:
    all_words = list(words)
    more = len(all_words) - SHOWN
    return ", ".join(all_words[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _recipe(names: Sequence[str], known: Sequence[str], *, onnx: bool) -> str:
    """Say how to bring tensors over by hand."""
    weights = [name for name in known if name.endswith("weight")] or known
    kernels = [name for name in names if _parts(name)[-1] in {*MARKERS, "w"} or ONNX.match(name)] or names
    turn: Callable[[str], str] = lambda name: f"{weights[0]!r}: torch.as_tensor(update[{name!r}]).T"  # noqa: E731
    kept = "of Conv as they are" if onnx else "of convolutions .permute(3, 2, 0, 1)"
    return f"bring them over by hand: {{{turn(kernels[0])}, ...}} with matrices transposed, kernels {kept}"
