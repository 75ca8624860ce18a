"""Networks that take brightness or contrast off each picture before their first layer, and what that leaves of it.

What the layer is given is a * picture + b then, with numbers a > 0 and b of each picture's own: b = 0 where the picture
is divided by its length, largest number or mean; both are open where it is standardized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.network.layer_chain import trace_view
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.result import NotApplicable
from fl.seeds import stream
from fl.view import ServerView

PICTURES = 8
"""Random pictures of which it is asked what the layer is given."""
LEFT = 1e-9
"""What is rounding, relative to what the layer is given, and of a shift to the largest."""
SHADES = (0.3, 0.8)
"""Contrasts of these pictures, in turn."""
DARKER, ADDED, SAME = 0.7, 0.1, 0.01
"""What a picture is multiplied by, and what is added to it, and how little that may change of what the layer is given.
Small numbers that keep a network from dividing by zero do."""


@dataclass(frozen=True)
class PictureScale:
    """What is open of a picture that a layer tells.

    Attributes:
        shifted: whether a number that is added to all pixels is open as well, and not a factor alone.
    """

    shifted: bool

    def fit(self, features: Tensor) -> Tensor | None:
        """Return the picture (n,) as bright, and with as much contrast, as pixels in [0, 1] can have; None of none.

        Args:
            features: what the layer is given (n,).
        """
        low = features.amin() if self.shifted else features.new_zeros(())
        high = features.amax()
        if not bool(high > low) or bool(features.amin() < low - LEFT * high.abs()):
            return None
        return ((features - low) / (high - low)).clamp(0, 1)


def read_picture_scale(view: ServerView, weight: str) -> PictureScale | None:
    """Return what is open of a picture behind what the layer of a weight is given, or None where it is no such one.

    Args:
        view: the server's.
        weight: its name in the update.
    """
    found = trace_view(view, view.device)
    if isinstance(found, NotApplicable):
        return None
    graph = found[1]
    count = graph.image.numel()
    taken = {
        ref
        for number in graph.used_operations()
        if weight in (node := graph.nodes[number]).sources
        for ref in node.refs
        if graph.depends_on_image(ref) and ref != Ref(IMAGE) and graph.value(ref).numel() == count
    }
    if len(taken) != 1:
        return None
    (end,) = taken
    pairs = [_fit(graph, end, number) for number in range(PICTURES)]
    fits = [pair for pair in pairs if pair is not None]
    if len(fits) < PICTURES:
        return None
    factors, shifts = torch.stack(fits).T
    alike = bool((factors - factors[0]).abs().max() <= LEFT * factors[0].abs())
    if alike or not bool((factors > 0).all()):  # of one factor for all it is no scale of the picture's own
        return None
    shifted = bool(shifts.abs().max() > LEFT * factors.max())
    picture = _picture(graph, 0)
    before, after = (_given(graph, end, one) for one in (picture, DARKER * picture + ADDED * shifted))
    if before is None or after is None or bool((after - before).norm() > SAME * before.norm()):
        return None  # what it is given tells the scale
    return PictureScale(shifted)


def _picture(graph: Graph, number: int) -> Tensor:
    draw = torch.rand(graph.image.shape, generator=stream(number, "picture scale"), dtype=torch.float64)
    return (SHADES[number % len(SHADES)] * draw).to(graph.image)


def _given(graph: Graph, end: Ref, picture: Tensor) -> Tensor | None:
    """Return what a tensor (n,) is of a picture; None where trained parameters stand between."""
    nodes = [n for n in graph.operations_behind(end) if graph.nodes[n].flows]
    if any(graph.nodes[n].sources & graph.parameters for n in nodes):
        return None
    return graph.replay(nodes, end, {Ref(IMAGE): picture}).flatten()


def _fit(graph: Graph, end: Ref, number: int) -> Tensor | None:
    """Return factor and shift (2,) by which a tensor is made of a random picture, or None where it is not so."""
    picture = _picture(graph, number)
    given = _given(graph, end, picture)
    if given is None or not bool(given.isfinite().all()):
        return None
    columns = torch.stack([picture.flatten(), torch.ones_like(given)], 1)
    pair = torch.linalg.lstsq(columns, given[:, None]).solution[:, 0]
    return pair if bool((columns @ pair - given).norm() <= LEFT * given.norm()) else None
