"""Networks that are given a part of a picture: what an audit says of the pixels that they are given."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn

import hyperleak
from attacks.network.pixel_map import read_pixel_map
from eval.audit.findings import AuditReport
from eval.audit.judgment import Judgment, images_in_words
from eval.audit.verdict import closest_figure, has_leaked, image_line, verdict
from eval.metrics.score import Row
from fl.capture import from_batch
from fl.seeds import stream

LABELS = torch.tensor([1])
CROPPED = (slice(None), slice(None), slice(1, 7), slice(1, 7))


class Cropping(nn.Module):
    """A perceptron of the middle of pictures of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * 36, 30), nn.ReLU(), nn.Linear(30, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[CROPPED].flatten(1))


class Gray(Cropping):
    """The same of gray pictures, of which no pixel is told by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mean(1).flatten(1))


def picture() -> Tensor:
    return (255 * torch.rand(1, 3, 8, 8, generator=stream(0, "picture"))).round() / 255


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return hyperleak.audit(initialized(Cropping()).float(), picture(), LABELS, attacks=["rconv"])


def test_what_a_crop_leaves_counts_as_leaked(report: AuditReport) -> None:
    (finding,) = report.findings
    (row,) = finding.rows
    assert finding.leaked
    assert finding.verified is None
    assert row["seen"] == 108 / 192
    assert row["psnr_seen"] > 60
    assert row["psnr"] < 20
    assert "on the pixels that the network is given (56.2 %)" in finding.verdict
    assert "on the 56.2 % of its pixels that the network is given" in image_line(row, 0)


def test_a_limit_is_held_against_the_pixels_that_the_network_is_given(report: AuditReport) -> None:
    (one,) = report.findings[0].rows
    assert report.best("psnr") == one["psnr_seen"]
    found = closest_figure(one, "psnr")
    assert found is not None
    assert (found.value, found.guess) == (one["psnr_seen"], one["floor_mean_psnr_seen"])
    part = "on the 56.2 % of its pixels that the network is given"
    assert f"> 30 ({part})" in report.describe_excess("psnr", 30)
    judged = Judgment(report, {"psnr": 30.0})
    assert f"dB {part} (best guess" in judged.leaks[0].words


def row(**figures: float) -> Row:
    """An image whose guesses score 10 dB, whatever they score of."""
    guesses = {f"floor_grey_{name}": 10.0 for name in ("psnr", "psnr_seen", "psnr_scaled")}
    return {"image": 0, "psnr": 8.0, "label_correct": None, **guesses, **figures}


@pytest.mark.parametrize(("share", "numbers", "counts"), [(0.01, 9, False), (0.01, 64, True), (0.5, 9, True)])
def test_few_pixels_do_not_count_by_themselves(share: float, numbers: int, counts: bool) -> None:
    """Some of few numbers come near to right ones by chance."""
    one = row(psnr_seen=60.0, seen=share, seen_numbers=numbers)
    assert has_leaked([one]) is counts
    found = closest_figure(one, "psnr")
    assert found is not None
    assert (found.value == 60) is counts
    assert ("too few to count" in image_line(one, 0)) is not counts


def test_a_verdict_on_part_of_a_picture_goes_by_that_part() -> None:
    said = verdict([row(psnr_seen=60.0, seen=0.75, seen_numbers=768)])
    assert "1 of 1 image(s) at least 1 dB above the best guess" in said
    assert "the furthest at 60.0 dB against 10.0 dB on the 75 % of its pixels that the network is given" in said


def test_the_figure_furthest_above_its_guess_is_named_with_what_it_is_of() -> None:
    one = row(psnr_scaled=40.0, psnr=41.0, floor_grey_psnr=39.0)
    assert images_in_words([one]) == (
        "image 0 at 40 dB once brightness and contrast are fitted, which the network takes off (best guess 10 dB)"
    )
    assert images_in_words([one], limit=40.5) == "image 0 at 41 dB (best guess 39 dB)"


def test_only_single_pixels_count_as_given() -> None:
    cropped, gray = (
        read_pixel_map(from_batch(initialized(model).float(), picture(), LABELS)[0]) for model in (Cropping(), Gray())
    )
    assert (cropped.kind, gray.kind) == ("fewer", "fewer")
    expected = torch.zeros(1, 3, 8, 8, dtype=torch.bool)
    expected[CROPPED] = True
    assert torch.equal(cropped.pixels, expected[0])
    assert gray.pixels is None
