"""Networks that take brightness or contrast off each picture: what is left of it is handed out, and never verified."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional

import hyperleak
from attacks import Reconstruction
from attacks.analytic.analytic import Analytic
from attacks.analytic.cascade import Cascade
from attacks.analytic.rconv import RConv
from attacks.base import Remark, build, run_checked
from attacks.network.pixel_prefix import read_pixel_prefix
from attacks.prefix_inversion import confirm_whole, network_above
from attacks.verification.words import FOLDED
from eval.metrics.score import score
from fl.capture import from_batch
from fl.seeds import stream

LABELS = torch.tensor([1])


class Scaling(nn.Module):
    """A perceptron of what a function makes of pictures of 8 by 8."""

    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.scale(x))


def picture() -> Tensor:
    return (100 * torch.rand(1, 3, 8, 8, generator=stream(0, "picture"))).round() / 255 + 20 / 255


def network(scale: Callable[[Tensor], Tensor]) -> nn.Module:
    return initialized(Scaling(scale)).float()


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


class Convolving(nn.Module):
    """A convolution of what a layer makes of pictures of 8 by 8."""

    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale
        self.convolution, self.head = nn.Conv2d(3, 24, 3, padding=1), nn.Linear(24 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.leaky_relu(self.convolution(self.scale(x))).flatten(1))


TAKEN_OFF = {
    "length": (lambda x: functional.normalize(x.flatten(1)), False),
    "largest": (lambda x: x / x.amax((1, 2, 3), keepdim=True), False),
    "standardized": (standardized, True),
    "layer norm": (lambda x: functional.layer_norm(x, x.shape[1:]), True),
}
SHIFTED = {
    "less its mean": (lambda x: x - x.mean((1, 2, 3), keepdim=True), Remark.SCALE_TAKEN_OFF),
    "less its channels' means": (lambda x: x - x.mean((2, 3), keepdim=True), Remark.SCALES_TAKEN_OFF),
    "less its least": (lambda x: x - x.amin((1, 2, 3), keepdim=True), Remark.SCALE_TAKEN_OFF),
    "less its channels' least": (lambda x: x - x.amin((2, 3), keepdim=True), Remark.SCALES_TAKEN_OFF),
    "log softmax": (lambda x: x.flatten(1).log_softmax(1).view_as(x), Remark.SCALE_TAKEN_OFF),
}
NOT_TAKEN_OFF = {
    "scaled alike": lambda x: 2 * x - 1,
    "times its length": lambda x: x * x.norm(),
    "bent": lambda x: x**2 / x.norm(),
    "softmax": lambda x: x.flatten(1).softmax(1),
    "turned": lambda x: -x / x.norm(),
    "by channel": lambda x: functional.normalize(x, dim=1),
}


@pytest.mark.parametrize(("scale", "shifted"), TAKEN_OFF.values(), ids=TAKEN_OFF.keys())
def test_the_picture_comes_back_up_to_its_scale_and_unverified(scale, shifted: bool) -> None:
    view, _ = from_batch(network(scale), picture(), LABELS)
    (result,) = run_checked(Analytic(), [view], [0])
    assert isinstance(result, Reconstruction)
    assert result.verified is None
    assert result.fixed is None
    assert result.approximate
    assert Remark.SCALE_TAKEN_OFF in result.remarks
    assert ("contrast, which the network takes off" in result.note) is shifted
    true = picture().flatten()
    low = true.min() if shifted else 0.0
    torch.testing.assert_close(result.inputs.flatten(), (true - low) / (true.max() - low), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attack", [RConv(), Analytic()], ids=lambda attack: attack.name)
@pytest.mark.parametrize(("shift", "remark"), SHIFTED.values(), ids=SHIFTED.keys())
def test_the_picture_comes_back_up_to_a_number_that_is_added(shift, remark: Remark, attack) -> None:
    wide = (3 * (picture() - 0.35)).clamp(0, 1)
    model = initialized(Convolving(shift) if isinstance(attack, RConv) else Scaling(shift)).float()
    view, truth = from_batch(model, wide, LABELS)
    (result,) = run_checked(attack, [view], [0])
    assert isinstance(result, Reconstruction)
    assert (result.verified, result.fixed, result.approximate) == (None, None, True)
    assert remark in result.remarks
    assert "a number added to" in result.note
    assert "as those of a mean of" not in result.note
    (row,) = score(result, truth, task=view.task)
    assert row["psnr_scaled"] > 60


def test_of_a_softmax_no_picture_is_borne_out() -> None:
    for soft in (lambda x: x.flatten(1).softmax(1).view_as(x), lambda x: x.softmax(1)):
        view, _ = from_batch(initialized(Convolving(soft)).float(), picture(), LABELS)
        for brighter in (picture(), picture() + 5 / 255):
            for claim in (True, None):
                held = confirm_whole(Cascade(), view, None, Reconstruction(brighter, LABELS, verified=claim))
                assert isinstance(held, Reconstruction)
                assert (held.verified, held.approximate) == (None, False)
                assert FOLDED in held.note or not claim


BY_CHANNEL = {
    "instance norm": nn.InstanceNorm2d(3),
    "affine instance norm": nn.InstanceNorm2d(3, affine=True),
    "standardized": lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-5),
    "largest": lambda x: x / x.amax((2, 3), keepdim=True),
}


@pytest.mark.parametrize("attack", [RConv(), Cascade()], ids=lambda attack: attack.name)
@pytest.mark.parametrize("scale", [standardized, nn.LayerNorm([3, 8, 8]), BY_CHANNEL["instance norm"]])
def test_a_convolution_behind_it_is_undone_all_the_same(scale, attack) -> None:
    view, truth = from_batch(initialized(Convolving(scale)).float(), picture(), LABELS)
    (result,) = run_checked(attack, [view], [0])
    assert isinstance(result, Reconstruction)
    assert result.verified is None
    assert result.approximate
    (row,) = score(result, truth, task=view.task)
    assert row["psnr_scaled"] > 60
    assert row["psnr"] < 30


@pytest.mark.parametrize("scale", BY_CHANNEL.values(), ids=BY_CHANNEL.keys())
def test_what_is_taken_off_each_channel_is_fitted_for_each(scale) -> None:
    tinted = picture() * torch.tensor([0.5, 1.0, 0.8]).view(1, 3, 1, 1)
    view, truth = from_batch(initialized(Scaling(scale)).float(), tinted, LABELS)
    (result,) = run_checked(Analytic(), [view], [0])
    assert isinstance(result, Reconstruction)
    assert (result.verified, result.approximate) == (None, True)
    assert Remark.SCALES_TAKEN_OFF in result.remarks
    assert "of its channels, which the network takes off each" in result.note
    (row,) = score(result, truth, task=view.task)
    assert row["psnr_scaled"] > 60
    assert row["floor_grey_psnr_scaled"] < 30


def test_a_searched_picture_is_scored_up_to_the_scale_that_is_taken_off() -> None:
    view, truth = from_batch(network(standardized), picture(), LABELS)
    (result,) = run_checked(build({"name": "ig", "iterations": 2, "restarts": 1}), [view], [0])
    assert isinstance(result, Reconstruction)
    assert (result.verified, result.approximate) == (None, False)
    assert score(result, truth, task=view.task)[0]["psnr_scaled"] is not None


def test_a_wrong_picture_is_not_borne_out_by_the_network_above() -> None:
    view, _ = from_batch(network(standardized), picture(), LABELS)
    wrong = Reconstruction(inputs=picture().flip(-1), verified=True)
    held = confirm_whole(Analytic(), view, None, wrong)
    assert isinstance(held, Reconstruction)
    assert held.verified is not True
    assert not held.approximate
    assert "the picture is known" not in held.note
    assert "a picture can be told up to its brightness and contrast" in held.note


@pytest.mark.parametrize("scale", NOT_TAKEN_OFF.values(), ids=NOT_TAKEN_OFF.keys())
def test_other_functions_of_a_picture_are_not_said_to_take_its_scale_off(scale) -> None:
    view, _ = from_batch(network(scale), picture(), LABELS)
    found = read_pixel_prefix(view)
    assert found is None or found.kind != "normalized"


def test_an_audit_counts_it_as_leaked_once_its_scale_is_fitted() -> None:
    (finding,) = hyperleak.audit(network(standardized), picture(), LABELS, attacks=["analytic"]).findings
    (row,) = finding.rows
    assert finding.leaked
    assert row["psnr"] < 20
    assert row["psnr_scaled"] > 60
    assert row["floor_noise_psnr_scaled"] < 30
    assert "once brightness and contrast are fitted" in finding.verdict
    assert [one.kind for one in finding.outcomes] == ["borne out"]


def test_pixels_that_rounding_moves_to_other_levels_are_not_verified() -> None:
    """Behind x^4 and exp(20 x) dark pixels make next to nothing of what the layers get."""
    dark = (255 * torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) ** 3).round() / 255
    for flat in (lambda x: x**4, lambda x: (20 * x).exp()):
        view = from_batch(initialized(Convolving(flat)).float(), dark, LABELS)[0]
        found = build("rconv")(view)
        assert isinstance(found, Reconstruction)
        assert (found.verified, found.approximate, found.fixed) == (False, False, None)
        assert Remark.PARTLY_TOLD in found.remarks
        assert "by rounding they may be off by" in found.note


def test_kinds_of_prefixes_are_understood_by_their_former_names() -> None:
    view = from_batch(initialized(Scaling(lambda x: x / x.norm())).float(), torch.rand(1, 3, 8, 8), LABELS)[0]
    with pytest.warns(DeprecationWarning, match="inverted_prefixes"):

        class Former(Analytic):
            takes_off = frozenset({"scaled"})

    assert network_above(Former(), view) is not None
    assert network_above(Analytic(), view) is not None
