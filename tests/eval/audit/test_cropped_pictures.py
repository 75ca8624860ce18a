"""Networks that are given a part of a picture: what an audit says of the pixels that they are given."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn

import hyperleak
from attacks.network.pixel_map import read_pixel_map
from eval.audit.findings import AuditReport
from eval.audit.verdict import closest_figure, image_line
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
    (row,) = report.findings[0].rows
    assert report.best("psnr") == row["psnr_seen"]
    assert closest_figure(row, "psnr") == (row["psnr_seen"], row["floor_mean_psnr_seen"])
    assert "PSNR" in report.describe_excess("psnr", 30)


def test_only_single_pixels_count_as_given() -> None:
    cropped, gray = (
        read_pixel_map(from_batch(initialized(model).float(), picture(), LABELS)[0]) for model in (Cropping(), Gray())
    )
    assert (cropped.kind, gray.kind) == ("fewer", "fewer")
    expected = torch.zeros(1, 3, 8, 8, dtype=torch.bool)
    expected[CROPPED] = True
    assert torch.equal(cropped.pixels, expected[0])
    assert gray.pixels is None
