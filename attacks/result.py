"""An attack returns a reconstruction, or why it says nothing of the view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import Tensor

from fl.tensors import Tensors

IDS_UNSEARCHABLE = (
    "the model is given ids (of tokens, of categories), which no gradient reaches, so they can be neither solved nor "
    "searched for; `tokens` reads off the embeddings' update which of them occur"
)
"""Why attacks say nothing of such inputs."""


class Remark(StrEnum):
    """What a result says of itself for other code to act on; its note has the words for readers."""

    CONTRADICTED = "contradicted"
    """The picture explains what it was read from, and one step on it does not make the rest of the update."""
    RULE_UNKNOWN = "rule unknown"
    """The optimizer was not stated, and nothing in the update tells whether it was plain SGD."""
    SIZE_CONTRADICTED = "size contradicted"
    """One step as stated makes an update of another size, and nothing else in the update tells the brightness."""
    OTHER_LOSS = "other loss"
    """One step on the pictures makes the whole update if other gradients flow back than the loss as stated has."""
    UNASKED = "unasked"
    """The picture explains what it was read from, and no targets are known with which to ask the rest of the update."""
    DIRECTION_ONLY = "direction only"
    """The update tells the picture up to its brightness."""
    SCALE_TAKEN_OFF = "scale taken off"
    """The network takes brightness, or contrast as well, off each picture, which is told but for these."""
    SCALES_TAKEN_OFF = "scales taken off"
    """Likewise of each channel."""
    CENTRALIZED = "centralized"
    """Gradients are centralized, and a step with such ones was held against the update."""
    UNCLIPPED_ROWS = "unclipped rows"
    """Rows of a gradient that was clipped by value agree, and the step taken again, clipped alike, confirms them."""
    BEYOND_RANGE = "beyond range"
    """What the first layer takes lies beyond the range of inputs, and is handed out as it is."""
    PARTLY_SEEN = "partly seen"
    """The network is given fewer numbers than the picture has."""
    PARTLY_TOLD = "partly told"
    """Of the picture more is open than of one that an update bears out: others make the same update."""
    MAY_BE_MIXTURE = "may be a mixture"
    """Of unlike examples that were stated as one, for all that the update tells."""
    ONE_OF_SEVERAL = "one of several"
    """Another picture makes the same update to the last digit: its parts in another order, its mirror, its negative."""
    UNCHECKED = "unchecked"
    """It could not be held to the update in time, so that nobody knows whether it is right."""
    NEARLY_TOLD = "nearly told"
    """The picture explains the layers that it was read from but for little, which is more than rounding."""
    LABELS_CONFIRMED = "labels confirmed"
    """One step with these labels makes the whole update to its rounding."""
    LABELS_DOUBTFUL = "labels doubtful"
    """Nothing confirms the labels: those that a search chose, or took and did not explain the update, and the likeliest
    counts."""


@dataclass(frozen=True)
class Reconstruction:
    """What an attack recovered, chosen by its own objective alone.

    Attributes:
        inputs: (N, C, H, W) in [0, 1], or None where the attack recovers no images.
        labels: (N,) int64, or None where it recovers none.
        objective: the attack's objective at `inputs`, relative to where the (first) search began.
        history: the objective along the search, coarsely.
        private: recovered private tensors by the names of `ServerView.private`, and a recovered extractor under
            `extractor/name`.
        knowledge: what it used or handed on beside the shared parameters, the update, the sizes of the batches, the
            schedule and the defense, e.g. "labels".
        verified: whether the attack could check its own success without the truth; None if it can't tell.
        fixed: (N, C, H, W), True at the pixels of which it says, without the truth, that the update leaves no choice
            among levels of 8 bits; None if it can't tell.
        seen: (N, C, H, W), True at the pixels that the network is given, where it is given some alone (of a crop, say);
            None where it is given all, or that is not known. The others say nothing.
        approximate: whether one step on the images (or features) makes the whole update as nearly as right ones would,
            though they can't be verified: they may be the mean of several nearly alike, or rounding or noise may have
            put them off by more than a quarter of a level. `note` says which.
        note: how far an attack got that did not get to its end, and why what it returns is not verified if it can
            tell; empty where it got there.
        given_up: what stopped the search before it could explain the update (a budget of iterations or time), in
            words; empty where nothing did. It is a limit of the search, as `NotApplicable.limit` is one of an attack.
        cut_short: what ended the search before its time (a time limit, an interrupt; `attacks.search_control`), in
            words; empty where nothing did. Without it the result may have been another.
        misfit: 1 - cos between the update that a search's result would give and the one observed, in [0, 2]; None of
            other attacks.
        relative_error: standard error of the inputs or features found, root mean square, relative to their size; None
            where an attack does not know it.
        remarks: what it says of itself for other code.
    """

    inputs: Tensor | None
    labels: Tensor | None = None
    objective: float = float("nan")
    history: tuple[float, ...] = ()
    private: Tensors = field(default_factory=dict)
    knowledge: tuple[str, ...] = ()
    verified: bool | None = None
    fixed: Tensor | None = None
    seen: Tensor | None = None
    note: str = ""
    given_up: str = ""
    cut_short: str = ""
    misfit: float | None = None
    relative_error: float | None = None
    approximate: bool = False
    remarks: frozenset[Remark] = frozenset()

    def left_unchecked(self, reason: str) -> Reconstruction:
        """Return this result as it is where it could not be held to the update in time.

        Args:
            reason: what came before.
        """
        words = f"not held to the update before {reason}"
        cut = "; ".join(filter(None, (self.cut_short, words)))
        kept = replace(self, verified=self.verified and None, fixed=None, approximate=False, cut_short=cut)
        return kept.with_note(f"not confirmed: {words}", Remark.UNCHECKED)

    def with_note(self, words: str, *remarks: Remark) -> Reconstruction:
        """Return the result with words at the end of its note, and remarks beside those it has."""
        note = "; ".join(filter(None, (self.note, words)))
        return replace(self, note=note, remarks=self.remarks.union(remarks))

    def without_remarks(self, remarks: Iterable[Remark]) -> Reconstruction:
        """Return the result without some remarks."""
        return replace(self, remarks=self.remarks.difference(remarks))


@dataclass(frozen=True)
class NotApplicable:
    """The attack says nothing about this view, and why: a result, not an error.

    Attributes:
        reason: in words.
        limit: whether this is a limit of the attack as it is built, and no fact about the update: how the model is
            written, a layer that it does not undo, a search given up. Such a refusal says nothing of what leaks.
        cut_short: what kept a search from beginning (a time limit, an interrupt), in words; empty where nothing did.
    """

    reason: str
    limit: bool = False
    cut_short: str = ""


Result = Reconstruction | NotApplicable
