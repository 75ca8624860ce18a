"""An update recorded where it was made: the weights before and after, and what is known of the training between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl.methods.fedavg import FedAvg
from fl.ranges import Count, PositiveStep, ShareBelow1, Weight
from fl.runtime import tensor_archives
from fl.runtime.atomic_files import atomic_write
from fl.runtime.native_arrays import to_tensor
from fl.settings import SettingError, fit_value
from fl.types import Optimizer

FACTS = "hyperleak.json"
"""The member of a recorded file that holds what is known beside the weights, as JSON in bytes."""
COUNTS = ("steps", "epochs", "batch_size", "examples")
"""Facts of training that are whole numbers."""
VERSION = 1
"""Version of that member's form."""


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What is known of a client's local training; None is not known.

    Attributes:
        optimizer: by its name in `fl.types.OPTIMIZERS`.
        lr: step size, above 0: a step of size 0 changes nothing.
        momentum: of SGD.
        weight_decay: L2 coefficient.
        steps: optimizer steps that were taken.
        epochs: passes over the client's data, where the steps are not known.
        batch_size: examples in a step.
        examples: that the client holds.
        train_mode: whether the model was in training mode; where it is not known, the model says so itself.

    Raises:
        ValueError: what no client can have, such as a step size that is no finite number; says which.
    """

    optimizer: Optimizer | None = None
    lr: PositiveStep | None = None
    momentum: ShareBelow1 = 0.0
    weight_decay: Weight = 0.0
    steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    examples: Count | None = None
    train_mode: bool | None = None

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            object.__setattr__(self, name, fit_fact(name, getattr(self, name)))

    def method(self, model: nn.Module) -> FedAvg | None:
        """Return the method that trains a model so; None where too little is known.

        The step size of a single step of SGD need not be known: where it is not, the update is known up to a factor
        (`scale_unknown`).

        Raises:
            ValueError: facts that no optimizer can have; says which.
        """
        length: dict[str, Any] = {"steps": self.steps} if self.steps is not None else {"epochs": self.epochs}
        if self.optimizer is None or (self.steps is None and self.epochs is None):
            return None
        if self.lr is None and not self.is_plain_step:
            return None
        return FedAvg(
            lr=1.0 if self.lr is None else self.lr,
            optimizer=self.optimizer,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            train_mode=model.training if self.train_mode is None else self.train_mode,
            **length,
        )

    @property
    def is_plain_step(self) -> bool:
        """Whether it was one step of plain SGD, whose update is the gradient up to a factor."""
        return self.optimizer == "sgd" and self.steps == 1 and not self.weight_decay

    @property
    def scale_unknown(self) -> bool:
        """Whether the update of one plain step is known up to a factor, since its step size is not known."""
        return self.is_plain_step and self.lr is None

    def in_words(self) -> str:
        """Return what is known as a list of settings, in the order of the attributes."""
        known = {
            name: value for name, value in asdict(self).items() if value is not None and (value != 0 or value is False)
        }
        return ", ".join(f"{name} {value}" for name, value in known.items()) or "nothing is known"


def fit_fact(name: str, value: Any) -> Any:
    """Return a fact of training in its form: a Python number for one of NumPy or PyTorch, a whole one for 32.0.

    Args:
        name: of an attribute of `TrainingFacts`.
        value: as somebody states it.

    Raises:
        ValueError: no client can have it.
    """
    plain = _as_plain(name, value)
    if isinstance(plain, float) and plain.is_integer() and name in COUNTS:
        plain = int(plain)
    try:
        return fit_value(TrainingFacts, name, plain)
    except SettingError as error:
        hint = "" if "leave" in error.reason else "; leave it out where it is not known"
        raise SettingError(error.path, f"{error.reason}{hint}") from error


def _as_plain(name: str, value: Any) -> Any:
    """Return the one number that a tensor or an array holds; anything else as it is.

    Raises:
        SettingError: a tensor of one number that holds none, such as one on the device "meta".
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.item() if value.size == 1 else value
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    try:
        return value.detach().item()
    except (RuntimeError, TypeError) as error:  # of "meta", or of a form that has no numbers of its own
        kind = f"one of {value.dtype} on {value.device}"
        reason = f"expected a number, got a tensor that holds none that can be read, {kind}; give a number of Python"
        raise SettingError((name,), reason) from error


def usable_facts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return those facts of training that a client can have, in their form, of what somebody who may err states."""
    found: dict[str, Any] = {}
    for name, value in said.items():
        with suppress(ValueError, TypeError):
            found[name] = fit_fact(name, value)
    return found


@dataclass(frozen=True, kw_only=True)
class RecordedUpdate:
    """An update with all that matters for an audit.

    Attributes:
        before: weights and buffers as the server sent them, by name in the model's `state_dict()`: tensors, or arrays
            of NumPy, which become tensors.
        after: the same as they came back; parts of them where a client sends no more.
        training: what is known of the training between.
        origin: where it was made: the framework, its version, the round, the client, as far as known.

    Raises:
        ValueError: what stands under a name is neither a tensor nor an array of numbers; says which.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    training: TrainingFacts = field(default_factory=TrainingFacts)
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for half in ("before", "after"):
            given = getattr(self, half)
            if not isinstance(given, Mapping):
                raise ValueError(f"expected {half} as tensors by their names, got {type(given).__name__}")
            object.__setattr__(self, half, {name: _as_tensor(value, half, name) for name, value in given.items()})

    def difference(self) -> dict[str, Tensor]:
        """Return weights before - after of all that came back; of numbers of two bytes in four.

        Raises:
            ValueError: something came back that was not there before.
        """
        return {name: subtract(value, self.after[name]) for name, value in self.known_before().items()}

    def known_before(self) -> dict[str, Tensor]:
        """Return the weights before of all that came back.

        Raises:
            ValueError: something came back that was not there before.
        """
        if odd := next((name for name in self.after if name not in self.before), None):
            raise ValueError(
                f"expected the same names before and after training, got {odd!r} after it alone: give both by the "
                "names of model.state_dict()"
            )
        return {name: value for name, value in self.before.items() if name in self.after}

    def save(self, path: Path) -> None:
        """Write it to an `.npz` file, which `hyperleak audit update` reads, facts included.

        Of the weights before it has those alone that came back.

        Raises:
            ValueError: another ending, or a tensor of a type that NumPy has not.
        """
        if path.suffix != ".npz":
            raise ValueError(f"expected a file that ends in .npz, got {path.name}")
        facts = {"version": VERSION, "training": asdict(self.training), "origin": dict(self.origin)}
        arrays = {FACTS: np.frombuffer(json.dumps(facts, sort_keys=True).encode(), dtype=np.uint8)}
        for half, tensors in (("before", self.known_before()), ("after", self.after)):
            for name, value in tensors.items():
                plain = value.detach().cpu()
                arrays[f"{half}/{name}"] = (plain if _has_numpy(plain) else plain.float()).numpy()
        with atomic_write(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> RecordedUpdate:
        """Read what `save` has written; nothing in it is executed.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, of a later version, or no recorded update.
        """
        found = tensor_archives.read_arrays(path)
        if FACTS not in found:
            raise ValueError(f"expected a recorded update in {path}, got a file without {FACTS}")
        halves: dict[str, dict[str, Tensor]] = {"before": {}, "after": {}}
        for name, value in found.items():
            half, _, rest = name.partition("/")
            if half in halves and rest:
                try:
                    halves[half][rest] = to_tensor(value)
                except ValueError as error:  # text, dates and the like
                    raise ValueError(f"{path}, under {name!r}: {error}") from error
        training, origin = read_facts(found[FACTS].tobytes(), path)
        return cls(**halves, training=training, origin=origin)


def _as_tensor(value: object, half: str, name: str) -> Tensor:
    """Return a tensor as it is, and an array of numbers as a tensor of its own."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray | np.generic):
        raise ValueError(f"expected {half} of {name!r} as a tensor or an array of NumPy, got {type(value).__name__}")
    try:
        return to_tensor(np.array(value))
    except ValueError as error:  # text, dates, types of other packages
        raise ValueError(f"{half} of {name!r}: {error}") from error


def _has_numpy(value: Tensor) -> bool:
    """Return whether NumPy has numbers of a tensor's type."""
    return not value.is_floating_point() or value.dtype.itemsize > 2 or value.dtype is torch.float16


def read_facts(content: bytes, path: Path) -> tuple[TrainingFacts, dict[str, str]]:
    """Return what the member `FACTS` of a recorded file says.

    Args:
        content: the member's bytes.
        path: of the file, for errors.

    Raises:
        ValueError: it is no such member, or one of a later version.
    """
    try:
        said = json.loads(content)
        version, training, origin = said["version"], dict(said["training"]), dict(said["origin"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"expected the facts of a recorded update under {FACTS} in {path}, got other bytes") from error
    if version != VERSION:
        raise ValueError(f"expected a recorded update of version {VERSION} in {path}, got {version}: update hyperleak")
    known = {one.name for one in fields(TrainingFacts)}
    if odd := sorted(training.keys() - known):
        raise ValueError(f"expected training facts {', '.join(sorted(known))} in {path}, got {odd[0]!r}")
    try:
        facts = TrainingFacts(**training)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return facts, {str(name): str(value) for name, value in origin.items()}


def subtract(before: Tensor, after: Tensor) -> Tensor:
    """Return before - after in the longer type of the two, and in no shorter one than holds it.

    Of floating-point numbers of two bytes or one that is float32, so that the difference is not rounded once more.
    """
    first, last = _wide(before), _wide(after)
    kind = torch.promote_types(first.dtype, last.dtype)
    return first.to(kind) - last.to(kind)


def _wide(value: Tensor) -> Tensor:
    if value.is_floating_point() and value.dtype.itemsize < 4:
        return value.float()
    return value.to(torch.int16) if value.dtype in {torch.bool, torch.uint8, torch.int8} else value
