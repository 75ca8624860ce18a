"""What an audit was asked for, in the words of the command line, and how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attacks
from attacks.base import Attack
from defenses import defenses
from eval import auditing, harness, plain, results, subjects, yamlfile
from eval.auditing import Audit
from eval.plan import Plan
from eval.rundir import RunDir
from eval.subjects import Subject
from eval.worlds import device_of
from fl.data import datasets
from fl.method import methods
from fl.types import Batch

OWN, METHODS = ("ig",), ("ig", "peel+ig")
"""Attacks tried by default: on a model of the user's, on a method of the registry."""
NETWORKS = {(1, 28, 28): "hyperfl-grey", (3, 32, 32): "hyperfl-colour"}
"""Networks taken for images of a shape where none is named."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """An audit as the command line asks for it; see `hyperleak audit --help`.

    Attributes:
        target: `module:function` that returns a model, or (model, images, labels).
        method: name or settings (in YAML).
        dataset: likewise.
        model: likewise, or `module:function`.
        update: file of a captured update.
        images: file or data set of the true images.
        attack: names or settings.
        defense: likewise.
        count: how many images.
        batch_size: images in one update.
        rounds: of training before.
        input_shape: `C,H,W`.
        mean: `a,b,c`.
        std: likewise.
        seed: of all randomness.
        device: `auto`, `cpu` or `cuda`.
    """

    target: str | None = None
    method: str | None = None
    dataset: str | None = None
    model: str | None = None
    update: Path | None = None
    images: str | None = None
    attack: tuple[str, ...] = ()
    defense: str = "none"
    count: int = 4
    batch_size: int = 1
    rounds: int = 0
    input_shape: str | None = None
    mean: str = ""
    std: str = ""
    seed: int = 0
    device: str = "auto"

    @property
    def name(self) -> str:
        """What is audited."""
        if self.update is not None:
            return f"{self.update.name} of {self.model or self.target}"
        method, size = dict_of(self.method or "fedavg").get("name"), f"{self.batch_size} image(s) per update"
        if self.target:
            return f"{self.target} under {method}, {size}"
        return f"{method} on {dict_of(self.dataset or '').get('name')}, {size}, after {self.rounds} round(s)"

    @property
    def attacks(self) -> list[Attack]:
        """The attacks to try."""
        own = self.target is not None or self.update is not None
        return [attacks.build(dict_of(text)) for text in self.attack or (OWN if own else METHODS)]

    def plan(self) -> Plan:
        """The run that audits a method of the registry.

        Raises:
            ValueError: settings that don't fit each other; says which.
            FileNotFoundError: the data set is not there; says how to get it.
        """
        if self.method is None or self.dataset is None:
            raise ValueError("expected MODULE:FUNCTION, --update with --model, or --method with --dataset")
        if own := [key for key in ("update", "images", "input_shape", "mean", "std") if getattr(self, key)]:
            option = own[0].replace("_", "-")
            raise ValueError(f"--{option} goes with your own model; a method takes its images from --dataset")
        given = dict_of(self.method)
        settings = methods.spec(methods.build(given))
        # one step on all images of an update, unless the method is given with a length of its own
        observed = {"steps": 1, "head_epochs": 0, "batch_size": None}
        observed = {} if {"steps", "epochs"} & set(given) else {k: v for k, v in observed.items() if k not in given}
        data: dict[str, Any] = {
            "title": f"Audit of {self.name}",
            "task": {"dataset": dict_of(self.dataset), "model": self._network()},
            "federation": {"partition": {"name": "iid", "clients": 4}, "rounds": self.rounds},
            "method": given,
            "defense": dict_of(self.defense),
            "attack": [plain.attack_spec(attack) for attack in self.attacks],
            "observe": {
                "images": self.count,
                "batch_size": self.batch_size,
                "method": {key: value for key, value in observed.items() if key in settings},
            },
            "seeds": [self.seed],
        }
        return harness.prepare(plain.build(data), device=self.device)

    def subjects(self) -> list[Subject]:
        """The updates of a model of the user's own.

        Raises:
            ValueError: no model, or model, images and update do not fit each other; says which.
            FileNotFoundError: a file is not there.
        """
        if self.dataset or self.rounds:
            raise ValueError(f"--{'dataset' if self.dataset else 'rounds'} goes with --method alone; give --images")
        if self.target and self.model:
            raise ValueError(f"expected one model, got {self.target} and --model {self.model}")
        if self.input_shape and self.update is None:
            raise ValueError("--input-shape goes with --update alone: a model's images have a shape")
        where = device_of(self.device)
        target = self.target or self.model
        if target is None:
            raise ValueError("expected --model MODULE:FUNCTION, the model that the update belongs to")
        built = subjects.call(target)
        model = built.model.to(where)
        data = built.data if self.images is None else self._images()
        rule: dict[str, Any] = {
            "method": methods.build(dict_of(self.method)) if self.method else None,
            "defense": defenses.build(dict_of(self.defense)),
            "mean": _numbers(self.mean, "mean"),
            "std": _numbers(self.std, "std"),
        }
        if data is not None:
            data = Batch(data.inputs.to(where), data.labels.to(where))
        if self.update is None:
            if data is None:
                raise ValueError(f"{target} returns a model alone: expected --images FILE.npz or a data set's name")
            return subjects.of_batches(model, data, self.batch_size, **rule, seed=self.seed)
        update = subjects.update_file(self.update)
        truth = None if data is None else Batch(data.inputs[: self.batch_size], data.labels[: self.batch_size])
        shape = _shape(self.input_shape, truth)
        rule |= {"input_shape": shape, "batch_size": self.batch_size, "truth": truth}
        return [subjects.of_update(model, update, **rule)]

    def _images(self) -> Batch:
        assert self.images is not None
        return subjects.images(self.images, self.count if self.update is None else self.batch_size)

    def _network(self) -> dict[str, Any]:
        assert self.dataset is not None
        shape = datasets.build(dict_of(self.dataset)).load().input_shape
        if self.model is None and shape not in NETWORKS:
            sizes = "x".join(map(str, shape))
            raise ValueError(
                f"expected --model for images of {sizes}: '{{name: lenet-zhu, input_shape: {list(shape)}}}'"
            )
        return dict_of(self.model or NETWORKS[shape])


def dict_of(text: str) -> dict[str, Any]:
    """Settings given by name or as YAML: `ig`, `{name: ig, tv: 1e-2}`."""
    value = yamlfile.parse(text)
    return value if isinstance(value, dict) else {"name": text}


def carry_out(plan: Plan, folder: RunDir, name: str, told: harness.Progress) -> Audit:
    """The audit of a method: run its plan and read what came out.

    Raises:
        ValueError: a part of it failed; says which and why.
    """
    with folder.locked(), folder.logged():
        failures = harness.run(plan, folder, harness.Options(name=name), told)
        if failures:
            raise ValueError("; ".join(f"{failure.name}: {failure.reason}" for failure in failures))
        return auditing.of_rows(name, results.assemble(plan, folder))


def _numbers(text: str, what: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"expected --{what} as numbers such as 0.5,0.5,0.5, got {text!r}") from error


def _shape(text: str | None, truth: Batch | None) -> tuple[int, int, int]:
    if text is None:
        if truth is None:
            raise ValueError("expected --input-shape C,H,W of the images behind the update, or the images themselves")
        channels, height, width = truth.inputs.shape[1:]
        return channels, height, width
    try:
        channels, height, width = (int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"expected --input-shape as C,H,W such as 3,32,32, got {text!r}") from error
    return channels, height, width
