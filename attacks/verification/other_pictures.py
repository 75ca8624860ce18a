"""Whether other pictures than those found make the same update, as far as that is known to happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.network.pixel_map import PixelMap, doubles, read_pixel_map
from attacks.result import Reconstruction, Remark
from attacks.update.observed_update import ObservedUpdate
from attacks.update.unmoved_tensors import without_unmoved
from attacks.verification.comparison import comparison
from attacks.verification.contrasts import Contrast, ask_contrast
from attacks.verification.negatives import has_negative
from attacks.verification.rearrangements import has_rearranged
from attacks.verification.same_outputs import DIFFERENT, WholeNetwork
from attacks.verification.update_comparison import UpdateComparison
from attacks.verification.words import (
    CHANNELS_CONTRAST_LOOSE,
    CHANNELS_CONTRAST_NEARLY,
    CHANNELS_CONTRAST_OPEN,
    CHANNELS_SHIFT_OPEN,
    CONTRAST_LOOSE,
    CONTRAST_NEARLY,
    CONTRAST_OPEN,
    FEWER_GIVEN,
    FOLDED,
    NEGATIVE,
    REARRANGED,
    SHIFT_OPEN,
    UNCOMPARED,
    UNSEEN,
)
from fl.view import ServerView

UNSEEN_GRAY = 0.5
"""Value of pixels about which nothing is known."""
LEAST_SEEN = 0.5
"""Share of a picture's numbers that a network must be given for a picture that the update bears out."""
WHOLLY_GIVEN = {FOLDED, REARRANGED, NEGATIVE, CONTRAST_OPEN, CHANNELS_CONTRAST_OPEN}
"""Reasons why a picture is one of several, though the network is given all of its pixels."""
CONTRAST_DOUBTS = {True: ("open", "nearly", "loosely"), False: ("open", "loosely")}
"""Answers on a picture's contrast that matter, of one verified, and of one near, whose note says how near."""


def doubt_other_pictures(view: ServerView, held: Reconstruction) -> Reconstruction:
    """Return pictures that the update bears out, not verified where others are known to make it as well.

    Those that it does not bear out are returned with gray in place of pixels that the network is not given.

    Args:
        view: the view that was attacked.
        held: a result, held to its update.
    """
    asked = held.verified or held.approximate
    if held.inputs is None or not (asked or view.task.inputs.is_image):
        return held
    borne_out = _BorneOut(view, held, held.inputs)
    if not asked:
        return borne_out.without_unseen_pixels(held)
    doubt = next(filter(None, (check(borne_out) for check in CHECKS)), None)
    return held if doubt is None else borne_out.doubted(doubt)


@dataclass(frozen=True)
class Doubt:
    """Why pictures that the update bears out are not verified.

    Attributes:
        reason: in words, with places for numbers.
        seen: of the pictures' numbers, that the update tells.
        remarks: what a result says of itself then; None says that it is one of several, or seen in part.
        near: whether a picture may count as near where most of its numbers are told.
    """

    reason: str
    seen: int = 0
    remarks: frozenset[Remark] | None = None
    near: bool = True


@dataclass(frozen=True)
class _BorneOut:
    """Pictures that an update bears out, and what all checks ask for.

    Attributes:
        view: the view that was attacked.
        held: the result.
        inputs: its pictures.
    """

    view: ServerView
    held: Reconstruction
    inputs: Tensor

    @cached_property
    def pixels(self) -> PixelMap:
        """What the network is given of pixels by way of what moved: the rest tells nothing."""
        return read_pixel_map(without_unmoved(self.view))

    @cached_property
    def guess(self) -> tuple[UpdateComparison, Tensor, Tensor] | None:
        """The comparison with the update, and the pictures with the likeliest labels; None where none can be made.

        Where the server does not know the whole network, what the rest of it returns has to do, whatever the labels.
        """
        found = first_guess(self.view, self.held)
        if found is not None or not self.view.private:
            return found
        check = UpdateComparison(self.view, ObservedUpdate(self.view).relative_rounding, True)
        return check, self.inputs, torch.zeros(len(self.inputs), dtype=torch.int64)

    @cached_property
    def network(self) -> WholeNetwork | None:
        """The network, and what it returns of the pictures; None where it can't be told."""
        return WholeNetwork.of(self.view, self.inputs)

    @cached_property
    def contrast(self) -> Contrast:
        """Whether the update tells the pictures' brightness and contrast."""
        if self.guess is None:
            return Contrast("told")
        return ask_contrast(self.view, *self.guess, self.network if self.view.private else None)

    def without_unseen_pixels(self, result: Reconstruction) -> Reconstruction:
        """Return pictures with gray at the pixels that a network is not given; as they are where none is told alone."""
        told = self.pixels.pixels
        if told is None or result.inputs is None:
            return result
        seen = told.to(result.inputs.device).expand_as(result.inputs)
        return replace(result, inputs=torch.where(seen, result.inputs, UNSEEN_GRAY), seen=seen)

    def doubted(self, doubt: Doubt) -> Reconstruction:
        """Return the result, not verified for a reason that is noted."""
        held, count = self.held, self.inputs.numel()
        several = {Remark.ONE_OF_SEVERAL} if held.verified else set()  # of one that is borne out alone many are left
        usual = several if doubt.reason in WHOLLY_GIVEN else {Remark.PARTLY_SEEN}
        remarks = usual if doubt.remarks is None else doubt.remarks
        said = doubt.reason.format(seen=doubt.seen, unseen=count - doubt.seen, count=count)
        held = held.with_note(said if self.view.task.inputs.is_image else said.replace("picture", "example"), *remarks)
        near = doubt.near and doubt.seen >= LEAST_SEEN * count
        held = replace(held, verified=None, fixed=None, approximate=near)
        return self.without_unseen_pixels(held)


def first_guess(view: ServerView, result: Reconstruction) -> tuple[UpdateComparison, Tensor, Tensor] | None:
    """Return the comparison with an update, and the pictures with the likeliest labels; None where none can be made."""
    asked = comparison(view, replace(result, verified=True))
    guess = None if asked is None else next(iter(asked.guesses), None)
    return None if asked is None or guess is None else (asked.check, *guess)


def _doubt_uncompared(found: _BorneOut) -> Doubt | None:
    """Nothing tells which others are confused with the pictures, as the server knows a part of the network alone."""
    if not found.view.private or found.network is not None:
        return None
    return Doubt(UNCOMPARED, remarks=frozenset({Remark.UNCOMPARED}), near=False)


def _doubt_folds(found: _BorneOut) -> Doubt | None:
    """Other values of some pixel come out the same."""
    if found.pixels.kind == "folded":
        return Doubt(FOLDED)
    if found.pixels.kind != "unknown" or not found.held.verified or found.guess is None:
        return None
    check, images, labels = found.guess
    network = found.network if found.view.private else None
    asked = images if network is None else network.images
    others = (other for other in doubles(asked) if bool(((other - asked).abs() > DIFFERENT).any()))
    for other in others:
        if check.is_explained_to_rounding(other, labels) if network is None else bool(network.same(other).all()):
            return Doubt(FOLDED)
    return None


def _doubt_lost_pixels(found: _BorneOut) -> Doubt | None:
    """The network is given fewer functions of pixels than there are pixels.

    Where these are no pixels by themselves, others that make the update may differ everywhere, as far as pixels can.
    """
    if found.pixels.kind != "fewer":
        return None
    seen, shift = len(found.inputs) * found.pixels.numbers, found.pixels.shift
    if shift:
        each = shift == "channels" or found.contrast.of_channels
        scale = Remark.SCALES_TAKEN_OFF if each else Remark.SCALE_TAKEN_OFF
        return Doubt(CHANNELS_SHIFT_OPEN if shift == "channels" else SHIFT_OPEN, seen, frozenset({scale}))
    return Doubt(FEWER_GIVEN, seen, near=found.pixels.pixels is not None)


def _doubt_unseen_numbers(found: _BorneOut) -> Doubt | None:
    """Some numbers change nothing in the update."""
    held = found.held
    asked = found.pixels.kind == "unknown" or (held.approximate and held.fixed is None)
    unseen = 0
    if asked and found.view.private:
        unseen = 0 if found.network is None else found.network.count_unseen()
    elif asked and found.guess is not None:
        unseen = found.guess[0].count_unseen(*found.guess[1:])
    return Doubt(UNSEEN, held.inputs.numel() - unseen) if unseen and held.inputs is not None else None


def _doubt_order(found: _BorneOut) -> Doubt | None:
    """The same parts in another order make the update."""
    guess = found.guess
    rearranged = guess is not None and has_rearranged(found.view, *guess, found.held.fixed, network=found.network)
    return Doubt(REARRANGED) if rearranged else None


def _doubt_sign(found: _BorneOut) -> Doubt | None:
    """The negative makes the update."""
    guess = found.guess
    negative = guess is not None and has_negative(found.view, found.held, guess[0], guess[2], found.network)
    return Doubt(NEGATIVE) if negative else None


def _doubt_contrast(found: _BorneOut) -> Doubt | None:
    """Another brightness or contrast makes the update, or nearly."""
    told = found.contrast
    if told.extent not in CONTRAST_DOUBTS[bool(found.held.verified)]:
        return None
    if told.extent == "loosely":
        scale = Remark.SCALES_TAKEN_OFF if told.of_channels else Remark.SCALE_TAKEN_OFF
        words = CHANNELS_CONTRAST_LOOSE if told.of_channels else CONTRAST_LOOSE
        return Doubt(words, found.inputs.numel(), frozenset({scale}))
    if told.extent == "nearly":  # it is no one of several, but known less well
        words = CHANNELS_CONTRAST_NEARLY if told.of_channels else CONTRAST_NEARLY
        return Doubt(words, found.inputs.numel(), frozenset())
    return Doubt(CHANNELS_CONTRAST_OPEN if told.of_channels else CONTRAST_OPEN)


CHECKS: tuple[Callable[[_BorneOut], Doubt | None], ...] = (
    _doubt_uncompared,
    _doubt_folds,
    _doubt_lost_pixels,
    _doubt_unseen_numbers,
    _doubt_order,
    _doubt_sign,
    _doubt_contrast,
)
"""What is asked in turn: each says why another picture makes the update, or nothing."""
