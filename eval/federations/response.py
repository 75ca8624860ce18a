"""What happens to an update that leaks: it stops the client, is withheld, gets noise, or is sent with a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from eval.audit.recorded_update import RecordedUpdate
from eval.federations.fail_closed import attempt
from eval.federations.round_report import RoundReports
from eval.federations.screening import Screening

OnLeak = Literal["stop", "withhold", "noise", "warn"]
MAX_DOUBLINGS = 8
"""How often the noise is doubled before the update is withheld after all."""
log = logging.getLogger(__name__)


class LeakageError(RuntimeError):
    """An update leaks, or could not be screened, and the client is to stop."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What is to be done with an update.

    Attributes:
        action: "send" or "withhold".
        after: the weights to send, as they came or with noise; those before training where they are withheld.
        screening: what it rests on.
        words: the same in a sentence, for logs.
        changed: whether the weights to send are others than came.
    """

    action: Literal["send", "withhold"]
    after: dict[str, Tensor]
    screening: Screening
    words: str
    changed: bool = False


@dataclass(frozen=True, kw_only=True)
class Responder:
    """Screens an update and decides what is to be done with it.

    Attributes:
        screen: as a rule a `eval.federations.screening.Screener`.
        on_leak: "stop" raises `LeakageError`, so that the client ends; "withhold" leaves the update out of the round;
            "noise" adds Gaussian noise until nothing is shown to leak, and withholds it if that does not help; "warn"
            sends it as it is. An update that could not be screened is withheld, too, unless it is "stop" or "warn".
        noise: standard deviation of the first noise, relative to the root mean square of the whole update; it
            doubles. It hides what the screening finds and is no differential privacy.
        reports: where every round's outcome is written; None writes nothing.

    Raises:
        ValueError: another response, or noise that is not above zero.
    """

    screen: Callable[[RecordedUpdate], Screening]
    on_leak: OnLeak = "withhold"
    noise: float = 0.01
    reports: RoundReports | None = None

    def __post_init__(self) -> None:
        if self.on_leak not in get_args(OnLeak):
            raise ValueError(f"expected on_leak {', '.join(map(repr, get_args(OnLeak)))}, got {self.on_leak!r}")
        if not self.noise > 0:
            raise ValueError(f"expected noise > 0, got {self.noise}")

    def __call__(self, recorded: RecordedUpdate) -> Response:
        """Screen one update and return what is to be done with it.

        An error of whatever kind, in the screening or in the noise, is a screening that failed. A report that can't be
        written changes nothing; the log says so.

        Raises:
            LeakageError: it must not leave, and the response to that is "stop".
        """
        response = attempt(
            lambda: self._decide(recorded, self.screen(recorded)), lambda words: self._fail(recorded, words)
        )
        log.log(logging.WARNING if response.screening.must_not_leave else logging.INFO, "%s", response.words)
        if (reports := self.reports) is not None:
            attempt(
                lambda: reports.add(recorded, response.screening, response.words),
                lambda words: log.error("the report could not be written: %s", words),
            )
        if response.screening.must_not_leave and self.on_leak == "stop":
            raise LeakageError(response.words)
        return response

    def _fail(self, recorded: RecordedUpdate, words: str) -> Response:
        """Return the response to a screening that ended in an error."""
        return self._decide(recorded, Screening(verdict="failed", reason=f"the screening failed: {words}"))

    def _decide(self, recorded: RecordedUpdate, screening: Screening) -> Response:
        """Return the response to a screening; "stop" is one that withholds, for the report."""
        if not screening.must_not_leave:
            return _send(recorded.after, screening, f"sent: {screening.reason}")
        if self.on_leak == "warn":
            return _send(recorded.after, screening, f"sent with a warning: {screening.reason}")
        if self.on_leak == "noise" and screening.verdict == "leaked":
            found = self._with_noise(recorded)
            if found is not None:
                return found
        word = "stopped" if self.on_leak == "stop" else "withheld"
        return Response(
            action="withhold",
            after={name: value for name, value in recorded.before.items() if name in recorded.after},
            screening=screening,
            words=f"{word}: {screening.reason}",
        )

    def _with_noise(self, recorded: RecordedUpdate) -> Response | None:
        """Return the update with as much noise as it takes, or None where none helps."""
        scale = _root_mean_square(recorded.difference())
        draw = torch.Generator()
        draw.seed()  # of the system's entropy: whoever knew the noise could take it off
        for doubling in range(MAX_DOUBLINGS):
            size = self.noise * 2**doubling
            noisy = replace(recorded, after=_add_noise(recorded.after, size * scale, draw))
            again = self.screen(noisy)
            if not again.must_not_leave:
                words = f"sent with noise of {size:g} of the update: {again.reason}"
                return replace(_send(noisy.after, again, words), changed=True)
        return None


def _send(after: Mapping[str, Tensor], screening: Screening, words: str) -> Response:
    return Response(action="send", after=dict(after), screening=screening, words=words)


def _root_mean_square(difference: Mapping[str, Tensor]) -> float:
    moved = [value.double().flatten() for value in difference.values() if value.is_floating_point()]
    return float(torch.cat(moved).square().mean().sqrt()) if moved else 0.0


def _add_noise(weights: Mapping[str, Tensor], std: float, draw: torch.Generator) -> dict[str, Tensor]:
    """Return weights with noise of one size in every number that is no count; variances stay variances."""
    noisy = dict(weights)
    for name, value in weights.items():
        if value.is_floating_point():
            noisy[name] = value + std * torch.randn(value.shape, generator=draw).to(value)
        if name.endswith("running_var"):  # below zero, batch normalization would make numbers of none
            noisy[name] = noisy[name].clamp_min(0)
    return noisy
