"""The plan of an audit of a user's own model or of a captured update: the same cells as those of a registered method.

An audit has three sources: a registered method, which is trained first (`eval.run.plan.prepare`), a model of the user's
own with images, and an update that was captured. The latter two come to updates that are there already, and here these
become a plan. From then on there is one way (`eval.audit.execution`): the same runner, workers, folder, report and
findings, whatever the source.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attacks.base import Attack
from defenses import defenses
from eval.audit.update_sanity import ALL_ZERO
from eval.audit.user_model import Subject
from eval.experiment.capture_spec import CaptureSpec
from eval.experiment.serialization import section_spec
from eval.experiment.spec import Entry, ScoreSpec
from eval.run import auxiliary_overlap
from eval.run.observation import Observation, WatchedUpdate
from eval.run.plan import Plan, plan_capture
from fl.losses.cross_entropy import CrossEntropy
from fl.method import methods
from fl.models.function import MEMORY_ADDRESS
from fl.tensors import dense
from fl.types import Task
from fl.view import ServerView

NO_SETTING = (
    "Dropout, mixup or other random changes of the images, a step size that changes within the round, and averages of "
    "weights (EMA) make such updates, too"
)
"""What no setting states, and makes an update another than the model's own of its images."""
LIBRARY_PACKAGES = ("torch", "torchvision")
"""Packages whose layers are known by their names and settings alone."""


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """What is asked of updates that are there already.

    Attributes:
        name: of what is audited, for people.
        source: the same in plain data: names of the model, of the images, of the update's file.
        seed: of all randomness.
        device: `auto`, `cpu` or `cuda`.
        score: figures beyond those that are always taken; nothing is downloaded for them unless that is asked for.
        imports: modules that register what the attacks name.
        notes: what a reader has to know of the updates.
    """

    name: str
    source: Mapping[str, str]
    seed: int = 0
    device: str = "auto"
    score: ScoreSpec = field(default_factory=lambda: ScoreSpec(download=False))
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_updates(subjects: Sequence[Subject], attacks: Mapping[str, Attack], request: CaptureRequest) -> Plan:
    """Return the plan of attacks on updates of one model.

    Args:
        subjects: the updates, at least one.
        attacks: by label.
        request: what else is asked for.

    Raises:
        ValueError: an attack has the images beforehand that it is to reconstruct.
    """
    view = subjects[0].view
    truths = [subject.truth.inputs for subject in subjects if subject.truth is not None]
    for label, attack in attacks.items():
        auxiliary_overlap.check_no_overlap(attack, label, truths)
    pictured = view.task.inputs.is_image and bool(truths)  # else LPIPS, which takes seconds to load, has no use
    spec = CaptureSpec(
        title=f"Audit of {request.name}",
        source=request.source,
        method=(Entry(label=view.method.name, item=view.method),),
        defense=(Entry(label=view.defense.name, item=view.defense),),
        attack=tuple(Entry(label=label, item=attack) for label, attack in attacks.items()),
        threat=view.threat,
        images=sum(len(truth) for truth in truths) or None,
        batch_size=view.batch_size,
        seeds=(request.seed,),
        score=request.score if pictured or request.score.lpips != "auto" else replace(request.score, lpips="off"),
        imports=request.imports,
    )
    observation = Observation(tuple(_watched_update(i, subject) for i, subject in enumerate(subjects)), request.seed)
    return plan_capture(
        spec,
        observation,
        updates_digest(subjects, request.seed),
        device=request.device,
        notes=tuple(dict.fromkeys((*request.notes, *(note for subject in subjects for note in subject.notes)))),
        contradiction=next(filter(None, map(describe_contradiction, subjects)), ""),
    )


def _watched_update(number: int, subject: Subject) -> WatchedUpdate:
    count = 0 if subject.truth is None else len(subject.truth.inputs)
    return WatchedUpdate(
        key=number,
        client=0,
        view=subject.view,
        truth=subject.truth,
        forward_error=subject.error,
        pictures=tuple(f"{number}:{image}" for image in range(count)),
        tolerance=subject.tolerance,
    )


def describe_contradiction(subject: Subject) -> str:
    """Say in words if an update is not what the model makes of its images, or can be of no images; else nothing."""
    if not subject.mismatched or subject.truth is None:
        return subject.inconsistency
    if subject.inconsistency == ALL_ZERO:  # no setting makes it fit
        return ALL_ZERO
    doubt = f"{subject.inconsistency}. Otherwise " if subject.inconsistency else ""
    used = len(subject.truth.inputs)
    which = f", and the images: the first {used} of {subject.n_given} given, in their order" if subject.n_given else ""
    return (
        f"the update is not what this model makes of these images (relative error {subject.error:.2g}): {doubt}check "
        f"the sign, mean and std, --method, --loss (smoothing, weights), --batch-size{which}. {NO_SETTING}"
    )


def updates_digest(subjects: Sequence[Subject], seed: int) -> str:
    """Return SHA-256 of all that makes these updates, the same whenever they are made of the same.

    That is the model (its layers, the source of those of the user's own, its weights), the images, the rule of training
    and, of a captured update, the update itself. What a model of the user's own sends is computed from these, and need
    not come out the same to the last bit on every machine, so it is not part of it.
    """
    digest, view = hashlib.sha256(), subjects[0].view
    settings = {
        "model": str(view.task.model),
        "layers": _sources(view.task.model),
        "task": [list(view.task.input_shape), view.task.num_classes, list(view.task.mean), list(view.task.std)],
        **_own_task(view.task),
        "method": methods.spec(view.method),
        "defense": defenses.spec(view.defense),
        "threat": section_spec(view.threat),
        "batch_size": view.batch_size,
        "seed": seed,
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    _add(digest, _model_tensors(view))
    for subject in subjects:
        if subject.truth is not None:
            _add(digest, [("images", subject.truth.inputs), ("labels", subject.truth.labels)])
        if subject.captured:
            _add(digest, [(name, dense(value)) for name, value in sorted(subject.view.update.items())])
    return digest.hexdigest()


def _own_task(task: Task) -> dict[str, Any]:
    """Return what makes a task another than classifying pictures, in plain data; nothing of one that does."""
    if task.loss == CrossEntropy() and task.inputs.is_plain:
        return {}
    return {"loss": MEMORY_ADDRESS.sub("", repr(task.loss)), "inputs": repr(task.inputs)}


def _model_tensors(view: ServerView) -> list[tuple[str, Tensor]]:
    named: dict[str, Any] = {**view.task.model.state_dict(), **view.buffers, **view.shared}
    return [(name, dense(value)) for name, value in sorted(named.items()) if not isinstance(value, nn.Module)]


def _sources(model: nn.Module) -> list[str]:
    """Return the source of every kind of layer that is the user's own, as far as there is any."""
    kinds = {type(module) for module in model.modules()}
    found = []
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        if kind.__module__.partition(".")[0] not in LIBRARY_PACKAGES:
            with suppress(OSError, TypeError):  # made in a notebook, or in C
                found.append(inspect.getsource(kind))
    return found


def _add(digest: hashlib._Hash, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, value in tensors:
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if not value.is_meta:
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
