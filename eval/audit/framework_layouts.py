"""Brings tensors of Keras, Flax, Haiku and ONNX exports into the names and layouts of a torch model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
FLAX_WORDS = {
    **{"Linear": "Dense", "Conv": "Conv", "BatchNorm": "BatchNorm", "LayerNorm": "LayerNorm"},
    **{"GroupNorm": "GroupNorm", "Embedding": "Embed", "": "Other"},
}
"""What Flax calls layers of torch, whose types have these words in their names."""
SEPARABLE = (
    "a separable convolution is two of torch, depthwise_kernel.permute(2, 3, 0, 1).flatten(0, 1).unsqueeze(1) and "
    "pointwise_kernel.permute(3, 2, 0, 1)"
)
"""How to bring over what Keras has as one layer."""
TURNS = {3: "2, 1, 0", 4: "3, 2, 0, 1", 5: "4, 3, 0, 1, 2"}
"""In which order kernels of convolutions are turned, by how many sides they have."""
SHOWN = 3
"""How many tensors a note or a recipe names."""
_Order = list[tuple[str, str]]


@dataclass(frozen=True)
class _Layer:
    """A layer of the file or of the model.

    Attributes:
        name: of the layer.
        tensors: names of its tensors by what they are (`ROLES`).
        shapes: of these as torch has them, likewise.
        depthwise: whether its kernel lies as (height, width, in, multiplier).
    """

    name: str
    tensors: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    depthwise: bool = False

    def key(self, statistics: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return what a layer of the file and one of the model have in common, with or without statistics."""
        return tuple(sorted(one for one in self.shapes.items() if statistics or not one[0].startswith("running")))


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
    try:
        pairs, turned = _fitting_pairs(theirs, free, framework)
    except ValueError as error:
        raise ValueError(f"{error}; {_recipe(captured.update, list(known), onnx=onnx)}") from error
    own = mine | {layer.tensors[role]: found.tensors[role] for layer, found in pairs for role in layer.tensors}
    kernels = {layer.tensors["kernel"]: layer.depthwise for layer, _ in pairs if "kernel" in layer.tensors}
    return _brought_over(captured, own, kernels if turned else {}, (framework, model, input_shape))


def _fitting_pairs(
    tensors: Mapping[str, Tensor], free: Sequence[_Layer], framework: str
) -> tuple[list[tuple[_Layer, _Layer]], bool]:
    """Return each layer of a file with the model's, and whether kernels have to be turned for that.

    Raises:
        ValueError: layers fit neither way, or both ways and nothing tells which is right.
    """
    fits, problems = dict[bool, list[tuple[_Layer, _Layer]]](), list[ValueError]()
    for turned in (True, False):
        try:
            layers = _onnx_layers(tensors, turned) if framework == "ONNX" else _layers(tensors, turned, free)
            fits[turned] = _pairs(layers, free, framework)
        except ValueError as error:
            problems.append(error)
    if not fits:
        raise problems[0]
    if len(fits) == 2 and _follow_numbers(fits[False], free) and not _follow_numbers(fits[True], free):
        raise ValueError(
            f"expected the model's names, got those of {framework}: their kernels fit as they lie in the order of "
            "their numbers, and turned in another one, so that nothing tells how they lie"
        )
    turned = next(iter(fits))
    return fits[turned], turned


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
    if any(UNLIKE in layer.tensors for layer in layers):
        return captured
    shapes = {name: layer.shapes[role] for layer in layers for role, name in layer.tensors.items()}
    for framework, orders in _usual_orders(model, layers).items():
        fits = [order for order in orders if _fits(arrays, order, shapes)]
        if not fits or any(order != fits[0] for order in fits):
            continue
        own = dict(zip(captured.update, (name for _, name in fits[0]), strict=True))
        kernels = {place: False for place, (role, _) in zip(captured.update, fits[0], strict=True) if role == "kernel"}
        return _brought_over(replace(captured, nameless=False), own, kernels, (framework, model, input_shape))
    return captured


def _usual_orders(model: nn.Module, layers: Sequence[_Layer]) -> dict[str, list[_Order]]:
    """Return in which orders frameworks list the tensors of a model's layers, each with what it is and its name."""
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    counts: Counter[str] = Counter()
    by_name: dict[str, _Layer] = {}
    for layer in layers:
        kind = next(word for part, word in FLAX_WORDS.items() if part in type(model.get_submodule(layer.name)).__name__)
        by_name[f"{kind}_{counts[kind]}"] = layer
        counts[kind] += 1

    def order(some: Iterable[_Layer], *, bias_first: bool) -> _Order:
        each = (sorted(one.tensors.items(), key=lambda item: bias_first and item[0] != "bias") for one in some)
        return [item for layer in each for item in layer]

    whole = order(layers, bias_first=False)
    flax = order((by_name[name] for name in sorted(by_name)), bias_first=True), order(layers, bias_first=True)
    return {
        "Keras": [whole, [item for item in whole if item[1] in trained]],
        "Flax": [[item for item in one if item[1] in trained] for one in flax],
    }


def _fits(arrays: Sequence[Tensor], order: _Order, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether arrays, with kernels turned, have the shapes of an order's names."""
    if len(arrays) != len(order):
        return False
    pairs = zip(arrays, order, strict=True)
    theirs = [_turned(array, False) if role == "kernel" else array for array, (role, _) in pairs]
    return [tuple(one.shape) for one in theirs] == [shapes[name] for _, name in order]


# ---- layers ----------------------------------------------------------------------------------------------------------
def _layers(tensors: Mapping[str, Tensor], turned: bool, free: Sequence[_Layer]) -> list[_Layer]:
    """Return the layers of a file in the order of its names.

    Args:
        tensors: of the file.
        turned: whether its kernels lie as theirs, or as torch's already.
        free: layers of the model, whose shapes tell how a kernel lies that can lie in two ways.

    Raises:
        ValueError: a tensor is none of those that are known.
    """
    wanted = {layer.shapes["kernel"] for layer in free if "kernel" in layer.shapes}
    layers = []
    for layer_name, inside in _by_layer(tensors).items():
        roles = _roles(layer_name, inside, tensors)
        shapes = {role: tuple(tensors[name].shape) for role, name in roles.items()}
        depthwise = False
        if "kernel" in shapes and turned:
            kernel = tensors[roles["kernel"]]
            named = "depthwise" in layer_name.rpartition("/")[2] or "depthwise_kernel" in inside
            options = {way: tuple(_turned(kernel, way).shape) for way in (named, not named)}
            depthwise = next((way for way, shape in options.items() if shape in wanted), named)
            shapes["kernel"] = options[depthwise]
        layers.append(_Layer(layer_name, roles, shapes, depthwise))
    return layers


def _by_layer(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of a file by layer, and there by their last part.

    Raises:
        ValueError: a layer is recurrent.
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
    return grouped


def _roles(layer: str, inside: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of a layer's tensors by what they are.

    Raises:
        ValueError: one is none of those that are known.
    """
    numbered = _numbered(layer, {last: tensors[name] for last, name in inside.items()})
    roles: dict[str, str] = {}
    for last, name in inside.items():
        role = numbered.get(last, ROLES.get(last, ""))
        if not role or role in roles:
            why = f": {SEPARABLE}" if inside.keys() >= {"depthwise_kernel", "pointwise_kernel"} else ""
            raise ValueError(f"expected tensors of known layers, got {name!r}{why}")
        roles[role] = name
    return roles


def _numbered(layer: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what the tensors of a layer are that Keras's files number (`vars/0`); nothing where numbers don't tell.

    Batch normalization without scale or without offset has three of one shape.
    """
    if not all(re.fullmatch(r"vars/\d+", last) for last in tensors):
        return {}
    ordered = sorted(tensors, key=lambda last: int(last[5:]))
    roles: tuple[str, ...] = ("scale", "bias", "running_mean", "running_var")
    if tensors[ordered[0]].ndim > 1:
        roles = ("table",) if "embed" in layer else ("kernel", "bias")
    elif len(ordered) == 3:
        roles = ()
    elif len(ordered) == 2 and "batch" in layer:
        roles = roles[2:]
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
    pairs: list[tuple[_Layer, _Layer]] = []
    statistics = any(role.startswith("running") for layer in layers for role in layer.shapes)
    for key in dict.fromkeys(layer.key(statistics) for layer in layers):
        alike = [layer for layer in layers if layer.key(statistics) == key]
        found = [layer for layer in free if layer.key(statistics) == key]
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
        plain, numbers = set(map(_without_numbers, alike)), list(map(_numbers, alike))
        if len(plain) > 1 or any(numbers.count(one) > 1 for one in numbers):
            raise ValueError(
                f"expected the model's names, got those of {framework} ({named}), whose layers have one shape and "
                "names that are not told apart by numbers alone: nothing tells which is which"
            )
        pairs += zip(sorted(alike, key=_numbers), found, strict=True)
    return pairs


def _follow_numbers(pairs: Sequence[tuple[_Layer, _Layer]], free: Sequence[_Layer]) -> bool:
    """Return whether layers of one name, by their numbers, come in the order of the model's."""
    names = [own.name for own in free]
    places: dict[str, list[int]] = {}
    for layer, own in sorted(pairs, key=lambda pair: _numbers(pair[0])):
        places.setdefault(_without_numbers(layer), []).append(names.index(own.name))
    return all(found == sorted(found) for found in places.values())


def _without_numbers(layer: _Layer) -> str:
    return re.sub(r"_?\d+", "", layer.name)


def _numbers(layer: _Layer) -> list[list[int]]:
    """Return the numbers in the parts of a layer's name; `dense` comes before `dense_1`."""
    return [[int(number) for number in re.findall(r"\d+", part)] for part in layer.name.split("/")]


# ---- tensors ---------------------------------------------------------------------------------------------------------
def _turned(kernel: Tensor, depthwise: bool) -> Tensor:
    """Return a kernel (height, width, in, out), or with fewer sides, as torch has it: (out, in, height, width)."""
    if depthwise and kernel.ndim > 2:  # (height, width, in, multiplier)
        return kernel.movedim((-2, -1), (0, 1)).flatten(0, 1).unsqueeze(1)
    return kernel.movedim((-1, -2), (0, 1)) if kernel.ndim > 1 else kernel


def _brought_over(
    captured: CapturedUpdate,
    own: Mapping[str, str],
    kernels: Mapping[str, bool],
    where: tuple[str, nn.Module, Sequence[int] | Inputs | None],
) -> CapturedUpdate:
    """Return the update under the model's names, with kernels turned.

    Args:
        captured: with the names of a file.
        own: the model's names by those.
        kernels: names in the file of what is turned, and whether it is depthwise.
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
            f"{framework} flattens (height, width, channel) and torch (channel, height, width), and no forward pass "
            "on an input of a known shape tells how this model does; give the matrix as torch has it, of one map "
            "kernel.reshape(H, W, C, out).permute(3, 2, 0, 1).reshape(out, -1), and all by the model's names"
        )

    def change(name: str, value: Tensor) -> Tensor:
        if name not in turned:
            return value
        shape = channels.get(own[name])
        if shape:  # rows from (height, width, channel) to (channel, height, width)
            value = value.reshape(*shape[1:], shape[0], -1).movedim(-2, 0).flatten(0, -2)
        return _turned(value, kernels[name]).contiguous()

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


def _recipe(tensors: Mapping[str, Tensor], known: Sequence[str], *, onnx: bool) -> str:
    """Say how to bring tensors over by hand."""
    weights = [name for name in known if name.endswith("weight")] or known
    names = list(tensors)
    name = next((name for name in names if ONNX.match(name) or ROLES.get(_parts(name)[-1]) == "kernel"), names[0])
    sides = tensors[name].ndim
    turn = "" if sides < 2 or (onnx and sides > 2) else ".T" if sides == 2 else f".permute({TURNS.get(sides, '...')})"
    kept = "of Conv as they are" if onnx else f"of convolutions .permute({TURNS[4]})"
    return (
        f"bring them over by hand: {{{weights[0]!r}: torch.as_tensor(update[{name!r}]){turn}, ...}} with matrices "
        f"transposed, kernels {kept}"
    )
