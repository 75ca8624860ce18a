"""The prior of few edges, against its own sum over differences; and a picture that equations leave mostly open."""

from __future__ import annotations

import torch
from support.pictures import attack, network, photograph, victim
from torch import nn

from attacks.analytic.maxpool.edge_prior import DEVIATION, DIFFERENCES, LEAST_DIFFERENCE, SHARE, edge_prior
from fl.seeds import stream


def test_the_precision_is_the_sum_over_differences() -> None:
    draw, std = stream(0, "edges"), torch.tensor([0.5]).double()
    mean = torch.randn(1, 4, 5, generator=draw, dtype=torch.float64)
    root = torch.randn(20, 20, generator=draw, dtype=torch.float64)
    covariance = root @ root.mT
    expected = torch.eye(20).double() * float(std / DEVIATION) ** 2
    for taps in DIFFERENCES:
        rows = []
        down, right = max(a for a, _, _ in taps), max(b for _, b, _ in taps)
        for y in range(4 - down):
            for x in range(5 - right):
                row = torch.zeros(4, 5).double()
                for a, b, factor in taps:
                    row[y + a, x + b] = factor * float(std)
                rows.append(row.flatten())
        matrix = torch.stack(rows)
        square = (matrix @ mean.flatten()).square() + (matrix @ covariance @ matrix.mT).diagonal()
        size = (square + LEAST_DIFFERENCE**2).sqrt()
        expected += matrix.mT @ (matrix * (SHARE / (size.mean() * size))[:, None])
    found = edge_prior(mean, covariance, torch.tensor([0.5]).double(), std)
    assert torch.allclose(found.dense, expected)
    assert torch.allclose(found @ mean, (expected @ mean.flatten()).view_as(mean))


def test_colors_count_by_their_mean_and_by_what_differs_from_it() -> None:
    draw, std = stream(0, "colors"), torch.tensor([0.5, 0.3, 0.2]).double()
    mean = torch.randn(3, 1, 3, generator=draw, dtype=torch.float64)
    root = torch.randn(9, 9, generator=draw, dtype=torch.float64)
    covariance = root @ root.mT
    gray = torch.full((3, 3), 1 / 3).double()
    first = torch.tensor([[-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]]).double()
    expected = torch.kron(torch.diag((std / DEVIATION) ** 2), torch.eye(3).double())
    for differences in (first, first.diff(dim=0)):  # of a single row, all others are none
        for group, count in ((gray, 1), (torch.eye(3).double() - gray, 2)):
            rows = torch.stack([torch.kron(group * std, d) for d in differences])  # (rows, 3, 9)
            square = (rows @ mean.flatten()).square().sum(1)
            square = square + (rows @ covariance @ rows.mT).diagonal(dim1=1, dim2=2).sum(1)
            size = (square / count + LEAST_DIFFERENCE**2).sqrt()
            weight = SHARE / (size.mean() * size)
            expected += torch.einsum("rai,raj,r->ij", rows, rows, weight)
    assert torch.allclose(edge_prior(mean, covariance, torch.full_like(std, 0.5), std).dense, expected)


def test_of_a_picture_left_open_the_equations_are_counted_and_the_rest_is_smooth() -> None:
    image = photograph(14, channels=3)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.LeakyReLU(0.01))
    result = attack(victim(network(*layers, channels=3), image))
    assert not result.verified
    assert "304 equations for 588 numbers leave 284 open" in result.note
    assert result.inputs is not None
    assert float((result.inputs - image).square().mean()) < 0.3 * float(image.var())
