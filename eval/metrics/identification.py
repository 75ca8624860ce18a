"""Whether an attack tells a client's image from others of its class: a measure of leakage that needs no eye.

Among N candidates of one class, the true image and N - 1 that the client does not hold, which is meant? Without the
update nobody names the true one more often than once in N; labels alone do not help. Under record-level differential
privacy `eval.privacy.reconstruction_robustness` bounds how often anybody can. There are three ways to tell: by what an
attack brought back, as pixels or as features of the attacked network, and by the update itself, which takes no
reconstruction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from eval.metrics.matching import pairwise_mse
from fl.defense import overrides
from fl.parametrization import Parametrization
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Tensors, add_scaled, dense, inner, map_values, norm
from fl.types import Batch, Candidate, Schedule
from fl.view import ServerView

CANDIDATES = 50
"""How many there are, the true image among them, where there are so many of its class."""
REPLAY_ERRORS = (ValueError, RuntimeError)
"""What networks raise that train on batches only, as those with batch norm over vectors, or over maps of one pixel."""
Features = Callable[[Tensor], Tensor]
"""Of images (N, C, H, W) in [0, 1], what the classifier is given of them (N, ...)."""


def draw_distractors(
    reference: Batch, label: int, truth: Tensor, *, count: int = CANDIDATES - 1, seed: int = 0
) -> Tensor:
    """Draw images of a class that are not the true one (to 8 bits) at random; fewer where there are no more.

    Args:
        reference: images and labels (R,) that the client does not hold.
        label: the class.
        truth: (C, H, W) in [0, 1].
        count: how many.
        seed: of the choice.
    """
    found = reference.inputs[reference.labels == label]
    if not len(found):
        return found
    other = ((found.float() - truth.to(found).float()).abs() > 0.5 / 255).flatten(1).any(1)
    found = found[other]
    return found[torch.randperm(len(found), generator=stream(seed, "eval/identify"))[:count]]


# ---- by what an attack brought back ----------------------------------------------------------------------------------
def is_closest_in_pixels(reconstruction: Tensor, truth: Tensor, others: Tensor) -> bool:
    """Return whether the true image is the closest one to the reconstruction by MSE; a tie is none.

    Args:
        reconstruction: (C, H, W).
        truth: (C, H, W).
        others: (N - 1, C, H, W).
    """
    if not bool(reconstruction.isfinite().all()):
        return False
    shown = torch.cat([truth[None].to(others), others])
    return _first(pairwise_mse(shown, reconstruction[None].to(others))[:, 0].tolist())


def is_closest_in_features(features: Features, reconstruction: Tensor, truth: Tensor, others: Tensor) -> bool:
    """Return whether the true image is closest to the reconstruction by the classifier's input features.

    Arguments are those of `is_closest_in_pixels`, with the function that computes the features.
    """
    if not bool(reconstruction.isfinite().all()):
        return False
    made = features(torch.cat([image.to(others) for image in (reconstruction[None], truth[None], others)])).double()
    return _first((made[1:] - made[:1]).flatten(1).square().sum(1).tolist())


def classifier_features(view: ServerView, recovered: Tensors) -> Features | str:
    """Return the attacked network below its classifier, as far as an attacker knows it, or why it does not.

    Args:
        view: has what the server sent.
        recovered: what the attack recovered, a generated extractor under `extractor/name`.
    """
    if view.parts:
        return "the networks of several clients were attacked together"
    task = view.client.task
    top = next((n for n, _ in task.model.named_modules() if n and task.head and f"{n}.".startswith(task.head)), None)
    if top is None:
        return "the network has no classifier to look below"
    known = view.shared if type(view.method.parametrization) is Parametrization else {}
    known = {**known, **{n.removeprefix("extractor/"): v for n, v in recovered.items() if n.startswith("extractor/")}}
    below = [n for n in task.parameters if not n.startswith(task.head)]
    if lacking := [n for n in below if n not in known]:
        return f"the weights below the classifier are neither sent as such nor recovered ({lacking[0]})"
    if lacking := [n for n, value in task.buffers.items() if value.is_floating_point() and n not in view.buffers]:
        return f"the network's statistics are not known ({lacking[0]})"
    model = copy.deepcopy(task.model).eval()
    values = {**{n: dense(known[n]).to(view.device) for n in below}, **view.buffers}
    return partial(_features, model, top, values, view.dtype, view.device)


def _features(
    model: nn.Module, layer: str, values: dict[str, Tensor], dtype: torch.dtype, device: torch.device, images: Tensor
) -> Tensor:
    """Return what the layer of that name is given of images (N, C, H, W)."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        kept.append(given[0].cpu())

    hook = model.get_submodule(layer).register_forward_pre_hook(keep)
    with torch.no_grad():
        torch.func.functional_call(model, values, (images.to(device, dtype),))
    hook.remove()
    return kept[0]


# ---- by the update ---------------------------------------------------------------------------------------------------
def is_closest_in_update(view: ServerView, label: int, truth: Tensor, others: Tensor) -> bool | str:
    """Return whether the true image's update is closest to the observed one, where `replay_obstacle` finds none.

    Each candidate's update is what the client would have sent had it held that image alone, by the attacker's own model
    of training. Of one image under a known defense, the squared distance is the likelihood under noise of one size. Of
    several the others stand in the way, and an unknown defense may have changed the length: there it is the cosine.

    Args:
        view: what the server knows and sees.
        label: of all candidates.
        truth: (C, H, W) in [0, 1].
        others: (N - 1, C, H, W).

    Returns:
        Or why a step on one image alone can't be computed.
    """
    labels = torch.tensor([label], device=view.device)
    alone = replace(view, schedule=_ones(view.schedule), batch_size=1, order=None, labels=None)
    known = (view.private_init or {}) if view.round == 0 else {}
    private = {name: known[name] for name in view.private}
    scoring = _likelihood if _images(view) == 1 and view.threat.knows_defense else _direction
    score, scores = None, list[float]()
    for image in (truth, *others):
        candidate = Candidate(image[None].to(view.device, view.dtype), labels, private)
        try:
            sent = _sent(alone, candidate)
        except REPLAY_ERRORS as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            return f"a step on one image alone can't be computed ({reason})"
        score = score or scoring(view.update, sent)
        scores.append(score(sent))
        del sent  # or it would be there beside the next
    return _first([-one for one in scores])


def replay_obstacle(view: ServerView) -> str:
    """Return why an attacker can't compute what single images would have sent, or nothing where it can."""
    known = (view.private_init or {}) if view.round == 0 else {}
    if lacking := [name for name in view.private if name not in known]:
        return f"updates depend on what the client keeps to itself ({lacking[0]}), so nobody else can compute them"
    if view.parts:
        return f"the update is the mean of {len(view.parts)} clients"
    if view.schedule is None:
        return "the number of local steps is unknown"
    if (steps := sum(map(len, view.schedule))) != 1:
        return f"it takes one local step, got {steps}: what was fed before moves the weights"
    if not view.update:
        return "nothing is sent"
    if overrides(view.defense, "transform_batch"):
        return f"the defense {view.defense.name} changes the images before they are fed"
    return ""


def _sent(view: ServerView, candidate: Candidate) -> Tensors:
    with torch.no_grad():
        return predict(view, candidate)


def _ones(schedule: Schedule | None) -> Schedule:
    """Return the schedule with the same steps on one image each."""
    return tuple(tuple(tuple(1 for _ in step) for step in steps) for steps in schedule or ())


def _images(view: ServerView) -> int:
    """Return how many images the view's one step takes."""
    return sum(sum(step) for steps in view.schedule or () for step in steps)


def _likelihood(observed: Tensors, origin: Tensors) -> Callable[[Tensors], float]:
    """Score updates g_z by <g, g_z> - |g_z|^2 / 2 in float64: -|g - g_z|^2 / 2 but for what all have in common.

    Under noise |g|^2 is so much larger than what tells candidates apart that rounding it would decide. That is why all
    is counted from one candidate's update too, the origin: what decay does to 15 million weights cancels there.
    """
    far = map_values(add_scaled(observed, origin, -1.0), Tensor.double)

    def score(one: Tensors) -> float:
        step = map_values(add_scaled(one, origin, -1.0), Tensor.double)
        return sum(float(inner(far[name], value)) - float(inner(value, value)) / 2 for name, value in step.items())

    return score


def _direction(observed: Tensors, _: Tensors) -> Callable[[Tensors], float]:
    """Score updates by the cosine of their angle to the observed one."""
    return partial(_cosine, observed)


def _cosine(observed: Tensors, one: Tensors) -> float:
    """Return the cosine of the angle between two updates; 0 where one of them is zero."""
    size = float(norm({n: observed[n] for n in one})) * float(norm(one))
    return sum(float(inner(observed[n], one[n])) for n in one) / size if size else 0.0


def _first(distances: Sequence[float]) -> bool:
    """Return whether the first of some distances is the smallest; a tie is none."""
    return all(distances[0] < other for other in distances[1:])
