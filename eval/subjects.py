"""What is audited when it is not one of our own methods: a user's model with a batch, or an update they captured."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from defenses import Defense
from fl.capture import from_batch, from_update
from fl.data import datasets
from fl.data.stored import read
from fl.method import Method
from fl.registry import close
from fl.simulate import Truth
from fl.types import Batch, ServerView, Trace


@dataclass(frozen=True)
class Built:
    """What a user's function returned.

    Attributes:
        model: theirs.
        data: images and labels, if it gave any.
    """

    model: nn.Module
    data: Batch | None


@dataclass(frozen=True)
class Subject:
    """One update under attack.

    Attributes:
        view: what the server has.
        truth: what the client fed, if known.
    """

    view: ServerView
    truth: Truth | None


def call(target: str) -> Built:
    """The result of a user's function `module:function`, looked for in the current folder first.

    Raises:
        ValueError: no such module or function (says what is close), or it returns something else than a model or
            (model, images, labels).
    """
    name, colon, function = target.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"expected module:function such as my_model:build, got {target!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise ValueError(f"{name} needs {error.name}, which is not installed") from error
        raise ValueError(f"no module {name!r} in {Path.cwd()} or among those installed") from error
    found = getattr(module, function, None)
    if not callable(found):
        likely = close(function, [word for word in vars(module) if callable(getattr(module, word))])
        hint = f"; did you mean {likely!r}?" if likely else ""
        raise ValueError(f"expected a function {function!r} in {name}, found none{hint}")
    made = found()
    if isinstance(made, nn.Module):
        return Built(made, None)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        model, inputs, labels = made
        if isinstance(inputs, Tensor) and isinstance(labels, Tensor):
            return Built(model, Batch(inputs, labels))
    raise ValueError(f"expected {target} to return a model or (model, images, labels), got {type(made).__name__}")


def images(source: str, count: int) -> Batch:
    """The first images of a data set by its name, or of an `.npz` file.

    Raises:
        UnknownNameError: there is no such data set.
        FileNotFoundError: there is no such file.
        ValueError: a damaged file, or fewer images than asked for.
    """
    if source.endswith(".npz"):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}; expected images, labels and class_names in it (fl.data.stored)")
        found, _ = read(path)
    else:
        found = datasets.build(source).load().train
    if len(found) < count:
        raise ValueError(f"expected at least {count} images in {source}, got {len(found)}; give a smaller --count")
    return Batch(found.inputs[:count], found.labels[:count])


def update_file(path: Path) -> dict[str, Tensor]:
    """A captured update: tensors by parameter name, from an `.npz` or a `.pt` file; nothing in it is executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected the update as .npz or .pt, tensors by parameter name")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: torch.from_numpy(file[name]) for name in file.files}
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (ValueError, TypeError, EOFError, RuntimeError, KeyError, zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"expected tensors by parameter name in {path}: {error}") from error
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":  # torch's word for objects that loading could run
            raise ValueError(f"expected tensors by parameter name in {path}, got other objects") from error
        raise
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"expected a dictionary of tensors in {path}, got {type(found).__name__}")
    return {str(name): value for name, value in found.items()}


def of_batches(
    model: nn.Module,
    data: Batch,
    batch_size: int,
    *,
    method: Method | None,
    defense: Defense,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    seed: int = 0,
) -> list[Subject]:
    """One update for every batch of `data`.

    Raises:
        ValueError: model and images do not fit each other, or the last batch would be smaller.
    """
    if len(data) % batch_size:
        raise ValueError(f"expected a number of images that {batch_size} (--batch-size) divides, got {len(data)}")
    found = []
    for number, start in enumerate(range(0, len(data), batch_size)):
        part = slice(start, start + batch_size)
        own: dict[str, Any] = {"method": method, "defense": defense, "mean": mean, "std": std, "seed": seed + number}
        found.append(Subject(*from_batch(model, data.inputs[part], data.labels[part], **own)))
    return found


def of_update(
    model: nn.Module,
    update: dict[str, Tensor],
    *,
    input_shape: tuple[int, int, int],
    batch_size: int,
    truth: Batch | None,
    method: Method | None,
    defense: Defense,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Subject:
    """The one captured update, with the images it was made of if they are known.

    Raises:
        ValueError: model, update and images do not fit each other; says which tensor.
    """
    view = from_update(
        model,
        update,
        input_shape=input_shape,
        num_classes=_classes(model, input_shape),
        method=method,
        defense=defense,
        batch_size=batch_size,
        mean=mean,
        std=std,
    )
    if truth is None:
        return Subject(view, None)
    trace = Trace(indices=torch.arange(batch_size), inputs=truth.inputs, labels=truth.labels, order=(), draws=())
    return Subject(view, Truth(trace=trace, private={}))


def _classes(model: nn.Module, input_shape: tuple[int, int, int]) -> int:
    like = next(iter(model.parameters()))
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model.eval()(torch.full((1, *input_shape), 0.5).to(like))
    except RuntimeError as error:
        raise ValueError(f"expected --input-shape of images that fit the model, got {input_shape}: {error}") from error
    finally:
        model.train(training)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ValueError("expected a model that returns logits (B, K)")
    return int(logits.shape[1])
