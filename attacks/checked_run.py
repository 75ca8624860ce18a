"""One run of an attack on several views: what it returns is checked, confirmed, and put in the words of its inputs.

The order is:

1. Each view is prepared: weights under weight norm become plain ones, and an attack that does not get through a pixel
   prefix gets the network above it (`attacks.prefix_inversion`).
2. The attack runs. Errors that tell why a network can't be attacked become results that say so.
3. Results on a network above are confirmed. Where that came to nothing, the attack runs on the whole network, too.
4. All other results are checked and confirmed (`attacks.verification`), each within the time that is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from attacks.network.autograd_support import AUTOGRAD_ERRORS, autograd_obstacle
from attacks.prefix_inversion import Confirming, confirm_whole, is_better, needs_whole_network, network_above
from attacks.result import NotApplicable, Reconstruction, Result
from attacks.result_checks import check_result, doubt_unaskable
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.weight_norm import with_plain_weights
from attacks.verification.words import in_words_of
from fl.losses.function import FunctionError, function_errors_named
from fl.runtime.double_precision import PrecisionError
from fl.view import ServerView

Runner = Callable[[Sequence[ServerView], Sequence[int]], list[Result]]
"""Runs an attack on views, each with its seed."""


@dataclass(frozen=True)
class PreparedView:
    """A view in the forms in which an attack and its confirmation take it.

    Attributes:
        view: what the server saw.
        plain: the same with plain weights for those under weight norm; the view itself where there are none.
        above: of the network above a pixel prefix, on which the attack runs; None if it runs on the whole network.
    """

    view: ServerView
    plain: ServerView
    above: ServerView | None

    @property
    def attacked(self) -> ServerView:
        """The view that the attack is given."""
        return self.plain if self.above is None else self.above

    def evidence_for(self, result: Result) -> ServerView:
        """Return the view that has to bear a result out: with plain weights where it is of features alone."""
        return self.plain if isinstance(result, Reconstruction) and result.inputs is None else self.view


@dataclass(frozen=True)
class CheckedRun:
    """A run of an attack whose results are checked and confirmed.

    Attributes:
        attack: any; it need not be an `Attack`.
        name: of the attack, for messages.
        run: runs it.
        control: limits of the search; None for none.
    """

    attack: Confirming
    name: str
    run: Runner
    control: SearchControl | None = None

    def results(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Return a confirmed result for each view.

        Gradients are on, whatever the caller does, and attention is computed in plain steps: the fused kernels can't be
        differentiated twice.

        Args:
            views: what the server saw.
            seeds: one for each view.

        Raises:
            TypeError: the attack returned something else, or changed a view's tensors in place.
            ValueError: a result does not fit its view (`attacks.result_checks`).
        """
        before = [_tensor_versions(view) for view in views]
        plain = [self._with_plain_weights(view) for view in views]
        try:
            with nullcontext() if self.control is None else limited_by(self.control):
                above = [network_above(self.attack, view) for view in plain]
        except StoppedError as stopped:
            return [not_done_before(stopped) for _ in views]
        prepared = [PreparedView(*forms) for forms in zip(views, plain, above, strict=True)]
        confirmed: dict[int, Result] = {}  # of networks above, confirmed already, since that may take long
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            try:
                with function_errors_named():
                    results = self.run([one.attacked for one in prepared], seeds)
                    self._settle_prefixes(prepared, results, confirmed, seeds)
            except PrecisionError as error:
                results = [NotApplicable(str(error), limit=True) for _ in views]
            except FunctionError as error:
                results = [NotApplicable(f"{error}, with {_tried_targets(view)}", limit=True) for view in views]
            except AUTOGRAD_ERRORS as error:
                found = autograd_obstacle(views[0], error)  # one method's views have the network in common
                if found is None:
                    raise
                results = [NotApplicable(found, limit=True) for _ in views]
        if len(results) != len(views):
            raise TypeError(f"expected a result of attack {self.name!r} for each of {len(views)} views")
        for one, result in zip(prepared, results, strict=True):
            check_result(self.name, result, one.view if one.above is None else one.above)
        if [_tensor_versions(view) for view in views] != before:
            raise TypeError(
                f"attack {self.name!r} changed tensors of the view in place, which others attack too: clone"
            )
        return [
            self._finish(one, _detached(result), confirmed.get(i))
            for i, (one, result) in enumerate(zip(prepared, results, strict=True))
        ]

    def _with_plain_weights(self, view: ServerView) -> ServerView:
        return with_plain_weights(view) if getattr(self.attack, "takes_plain_weights", False) else view

    def _settle_prefixes(
        self,
        prepared: list[PreparedView],
        results: list[Result],
        confirmed: dict[int, Result],
        seeds: Sequence[int],
    ) -> None:
        """Confirm results on networks above a prefix, and put those on the whole network in place of failed ones.

        Args:
            prepared: changed where the whole network's result is taken.
            results: likewise.
            confirmed: gets the confirmed results, by the view's number.
            seeds: one for each view.
        """
        for i, one in enumerate(prepared):
            if one.above is None:
                continue
            if isinstance(results[i], Reconstruction):
                check_result(self.name, results[i], one.above)
                confirmed[i] = _detached(self._confirm(one.evidence_for(results[i]), one.above, results[i]))
            if needs_whole_network(one.view, confirmed.get(i)):
                (whole,) = self.run([one.plain], [seeds[i]])
                if isinstance(whole, Reconstruction) and is_better(whole, results[i]):
                    results[i], prepared[i] = whole, replace(one, above=None)
                    confirmed.pop(i, None)

    def _finish(self, one: PreparedView, result: Result, confirmed: Result | None) -> Result:
        """Return a result confirmed, if it is not yet, and in words of the inputs that the network takes."""
        if confirmed is None or not isinstance(result, Reconstruction):
            result = doubt_unaskable(one.view, result)
            confirmed = self._confirm(one.evidence_for(result), one.above, result)
        return _in_words_of_inputs(one.view, _note_unexpected_labels(one.view, confirmed))

    def _confirm(self, view: ServerView, above: ServerView | None, result: Result) -> Result:
        """Return a result confirmed, or as it is where that takes long beyond the time limit."""
        if self.control is None or not isinstance(result, Reconstruction):
            return confirm_whole(self.attack, view, above, result)
        with limited_by(self.control.overtime()):
            try:
                return confirm_whole(self.attack, view, above, result)
            except StoppedError as stopped:
                self.control.cut_short_by = self.control.cut_short_by or str(stopped)
                return result.left_unchecked(str(stopped))


def not_done_before(stopped: StoppedError) -> NotApplicable:
    """Return the result of an attack that had found nothing when the time limit or an interrupt ended it."""
    words = f"not done before {stopped}"
    return NotApplicable(words, limit=True, cut_short=words)


def _tried_targets(view: ServerView) -> str:
    """Return with which targets the attack called a loss function of the user's own, in words."""
    if view.labels is None:
        return "targets that the attack tried"
    return (
        f"the labels that were stated, {view.labels.dtype} {tuple(view.labels.shape)}, beside outputs "
        f"{(len(view.labels), *view.task.output_shape)}: give them as the function takes them"
    )


def _in_words_of_inputs(view: ServerView, result: Result) -> Result:
    """Return the result with its words on pictures said of what the network takes, such as rows of a table."""
    form = view.task.inputs
    if isinstance(result, NotApplicable):
        return replace(result, reason=in_words_of(form, result.reason))
    return replace(result, note=in_words_of(form, result.note))


def _note_unexpected_labels(view: ServerView, result: Result) -> Result:
    """Return the result, with a note where its labels are not among those that the server knows, in whatever order."""
    known, found = view.labels, getattr(result, "labels", None)
    if not isinstance(result, Reconstruction) or known is None or found is None or not known.ndim == found.ndim == 1:
        return result
    if Counter(found.tolist()) <= Counter(known.tolist()):  # an attack may find some of the images
        return result
    return result.with_note(f"the labels found, {found.tolist()}, are not those known, {known.tolist()}")


def _tensor_versions(view: ServerView) -> list[int]:
    """Return how often each tensor that was sent, or sent back, was changed in place."""
    parts = pytree.tree_leaves([dict(view.shared), dict(view.update)])
    return [part._version for part in parts if isinstance(part, Tensor) and not part.is_inference()]


def _detached(result: Result) -> Result:
    """Return a result whose images need no gradient; a network may have asked one of what it was given."""
    if isinstance(result, NotApplicable) or result.inputs is None or not result.inputs.requires_grad:
        return result
    return replace(result, inputs=result.inputs.detach())
