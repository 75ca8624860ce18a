"""What a network does to a picture before anything with trained weights mixes its numbers, where that can be taken off.

Two kinds of it stand in the way of attacks that solve layer by layer, though what lies above is an ordinary network:

- bent: each number is a function of one pixel's own that rises, or falls, between 0 and 1, and is no affine one, such
  as a logarithm, or it is affine and far steeper for some pixels than for others. The pixel follows from it.
- scaled: brightness, or contrast as well, is taken off each picture, or each channel of it. With x the picture, v is
  a x + b with numbers a > 0 and b of each picture's (or channel's) own, which makes v the same whatever these were:
  b = 0 where it is divided by its length, largest number or mean; a = 1 where its mean is subtracted; both are open
  where it is standardized. The network is given w v + c then, with known numbers w and c, of an affine layer norm, say.

An attack is run on the network above with v in the place of pixels, moved into [0, 1]. What it finds is turned back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attacks.network.kept_readings import kept_reading
from attacks.network.layer_chain import make_trace, trace_view
from attacks.network.network_parts import ReplayedNetwork
from attacks.network.operation_recognition import has_trained_weight
from attacks.network.operation_trace import IMAGE, MODEL_ERRORS, Graph, Ref
from attacks.result import NotApplicable, Reconstruction, Remark
from fl.seeds import stream
from fl.view import ServerView

Kind = Literal["bent", "scaled"]
Scale = Literal["brightness", "contrast", "shift"]
"""What is taken off: a factor, a factor and a number that is added, or that number alone."""
LEVELS = 256
"""At which it is asked whether each number rises or falls with its pixel."""
PICTURES = 8
"""Random pictures of which it is asked what the network above is given."""
LEFT = 1e-7
"""What is rounding, relative to what is given."""
BRIGHT = 1e4
"""What pictures are multiplied by to tell w and c: small numbers that keep from dividing by zero don't count then."""
SCALES: tuple[Scale, ...] = ("contrast", "brightness", "shift")
"""In the order in which they are asked for."""
DARKER, ADDED, SAME = (0.7, 0.9, 0.8), (0.1, 0.02, 0.15), 0.01
"""What channels are multiplied by, and what is added to them, and how little that may change of what is given."""
SPARSE = 0.02
"""Share of bright pixels of the picture with the largest numbers that is thought of."""
VALUE_ERROR, ROUNDINGS, MAX_LEVELS_OPEN = 1e-5, 4.0, 0.5
"""By which v may be off where it was solved for in float32; how many times the share of an update that is rounding it
may be off by, where that is more (in trials on updates of four and of two bytes up to three times); and levels of 8
bits that this may move a pixel by."""
UNEVEN = 8.0
"""How many times as much as that of a pixel the others' numbers move (root mean square) where affine functions count as
bends: by so much more is that pixel off."""
MAX_OPEN_SHARE = 0.02
"""Share of pixels that may be open so in a picture that is borne out."""
LEVEL_TOLERANCE, MIN_AT_LEVELS = 0.2, 20
"""How near to whole levels of 8 bits all pixels lie that are at such levels, and how many they are at least, for chance
to be out of the question."""
BISECTIONS = 50
LEAST = 1 / 1024
"""The darkest pixel, where black has no finite number."""
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
"""By what is taken off, and whether channel by channel."""


@dataclass(frozen=True)
class PixelPrefix:
    """What a network does to a picture first.

    Attributes:
        kind: "bent" or "scaled".
        graph: of the network, in double precision, of one picture.
        end: the tensor that the network above is given.
        low: what the network above is given of v moved to 0, of each number.
        high: likewise of v moved to 1.
        scale: what is taken off, where that is a scale.
        by_channel: likewise, whether it is each channel's own.
        affine: whether all bent pixels are given by affine functions, which tell the same of bright and dark ones.
        span: of a shift, by how much a pixel of v moved to 1 is brighter than one moved to 0, in pixel units.
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
        """What a result says of itself."""
        return Remark.SCALES_TAKEN_OFF if self.by_channel else Remark.SCALE_TAKEN_OFF

    def values(self, images: Tensor) -> Tensor:
        """Return v of pictures (N, C, H, W) in [0, 1], in the same shape, moved into [0, 1]."""
        given = torch.stack([_given(self.graph, self.end, one[None]) for one in images.to(self.graph.image)])
        return ((given - self.low) / (self.high - self.low)).view(images.shape).clamp(0, 1).to(images)

    def pictures(self, values: Tensor) -> Tensor:
        """Return pictures (N, C, H, W) in [0, 1] behind v, moved into [0, 1]; of a scale the brightest there are."""
        wanted = values.to(self.graph.image)
        shown = _invert(self, wanted) if self.kind == "bent" else self._brightest(wanted)
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
        """Return the view of the network above, which takes v, of an update of one picture; None where none is made."""
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
        network.takes_centered = self.kind == "scaled" and self.scale != "brightness"
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
        """Return a result on the network above as one on the whole.

        Args:
            held: the result, as the update of that network bears it out.
            pictures: that it is of; None takes those behind its v.
        """
        if held.inputs is None:
            return held
        shown = self.pictures(held.inputs) if pictures is None else pictures
        if self.kind == "bent":
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
        """Return a result of bent pixels, not verified where an error of v may move a pixel to another level.

        It is not borne out, either, where that holds of more than a few pixels, whether it was verified before or not.
        How large the error is follows from the rounding of the update, by its worst tensor. Where that leaves pixels
        open, least squares of the update decide, if they can be solved. That all pixels are at levels of 8 bits is no
        reason, since v may have been put there: but then least squares are of the open pixels alone, with the others
        at their levels, so that they can be solved for larger pictures, too.

        Args:
            values: v that was found.
            held: the result on the whole network.
            rounding: the share of the update that is rounding (`attacks.update.float_rounding.largest_rounding`).
            errors: says by how much numbers of v that are asked for may be off (`attacks.verification.value_errors`).
            solved: whether v was solved for, so that what rounding moves little is at its level.
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
        """Return by how many levels of 8 bits pixels may be off where v is off by so much."""
        darkest, middle, brightest = (_invert(self, values + off) for off in (-1 * error, 0.0, error))
        return 255 * torch.maximum(middle - darkest, brightest - middle)

    def _flatness(self) -> Tensor:
        """Return how many times as far off each number of v is as most, where all that is given is equally sure."""
        return _flatness(self.low, self.high).view(1, *self.graph.image.shape[1:])

    def _is_at_levels(self, values: Tensor) -> bool:
        """Return whether all pixels that v shows are at whole levels of 8 bits, black and white ones left out."""
        shown = 255 * _invert(self, values)
        inside = (shown > LEVEL_TOLERANCE) & (shown < 255 - LEVEL_TOLERANCE)
        near = (shown - shown.round()).abs()[inside] < LEVEL_TOLERANCE
        return len(near) >= MIN_AT_LEVELS and bool(near.all())


def doubt_bends(held: Reconstruction) -> Reconstruction:
    """Return pictures told up to a scale, not borne out where the network bends their pixels after taking that off.

    How much a bend tells of a pixel hangs on the pixel itself, which is not known.
    """
    if not (held.verified or held.approximate):
        return held
    said = "the network bends pixels after that, which may hardly tell some of them"
    note, remarks = "; ".join(filter(None, (held.note, said))), held.remarks | {Remark.PARTLY_TOLD}
    verified = False if held.verified else held.verified
    return replace(held, verified=verified, approximate=False, note=note, remarks=remarks)


def read_pixel_prefix(view: ServerView) -> PixelPrefix | None:
    """Return what the network does to a picture first, where that is of one of the kinds; else None."""
    if not view.task.inputs.is_image:
        return None
    kept = kept_reading(view, "pixel prefix", lambda: (_read(view),), lambda found: 0)
    return kept[0]


def _read(view: ServerView) -> PixelPrefix | None:
    found = trace_view(view, view.device)
    if isinstance(found, NotApplicable):
        return None
    graph, bent = found[1], None
    for segment in graph.segments():
        if any(has_trained_weight(graph, graph.nodes[number]) for number in segment.nodes):
            break
        if graph.value(segment.end).numel() != graph.image.numel():
            break
        if not graph.value(segment.end).is_floating_point():
            break
        try:
            with torch.no_grad():
                scaled = _read_scale(graph, segment.end)
                trained = any(graph.nodes[n].sources & graph.parameters for n in graph.operations_behind(segment.end))
                now = None if scaled is not None or trained else _read_bend(graph, segment.end)
        except MODEL_ERRORS:
            break
        if scaled is not None:
            return scaled
        bent = now or bent
    return bent


def _given(graph: Graph, end: Ref, picture: Tensor) -> Tensor:
    """Return what a tensor (n,) is of a picture (1, C, H, W)."""
    nodes = [n for n in graph.operations_behind(end) if graph.nodes[n].flows]
    return graph.replay(nodes, end, {Ref(IMAGE): picture}).flatten()


def _read_bend(graph: Graph, end: Ref) -> PixelPrefix | None:
    """Return the functions of single pixels that make a tensor, if they rise or fall and are not all affine alike."""
    one, other = _picture(graph, 0), _picture(graph, 1)
    chosen = torch.rand(one.shape, generator=stream(0, "chosen pixels")).to(one.device) < 0.5
    mixed, first, second = (_given(graph, end, each) for each in (torch.where(chosen, one, other), one, other))
    if not torch.allclose(mixed, torch.where(chosen.flatten(), first, second), rtol=LEFT, atol=LEFT):
        return None
    low, high, middle = (_given(graph, end, torch.full_like(one, at)) for at in (0.0, 1.0, 0.5))
    begin = 0.0
    if not bool(low.isfinite().all()):
        begin, low = LEAST, _given(graph, end, torch.full_like(one, LEAST))
    if not bool(low.isfinite().all() and high.isfinite().all()) or bool((high == low).any()):
        return None
    quarter = _given(graph, end, torch.full_like(one, 0.25))
    halfway = torch.allclose((low + high) / 2, middle, rtol=LEFT, atol=LEFT) and begin == 0
    affine = halfway and torch.allclose((3 * low + high) / 4, quarter, rtol=LEFT, atol=LEFT)
    if affine and bool((_flatness(low, high) <= UNEVEN).all()):
        return None  # it tells all pixels alike
    before, way = low, (high - low).sign()
    for level in range(1, LEVELS):
        now = _given(graph, end, torch.full_like(one, begin + (1 - begin) * level / (LEVELS - 1)))
        if not bool((way * (now - before) > 0).all()):
            return None
        before = now
    return PixelPrefix("bent", graph, end, low, high, affine=affine)


def _flatness(low: Tensor, high: Tensor) -> Tensor:
    """Return how many times as much as each number others move from black to white (root mean square); at least 1."""
    size = (high - low).abs()
    return (size.square().mean().sqrt() / size).clamp(min=1)


def _invert(prefix: PixelPrefix, values: Tensor) -> Tensor:
    """Return the pixels (N, C, H, W) that functions of single ones make values of, moved into [0, 1]."""
    low, high = torch.zeros_like(values), torch.ones_like(values)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        given = torch.stack([_given(prefix.graph, prefix.end, one[None]) for one in middle])
        made = ((given - prefix.low) / (prefix.high - prefix.low)).view(values.shape)
        above = made > values  # what is no number lies below black
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def _read_scale(graph: Graph, end: Ref) -> PixelPrefix | None:
    """Return the scale that is taken off each picture, or each of its channels; None where none is."""
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
    """Return the scale with w and c, or None where what is given is otherwise made than of each picture's scale."""
    pictures = [_picture(graph, number) for number in range(PICTURES)]
    dims = (2, 3) if by_channel else (1, 2, 3)
    bright = torch.cat([(1 if scale == "shift" else BRIGHT) * one for one in pictures])
    own = (bright - bright.mean(dims, keepdim=True)) / (1 if scale == "shift" else bright.std(dims, keepdim=True))
    given = torch.stack([_given(graph, end, one[None]) for one in bright])
    flat = own.flatten(1)
    ones = torch.ones_like(flat)
    columns = torch.stack([flat, ones], 2).transpose(0, 1)  # (n, pictures, 2)
    pairs = torch.linalg.lstsq(columns, given.T[..., None]).solution  # w and c of each number
    left = float((columns @ pairs - given.T[..., None]).norm() / given.norm())
    slope, offset = pairs[:, 0, 0], pairs[:, 1, 0]
    if not (scale != "brightness" and left <= LEFT and bool((slope.abs() > LEFT * slope.abs().max()).all())):
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
    return PixelPrefix("scaled", graph, end, *ends, scale=scale, by_channel=by_channel, span=float(high - low))


def _sparse(picture: Tensor) -> Tensor:
    """Return a picture with few bright pixels in each channel."""
    draw = torch.rand(picture.shape, generator=stream(0, "few bright pixels"), dtype=torch.float64).to(picture)
    few = max(1, round(SPARSE * picture[0, 0].numel()))
    least = draw.flatten(2).topk(few, dim=2).values[..., -1:, None]
    return (draw >= least).to(picture) + 1e-3 * picture


def _is_scaled_as_a_whole(graph: Graph, end: Ref, pictures: list[Tensor], *, by_channel: bool) -> bool:
    """Return whether what is given is a x + b with numbers of each picture's, or channel's, own, and a > 0."""
    for picture in pictures:
        given = _given(graph, end, picture)
        groups = picture.shape[1] if by_channel else 1
        own, made = picture.reshape(groups, -1, 1), given.view(groups, -1, 1)
        columns = torch.cat([own, torch.ones_like(own)], 2)
        pair = torch.linalg.lstsq(columns, made).solution
        if not bool((columns @ pair - made).norm() <= LEFT * made.norm()) or not bool((pair[:, 0] > 0).all()):
            return False
    return True


def _picture(graph: Graph, number: int) -> Tensor:
    """Return a random picture whose channels have brightness and contrast of their own."""
    draw = stream(number, "pixel prefix")
    shape = graph.image.shape
    low, high = (torch.rand(1, shape[1], 1, 1, generator=draw, dtype=torch.float64) for _ in range(2))
    picture = 0.3 * low + (0.3 + 0.4 * high) * torch.rand(shape, generator=draw, dtype=torch.float64)
    return picture.to(graph.image)
