"""Where the last parameters tell pictures apart, whole steps are not taken for it, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attacks.base import Reconstruction
from attacks.update.observed_update import ObservedUpdate
from attacks.verification import contrasts
from attacks.verification.confirmation import confirm
from attacks.verification.last_parameters import of_last_parameters
from attacks.verification.scale_directions import Closeness
from attacks.verification.step_prediction import StepPredictor
from attacks.verification.update_comparison import UpdateComparison
from fl.capture import from_batch
from fl.methods.fedsam import FedSAM
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView


def network() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 4))
    initialize(model, stream(1, "last parameters"))
    return model


def observed(count: int = 2) -> tuple[ServerView, Tensor, Tensor]:
    images = (255 * torch.rand(count, 3, 6, 6, generator=stream(0, "last parameters"))).round() / 255
    labels = torch.arange(count)
    return from_batch(network(), images, labels)[0], images, labels


def question(view: ServerView, images: Tensor, labels: Tensor) -> tuple[UpdateComparison, Closeness, dict[str, float]]:
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    own, allowed = check.bounds.predict_exactly(images, labels)
    asked = contrasts._as_closely(check, labels, own, allowed, check.predictor.predict_in_double)
    assert asked is not None
    return check, asked, allowed


def test_the_last_parameters_answer_as_a_whole_step_does() -> None:
    view, images, labels = observed()
    check, asked, allowed = question(view, images, labels)
    last = of_last_parameters(asked, check, images, labels, allowed)
    assert last is not None
    assert list(last.own) == ["5.weight", "5.bias"]
    for others in (images, images * 0.9, images.flip(-1)):
        whole = asked.predict(others)
        for name, value in last.predict(others).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12)
        assert last.exceeds(others) is asked.exceeds(others)


def test_what_a_step_does_not_make_of_the_last_parameters_is_not_asked_of_these() -> None:
    view, images, labels = observed()
    check, asked, allowed = question(view, images, labels)
    for own in (
        {n: value + 0.01 * value.norm() for n, value in asked.own.items()},
        {n: value + 1e-8 * value.norm() for n, value in asked.own.items()},
        {n: v * 0 for n, v in asked.own.items()},
    ):
        assert of_last_parameters(replace(asked, own=own), check, images, labels, allowed) is None


def test_a_method_with_a_direction_of_its_own_is_asked_by_whole_steps() -> None:
    view, images, labels = observed()
    check, asked, allowed = question(view, images, labels)
    other = replace(check, view=replace(view, method=FedSAM(rho=1e-7)))
    assert check.follows_task_loss
    assert not other.follows_task_loss
    assert of_last_parameters(asked, other, images, labels, allowed) is None


def test_a_verdict_is_the_same_with_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Tensor] = []
    predict = StepPredictor.predict_in_double

    def counted(predictor: StepPredictor, images: Tensor, *given: object) -> dict[str, Tensor]:
        steps.append(images)
        return predict(predictor, images, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StepPredictor, "predict_in_double", counted)
    view, images, labels = observed()
    held = confirm(view, Reconstruction(inputs=images, labels=labels, verified=True))
    soon = len(steps)
    monkeypatch.setattr(contrasts, "of_last_parameters", lambda *_: None)
    again = confirm(view, Reconstruction(inputs=images, labels=labels, verified=True))
    assert held.verified is again.verified is True
    assert len(steps) - soon >= soon + 6
