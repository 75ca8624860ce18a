"""What a guess scores that has no information about the client: no figure is read without it.

Guesses, each of them scored by every metric (see `eval.metrics.score`):

- `mean`: one color everywhere, the true image's own mean color; the best any constant picture can do, so an upper
  bound on what an attack that recovers no structure reaches.
- `gray`: 0.5 everywhere.
- `noise`: uniform noise, from the seed given.
- `nearest`: the image of a reference set that is closest to the truth by MSE. The choice is made with the truth, so
  it bounds what an attacker scores who only hands out pictures he had before. The reference set stands for the
  attacker's auxiliary data and must not contain the client's images; exact copies of a true image (to 8 bits) are left
  out.
- `public`: of an attack that has public images, their mean or that of one of their classes, whichever is closest to the
  truth. A network that was trained on them shows it where the update tells it nothing, or no more than the label.

And the opposite, `bound`: the best that is known of what an attack's own parametrization could show of an image, which
takes the truth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.base import Attack, Chain
from attacks.gradient_matching.engine.search_space import UpsampledSpace
from attacks.gradient_matching.rog import ROG
from fl.seeds import stream
from fl.types import Batch

_CHUNK = 256


def baseline_images(
    truth: Tensor, *, reference: Tensor | None = None, public: Tensor | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return the uninformed guesses by name, each of the truth's shape (N, C, H, W), in [0, 1].

    Args:
        truth: (N, C, H, W) in [0, 1].
        reference: (R, C, H, W) in [0, 1]; without it there is no `nearest`.
        public: means (M, C, H, W) of the attack's public images; without them there is no `public`.
        seed: of the noise.
    """
    found = {
        "mean": truth.mean((2, 3), keepdim=True).expand_as(truth),
        "grey": torch.full_like(truth, 0.5),
        "noise": torch.rand(truth.shape, generator=stream(seed, "eval/floors/noise")).to(truth),
    }
    if reference is not None:
        found["nearest"] = reference[nearest_reference(truth, reference)].to(truth)
    if public is not None:
        distances = torch.cdist(truth.detach().double().flatten(1), public.to(truth.device).double().flatten(1))
        found["public"] = public.to(truth)[distances.argmin(1)]
    return found


def mean_images(images: Batch | None) -> Tensor | None:
    """Return the mean of public images, and of each of their classes: (1 + classes, C, H, W); None without images."""
    if images is None or not len(images):
        return None
    inputs, labels = images.inputs.detach(), images.labels
    classes = labels.unique().tolist() if labels.ndim == 1 else []
    groups = [inputs, *(inputs[labels.to(inputs.device) == label] for label in classes)]
    sums = [torch.stack([part.double().sum(0) for part in own.split(_CHUNK)]).sum(0) for own in groups]
    return torch.stack([total / len(own) for total, own in zip(sums, groups, strict=True)])


def nearest_reference(truth: Tensor, reference: Tensor) -> Tensor:
    """Return index (N,) int64 of the reference image closest to each true one by 8-bit MSE, exact copies aside.

    Raises:
        ValueError: the images have different shapes, or the reference set holds nothing but copies of a true image.
    """
    if reference.ndim != 4 or reference.shape[1:] != truth.shape[1:]:
        raise ValueError(
            f"expected a reference set (R, C, H, W) of the truth's shape {tuple(truth.shape[1:])}, "
            f"got {tuple(reference.shape)}"
        )
    levels = _levels(truth)
    norms = _squares(levels)[:, None]
    best = torch.full((len(truth),), torch.inf, dtype=torch.float64, device=truth.device)
    index = torch.zeros(len(truth), dtype=torch.int64, device=truth.device)
    for start in range(0, len(reference), _CHUNK):
        others = _levels(reference[start : start + _CHUNK].to(truth.device))
        # whole numbers, so that this form of the squared distance loses nothing in double precision
        distance = norms + _squares(others) - 2 * (levels @ others.T)
        value, position = distance.masked_fill(distance == 0, torch.inf).min(1)
        closer = value < best
        best = torch.where(closer, value, best)
        index = torch.where(closer, position + start, index)
    if best.isinf().any():
        lonely = int(best.isinf().nonzero()[0])
        raise ValueError(f"expected a reference image other than true image {lonely}, got none in {len(reference)}")
    return index.to(reference.device)


def best_decodable(truth: Tensor, factor: int) -> Tensor:
    """Return the bound of `rog` with bicubic codes: the closest image of any code that a descent finds.

    An oracle, never part of an attack. Codes may leave [0, 1], only images are clamped; see `UpsampledSpace.project`
    for why a closer one is not ruled out.

    Args:
        truth: (N, C, H, W) in [0, 1].
        factor: the attack's.

    Returns:
        Images of the truth's shape, clamped to [0, 1].
    """
    height, width = truth.shape[-2:]
    return UpsampledSpace(factor, (height, width)).project(truth).clamp(0, 1).to(truth)


def representable_bound(attack: Attack, truth: Tensor) -> Tensor | None:
    """Return the best known images that an attack limited by its codes could show, without a sharpening network.

    Args:
        attack: or a chain that ends in it.
        truth: (N, C, H, W) in [0, 1].
    """
    while isinstance(attack, Chain):
        attack = attack.then
    if not isinstance(attack, ROG) or attack.factor == 1 or attack.decoder is not None or attack.enhancer is not None:
        return None
    return best_decodable(truth, attack.factor)


def _levels(images: Tensor) -> Tensor:
    """Return pixels as 8 bits have them, 0 to 255: (N, C * H * W) float64."""
    return (images.detach().clamp(0, 1) * 255).round().double().flatten(1)


def _squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each row."""
    return torch.einsum("id,id->i", rows, rows)
