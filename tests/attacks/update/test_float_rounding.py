"""Rounding of an update that is the difference of two models, number by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.pictures import STEP, attack, photograph, victim

import attacks.analytic.recursive.chain_descent
import fl.models
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.solution import LayerSolution
from attacks.update.float_rounding import coarse_form, relative_entry_rounding, rounding_of_numbers
from fl.capture import from_update
from fl.seeds import stream
from fl.view import ServerView

NAME = "body.conv2.weight"


def view_of(step: torch.Tensor | None = None) -> ServerView:
    view = victim(fl.models.build("hyperfl-grey", num_classes=10, seed=0), photograph(28), replace(STEP, lr=0.02))
    if step is None:
        return view
    start = view.shared[NAME]
    return replace(view, update={**view.update, NAME: start - (start - step).float()})  # type: ignore[operator]


def test_rounding_is_as_large_as_the_spacing_of_numbers_at_each_weight() -> None:
    start = view_of().shared[NAME]
    step = 1e-3 * torch.randn(start.shape, generator=stream(0, "step"), dtype=torch.float64)
    view = view_of(step)
    found = relative_entry_rounding(view, NAME)
    assert found is not None
    rounded = (view.update[NAME] - step) / found / step.square().mean().sqrt()  # type: ignore[operator]
    found_scale = found / found.square().mean().sqrt()
    fine, coarse = rounded[found_scale < 0.3].square().mean().sqrt(), rounded[found_scale > 0.9].square().mean().sqrt()
    assert (found_scale < 0.3).sum() > 100
    assert float(fine) == pytest.approx(float(coarse), rel=0.2)
    error = (view.update[NAME] - step).square().mean().sqrt()  # type: ignore[operator]
    assert float(found.square().mean().sqrt() * step.square().mean().sqrt()) == pytest.approx(float(error), rel=0.05)


def test_rounding_of_a_gradient_is_by_the_spacing_of_its_type() -> None:
    sizes = torch.linspace(-120, 120, 200).exp2()
    numbers = torch.cat([sizes, -1.37 * sizes, sizes.new_tensor([1.0, 2.0, 0.5])])
    view = replace(view_of(), update={NAME: numbers}, rounded=False)
    apart = numbers.abs().nextafter(numbers.new_tensor(torch.inf)).double() - numbers.abs().double()
    torch.testing.assert_close(rounding_of_numbers(view)[NAME], apart / 12**0.5, rtol=1e-12, atol=0.0)


def test_an_update_that_is_no_difference_of_models_has_no_grain() -> None:
    view = view_of()
    noise = 1e-3 * view.update[NAME].std() * torch.randn(view.shared[NAME].shape, generator=stream(0, "noise"))  # type: ignore[union-attr]
    assert relative_entry_rounding(view, NAME) is not None
    assert relative_entry_rounding(replace(view, update={**view.update, NAME: view.update[NAME] + noise}), NAME) is None  # type: ignore[operator]
    for bits in (torch.float16, torch.bfloat16):
        fewer = {n: t.to(bits).float() for n, t in view.update.items()}  # type: ignore[union-attr]
        assert relative_entry_rounding(replace(view, update=fewer), NAME) is None
    step = view.update[NAME]
    pruned = torch.where(step.abs() > step.abs().quantile(0.1), step, 0)  # type: ignore[union-attr, operator, call-overload]
    assert relative_entry_rounding(replace(view, update={**view.update, NAME: pruned}), NAME) is None
    still = step * torch.ones(len(step), 1, 1, 1).index_fill(0, torch.tensor([3]), 0)  # type: ignore[arg-type, operator]
    assert (
        relative_entry_rounding(replace(view, update={**view.update, NAME: still}), NAME) is not None
    )  # a unit at rest
    double = {n: {m: t.double() for m, t in part.items()} for n, part in (("a", view.shared), ("b", view.update))}  # type: ignore[union-attr]
    assert relative_entry_rounding(replace(view, shared=double["a"], update=double["b"]), NAME) is None


@pytest.mark.parametrize("lr", [3e-3, 1e-3])
def test_small_steps_whose_rounding_is_not_small_fix_no_pixel_wrongly(lr: float) -> None:
    picture = (photograph(28) * 255).round() / 255
    found = attack(victim(fl.models.build("hyperfl-grey", num_classes=10, seed=0), picture, replace(STEP, lr=lr)))
    wrong = ((found.inputs - picture) * 255).round() != 0  # type: ignore[operator]
    assert not found.verified or not bool(wrong.any())
    assert found.fixed is not None
    assert not bool((wrong & found.fixed).any())


def test_what_is_sent_in_half_precision_is_not_taken_for_more() -> None:
    picture = (photograph(28) * 255).round() / 255
    view = victim(fl.models.build("hyperfl-grey", num_classes=10, seed=0), picture, replace(STEP, lr=0.02))
    found = attack(replace(view, update={n: t.half().float() for n, t in view.update.items()}))  # type: ignore[union-attr]
    wrong = ((found.inputs - picture) * 255).round() != 0  # type: ignore[operator]
    assert int(wrong.count_nonzero()) < 10
    assert not found.verified or not bool(wrong.any())
    assert found.fixed is None or not bool((wrong & found.fixed).any())


def test_cascade_tells_its_layers_how_each_number_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Equations] = []
    solve_layer = attacks.analytic.recursive.chain_descent.solve_layer

    def spy(equations: Equations, *rest: Any) -> LayerSolution:
        told.append(equations)
        return solve_layer(equations, *rest)

    monkeypatch.setattr(attacks.analytic.recursive.chain_descent, "solve_layer", spy)
    view = view_of()
    attack(view)
    upper, lower = told
    assert torch.equal(upper.rounding, relative_entry_rounding(view, NAME).flatten(1))  # type: ignore[union-attr, arg-type]
    assert torch.equal(lower.rounding, relative_entry_rounding(view, "body.conv1.weight").flatten(1))  # type: ignore[union-attr, arg-type]
    steep = lower.target_std[lower.target > 0].view(-1)
    assert upper.target_std[upper.target > 0].unique().numel() == 1  # a linear layer above: one number for all
    assert float(steep.max()) > 2 * float(steep.min())  # where few positions see a feature it is known less well


@pytest.mark.parametrize("size", [1e-6, 1e-20])
def test_a_gradient_sent_by_itself_is_as_exact_however_small(size: float) -> None:
    task = fl.models.build("hyperfl-grey", num_classes=10, seed=0)
    picture = (photograph(28) * 255).round().float() / 255
    loss = torch.nn.functional.cross_entropy(task.model(picture), torch.tensor([3]))
    names = list(task.parameters)
    sent = torch.autograd.grad(loss, [task.model.get_parameter(n) for n in names])
    small = {n: g * size for n, g in zip(names, sent, strict=True)}
    view = from_update(
        task.model, small, input_shape=(1, 28, 28), num_classes=10, mean=task.mean, std=task.std, kind="gradient"
    )
    found = attack(view)
    assert found.verified
    assert bool((((found.inputs - picture) * 255).round() == 0).all())  # type: ignore[operator]
    assert relative_entry_rounding(view, NAME) is None
    lost = attacks.base.build("cascade")(replace(view, rounded=True))  # a difference of weights says nothing there
    assert isinstance(lost, attacks.base.NotApplicable)
    assert "no more than rounding" in lost.reason or "by more than rounding" in lost.reason


def test_numbers_of_two_bytes_are_noticed_in_an_update_and_in_the_weights_after_it() -> None:
    view = view_of()
    assert coarse_form(view) == ""
    for kind, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        sent = {key: value.to(kind).float() for key, value in view.update.items()}
        after = {key: w - (w - view.update[key]).to(kind).float() for key, w in view.shared.items()}
        for update in (sent, after):
            assert coarse_form(replace(view, update=update)) == name
    one = {**sent, NAME: view.update[NAME]}
    assert coarse_form(replace(view, update=one)) == ""


def test_a_gradient_in_two_bytes_is_noticed_behind_its_step_size() -> None:
    view = view_of()
    sent = {key: 0.02 * (value / 0.02).bfloat16().float() for key, value in view.update.items()}
    gradient = replace(view, update=sent, rounded=False)
    assert gradient.method.lr == 0.02
    assert coarse_form(gradient) == "bfloat16"
    assert coarse_form(replace(gradient, update=view.update)) == ""
