"""Judges pictures of known direction whose size was searched for: which of them the whole update bears out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attacks.analytic.scale_search import ScaleSearch, ScaleSolution, find_solutions
from attacks.result import Reconstruction, Remark
from attacks.search_control import StoppedError, check_time_limit
from attacks.update.observed_update import ObservedUpdate
from attacks.update.unmoved_tensors import without_unmoved
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from attacks.verification.replay_checks import reproduces_update
from attacks.verification.update_comparison import UpdateComparison
from attacks.verification.words import LOADER
from fl.inputs.form import InputForm
from fl.tensors import Tensors
from fl.view import ServerView

LEAST_SURPLUS = 1
"""How many more equations than unknowns there must be for a picture to be verified."""
CLEAR_SURPLUS = 2
"""The same for a picture at another step size than the stated one to be handed out."""

UP_TO_BRIGHTNESS = "the update tells the picture up to its brightness"
"""Begins notes on pictures whose size is not determined."""
SEVERAL_FACTORS = f"not confirmed: {UP_TO_BRIGHTNESS}, and {{}} of different brightness make all of it"
OTHER_STEP_SIZE = (
    f"not confirmed: {UP_TO_BRIGHTNESS}; at the stated step size no picture makes the update, and this one does at "
    "another: check the step size, and the loss, which is taken as stated"
)
TOO_FEW_OUTPUTS = f"not confirmed: {UP_TO_BRIGHTNESS}, and {{}} outputs are too few to tell that, too"
OTHER_RANGE = f"what the first layer takes are no pixels in [0, 1], so that it is handed out as it is: {LOADER}"
STATED_RANGE = (
    "what the first layer takes lies beyond the range of inputs as stated, [0, 1] where none was, so that it is handed "
    "out as it is: state that range (input_range, --input-range)"
)
"""The same note for inputs other than pictures."""
NEARLY = "not confirmed: {:.1e} of the update of the first layer is not that of this picture"
FACTOR_UNTOLD = f"not confirmed: {UP_TO_BRIGHTNESS}, and that not to a quarter of a level, whatever the step size was"


def judge_targets(search: ScaleSearch, limit: float) -> Reconstruction | None:
    """Return the picture of a size that the layers above confirm, for the search's targets; None if there is none."""
    searches = [search] if all(part.is_pictured for part in search.parts) else []
    if is_one_input(search):
        searches.append(replace(search, parts=[search.parts[0].without_range()], wide=True))
    for each in searches:
        judged = _judge(each, find_solutions(each), limit)
        if judged is not None:
            return judged
    pictured = bool(searches) and not searches[0].wide
    return _judge_resized(replace(search, sized=False), limit) if search.sized and pictured else None


def _judge_resized(search: ScaleSearch, limit: float) -> Reconstruction | None:
    """Return the picture that makes the update at another step size than stated, never verified; None without one.

    If the loss is another than stated, some wrong picture may explain the few numbers that few outputs send back. So
    there must be clearly more equations than unknowns, and the picture must make the whole update.
    """
    if search.surplus < CLEAR_SURPLUS:
        return None
    found = find_solutions(search)
    residual = max(part.residual for part in search.parts)
    view = without_unmoved(search.view)
    for one in found:
        check_time_limit()
        result = _as_result(search, one)
        if max(residual, one.residual) <= limit and makes_update_to_rounding(search, view, result):
            result = replace(result.with_note(OTHER_STEP_SIZE, Remark.DIRECTION_ONLY), verified=None)
            try:
                single = is_one_input(search) and search.tells_pairs_apart()
            except StoppedError as stopped:
                return replace(result, cut_short=str(stopped))
            return replace(result, private=layer_input(search, one)) if single else result
    return None


def _judge(search: ScaleSearch, found: Sequence[ScaleSolution], limit: float) -> Reconstruction | None:
    """Return the picture that makes the update, verified if no other does and its brightness is determined.

    None means that no picture does. Where the time limit ends the decision, the picture is kept and marked unchecked.

    Args:
        search: that found the pictures.
        found: the pictures that explain their layers.
        limit: largest residual, of the layers' update and of their equations, that counts as rounding.
    """
    judgment = ScaleJudgment(search, found, limit, [_as_result(search, one) for one in found])
    try:
        check_time_limit()
        return judgment.of_any_range() if search.wide else judgment.of_pictures()
    except StoppedError as stopped:
        if search.wide or not found:
            raise
        return judgment.undecided(str(stopped))


@dataclass(frozen=True)
class ScaleJudgment:
    """The choice among pictures that explain their layers.

    Attributes:
        search: that found them.
        found: the pictures, the best first.
        limit: largest residual, of the layers' update and of their equations, that counts as rounding.
        results: a result for each of them.
    """

    search: ScaleSearch
    found: Sequence[ScaleSolution]
    limit: float
    results: Sequence[Reconstruction]

    @cached_property
    def view(self) -> ServerView:
        """The view without tensors that did not move."""
        return without_unmoved(self.search.view)

    @property
    def residual(self) -> float:
        """The largest share of a part's gradient that no single input explains."""
        return max(part.residual for part in self.search.parts)

    @property
    def exact(self) -> list[int]:
        """Indices of the pictures whose residual is rounding."""
        return [i for i, one in enumerate(self.found) if max(self.residual, one.residual) <= self.limit]

    @property
    def is_told(self) -> bool:
        """Whether there are more equations than unknowns."""
        return self.search.surplus >= LEAST_SURPLUS

    def tells_factors(self, number: int) -> bool:
        """Return whether a picture a little brighter or darker leaves more than rounding."""
        return tells_brightness(self.search, self.view, self.found[number], self.results[number])

    def undecided(self, stopped: str) -> Reconstruction:
        """Return the best picture, marked unchecked since the time limit or an interrupt came first."""
        kept = self.results[self.exact[0]] if self.exact else self._nearly()
        return kept.left_unchecked(stopped)

    def of_any_range(self) -> Reconstruction | None:
        """Return the layers' input, outside [0, 1], if it makes the whole update; else None."""
        search = self.search
        borne_out = [i for i in self.exact if makes_update_to_rounding(search, self.view, self.results[i])]
        if not borne_out or not self.is_told or not search.tells_pairs_apart():
            return None
        result = self.results[borne_out[0]]
        if not self.tells_factors(borne_out[0]):
            result = result.with_note(FACTOR_UNTOLD, Remark.DIRECTION_ONLY)
        result = result.with_note(other_range(self.view.task.inputs), Remark.BEYOND_RANGE)
        return replace(result, inputs=None, private=layer_input(search, self.found[borne_out[0]]), verified=None)

    def of_pictures(self) -> Reconstruction | None:
        """Return the picture, or None if there is none."""
        exact, search = self.exact, self.search
        if self.is_told and len(exact) == 1 and self.tells_factors(exact[0]):
            return self.results[exact[0]]  # whether the update bears it out is asked of every result
        if not self.found:
            return None
        if not exact:
            told = self.residual <= self.limit and is_one_input(search) and search.tells_pairs_apart()
            nearly = self._nearly()
            if not told:
                return nearly
            nearly = replace(nearly, private=layer_input(search, self.found[0]))
            return nearly.with_note(UP_TO_BRIGHTNESS, Remark.DIRECTION_ONLY)
        borne_out = [i for i in exact if reproduces_update(self.view, self.results[i]) is not False]
        best = (borne_out or exact)[0]
        others = [i for i in borne_out if _are_apart(self.results[best], self.results[i])]
        if self.is_told and len(exact) > 1 and not others and self.tells_factors(best):
            return self.results[best]
        if not self.is_told and not search.sized and is_one_input(search):
            return None  # some picture makes whatever flows back, so that its direction is all that is told
        return self._of_untold_brightness(best, len(others) + 1, single=bool(borne_out))

    def _nearly(self) -> Reconstruction:
        """Return the best picture, whose residual is more than rounding."""
        most = max(self.residual, self.found[0].residual)
        return replace(self.results[0], verified=None, objective=most).with_note(NEARLY.format(most))

    def _of_untold_brightness(self, best: int, count: int, *, single: bool) -> Reconstruction:
        """Return a picture whose direction alone the update determines.

        Args:
            best: its index.
            count: number of pictures of different brightness that make the update.
            single: whether the whole update agrees with it, so that its direction may be handed out as features.
        """
        search = self.search
        reason = SEVERAL_FACTORS.format(f"{count} pictures") if count > 1 else FACTOR_UNTOLD
        if not self.is_told:
            reason = TOO_FEW_OUTPUTS.format(math.prod(self.view.task.output_shape))
        told = single and is_one_input(search) and search.tells_pairs_apart()
        private = layer_input(search, self.found[best]) if told else {}
        result = replace(self.results[best], verified=None, private=private)
        return result.with_note(reason, Remark.DIRECTION_ONLY)


def other_range(form: InputForm) -> str:
    """Return the note on inputs outside the range that was stated for the network."""
    return OTHER_RANGE if form.is_image else STATED_RANGE


def is_one_input(search: ScaleSearch) -> bool:
    """Return whether one input determines the picture, and several pictures could be told from a single one."""
    return len(search.parts) == 1 and has_several_directions(search.view)


def makes_update_to_rounding(search: ScaleSearch, view: ServerView, result: Reconstruction) -> bool:
    """Return whether a step on a picture makes the whole update to rounding, in size too if the step size is known."""
    assert result.inputs is not None
    assert result.labels is not None
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    explained = check.is_explained_to_rounding(result.inputs, result.labels)
    return explained and (not search.sized or check.has_stated_size(result.inputs, result.labels))


def has_several_directions(view: ServerView) -> bool:
    """Return whether several pictures send back signals of several directions; with two outputs there is only one."""
    shape = view.task.output_shape
    return math.prod(shape) > 2 and not view.task.loss.sends_back_one_direction(shape)


def layer_input(search: ScaleSearch, one: ScaleSolution) -> Tensors:
    """Return the input of the one layer, under the layer's name."""
    (part,) = search.parts
    return {f"features/{part.layer.weight}": (one.factors * part.direction).to(search.view.dtype)}


def _as_result(search: ScaleSearch, one: ScaleSolution) -> Reconstruction:
    view = search.view
    pixels = search.pictures(one.factors[None])
    return Reconstruction(
        inputs=(pixels if search.wide else pixels.clamp(0, 1)).to(view.dtype),
        labels=search.targets[one.target][None].to(view.device),
        objective=one.residual,
        knowledge=() if view.labels is None else ("labels",),
        verified=True,
    )


def _are_apart(one: Reconstruction, other: Reconstruction) -> bool:
    assert one.inputs is not None
    assert other.inputs is not None
    return float((one.inputs - other.inputs).double().square().mean().sqrt()) > MAX_PIXEL_ERROR


def tells_brightness(search: ScaleSearch, view: ServerView, one: ScaleSolution, result: Reconstruction) -> bool:
    """Return whether pictures with a part a quarter of a level brighter or darker leave more than rounding."""
    assert result.inputs is not None
    assert result.labels is not None
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    step = []
    for part in search.parts:
        heard = part.layer.slope != 0
        step.append(MAX_PIXEL_ERROR / float((part.direction[heard] / part.layer.slope[heard]).square().mean().sqrt()))
    signs = [s for s in itertools.product((-1.0, 0.0, 1.0), repeat=len(step)) if any(s)]
    moved = one.factors + torch.tensor(signs).to(one.factors) * torch.tensor(step).to(one.factors)
    return check.tells_apart(result.inputs, search.pictures(moved), result.labels)
