"""Whether pictures are told by what a network makes of them below the first parameters that an update has.

An update depends on a picture x by way of what operations with trained parameters are given alone. Below them a network
may compute something of pixels, P(x): normalize, crop, resize, take a power. Where each number of P is one pixel's that
rises or falls with it, or affine functions of full rank, P tells x. Where a pixel comes out the same for several values
(an absolute value, rounding), or an affine P has less than full rank (gray, a crop), other pictures make the same
update, to the last digit. Of anything else this does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attacks.network.layer_chain import trace_view
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.result import NotApplicable
from fl.seeds import stream
from fl.view import ServerView

LEVELS = 256
"""Uniform pictures on which a pixel's own function is evaluated."""
MAX_ROUNDING = 1e-9
"""What is rounding, relative to the largest number that comes out."""
DARK = 0.3
"""Largest number of a dark picture; a bright one is 1 less such a number."""
MOST_RANKED = 4096
"""Pixels up to which the rank of an affine map is computed; with more it is taken to be full."""
ALIKE = 1e-6
"""By how much numbers added to channels differ, at most, of length 1 together, where it is one number."""
MOST_ROWS, ADDED_TO = 2, 3
"""Rows of an affine map that are kept, for each pixel, and to how many of these a row is added where there are more."""
GROUPS = 24
"""Random groups of pixels by which it is asked whether a number hangs on one pixel alone."""
LIGHT = 1.02
"""What a picture is multiplied by that stands in more light."""
PAIRS = 3
"""Pairs of pictures by which it is asked whether a function is affine."""

Function = Callable[[Tensor], Tensor]
"""Of pictures (N, C, H, W), as (N, n)."""


@dataclass(frozen=True)
class PixelMap:
    """What a network's first trained parameters are given of a picture.

    Attributes:
        kind: "told" where nothing else comes out the same; "folded" where other values of some pixel do; "fewer" where
            it is fewer affine functions of the pixels than there are pixels; "unknown" of anything else.
        numbers: of pixels, or independent affine functions of them, that are told.
        pixels: bool (C, H, W), those that are told, where "fewer" are single pixels: of a crop; else None.
        shift: where "fewer" are all but numbers that are added to every pixel, whether of the picture or of its
            channels; "" else.
    """

    kind: Literal["told", "folded", "fewer", "unknown"]
    numbers: int = 0
    pixels: Tensor | None = field(default=None, compare=False)
    shift: Literal["", "picture", "channels"] = field(default="", compare=False)


def read_pixel_map(view: ServerView) -> PixelMap:
    """Return what operations with parameters that the update has are given of a picture."""
    found = trace_view(view, view.device)
    given = [] if isinstance(found, NotApplicable) else _given_first(found[1], view.update.keys())
    if isinstance(found, NotApplicable) or not given:
        return PixelMap("unknown")
    graph, pixels = found[1], found[1].image.numel()
    if Ref(IMAGE) in given:
        return PixelMap("told", pixels)
    maps = [_map_to(graph, ref) for ref in given]
    affine = [made for made in maps if _is_affine(made, graph)]
    told, folded = _tell_single_pixels(lambda x: torch.cat([made(x) for made in maps], 1), graph.image)
    if bool(told.all()):
        return PixelMap("told", pixels)
    unshifted = _unseen_shifts(affine, graph.image)
    numbers = _rank(affine, told, graph.image, len(unshifted))
    if numbers == pixels:
        return PixelMap("told", pixels)
    if bool((folded & ~told).any()):
        return PixelMap("folded", int(told.sum()))
    if len(affine) < len(maps):
        return PixelMap("folded" if _takes_for_another(maps, graph.image) else "unknown", numbers)
    if numbers == int(told.sum()):
        return PixelMap("fewer", numbers, told.view(graph.image.shape[1:]))
    if len(unshifted) < pixels - numbers:
        return PixelMap("fewer", numbers)
    alike = len(unshifted) == 1 and torch.allclose(unshifted[0], unshifted[0, :1], atol=ALIKE)
    return PixelMap("fewer", numbers, shift="picture" if alike else "channels")


def gray_picture(view: ServerView) -> Tensor | None:
    """Return the picture (1, C, H, W) for which the first trained parameters are given zeros.

    None where they are not given one affine function of each pixel.
    """
    found = trace_view(view, view.device)
    given = [] if isinstance(found, NotApplicable) else _given_first(found[1], view.update.keys())
    if isinstance(found, NotApplicable) or len(given) != 1:
        return None
    image, made = found[1].image, _map_to(found[1], given[0])
    black, white = made(torch.zeros_like(image)), made(torch.ones_like(image))
    if black.numel() != image.numel():
        return None
    gray = (black / (black - white)).view_as(image)
    return gray if bool(gray.isfinite().all()) else None


def doubles(images: Tensor) -> Iterator[Tensor]:
    """Yield other pictures that networks often take for some in [0, 1] (N, C, H, W).

    Those are with half of the pixels mirrored in gray, and with all; a level brighter or darker at random, and all by
    some levels; with channels exchanged, and with what one channel gains taken off another.
    """
    draw = stream(0, "doubles")
    half = (torch.rand(images.shape, generator=draw) < 0.5).to(images.device)
    signs = torch.where(half, 1 / 255, -1 / 255).to(images)
    yield torch.where(half, 1 - images, images)
    yield 1 - images
    yield images + signs
    yield images + 4 / 255
    yield images * LIGHT
    if images.shape[1] > 1:
        first = torch.zeros_like(images)
        first[:, 0] = 1
        yield images + 4 / 255 * first
        yield images * (1 + (LIGHT - 1) * first)
        yield images + 4 * signs[:, :1]
        yield images * torch.where(half[:, :1], LIGHT, 1.0).to(images)
        yield images.roll(1, 1)
        yield images + 4 * (signs - signs.roll(1, 1))


def _takes_for_another(maps: Sequence[Function], image: Tensor) -> bool:
    """Return whether of some random picture one that networks often take for it comes out the same."""
    own = DARK + (1 - 2 * DARK) * _random_pictures(image, 1)
    before = torch.cat([made(own) for made in maps], 1)
    limit = MAX_ROUNDING * before.abs().max()
    return any(
        bool((torch.cat([made(other) for made in maps], 1) - before).abs().max() <= limit) for other in doubles(own)
    )


def _given_first(graph: Graph, trained: Collection[str]) -> list[Ref]:
    """Return what operations with trained parameters are given of the image that no other such one has been given."""
    above, given = set[int](), dict[Ref, None]()
    for number in graph.used_operations():
        node = graph.nodes[number]
        flowing = [ref for ref in node.refs if graph.depends_on_image(ref)]
        below = [ref for ref in flowing if ref.node not in above]
        takes = not node.sources.isdisjoint(trained)
        if takes:
            given |= dict.fromkeys(below)
        if takes or len(below) < len(flowing):
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


def _tell_single_pixels(made: Function, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pixels some number tells, and which some number has the same of for several values of them.

    These are numbers that change with one pixel alone. Which it is follows from its place in binary: for each digit, of
    the pixels that have it and of the others, one group alone changes the number.
    """
    count, low, high = image[0].numel(), *(part * DARK for part in _random_pictures(image, 2))
    high, places = 1 - high, torch.arange(count, device=image.device)
    before = made(low[None])[0]
    pixel, single = torch.zeros(len(before), dtype=torch.int64, device=image.device), None
    for digit in range(max(count - 1, 1).bit_length()):
        has = (places >> digit & 1).bool()
        one, other = (made(torch.where(mask.view_as(low), high, low)[None])[0] != before for mask in (has, ~has))
        pixel += one.long() << digit
        single = one ^ other if single is None else single & (one ^ other)
        if not bool(single.any()):
            break
    assert single is not None
    single &= pixel < count
    single[single.clone()] = ~_hang_on_others(made, pixel[single], single, image)
    told, folded = (torch.zeros(count, dtype=torch.bool, device=image.device) for _ in range(2))
    if not bool(single.any()):
        return told, folded
    pixel = pixel[single]
    values: list[Tensor] = []
    rises, falls = (torch.ones(len(pixel), dtype=torch.bool, device=image.device) for _ in range(2))
    for level in range(LEVELS):
        values = [*values[-1:], made(torch.full_like(low, level / (LEVELS - 1))[None])[0][single]]
        if len(values) == 2:
            rises, falls = rises & (values[1] > values[0]), falls & (values[1] < values[0])
    told[pixel[rises | falls]] = True
    folded[pixel[~(rises | falls)]] = True
    return told, folded


def _hang_on_others(made: Function, pixel: Tensor, which: Tensor, image: Tensor) -> Tensor:
    """Return which numbers change without the one pixel that each is said to hang on.

    Of one that a ReLU bends, a few pictures may look as if it hung on one pixel.

    Args:
        made: the function.
        pixel: of each number in question (m,).
        which: bool (n,), the numbers in question.
        image: (1, C, H, W).
    """
    found = torch.zeros(len(pixel), dtype=torch.bool, device=image.device)
    ends, draw = _random_pictures(image, 2 * GROUPS), stream(0, "groups of pixels")
    for one, other in zip(ends[:GROUPS], ends[GROUPS:], strict=True):
        if not len(pixel):
            break
        group = (torch.rand(one.shape, generator=draw) < 0.5).to(image.device)
        changed = made(torch.where(group, one, other)[None])[0] != made(other[None])[0]
        found |= changed[which] & ~group.flatten()[pixel]
    return found


def _unseen_shifts(affine: Sequence[Function], image: Tensor) -> Tensor:
    """Return which sums of numbers added to every pixel of each channel change nothing that affine maps make (m, C)."""
    channels = image.shape[1]
    if not affine:
        return torch.eye(channels).to(image)
    ends = torch.cat([torch.zeros_like(image), *(torch.zeros_like(image) for _ in range(channels))])
    for channel in range(channels):
        ends[1 + channel, channel] = 1
    ends = torch.cat([ends, _random_pictures(image, 1)])
    made = torch.cat([each(ends) for each in affine], 1)
    changes = made[1:] - made[:1]
    size = float(changes[-1].square().sum())
    values, sums = torch.linalg.eigh(changes[:-1] @ changes[:-1].mT)
    return sums.mT[values <= MAX_ROUNDING * size]


def _rank(affine: Sequence[Function], told: Tensor, image: Tensor, unseen: int) -> int:
    """Return how many pixels, or functions of them, affine maps and the pixels that are told tell together.

    Many rows of the maps are added up at random, each to several, so that a few times as many are left as there are
    pixels.

    Args:
        affine: maps.
        told: bool (n,), the pixels that are told by themselves.
        image: (1, C, H, W).
        unseen: of how many sums of numbers added to channels the maps tell nothing.
    """
    count = image[0].numel()
    if not affine:
        return int(told.sum())
    start = torch.cat([made(torch.zeros_like(image)) for made in affine], 1)[0]
    if count > MOST_RANKED:
        return max(min(count - unseen, len(start)), int(told.sum()))
    draw, buckets = stream(0, "rank"), MOST_ROWS * count
    added = len(start) > buckets
    group = torch.randint(buckets, (ADDED_TO, len(start)), generator=draw).to(image.device)
    weight = torch.randn(ADDED_TO, len(start), generator=draw, dtype=torch.float64).to(image)
    columns = []
    for place in range(count):
        unit = torch.zeros_like(image).flatten()
        unit[place] = 1
        change = torch.cat([made(unit.view_as(image)) for made in affine], 1)[0] - start
        if added:
            change = torch.zeros(buckets).to(image).index_add_(0, group.flatten(), (weight * change).flatten())
        columns.append(change)
    rows = torch.stack(columns, 1)
    square = rows.mT @ rows
    square.diagonal().add_(told.to(square) * square.diagonal().mean())
    whole = torch.linalg.cholesky_ex(square - MAX_ROUNDING * square.diagonal().max() * torch.eye(count).to(square)).info
    return count if int(whole) == 0 else int(torch.linalg.matrix_rank(square, hermitian=True, rtol=MAX_ROUNDING))


def _random_pictures(image: Tensor, count: int) -> Tensor:
    drawn = torch.rand(count, *image.shape[1:], generator=stream(0, "pixel map"), dtype=torch.float64)
    return drawn.to(image)
