"""GradInversion: gradients, batch-norm statistics and the agreement of several searches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from attacks.base import Preset, Reconstruction, attacks
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import INPUTS, MatchingProblem, Variables
from attacks.gradient_matching.engine.regularizers import Regularizer
from attacks.update.training_phases import training_phases
from fl.client import Client
from fl.ranges import Count, CountFrom0, Weight
from fl.tensors import Tensors
from fl.types import Candidate
from fl.view import ServerView

Moments = dict[str, tuple[Tensor, Tensor]]
"""Mean and variance per channel of what a batch norm is given, by the layer's name."""


LONG_SEARCH: dict[str, Any] = {
    "iterations": 20_000,
    "objective": "l2",
    "signed": False,
    "first_layer_factor": 10.0,
    "tv_weight": 1e-4,
}
"""What the published presets have in common."""


@attacks.register("gradinversion")
@dataclass(frozen=True, kw_only=True)
class GradInversion(GradientMatching):
    """GradInversion (Yin et al., CVPR 2021): several searches that pull each other towards their mean.

    With observed update u and batch-norm statistics m_l, v_l of layer l, each restart minimizes over images x

        d(update(x), u) + tv_weight TV(x) + energy_weight mean(x^2) + group_weight mean((x - consensus)^2)
            + statistics_weight sum_l f_l (|mean_l(x) - m_l| + |var_l(x) - v_l|),

    where the consensus is that of all restarts of one view, and f_l is 1 but in the first layer
    (`first_layer_factor`); noise is added to every step. The paper takes squared distances and plain Adam;
    directions and signed steps find more on small networks, so they are the defaults. The weights are
    relative to the update's own size, and so not the paper's.

    Threat model: that of `IG`, and batch-norm statistics come from shared buffers. Where the server sees them after
    a client trained in train mode, they give the very statistics of its batch (of several steps, their weighted
    mean); else they are the running ones, as in the paper. A network without batch norm, or whose buffers are not
    shared, is attacked without the term, and so are running statistics that no training has moved yet; `knowledge`
    says which ones were used.

    It differs from the paper in the registration: where the paper aligns the searches by RANSAC-flow, which takes a
    trained network, here each is moved by a whole number of pixels at most, round the border. Labels are recovered
    as by every search, and are not assumed to be all different. Where those of a batch have to be searched for, the
    searches go alone: nothing says which image of one is which of another. Where the order of the batches is unknown,
    all searches take the likeliest one; with one each, their consensus was further from the images.

    Attributes:
        iterations: of the search.
        restarts: searches that agree with each other; the one with the smallest objective is the result.
        energy_weight: weight of the mean square of the images in normalized units.
        statistics_weight: weight of the batch-norm statistics' distance.
        first_layer_factor: factor on that of the first batch norm.
        group_weight: weight of the mean squared distance to the consensus.
        max_shift: farthest shift in pixels when the searches are aligned; 0 takes their mean pixel by pixel.
    """

    images_only: ClassVar[bool] = True
    plain: ClassVar[str] = (
        "runs several searches that agree on one picture, and checks it against the averages the network keeps."
    )
    coupled_restarts: ClassVar[bool] = True
    former_names: ClassVar[Mapping[str, str]] = {
        "energy": "energy_weight",
        "statistics": "statistics_weight",
        "first": "first_layer_factor",
        "group": "group_weight",
        "register": "max_shift",
    }
    presets: ClassVar[dict[str, Preset]] = {
        "published": Preset(
            "Yin et al., CVPR 2021: length, warm-up and noise of the search; the weights are in other units",
            LONG_SEARCH | {"langevin": 0.2},
        ),
        "breaching": Preset(
            "breaching 0.1.2, `seethroughgradients`: one search, less noise",
            LONG_SEARCH | {"restarts": 1},
        ),
    }

    iterations: Count = 2000
    restarts: Count = 4
    schedule: Literal["step", "cosine", "none"] = "cosine"
    warmup: CountFrom0 = 50
    langevin: Weight = 0.01
    tv_weight: Weight = 1e-2
    energy_weight: Weight = 1e-6
    statistics_weight: Weight = 1e-3
    first_layer_factor: Weight = 1.0
    group_weight: Weight = 0.01
    max_shift: CountFrom0 = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("energy_weight", "statistics_weight", "first_layer_factor", "group_weight", "max_shift"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} >= 0 and finite, got {getattr(self, name)}")
        if self.success_threshold:
            raise ValueError(
                f"expected success_threshold=0, since all searches run side by side, got {self.success_threshold}"
            )

    def regularizers(self, view: ServerView) -> tuple[Regularizer, ...]:
        """Return the images' energy, and the batch-norm statistics where the server knows any."""
        terms: list[Regularizer] = [ImageEnergy(weight=self.energy_weight)] if self.energy_weight else []
        if self.statistics_weight and known_moments(view):
            terms.append(BatchNormStatistics(weight=self.statistics_weight, first=self.first_layer_factor))
        return tuple(terms)

    def batch_capacity(self) -> int:
        """Return the trials of as many whole views as fit; a view's searches are never parted."""
        return max(1, self.max_parallel_trials // self.restarts) * self.restarts

    def evaluate_batch(self, batch: ProblemBatch, variables: Variables) -> tuple[Tensor, Variables]:
        """Add the distance to the consensus, which is held fixed as in the paper; for the mean that is exact."""
        values, grads = batch.evaluate(variables)
        if not self.group_weight:
            return values, grads
        rows: dict[int, list[int]] = {}
        for row, problem in enumerate(batch.problems):
            assert isinstance(problem, MatchingProblem)
            if problem.labels is not None or variables[INPUTS].shape[1] == 1:
                rows.setdefault(id(problem), []).append(row)
        for mine in rows.values():
            guesses = variables[INPUTS][mine]
            apart = guesses - consensus(guesses, self.max_shift)
            values[mine] += self.group_weight * apart.square().flatten(1).mean(1)
            grads[INPUTS][mine] += 2 * self.group_weight * apart / apart[0].numel()
        return values, grads

    def build_result(
        self, problem: MatchingProblem, row: Variables, objective: float, history: tuple[float, ...]
    ) -> Reconstruction:
        """Return the result of one trial; says which statistics it used."""
        result = super().build_result(problem, row, objective, history)
        if not any(isinstance(term, BatchNormStatistics) for term in problem.regularizers):
            return result
        which = "batch" if has_batch_statistics(problem.view) else "running"
        return replace(result, knowledge=(*result.knowledge, f"batch-norm statistics ({which})"))


def consensus(guesses: Tensor, reach: int) -> Tensor:
    """Return the mean (N, C, H, W) of guesses (G, N, C, H, W), each shifted to fit that mean best.

    The fit is the correlation over all channels; what leaves the image on one side comes back on the other.
    """
    mean = guesses.mean(0)
    if reach == 0:
        return mean
    height, width = mean.shape[-2:]
    spectra = torch.fft.rfft2(guesses - guesses.mean((-2, -1), keepdim=True))
    fit = torch.fft.irfft2(torch.fft.rfft2(mean) * spectra.conj(), s=(height, width)).sum(2)
    near = [torch.arange(side, device=mean.device) for side in (height, width)]
    near = [torch.minimum(x, len(x) - x) <= reach for x in near]
    fit = fit.masked_fill(~(near[0][:, None] & near[1]), -torch.inf)
    shift = fit.flatten(-2).argmax(-1)  # (G, N)
    rows, columns = torch.arange(height, device=mean.device), torch.arange(width, device=mean.device)
    rows = (rows - (shift // width)[..., None]) % height
    columns = (columns - (shift % width)[..., None]) % width
    index = (rows[..., :, None] * width + columns[..., None, :]).flatten(-2)
    moved = guesses.flatten(-2).gather(-1, index[:, :, None].expand(*guesses.shape[:3], -1))
    return moved.view_as(guesses).mean(0)


@dataclass(frozen=True, kw_only=True)
class ImageEnergy:
    """The mean square of the images in normalized units."""

    weight: float

    def constants(self, view: ServerView) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the normalization."""
        return view.task.normalization(torch.empty(0, dtype=view.dtype, device=view.device))

    def __call__(self, view: ServerView, candidate: Candidate, client: Client, constants: Any) -> Tensor:
        """Return the weighted term."""
        mean, std = constants
        return self.weight * ((candidate.inputs - mean) / std).square().mean()


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """How far means and variances before every batch norm are from those the server knows.

    They are taken with the weights the client starts from, over all its images at once.
    """

    weight: float
    first: float

    def constants(self, view: ServerView) -> tuple[Moments, dict[str, Tensor]]:
        """Return what the server knows, and how much each client counts in it."""
        target = known_moments(view)
        return target, {name: each for name, each in client_shares(view).items() if name in target}

    def __call__(self, view: ServerView, candidate: Candidate, client: Client, constants: Any) -> Tensor:
        """Return the weighted term: norms of the differences, summed over the layers."""
        target, weights = constants
        found = candidate_moments(view, candidate, client, weights)
        parts = []
        for i, (name, (mean, variance)) in enumerate(target.items()):
            apart = (found[name][0] - mean).norm() + (found[name][1] - variance).norm()
            parts.append(apart * (self.first if i == 0 else 1.0))
        return self.weight * torch.stack(parts).sum()


def batch_norms(view: ServerView) -> dict[str, _BatchNorm]:
    """Return the layers whose statistics the server has, by name, in the network's order."""
    return {
        name: module
        for name, module in view.client.fixed_statistics_model.named_modules()
        if isinstance(module, _BatchNorm) and f"{name}.running_mean" in view.buffers
    }


def has_batch_statistics(view: ServerView) -> bool:
    """Return whether the statistics are those of the clients' batches, not of all training so far.

    Those of a group are so where it is known how many batches each client fed: all start from the same old ones.
    """
    told = view.schedule is not None or not view.parts
    return view.method.train_mode and view.buffers_after is not None and told


def known_moments(view: ServerView) -> Moments:
    """Return what the server knows of the statistics before every batch norm.

    A running statistic s moves by `s <- (1 - m) s + m b` with every batch's b, so before and after T batches give the
    mean of b with weights (1 - m)^(T - 1 - t); without an m, s is the mean of all batches so far, and b's weights are
    equal. Of a group the server has the weighted mean of what its clients, each after batches of its own, come to.
    """
    found: Moments = {}
    for name, module in batch_norms(view).items():
        keys = [f"{name}.running_{which}" for which in ("mean", "var")]
        before = [view.buffers[key] for key in keys]
        new = sum(_new_statistics_shares(view, name, module))
        if view.buffers_after is None or new == 0:
            if bool(before[0].any()) or bool((before[1] != 1).any()):
                found[name] = (before[0], before[1])
            continue
        after = [view.buffers_after[key] for key in keys]
        mean, variance = (old + (now - old) / new for now, old in zip(after, before, strict=True))
        found[name] = (mean, variance)
    return found


def client_shares(view: ServerView) -> dict[str, Tensor]:
    """Return how much each client (K,) counts in what `known_moments` says of every batch norm; they add up to 1."""
    found: dict[str, Tensor] = {}
    for name, module in batch_norms(view).items():
        new = _new_statistics_shares(view, name, module)
        if sum(new) == 0:  # running statistics: those of a mean client, of whom Poisson sampling may have no image
            new = [part.weight if part.batch_size else 0.0 for part in view.parts] or [1.0]
        each = torch.tensor(new, dtype=view.dtype, device=view.device)
        found[name] = each / each.sum()
    return found


def _new_statistics_shares(view: ServerView, name: str, module: _BatchNorm) -> list[float]:
    """Return the share of a layer's running statistics that each client made in the round; the rest is older.

    A layer that stays in evaluation mode while the network around it trains moves none.
    """
    if not has_batch_statistics(view) or not module.training:
        return [0.0]
    if not view.parts:
        return [_replaced_share(view, name, module, _count_batches(view, name))]
    fed = [sum(size > 0 for phase in p.schedule or () for step in phase for size in step) for p in view.parts]
    return [p.weight * _replaced_share(view, name, module, count) for p, count in zip(view.parts, fed, strict=True)]


def _replaced_share(view: ServerView, name: str, module: _BatchNorm, batches: int) -> float:
    """Return the share that so many batches of one client make of its running statistics."""
    if module.momentum is not None:
        return float(1 - (1 - module.momentum) ** batches)
    old = int(view.buffers.get(f"{name}.num_batches_tracked", torch.tensor(0)))
    return batches / max(old + batches, 1)


def _count_batches(view: ServerView, name: str) -> int:
    """Return how many batches a layer has counted, or how many steps there were where it does not count."""
    counter = f"{name}.num_batches_tracked"
    if view.buffers_after is not None and counter in view.buffers_after and counter in view.buffers:
        counted = int(view.buffers_after[counter] - view.buffers[counter])
        if counted > 0:
            return counted
    return sum(len(steps) for steps in training_phases(view)[1] or ()) or 1


def candidate_moments(view: ServerView, candidate: Candidate, client: Client, weights: Mapping[str, Tensor]) -> Moments:
    """Return means and (as running ones are) unbiased variances of what the layers are given; differentiable.

    Of a group of clients, the mean of theirs, weighed by layer as in `client_shares`.

    Args:
        view: what the server saw.
        candidate: the guess.
        client: whose network it is.
        weights: share of each client (K,) by layer.
    """
    if not view.parts:
        return _client_moments(view, candidate.inputs, candidate.private, client, weights)
    images = candidate.inputs.split([part.batch_size or 0 for part in view.parts], dim=-4)
    found: dict[str, list[Tensor]] = {name: [] for name in weights}
    for i, (part, mine) in enumerate(zip(view.parts, images, strict=True)):
        if not part.batch_size:  # Poisson sampling may have drawn no image
            continue
        prefix = f"part/{i}/"
        private = {n.removeprefix(prefix): v for n, v in candidate.private.items() if n.startswith(prefix)}
        for name, pair in _client_moments(view, mine, private, client, weights).items():
            found[name].append(weights[name][i] * torch.stack(pair))
    return {name: tuple(torch.stack(each).sum(0)) for name, each in found.items()}


def _client_moments(
    view: ServerView, images: Tensor, private: Tensors, client: Client, names: Mapping[str, object]
) -> Moments:
    """Return the moments before every batch norm of one client's images (N, C, H, W) and private tensors."""
    found: Moments = {}

    def keep(name: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        rest = [d for d in range(given[0].ndim) if d != 1]
        count = given[0].numel() // given[0].shape[1]
        found[name] = (given[0].mean(rest), given[0].var(rest, correction=min(1, count - 1)))

    own = client.task.buffers
    params = {k: v for k, v in private.items() if "/" not in k and k not in own}
    buffers = {**own, **view.buffers, **{k: v for k, v in private.items() if k in own}}
    start = client.method.parametrization.lift({**view.shared, **params})
    handles = [
        client.fixed_statistics_model.get_submodule(n).register_forward_pre_hook(partial(keep, n)) for n in names
    ]
    try:
        client.network(start, buffers)(images)  # type: ignore[arg-type]
    finally:
        for handle in handles:
            handle.remove()
    return found
