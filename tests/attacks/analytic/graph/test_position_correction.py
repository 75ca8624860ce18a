"""Positions that max pooling did not pass on are found by the gradient, and the picture with them."""

import torch
from torch import Tensor

from attacks.analytic.graph.pooled_convolution import PooledConvolution, PooledObservation
from attacks.analytic.graph.position_correction import Positions, correct_positions
from tests.attacks.analytic.graph.test_pooled_convolution import layer_and_images, observe


def stem() -> tuple[PooledConvolution, PooledObservation, Tensor, Positions]:
    """A stem, what is known of it, its input, and the right positions."""
    layer, images = layer_and_images()
    known, _ = observe(layer, images)
    positions = Positions.nearest(layer, known, images)
    assert positions is not None
    return layer, known, images, positions


def with_wrong(positions: Positions, count: int) -> Positions:
    """The positions with some groups at another candidate, those into which most flows back."""
    candidates, taken = positions.candidates, positions.taken.clone()
    others = (~positions.are_taken).nonzero().flatten()
    strongest = others[candidates.signal[others].abs().argsort(descending=True)]
    moved: set[int] = set()
    for number in strongest.tolist():
        group = int(candidates.group[number])
        if group not in moved and len(moved) < count:
            taken[group] = number
            moved.add(group)
    return Positions(candidates, taken)


def test_nearest_positions_have_the_pooled_outputs() -> None:
    layer, _, images, positions = stem()
    taken = positions.candidates.position[positions.taken]
    found = layer.outputs(images).flatten()[taken]
    torch.testing.assert_close(found, positions.candidates.target[positions.taken])
    assert int(positions.are_taken.sum()) == positions.candidates.groups


def test_wrong_positions_are_found() -> None:
    layer, known, images, right = stem()
    wrong = with_wrong(right, 6)
    near = images + 0.02 * torch.randn(images.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, positions = near, wrong
    for _ in range(3):
        found, positions, _ = correct_positions(layer, known, found, positions)
    before, after = (int((p.taken != right.taken).sum()) for p in (wrong, positions))
    assert before == 6
    assert after <= 1
    assert float((found - images).norm()) < 0.1 * float((near - images).norm())


def test_right_positions_stay() -> None:
    layer, known, images, right = stem()
    found, positions, moved = correct_positions(layer, known, images, right)
    assert moved == 0
    assert torch.equal(positions.taken, right.taken)
    torch.testing.assert_close(found, images, rtol=0, atol=1e-5)


def test_nothing_open_has_no_positions() -> None:
    layer, known, images, _ = stem()
    closed = PooledObservation(0 * known.pooled, known.signal, known.gradient)
    assert Positions.nearest(layer, closed, images) is None
