"""An attack takes a server's view and returns a reconstruction, or the reason why there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from attacks.checked_run import CheckedRun, not_done_before
from attacks.network.reading_cache import readings_cached
from attacks.result import IDS_UNSEARCHABLE, NotApplicable, Reconstruction, Remark, Result
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.verification.comparison import can_replay
from attacks.verification.confirmation import confirm
from attacks.view_checks import check_view
from fl.aggregated_view import as_single_client
from fl.registry import FormerHooks, Registry, UnknownNameError
from fl.settings import current_names
from fl.simulation.nonfinite_updates import all_finite
from fl.types import Batch
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
"""Kinds of inputs other than pictures, in words for a refusal."""


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
    former_hooks: ClassVar[Mapping[str, str]] = {"one": "attack_view", "takes_off": "inverted_prefixes"}
    plain: ClassVar[str] = ""
    """What it does, in words for a reader who knows none of the papers."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Published settings by name: `build({"name": "ig", "preset": "paper"})`."""
    images_only: ClassVar[bool] = False
    """Whether it rests on inputs that are pictures: rows and columns of pixels that depend on each other."""
    reads_ids: ClassVar[bool] = False
    """Whether it takes networks with ids (of tokens, of categories) among their inputs, which no gradient reaches."""
    inverted_prefixes: ClassVar[frozenset[str]] = frozenset()
    """Kinds of pixel prefixes (`attacks.network.pixel_prefix`) that are inverted for the attack: for one image it runs
    on the network above the prefix, and its result is mapped back."""
    takes_plain_weights: ClassVar[bool] = False
    """Whether weights under weight norm are replaced by plain ones, with their gradient, before it runs. Pictures are
    confirmed by the update as it came."""
    supports_groups: ClassVar[bool] = False
    """Whether it takes a view of a group of clients (secure aggregation). Other attacks get such a view only where it
    equals that of one client."""

    def __call__(self, view: ServerView, *, seed: int = 0, control: SearchControl | None = None) -> Result:
        """Attack one view; the same seed gives the same result.

        An update that lacks tensors is attacked by those that are there.

        Args:
            view: what the server saw.
            seed: of whatever the attack draws.
            control: time limit and progress of a search (`attacks.search_control`); None for neither.

        Raises:
            TypeError: not a view, or the attack returned no result or changed the view.
            ValueError: a tensor of the update has another shape or type than what the server sent, or is sparse or
                complex (says which), the number of images is below 1 although some were fed, or labels are not theirs.
        """
        check_view(view)
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
                    results.append(not_done_before(stopped))
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
            view: what the server saw, of the first attack.
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
            views: what the server saw.
            seeds: one for each view.
            control: limits and listener of the search; None has none.
        """
        single = [self.single_client_view(view) for view in views]
        rewritten = [view if isinstance(view, NotApplicable) else self.rewrite(view) for view in single]
        attacked = [i for i, view in enumerate(rewritten) if isinstance(view, ServerView)]
        found = runner(then, control)([rewritten[i] for i in attacked], [seeds[i] for i in attacked])  # type: ignore[misc]
        results: list[Result] = [view if isinstance(view, NotApplicable) else NotApplicable("") for view in rewritten]
        for i, result in zip(attacked, found, strict=True):
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
    """Run `attack` on several views and return a checked and confirmed result for each (`attacks.checked_run`).

    Views whose inputs the attack does not take are refused, and only the others are attacked.

    Raises:
        TypeError: it returned something else, or changed a view's tensors in place.
    """
    name = getattr(attack, "name", type(attack).__name__)  # of a class that is not registered in this process
    refused = [getattr(attack, "input_obstacle", lambda view: None)(view) for view in views]
    accepted = [i for i, reason in enumerate(refused) if reason is None]
    results: list[Result] = [reason or NotApplicable("") for reason in refused]
    if accepted:
        run = CheckedRun(attack, name, runner(attack, control), control)
        with readings_cached():
            found = run.results([views[i] for i in accepted], [seeds[i] for i in accepted])
        for i, result in zip(accepted, found, strict=True):
            results[i] = result
    return results


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
