"""What an update is shown to give away within a few seconds, by the attacks that solve and prove what they find."""

from __future__ import annotations

import importlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

import attacks as attack_registry
from attacks.analytic.compressed_layer import CompressedInput, Reading, read_compressed_layer
from attacks.analytic.tokens import TOKENS
from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.network.reading_cache import readings_cached
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.training_phases import training_phases
from eval.audit.attack_selection import ATTACKS_ON_IDS, default_attacks
from eval.audit.captured_files import load_pair
from eval.audit.captured_update import of_update
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.audit.tensor_names import UNSENT_KNOWN, with_alike_names, with_model_names, without_wrappers
from eval.audit.user_model import Subject
from eval.federations.doubts import find_doubt, unclear_zeros, unread_form, unread_parts
from eval.federations.exposures import (
    AS_COMPRESSED,
    LEVELS,
    Exposed,
    Exposure,
    compressed_exposures,
    proved_exposures,
    say_reading,
)
from eval.federations.fail_closed import attempt
from eval.federations.other_facts import (
    ADAPTIVE_STEP,
    FIRST_ATTACK,
    MOST_STEPS,
    SEVERAL_STEPS,
    USUAL_MOMENTUM,
    OtherFacts,
    likely_facts,
    of_fitted_step_size,
    other_facts,
)
from eval.federations.reply_checks import refuse_multiples, refuse_no_weights, refuse_non_finite, refuse_untrained
from eval.federations.stated_facts import assumptions, rests_on
from eval.federations.wording import in_arguments
from fl.capture import ClientSettings
from fl.inputs.description import Range, check_range
from fl.inputs.form import Inputs
from fl.losses import Loss
from fl.losses.function import build_loss
from fl.models.building_blocks.layers import Normalize
from fl.models.building_blocks.model_outputs import Choice
from fl.runtime.module_copies import deep_copy
from fl.runtime.user_code import RUN_ERRORS
from fl.simulation.capture_checks import unwrap_model
from fl.simulation.dropout_masks import Silenced, equals_evaluation, in_client_mode, silence
from fl.view import ServerView

Verdict = Literal["leaked", "not shown to leak", "not decided", "failed"]
MOST_SIMULATED_STEPS = 5
"""Steps on one example, at most, that are followed back to the first."""
ATTACKING_SHARE = 0.75
"""Share of the time after which attacks are told to end: they do so between two pieces of work."""
READING_SHARE = 0.1
"""Share of the time, at most, that reading the update takes from them."""
UNREAD = ", and the attacks of a screening do not read such an update: {}"
"""What is said of several examples in a form that may hide them from these attacks alone."""
LEAST_SECONDS = 2.0
"""Seconds that reading the update may take at least, and asking behind the attacks what keeps it undecided."""
UNREAD_IN_TIME = "reading the update took more than {} seconds, so that no attack was begun: give more (seconds)"
"""Why a screening failed before it began."""
UNASKED_IN_TIME = (
    "nobody can say what it shows: within the time there is nobody could ask whether it is of a form that hides "
    "examples from the attacks of a screening: give more (seconds)"
)
"""Why nothing is proved where the time was up behind the attacks."""
FIRST_RATE = 0.01
"""Step size at which a search for that of several steps begins where none was stated."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Screening:
    """The outcome for one update.

    Attributes:
        verdict: "leaked" where more is shown than the limit allows. "failed" where the screening ended in an error, or
            its time was up before any attack was done. "not decided" where nobody can say: the update contradicts what
            was stated, or is of a form that no attack of a screening reads. Else "not shown to leak": nothing was
            proved within the time, which is no proof that nothing leaks.
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
        whole: whether all weights that are trained came back: nobody knows which others a client has for itself.
    """

    subject: Subject
    replayable: bool
    whole: bool = True

    def exposures(self, attack: str, result: Result) -> list[Exposure]:
        """Return what a result of an attack proves."""
        with limited_by(SearchControl()):  # what was found late is not to be lost
            return proved_exposures(attack, result, self.subject.view, replayable=self.replayable and self.whole)


@dataclass
class Findings:
    """What attacks on one update came to.

    Attributes:
        shown: what they proved.
        as_stated: what each came to under the facts as stated, by name.
        guessed: likewise under facts of training that nobody stated.
        words: what those of these say that explain it.
    """

    shown: list[Exposure]
    as_stated: dict[str, Result] = field(default_factory=dict)
    guessed: dict[str, Result] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


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
        seconds: after which no further attack begins, and those that run end. Reading the update comes before, and may
            take as many, or `LEAST_SECONDS`.
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

        with readings_cached():  # of the network, which all attacks on the update read
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
        importlib.import_module("torch._dynamo")  # done at the first copy of a network, where a limit would end it
        try:
            with limited_by(self._time_beside_attacks()):
                recorded = self._with_alike_names(recorded)
                case = self._case(recorded)
        except StoppedError:
            reason = UNREAD_IN_TIME.format(f"{self._time_beside_attacks().time_limit:g}")
            return Screening(verdict="failed", reason=reason, seconds=time.monotonic() - began)
        reading_time = min(time.monotonic() - began, READING_SHARE * self.seconds)
        subject, view, facts = case.subject, case.subject.view, recorded.training
        attacks = _solving_attacks(view)  # imports some modules the first time, likewise
        control = SearchControl(time_limit=ATTACKING_SHARE * self.seconds - reading_time)
        reading = self._read_compressed(view, control)
        read = compressed_exposures(reading, view)
        signs = isinstance(reading, CompressedInput) and reading.signs_only  # of which attacks may tell more
        found = Findings(shown=[] if signs else read)
        if not self._is_too_much(found.shown):
            with suppress(StoppedError), limited_by(self._time_beside_attacks()):  # which have limits of their own
                self._try_attacks(case, recorded, attacks, control, found)
        if signs and not found.shown:
            found.shown = read
        leaks = self._is_too_much(found.shown)
        notes = (
            *subject.notes,
            *(f"whatever was stated, {words}" for words in found.words),
            *assumptions(facts, view.threat.knows_optimizer),
            *filter(None, (subject.inconsistency,)),
            *(() if leaks else rests_on(facts, view)),
        )
        undone = "" if leaks else self._undone(found.as_stated)
        doubt, unread = ("", "") if leaks or undone else self._doubt(case, facts, found, reading)
        results = {**found.guessed, **found.as_stated}
        tried = {} if reading is None else {AS_COMPRESSED: say_reading(reading)}
        tried |= {name: _outcome(result) for name, result in results.items()}
        judged = self._judge(found.shown, undone, doubt, unread)
        return replace(judged, tried=tried, notes=notes, seconds=time.monotonic() - began)

    def _try_attacks(
        self,
        case: Case,
        recorded: RecordedUpdate,
        attacks: Mapping[str, Attack],
        control: SearchControl,
        found: Findings,
    ) -> None:
        """Attack an update under the facts that are likely, as stated and possible, until the verdict stands."""
        facts, view = recorded.training, case.subject.view
        likely = likely_facts(facts, view, by_rank=not unread_form(view))
        first = self._attack_under(recorded, likely, control.share(2), found)  # the facts as stated get their turn
        if not first:
            found.as_stated = self._attack(case, attacks, control, found.shown)
        if not self._is_too_much(found.shown):
            fitted = self._fitted_step_sizes(recorded, found.as_stated, control)
            self._attack_under(recorded, itertools.chain(other_facts(facts, view), fitted), control, found)

    def _time_beside_attacks(self) -> SearchControl:
        """Return the limit of what comes before the attacks, and of what comes behind them."""
        return SearchControl(time_limit=max(self.seconds, LEAST_SECONDS))

    def _doubt(self, case: Case, facts: TrainingFacts, found: Findings, reading: Reading) -> tuple[str, str]:
        """Return what keeps everybody from saying that no more is there than is shown, and may be; else what hides it.

        That is a form of an update which the attacks of a screening do not read, in words that are added to a reason;
        "" for nothing, each.
        """
        view, stated, matter = case.subject.view, found.as_stated, self.allowed == LEVELS[0]
        whole, asked, doubt = case.whole, self.allowed != LEVELS[-1], ""
        try:
            with limited_by(self._time_beside_attacks()):
                if asked:
                    doubt = find_doubt(
                        facts, view, stated, reading, guessed=found.guessed, whole=whole, inputs_matter=matter
                    )
                if doubt:
                    return doubt, ""
                hidden = unread_form(view) or unread_parts(view)
                return "", UNREAD.format(hidden) if hidden else "; ".join(("", *filter(None, [unclear_zeros(view)])))
        except StoppedError:
            return (UNASKED_IN_TIME if asked else ""), ""

    def _read_compressed(self, view: ServerView, control: SearchControl) -> Reading:
        """Return what an update shows as one that was compressed, None where it is none or the time is up."""
        with limited_by(control.share(2)):
            try:
                return read_compressed_layer(view)
            except StoppedError:
                return None

    def _with_alike_names(self, recorded: RecordedUpdate) -> RecordedUpdate:
        """Return an update whose weights before and after have the same names, as far as the model tells them.

        All weights may have been sent, say, of which PEFT's adapter file came back alone, by names of its own.
        """
        if recorded.before.keys() >= recorded.after.keys() or not recorded.before:
            return recorded
        before, after = with_alike_names(recorded.before, recorded.after, self.model())
        common = {name: value for name, value in after.items() if name in before}
        trained = {name for name, value in unwrap_model(self.model()).named_parameters() if value.requires_grad}
        if not common or trained & (after.keys() - common.keys()):  # which is refused by name
            return recorded
        return replace(recorded, before=before, after=common)

    def _case(self, recorded: RecordedUpdate) -> Case:
        """Return the update as the server's view of it, without the random numbers of a network that draws some."""
        refuse_no_weights(recorded.before, recorded.after)
        refuse_non_finite(recorded.before, "the weights before training")
        refuse_non_finite(recorded.after, "what came back")
        before, facts = recorded.known_before(), recorded.training
        refuse_multiples(before, recorded.after)
        not_sent_back = {name: value for name, value in recorded.before.items() if name not in before}
        bare = _with_weights(self.model(), not_sent_back)
        model = in_client_mode(self._with_loader(bare), facts.train_mode)
        pair = (before, dict(recorded.after))
        if self._has_loader:  # in front of it, so that names lose and gain
            pair = (without_wrappers(before), without_wrappers(recorded.after))
        captured = with_model_names(load_pair(*pair, said=False), model)
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        if trained and not captured.update:
            refuse_untrained(recorded.after)
        whole = trained <= captured.update.keys()
        silenced = self._silence(model, facts, captured.update)
        if silenced.evaluating or equals_evaluation(silenced.model):
            facts = replace(facts, train_mode=False)
            silenced.model.eval()
        captured = replace(captured, notes=(*captured.notes, *filter(None, (silenced.note,))))
        captured = replace(captured, scale_unknown=facts.scale_unknown)
        subject = of_update(
            silenced.model,
            captured,
            self._client(silenced.model, facts),
            input_shape=self.input_shape,
            batch_size=facts.examples or facts.batch_size or 1,
            given=None,
        )
        if any(name in not_sent_back for name, _ in silenced.model.named_parameters()):
            notes = (note.replace(UNSENT_KNOWN, "numbers that were sent to the client") for note in subject.notes)
            subject = replace(subject, notes=tuple(notes))
        return Case(subject, silenced.replayable, whole)

    def _silence(self, model: nn.Module, facts: TrainingFacts, update: Mapping[str, Tensor]) -> Silenced:
        """Return a network without the random numbers that it draws in training mode."""
        if not any(module.training for module in model.modules()):
            return Silenced(model)
        stated = isinstance(self.input_shape, Sequence) and all(isinstance(side, int) for side in self.input_shape)
        alone = (facts.examples or facts.batch_size or 1, facts.steps or facts.epochs) in {(1, 1), (1, None)}
        return silence(model, self.input_shape if stated else None, update if alone else None)  # type: ignore[arg-type]

    def _client(self, model: nn.Module, facts: TrainingFacts) -> ClientSettings:
        """Return how a client trains that is said to have trained so."""
        return ClientSettings(
            method=facts.method(model),
            mean=self.mean,
            std=self.std,
            loss=self.loss,
            output=self.output,
            head=self.head,
            input_range=self.input_range,
            categories=self.categories,
        )

    @property
    def _has_loader(self) -> bool:
        return bool(len(self.mean) or len(self.std))

    def _with_loader(self, model: nn.Module) -> nn.Module:
        """Return a model with what its loader does to pixels in [0, 1] in front of it."""
        if not self._has_loader:
            return model
        channels = self.input_shape[0]  # type: ignore[index]
        normalize = Normalize(tuple(self.mean) or (0.0,) * channels, tuple(self.std) or (1.0,) * channels)
        whole = nn.Sequential(normalize, model)
        whole.training = model.training  # train() would put every part of the model into one mode
        return whole

    def _attack_under(
        self, recorded: RecordedUpdate, guesses: Iterable[OtherFacts], control: SearchControl, found: Findings
    ) -> bool:
        """Find what an update shows under the first facts of several that explain it; return whether any do.

        What they explain is proved whatever was said.
        """
        for guess in guesses:
            for name in guess.attacks:
                if control.stop_reason():
                    return False
                try:
                    with limited_by(control):
                        case = self._case(replace(recorded, training=guess.facts))
                    if guess.is_size_fitted:
                        case = replace(case, subject=_without_scale(case.subject))
                    result = attack_registry.build(name)(case.subject.view, seed=self.seed, control=control)
                except StoppedError:
                    return False
                except RUN_ERRORS as error:  # batch normalization, say, which takes no single example
                    log.debug("not screened where %s: %s", guess.words, error)
                    continue
                # nobody stated that it is so: only what the whole update confirms counts, not what rounding allows, nor
                # what one layer says alone, which is an outer product, too, where all of a batch sends back the same
                if isinstance(result, Reconstruction):
                    told = result.verified or name == ADAPTIVE_STEP
                    result = replace(result, approximate=False, private=result.private if told else {})
                found.guessed[f"{name}, where {guess.words}"] = result
                shown = replace(case, replayable=True, whole=True).exposures(name, result)
                if self._is_too_much(shown):
                    found.words.append(guess.words)
                    found.shown += shown
                    return True
        return False

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

    def _attack(
        self, case: Case, attacks: Mapping[str, Attack], control: SearchControl, shown: list[Exposure]
    ) -> dict[str, Result]:
        """Return what each attack that solves makes of the update, until the verdict stands or the time is up.

        What it proves is added to what is shown.
        """
        view = case.subject.view
        found: dict[str, Result] = {}
        for name, attack in attacks.items():
            if reason := control.stop_reason():
                found[name] = NotApplicable(f"not begun before {reason}", limit=True, cut_short=reason)
                continue
            found[name] = attack(view, seed=self.seed, control=control)
            shown += case.exposures(name, found[name])
            if self._is_too_much(shown):
                break
        return found

    def _is_too_much(self, shown: Sequence[Exposure]) -> bool:
        """Return whether more is shown than an update may give away."""
        return any(LEVELS.index(exposure.kind) > LEVELS.index(self.allowed) for exposure in shown)

    def _undone(self, found: Mapping[str, Result]) -> str:
        """Return that no attack under the facts as stated came to an end, whatever others did; "" where one did."""
        cut = all(isinstance(result, NotApplicable) and bool(result.cut_short) for result in found.values())
        return f"no attack came to an end within {self.seconds:g} seconds: give more (seconds)" if cut else ""

    def _judge(self, shown: list[Exposure], undone: str, doubt: str, unread: str) -> Screening:
        """Return the verdict on what the attacks came to.

        Args:
            shown: what they proved.
            undone: why none of them says anything; "" where one does.
            doubt: what keeps everybody from saying that no more is there; "" for nothing.
            unread: what to add of a form of the update that none of them reads; "" where they do.
        """
        shown = sorted(shown, key=lambda exposure: LEVELS.index(exposure.kind))
        if self._is_too_much(shown):
            verdict: Verdict = "leaked"
            reason = f"{shown[-1].words} ({shown[-1].attack})"
        elif undone or doubt:
            verdict, reason = "failed" if undone else "not decided", undone or doubt
        else:
            verdict = "not shown to leak"
            reason = f"no more is shown than {shown[-1].kind}" if shown else "nothing is shown"
            reason += unread
        return Screening(verdict=verdict, reason=reason, exposures=tuple(shown))


def _with_weights(model: nn.Module, known: Mapping[str, Tensor]) -> nn.Module:
    """Return a model with weights of its own by name as far as they are its, in a copy where there are any."""
    own = model.state_dict()
    fitting = {name: value for name, value in known.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        return model
    copied = deep_copy(model)
    copied.load_state_dict(fitting, strict=False)
    return copied


def _without_scale(subject: Subject) -> Subject:
    """Return an update of unknown step size, so that how large it is confirms nothing."""
    return replace(subject, view=replace(subject.view, scale_unknown=True))


def _solving_attacks(view: ServerView) -> dict[str, Attack]:
    """Return the attacks that solve for what is in an update, by name; a search proves nothing in seconds."""
    if view.task.inputs.has_ids:
        return {name: attack_registry.build(name) for name in ATTACKS_ON_IDS}
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
    ids = any(name.startswith(TOKENS) for name in result.private)
    found = "images" if result.inputs is not None else "ids" if ids else "features" if result.private else "labels"
    certain = "confirmed" if result.verified else "borne out" if result.approximate else "not confirmed"
    return "; ".join(filter(None, (f"{found}, {certain}", result.note)))
