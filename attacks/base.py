"""An attack takes a server's view and returns a reconstruction, or the reason why there is none."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from attacks.labels.targets import with_target
from attacks.network.autograd_support import AUTOGRAD_ERRORS, autograd_obstacle
from attacks.network.kept_readings import readings_kept
from attacks.network.pixel_prefix import PixelPrefix, doubt_bends, read_pixel_prefix
from attacks.result import IDS_UNSEARCHABLE, NotApplicable, Reconstruction, Remark, Result
from attacks.result_checks import check_result, doubt_unaskable
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.float_rounding import largest_rounding
from attacks.update.plain_weights import with_plain_weights
from attacks.verification.comparison import can_replay
from attacks.verification.confirmation import confirm
from attacks.verification.value_errors import value_errors
from attacks.verification.words import in_words_of
from fl.aggregated_view import as_single_client
from fl.losses.function import FunctionError, function_errors_named
from fl.registry import FormerHooks, Registry, UnknownNameError
from fl.runtime.double_precision import PrecisionError
from fl.settings import current_names
from fl.simulation.nonfinite_updates import all_finite, form_mismatch
from fl.types import Batch, Task
from fl.view import ServerView

__all__ = [
    "Attack",
    "Chain",
    "NotApplicable",
    "Preset",
    "Reconstruction",
    "Remark",
    "Result",
    "ViewRewriter",
    "attacks",
    "build",
    "label",
    "run_checked",
]


INPUT_KINDS = {
    "series": "a series of steps",
    "table": "a row of a table",
    "several": "made of several tensors",
    "tokens": "made of ids",
}
"""What inputs are that are no pictures, in words."""


class AttackRegistry(Registry["Attack"]):
    """The registry of attacks, which also builds chains (`first+then`) and published settings (`preset`)."""

    def build(self, spec: str | Mapping[str, Any] | Attack) -> Attack:
        """Return an attack from its name or its settings; `first+then` chains two, other settings then go to the last.

        `preset` takes the attack's published settings of that name; what is given beside it goes before them.

        Raises:
            fl.registry.UnknownNameError: unknown attack, preset or setting; says what is close.
        """
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, Mapping):
            return super().build(spec)
        first, plus, then = str(spec.get("name", "")).partition("+")
        if not plus:
            return super().build(_with_preset(dict(spec)))
        return Chain(first=super().build(first), then=self.build({**spec, "name": then}))


attacks = AttackRegistry("attack", "attacks")
build = attacks.build


@dataclass(frozen=True)
class Preset:
    """Settings of an attack that have a name: published ones, or such as a sweep of ours found best for a network.

    Attributes:
        source: where they stand.
        settings: by the names of the attack's fields; the others keep their defaults.
    """

    source: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attack(FormerHooks):
    """The base of every attack: settings in the object, the view in the call.

    A subclass defines `attack_view` for a single view, or `run` for a stack of them.
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Any]] = attacks
    former_hooks: ClassVar[Mapping[str, str]] = {"one": "attack_view"}
    plain: ClassVar[str] = ""
    """What it does, in words for a reader who knows none of the papers."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Published settings by name: `build({"name": "ig", "preset": "paper"})`."""
    images_only: ClassVar[bool] = False
    """Whether it rests on inputs that are pictures: rows and columns of pixels that depend on each other."""
    reads_ids: ClassVar[bool] = False
    """Whether it takes networks with ids (of tokens, of categories) among their inputs, which no gradient reaches."""
    takes_off: ClassVar[frozenset[str]] = frozenset()
    """Kinds of what a network does to pixels first (`attacks.network.pixel_prefix`) that are taken off, of one image,
    before the attack is run on what lies above."""
    takes_plain_weights: ClassVar[bool] = False
    """Whether of weights under weight norm it is given plain ones, with their gradient. What it finds is held against
    the update as it came."""
    supports_groups: ClassVar[bool] = False
    """Whether it takes a view of a group of clients (secure aggregation); else only where that is as of one client."""

    def __call__(self, view: ServerView, *, seed: int = 0, control: SearchControl | None = None) -> Result:
        """Attack one view; the same seed gives the same result.

        An update that lacks tensors is attacked by those that are there.

        Args:
            view: the server's.
            seed: of whatever the attack draws.
            control: time limit and progress of a search (`attacks.search_control`); None for neither.

        Raises:
            TypeError: not a view, or the attack returned no result or changed the view.
            ValueError: a tensor of the update has another shape or type than what the server sent, or is sparse or
                complex (says which), the number of images is below 1 although some were fed, or labels are not theirs.
        """
        _check_view(view)
        return run_checked(self, [view], [seed], control)[0]

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Attack several views, each with its own seed; equal to attacking one at a time."""
        single = [self.single_client_view(view) for view in views]
        return [
            view if isinstance(view, NotApplicable) else self.attack_view(view, seed)
            for view, seed in zip(single, seeds, strict=True)
        ]

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        """Attack several views within what `control` allows; what solves is ended by `check_time_limit`."""
        results: list[Result] = []
        for view, seed in zip(views, seeds, strict=True):
            with limited_by(control):
                try:
                    results += self.run([view], [seed])
                except StoppedError as stopped:
                    results.append(_not_done_before(stopped))
        return results

    @property
    def is_controllable(self) -> bool:
        """Whether it searches in iterations, and so hears a `SearchControl`; a `run` of its own goes before."""
        own = next(kind for kind in type(self).__mro__ if {"run", "run_controlled"} & vars(kind).keys())
        return own is not Attack and "run_controlled" in vars(own)

    def estimate_seconds(self, views: Sequence[ServerView]) -> float | None:
        """Return about how long the attack takes on these views in one process, or None where it can't tell."""
        return None

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        """Return the views that are best attacked together, by their indices: what may be spread over processes."""
        return [[i] for i in range(len(views))]

    def auxiliary_images(self) -> Batch | None:
        """Return images that the attacker has before it sees any update, and which are none of those attacked."""
        return None

    def input_obstacle(self, view: ServerView) -> NotApplicable | None:
        """Return why the attack says nothing of such inputs, or None."""
        form = view.task.inputs
        if form.has_ids and not self.reads_ids:
            return NotApplicable(IDS_UNSEARCHABLE, limit=True)
        if self.images_only and not form.is_image:
            reason = f"it is for pictures, and an input is {INPUT_KINDS[form.kind]}; try ig, or analytic"
            return NotApplicable(reason, limit=True)
        return None

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result, verified only where the whole update bears it out (`attacks.verification`)."""
        return confirm(view, result)

    def single_client_view(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view as one of a single client, for an attack that knows no groups.

        Other attacks get it as it is, if it is finite.
        """
        if not all_finite(view.update):
            return NotApplicable("the update has numbers that are not finite")
        if not view.parts or self.supports_groups:
            return view
        found = as_single_client(view)
        return (
            NotApplicable(f"only the mean of {len(view.parts)} clients: {found}") if isinstance(found, str) else found
        )

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Attack one view."""
        raise TypeError(f"{type(self).__name__} defines neither attack_view() nor run()")


@dataclass(frozen=True, kw_only=True)
class ViewRewriter(Attack):
    """An attack that rewrites a view into an easier one, which another attack can take over: `peel+ig`."""

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the easier view, or why there is none."""
        raise TypeError(f"{type(self).__name__} does not define rewrite()")

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Return what the rewrite reads by itself: no images."""
        rewritten = self.rewrite(view)
        if isinstance(rewritten, NotApplicable):
            return rewritten
        return self.lift_result(view, rewritten, Reconstruction(inputs=None))

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result on the rewritten view as one on the first view.

        Args:
            view: the server's, of the first attack.
            rewritten: the view that the attack was run on.
            result: of the attack on it.
        """
        return result

    def attack_rewritten(
        self, then: Attack, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl | None = None
    ) -> list[Result]:
        """Attack the rewritten views with `then` in one batch; check results where the first view can't be asked.

        Args:
            then: the attack on the rewritten views.
            views: the server's.
            seeds: one for each view.
            control: limits and listener of the search; None has none.
        """
        single = [self.single_client_view(view) for view in views]
        rewritten = [view if isinstance(view, NotApplicable) else self.rewrite(view) for view in single]
        open_to = [i for i, view in enumerate(rewritten) if isinstance(view, ServerView)]
        found = runner(then, control)([rewritten[i] for i in open_to], [seeds[i] for i in open_to])  # type: ignore[misc]
        results: list[Result] = [view if isinstance(view, NotApplicable) else NotApplicable("") for view in rewritten]
        for i, result in zip(open_to, found, strict=True):
            easier = rewritten[i]
            assert isinstance(easier, ServerView)
            if not (easier.threat.knows_optimizer or can_replay(views[i])):
                result = self.confirm(easier, result)
            if isinstance(result, Reconstruction):
                result = self.lift_result(views[i], easier, result)
            results[i] = result
        return results


def runner(
    attack: Attack, control: SearchControl | None
) -> Callable[[Sequence[ServerView], Sequence[int]], list[Result]]:
    """Return the attack's `run`, within what `control` allows where there is one."""
    if control is None or not isinstance(attack, Attack):
        return attack.run
    if attack.is_controllable:
        return partial(attack.run_controlled, control=control)
    return partial(Attack.run_controlled, attack, control=control)


def run_checked(
    attack: Attack, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl | None = None
) -> list[Result]:
    """Run `attack` on several views, and check that each has a result and that nothing was changed.

    Gradients are on, whatever the caller does, and attention is computed in plain steps: the fused kernels can't be
    differentiated twice.

    Raises:
        TypeError: it returned something else, or changed a view's tensors in place.
    """
    name = getattr(attack, "name", type(attack).__name__)  # of a class that is not registered in this process
    refused = [getattr(attack, "input_obstacle", lambda view: None)(view) for view in views]
    if any(refused):
        open_to = [i for i, reason in enumerate(refused) if reason is None]
        own = [views[i] for i in open_to], [seeds[i] for i in open_to]
        rest = iter(run_checked(attack, *own, control) if open_to else ())
        return [next(rest) if reason is None else reason for reason in refused]
    with readings_kept():
        return _run_and_confirm(attack, name, views, seeds, control)


def _not_done_before(stopped: StoppedError) -> NotApplicable:
    """Return the result of an attack that has found nothing by the time it was to end."""
    words = f"not done before {stopped}"
    return NotApplicable(words, limit=True, cut_short=words)


def _tried_targets(view: ServerView) -> str:
    """Return of which targets a loss function of the user's own was asked, in words."""
    if view.labels is None:
        return "targets that the attack tried"
    return (
        f"the labels that were stated, {view.labels.dtype} {tuple(view.labels.shape)}, beside outputs "
        f"{(len(view.labels), *view.task.output_shape)}: give them as the function takes them"
    )


def _run_and_confirm(
    attack: Attack, name: str, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl | None
) -> list[Result]:
    before = [_tensor_versions(view) for view in views]
    plain = [with_plain_weights(view) if getattr(attack, "takes_plain_weights", False) else view for view in views]
    try:
        with nullcontext() if control is None else limited_by(control):
            above = [_network_above(attack, view) for view in plain]
    except StoppedError as stopped:
        return [_not_done_before(stopped) for _ in views]
    attacked = [view if other is None else other for view, other in zip(plain, above, strict=True)]
    held: dict[int, Result] = {}  # of networks above: to hold a result to its update may take long
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            with function_errors_named():
                results = runner(attack, control)(attacked, seeds)
                for i, other in enumerate(above):
                    if other is None:
                        continue
                    if isinstance(results[i], Reconstruction):
                        check_result(name, results[i], other)
                        told_by = plain[i] if results[i].inputs is None else views[i]  # type: ignore[union-attr]
                        held[i] = _detached(_confirm_in_time(attack, told_by, other, results[i], control))
                    if _needs_whole(views[i], held.get(i)):
                        (whole,) = runner(attack, control)([plain[i]], [seeds[i]])
                        if isinstance(whole, Reconstruction) and _has_more(whole, results[i]):
                            results[i], above[i] = whole, None
                            held.pop(i, None)
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
        raise TypeError(f"expected a result of attack {name!r} for each of {len(views)} views")
    for view, other, result in zip(views, above, results, strict=True):
        check_result(name, result, view if other is None else other)
    results = [_detached(result) for result in results]
    if [_tensor_versions(view) for view in views] != before:
        raise TypeError(f"attack {name!r} changed tensors of the view in place, which others attack too: clone")
    for i, result in enumerate(results):
        known = held.get(i) if isinstance(result, Reconstruction) else None
        asked = doubt_unaskable(views[i], result)
        told_by = plain[i] if isinstance(asked, Reconstruction) and asked.inputs is None else views[i]
        held_to = known or _confirm_in_time(attack, told_by, above[i], asked, control)
        results[i] = _in_words_of_inputs(views[i], _note_unexpected_labels(views[i], held_to))
    return results


def _confirm_in_time(
    attack: Attack, view: ServerView, above: ServerView | None, result: Result, control: SearchControl | None
) -> Result:
    """Return a result held to its update, or unconfirmed where that takes long beyond the time limit."""
    if control is None or not isinstance(result, Reconstruction):
        return confirm_whole(attack, view, above, result)
    with limited_by(control.overtime()):
        try:
            return confirm_whole(attack, view, above, result)
        except StoppedError as stopped:
            control.cut_short_by = control.cut_short_by or str(stopped)
            return result.left_unchecked(str(stopped))


def _in_words_of_inputs(view: ServerView, result: Result) -> Result:
    """Return the result with what it says of pictures said of what the network takes."""
    form = view.task.inputs
    if isinstance(result, NotApplicable):
        return replace(result, reason=in_words_of(form, result.reason))
    return replace(result, note=in_words_of(form, result.note))


def _network_above(attack: Attack, view: ServerView) -> ServerView | None:
    """Return the view on which an attack is run instead: of the network above what it takes off; None of none."""
    takes_off: frozenset[str] = getattr(attack, "takes_off", frozenset())
    if not takes_off or view.batch_size != 1 or view.private or view.parts:
        return None
    prefix = read_pixel_prefix(view)
    return None if prefix is None or prefix.kind not in takes_off else prefix.above(view)


def _needs_whole(view: ServerView, held: Result | None) -> bool:
    """Return whether the network above led to nothing, so that the whole is asked as well.

    Behind bent pixels, levels of 8 bits lie where an attack on the network above does not look for them.

    Args:
        view: the server's.
        held: what an attack on the network above found, as the update bears it out; None where it refused.
    """
    if not isinstance(held, Reconstruction) or held.inputs is None:
        return True
    prefix = read_pixel_prefix(view)
    return prefix is not None and prefix.kind == "bent" and not held.verified


def _has_more(whole: Reconstruction, other: Result) -> bool:
    """Return whether what the whole network led to is a picture, or no picture was found above what is taken off."""
    return whole.inputs is not None or isinstance(other, NotApplicable) or other.inputs is None


def confirm_whole(attack: Attack, view: ServerView, above: ServerView | None, result: Result) -> Result:
    """Return a result as the update bears it out.

    Pictures whose scale a network takes off are held against the network above, which is given no scale.

    Args:
        attack: that made it.
        view: the server's.
        above: on which the attack was run instead, if so.
        result: of it.
    """
    confirm = getattr(attack, "confirm", lambda view, result: result)
    if not isinstance(result, Reconstruction):
        return confirm(view, result)
    if result.inputs is None:
        return confirm(view if above is None else above, with_target(view, result))
    prefix = read_pixel_prefix(view) if above is not None or not (view.private or view.parts) else None
    if prefix is None:
        return confirm(view, with_target(view, result))
    if prefix.kind == "bent":
        held = confirm(view, with_target(view, result if above is None else prefix.turn_back(result)))
        return _bound_bent(prefix, view, above, result, held)
    asked, shown = above, None
    if above is None:
        asked = prefix.above(view) if view.batch_size == 1 == len(result.inputs) else None
        shown = result.inputs
    if asked is None:
        return prefix.turn_back(confirm(view, with_target(view, result)), shown)
    own = result if above is not None else replace(result, inputs=prefix.values(result.inputs), seen=None)
    held = prefix.turn_back(confirm(asked, with_target(asked, own)), shown)
    further = read_pixel_prefix(asked)
    return doubt_bends(held) if further is not None and further.kind == "bent" and not further.affine else held


def _bound_bent(
    prefix: PixelPrefix, view: ServerView, above: ServerView | None, result: Reconstruction, held: Result
) -> Result:
    """Return a result behind bent pixels, not verified where rounding may move one of them to another level.

    Args:
        prefix: of the network, which bends pixels.
        view: the server's.
        above: of the network above, on which the attack was run, if so: the result's inputs are v then, else pictures.
        result: of the attack.
        held: the same, as the update of the whole network bears it out.
    """
    if not isinstance(held, Reconstruction) or not (held.verified or held.approximate) or result.inputs is None:
        return held
    values = result.inputs if above is not None else prefix.values(result.inputs)

    def errors(which: Tensor | None) -> Tensor | None:
        asked = above or (prefix.above(view) if view.batch_size == 1 else None)
        own = replace(result, inputs=values, labels=held.labels, seen=None)
        return None if asked is None else value_errors(asked, own, which)

    return prefix.bound(values, held, largest_rounding(view), errors, solved=above is not None)


def _note_unexpected_labels(view: ServerView, result: Result) -> Result:
    """Return the result, with a note where its labels are not among those that the server knows, in whatever order."""
    known, found = view.labels, getattr(result, "labels", None)
    if not isinstance(result, Reconstruction) or known is None or found is None or not known.ndim == found.ndim == 1:
        return result
    if Counter(found.tolist()) <= Counter(known.tolist()):  # an attack may find some of the images
        return result
    odd = f"the labels found, {found.tolist()}, are not those known, {known.tolist()}"
    return replace(result, note="; ".join(filter(None, (result.note, odd))))


def _tensor_versions(view: ServerView) -> list[int]:
    """Return how often each tensor that was sent, or sent back, was changed in place."""
    parts = pytree.tree_leaves([dict(view.shared), dict(view.update)])
    return [part._version for part in parts if isinstance(part, Tensor) and not part.is_inference()]


def _detached(result: Result) -> Result:
    """Return a result with images that need no gradient; a network may have asked one of what it was given."""
    if isinstance(result, NotApplicable) or result.inputs is None or not result.inputs.requires_grad:
        return result
    return replace(result, inputs=result.inputs.detach())


def _check_view(view: ServerView) -> None:
    """Check what is most often wrong in a view made by hand; `fl.capture.from_update` checks all of it."""
    if not isinstance(view, ServerView):
        hint = ": fl.capture.from_batch returns the view and the truth" if isinstance(view, tuple) else ""
        raise TypeError(f"expected a ServerView, got {type(view).__name__}{hint}")
    fed = any(size for steps in view.schedule or () for step in steps for size in step)
    if view.batch_size is not None and view.batch_size < (1 if fed else 0):  # a hidden schedule may have fed none
        raise ValueError(f"expected batch_size >= 1, or None where it is unknown, got {view.batch_size}")
    for name, moved in view.update.items():
        if reason := form_mismatch(moved):
            raise ValueError(f"expected the update of {name!r} {reason}")
        sent = view.shared.get(name)
        if not isinstance(sent, Tensor) or not isinstance(moved, Tensor):
            continue
        shapes, types = (tuple(sent.shape), tuple(moved.shape)), (sent.dtype, moved.dtype)
        for what, (expected, got) in (("shape", shapes), ("type", types)):
            if got != expected:
                raise ValueError(
                    f"expected the update of {name!r} in the {what} of what the server sent, {expected}, got {got}: "
                    "fl.capture.from_update makes a view of a captured update"
                )
    if view.labels is not None:
        _check_labels(view.labels, view.batch_size, view.task)


def _check_labels(labels: object, count: int | None, task: Task) -> None:
    """Check that each image has a label: a class, or probabilities of all classes (N, K), as of mixed images.

    Under another loss than cross entropy it is a target in that loss's form.
    """
    classes = task.num_classes
    if not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor int64, got {type(labels).__name__}")
    if not task.loss.is_cross_entropy:
        if count is not None and len(labels) != count:
            raise ValueError(f"expected a target for each of {count} examples, got {len(labels)}")
        task.loss.prepare(labels, task.output_shape)
        return
    mixed = labels.ndim == 2 and labels.shape[1] == classes and labels.is_floating_point()
    if not mixed and (labels.ndim != 1 or labels.dtype != torch.int64):
        raise ValueError(
            f"expected labels int64 (N,), or probabilities (N, {classes}), got {labels.dtype} {tuple(labels.shape)}"
        )
    if count is not None and len(labels) != count:
        raise ValueError(f"expected a label for each of {count} images, got {len(labels)}")
    if not mixed and not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(f"expected labels in [0, {classes}), got {labels.tolist()}")


@attacks.register("chain")
@dataclass(frozen=True, kw_only=True)
class Chain(Attack):
    """One attack on the view that another one rewrites; written `first+then`.

    Threat model: those of both.

    Attributes:
        first: rewrites the view.
        then: attacks what comes out.
    """

    first: Attack
    then: Attack

    def __post_init__(self) -> None:
        if not isinstance(self.first, ViewRewriter):
            raise ValueError(f"expected an attack that rewrites views before '+', got {self.first.name!r}")

    @classmethod
    def example(cls) -> Chain:
        """Return a chain that peels, then matches gradients."""
        built = build("peel+ig")
        assert isinstance(built, Chain)
        return cls(first=built.first, then=type(built.then).example())  # type: ignore[attr-defined]

    def input_obstacle(self, view: ServerView) -> NotApplicable | None:
        """Return why either of the two says nothing of such inputs, or None."""
        return self.first.input_obstacle(view) or self.then.input_obstacle(view)

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        """Return the batches that the second attack asks for."""
        return self.then.view_batches(views)

    def auxiliary_images(self) -> Batch | None:
        """Return the auxiliary images of the second attack."""
        return self.then.auxiliary_images()

    def confirm(self, view: ServerView, result: Result) -> Result:
        """Return the result, by the first view where that can be asked; else `attack_rewritten` has asked the other."""
        return super().confirm(view, result) if can_replay(view) else result

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Rewrite every view, attack those that could be, in one batch."""
        assert isinstance(self.first, ViewRewriter)
        return self.first.attack_rewritten(self.then, views, seeds)

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        """Rewrite every view, attack those that could be within what `control` allows."""
        assert isinstance(self.first, ViewRewriter)
        return self.first.attack_rewritten(self.then, views, seeds, control)

    @property
    def is_controllable(self) -> bool:
        """Whether the attack on the rewritten views is."""
        return self.then.is_controllable

    def estimate_seconds(self, views: Sequence[ServerView]) -> float | None:
        """Return about how long the attack on the rewritten views takes."""
        assert isinstance(self.first, ViewRewriter)
        single = [self.first.single_client_view(view) for view in views]
        rewritten = [self.first.rewrite(view) for view in single if isinstance(view, ServerView)]
        return self.then.estimate_seconds([view for view in rewritten if isinstance(view, ServerView)])


def _with_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with those of their preset written out."""
    if "preset" not in settings:
        return settings
    name, preset = settings["name"], settings.pop("preset")
    presets = attacks.get(name).presets
    settings = current_names(attacks.get(name), settings, name)
    if preset not in presets:
        raise UnknownNameError(f"preset of attack {name!r}", preset, list(presets))
    return {**presets[preset].settings, **settings}


def label(attack: Attack) -> str:
    """Return the short name of an attack: `ig`, `peel+ig`."""
    return f"{label(attack.first)}+{label(attack.then)}" if isinstance(attack, Chain) else attack.name


def __getattr__(name: str) -> Any:
    if name == "ViewAttack":
        warnings.warn("attacks.base.ViewAttack is now called ViewRewriter", DeprecationWarning, stacklevel=2)
        return ViewRewriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
