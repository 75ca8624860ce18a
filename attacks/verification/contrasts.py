"""Looks for pictures of other brightness or contrast that make the same update, as a whole or in single channels.

A network that subtracts a gray c from pixels, adds no bias and then normalizes returns the same for a picture x and for

    c + s (x - c),  s > 0,

and so does what flows back. Where it normalizes each channel, each channel has an s of its own. A network that
subtracts the mean of a picture, or of each channel, returns the same for brighter ones. A normalization's epsilon may
tell contrast in the last digits alone: then pictures of other contrast are as near as a picture that misses these.

Whole levels of 8 bits decide where none of the others is at such levels. For a black and white picture about a middle
gray many are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attacks.network.pixel_map import gray_picture
from attacks.result import Reconstruction
from attacks.search_control import check_time_limit
from attacks.update.float_rounding import coarse_form
from attacks.verification.eight_bit_pixels import at_levels
from attacks.verification.error_bounds import MOST_LAST_DIGIT_DRAWS
from attacks.verification.last_parameters import of_last_parameters
from attacks.verification.level_lines import pictures_on_lines
from attacks.verification.replay_checks import compare_lower_layers, reproduces_returned_buffers
from attacks.verification.same_outputs import WholeNetwork
from attacks.verification.scale_directions import MOST_CHANNELS, Closeness, ScaleDirections, scale_directions
from attacks.verification.update_comparison import UpdateComparison
from fl.view import ServerView

SLIGHT, FAR, FAR_OF_COARSE = 0.004, 0.04, 0.1
"""Root mean square, in pixel units, by which others differ that must not make the update: for a picture that is
verified, for one that counts as near, and for one of an update in few digits, whose note says how near."""
LEAST_ROOM = 0.5
"""Share of that by which others differ at least, where pixels beyond their range keep them from more."""
OUTSIDE = 1e-3
"""By how much others may leave the range of pixels: a quarter of a level."""
CLEARLY = 10.0
"""Times the change that counts as none by which the last parameters must change to tell all moves by themselves."""
CURVED = 3.0
"""Times what an update may be off by that a move changes of it to first order, where it is tried."""
ROUNDINGS = 10.0
"""Of a view's precision, by which outputs differ where a private classifier leaves nothing else to ask."""

Extent = Literal["told", "nearly", "open", "loosely"]


@dataclass(frozen=True)
class Contrast:
    """How well an update tells pictures from such of another brightness or contrast.

    Attributes:
        extent: "told"; "nearly" where others at some distance don't make it; "open" where those make it, too; "loosely"
            where such make it as nearly as the pictures do, which leave more than rounding.
        of_channels: whether it is that of single channels that is not told.
    """

    extent: Extent
    of_channels: bool = False


def ask_contrast(
    view: ServerView,
    check: UpdateComparison,
    images: Tensor,
    labels: Tensor,
    network: WholeNetwork | None = None,
) -> Contrast:
    """Return whether an update tells pictures from such of another brightness or contrast, or nearly tells it.

    Where the server does not know the whole network, what the rest of it returns has to do.

    Args:
        view: the view that was attacked.
        check: the comparison with the update, which the images explain.
        images: (N, C, H, W).
        labels: with which they do.
        network: with what it returns of the images; None makes it where some of it is private.
    """
    gray = gray_picture(view)
    gray = None if gray is None else gray.to(images.device).double()
    asked = _below_classifier(view, images, network) if view.private else _by_update(check, images, labels)
    if asked is None:
        return Contrast("told")
    far = FAR_OF_COARSE if coarse_form(view) else FAR
    return _Scales(_with_statistics(view, asked), images.double(), gray, _has_few_channels(view), far).ask()


def _has_few_channels(view: ServerView) -> bool:
    """Return whether pictures have channels that are asked for one by one."""
    return view.task.inputs.is_image and 1 < view.task.input_shape[0] <= MOST_CHANNELS


def _with_statistics(view: ServerView, asked: Closeness) -> Closeness:
    """Return what others are asked for, with the statistics of batch normalization where these came back."""
    if not view.buffers_after:
        return asked

    def exceeds(pictures: Tensor) -> bool:
        return asked.exceeds(pictures) or reproduces_returned_buffers(view, Reconstruction(inputs=pictures)) is False

    return replace(asked, exceeds=exceeds)


def _by_update(check: UpdateComparison, images: Tensor, labels: Tensor) -> Closeness | None:
    """Return what an update asks of pictures, as nearly as some make it; None where these don't."""
    make, (own, allowed) = check.predictor.predict_in_double, check.bounds.predict_exactly(images, labels)
    if not check.exceeds(own, allowed):
        asked = _as_closely(check, labels, own, allowed, make)
        return asked and replace(asked, of_last=lambda some: of_last_parameters(asked, check, some, labels, allowed))
    if not check.exceeds(check.predictor.predict(images, labels), allowed):
        return _as_closely(check, labels, own, allowed, check.predictor.predict)
    if check.is_explained_to_rounding(images, labels):
        allowed = check.bounds.predict_exactly(images, labels, MOST_LAST_DIGIT_DRAWS)[1]
        return _as_closely(check, labels, own, allowed, make)
    near = check.near_bounds(images, labels)
    return None if near is None else _as_closely(check, labels, own, near, make, exact=False)


def _by_lower_layers(check: UpdateComparison, images: Tensor, labels: Tensor) -> Closeness | None:
    """Return what the update of layers below a private classifier asks of pictures; None where these don't make it.

    What flows back to them was read off the update, so that its rounding is in all of their tensors.
    """
    make = check.predictor.predict_in_double
    own = make(images, labels)
    for allowed, exact in ((check.bounds.rounding, True), (check.near_bounds(images, labels), False)):
        if allowed is not None and not check.exceeds(own, allowed):
            return _as_closely(check, labels, own, allowed, make, exact=exact)
    return None


def _as_closely(
    check: UpdateComparison,
    labels: Tensor,
    own: Mapping[str, Tensor],
    allowed: Mapping[str, float],
    make: Callable[[Tensor, Tensor], Mapping[str, Tensor]],
    *,
    exact: bool = True,
) -> Closeness | None:
    """Return the question which pictures make an update as closely as some do.

    Args:
        check: the comparison with it.
        labels: of the pictures.
        own: what these make, in double precision.
        allowed: how far each tensor may be off.
        make: says what others make.
        exact: whether no more than rounding is allowed.
    """
    factor = check.best_factor(own, allowed)
    if not 0 < factor < math.inf:
        return None
    stated = None if check.view.scale_unknown else check.stated_factor
    if stated is not None and check.exceeds(own, allowed, stated):
        stated = None
    return Closeness(
        own=own,
        predict=lambda pictures: check.predictor.predict_in_double(pictures, labels),
        exceeds=lambda pictures: check.exceeds(make(pictures, labels), allowed, stated),
        units={name: value / factor for name, value in allowed.items()},
        sized=stated is not None,
        exact=exact,
    )


def _below_classifier(view: ServerView, images: Tensor, network: WholeNetwork | None) -> Closeness | None:
    """Return what the update below a private classifier asks of pictures; where nobody can tell, to return the same."""
    lower = compare_lower_layers(view, images)
    asked = None if lower is None else _by_lower_layers(lower.check, *next(iter(lower.guesses)))
    if asked is not None:
        return asked
    known = network or WholeNetwork.of(view, images)
    if known is None:
        return None
    own, rounding = known.outputs, ROUNDINGS * torch.finfo(view.dtype).eps
    allowed = rounding * float(own.abs().max()) * math.sqrt(own.numel())

    def predict(pictures: Tensor) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"outputs": known.model(pictures)}

    return Closeness(
        own={"outputs": own},
        predict=predict,
        exceeds=lambda pictures: not bool(known.same(pictures, least=rounding).all()),
        units={"outputs": allowed or 1.0},
        sized=True,
        exact=True,
    )


@dataclass(frozen=True)
class _Scales:
    """The search for pictures of another brightness or contrast.

    Attributes:
        asked: what they are asked for.
        images: (N, C, H, W), in double precision.
        gray: (1, C, H, W), which the network turns into zeros; None where it is not known.
        by_channel: whether channels are asked for one by one.
        far: how far others are, at least, that must not make the update of a picture that counts as near.
    """

    asked: Closeness
    images: Tensor
    gray: Tensor | None
    by_channel: bool
    far: float

    def ask(self) -> Contrast:
        """Return what the search comes to."""
        if not self.asked.exact:
            return Contrast("told") if self._untold(self.far) is None else self._found("loosely", self.far)
        if self._untold(SLIGHT) is None or self._is_decided_by_levels():
            return Contrast("told")
        return self._found("nearly", SLIGHT) if self._untold(self.far) is None else self._found("open", self.far)

    @cached_property
    def directions(self) -> ScaleDirections | None:
        """The moves of the pictures that are asked for."""
        return scale_directions(self.asked, self.images, self.gray, by_channel=self.by_channel)

    @cached_property
    def _last(self) -> Closeness | None:
        """What is asked of pictures for the last parameters alone; None where these alone can't be asked."""
        return None if self.asked.of_last is None else self.asked.of_last(self.images)

    def _are_all_told_by_last(self, distance: float) -> bool:
        """Return whether the last parameters tell all moves, so that no others need be asked."""
        if self._last is None:
            return False
        moves = scale_directions(self._last, self.images, self.gray, by_channel=self.by_channel)
        least = CURVED * math.sqrt(len(self.asked.units)) / distance
        return moves is not None and moves.tells_all(CLEARLY * moves.limit(least))

    def _found(self, extent: Extent, distance: float) -> Contrast:
        """Return that others make the same, with whether some do in which one channel alone is another."""
        groups = range(self.images.shape[1]) if self.by_channel else ()
        return Contrast(extent, any(self._untold(distance, group) is not None for group in groups))

    def _limit(self, distance: float) -> float:
        """Return what a move of 1 changes, at most, where one by a distance may leave no more than allowed."""
        assert self.directions is not None
        return self.directions.limit(CURVED * math.sqrt(len(self.asked.units)) / distance)

    def _untold(self, distance: float, group: int | None = None) -> Tensor | None:
        """Return a move (N, C, H, W) by which pictures so far away make the same, of a channel alone if so, or None."""
        known = self._about_gray if group is None else None
        if known is not None and self._makes_along(known, min(distance, FAR)):
            return known
        if group is None and self._are_all_told_by_last(distance):
            return None
        if self.directions is None:
            return None
        moves = self.directions.candidates(self._limit(distance), 0.5 - self.images, group)
        return next((move for move in moves if any(self._makes_along(way, distance) for way in (move, -move))), None)

    @property
    def _about_gray(self) -> Tensor | None:
        """The move of pictures towards gray, or away from it where they are next to it; None where it is not known.

        It is what networks take off most often, and of flat pictures a step may not tell what it changes.
        """
        if self.gray is None:
            return None
        away = self.images - self.gray
        size = float(away.square().mean().sqrt())
        return None if not size else away / size if size < FAR else -away / size

    def _makes_along(self, move: Tensor, distance: float) -> bool:
        """Return whether pictures at a distance along a move make the same, if there are any."""
        length = min(distance, _room(self.images, move))
        return length >= LEAST_ROOM * distance and self._makes(self.images + length * move)

    def _is_decided_by_levels(self) -> bool:
        """Return whether the pictures are of whole levels of 8 bits, and no others of these make the same."""
        whole = at_levels(self.images)
        if whole is None or not self._makes(whole):
            return False
        exact = replace(self, asked=replace(self.asked, own=self.asked.predict(whole)), images=whole)
        move = exact._untold(SLIGHT)
        lines = [] if move is None else exact._lines(move)
        for line in lines or ():
            others = pictures_on_lines(whole, _far_along(whole, line)[None])
            if others is None or any(self._makes(other) for other in others):
                return False
        return lines is not None

    def _makes(self, others: Tensor) -> bool:
        check_time_limit()
        if self._last is not None and self._last.exceeds(others):
            return False
        return not self.asked.exceeds(others)

    def _lines(self, move: Tensor) -> list[Tensor] | None:
        """Return the moves that change nothing, alone or one of each channel; None where there are more."""
        directions = self.directions
        limit = 0.0 if directions is None else self._limit(SLIGHT)
        count = 0 if directions is None else len(directions.untold(limit))
        if directions is None or count <= 1:
            return [move]
        each = [directions.untold(limit, group) for group in directions.groups.unique().tolist()]
        if sum(map(len, each)) < count or any(len(own) > 1 for own in each):
            return None
        return [directions.along(own[0]) for own in each if len(own)]


def _room(images: Tensor, move: Tensor) -> float:
    """Return how far pictures may move before pixels leave their range."""
    room = torch.where(move > 0, images.clamp(min=1) + OUTSIDE - images, images - images.clamp(max=0) + OUTSIDE)
    return float((room / move.abs().clamp_min(torch.finfo(move.dtype).tiny)).min())


def _far_along(images: Tensor, away: Tensor) -> Tensor:
    """Return images moved along lines, so that some pixel of each moves by half of the range."""
    longest = away.abs().amax((1, 2, 3), keepdim=True).clamp_min(torch.finfo(away.dtype).tiny)
    return images + away * (0.5 / longest)
