"""Pre-trained weights: read strictly, from torchvision, timm or a file of plain tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fl.data.sources.npz_files import DATA_VARIABLE, data_folder
from fl.runtime import tensor_archives
from fl.runtime.safe_paths import is_accessible_file

RANDOM, IMAGENET = "random", "imagenet"
EPS = 1e-5
"""The epsilon of torchvision's batch norm."""


def read_weights(name: str) -> dict[str, Tensor]:
    """Return the tensors in the file `name`, as given or in the data folder, floating-point ones as float32.

    `.npz` files hold plain arrays by parameter name, `.safetensors` files and `.pth` files a state dict; nothing in
    them is executed. Damage is found by the archives' checksums; a `.safetensors` file has none, see
    `fl.runtime.tensor_archives`.

    Raises:
        FileNotFoundError: it is in neither place.
        ValueError: not such a file.
    """
    path = _find_file(name)
    if path.suffix == ".npz":
        found = {key: torch.from_numpy(value) for key, value in tensor_archives.read_arrays(path).items()}
    elif path.suffix == ".safetensors":
        found = tensor_archives.read_tensors(path)
    elif path.suffix in {".pth", ".pt"}:
        try:
            found = tensor_archives.read_state(path)
        except tensor_archives.ObjectsError as error:
            raise ValueError(f"expected tensors by parameter name in {path}, got other objects") from error
    else:
        raise ValueError(f"expected weights in a file .npz, .safetensors or .pth, got {path.name}")
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"expected tensors by parameter name in {path}")
    return {key: value.float() if value.is_floating_point() else value for key, value in found.items()}


def _find_file(name: str) -> Path:
    given = Path(os.path.expanduser(name))
    places = [given] if given.is_absolute() else [given, data_folder() / given]
    for path in places:
        if is_accessible_file(path):
            return path
    raise FileNotFoundError(
        f"no weights {name}: looked for {' and '.join(map(str, places))}; set {DATA_VARIABLE} to the folder that has "
        f"them, or weights to {IMAGENET!r} (a download) or {RANDOM!r}"
    )


def fold_batch_norm(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a torchvision ResNet's weights with batch norm as `Affine`: weight and bias of fixed statistics.

    Two forms are known: a state dict as torchvision has it, and one whose convolutions have a bias each because batch
    norm was folded into them; in the latter `Affine` adds that bias.
    """
    result: dict[str, Tensor] = {}
    for key, value in found.items():
        layer, _, kind = key.rpartition(".")
        if f"{layer}.running_var" in found:
            if kind == "weight":
                scale = value / (found[f"{layer}.running_var"] + EPS).sqrt()
                result[key] = scale
                result[f"{layer}.bias"] = found[f"{layer}.bias"] - found[f"{layer}.running_mean"] * scale
        elif kind == "bias" and value.ndim == 1 and found[f"{layer}.weight"].ndim == 4:
            norm = _norm_after(layer)
            result[f"{norm}.weight"], result[f"{norm}.bias"] = torch.ones_like(value), value
        else:
            result[key] = value
    return result


def _norm_after(convolution: str) -> str:
    """Return the batch norm that follows a convolution in torchvision's ResNets."""
    parent, _, own = convolution.rpartition(".")
    name = "1" if own == "0" else own.replace("conv", "bn")  # downsample.0 and downsample.1, or conv1 and bn1
    return f"{parent}.{name}" if parent else name


def fill_parameters(parameters: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    """Copy `found` into `parameters`, which must have the same names and shapes.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; says which.
    """
    missing, extra = [n for n in parameters if n not in found], [n for n in found if n not in parameters]
    if missing or extra:
        listed = [f"no {n!r}" for n in missing[:1]] + [f"{n!r}, which the network has not" for n in extra[:1]]
        raise ValueError(f"expected the network's own tensors in {what}, got {' and '.join(listed)}")
    for name, parameter in parameters.items():
        if parameter.shape != found[name].shape:
            got = tuple(found[name].shape)
            raise ValueError(f"expected {name!r} of shape {tuple(parameter.shape)} in {what}, got {got}")
        with torch.no_grad():
            parameter.copy_(found[name])
