"""Directions in which the brightness and contrast of pictures change, as a whole and channel by channel.

A picture x becomes brighter if a number is added, and its contrast changes about a gray g by s (x - g). Both are moves
along

    1,  x - mean of x,  x - g

of each channel, and sums of these are all the moves that a network may hide. To first order they change an update by

    |change|^2 = a^T G a,  a the coordinates of the move,

in units of each tensor's error. G follows from one step along each move. Where a^T G a is next to zero, the update does
not tell how far a picture has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl.seeds import stream

Predict = Callable[[Tensor], Mapping[str, Tensor]]
"""What one step on pictures (N, C, H, W) makes."""

MOST_CHANNELS = 4
"""Channels up to which each is asked for by itself."""
STEP, LEAST_STEP = 1e-4, 1e-7
"""By how much pictures move where it is asked what that changes, relative to the contrast of the flattest channel, and
at least, root mean square: by more, bends of the update count, and by less, rounding in double precision does."""
FLOOR = 1e-4
"""Of the largest change of an update, below which one may be none: what that step leaves of it."""
DEPENDENT = 1e-6
"""Share of a pattern that others do not make up, up to which it is left out."""
MOST_NUMBERS = 2**16
"""Numbers of a tensor by which its change is told, at most."""


@dataclass(frozen=True)
class Closeness:
    """How closely other pictures have to make what some do.

    Attributes:
        own: what those make whose others are asked for, in double precision.
        predict: what pictures make, likewise.
        exceeds: whether what pictures make is off by more than allowed.
        units: what each tensor of that may be off by.
        sized: whether its size tells something, too.
        exact: whether no more than rounding is allowed.
        of_last: returns the same question for the last parameters alone, to which pictures answer sooner.
    """

    own: Mapping[str, Tensor]
    predict: Predict
    exceeds: Callable[[Tensor], bool]
    units: Mapping[str, float]
    sized: bool
    exact: bool
    of_last: Callable[[Tensor], Closeness | None] | None = None


@dataclass(frozen=True)
class ScaleDirections:
    """Moves of pictures in brightness and contrast, and what they change.

    Attributes:
        patterns: (k, N, C, H, W); each changes one channel, or all, by a root mean square of 1 over all pictures.
        groups: of each pattern, which channel it changes; 0 where channels are not asked for one by one (k,).
        changes: what moves along two patterns by 1 change together (k, k), in units of what tensors may be off by.
        known: moves (n, k) that networks often take off, up to a factor: those are known to all digits.
    """

    patterns: Tensor
    groups: Tensor
    changes: Tensor
    known: Tensor

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.changes)
        return values.clamp(min=0).sqrt(), vectors.mT

    def limit(self, least: float) -> float:
        """Return the change of an update by a move of 1 that counts as none, where less than `least` does."""
        return max(least, FLOOR * float(self._spectrum[0].max()))

    def tells_all(self, limit: float) -> bool:
        """Return whether every move by 1 changes an update by more."""
        return bool(self._spectrum[0].min() > limit)

    def untold(self, limit: float, group: int | None = None) -> Tensor:
        """Return the moves (m, k), of length 1, that change no more, the least first, and of one group alone if so."""
        if group is None:
            sizes, moves = self._spectrum
            return moves[sizes <= limit]
        own = (self.groups == group).nonzero().flatten()
        values, vectors = torch.linalg.eigh(self.changes[own][:, own])
        moves = torch.zeros(len(own), len(self.groups)).to(self.changes)
        moves[:, own] = vectors.mT
        return moves[values.clamp(min=0).sqrt() <= limit]

    def candidates(self, limit: float, towards: Tensor, group: int | None = None) -> Iterator[Tensor]:
        """Yield moves (N, C, H, W), of length 1, that an update may not tell: those that are known first.

        Args:
            limit: change of an update by a move of 1, at most.
            towards: a move (N, C, H, W); its part that the update does not tell is tried, too, since other sums of
                several such moves may soon leave the range of pixels.
            group: that alone is changed; None for all moves.
        """
        untold = self.untold(limit, group)
        known = self.known if group is None else self.known[(self.known[:, self.groups != group] == 0).all(1)]
        sizes = torch.einsum("nk,kl,nl->n", known, self.changes, known).clamp(min=0).sqrt()
        inwards = untold.mT @ (untold @ self.coordinates(towards))
        for move in (*known[sizes <= limit], inwards, *untold):
            if bool(move.norm() > DEPENDENT):
                yield self.along(move / move.norm())

    def along(self, move: Tensor) -> Tensor:
        """Return a move (k,) as a change of the pictures."""
        return torch.einsum("k,k...->...", move, self.patterns)

    def coordinates(self, change: Tensor) -> Tensor:
        """Return the part of a change of pictures that is a move along the patterns (k,)."""
        return torch.einsum("k...,...->k", self.patterns, change) / change.numel()


def scale_directions(
    asked: Closeness, images: Tensor, gray: Tensor | None, *, by_channel: bool
) -> ScaleDirections | None:
    """Return moves of pictures in brightness and contrast, with what they change; None where that is no number.

    Args:
        asked: how closely other pictures have to make what these do.
        images: (N, C, H, W), in double precision.
        gray: (1, C, H, W), about which a network may take contrast off; None where that is not known.
        by_channel: whether channels are asked for one by one.
    """
    parts = [slice(c, c + 1) for c in range(images.shape[1])] if by_channel else [slice(None)]
    kinds = [_moves_of(images, gray, part) for part in parts]
    blocks = [_orthonormal(moves) for moves in kinds]
    patterns = torch.cat(blocks)
    if not len(patterns):
        return None
    flattest = float((images - images.mean((2, 3), keepdim=True)).square().mean((2, 3)).sqrt().min())
    step = max(STEP * flattest, LEAST_STEP)
    changes = torch.stack([_slope(asked, images, one, step) for one in patterns])
    if not bool(changes.isfinite().all()):
        return None
    own = _sampled(asked.own, asked.units)
    if not asked.sized and bool(own.any()):
        changes = changes - (changes @ own)[:, None] / own.square().sum() * own
    whole = torch.stack(kinds).sum(0)
    known = torch.cat([whole, *kinds] if by_channel else [whole]).flatten(1) @ patterns.flatten(1).mT / images.numel()
    return ScaleDirections(
        patterns=patterns,
        groups=torch.cat([torch.full((len(block),), number) for number, block in enumerate(blocks)]).to(images.device),
        changes=changes @ changes.mT,
        known=known[known.norm(dim=1) > DEPENDENT],
    )


def _slope(asked: Closeness, images: Tensor, move: Tensor, step: float) -> Tensor:
    """Return what moving pictures by 1 changes; to the other side where a network takes none beyond black or white."""
    own = _sampled(asked.own, asked.units)
    slopes = ((_sampled(asked.predict(images + way * move), asked.units) - own) / way for way in (step, -step))
    first = next(slopes)
    return first if bool(first.isfinite().all()) else next(slopes)


def _moves_of(images: Tensor, gray: Tensor | None, part: slice) -> Tensor:
    """Return moves (n, N, C, H, W) of some channels: what makes them brighter, and what raises their contrast."""
    own = images[:, part]
    moves = [torch.ones_like(own), own - own.mean((1, 2, 3), keepdim=True)]
    moves += [] if gray is None else [own - gray[:, part]]
    whole = torch.zeros(len(moves), *images.shape).to(images)
    whole[:, :, part] = torch.stack(moves)
    return whole


def _orthonormal(moves: Tensor) -> Tensor:
    """Return moves of length 1 at right angles that others are sums of, those left out that others make up."""
    found: list[Tensor] = []
    for move in moves:
        size = move.square().mean().sqrt()
        for _ in range(2):  # once more, since rounding leaves something
            for other in found:
                move = move - (move * other).mean() * other
        left = move.square().mean().sqrt()
        if left > DEPENDENT * size:
            found.append(move / left)
    return torch.stack(found) if found else moves[:0]


def _sampled(made: Mapping[str, Tensor], units: Mapping[str, float]) -> Tensor:
    """Return what is made, each tensor in its unit, of large ones numbers at random in place of all."""
    parts = []
    for number, (name, value) in enumerate(made.items()):
        flat = value.flatten() / units[name]
        if len(flat) > MOST_NUMBERS:
            drawn = torch.randint(len(flat), (MOST_NUMBERS,), generator=stream(number, "scale directions"))
            flat = flat[drawn.to(flat.device)] * (len(flat) / MOST_NUMBERS) ** 0.5
        parts.append(flat)
    return torch.cat(parts)
