"""What a result of an attack proves to be in an update, without the truth."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacks.analytic.compressed_layer import CompressedInput, Reading
from attacks.analytic.tokens import TOKENS
from attacks.base import NotApplicable, Reconstruction, Remark, Result
from attacks.update.first_linear_layer import first_linear
from attacks.update.float_rounding import relative_rounding
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.update_rule import guess_update_rule
from attacks.verification.replay_checks import contradicts_features
from eval.federations.other_facts import ADAPTIVE_STEP, FIRST_ATTACK
from fl.tensors import dense
from fl.view import ServerView

Exposed = Literal["labels", "features", "images"]
LEVELS: tuple[Exposed, ...] = ("labels", "features", "images")
"""What an update may give away, the least first."""
MAX_MISSED = 1e-3
"""Share of a layer's equations that its input may leave for it to count as recovered."""
ROUNDING_MARGIN, MAX_ROUNDING = 1.5, 0.02
"""How much more than its rounding they may leave of what was sent in few digits, and how large that may be."""
MAX_STANDARD_ERRORS, MAX_RELATIVE_ERROR = 2.0, 0.1
"""The misfit of its layer up to which a step of Adam or its like is one image's, and the standard error up to which
what was found is a picture: of one that is known less well the misfit tells nothing, either."""

AS_COMPRESSED = "analytic, as compressed"
"""What reads an update that was compressed."""
MIN_PICTURE = 0.25
"""Share of a picture's numbers that count as a picture."""


@dataclass(frozen=True)
class Exposure:
    """What one attack showed to be in an update.

    Attributes:
        kind: one of `LEVELS`.
        attack: which showed it.
        words: what it is, in a sentence.
    """

    kind: Exposed
    attack: str
    words: str


def proved_exposures(attack: str, result: Result, view: ServerView, *, replayable: bool = True) -> list[Exposure]:
    """Return what a result proves of an update without the truth; nothing that it merely found.

    Images count where the update confirms them, and where it bears them out: of two nearly alike that were stated as
    one their mean gives either away.

    Inputs of layers count where they are all but exact by the layer's own equations. These hold for steps of SGD alone:
    where the optimizer is not known only what the whole update confirms counts, and nothing that the layers above
    contradict. After one step of an adaptive optimizer inputs are known as far as rounding lets. They count where one
    image explains the layer to within its errors, and where these are small.

    Which ids occur in an example counts as an input of a layer, where the rows of an embedding tell it for certain.

    Args:
        attack: its name.
        result: of it.
        view: of the update.
        replayable: whether a step on what was found can be taken again; where it can't, the layers above neither
            confirm nor contradict anything, and inputs of layers are known up to a factor.
    """
    if isinstance(result, NotApplicable):
        return []
    shown: list[Exposure] = []
    alike = layers_of_one_direction(view)
    error = result.relative_error if attack == ADAPTIVE_STEP else None
    sized = error is not None and error <= MAX_RELATIVE_ERROR and result.objective <= MAX_STANDARD_ERRORS
    sure = bool(result.verified or result.approximate)
    if result.inputs is not None and (sure or sized):
        shown.append(Exposure("images", attack, _say_images(result, view, error if sized else None)))
    linear = first_linear(view) if "features" in result.private else NotApplicable("")
    for name, value in result.private.items():
        first, _, layer = name.partition("/")
        if first != "features" or not (sure or sized or (layer and view.threat.knows_optimizer)):
            continue
        if layer.removesuffix(".weight") in alike and not (sure and replayable):
            continue
        exempt = sure or sized or Remark.UNCLIPPED_ROWS in result.remarks
        if _missed_share(result, layer, exempt=exempt) > MAX_MISSED:
            continue
        if not (sure or sized or Remark.UNCLIPPED_ROWS in result.remarks) and _leaves_more(dense(value), layer, view):
            continue
        doubted = contradicts_features(view, result, layer) if replayable else bool(guess_update_rule(view))
        if sure or sized or not doubted or Remark.UNCLIPPED_ROWS in result.remarks:  # which its attack has asked them
            untold = Remark.DIRECTION_ONLY in result.remarks
            at = layer if layer or isinstance(linear, NotApplicable) or not linear.passed_over else linear.name
            words = _say_features(at, dense(value), (replayable or sure) and not untold)
            words += _say_error(error) if sized else ""
            shown.append(Exposure("features", attack, words))
    read = {name.removeprefix(TOKENS): value for name, value in result.private.items() if name.startswith(TOKENS)}
    if read and result.verified:
        counts = ", ".join(f"{value.numel()} of {name.removesuffix('.weight')}" for name, value in read.items())
        shown.append(Exposure("features", attack, f"which ids were fed is recovered, if not in what order: {counts}"))
    if not replayable and not shown and attack == FIRST_ATTACK and (name := _picture_by_its_layer(result, view, alike)):
        shown.append(Exposure("features", attack, _say_features(name, result.inputs, False)))  # type: ignore[arg-type]
    if result.labels is not None and shown and Remark.LABELS_DOUBTFUL not in result.remarks:
        shown.append(Exposure("labels", attack, _say_labels(result, view)))
    return shown


def _missed_share(result: Reconstruction, layer: str, *, exempt: bool) -> float:
    """Return which share of a layer's equations what it takes leaves; that of all equations where its own is unknown.

    Args:
        result: holds what the layer takes.
        layer: its name.
        exempt: whether something else confirms that, beside which the share of all does not count.
    """
    missed = result.private.get(f"residual/{layer}")
    if missed is not None:
        return float(dense(missed).nan_to_num(nan=math.inf).max())
    return 0.0 if exempt or math.isnan(result.objective) else result.objective


def _say_images(result: Reconstruction, view: ServerView, error: float | None) -> str:
    """Say that pictures are recovered, and what shows it.

    Args:
        result: with pictures.
        view: of the update.
        error: of an adaptive step's picture, where its layer confirms it; None where the update does.
    """
    assert result.inputs is not None
    count = len(result.inputs)
    noun = "image" if view.task.inputs.is_image else "example"
    words = f"an {noun} is" if count == 1 else f"{count} {noun}s are"
    shown_by = "the update confirms it" if error is None else "its layer confirms it"
    if result.approximate:
        seen = ", as far as the network sees its pixels" if Remark.PARTLY_SEEN in result.remarks else ""
        if {Remark.SCALE_TAKEN_OFF, Remark.SCALES_TAKEN_OFF} & result.remarks:
            seen = ", up to brightness and contrast that the network takes off"
        shown_by = f"the update bears it out{seen}, if not to a quarter of a level"
        if Remark.MAY_BE_MIXTURE in result.remarks:
            shown_by = f"the update bears it out{seen}, if it is of {count} alone: a mixture would not show"
    how = "" if error is None else _say_error(error)
    return f"{words} recovered{how}, and {shown_by}"


def compressed_exposures(found: Reading, view: ServerView) -> list[Exposure]:
    """Return what an update that was compressed shows of the one example that it was stated to be of.

    Args:
        found: what was read, if anything.
        view: of the update; where nobody knows the optimizer signs count alone, which all leave as they are.
    """
    if not isinstance(found, CompressedInput) or not (found.signs_only or view.threat.knows_optimizer):
        return []
    count, told = len(found.told), int(found.told.sum())
    if found.signs_only:
        words = f"which of the {count} numbers that {found.layer} takes are above, at or below zero is recovered"
        return [Exposure("features", AS_COMPRESSED, f"{words} ({found.compression})")]
    pictured = found.is_given_images and told >= MIN_PICTURE * count
    noun = "image" if view.task.inputs.is_image else "example"
    what = f"an {noun} is" if pictured else f"what {found.layer} takes is"
    near = f" and to about {found.error:.1g} of its size" if found.error else ""
    part = f"{told} of {count} numbers" if told < count else f"{count} numbers"
    words = f"{what} recovered up to a factor{near}: {part} ({found.compression})"
    return [Exposure("images" if pictured else "features", AS_COMPRESSED, words)]


def say_reading(found: CompressedInput | NotApplicable) -> str:
    """Return what an update that was compressed was read as, in words."""
    if isinstance(found, NotApplicable):
        return f"not applicable: {found.reason}"
    return f"{'signs of ' if found.signs_only else ''}{int(found.told.sum())} numbers; {found.compression}"


def _leaves_more(features: Tensor, layer: str, view: ServerView) -> bool:
    """Return whether a linear layer's update is more than what inputs can make of it, beyond its rounding.

    Inputs that were solved for from the layers above explain those; a mixture of several examples does, too. The
    layer's own gradient is a sum of outer products with its inputs, whatever flows back. What has another form is not
    asked, nor an update that is no step along a gradient.
    """
    gradient = exact_step_gradient(view)
    if isinstance(gradient, NotApplicable) or layer not in gradient:
        return False
    weight, inputs = dense(gradient[layer]).double(), features.to(view.device).double()
    if inputs.ndim != 2 or weight.ndim != 2 or inputs.shape[1] != weight.shape[1]:
        return False
    basis = torch.linalg.qr(inputs.mT)[0]
    left, whole = float((weight - weight @ basis @ basis.mT).norm()), float(weight.norm())
    rounding = min(ROUNDING_MARGIN * relative_rounding(view, layer), MAX_ROUNDING)
    return left > max(MAX_MISSED, rounding) * whole


def _picture_by_its_layer(result: Result, view: ServerView, alike: Collection[str]) -> str:
    """Return the name of the linear layer that is given the one image that its own equations tell; "" for none."""
    layer = first_linear(view)
    if isinstance(layer, NotApplicable) or isinstance(result, NotApplicable) or layer.name in alike:
        return ""
    stated = view.batch_size == 1 and view.threat.knows_optimizer and not guess_update_rule(view)
    return layer.name if stated and result.inputs is not None and result.objective <= MAX_MISSED else ""


def layers_of_one_direction(view: ServerView) -> set[str]:
    """Return linear layers whose update has one direction whatever they are given: of two outputs that move, or fewer.

    What flows back into two outputs under cross entropy sums to zero, so that several inputs look like one.
    """
    weights = {name: dense(value) for name, value in view.update.items() if dense(value).ndim == 2}
    return {name.rpartition(".")[0] for name, value in weights.items() if int(value.any(1).sum()) <= 2}


def _say_labels(result: Reconstruction, view: ServerView) -> str:
    """Return what is said of labels, and what it rests on where the whole update does not confirm them.

    Under a loss whose targets may be any numbers there are such of every loss that made the update.
    """
    rests = ""
    if Remark.LABELS_CONFIRMED not in result.remarks:
        rests = f", if the loss is as stated ({view.task.loss.name})"
    return f"labels are recovered{rests}: {0 if result.labels is None else len(result.labels)}"


def _say_features(layer: str, value: Tensor, sized: bool) -> str:
    name = layer.removesuffix(".weight")
    what = f"what {name} takes" if name else "what the first fully connected layer takes"
    return f"{what} is recovered{'' if sized else ' up to a factor'}: {value.numel()} numbers"


def _say_error(error: float | None) -> str:
    return "" if error is None else f", with a standard error of {100 * error:.2g}% of its size"
