"""What a linear layer takes, read off an update of one example that was sparsified, or sent in few bits or as signs.

The gradient of a linear layer is an outer product u x^T of what flows back and of what the layer takes (Geiping et al.,
NeurIPS 2020, Prop. 3.1). Compression leaves equations of the same two vectors:

- of numbers that were left out (top-k, random masks), u_i x_j of all that were sent;
- on a grid of steps w, |u_i x_j - q_ij| <= w / 2 (nearest), or w (rounded at random), in every place;
- of signs, sign(u_i) sign(x_j).

There are far more of them than numbers in both vectors, so that solving them proves that there is one x. It is known up
to a factor: compression may treat the bias, which tells it, apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.network.linear_layers import vector_layers
from attacks.result import NotApplicable
from attacks.search_control import check_time_limit
from attacks.update.first_linear_layer import LinearLayer, first_linear
from attacks.update.float_rounding import is_sent_in_float8
from attacks.update.quantization_grids import grid_step, is_of_one_row
from attacks.update.training_phases import adaptive_optimizer_obstacle, training_phases
from attacks.update.update_rule import RuleKind, is_sign_compressed, kind_of_update_rule
from fl.tensors import LowRank, dense
from fl.view import ServerView

MOST_ROWS = 64
"""Rows of a layer, those that moved most, that are looked at for few bits."""
MIN_ROWS = 3
"""That have to move: of two, one direction explains whatever the layer takes under cross entropy."""
MIN_SHARE_LEFT_OUT = 0.02
"""Share of zeros, beside whole rows and columns of zeros, from which numbers were left out."""
MIN_PLACES = 8
"""Steps of the weights' grid below which a number is tiny: of these, rounding to zero leaves more than it takes."""
MOST_LOST, MOST_TINY = 0.5, 0.1
"""Share of the numbers left out that rounding took, by what the others tell; of tiny ones where these tell nothing."""
MIN_SPARE_EQUATIONS, MIN_SPARE_SHARE = 64, 0.25
"""More equations than unknown numbers, and the same as a share of these."""
MAX_LEFT, FIT_ROUNDS = 1e-3, 200
"""Share of the numbers sent that one outer product may leave, and rounds of its fit."""
MOST_LEVELS = 257
"""Values that a tensor sent in up to eight bits has."""
MOST_SAMPLED = 2**16
"""Numbers of a tensor, or a few more, that are asked whether they are on a grid."""
CELL_ROUNDS = 150
"""Rounds of the fit to quantization cells."""
MAX_BEYOND_CELL = 5e-3
"""How far numbers may lie outside their cells, root mean square, in steps of the grid."""
NEARLY_DONE = 1e-3
"""The same distance below which the fit ends."""
ERROR_FACTOR, MAX_ERROR = 3.0, 0.25
"""What is known of an input that was sent in few bits, in units of the rounding's largest singular value relative to
the update's, and up to where it counts as known."""
MIN_SPREAD = 0.02
"""How far the sizes of an input differ, relative to their mean: signs with sizes of rows' own look like equal ones."""
MIN_TOLD_SHARE = 0.05
"""Share of an input's numbers that has to be determined."""
MIN_TOLD = 32
"""Count of an input's numbers that have to be determined."""
MIN_OTHER_SIGN = 0.05
"""Share of an input's numbers that have another sign than most."""
MAX_OTHER_SIGNS = 1e-3
"""Share of signs that may be others than those of the outer product: of numbers that computing left near zero."""


@dataclass(frozen=True)
class CompressedInput:
    """What a layer takes, as far as a compressed update tells.

    Attributes:
        layer: its name.
        is_given_images: whether it takes the image, normalized.
        values: of its input up to one factor (n,), or their signs.
        told: which of them the update tells (n,).
        compression: that was read, in words.
        error: how far the values are off, about, relative to their size.
        signs_only: whether the values are signs.
    """

    layer: str
    is_given_images: bool
    values: Tensor
    told: Tensor
    compression: str
    error: float = 0.0
    signs_only: bool = False


Reading = CompressedInput | NotApplicable | None


def read_compressed_layer(view: ServerView) -> Reading:
    """Return what the first linear layer takes by a compressed update of one step on one example.

    That of SGD, or the first of an adaptive optimizer, which is read for its signs.

    None where nothing shows that the update is compressed, or it is of more. Where it is compressed and tells no input,
    the reason says so.

    Args:
        view: what the server saw, under no defense.

    Raises:
        StoppedError: the time is up (`attacks.search_control`).
    """
    if view.batch_size != 1 or sum(len(phase) for phase in training_phases(view)[1] or ()) != 1:
        return None
    adaptive = adaptive_optimizer_obstacle(training_phases(view)[0]) is not None
    if adaptive or is_sign_compressed(view) or kind_of_update_rule(view) == RuleKind.ADAPTIVE_FIRST_STEP:
        return _read_signs(view)
    if is_sent_in_float8(view):
        return None
    layer = first_linear(view)
    if isinstance(layer, NotApplicable) or layer.steps != 1 or layer.masked:
        return None
    if step := step_of_few_bits(layer.update):
        return _read_levels(layer, step)
    return _read_sparse(layer)


def is_on_grid(view: ServerView) -> bool:
    """Return whether the largest matrix or kernel of an update has few values, evenly spaced.

    Args:
        view: what the server saw.
    """
    matrices = (value for value in view.update.values() if not isinstance(value, LowRank) and value.ndim > 1)
    largest = max(matrices, key=Tensor.numel, default=None)
    if largest is None:
        return False
    sample = largest.flatten()[:: max(1, largest.numel() // MOST_SAMPLED)]
    step = step_of_few_bits(sample)
    return step > 0 and not is_of_one_row(largest, step)


def step_of_few_bits(values: Tensor) -> float:
    """Return the step of the grid of three to `MOST_LEVELS` values that a tensor lies on; 0 where it lies on none."""
    step = grid_step(values, least=2) if values.numel() and bool(values.isfinite().all()) else 0.0
    return step if step and float(values.max() - values.min()) < MOST_LEVELS * step else 0.0


def _read_levels(layer: LinearLayer, step: float) -> CompressedInput | NotApplicable:
    """Return the input whose outer product lies in the cells of all numbers sent."""
    strongest = layer.update.square().sum(1).topk(min(MOST_ROWS, len(layer.update))).indices
    sent = layer.update[strongest]
    levels = round(float((sent.max() - sent.min()) / step)) + 1
    words = f"numbers sent in few bits ({levels} values)"
    if int((sent.abs() > step / 2).any(1).sum()) < MIN_ROWS:
        return NotApplicable(f"{words}, of {layer.name!r} in too few rows")
    for half in (0.5, 1.0):
        right, beyond = _fit_to_cells(sent, half * step)
        if beyond <= MAX_BEYOND_CELL:
            break
    else:
        return NotApplicable(f"{words} that are not those of one input of {layer.name!r}")
    rounding = half * step / 3**0.5 * (sent.shape[0] ** 0.5 + sent.shape[1] ** 0.5)
    error = ERROR_FACTOR * rounding / float(torch.linalg.matrix_norm(sent, 2))
    if error > MAX_ERROR:
        return NotApplicable(f"{words}, too few to tell what {layer.name!r} takes")
    return _told(layer, right, torch.ones_like(right, dtype=torch.bool), words, error)


def _fit_to_cells(sent: Tensor, half: float) -> tuple[Tensor, float]:
    """Return the right factor (n,) of an outer product near cells, and how far that is beyond them, in steps.

    Args:
        sent: the middles of the cells (m, n).
        half: their half width.
    """
    left, size, right = (part[..., 0] for part in torch.svd_lowrank(sent, q=1, niter=4))
    left, beyond = left * size, math.inf
    for _ in range(CELL_ROUNDS):
        check_time_limit()
        made = torch.outer(left, right)
        inside = made.clamp(sent - half, sent + half)
        beyond = float((inside - made).square().mean().sqrt()) / (2 * half)
        if beyond < NEARLY_DONE:
            break
        right = left @ inside / left.square().sum()
        left = inside @ right / right.square().sum()
    return right, beyond


def _read_sparse(layer: LinearLayer) -> CompressedInput | NotApplicable | None:
    """Return the input whose outer product was sent in some places only; None if there is none."""
    rows, columns = layer.update.any(1), layer.update.any(0)
    sent = layer.update[rows][:, columns]
    heard = sent != 0
    if not len(sent) or float((~heard).double().mean()) < MIN_SHARE_LEFT_OUT:
        return None
    spacing = torch.finfo(layer.view.dtype).eps * float(layer.weight.abs().max()) if layer.view.rounded else 0.0
    tiny = heard & (sent.abs() * layer.unit < MIN_PLACES * spacing)
    if int(tiny.sum()) >= int((~heard).sum()):
        return None  # a step so small that the weights' last digit swallows numbers
    share = f"{float((~heard).double().mean()):.0%} of those of {layer.name!r} in what moved"
    words = f"numbers left out ({share})"
    part, told = _largest_component(heard)
    sent, heard = sent[part], heard[part] & told
    spare = int(heard.sum()) - int(part.sum()) - int(told.sum())
    few = int(part.sum()) < MIN_ROWS or spare < max(MIN_SPARE_EQUATIONS, MIN_SPARE_SHARE * int(told.sum()))
    left, right, missed = _fit_sent(sent * heard, heard.double())
    fits = not few and missed <= MAX_LEFT
    lost = (
        torch.outer(left, right)[:, told][~heard[:, told]].abs() * layer.unit < spacing if fits else tiny[part][heard]
    )
    if float(lost.double().mean()) > (MOST_LOST if fits else MOST_TINY):
        return None  # likewise
    if not fits:  # a batch leaves zeros, too
        why = "what was sent is too little to tell" if few else "what was sent is not of one input"
        return NotApplicable(f"zeros where one example leaves none ({share}), as of numbers left out, and {why}")
    values, known = torch.zeros_like(layer.update[0]), torch.zeros_like(columns)
    values[columns], known[columns] = right, told
    return _told(layer, values, known, words)


def _largest_component(heard: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (m,) and columns (n,) that are linked by numbers sent (m, n), beginning at the fullest row.

    What no number links has a factor of its own.
    """
    rows = torch.zeros(len(heard), dtype=torch.bool, device=heard.device)
    rows[int(heard.sum(1).argmax())] = True
    while True:
        columns = heard[rows].any(0)
        reached = heard[:, columns].any(1)
        if torch.equal(reached, rows):
            return rows, columns
        rows = reached


def _fit_sent(sent: Tensor, heard: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return both factors (m,), (n,) of the outer product nearest to numbers sent, and what it leaves of them.

    Args:
        sent: (m, n), zero elsewhere.
        heard: 1 where a number was sent, else 0.
    """
    left, size, right = (part[..., 0] for part in torch.svd_lowrank(sent, q=1, niter=4))
    left, missed, whole = left * size, math.inf, float(sent.norm())
    for _ in range(FIT_ROUNDS):
        check_time_limit()
        left = _ratio(sent @ right, heard @ right.square())
        right = _ratio(left @ sent, left.square() @ heard)
        missed = float((sent - heard * torch.outer(left, right)).norm()) / whole
        if missed < MAX_LEFT / 100:
            break
    return left, right, missed


def _told(
    layer: LinearLayer, values: Tensor, told: Tensor, words: str, error: float = 0.0
) -> CompressedInput | NotApplicable:
    """Return what was read, unless it is too little or as signs make it, too."""
    if int(told.sum()) < max(MIN_TOLD, MIN_TOLD_SHARE * len(told)):
        return NotApplicable(
            f"{words}: they tell {int(told.sum())} of the {len(told)} numbers that {layer.name!r} takes"
        )
    sizes = values[told].abs()
    sizes = sizes[sizes > 0]
    if not len(sizes) or float(sizes.std(correction=0)) < max(MIN_SPREAD, error) * float(sizes.mean()):
        return NotApplicable(f"{words} that look like signs: all that {layer.name!r} seems to take is of one size")
    return CompressedInput(layer.name, layer.is_given_images, values, told, words, error)


def _read_signs(view: ServerView) -> CompressedInput | NotApplicable:
    """Return the signs of what the first linear layer takes, where those of its update are those of one product."""
    words, found = "signs alone", vector_layers(view)
    usable = (one for one in found.layers.values() if one.names["weight"] in view.update and one.factors is None)
    layer = next((one for one in usable if not found.reused & set(one.names.values())), None)
    if layer is None:
        return NotApplicable(f"{words}, of no linear layer that is given one vector")
    signs = layer.arrange("weight", dense(view.update[layer.names["weight"]])).double().sign()
    signs = signs[signs.any(1)]
    if len(signs) < 2 * MIN_ROWS:
        return NotApplicable(f"{words}, of {layer.name!r} in too few rows")
    first = signs[int(signs.abs().sum(1).argmax())]
    turned = (signs @ first).sign()
    other = float((signs != torch.outer(turned, first)).double().mean())
    if other > MAX_OTHER_SIGNS or not bool((turned > 0).any() and (turned < 0).any()):
        return NotApplicable(f"{words} that are not those of one input of {layer.name!r}")
    if float(first.unique(return_counts=True)[1].max()) > (1 - MIN_OTHER_SIGN) * len(first):
        return NotApplicable(
            f"{words}: what {layer.name!r} takes has one sign nearly everywhere, which tells little of it"
        )
    told = torch.ones_like(first, dtype=torch.bool)
    return CompressedInput(layer.name, layer.origin is not None, first, told, words, signs_only=True)


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where(bottom > 0, top / bottom.clamp_min(1e-300), 0.0)
