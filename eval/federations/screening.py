"""What an update is shown to give away within a few seconds, by the attacks that solve and prove what they find."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

import attacks as attack_registry
from attacks.base import Attack, NotApplicable, Reconstruction, Remark, Result
from attacks.network.kept_readings import readings_kept
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.first_linear_layer import first_linear
from attacks.update.training_phases import training_phases
from eval.audit.attack_selection import default_attacks
from eval.audit.captured_files import load_pair
from eval.audit.captured_update import of_update
from eval.audit.recorded_update import RecordedUpdate
from eval.audit.tensor_names import with_model_names
from eval.audit.user_model import Subject
from eval.federations.dropout import Silenced, equals_evaluation, in_client_mode, silence
from eval.federations.exposures import LEVELS, Exposed, Exposure, layers_of_one_direction, proved_exposures
from eval.federations.fail_closed import attempt
from eval.federations.other_facts import (
    ADAPTIVE_STEP,
    FIRST_ATTACK,
    MOST_STEPS,
    USUAL_MOMENTUM,
    OtherFacts,
    likely_facts,
    of_fitted_step_size,
    other_facts,
)
from eval.federations.reply_checks import refuse_non_finite
from eval.federations.stated_facts import assumptions, rests_on
from eval.federations.wording import in_arguments
from fl.capture import ClientSettings
from fl.inputs.description import Range, check_range
from fl.inputs.form import Inputs
from fl.losses import Loss
from fl.losses.function import build_loss
from fl.models.building_blocks.layers import Normalize
from fl.models.building_blocks.model_outputs import Choice
from fl.runtime.user_code import RUN_ERRORS
from fl.view import ServerView

Verdict = Literal["leaked", "not shown to leak", "failed"]
SEVERAL_STEPS, MOST_SIMULATED_STEPS = "first-step+cascade", 5
"""What is tried of several steps on one example, and the most that it is tried of."""
ATTACKING_SHARE = 0.75
"""Share of the time after which attacks are told to end: they do so between two pieces of work."""
NOT_AS_STATED = (
    "nobody can say what it shows: what a layer was given stands in its update exactly, and training as stated makes "
    "another update of that; state how the client trained (optimizer, lr, weight decay, steps, loss)"
)
"""Why that nothing is proved of an update means nothing."""
ANOTHER_LOSS = (
    "nobody can say what it shows: examples were found of which one step makes all of the update under another loss "
    "than stated ({}), or with soft targets or weights of examples; state the loss that the client trained with"
)
"""Likewise where the rest of training is as stated."""
NOT_ASKED = (
    "nobody can say what it shows: what explains a layer's update exactly was found, and whether one step on it makes "
    "the rest can't be asked, since nothing tells the targets under this loss ({}); audit the recorded file with them"
)
"""Likewise where targets are no classes."""
MAX_NEARLY = 0.01
"""Share of a layer's equations that one input leaves where it is all but told, as of computing in half precision."""
NEARLY_ONE_INPUT = (
    "nobody can say what it shows: all but {:.1g} of a layer's update is that of one input, as where a client computed "
    "in half precision or added little noise, and nothing confirms how near that comes"
)
"""Why nothing is proved of what is all but there."""
FIRST_RATE = 0.01
"""At which a search for the step size of several steps begins where none was stated."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Screening:
    """The outcome for one update.

    Attributes:
        verdict: "leaked" where more is shown than the limit allows. "failed" where nobody can say: the screening ended
            in an error, its time was up before any attack was done, or a layer gives an input away that training as
            stated can't have made. Else "not shown to leak": nothing was proved within the time, which is no proof that
            nothing leaks.
        reason: the verdict in a sentence.
        exposures: what was shown, the worst last.
        tried: what each attack came to, in words, by its name.
        notes: what a reader has to know of how the update was read.
        seconds: that it took.
    """

    verdict: Verdict
    reason: str
    exposures: tuple[Exposure, ...] = ()
    tried: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def must_not_leave(self) -> bool:
        """Whether the update is to be held back: it leaks, or nobody could say."""
        return self.verdict != "not shown to leak"


@dataclass(frozen=True)
class Case:
    """An update to be attacked.

    Attributes:
        subject: with the server's view of it.
        replayable: whether the view has all that a step depended on, so that the whole update may speak for or against
            what an attack finds. It has not where the client drew masks of dropout that nobody knows.
    """

    subject: Subject
    replayable: bool

    def exposures(self, attack: str, result: Result) -> list[Exposure]:
        """Return what a result of an attack proves."""
        return proved_exposures(attack, result, self.subject.view, replayable=self.replayable)


@dataclass(frozen=True)
class Guessed:
    """What an update shows under facts of training that nobody stated.

    Attributes:
        words: what these say; "" where none explains it.
        shown: of it.
    """

    words: str = ""
    shown: tuple[Exposure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Screener:
    """Screens updates of one model: settings in the object, the update in the call.

    Only attacks that solve are tried, and only what they prove without the true images counts. It ends once the verdict
    stands, so that an update which leaks may hold more than is shown. `hyperleak audit update` on the recorded file
    tries all attacks, searches among them.

    Attributes:
        model: returns the model, whatever its weights: they come with the update.
        input_shape: of one example: (C, H, W) of an image, (C, T) of a series, (F,) of a table; or an example of the
            inputs, where there are several or ids.
        mean: per channel, subtracted by the client's data loader, where the model does not do it itself.
        std: per channel, what the loader divides by, likewise.
        loss: what clients minimize, as of `hyperleak.audit`: "cross-entropy", "bce", "mse", "segmentation", settings,
            `module:function` or a callable of (outputs, targets).
        output: which part of what the model returns that is taken of: a name, a place, or a function of the whole.
        head: prefix of the names of the classifier's parameters; None takes the last linear layer.
        input_range: least and largest number that the model's inputs can have, where that is not [0, 1].
        categories: of a table, first column of each one-hot category and the one behind its last.
        seconds: after which no further attack begins, and those that run end.
        allowed: the most that an update may be shown to give away.
        seed: of whatever the attacks draw.

    Raises:
        ValueError: seconds that are not above zero, an unknown limit or loss, a mean or std for another number of
            channels, a range whose least number is not below its largest, or ranges that contradict each other.
    """

    model: Callable[[], nn.Module]
    input_shape: Sequence[int] | Inputs
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    loss: str | Mapping[str, Any] | Loss | Callable[..., Tensor] = "cross-entropy"
    output: Choice = None
    head: str | None = None
    input_range: Range | None = None
    categories: Sequence[tuple[int, int]] = ()
    seconds: float = 2.0
    allowed: Exposed = "labels"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"expected seconds > 0, got {self.seconds}")
        if self.allowed not in LEVELS:
            raise ValueError(f"expected allowed as {', '.join(map(repr, LEVELS))}, got {self.allowed!r}")
        if not (isinstance(self.loss, str) and ":" in self.loss):  # which may be in a module that is at clients alone
            build_loss(self.loss)
        check_range(self.input_range)
        if not len(self.mean) and not len(self.std):
            return
        if self.input_range is not None:
            raise ValueError("expected mean and std of a loader of pixels in [0, 1], or input_range, got both")
        if not isinstance(self.input_shape, Sequence) or len(self.input_shape) != 3:
            raise ValueError(f"expected mean and std with images (C, H, W) alone, got input_shape {self.input_shape!r}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in {0, self.input_shape[0]}:
                raise ValueError(
                    f"expected {name} with a number for each of the {self.input_shape[0]} channels of input_shape "
                    f"{tuple(self.input_shape)}, got {len(values)}"
                )

    def __call__(self, recorded: RecordedUpdate) -> Screening:
        """Screen one update; an error inside is a verdict of its own, so that nothing leaves unscreened.

        An interrupt is raised: then nothing leaves, either.
        """
        began = time.monotonic()

        def failed(words: str) -> Screening:
            reason = f"the screening failed: {words}"
            return Screening(verdict="failed", reason=reason, seconds=time.monotonic() - began)

        with readings_kept():  # of the network, which all attacks on the update read
            found = attempt(lambda: self._screen(recorded, began), failed)
        return replace(
            found,
            reason=in_arguments(found.reason),
            tried={name: in_arguments(words) for name, words in found.tried.items()},
            notes=tuple(map(in_arguments, found.notes)),
        )

    def _screen(self, recorded: RecordedUpdate, began: float) -> Screening:
        """Return the outcome for one update.

        Args:
            recorded: the update.
            began: the time when its screening began.
        """
        case = self._case(recorded)
        subject = case.subject
        attacks = _solving_attacks(subject.view)  # imports some modules the first time, which is no time of this update
        control = SearchControl(time_limit=ATTACKING_SHARE * self.seconds)
        likely = likely_facts(recorded.training, subject.view)
        first, found = self._attack_under(recorded, likely, control.share(2))  # the facts as stated get their turn
        as_stated = {} if first.shown else self._attack(case, attacks, control)
        shown = [*first.shown, *(one for name, result in as_stated.items() for one in case.exposures(name, result))]
        last = Guessed()
        if not self._is_too_much(shown):
            fitted = self._fitted_step_sizes(recorded, as_stated, control)
            guesses = itertools.chain(other_facts(recorded.training, subject.view), fitted)
            last, more = self._attack_under(recorded, guesses, control)
            found = {**found, **more}
        shown = [*shown, *last.shown]
        leaks = self._is_too_much(shown)
        notes = (
            *subject.notes,
            *(f"whatever was stated, {words}" for words in (first.words, last.words) if words),
            *assumptions(recorded.training, subject.view.threat.knows_optimizer),
            *filter(None, (subject.inconsistency,)),
            *(() if leaks else rests_on(recorded.training, subject.view)),
        )
        doubt = "" if leaks else self._undone(as_stated) or _doubt(as_stated, subject.view)
        seconds = time.monotonic() - began
        return self._judge(shown, {**found, **as_stated}, notes, seconds, doubt)

    def _case(self, recorded: RecordedUpdate) -> Case:
        """Return the update as the server's view of it, without the random numbers of a network that draws some."""
        refuse_non_finite(recorded.before, "the weights before training")
        refuse_non_finite(recorded.after, "what came back")
        facts = recorded.training
        model = in_client_mode(self._pixel_model(), facts.train_mode)
        captured = with_model_names(load_pair(dict(recorded.before), dict(recorded.after), said=False), model)
        silenced = Silenced(model)
        if any(module.training for module in model.modules()):
            stated = isinstance(self.input_shape, Sequence) and all(isinstance(side, int) for side in self.input_shape)
            alone = (facts.examples or facts.batch_size or 1, facts.steps or facts.epochs) in {(1, 1), (1, None)}
            silenced = silence(model, self.input_shape if stated else None, captured.update if alone else None)  # type: ignore[arg-type]
        if silenced.evaluating or equals_evaluation(silenced.model):
            facts = replace(facts, train_mode=False)
            silenced.model.eval()
        model = silenced.model
        captured = replace(captured, notes=(*captured.notes, *filter(None, (silenced.note,))))
        captured = replace(captured, scale_unknown=facts.scale_unknown)
        client = ClientSettings(
            method=facts.method(model),
            mean=self.mean,
            std=self.std,
            loss=self.loss,
            output=self.output,
            head=self.head,
            input_range=self.input_range,
            categories=self.categories,
        )
        count = facts.examples or facts.batch_size or 1
        subject = of_update(model, captured, client, input_shape=self.input_shape, batch_size=count, given=None)
        return Case(subject, silenced.replayable)

    def _pixel_model(self) -> nn.Module:
        """Return the model with what its loader does to pixels in [0, 1] in front of it."""
        model = self.model()
        if not len(self.mean) and not len(self.std):
            return model
        channels = self.input_shape[0]  # type: ignore[index]
        normalize = Normalize(tuple(self.mean) or (0.0,) * channels, tuple(self.std) or (1.0,) * channels)
        whole = nn.Sequential(normalize, model)
        whole.training = model.training  # train() would put every part of the model into one mode
        return whole

    def _attack_under(
        self, recorded: RecordedUpdate, guesses: Iterable[OtherFacts], control: SearchControl
    ) -> tuple[Guessed, dict[str, Result]]:
        """Return what an update shows under the first facts of several that explain it, and what attacks came to.

        What they explain is proved whatever was said.
        """
        found: dict[str, Result] = {}
        for guess in guesses:
            for name in guess.attacks:
                if control.stop_reason():
                    return Guessed(), found
                try:
                    case = self._case(replace(recorded, training=guess.facts))
                    if guess.is_size_fitted:
                        case = replace(case, subject=_without_scale(case.subject))
                    result = attack_registry.build(name)(case.subject.view, seed=self.seed, control=control)
                except RUN_ERRORS as error:  # batch normalization, say, which takes no single example
                    log.debug("not screened where %s: %s", guess.words, error)
                    continue
                # nobody stated that it is so: only what the whole update confirms counts, not what rounding allows, nor
                # what one layer says alone, which is an outer product, too, where all of a batch sends back the same
                if isinstance(result, Reconstruction):
                    told = result.verified or name == ADAPTIVE_STEP
                    result = replace(result, approximate=False, private=result.private if told else {})
                found[f"{name}, where {guess.words}"] = result
                shown = replace(case, replayable=True).exposures(name, result)
                if self._is_too_much(shown):
                    return Guessed(guess.words, tuple(shown)), found
        return Guessed(), found

    def _fitted_step_sizes(
        self, recorded: RecordedUpdate, found: Mapping[str, Result], control: SearchControl
    ) -> Iterator[OtherFacts]:
        """Yield step sizes, at usual momenta, by which several steps on what was found make an update so large.

        There are none once the time is up.
        """
        facts = recorded.training
        pictured = [one for one in found.values() if isinstance(one, Reconstruction) and one.inputs is not None]
        alone = (facts.examples or facts.batch_size or 1) == 1
        if facts.optimizer != "sgd" or not alone or not 1 < (facts.steps or 1) <= MOST_STEPS or not pictured:
            return  # before a case is built, which costs a prediction
        for momentum in dict.fromkeys((facts.momentum, USUAL_MOMENTUM, 0.0)):
            asked = replace(facts, lr=facts.lr or FIRST_RATE, momentum=momentum)
            view = self._case(replace(recorded, training=asked)).subject.view
            with limited_by(control):
                try:
                    fitted = of_fitted_step_size(facts, asked, view, pictured[0])
                except StoppedError:
                    return
            if fitted is not None:
                yield fitted

    def _attack(self, case: Case, attacks: Mapping[str, Attack], control: SearchControl) -> dict[str, Result]:
        """Return what each attack that solves makes of the update, until the verdict stands or the time is up."""
        view = case.subject.view
        found: dict[str, Result] = {}
        for name, attack in attacks.items():
            if reason := control.stop_reason():
                found[name] = NotApplicable(f"not begun before {reason}", limit=True, cut_short=reason)
                continue
            found[name] = attack(view, seed=self.seed, control=control)
            if self._is_too_much(case.exposures(name, found[name])):
                break
        return found

    def _is_too_much(self, shown: Sequence[Exposure]) -> bool:
        """Return whether more is shown than an update may give away."""
        return any(LEVELS.index(exposure.kind) > LEVELS.index(self.allowed) for exposure in shown)

    def _undone(self, found: Mapping[str, Result]) -> str:
        """Return that no attack under the facts as stated came to an end, whatever others did; "" where one did."""
        cut = all(isinstance(result, NotApplicable) and bool(result.cut_short) for result in found.values())
        return f"no attack came to an end within {self.seconds:g} seconds: give more (seconds)" if cut else ""

    def _judge(
        self, shown: list[Exposure], found: dict[str, Result], notes: tuple[str, ...], seconds: float, doubt: str
    ) -> Screening:
        """Return the verdict on what the attacks came to.

        Args:
            shown: what they proved.
            found: what each came to.
            notes: what a reader has to know.
            seconds: that all took.
            doubt: what keeps everybody from saying that no more is there; "" for nothing.
        """
        shown = sorted(shown, key=lambda exposure: LEVELS.index(exposure.kind))
        leaks = self._is_too_much(shown)
        if leaks:
            reason = f"{shown[-1].words} ({shown[-1].attack})"
        elif doubt:
            reason = doubt
        elif shown:
            reason = f"no more is shown than {shown[-1].kind}"
        else:
            reason = "nothing is shown"
        return Screening(
            verdict="leaked" if leaks else "failed" if doubt else "not shown to leak",
            reason=reason,
            exposures=tuple(shown),
            tried={name: _outcome(result) for name, result in found.items()},
            notes=notes,
            seconds=seconds,
        )


def _without_scale(subject: Subject) -> Subject:
    """Return an update of which nobody knows the step size, so that how large it is confirms nothing."""
    return replace(subject, view=replace(subject.view, scale_unknown=True))


def _solving_attacks(view: ServerView) -> dict[str, Attack]:
    """Return the attacks that solve for what is in an update, by name; a search proves nothing in seconds."""
    names = default_attacks(view.method, view.batch_size or 1)
    steps = sum(len(phase) for phase in training_phases(view)[1] or ())
    if view.batch_size == 1 and 1 < steps <= MOST_SIMULATED_STEPS and "cascade" in names:
        names = (*names, SEVERAL_STEPS)
    found = {name: attack_registry.build(name) for name in names}
    solving = {name: attack for name, attack in found.items() if not attack.is_controllable}
    return solving or {FIRST_ATTACK: attack_registry.build(FIRST_ATTACK)}  # which says why it does not apply


def _outcome(result: Result) -> str:
    """Return what an attack came to, in words."""
    if isinstance(result, NotApplicable):
        return f"not applicable: {result.reason}" if not result.cut_short else result.reason
    found = "images" if result.inputs is not None else "features" if result.private else "labels"
    certain = "confirmed" if result.verified else "borne out" if result.approximate else "not confirmed"
    return "; ".join(filter(None, (f"{found}, {certain}", result.note)))


def _doubt(found: Mapping[str, Result], view: ServerView) -> str:
    """Return why that nothing is proved of an update does not mean that nothing is there, or nothing."""
    if other := [name for name, result in found.items() if _is_of_another_loss(result, view)]:
        return f"{ANOTHER_LOSS.format(view.task.loss.name)} ({other[0]})"
    if contradicted := [name for name, result in found.items() if contradicts_facts(result, view)]:
        return f"{NOT_AS_STATED} ({contradicted[0]})"
    if unasked := [name for name, result in found.items() if _is_unasked(result, view)]:
        return f"{NOT_ASKED.format(view.task.loss.name)} ({unasked[0]})"
    layer, first = first_linear(view), found.get(FIRST_ATTACK)
    if view.batch_size != 1 or not isinstance(first, Reconstruction) or isinstance(layer, NotApplicable):
        return ""
    if first.verified or layer.name in layers_of_one_direction(view) or not first.objective <= MAX_NEARLY:
        return ""
    return NEARLY_ONE_INPUT.format(first.objective)


def contradicts_facts(result: Result, view: ServerView) -> bool:
    """Return whether an attack found what one layer is exactly given, and training as stated makes another update.

    A layer of which two outputs move, or fewer, is explained by one input whatever it was given.
    """
    if isinstance(result, NotApplicable) or result.verified is not False or Remark.CONTRADICTED not in result.remarks:
        return False
    return not _has_one_direction(view)


def _is_unasked(result: Result, view: ServerView) -> bool:
    """Return whether an attack found what one layer is exactly given, and nobody can ask the rest of the update."""
    return isinstance(result, Reconstruction) and Remark.UNASKED in result.remarks and not _has_one_direction(view)


def _is_of_another_loss(result: Result, view: ServerView) -> bool:
    """Return whether an attack found what makes the whole update if the client's loss was another than stated."""
    return isinstance(result, Reconstruction) and Remark.OTHER_LOSS in result.remarks and not _has_one_direction(view)


def _has_one_direction(view: ServerView) -> bool:
    """Return whether the first linear layer is explained by one input whatever it was given."""
    layer = first_linear(view)
    return not isinstance(layer, NotApplicable) and layer.name in layers_of_one_direction(view)
