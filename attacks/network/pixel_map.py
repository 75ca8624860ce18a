"""Whether pictures are told by what a network makes of them below its first parameters.

An update depends on a picture x by way of what the operations with parameters are given alone. Below them a network may
compute something of pixels, P(x): normalize, crop, resize, take a power. Where P folds (an absolute value, a square of
what is centered, rounding), other pictures make the same update, to the last digit. Where P is affine on the range of
pixels, linear algebra says which pictures do. Where P takes each pixel by itself and rises or falls all the way, none
other does. Of anything else nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.network.layer_chain import trace_view
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.result import NotApplicable
from fl.seeds import stream
from fl.view import ServerView

LEVELS = 256
"""At which a pixel's own function is looked at."""
MAX_ROUNDING = 1e-9
"""What is rounding, relative to the largest number that comes out."""
PAIRS = 3
"""Pairs of pictures by which it is asked whether a function is affine."""

Function = Callable[[Tensor], Tensor]
"""Of pictures (N, C, H, W), as (N, n)."""


@dataclass(frozen=True)
class PixelMap:
    """What a network's first parameters are given of a picture.

    Attributes:
        folds: whether several pictures may be one to them.
        numbers: of affine functions of the pixels among what they are given, at most as many as there are pixels.
    """

    folds: bool
    numbers: int


def read_pixel_map(view: ServerView) -> PixelMap | None:
    """Return what the operations with parameters are given of a picture, or None where the network can't be traced.

    Nothing folds where one of them is given the pixels, or what rises or falls with each of them alone, or where they
    are given at least as many affine functions of the pixels as there are pixels.
    """
    found = trace_view(view, view.device)
    given = [] if isinstance(found, NotApplicable) else _given_first(found[1])
    if isinstance(found, NotApplicable) or not given:
        return None
    graph, pixels = found[1], found[1].image.numel()
    if Ref(IMAGE) in given:
        return PixelMap(False, pixels)
    maps = [_map_to(graph, ref) for ref in given]
    affine = sum(graph.value(ref).numel() for ref, made in zip(given, maps, strict=True) if _is_affine(made, graph))
    told = affine >= pixels or any(_tells_each_pixel(made, graph.image) for made in maps)
    return PixelMap(not told, min(affine, pixels))


def _given_first(graph: Graph) -> list[Ref]:
    """Return what operations with parameters are given of the image that no other such operation has been given."""
    above, given = set[int](), dict[Ref, None]()
    for number in graph.used_operations():
        node = graph.nodes[number]
        flowing = [ref for ref in node.refs if graph.depends_on_image(ref)]
        below = [ref for ref in flowing if ref.node not in above]
        if node.sources & graph.parameters:
            given |= dict.fromkeys(below)
        if node.sources & graph.parameters or len(below) < len(flowing):
            above.add(number)
    return list(given)


def _map_to(graph: Graph, end: Ref) -> Function:
    """Return what leads from the image to a tensor, as a function."""
    nodes = graph.operations_behind(end)
    return lambda pictures: torch.stack(
        [graph.replay(nodes, end, {Ref(IMAGE): one[None]}).flatten() for one in pictures]
    )


def _is_affine(made: Function, graph: Graph) -> bool:
    """Return whether a function of pictures is affine, as far as random ones in [0, 1] tell."""
    ends = _random_pictures(graph.image, 2 * PAIRS)
    one, other = made(ends[:PAIRS]), made(ends[PAIRS:])
    middle = made((ends[:PAIRS] + ends[PAIRS:]) / 2)
    return bool(((one + other) / 2 - middle).abs().max() <= MAX_ROUNDING * middle.abs().max().clamp(min=1))


def _tells_each_pixel(made: Function, image: Tensor) -> bool:
    """Return whether a function gives a number for each pixel, which rises or falls with that one alone."""
    picture, other = _random_pictures(image, 2)
    changed = torch.rand(image[0].numel(), generator=stream(1, "pixel map")) < 0.5
    mixed = torch.where(changed.view_as(picture).to(image.device), other, picture)
    first, second = made(torch.stack([picture, mixed]))
    if first.numel() != picture.numel() or bool(((first != second).cpu() != changed).any()):
        return False
    previous, direction = None, None
    for level in range(LEVELS):
        value = made(torch.full_like(picture, level / (LEVELS - 1))[None])[0]
        if previous is not None:
            sign = (value - previous).sign()
            direction = sign if direction is None else direction
            if bool((sign == 0).any()) or not torch.equal(sign, direction):
                return False
        previous = value
    return True


def _random_pictures(image: Tensor, count: int) -> Tensor:
    drawn = torch.rand(count, *image.shape[1:], generator=stream(0, "pixel map"), dtype=torch.float64)
    return drawn.to(image)
