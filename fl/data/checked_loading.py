"""Data sets as they are loaded: what a source of one's own returns is checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.data import Dataset, Source, datasets
from fl.runtime.user_code import place_errors
from fl.types import Batch


def load_checked(source: Source) -> Dataset:
    """Return the data set of a source.

    Raises:
        ValueError: what it holds is no data set, or `load` raised something; says what and in which line.
        FileNotFoundError: a file is not there.
    """
    name = str(datasets.spec(source).get("name", type(source).__name__))
    with place_errors(f"data set {name!r}: load()"):
        dataset = source.load()
    if not isinstance(dataset, Dataset):
        raise ValueError(f"data set {name!r}: expected load() to return a Dataset, got {type(dataset).__name__}")
    names = dataset.class_names
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ValueError(f"data set {name!r}: expected class_names as a tuple of words, got {type(names).__name__}")
    for part, batch in (("train", dataset.train), ("test", dataset.test)):
        if problem := _find_problem(batch, dataset.num_classes):
            raise ValueError(f"data set {name!r}: {part}: {problem}")
    train, test = (tuple(batch.inputs.shape[1:]) for batch in (dataset.train, dataset.test))
    if train != test:
        raise ValueError(f"data set {name!r}: expected test images of shape {train} as in training, got {test}")
    groups = dataset.groups
    if groups is not None:
        for part, of, batch in (("train", groups.train, dataset.train), ("test", groups.test, dataset.test)):
            if not isinstance(of, Tensor) or of.shape != batch.labels.shape:
                found = tuple(of.shape) if isinstance(of, Tensor) else type(of).__name__
                raise ValueError(
                    f"data set {name!r}: {part}: expected groups int64 ({len(batch)},), one for each image, got {found}"
                )
            if not (int(of.min()) >= 0 and int(of.max()) < len(groups.names)):
                raise ValueError(
                    f"data set {name!r}: {part}: expected groups in [0, {len(groups.names)}), one for each of their "
                    f"names, got {int(of.min())} to {int(of.max())}"
                )
    return dataset


def _find_problem(batch: Batch, classes: int) -> str:
    """Return what is wrong with images and labels; empty where nothing is."""
    if not isinstance(batch, Batch):
        return f"expected a Batch(inputs, labels), got {type(batch).__name__}"
    inputs, labels = batch.inputs, batch.labels
    for value in (inputs, labels):
        if not isinstance(value, Tensor):
            return f"expected tensors, got {type(value).__name__}; torch.as_tensor(...) makes one"
    if inputs.ndim != 4 or not inputs.is_floating_point():
        return (
            f"expected inputs (N, C, H, W) of floating-point pixels in [0, 1], got {inputs.dtype} {tuple(inputs.shape)}"
        )
    if inputs.dtype != torch.float32:
        return f"expected pixels in torch.float32, got {inputs.dtype}; give inputs.float()"
    if inputs.requires_grad:
        return "expected images without a gradient; give inputs.detach()"
    if labels.dtype != torch.int64 or labels.shape != inputs.shape[:1]:
        return f"expected labels int64 ({len(inputs)},), got {labels.dtype} {tuple(labels.shape)}"
    if not len(inputs):
        return "expected images, got none"
    least, most = (float(value) for value in inputs.aminmax())
    if not (least >= 0 and most <= 1):
        return f"expected pixels in [0, 1], got {least:.4g} to {most:.4g}"
    first, last = int(labels.min()), int(labels.max())
    if first < 0 or last >= classes:
        return f"expected labels in [0, {classes}), one for each of class_names, got {first} to {last}"
    return ""
