"""R-CONV: gradients first, and ReLU is no obstacle."""

import os
from pathlib import Path

import pytest
import torch
from support import chains
from support.loud import Loud
from torch import nn

from attacks import NotApplicable, Reconstruction
from attacks.analytic.rconv import RConv
from attacks.analytic.recursive.layer_equations import invert_activation
from attacks.analytic.recursive.layerwise_inversion import LayerwiseInversion
from attacks.analytic.rgap import RGAP
from defenses import defenses
from fl.capture import from_batch
from fl.data import load
from fl.defense import Defense
from fl.models import build as network
from fl.view import ServerView

FOLDER = os.environ.get("HYPERLEAK_DATA", "")
needs_files = pytest.mark.skipif(not Path(FOLDER, "cifar10_test.npz").is_file(), reason="HYPERLEAK_DATA has no files")


def attack(view: ServerView) -> Reconstruction:
    result = RConv()(view)
    assert isinstance(result, Reconstruction), result
    return result


def off(result: Reconstruction, truth: torch.Tensor) -> float:
    assert result.inputs is not None
    return float((result.inputs - truth).abs().max())


@pytest.mark.parametrize("act", [nn.ReLU, lambda: nn.LeakyReLU(0.2), nn.Sigmoid, nn.Tanh])
def test_a_double_precision_update_gives_the_image(act: type[nn.Module]) -> None:
    view, truth = chains.seen(chains.chain(act, (24, 24)))
    result = attack(view)
    assert off(result, truth.inputs) < 1e-6
    assert result.verified
    assert result.labels is not None
    assert result.labels.tolist() == [1]


def test_a_relu_in_single_precision() -> None:
    view, truth = chains.seen(chains.chain(nn.ReLU, (24, 24)).float())
    result = attack(view)
    assert off(result, truth.inputs) < 1e-3
    assert result.verified


def test_gradients_alone_suffice_where_no_output_is_known() -> None:
    """A layer whose outputs would not determine its input: R-GAP's reading of it, by weights alone, is wrong."""
    model = chains.chain(nn.ReLU, (24, 3))  # 24 x 16 values come into a layer of 3 x 16 outputs, half of them silent
    solved = attack(chains.seen(model)[0]).private
    unknowns, gradient, rank = solved["rank/2"].tolist()  # type: ignore[union-attr]
    assert (unknowns, gradient, rank) == (384, 384, 384)


def test_a_relu_in_the_first_layer_needs_more_filters() -> None:
    for filters, enough in ((3, False), (24, True)):
        view, truth = chains.seen(chains.chain(nn.ReLU, (filters, 24)))
        result = attack(view)
        unknowns, _, rank = result.private["rank/0"].tolist()  # type: ignore[union-attr]
        assert (rank == unknowns) == enough
        assert bool(result.verified) == enough
        assert (off(result, truth.inputs) < 1e-6) == enough


def test_fewer_filters_suffice_than_outputs_would_need() -> None:
    model = chains.chain(lambda: nn.LeakyReLU(0.2), (12, 3))
    view, truth = chains.seen(model)
    assert off(attack(view), truth.inputs) < 1e-6
    assert attack(view).private["rank/2"].tolist() == [192, 192, 192]  # type: ignore[union-attr]


def test_no_unit_of_the_update_changes_the_result() -> None:
    model = chains.chain(nn.ReLU, (24, 24))
    plain, loud = (attack(chains.seen(model, defense=defense)[0]) for defense in (None, Loud()))
    assert plain.inputs is not None
    assert loud.inputs is not None
    assert torch.equal(plain.inputs, loud.inputs)


@pytest.mark.parametrize("defense", [pytest.param(d, id=n) for n, d in defenses.examples() if d.group_size == 1])
@pytest.mark.parametrize("attack_", [RConv(), RGAP()], ids=["rconv", "rgap"])
def test_under_every_defense_it_answers_and_claims_nothing_false(attack_: LayerwiseInversion, defense: Defense) -> None:
    view, truth = chains.seen(chains.chain(lambda: nn.LeakyReLU(0.2)), defense=defense)
    result = attack_(view)
    if isinstance(result, NotApplicable):
        assert result.reason
        return
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.inputs.isfinite().all()
    assert 0 <= float(result.inputs.min()) <= float(result.inputs.max()) <= 1
    assert not result.verified or off(result, truth.inputs) < 0.05


def test_a_dead_network_is_no_crash() -> None:
    model = chains.chain(nn.ReLU, (24, 24))
    with torch.no_grad():
        model[2].bias.fill_(-100.0)  # type: ignore[operator, union-attr]
    result = RConv()(chains.seen(model)[0])
    assert isinstance(result, NotApplicable)
    assert "no signal" in result.reason


def test_values_below_zero_measure_the_error_of_a_relus_others() -> None:
    values = torch.tensor([[-1e-4, 1e-5, 1.5e-4, 0.3, 0.0]], dtype=torch.float64)
    outputs, slope = invert_activation(nn.ReLU(), values)
    assert slope.tolist() == [[0, 0, 0, 1, 0]]
    assert outputs.known.tolist() == [[False, False, False, True, False]]


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.2), nn.Identity()])
def test_activation_and_slope_are_inverted(act: nn.Module) -> None:
    given = torch.linspace(-3, 3, 20, dtype=torch.float64)[None].requires_grad_()
    values = act(given)
    (slopes,) = torch.autograd.grad(values.sum(), given)
    outputs, slope = invert_activation(act, values.detach())
    assert outputs.known.all()
    assert torch.allclose(outputs.values, given, rtol=0, atol=1e-9)
    assert torch.allclose(slope, slopes, rtol=0, atol=1e-9)


def test_values_outside_an_activations_range_tell_nothing() -> None:
    outputs, slope = invert_activation(nn.Sigmoid(), torch.tensor([[-0.1, 0.0, 0.5, 1.0, 1.2]], dtype=torch.float64))
    assert outputs.known.tolist() == [[False, False, True, False, False]]
    assert slope.tolist() == [[0, 0, 0.25, 0, 0]]


def test_max_pooling_is_left_to_the_cascade() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)).double()
    result = RConv()(chains.seen(model)[0])
    assert isinstance(result, NotApplicable)
    assert "cascade" in result.reason


@pytest.mark.parametrize("trust", [0.0, 1.0])
def test_trust_is_checked(trust: float) -> None:
    with pytest.raises(ValueError, match=r"rconv.trust: expected a number in"):
        RConv(trust=trust)


@needs_files
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn6", "lenet-zhu"])
def test_real_images_in_single_precision(name: str) -> None:
    data = load("cifar10")
    image = data.test.inputs[:1]
    view, truth = from_batch(network(name, num_classes=10, seed=0).model, image, data.test.labels[:1])
    for each in (RConv(), RGAP()):
        result = each(view)
        assert isinstance(result, Reconstruction)
        assert float((result.inputs - truth.inputs).square().mean()) < 1e-6  # type: ignore[operator]
        assert result.verified


def test_gradient_equations_go_first_as_far_as_they_are_trusted_and_in_rgap_all_go_together() -> None:
    assert RConv(trust=0.5).gradient_trust == 0.5
    assert RGAP().gradient_trust is None
