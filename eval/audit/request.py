"""What an audit was asked for, in the words of the command line, and how it is carried out."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

import attacks
from attacks.base import Attack
from defenses import defenses
from eval.audit import attack_selection, captured_files, captured_update
from eval.audit import user_model as subjects
from eval.audit.capture_plan import CaptureRequest, plan_updates
from eval.audit.examples import Examples
from eval.audit.image_sources import build_dataset, is_settings, load_images
from eval.audit.source_place import SourcePlace, place_of, place_of_target
from eval.audit.stated_training import with_open_step_size
from eval.audit.tensor_names import with_model_names
from eval.audit.user_model import Subject
from eval.experiment import serialization
from eval.experiment.spec import ScoreSpec
from eval.io import yaml12
from eval.run import runner
from eval.run.federation_data import resolve_device
from eval.run.plan import Plan
from fl.capture import CapturedUpdateSettings, ClientSettings
from fl.inputs.form import Inputs
from fl.losses.function import TargetKind
from fl.method import methods
from fl.privacy.private_method import PrivateMethod
from fl.settings import SettingError, fit_value
from fl.view import ThreatModel

NO_SUBJECT = "expected MODULE:FUNCTION, --update with --model, or --method with --dataset"
"""Why nothing can be audited."""
DEFAULT_COUNT = 4
"""Images taken of a data set or a file where no number is given, or as many of these as batches divide."""
UNCHECKED_NOTE = (
    "not checked whether the update belongs to these images: it holds noise, or private tensors are behind it"
)
OPTIONS = {
    ("observe", "images"): "--count",
    ("observe", "batch_size"): "--batch-size",
    ("federation", "rounds"): "--rounds",
    ("task", "dataset"): "--dataset",
    ("task", "model"): "--model",
    ("method",): "--method",
    ("defense",): "--defense",
    ("attack",): "--attack",
    ("threat",): "--threat",
    ("seeds", "0"): "--seed",
}
"""The options of the command that stand for settings of the config which an audit of a method runs."""
_METHODS = "goes with --method alone; give --images"
_MODELS = "goes with your own model; a method takes its images from --dataset"
_OWN = "goes with your own model; a method of ours classifies images"
_UPDATES = "goes with a captured update alone"
IDLE_OPTIONS: dict[str, dict[str, str]] = {
    "method": dict.fromkeys(("update", "images", "input_shape", "mean", "std"), _MODELS)
    | dict.fromkeys(("loss", "targets", "output", "head", "input_range", "categories"), _OWN)
    | dict.fromkeys(("kind", "clients", "labels"), _UPDATES),
    "model": {
        **dict.fromkeys(("dataset", "rounds"), _METHODS),
        **dict.fromkeys(("kind", "clients", "labels"), _UPDATES),
        "input_shape": "goes with --update alone: a model's images have a shape",
    },
    "update": {
        **dict.fromkeys(("dataset", "rounds"), _METHODS),
        "count": "does not go with --update: it is made of --batch-size images",
    },
}
"""Options that do nothing, and why, by what is audited: a method, a model of the user's own, or a captured update."""
ONE_UPDATE_HINT = "does nothing for one update, which one process attacks; leave it out"
"""Why several processes are refused then."""
DEFAULT_NETWORKS = {(1, 28, 28): "hyperfl-grey", (3, 32, 32): "hyperfl-colour"}
"""Networks taken for images of a shape where none is named."""


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """An audit as the command line asks for it; see `hyperleak audit --help`.

    Attributes:
        target: `module:function` that returns a model, or (model, images, labels).
        method: name or settings (in YAML).
        dataset: likewise.
        model: likewise, or `module:function`.
        update: file of a captured update.
        before: file of the weights that the server sent, beside `after`; None takes the model's own.
        after: file of the weights that came back, in place of `update`.
        kind: "gradient" where the file holds that and no difference of weights; empty is "update".
        clients: how many clients the update is the mean of, each of `batch_size` images; None is one.
        images: file or data set of the true images.
        labels: `a,b`, which the attacker knows, of a captured update without its images.
        attack: names or settings; none tries `eval.audit.attack_selection.default_attacks`, each where it can still add
            something.
        defense: likewise; a list is a chain of them.
        count: how many images; None takes `DEFAULT_COUNT`, or as many as there are, or all that the function gives.
        batch_size: images in one update.
        rounds: of training before.
        input_shape: `C,H,W`.
        mean: `a,b,c`.
        std: likewise.
        loss: name or settings, or `module:function`; empty is cross entropy.
        targets: what the unknown targets of a loss function of the user's own are; empty finds out.
        threat: settings (in YAML) of what the attacker knows beside the update; empty is the threat model as it comes.
        output: which part of the model's output it is taken of; None takes the only tensor, or `logits`.
        head: prefix of the names of the classifier's parameters; None takes the last linear layer.
        input_range: `low,high` of inputs that are not in [0, 1].
        categories: `a:b,c:d`, the columns of one-hot categories in a table.
        seed: of all randomness.
        device: `auto`, `cpu` or `cuda`.
        imports: modules that register what is named here.
        download: whether weights of LPIPS may be fetched where none are at hand.
    """

    target: str | None = None
    method: str | None = None
    dataset: str | None = None
    model: str | None = None
    update: Path | None = None
    before: Path | None = None
    after: Path | None = None
    kind: str = ""
    clients: int | None = None
    images: str | None = None
    labels: str = ""
    attack: tuple[str, ...] = ()
    defense: str = "none"
    count: int | None = None
    batch_size: int = 1
    rounds: int = 0
    input_shape: str | None = None
    mean: str = ""
    std: str = ""
    loss: str = ""
    targets: str = ""
    threat: str = ""
    output: str | None = None
    head: str | None = None
    input_range: str = ""
    categories: str = ""
    seed: int = 0
    device: str = "auto"
    imports: tuple[str, ...] = ()
    download: bool = False

    @property
    def name(self) -> str:
        """What is audited."""
        if self.source == "update":
            return f"{self._files} of {self.model or self.target}"
        method = yaml12.parse_settings(self.method or "fedavg").get("name")
        images = _count(self.batch_size, "image")
        size = f"{images} per update"
        if (clients := defenses.build(_defense(self.defense)).group_size) > 1:
            size = f"{images} per client, mean over groups of {clients}"
        if self.target:
            return f"{self.target} under {method}, {size}"
        dataset = yaml12.parse_settings(self.dataset or "").get("name")
        return f"{method} on {dataset}, {size}, after {_count(self.rounds, 'round')}"

    @property
    def _files(self) -> str:
        """The names of a captured update's files."""
        return " - ".join(path.name for path in (self.update, self.before, self.after) if path)

    @property
    def attacks(self) -> dict[str, Attack]:
        """The attacks to try, by label: the name, with a number where one comes again."""
        method = methods.build(yaml12.parse_settings(self.method or "fedavg"))
        found: dict[str, Attack] = {}
        size = self.batch_size * (self.clients or 1)
        for text in self.attack or attack_selection.default_attacks(method, size):
            attack = attacks.build(yaml12.parse_settings(text))
            name = label = attacks.label(attack)
            number = 1
            while label in found:
                number += 1
                label = f"{name}-{number}"
            found[label] = attack
        return found

    @property
    def source(self) -> str:
        """Whether a method, a model of the user's own or a captured update is audited."""
        if self.update is not None or self.before is not None or self.after is not None:
            return "update"
        return "model" if self.target is not None else "method"

    def place(self) -> SourcePlace:
        """Return where the code of the model, or of the method, stands; after `plan`, which imports it."""
        target = self.target or (self.model if self.source == "update" else None)
        if target is not None:
            return place_of_target(target)
        kind = type(methods.build(yaml12.parse_settings(self.method or "")))
        return place_of(kind, kind.__module__, kind.__qualname__)

    def plan(self) -> Plan:
        """Return the plan of the audit, whatever it is of.

        Raises:
            ValueError: settings that don't fit each other; says which.
            FileNotFoundError: a data set or a file is not there; says how to get it.
        """
        self._check_readable()
        return self._method_plan() if self.source == "method" else self._capture_plan()

    def _check_readable(self) -> None:
        """Check that what options give as settings is YAML.

        Raises:
            ValueError: it is not; says which option's.
        """
        given = [("--method", self.method), ("--defense", self.defense), *(("--attack", each) for each in self.attack)]
        if self.source == "method":
            given += [("--dataset", self.dataset), ("--model", self.model)]
        given += [("--images", self.images)] if is_settings(self.images or "") else []
        given += [("--threat", self.threat)]
        given += [("--loss", self.loss)] if self.loss.startswith("{") else []
        for option, text in given:
            try:
                yaml12.parse(text or "")
            except ValueError as error:
                raise ValueError(f"{option}: {error}") from error

    def check_plan(self, plan: Plan, *, limited: bool, workers: int) -> None:
        """Check that what is asked of the plan can be had.

        Args:
            plan: of this audit.
            limited: whether there are limits, which take true images.
            workers: processes that were asked for.

        Raises:
            ValueError: it can't.
        """
        updates = [update for capture in plan.captures for update in capture.observation.updates]
        if limited and any(update.truth is None for update in updates):
            raise ValueError("expected the true images (--images) beside a limit: nothing can be scored without them")
        if len(updates) == 1 and workers > 1:
            raise ValueError(f"--workers {workers} {ONE_UPDATE_HINT}")

    def _capture_plan(self) -> Plan:
        """Return the attacks on updates of a model of the user's own."""
        updates, notes = self.subjects()
        tried = replace(self, batch_size=updates[0].view.batch_size or self.batch_size).attacks
        if not self.attack and updates[0].view.task.inputs.has_ids:
            tried = {name: attacks.build(name) for name in attack_selection.ATTACKS_ON_IDS}
        source = {
            "model": self.target or self.model or "",
            "images": _shareable_source(self.images) if self.images else "",
        }
        if self.source == "update":
            source["update"] = self._files
        elif not self.images:
            source["images"] = source["model"]
        request = CaptureRequest(
            name=self.name,
            source={key: value for key, value in source.items() if value},
            seed=self.seed,
            device=self.device,
            score=ScoreSpec(download=self.download),
            imports=self.imports,
            notes=notes,
        )
        return plan_updates(updates, tried, request)

    def _method_plan(self) -> Plan:
        """Return the run that trains a method of the registry and audits it.

        Raises:
            ValueError: settings that don't fit each other; says which.
            FileNotFoundError: the data set is not there; says how to get it.
        """
        if self.method is None or self.dataset is None:
            raise ValueError(NO_SUBJECT)
        self._refuse_idle("method")
        given = yaml12.parse_settings(self.method)
        method = methods.build(given)
        settings = methods.spec(method)
        # one step on all images of an update, unless the method is given with a length of its own
        observed = {"steps": 1, "head_epochs": 0, "batch_size": None}
        if isinstance(method, PrivateMethod):
            del observed["batch_size"]  # noise is calibrated on it; of few images a step takes all anyway
        observed = {} if {"steps", "epochs"} & set(given) else {k: v for k, v in observed.items() if k not in given}
        data: dict[str, Any] = {
            "title": f"Audit of {self.name}",
            "task": {"dataset": yaml12.parse_settings(self.dataset), "model": self._network()},
            "federation": {"partition": {"name": "iid", "clients": 4}, "rounds": self.rounds},
            "method": given,
            "defense": _defense(self.defense),
            "attack": [{**serialization.attack_spec(attack), "as": label} for label, attack in self.attacks.items()],
            "observe": {
                "images": self._count,
                "batch_size": self.batch_size,
                "method": {key: value for key, value in observed.items() if key in settings},
            },
            **({"threat": _known(self.threat)} if self.threat else {}),
            "seeds": [self.seed],
            "score": {"download": self.download},
            **({"imports": list(self.imports)} if self.imports else {}),
        }
        try:
            return runner.prepare(serialization.build(data), device=self.device)
        except SettingError as error:
            raise ValueError(_named_by_option(error)) from error

    def subjects(self) -> tuple[list[Subject], tuple[str, ...]]:
        """Return the updates of a model of the user's own, and what to know of them.

        Raises:
            ValueError: no model, or model, images and update do not fit each other; says which.
            FileNotFoundError: a file is not there.
        """
        if self.target and self.model:
            raise ValueError(f"expected one model, got {self.target} and --model {self.model}")
        self._refuse_idle(self.source)
        where = resolve_device(self.device)
        target = self.target or self.model
        if target is None:
            raise ValueError("expected --model MODULE:FUNCTION, the model that the update belongs to")
        built = subjects.load_user_model(target)
        model = built.model.to(where)
        data = built.data if self.images is None else self._images()
        if data is not None:
            data = data.to(where).like(model)
        if self.source == "update":
            return self._captured_subject(model, data, self.images or target)
        if data is None:
            raise ValueError(f"{target} returns a model alone: expected --images FILE.npz or a data set's name")
        return self._model_subjects(model, data, target)

    def _model_subjects(self, model: nn.Module, data: Examples, target: str) -> tuple[list[Subject], tuple[str, ...]]:
        """Return the updates that a model sends of these images, and a note where it gives more than are taken."""
        taken = data if self.images is not None else subjects.take_first(data, self.count or len(data), target)
        note = f"the first {len(taken)} of {len(data)} images that {target} gives"
        source = self.images or target
        updates = subjects.of_batches(model, taken, self.batch_size, self._client(), source=source, seed=self.seed)
        return updates, (note,) if len(taken) < len(data) else ()

    def _captured_subject(
        self, model: nn.Module, data: Examples | None, source: str
    ) -> tuple[list[Subject], tuple[str, ...]]:
        """Return the captured update, with its true images if `source` gives them, and what to know of these."""
        if data is not None:
            subjects.take_first(data, self.batch_size, source, "--batch-size")
        captured, client, size = self._captured(), self._client(), self.batch_size
        if (training := captured.training) is not None:
            client = client if client.method is not None else replace(client, method=training.method(model))
            size = training.examples if size == 1 and training.examples is not None else size
        shape = _shape(self.input_shape, data)
        captured = with_model_names(captured, model, shape)
        if self.labels:
            client = CapturedUpdateSettings(**vars(client), labels=self._labels(data))
        stated = yaml12.parse_settings(self.method) if self.method else None
        client, captured, assumed = with_open_step_size(client, captured, stated)
        subject = captured_update.of_update(
            model,
            captured,
            client,
            input_shape=shape,
            batch_size=size,
            given=data,
            source="" if self.input_shape or data is None else source,
        )
        return [subject], (*assumed, *_truth_notes(subject, source))

    def _labels(self, data: Examples | None) -> Tensor:
        """Return the labels that the attacker knows."""
        if data is not None:
            raise ValueError(
                "--labels goes with an update without its images; beside these, --threat '{knows_labels: true}'"
            )
        try:
            return torch.tensor([yaml12.parse(word) for word in self.labels.split(",")])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"expected --labels as a number for each image, such as 3,0, got {self.labels!r}"
            ) from error

    def _captured(self) -> captured_files.CapturedUpdate:
        """Return what the files hold."""
        if self.update is not None and (self.before or self.after):
            raise ValueError("expected the update's file, or --before and --after in its place, got both")
        if self.after is None and self.before is not None:
            raise ValueError("expected --after FILE beside --before: the weights that came back")
        if self.after is not None and self.kind == "gradient":
            raise ValueError("--kind gradient goes with a file of a gradient, not with --before and --after")
        found = (
            captured_files.load_pair(self.before, self.after)
            if self.after is not None
            else captured_files.load_update(self.update)  # type: ignore[arg-type]
        )
        return captured_files.described(found, self.kind or "update", self.clients or 1)

    def _client(self) -> ClientSettings:
        """Return how the client behind the updates trains."""
        return ClientSettings(
            method=methods.build(yaml12.parse_settings(self.method)) if self.method else None,
            defense=defenses.build(_defense(self.defense)),
            mean=_numbers(self.mean, "mean"),
            std=_numbers(self.std, "std"),
            head=self.head,
            loss=_loss(self.loss),
            targets=_targets(self.targets),
            threat=_threat(self.threat),
            output=self.output,
            input_range=_range(self.input_range),
            categories=_categories(self.categories),
        )

    def _refuse_idle(self, source: str) -> None:
        """Refuse options that do nothing in an audit of `source`."""
        for key, why in IDLE_OPTIONS[source].items():
            if getattr(self, key):
                raise ValueError(f"--{key.replace('_', '-')} {why}")

    @property
    def _count(self) -> int:
        """Return how many images are taken of a data set or file: as asked, else batches of about `DEFAULT_COUNT`."""
        return self.count or max(self.batch_size, DEFAULT_COUNT - DEFAULT_COUNT % self.batch_size)

    def _images(self) -> Examples:
        assert self.images is not None
        data = load_images(self.images)
        if self.source == "update":
            return data
        count = self._count
        if self.count is None and len(data) < count:
            count = max(self.batch_size, len(data) - len(data) % self.batch_size)
        return subjects.take_first(data, count, self.images, "--batch-size" if self.count is None else "--count")

    def _network(self) -> dict[str, Any]:
        assert self.dataset is not None
        shape = build_dataset(self.dataset).load().input_shape
        if self.model is None and shape not in DEFAULT_NETWORKS:
            sizes = "x".join(map(str, shape))
            raise ValueError(
                f"expected --model for images of {sizes}: '{{name: lenet-zhu, input_shape: {list(shape)}}}'"
            )
        return yaml12.parse_settings(self.model or DEFAULT_NETWORKS[shape])


def _shareable_source(source: str) -> str:
    """Return the name of a file or a data set, without what a path tells of the machine."""
    is_path = not is_settings(source) and (source.endswith(".npz") or Path(os.path.expanduser(source)).exists())
    return Path(source).name if is_path else str(yaml12.parse_settings(source).get("name"))


def _truth_notes(subject: Subject, source: str) -> list[str]:
    """Return what to know of a captured update's true images."""
    if subject.truth is None:
        return []
    used = len(subject.truth.inputs)
    fewer = f"scored against the first {used} of {subject.n_given} images in {source} (--batch-size {used})"
    return [fewer] * (used < subject.n_given) + [UNCHECKED_NOTE] * (subject.error is None)


def _named_by_option(error: SettingError) -> str:
    """Return an error about a setting with the option in place of the config's keys that it stands for."""
    for keys, option in OPTIONS.items():
        if error.path[: len(keys)] == keys:
            return f"{'.'.join((option, *error.path[len(keys) :]))}: {error.reason}"
    return str(error)


def check_limits(**given: float | None) -> dict[str, float]:
    """Return the limits that are set, by figure.

    Raises:
        ValueError: a limit that nothing could exceed, or everything: not a number, infinite, or not an SSIM.
    """
    for name, limit in given.items():
        if limit is not None and not math.isfinite(limit):
            raise ValueError(f"expected --max-{name} as a finite number, got {limit}")
        if name == "ssim" and limit is not None and not -1 <= limit <= 1:
            raise ValueError(f"expected --max-ssim in [-1, 1], got {limit:g}")
    return {name: limit for name, limit in given.items() if limit is not None}


def _count(number: int, noun: str) -> str:
    """Returns a number with its noun, which has an s where there is not one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _defense(text: str) -> dict[str, Any]:
    """Return settings of a defense, given by name or as YAML, where a list of several is their chain."""
    value = yaml12.parse(text)
    return {"name": "chain", "parts": value} if isinstance(value, list) else yaml12.parse_settings(text)


def _numbers(text: str, what: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"expected --{what} as numbers such as 0.5,0.5,0.5, got {text!r}") from error


def _shape(text: str | None, given: Examples | None) -> Sequence[int] | Inputs:
    """Return the shape of one example, or an example of inputs that no shape describes."""
    if text is None:
        if given is None:
            raise ValueError("expected --input-shape C,H,W of the images behind the update, or the images themselves")
        return given.stated()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"expected --input-shape as C,H,W such as 3,32,32 (C,T of a series, F of a table), got {text!r}"
        ) from error


def _loss(text: str) -> str | dict[str, Any]:
    """Return a loss by its name, as settings in YAML or as `module:function`."""
    return yaml12.parse_settings(text) if text.startswith("{") else text or "cross-entropy"


def _targets(text: str) -> TargetKind | None:
    """Return what the unknown targets of a loss function of the user's own are."""
    if text and text not in get_args(TargetKind):
        raise ValueError(f"expected --targets as {', '.join(get_args(TargetKind))}, got {text!r}")
    return cast(TargetKind, text) if text else None


def _known(text: str) -> dict[str, Any]:
    """Return the settings of a threat model."""
    given = yaml12.parse(text)
    if not isinstance(given, dict):
        raise ValueError(f"expected --threat as settings such as '{{knows_labels: true}}', got {text!r}")
    return given


def _threat(text: str) -> ThreatModel | None:
    """Return what the attacker knows beside the update."""
    try:
        return fit_value(ClientSettings, "threat", _known(text)) if text else None
    except SettingError as error:
        raise ValueError(f"--{error}") from error


def _range(text: str) -> tuple[float, float] | None:
    """Return least and largest number of the inputs."""
    if not text:
        return None
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"expected --input-range as low,high such as -3,3, got {text!r}") from error
    return low, high


def _categories(text: str) -> tuple[tuple[int, int], ...]:
    """Return where the categories of a table lie."""
    try:
        return tuple((int(a), int(b)) for a, b in (word.split(":") for word in text.split(",") if word))
    except ValueError as error:
        raise ValueError(f"expected --categories as first:last+1 columns such as 3:7,7:14, got {text!r}") from error
