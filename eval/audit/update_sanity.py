"""What a captured update says of itself without its images: whether its sign and its number of images can be right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from attacks.network.linear_layers import VectorLayers, vector_layers
from attacks.update.adaptive_first_step import AdaptiveFirstStep, StepSizeDoubt
from attacks.update.classifier_update import classifier_tensors
from attacks.update.float_rounding import is_sent_in_float8, spacing_of_weights
from attacks.update.quantization_grids import grid_steps
from attacks.update.sparsification import least_products
from attacks.update.training_phases import training_phases
from attacks.update.update_rule import guess_update_rule
from eval.audit.merged_adapters import find_merged_adapter
from fl.defense import Defense, UnknownDefense
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Candidate
from fl.view import ServerView

MAX_BIAS_SUM = 0.05
"""Share of its size that the bias's update may sum to: what half precision makes of zero stays below."""
MIN_WEIGHT_COSINE = 0.9
"""Cosine between an update and the weights above which it is no change of them."""
MIN_SPARSE_ROWS, MIN_MISSING_SHARE, MIN_STEPS_OF_GRID = 8, 0.02, 8
"""Rows that a matrix needs, and the share of its numbers that has to be missing, to count as sparsified; and places of
the weights' last digit that its other numbers have to be away from zero."""
SPARE_PRODUCTS = 1
"""Outer products beyond those of examples that single zeros by chance may make."""
MIN_STEPS_OF_BITS = 1.5
"""Steps of an even grid that the other numbers have to be away from zero: rounding alone leaves some a step away."""
ALL_ZERO = (
    "all numbers of the update are zero, so it tells nothing of any image: the client trained nothing (it skipped the "
    "round, all it trains is frozen, or its step size is 0), or the same weights were taken for before and after"
)
"""What is said of an update of zeros."""
TRIED_PICTURES = 4
"""Batches of pictures at random on which it is tried what steps leave at zero."""
SIGN_THRESHOLD = 1e-4
"""Entries smaller than this share of the largest have no sign: rounding may have given it."""


def find_inconsistency(view: ServerView) -> str:
    """Return why no client sends this update under the view's settings; empty where it may, or nothing tells.

    Where signs and sizes show another rule than SGD (`attacks.update.update_rule`), that is it. Else labels are asked:
    The gradient of cross entropy in the classifier's bias is the mean of softmax - one-hot over the images (Zhao et
    al. 2020, Eq. 3). It sums to zero, and only the images' own classes are negative in it; so do sums of it over
    steps of SGD. Whether that holds for this model and method is asked of their own prediction of gray images.

    Args:
        view: of a captured update.
    """
    if not any(bool(dense(value).any()) for value in view.update.values()):
        return ALL_ZERO
    read = AdaptiveFirstStep.of(view)
    if isinstance(read, StepSizeDoubt):
        return read.reason
    if not is_sent_in_float8(view) and (rule := guess_update_rule(view)):
        return f"the update does not look like a step of SGD on a gradient, but like {rule}"
    if share := missing_share(view):
        return (
            f"{share:.0%} of its numbers are missing in other places of each row, as of no step: it was sparsified "
            "(state how, such as --defense '{name: prune, ratio: 0.9}', the largest tenth of each tensor, or with "
            "keep: random a random tenth; with error feedback, where a client adds what earlier rounds left out, no "
            "statement explains it), or the model is "
            "pruned (let your function return it with its masks, torch.nn.utils.prune)"
        )
    if merged := find_merged_adapter(view):
        return merged
    size, bias = view.batch_size, classifier_tensors(view, view.update)[1]
    if (
        not view.task.loss.is_cross_entropy
        or size is None
        or bias is None
        or view.private
        or view.parts
        or view.defense.name != "none"
    ):
        return ""
    sent = classifier_tensors(view, view.shared)[1]
    rounding = 4 * torch.finfo(view.dtype).eps * (float(sent.abs().max()) if sent is not None and view.rounded else 0.0)
    said = _bias_inconsistency(bias, size, rounding)
    if not said:
        return ""  # before a whole round is taken on as many images
    gray = torch.full((size, *view.task.input_shape), 0.5, dtype=view.dtype, device=view.device)
    with torch.no_grad():
        usual = classifier_tensors(
            view, predict(view, Candidate(gray, torch.zeros(size, dtype=torch.int64, device=view.device)))
        )
    return "" if usual[1] is None or _bias_inconsistency(usual[1], size, rounding) else said


def missing_share(view: ServerView) -> float:
    """Return how much of an update's matrices seems not to have been sent, here and there; 0 where nothing does.

    Steps on a few examples leave whole rows and columns at zero (units and pixels at rest), and rows that miss the
    numbers of some of the examples: there are 2 to the power of these patterns, an example counting once in each step,
    and as many outer products make all that moved. That is so of matrices alone: convolutions take many patches of each
    example. A step far below the weights' last place leaves zeros, too; its other numbers are then a few such places,
    and of few bits a step. Numbers that the network's own steps leave at zero, whatever the example, count as sent
    (those that a parametrization of weights does not look at, say), and where these leave zeros here and there, as
    recurrent layers do that take an example many times, nothing is told.
    """
    phases = training_phases(view)[1] or ()
    taken = sum(sum(step) for phase in phases for step in phase)
    if type(view.client.defense) not in {Defense, UnknownDefense} or not taken or view.batch_size is None:
        return 0.0
    if is_sent_in_float8(view):
        return 0.0
    if not _missing_share(view, view.update, {}, taken):
        return 0.0
    tried = _steps_on_random_pictures(view)
    always = {name: torch.stack([dense(made[name]) == 0 for made in tried]).all(0) for name in next(iter(tried), {})}
    if any(_missing_share(view, made, always, taken) for made in tried):
        return 0.0
    layers = vector_layers(view) if tried else VectorLayers({}, frozenset())
    single = {layer.names["weight"] for layer in layers.layers.values()} - layers.reused
    return _missing_share(view, view.update, always, taken, single)


def _missing_share(
    view: ServerView, update: Tensors, always: Mapping[str, Tensor], taken: int, single: Collection[str] | None = None
) -> float:
    """Return the same of an update, where some numbers are always zero.

    Args:
        view: what the server saw.
        update: by name.
        always: where it is zero whatever the examples, by name.
        taken: examples, of all steps together.
        single: names of matrices that are given one vector of each example, so that the number of outer products
            counts, and not that of the patterns alone; None takes all for such.
    """
    missing, whole = 0, 0
    for name, rest in _with_scattered_zeros(view, update, always):
        patterns, most = len(torch.unique(rest == 0, dim=0)), taken + SPARE_PRODUCTS
        too_many = len(rest) >= MIN_SPARSE_ROWS and patterns > 2**taken
        if too_many or ((single is None or name in single) and least_products(rest != 0, most) > most):
            missing, whole = missing + int((rest == 0).sum()), whole + rest.numel()
    return missing / whole if whole and missing >= MIN_MISSING_SHARE * whole else 0.0


def zeros_of_unknown_cause(view: ServerView) -> tuple[str, float]:
    """Return the name of a matrix that has zeros here and there, and their share; "" and 0 where none has.

    As many examples as rows, those of all steps counted, may leave any pattern of zeros in them: a row holds none of a
    pixel where its unit is at rest for all examples that have it. Then nobody can tell whether numbers were left out.

    Args:
        view: what the server saw.
    """
    if type(view.client.defense) not in {Defense, UnknownDefense} or is_sent_in_float8(view):
        return "", 0.0
    found = {name: float((rest == 0).double().mean()) for name, rest in _with_scattered_zeros(view, view.update, {})}
    name = max(found, key=lambda one: found[one], default="")
    return (name, found[name]) if name and found[name] >= MIN_MISSING_SHARE else ("", 0.0)


def _with_scattered_zeros(
    view: ServerView, update: Tensors, always: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices whose zeros are in other places of most rows, without rows and columns that did not move.

    Those are left out where rounding may have made the zeros.
    """
    for name, value in update.items():
        sent = dense(value)
        if sent.ndim != 2 or not bool(sent.any()):
            continue
        rows, columns = sent.any(1), sent.any(0)
        rest = sent[rows][:, columns]
        least = float(rest[rest != 0].abs().min())
        rest = rest.masked_fill(always[name][rows][:, columns], least) if name in always else rest
        before = float(dense(view.shared[name]).abs().max()) if name in view.shared else 0.0
        fine = not view.rounded or least > MIN_STEPS_OF_GRID * spacing_of_weights(view, name) * before
        grid = grid_steps(sent)  # of numbers in few bits, those near zero were rounded to it
        fine = fine and (grid is None or least > MIN_STEPS_OF_BITS * float(grid[grid > 0].min()))
        if fine and len(torch.unique(rest == 0, dim=0)) > len(rest) // 2:
            yield name, rest


def _steps_on_random_pictures(view: ServerView) -> list[Tensors]:
    """Return updates of the same steps on some pictures; nothing where none can be taken."""
    count, shape = view.batch_size or 1, view.task.loss.variable_shape(view.task.output_shape)
    if view.private or view.parts or (shape is None and not view.task.loss.takes_classes):
        return []
    found = list[Tensors]()
    for number in range(TRIED_PICTURES):
        draw = stream(number, "always zero")
        images = torch.rand(count, *view.task.input_shape, generator=draw).to(view.device, view.dtype)
        targets = torch.randint(view.task.num_classes, (count,), generator=draw)
        if not view.task.loss.takes_classes and shape is not None:
            targets = view.task.loss.relax(torch.randn(count, *shape, generator=draw)).to(view.dtype)
        with torch.no_grad():
            found.append(predict(view, Candidate(images, targets.to(view.device))))
    return found


def find_mistaken_weights(view: ServerView) -> str:
    """Return why the update seems to be weights and no difference of them; empty where it does not.

    What one round changes is neither as long as the weights nor along them; decay is along them, and far shorter.

    Args:
        view: of a captured update.
    """
    names = [name for name, value in view.update.items() if name in view.shared and dense(value).ndim > 1]
    pairs = [
        (dense(view.update[name]).double().flatten(), dense(view.shared[name]).double().flatten()) for name in names
    ]
    if not pairs:
        return ""
    moved, sent = (torch.cat(part) for part in zip(*pairs, strict=True))
    size, whole = float(moved.norm()), float(sent.norm())
    along = float(moved @ sent) / (size * whole) if size and whole else 0.0
    if not (abs(along) > MIN_WEIGHT_COSINE and 0.5 < size / whole < 2):
        return ""
    return (
        f"the update seems to be weights and not their change: it is {size / whole:.2g} times as long as the model's "
        f"weights, and along them (cosine {along:.2f}); give weights before - after, or this file as "
        "--after FILE, --before FILE beside it"
    )


def _bias_inconsistency(bias: Tensor, images: int, rounding: float) -> str:
    """Return what is wrong with the bias's update (K,) of so many images, known to within `rounding`."""
    total, whole = float(bias.sum().abs()), float(bias.abs().sum())
    if total > MAX_BIAS_SUM * whole + rounding * len(bias):
        return (
            "the update is not that of a softmax cross entropy in this model: that of the classifier's bias sums to "
            f"{total / whole:.2g} of its size and not to zero; check that it is weights before - after, the optimizer "
            "(Adam and its kind leave such sums, in later steps too; so do noise, masks and weight decay that was not "
            "stated), and --method"
        )
    least = SIGN_THRESHOLD * float(bias.abs().max()) + rounding
    negative, positive = int((bias < -least).sum()), int((bias > least).sum())
    if negative <= images:
        return ""
    seen = f"that of the classifier's bias is negative for {negative} classes, where {images} image(s) leave {images}"
    if positive <= images:
        return (
            f"the sign of the update is turned: {seen} at most; give weights before - after, not after - before (were "
            "both exchanged?), or state the loss, if labels are smoothed. Labels recovered from it as it is are wrong"
        )
    return (
        f"the update is not of {images} image(s): {seen} at most; check --batch-size, --method and the loss, or state "
        "noise (--defense). A mean of several clients, or momentum of earlier rounds, looks so, too"
    )
