"""Finds and inverts pixel prefixes: what a network does to a picture before its first trained weights mix the pixels.

Two kinds of prefixes stop attacks that solve layer by layer, though the network above is an ordinary one:

- "pixelwise": each number is a monotonic function of one pixel on [0, 1]. Either it is not affine, such as a logarithm,
  or it is affine and far steeper for some pixels than for others. The pixel follows from the number.
- "normalized": brightness, or contrast as well, is normalized away for each picture, or for each channel. With x the
  picture, the prefix makes v = a x + b from it, where a > 0 and b belong to the picture (or channel) and are chosen
  such that every a' x + b' gives the same v. Division by the norm, the largest number or the mean has b = 0;
  subtraction of the mean has a = 1; standardization has both. The network is given w v + c, with known w and c (of an
  affine layer norm, say).

An attack runs on the network above, with v moved into [0, 1] in place of pixels. What it finds is mapped back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attacks.network.layer_chain import make_trace, trace_view
from attacks.network.network_parts import ReplayedNetwork
from attacks.network.operation_recognition import has_trained_weight
from attacks.network.operation_trace import IMAGE, MODEL_ERRORS, Graph, Ref
from attacks.network.reading_cache import cached_reading
from attacks.result import NotApplicable, Reconstruction, Remark
from fl.seeds import stream
from fl.view import ServerView

Kind = Literal["pixelwise", "normalized"]
Scale = Literal["brightness", "contrast", "shift"]
"""What is normalized away: a factor, a factor and a summand, or a summand alone."""
GRAY_LEVELS = 256
"""Uniform pictures on which it is checked that each number rises or falls with its pixel."""
PICTURES = 8
"""Random pictures to which a normalization is fitted."""
ROUNDING = 1e-7
"""Relative difference of two outputs of the prefix that counts as rounding."""
BRIGHT = 1e4
"""Factor on pictures from which w and c are read, so large that an epsilon in a denominator does not matter."""
SCALES: tuple[Scale, ...] = ("contrast", "brightness", "shift")
"""The order in which scales are tried."""
DARKER = (0.7, 0.9, 0.8)
"""Factors on channels in the test whether a scale is normalized away."""
ADDED = (0.1, 0.02, 0.15)
"""Summands on channels in the same test."""
SAME = 0.01
"""Relative change of the output up to which that test takes two outputs for one."""
SPARSE = 0.02
"""Share of bright pixels in the picture with the largest normalized numbers that is considered."""
VALUE_ERROR = 1e-5
"""Error of v where it was solved for in float32."""
ROUNDINGS = 4.0
"""Error of v in units of the update's relative rounding, if that is more; in trials it was at most three."""
MAX_LEVELS_OPEN = 0.5
"""Levels of 8 bits by which the error of v may move a pixel."""
UNEVEN = 8.0
"""How much steeper than for one pixel an affine prefix is for the others (root mean square) if it counts as pixelwise:
the error of that pixel is larger by this factor."""
MAX_OPEN_SHARE = 0.02
"""Share of pixels that may be undetermined in a picture that is borne out."""
LEVEL_TOLERANCE = 0.2
"""Distance from whole levels of 8 bits up to which a pixel counts as at a level."""
MIN_AT_LEVELS = 20
"""Pixels that have to be at levels before that counts as no chance."""
BISECTIONS = 50
"""Steps of the bisection that inverts functions of single pixels."""
LEAST = 1 / 1024
"""The darkest pixel tried where the prefix of black is not finite."""
TAKEN_OFF = {
    ("brightness", False): "the picture is known up to its brightness, which the network takes off each: it is shown "
    "as bright as pixels can be",
    ("contrast", False): "the picture is known up to its brightness and contrast, which the network takes off each: it "
    "is shown with as much contrast as pixels can have",
    ("shift", False): "the picture is known up to a number added to all pixels, which the network takes off each: it "
    "is shown with its darkest pixel black",
    ("brightness", True): "the picture is known up to the brightness of its channels, which the network takes off "
    "each: they are shown as bright as pixels can be",
    ("contrast", True): "the picture is known up to brightness and contrast of its channels, which the network takes "
    "off each: they are shown with as much contrast as pixels can have",
    ("shift", True): "the picture is known up to a number added to each channel, which the network takes off each: "
    "they are shown with their darkest pixels black",
}
"""Notes by scale, and whether each channel has its own."""


@dataclass(frozen=True)
class PixelPrefix:
    """The prefix of a network, with the range of its output.

    Attributes:
        kind: "pixelwise" or "normalized", as the module says.
        graph: the network's, in double precision, for one picture.
        end: the output of the prefix, which has as many numbers n as the picture.
        low: the output (n,) that counts as v = 0.
        high: the output (n,) that counts as v = 1.
        scale: what a "normalized" prefix normalizes away; None for "pixelwise".
        by_channel: whether it does so for each channel.
        affine: whether all functions of a "pixelwise" prefix are affine: they tell bright and dark pixels alike.
        span: the difference in pixel units between v = 1 and v = 0, where the scale is "shift".
    """

    kind: Kind
    graph: Graph
    end: Ref
    low: Tensor
    high: Tensor
    scale: Scale | None = None
    by_channel: bool = False
    affine: bool = False
    span: float = 1.0

    @property
    def remark(self) -> Remark:
        """The remark of results behind a "normalized" prefix."""
        return Remark.SCALES_TAKEN_OFF if self.by_channel else Remark.SCALE_TAKEN_OFF

    def values(self, images: Tensor) -> Tensor:
        """Return v in [0, 1] for pictures in [0, 1], both (N, C, H, W)."""
        given = torch.stack([_given(self.graph, self.end, one[None]) for one in images.to(self.graph.image)])
        return ((given - self.low) / (self.high - self.low)).view(images.shape).clamp(0, 1).to(images)

    def pictures(self, values: Tensor) -> Tensor:
        """Return pictures in [0, 1] for v in [0, 1], both (N, C, H, W); the brightest ones if a scale is open."""
        wanted = values.to(self.graph.image)
        shown = _invert(self, wanted) if self.kind == "pixelwise" else self._brightest(wanted)
        return shown.to(values)

    def _brightest(self, values: Tensor) -> Tensor:
        dims = (2, 3) if self.by_channel else (1, 2, 3)
        zero = torch.zeros_like(values)
        if self.scale == "brightness":  # v of a black picture
            zero = zero + ((0 - self.low) / (self.high - self.low)).view(1, *values.shape[1:])
        low = zero if self.scale == "brightness" else values.amin(dims, keepdim=True)
        if self.scale == "shift":
            return (self.span * (values - low)).clamp(0, 1)
        size = (values - low).amax(dims, keepdim=True)
        return ((values - low) / torch.where(size > 0, size, 1.0)).clamp(0, 1)

    def above(self, view: ServerView) -> ServerView | None:
        """Return the view of the network above, whose input is v, for an update of one picture; None if it fails."""
        trained = frozenset[str]().union(*(self.graph.nodes[n].sources for n in self.graph.operations_behind(self.end)))
        runs: dict[torch.dtype, Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {}
        model = None
        for dtype in dict.fromkeys((torch.float64, view.dtype)):
            found = make_trace(view, view.device, dtype=dtype)
            if isinstance(found, NotApplicable) or len(found[1].nodes) != len(self.graph.nodes):
                return None
            model = found[0]
            runs[dtype] = self._run_above(found[1])

        def run(values: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
            each = runs.get(values.dtype, runs[torch.float64])
            return torch.cat([each(one[None], tensors) for one in values])

        assert model is not None
        network = ReplayedNetwork(model, run)
        network.moves_levels = True
        network.takes_centered = self.kind == "normalized" and self.scale != "brightness"
        task = replace(view.task, model=network, mean=(), std=())
        update = {name: value for name, value in view.update.items() if name not in trained}
        return replace(view, task=task, update=update, history=())

    def _run_above(self, graph: Graph) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
        shape, returned = graph.value(self.end).shape, graph.returned
        assert returned is not None
        below = set(graph.operations_behind(self.end))
        nodes = [number for number in graph.operations_behind(returned) if number not in below]
        low, size = (t.to(graph.image).view(1, *graph.image.shape[1:]) for t in (self.low, self.high - self.low))

        def run(values: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
            known = {Ref(number): tensors[name] for number, name in graph.sources.items() if name in tensors}
            given = values * size.to(values) + low.to(values)
            return graph.replay(nodes, returned, {self.end: given.reshape(shape), **known})

        return run

    def turn_back(self, held: Reconstruction, pictures: Tensor | None = None) -> Reconstruction:
        """Return a result on the network above as a result on the whole network.

        Args:
            held: the confirmed result on the network above.
            pictures: to show; None computes them from v.
        """
        if held.inputs is None:
            return held
        shown = self.pictures(held.inputs) if pictures is None else pictures
        if self.kind == "pixelwise":
            return replace(held, inputs=shown, fixed=None)
        borne_out = bool(held.verified or held.approximate)
        assert self.scale is not None
        said = TAKEN_OFF[self.scale, self.by_channel]
        said = said if borne_out else said.replace("the picture is known", "a picture can be told", 1)
        told = None if held.verified else held.verified
        known = replace(held, inputs=shown, verified=told, fixed=None, approximate=borne_out)
        return replace(known, note="; ".join(filter(None, (said, held.note))), remarks=held.remarks | {self.remark})

    def bound(
        self,
        values: Tensor,
        held: Reconstruction,
        rounding: float,
        errors: Callable[[Tensor | None], Tensor | None] = lambda which: None,
        *,
        solved: bool = True,
    ) -> Reconstruction:
        """Return the result, not verified if the error of v may move a pixel to another level.

        If it may move more than a few pixels, the result is not borne out either. The error is bounded by the rounding
        of the update's worst tensor. If that bound leaves pixels open, the standard errors of least squares decide, if
        they can be computed. Pixels at levels of 8 bits are no evidence, since v may have been rounded to levels. But
        then least squares have the open pixels alone as unknowns, and can be computed for larger pictures.

        Args:
            values: v that was found (1, C, H, W).
            held: the confirmed result on the whole network.
            rounding: the share of the update that is rounding (`attacks.update.float_rounding.largest_rounding`).
            errors: returns the errors of v at a mask of entries, None for all (`attacks.verification.value_errors`).
            solved: whether v was solved for, so that a pixel which rounding moves little is at its level.
        """
        if not (held.verified or held.approximate):
            return held
        v = values.to(self.graph.image)
        at_levels = solved and self._is_at_levels(v)
        limit = 1 - LEVEL_TOLERANCE if at_levels else MAX_LEVELS_OPEN  # by less no pixel is at another level
        levels = self._open_levels(v, max(VALUE_ERROR, ROUNDINGS * rounding) * self._flatness())
        open_pixels = levels >= limit
        if bool(open_pixels.any()) and (found := errors(open_pixels if at_levels else None)) is not None:
            levels = self._open_levels(v, found.to(v))
        open_share = float((levels >= limit).double().mean())
        if open_share == 0:
            return held
        most, told = float(levels.amax()), open_share <= MAX_OPEN_SHARE
        said = (
            f"the network's first function hardly tells some pixels: by rounding they may be off by {most:.0f} levels"
        )
        note = "; ".join(filter(None, (held.note, said)))
        remarks = held.remarks if told else held.remarks | {Remark.PARTLY_TOLD}
        verified = False if held.verified else held.verified
        return replace(held, verified=verified, approximate=told, note=note, remarks=remarks)

    def _open_levels(self, values: Tensor, error: Tensor | float) -> Tensor:
        """Return the error of pixels in levels of 8 bits, for an error of v."""
        darkest, middle, brightest = (_invert(self, values + off) for off in (-1 * error, 0.0, error))
        return 255 * torch.maximum(middle - darkest, brightest - middle)

    def _flatness(self) -> Tensor:
        """Return the error of each number of v relative to most others, if all outputs are equally precise."""
        return _flatness(self.low, self.high).view(1, *self.graph.image.shape[1:])

    def _is_at_levels(self, values: Tensor) -> bool:
        """Return whether all pixels that v shows are at whole levels of 8 bits, black and white ones left out."""
        shown = 255 * _invert(self, values)
        inside = (shown > LEVEL_TOLERANCE) & (shown < 255 - LEVEL_TOLERANCE)
        near = (shown - shown.round()).abs()[inside] < LEVEL_TOLERANCE
        return len(near) >= MIN_AT_LEVELS and bool(near.all())


def doubt_later_functions(held: Reconstruction) -> Reconstruction:
    """Return pictures known up to a scale, not borne out since a function of single pixels follows the normalization.

    How precisely such a function tells a pixel depends on the pixel itself, which is not known.
    """
    if not (held.verified or held.approximate):
        return held
    said = "after that the network applies a function to each pixel, which may hardly tell some of them"
    note, remarks = "; ".join(filter(None, (held.note, said))), held.remarks | {Remark.PARTLY_TOLD}
    verified = False if held.verified else held.verified
    return replace(held, verified=verified, approximate=False, note=note, remarks=remarks)


def read_pixel_prefix(view: ServerView) -> PixelPrefix | None:
    """Return the pixel prefix of the view's network, or None if it has none of the two kinds."""
    if not view.task.inputs.is_image:
        return None
    kept = cached_reading(view, "pixel prefix", lambda: (_read(view),), lambda found: 0)
    return kept[0]


def _read(view: ServerView) -> PixelPrefix | None:
    found = trace_view(view, view.device)
    if isinstance(found, NotApplicable):
        return None
    graph, pixelwise = found[1], None
    for segment in graph.segments():
        if any(has_trained_weight(graph, graph.nodes[number]) for number in segment.nodes):
            break
        if graph.value(segment.end).numel() != graph.image.numel():
            break
        if not graph.value(segment.end).is_floating_point():
            break
        try:
            with torch.no_grad():
                normalized = _read_scale(graph, segment.end)
                trained = any(graph.nodes[n].sources & graph.parameters for n in graph.operations_behind(segment.end))
                further = None if normalized is not None or trained else _read_pixelwise(graph, segment.end)
        except MODEL_ERRORS:
            break
        if normalized is not None:
            return normalized
        pixelwise = further or pixelwise
    return pixelwise


def _given(graph: Graph, end: Ref, picture: Tensor) -> Tensor:
    """Return the tensor `end` (n,) for a picture (1, C, H, W)."""
    nodes = [n for n in graph.operations_behind(end) if graph.nodes[n].flows]
    return graph.replay(nodes, end, {Ref(IMAGE): picture}).flatten()


def _read_pixelwise(graph: Graph, end: Ref) -> PixelPrefix | None:
    """Return the functions of single pixels that make a tensor, if they are monotonic and not all alike and affine."""
    one, other = _picture(graph, 0), _picture(graph, 1)
    chosen = torch.rand(one.shape, generator=stream(0, "chosen pixels")).to(one.device) < 0.5
    mixed, first, second = (_given(graph, end, each) for each in (torch.where(chosen, one, other), one, other))
    if not torch.allclose(mixed, torch.where(chosen.flatten(), first, second), rtol=ROUNDING, atol=ROUNDING):
        return None
    low, high, middle = (_given(graph, end, torch.full_like(one, at)) for at in (0.0, 1.0, 0.5))
    begin = 0.0
    if not bool(low.isfinite().all()):
        begin, low = LEAST, _given(graph, end, torch.full_like(one, LEAST))
    if not bool(low.isfinite().all() and high.isfinite().all()) or bool((high == low).any()):
        return None
    quarter = _given(graph, end, torch.full_like(one, 0.25))
    halfway = torch.allclose((low + high) / 2, middle, rtol=ROUNDING, atol=ROUNDING) and begin == 0
    affine = halfway and torch.allclose((3 * low + high) / 4, quarter, rtol=ROUNDING, atol=ROUNDING)
    if affine and bool((_flatness(low, high) <= UNEVEN).all()):
        return None  # it tells all pixels alike
    before, way = low, (high - low).sign()
    for level in range(1, GRAY_LEVELS):
        now = _given(graph, end, torch.full_like(one, begin + (1 - begin) * level / (GRAY_LEVELS - 1)))
        if not bool((way * (now - before) > 0).all()):
            return None
        before = now
    return PixelPrefix("pixelwise", graph, end, low, high, affine=affine)


def _flatness(low: Tensor, high: Tensor) -> Tensor:
    """Return how much more than each number the others change from black to white (root mean square); at least 1."""
    size = (high - low).abs()
    return (size.square().mean().sqrt() / size).clamp(min=1)


def _invert(prefix: PixelPrefix, values: Tensor) -> Tensor:
    """Return the pixels (N, C, H, W) whose functions make these values of v."""
    low, high = torch.zeros_like(values), torch.ones_like(values)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        given = torch.stack([_given(prefix.graph, prefix.end, one[None]) for one in middle])
        made = ((given - prefix.low) / (prefix.high - prefix.low)).view(values.shape)
        above = made > values  # what is no number lies below black
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def _read_scale(graph: Graph, end: Ref) -> PixelPrefix | None:
    """Return the prefix that normalizes a scale of each picture, or of each channel, away; None without one."""
    plain = _picture(graph, 0)
    before = _given(graph, end, plain)
    if not bool(before.isfinite().all()):
        return None
    channels = plain.shape[1]
    for by_channel in (True, False) if channels > 1 else (False,):
        factor, added = (
            plain.new_tensor([each[c % 3 if by_channel else 0] for c in range(channels)]).view(1, -1, 1, 1)
            for each in (DARKER, ADDED)
        )
        for scale in SCALES:
            other = (plain if scale == "shift" else factor * plain) + (0 if scale == "brightness" else added)
            if bool((_given(graph, end, other) - before).norm() > SAME * (before - before.mean()).norm()):
                continue
            return _fit_scale(graph, end, scale, by_channel=by_channel)
    return None


def _fit_scale(graph: Graph, end: Ref, scale: Scale, *, by_channel: bool) -> PixelPrefix | None:
    """Return the prefix with w and c, or None where the output is not w v + c."""
    pictures = [_picture(graph, number) for number in range(PICTURES)]
    dims = (2, 3) if by_channel else (1, 2, 3)
    bright = torch.cat([(1 if scale == "shift" else BRIGHT) * one for one in pictures])
    own = (bright - bright.mean(dims, keepdim=True)) / (1 if scale == "shift" else bright.std(dims, keepdim=True))
    given = torch.stack([_given(graph, end, one[None]) for one in bright])
    flat = own.flatten(1)
    ones = torch.ones_like(flat)
    columns = torch.stack([flat, ones], 2).transpose(0, 1)  # (n, pictures, 2)
    pairs = torch.linalg.lstsq(columns, given.T[..., None]).solution  # w and c of each number
    residual = float((columns @ pairs - given.T[..., None]).norm() / given.norm())
    slope, offset = pairs[:, 0, 0], pairs[:, 1, 0]
    if not (
        scale != "brightness" and residual <= ROUNDING and bool((slope.abs() > ROUNDING * slope.abs().max()).all())
    ):
        if not _is_scaled_as_a_whole(graph, end, pictures, by_channel=by_channel):
            return None
        slope, offset = torch.ones_like(slope), torch.zeros_like(offset)
    made = torch.stack([_given(graph, end, one) for one in [*pictures, *map(_sparse, pictures[:2])]])
    values = (made - offset) / slope
    low, high = values.amin(), values.amax()
    if not bool(low.isfinite() and high.isfinite() and high > low):
        return None
    margin = 1.0 if scale == "shift" else (high - low) / 10  # pixels of one picture differ by 1, at most
    low = low - margin if scale == "shift" or bool(low < 0) else torch.zeros_like(low)
    high = high + margin
    ends = slope * low + offset, slope * high + offset
    return PixelPrefix("normalized", graph, end, *ends, scale=scale, by_channel=by_channel, span=float(high - low))


def _sparse(picture: Tensor) -> Tensor:
    """Return a picture with few bright pixels in each channel."""
    draw = torch.rand(picture.shape, generator=stream(0, "few bright pixels"), dtype=torch.float64).to(picture)
    few = max(1, round(SPARSE * picture[0, 0].numel()))
    least = draw.flatten(2).topk(few, dim=2).values[..., -1:, None]
    return (draw >= least).to(picture) + 1e-3 * picture


def _is_scaled_as_a_whole(graph: Graph, end: Ref, pictures: list[Tensor], *, by_channel: bool) -> bool:
    """Return whether the output is a x + b, with one pair a > 0 and b for each picture or channel."""
    for picture in pictures:
        given = _given(graph, end, picture)
        groups = picture.shape[1] if by_channel else 1
        own, made = picture.reshape(groups, -1, 1), given.view(groups, -1, 1)
        columns = torch.cat([own, torch.ones_like(own)], 2)
        pair = torch.linalg.lstsq(columns, made).solution
        if not bool((columns @ pair - made).norm() <= ROUNDING * made.norm()) or not bool((pair[:, 0] > 0).all()):
            return False
    return True


def _picture(graph: Graph, number: int) -> Tensor:
    """Return a random picture whose channels have brightness and contrast of their own."""
    draw = stream(number, "pixel prefix")
    shape = graph.image.shape
    low, high = (torch.rand(1, shape[1], 1, 1, generator=draw, dtype=torch.float64) for _ in range(2))
    picture = 0.3 * low + (0.3 + 0.4 * high) * torch.rand(shape, generator=draw, dtype=torch.float64)
    return picture.to(graph.image)
