"""What attacks return: a reconstruction, or the reason why the attack does not apply."""

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
"""The reason why attacks do not apply to such inputs."""


class Remark(StrEnum):
    """What a result says about itself, for other code to act on; its note has the words for readers.

    "Replay" is one step of the client, taken again on the picture that was found.
    """

    CONTRADICTED = "contradicted"
    """The picture explains the layers that it was read from, but its replay does not make the rest of the update."""
    RULE_UNKNOWN = "rule unknown"
    """The optimizer was not stated, and nothing in the update tells whether it was plain SGD."""
    SIZE_CONTRADICTED = "size contradicted"
    """The replay makes an update of another size, and nothing else in the update tells the picture's brightness."""
    OTHER_LOSS = "other loss"
    """The replay makes the whole update only with a gradient of the outputs that the stated loss does not have."""
    UNASKED = "unasked"
    """The picture explains the layers that it was read from. There is no replay, since no targets are known."""
    DIRECTION_ONLY = "direction only"
    """The update determines the picture up to its brightness."""
    SCALE_TAKEN_OFF = "scale taken off"
    """The network normalizes each picture's brightness (or contrast, too) away; the rest of it is determined."""
    SCALES_TAKEN_OFF = "scales taken off"
    """The network normalizes brightness (or contrast, too) of each channel away; the rest is determined."""
    CENTRALIZED = "centralized"
    """The client centralizes gradients, and the replay did so as well."""
    UNCLIPPED_ROWS = "unclipped rows"
    """The gradient was clipped by value. The picture is from rows without clipped numbers; the replay clips alike."""
    BEYOND_RANGE = "beyond range"
    """The first layer's input is outside the range of inputs, and is returned as features."""
    PARTLY_SEEN = "partly seen"
    """The network is given fewer numbers than the picture has."""
    PARTLY_TOLD = "partly told"
    """The update leaves more of the picture open than is allowed: other pictures make the same update."""
    MAY_BE_MIXTURE = "may be a mixture"
    """The picture may be a mean of unlike examples that were stated as one; the update does not tell."""
    ONE_OF_SEVERAL = "one of several"
    """Another picture makes the same update to the last digit: its parts in another order, its mirror, its negative."""
    UNCHECKED = "unchecked"
    """The time limit or an interrupt came before the replay, so that it is unknown whether the picture is right."""
    UNCOMPARED = "uncompared"
    """The network can't be run on other pictures, so that it is unknown which of them it confuses with this one."""
    NEARLY_TOLD = "nearly told"
    """The picture explains nearly all of the layers that it was read from; the residual is small, but not rounding."""
    LABELS_CONFIRMED = "labels confirmed"
    """The replay with these labels makes the whole update to its rounding."""
    LABELS_DOUBTFUL = "labels doubtful"
    """Nothing confirms the labels: a search chose them, or did not explain the update, or they are likeliest counts."""


@dataclass(frozen=True)
class Reconstruction:
    """What an attack recovered, chosen by its own objective alone.

    Attributes:
        inputs: the images (N, C, H, W) in [0, 1]; None if the attack recovers none.
        labels: of the images (N,), int64; None if the attack recovers none.
        objective: the attack's objective at `inputs`, relative to where the (first) search began.
        history: values of the objective along the search, a few of them.
        private: recovered private tensors by the names of `ServerView.private`, and a recovered extractor under
            `extractor/name`.
        knowledge: what the attack was told beside the shared parameters, the update, the sizes of the batches, the
            schedule and the defense, e.g. "labels".
        verified: True if the attack and the whole update confirm the images without the truth, False if they fail the
            attack's own check or the update contradicts them, None if it can't be decided (docs/concepts/verified.md).
        fixed: True at the pixels (N, C, H, W) whose level of 8 bits the update determines, judged without the truth;
            None if that is unknown.
        seen: True at the pixels (N, C, H, W) that the network looks at, if it leaves some out (by a crop, say); None if
            it looks at all, or that is unknown. The other pixels of `inputs` mean nothing.
        approximate: whether a replayed step on the images makes the whole update as nearly as the right ones would,
            though they are not verified: they may be the mean of several that are nearly alike, or rounding or noise
            may have moved them by more than a quarter of a level. `note` says which.
        note: where the attack ended if it did not reach the images, and why the result is not verified; else empty.
        given_up: which budget (iterations, time) of the search itself ran out before the update was explained; else
            empty. It says something about the search and not about what leaks, as `NotApplicable.limit` does.
        cut_short: which limit from outside (a time limit, an interrupt; `attacks.search_control`) ended the search;
            else empty. A longer search might have found something else.
        misfit: 1 - cos between the update that a search's result would give and the one observed, in [0, 2]; None for
            other attacks.
        relative_error: root mean square standard error of the inputs or features, relative to their size; None if
            unknown.
        remarks: what the result says about itself, for other code.
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
        """Return this result with the remark that there was no time to check it by the update.

        Args:
            reason: what came first: the time limit or an interrupt.
        """
        words = f"not held to the update before {reason}"
        cut = "; ".join(filter(None, (self.cut_short, words)))
        kept = replace(self, verified=self.verified and None, fixed=None, approximate=False, cut_short=cut)
        return kept.with_note(f"not confirmed: {words}", Remark.UNCHECKED)

    def with_note(self, words: str, *remarks: Remark) -> Reconstruction:
        """Return the result with words added to its note, and further remarks."""
        note = "; ".join(filter(None, (self.note, words)))
        return replace(self, note=note, remarks=self.remarks.union(remarks))

    def without_remarks(self, remarks: Iterable[Remark]) -> Reconstruction:
        """Return the result without some remarks."""
        return replace(self, remarks=self.remarks.difference(remarks))


@dataclass(frozen=True)
class NotApplicable:
    """The reason why an attack does not apply to a view: a result, not an error.

    Attributes:
        reason: in words.
        limit: whether the reason is a limit of the attack as it is built (how the model is written, a layer that it
            can't invert, a search given up), and not a fact about the update. Such a refusal is no sign of safety.
        cut_short: which limit from outside (a time limit, an interrupt) kept a search from beginning; else empty.
    """

    reason: str
    limit: bool = False
    cut_short: str = ""


Result = Reconstruction | NotApplicable
