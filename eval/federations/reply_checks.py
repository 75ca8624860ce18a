"""What a reply of a client may hold: weights that were sent and then trained, and little beside them.

The same rules hold in Flower and in NVFlare. Nothing here needs either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

LEAST_SHARE = 0.25
"""Share of what was sent that weights after a round must have in them."""
MIN_WEIGHT_COSINE, WEIGHT_SIZES = 0.9, (0.5, 2.0)
"""Cosine with the weights before above which a difference is none, if its length is so many times theirs."""
MIN_MULTIPLE_COSINE, MULTIPLE_SIZES = 0.95, (0.5, 1.5)
"""Cosine with the weights before above which what came back is a multiple of them, if its length is not between."""
MAX_NUMBERS, MAX_CHARACTERS = 128, 1024
"""What may leave beside an update, where no attack looks: metrics and names, but no picture of 12 by 12 pixels."""
MAX_WITHHELD = 32
"""Numbers and, by eights, characters that may leave beside an update that is withheld itself."""
NAMED = 6
"""Entries that are named of what lies beside an update."""
INT_BITS = 64
"""Largest size of a whole number that counts as one; a larger one may hold anything."""


class UnreadableError(ValueError):
    """What a client sends can't be audited as one update of known weights."""


@dataclass
class Beside:
    """What lies in nested containers beside an update.

    Attributes:
        numbers: how many there are.
        characters: of texts and of the names of entries.
        unseen: where lies what is neither number nor text (an array, bytes, an object), the first of it; "" for
            nowhere.
        places: entries that hold something, with how much.
    """

    numbers: int = 0
    characters: int = 0
    unseen: str = ""
    places: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object) -> Beside:
        """Return what lies in nested containers; an array or a tensor of one number counts as that number."""
        found = cls()
        found._add(value, "", "")
        return found

    @property
    def excess(self) -> str:
        """Why it is too much to leave where no attack looks, in words; "" where it is not."""
        if self.unseen:
            return f"{self.unseen!r}, which is neither a number nor a text"
        if self.numbers > MAX_NUMBERS:
            return f"{self.numbers} numbers, more than {MAX_NUMBERS}, most of them under {self._largest!r}"
        if self.characters > MAX_CHARACTERS:
            return (
                f"text of {self.characters} characters, more than {MAX_CHARACTERS}, most of it under {self._largest!r}"
            )
        return ""

    @property
    def size(self) -> int:
        """How many numbers and characters there are."""
        return self.numbers + self.characters

    @property
    def may_leave_alone(self) -> bool:
        """Whether it may leave in the place of an update that is withheld."""
        return not self.unseen and self.numbers <= MAX_WITHHELD and self.characters <= 8 * MAX_WITHHELD

    @property
    def words(self) -> str:
        """What it is, for a report; "" for nothing."""
        names = list(self.places)
        if not names:
            return ""
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return f"{', '.join(names[:NAMED])}{more} ({self.numbers} numbers, {self.characters} characters)"

    @property
    def _largest(self) -> str:
        return max(self.places, key=self.places.__getitem__, default="")

    def _add(self, value: object, place: str, entry: str) -> None:
        """Count what a value holds.

        Args:
            value: whatever lies there.
            place: where, with the places inside of lists.
            entry: without these.
        """
        numbers, characters = _count_numbers(value), len(value) if isinstance(value, str) else 0
        if isinstance(value, Mapping):
            for key, inner in value.items():
                name = f"{place}/{key}" if place else str(key)
                self.characters += len(str(key))
                self._add(inner, name, name)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                self._add(inner, f"{place}/{number}" if place else str(number), entry)
        elif numbers or isinstance(value, str):
            self.numbers += numbers
            self.characters += characters
            self.places[entry] = self.places.get(entry, 0) + numbers + characters
        elif value is not None:
            self.unseen = self.unseen or place or type(value).__name__


def refuse_unseen(content: object, what: str = "the reply") -> Beside:
    """Refuse what may hold examples and that no attack looks at; return what there is of the rest.

    Args:
        content: nested containers, without the update itself.
        what: it is a part of, in errors.

    Raises:
        UnreadableError: it holds an array, bytes or an object, or more than a few numbers or characters.
    """
    found = Beside.of(content)
    if found.excess:
        raise UnreadableError(f"{what} holds {found.excess}: no attack looks at it")
    return found


def refuse_differences(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse arrays that are no weights sent and then trained: the difference of a difference would show nothing.

    Raises:
        UnreadableError: they have too little of the weights before in them.
    """
    sent, kept = _product(before, {name: before[name] for name in after}), _product(before, after)
    if kept < LEAST_SHARE * sent:
        raise UnreadableError(
            f"expected weights, got arrays that hold {kept / sent:.3g} times what was sent: they seem to be "
            "differences or gradients; send weights, or say what they are"
        )


def refuse_weights(before: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> None:
    """Refuse differences that are the weights themselves: added to the weights before they would show nothing.

    Raises:
        UnreadableError: they lie along the weights before, and are about as long.
    """
    same = {name: before[name] for name in change}
    sent, moved, along = _product(same, same), _product(change, change), _product(before, change)
    if not sent or not moved:
        return
    low, high = WEIGHT_SIZES
    if low < math.sqrt(moved / sent) < high and along > MIN_WEIGHT_COSINE * math.sqrt(sent * moved):
        raise UnreadableError(
            "expected differences, got arrays along the weights that were sent (cosine "
            f"{along / math.sqrt(sent * moved):.2f}): they seem to be weights; send differences, or say what they are"
        )


def refuse_no_weights(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse an update that can't be one of known weights, whatever the numbers.

    Raises:
        UnreadableError: nothing came back, or nothing of it is known from before; or whole numbers came back in the
            place of others.
    """
    if not after:
        raise UnreadableError("expected weights, got none: the client sent no update")
    if not before:
        raise UnreadableError(
            "expected the weights before training, got none: an update is how they changed, so keep what the client "
            "was sent (in a first round, too)"
        )
    for name, value in after.items():
        if name in before and before[name].is_floating_point() and not value.is_floating_point():
            raise UnreadableError(
                f"expected floating-point numbers in what came back, got {str(value.dtype).removeprefix('torch.')} in "
                f"{name!r}, as of quantized or encrypted numbers, or shares of a sum: screen it before that, or decode "
                "it first"
            )


def refuse_untrained(sent: Collection[str]) -> NoReturn:
    """Refuse an update without any weights that are trained, such as of running statistics alone.

    Args:
        sent: names of what came back.

    Raises:
        UnreadableError: always.
    """
    raise UnreadableError(
        "expected weights that the model trains in what came back, got "
        f"{', '.join(map(repr, sorted(sent)[:3]))} alone: no attack looks at statistics, nor at frozen weights"
    )


def refuse_multiples(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse a multiple of the weights, such as a sum over clients, whose difference would be the weights again.

    Raises:
        UnreadableError: what came back lies along the weights before, and is longer or shorter than training makes.
    """
    sent, back, along = (
        _product(*pair) for pair in ((before, {n: before[n] for n in after}), (after, after), (before, after))
    )
    if not sent or not back or along < MIN_MULTIPLE_COSINE * math.sqrt(sent * back):
        return
    factor = along / sent
    low, high = MULTIPLE_SIZES
    if not low < factor < high:
        raise UnreadableError(
            f"expected weights, got {factor:.4g} times what was sent (cosine {along / math.sqrt(sent * back):.3f}), as "
            "of a sum over clients, or of weights times the number of examples: divide them first"
        )


def refuse_non_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors with numbers that are not finite: no attack could say anything of them.

    Args:
        tensors: by name.
        what: they are, in errors.

    Raises:
        UnreadableError: there are such; says how many of which tensor.
    """
    for name, value in tensors.items():
        odd = 0 if not value.is_floating_point() else value.numel() - int(value.isfinite().sum())
        if odd:
            raise UnreadableError(
                f"expected finite numbers in {what}, got NaN or infinity in {name!r} ({odd} of {value.numel()}): "
                "training diverged, or the numbers overflowed on the way; lower the step size, or scale the loss down "
                "in half precision"
            )


def _product(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the inner product of two sets of arrays."""
    products = [
        (first[name].double() * value.double()).sum() for name, value in second.items() if value.is_floating_point()
    ]
    return float(torch.stack(products).sum()) if products else 0.0


def _count_numbers(value: object) -> int:
    """Return for how many numbers a value counts; 0 where it is none."""
    if isinstance(value, bool | np.bool_ | float | np.integer | np.floating):
        return 1
    if isinstance(value, int):
        return max(1, math.ceil(value.bit_length() / INT_BITS))
    if isinstance(value, Tensor):
        return int(value.numel() == 1)
    if isinstance(value, np.ndarray):
        return int(value.size == 1 and value.dtype.kind in "biuf")
    return 0
