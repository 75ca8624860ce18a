"""Recognizes batch normalization in training mode in a traced network, by what it does to numbers.

A normalization takes what a convolution returns and gives, for each channel, gamma (z - mean z) / sqrt(var z + eps) +
beta, with mean and variance over all positions of all images. Which operations make it up, and how they are called,
does not count. Nor do the names of buffers: which of them keep a normalization's statistics is told by how they move
on a batch of noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.network.operation_trace import MODEL_ERRORS, Graph, Ref
from attacks.search_control import check_time_limit
from attacks.update.returned_buffers import predict_buffers
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

PROBE_SIZES = 1.0, 0.1, 1e-2
"""Sizes of the probes: where they are small, the number that is added to the variance shows."""
MIN_GROWTH = 1.5
"""How many times steeper the smallest probe must come out, at least: one in evaluation mode does not."""
TOLERANCE = 1e-8
"""Relative error up to which what an operation makes of probes is a normalization of them."""
STATISTICS_TOLERANCE = 1e-6
"""Relative error up to which a buffer keeps a statistic."""


@dataclass(frozen=True)
class TracedNormalization:
    """Batch normalization in training mode behind a convolution.

    Attributes:
        convolution: its operation.
        returned: y.
        gamma: (C,).
        beta: (C,).
        eps: added to the variance.
        gamma_name: of the parameter whose gradient was sent; empty where there is none.
        beta_name: likewise.
    """

    convolution: int
    returned: Ref
    gamma: Tensor
    beta: Tensor
    eps: float
    gamma_name: str
    beta_name: str


def find_normalizations(network: NetworkGraph) -> dict[int, TracedNormalization]:
    """Return batch normalizations in training mode, by the operation of the convolution below them."""
    found = (_find_normalization(network, number) for number in network.layers)
    return {one.convolution: one for one in found if one is not None}


def _find_normalization(network: NetworkGraph, number: int) -> TracedNormalization | None:
    """Return the normalization that alone takes what a convolution returns, with all operations that belong to it."""
    check_time_limit()
    taken, found = Ref(number), None
    like = network.graph.value(taken)
    if like.ndim != 4 or like.numel() == like.shape[1]:
        return None
    before = set(network.graph.operations_behind(taken))
    for returned, inner in _private_tensors(network, taken):
        if network.graph.value(returned).shape == like.shape and _is_only_way(network, inner, returned):
            nodes = tuple(n for n in network.graph.operations_behind(returned) if n not in before)
            found = _as_normalization(network, _Passage(network.graph, nodes, taken, returned)) or found
    return found


def _private_tensors(network: NetworkGraph, start: Ref) -> Iterator[tuple[Ref, set[Ref]]]:
    """Yield tensors made of `start` alone, up to the next layer or activation, and all tensors on the way to them."""
    inner = {start}
    for number in network.used:
        flows = network.flows_into(number)
        if number <= start.node or not flows or not inner.issuperset(flows):
            continue
        if number in network.layers or number in network.activations:
            continue
        yield Ref(number), set(inner)
        inner |= {Ref(number, k) for k in range(len(network.graph.nodes[number].outputs))}


def _is_only_way(network: NetworkGraph, inner: set[Ref], end: Ref) -> bool:
    """Return whether nothing but what leads to `end` takes the inner tensors."""
    behind = set(network.graph.operations_behind(end))
    return all(user in behind for ref in inner for user in network.consumers.get(ref, []))


@dataclass(frozen=True)
class _Passage:
    """Operations that lead from one tensor to another."""

    graph: Graph
    nodes: tuple[int, ...]
    taken: Ref
    returned: Ref

    def run(self, values: Tensor, parameters: Mapping[Ref, Tensor] | None = None) -> Tensor:
        """Return what is made of other values, and of other parameters."""
        return self.graph.replay(self.nodes, self.returned, {self.taken: values, **(parameters or {})})

    def parameters(self) -> list[Ref]:
        """Return the parameters and buffers that the operations take."""
        return list(dict.fromkeys(ref for n in self.nodes for ref in self.graph.nodes[n].refs if ref.node < -1))


def _as_normalization(network: NetworkGraph, passage: _Passage) -> TracedNormalization | None:
    like = network.graph.value(passage.taken)
    draw = torch.randn(like.shape, generator=stream(0, "normalization"), dtype=torch.float64).to(like)
    try:
        with torch.no_grad():
            fits = [_fit_channels(size * draw, passage.run(size * draw)) for size in PROBE_SIZES]
            wide, middle, small = fits
            if wide is None or middle is None or small is None:
                return None
            one, other = wide.slope.square().reciprocal(), small.slope.square().reciprocal()  # (var + eps) / gamma^2
            gamma = ((wide.variance - small.variance) / (one - other)).sqrt() * wide.slope.sign()
            eps = (other * gamma.square() - small.variance).clamp_min(0)
            told = gamma / (middle.variance + eps).sqrt()
            grows = bool((small.slope.abs() > MIN_GROWTH * wide.slope.abs()).all())
            if not grows or not _agree(told, middle.slope) or float(eps.max() - eps.min()) > TOLERANCE:
                return None
            if float((wide.middle - small.middle).abs().max()) > TOLERANCE * float(gamma.abs().max()):
                return None
            names = _parameter_names(network, passage, draw)
    except MODEL_ERRORS:
        return None
    number = passage.taken.node
    return TracedNormalization(number, passage.returned, gamma, wide.middle, float(eps.median()), *names)


@dataclass(frozen=True)
class _ChannelFit:
    """What comes out of each channel as an affine function of what goes in.

    Attributes:
        slope: (C,).
        middle: (C,), what comes out for the mean of what goes in.
        variance: (C,), of what goes in.
    """

    slope: Tensor
    middle: Tensor
    variance: Tensor


def _fit_channels(given: Tensor, made: Tensor) -> _ChannelFit | None:
    """Return the affine function of each channel, or None where there is none that rises or falls."""
    centered = given - given.mean((0, 2, 3), keepdim=True)
    variance = centered.square().mean((0, 2, 3))
    middle = made.mean((0, 2, 3))
    slope = (centered * made).mean((0, 2, 3)) / variance
    expected = slope[:, None, None] * centered + middle[:, None, None]
    return _ChannelFit(slope, middle, variance) if _agree(made, expected) and bool((slope != 0).all()) else None


def _agree(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    size = float(torch.maximum(one.abs(), other.abs()).max())
    return float((one - other).abs().max()) <= tolerance * size


def _parameter_names(network: NetworkGraph, passage: _Passage, draw: Tensor) -> tuple[str, str]:
    """Return the names of gamma and beta, where their gradients were sent; empty where they were not."""
    gamma, beta = "", ""
    before = passage.run(draw)
    channels = draw.shape[1]
    centered = draw - draw.mean((0, 2, 3), keepdim=True)
    for ref in passage.parameters():
        name, value = network.graph.sources[ref.node], network.graph.value(ref)
        if name not in network.gradient or value.numel() != channels:
            continue
        change = torch.randn(channels, generator=stream(1, "normalization"), dtype=torch.float64).to(value)
        moved = passage.run(draw, {ref: value + change.view_as(value)}) - before
        share = moved / change[:, None, None]
        if _agree(share, torch.ones_like(share)):
            beta = name
        elif (fit := _fit_channels(draw, share)) is not None and _agree(fit.slope[:, None, None] * centered, share):
            gamma = name
    return gamma, beta


# ---------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class BatchStatistics:
    """Statistics that the network's buffers keep, told by a batch of noise.

    Attributes:
        of_noise: what each buffer was moved towards by the noise.
        of_client: likewise by the client's batch.
    """

    of_noise: tuple[Tensor, ...]
    of_client: tuple[Tensor, ...]

    def find(self, statistic: Tensor) -> Tensor | None:
        """Return the client's statistic in the place of one of the noise (C,), or None where no buffer keeps it."""
        for noise, client in zip(self.of_noise, self.of_client, strict=True):
            if noise.numel() == statistic.numel() and _agree(noise.flatten(), statistic, STATISTICS_TOLERANCE):
                return client.flatten()
        return None

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return mean and biased variance of the client's batch where the noise has these values (B, C, h, w)."""
        count = values.numel() // values.shape[1]
        mean = self.find(values.mean((0, 2, 3)))
        variance = values.var((0, 2, 3), unbiased=False)
        if (biased := self.find(variance)) is None and count > 1:
            unbiased = self.find(variance * count / (count - 1))
            biased = None if unbiased is None else unbiased * (count - 1) / count
        return None if mean is None or biased is None else (mean, biased)


def read_statistics(view: ServerView, images: Tensor) -> BatchStatistics:
    """Return the statistics of the client's batch that came back with the buffers.

    Buffers move by b <- (1 - t) b + t s towards the statistics s of a batch. The network is run twice on a batch of
    noise, the second with buffers larger by one: that tells t, and s of the noise.

    Args:
        view: in which buffers came back.
        images: noise, as many as the client has images.
    """
    assert view.buffers_after is not None
    after, raised = (predict_buffers(view, images, more) for more in (0.0, 1.0))
    of_noise, of_client = [], []
    for name, moved in after.items():
        kept = (raised[name] - moved).mean()
        if not 0 <= float(kept) < 1:
            continue
        old, sent = (dense(buffers[name]).to(moved) for buffers in (view.buffers, view.buffers_after))
        of_noise.append((moved - kept * old) / (1 - kept))
        of_client.append((sent - kept * old) / (1 - kept))
    return BatchStatistics(tuple(of_noise), tuple(of_client))
