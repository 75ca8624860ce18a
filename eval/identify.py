"""Whether an attack tells a client's image from others of its class: a measure of leakage that needs no eye.

Among N candidates of one class, the true image and N - 1 that the client does not hold, which is meant? Without the
update nobody names the true one more often than once in N; labels alone do not help. Under record-level differential
privacy `eval.rero` bounds how often anybody can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.assignment import pairwise_mse
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import combine, norm
from fl.types import Batch, Candidate, ServerView

CANDIDATES = 50
"""How many there are, the true image among them, where there are so many of its class."""


def distractors(reference: Batch, label: int, truth: Tensor, *, count: int = CANDIDATES - 1, seed: int = 0) -> Tensor:
    """Images of a class that are not the true one (to 8 bits), drawn at random; fewer where there are no more.

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


def in_pixels(reconstruction: Tensor, truth: Tensor, others: Tensor) -> bool:
    """Whether the true image is the closest one to the reconstruction by MSE; a tie is none.

    Args:
        reconstruction: (C, H, W).
        truth: (C, H, W).
        others: (N - 1, C, H, W).
    """
    if not bool(reconstruction.isfinite().all()):
        return False
    shown = torch.cat([truth[None].to(others), others])
    distance = pairwise_mse(shown, reconstruction[None].to(others))[:, 0]
    return bool((distance[0] < distance[1:]).all())


def in_gradients(view: ServerView, candidates: Sequence[Candidate]) -> int:
    """Which candidate's update is likeliest under Gaussian noise of one size: the closest to the observed one.

    The strongest of all tests where the noise of a single step is all that hides the image, and where nothing private
    is unknown: each candidate brings its own private tensors. It maximises <g, g_z> - |g_z|^2 / 2.
    """
    scores = []
    for candidate in candidates:
        with torch.no_grad():
            rest = combine(view.update, predict(view, candidate), -1.0)
        scores.append(float(norm(rest)))
    return min(range(len(scores)), key=scores.__getitem__)
