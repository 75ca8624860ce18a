"""Numbers on an even grid are told from others, and what attacks make of an update of such numbers is not ruled out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn

import attacks
import hyperleak
from attacks.network.reading_cache import readings_cached
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update import quantization_grids
from attacks.update.quantization_grids import bits_of_grid, grid_step, grid_steps, step_beside, were_rows_rounded
from defenses.qsgd import QSGD
from defenses.quantize import Quantize
from eval.audit.coarse_numbers import grid_bounds, grid_note
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import Tensors, dense


def numbers(count: int = 300) -> Tensor:
    return torch.randn(count, generator=stream(0, "grid"))


def rounded(values: Tensor, bits: int, *, random: bool = False) -> Tensor:
    step = values.abs().max() / (2 ** (bits - 1) - 1)
    up = torch.rand(values.shape, generator=stream(1, "grid")) if random else 0.5
    return (values / step + up).floor() * step


@pytest.mark.parametrize("bits", [4, 6, 8, 12])
@pytest.mark.parametrize("random", [False, True])
def test_a_grid_is_found_with_its_step(bits: int, random: bool) -> None:
    values = numbers()
    sent = rounded(values, bits, random=random)
    assert grid_step(sent) == pytest.approx(float(values.abs().max()) / (2 ** (bits - 1) - 1), rel=1e-4)
    assert grid_step(sent + 0.123) == pytest.approx(grid_step(sent), rel=1e-3)  # between extremes, as quantize has it
    assert bits_of_grid(sent) in {bits - 1, bits}


def test_other_numbers_lie_on_none() -> None:
    values = numbers(5000)
    signs = values.sign()
    kept = values * (values.abs() > 1)
    for other in (
        values,
        kept,
        signs,
        values.half().float(),
        values.bfloat16().float(),
        numbers(20),
        torch.zeros(9),
        torch.zeros(0),
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
    ):
        assert grid_step(other) == 0
    start = torch.ones(200)
    change = start - (start - 1e-5 * numbers(200))
    assert grid_step(change) > 0
    assert bits_of_grid(change, start) == 0  # the weights' own last places


def test_a_miss_on_few_bits_is_not_ruled_out() -> None:
    model = initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).float()
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "picture"))
    loss = nn.functional.cross_entropy(model(image), torch.tensor([3]))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    update = {n: rounded(0.1 * g, 8) for (n, _), g in zip(model.named_parameters(), grads, strict=True)}
    how = FedAvg(lr=0.1, steps=1, batch_size=None)
    result = attacks.build("analytic")(from_update(model, update, input_shape=(1, 8, 8), method=how))
    assert isinstance(result, attacks.base.Reconstruction)
    assert result.verified is None
    assert "no more than the rounding of what was sent in 8 bits a number" in result.note


def test_a_grid_is_found_in_what_computing_leaves_of_it() -> None:
    draw = torch.randn(5000, generator=stream(0, "numbers"), dtype=torch.float64)
    assert grid_step((draw / 0.1).round() * 0.1 + 0.03) == pytest.approx(0.1)
    sent = rounded(numbers(5000), 8)
    start = 30 * torch.rand(5000, generator=stream(3, "grid"))
    for noisy in (sent.half().float(), start - (start - sent)):
        assert grid_step(noisy) == pytest.approx(grid_step(sent), rel=1e-2)
    assert grid_step(numbers().sign() * (numbers() > 0)) == 0  # of two steps
    assert grid_step(numbers().clamp(-1, 1).round(), least=2) == 1


@pytest.mark.parametrize("length", [20, 80])
def test_rows_have_grids_of_their_own(length: int) -> None:
    values = numbers(5 * length).view(5, length) * torch.tensor([0.1, 3.0, 1.0, 0.0, 7.0])[:, None]
    sent = torch.stack([rounded(row, 8) if row.any() else row for row in values])
    assert grid_step(sent) == 0
    steps = grid_steps(sent)
    assert steps is not None
    torch.testing.assert_close(steps[:, 0], values.abs().amax(1).double() / 127)
    assert bits_of_grid(sent) == 8
    assert grid_steps(values) is None
    pixels = (255 * torch.rand(length, generator=stream(0, "pixels"))).round() / 255
    assert grid_steps(torch.outer(numbers(5), pixels)) is None


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_a_small_tensor_is_on_a_grid_as_larger_ones_are(count: int) -> None:
    large, own = rounded(numbers(), 8), numbers(count + 1)[1:]
    beside = {large: grid_step(large)}
    assert step_beside(rounded(own, 8), beside) == pytest.approx(float(own.abs().max()) / 127, rel=1e-4)
    shared = (own / beside[large]).round() * beside[large]
    assert step_beside(shared, beside) <= beside[large] * 1.0001
    low, step = float(own.min()), float(own.max() - own.min()) / 255
    if count > 1:
        between = low + ((own - low) / step).round() * step  # between extremes
        wide = low + 10 * ((large - large.min()) / (large.max() - large.min()) * 255).round()
        assert step_beside(between, {wide: 10.0}) == pytest.approx(step, rel=1e-3)
    if count > 2:
        assert step_beside(own, beside) == 0
    assert step_beside(torch.zeros(count), beside) == beside[large]


@pytest.mark.parametrize("outputs", [1, 2])
def test_pixels_times_one_number_are_no_few_bits(outputs: int) -> None:
    pixels = (255 * torch.rand(64, generator=stream(0, "pixels"))).round() / 255
    change = torch.tensor([0.037, -0.037])[:outputs, None] * pixels
    assert grid_step(change) == 0
    assert grid_step(change.flatten()) > 0
    several = torch.outer(torch.randn(20, generator=stream(2, "pixels")), pixels)
    assert grid_step(rounded(several, 8)) > 0


def by_rows(values: Tensor, bits: int) -> Tensor:
    steps = values.abs().amax(1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    return (values / steps).round() * steps


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_one_image_that_were_rounded_each_by_its_own_scale_are_told_by_a_second_layer(bits: int) -> None:
    """Of one layer they may be pixels of 8 bits, and are no sign."""
    pixels = (255 * torch.rand(64, generator=stream(2, "grid"))).round() / 255
    first, second = torch.outer(numbers(24), pixels), torch.outer(numbers(5), numbers(24).relu())
    assert not were_rows_rounded([first, second])
    assert not were_rows_rounded([by_rows(first, bits)])
    assert not were_rows_rounded([first, torch.outer(numbers(5), torch.eye(24)[3])])
    assert were_rows_rounded([by_rows(first, bits), by_rows(second, bits)])
    assert grid_steps(by_rows(second, bits)) is None
    assert grid_steps(by_rows(second, bits), of_one_row=True) is not None


def test_an_image_sent_with_a_scale_for_each_row_is_no_contradiction() -> None:
    model = initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).float()
    image, label = torch.rand(1, 1, 8, 8, generator=stream(0, "image")), torch.tensor([3])
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(image), label), [*model.parameters()])
    pairs = zip(model.named_parameters(), gradient, strict=True)
    update = {name: by_rows(0.1 * g, 4) if g.ndim > 1 else 0.1 * g for (name, _), g in pairs}
    before = {name: value.detach() for name, value in model.named_parameters()}
    method = {"name": "fedavg", "lr": 0.1, "steps": 1}
    after = {name: before[name] - value for name, value in update.items()}
    for sent in (update, (before, after), (None, after)):
        found = hyperleak.audit(model, image, label, update=sent, attacks="analytic", method=method)
        assert not found.mismatch
        assert any("on an even grid, as sent in" in note for note in found.notes)
        assert found.findings[0].rows[0]["psnr"] > 18


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-4),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-5),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-5),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1),
    "amsgrad": lambda weights: torch.optim.Adam(weights, lr=1e-5, amsgrad=True),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=1e-5),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=1e-4),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=1e-5),
}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_steps_of_nearly_one_size_are_no_few_bits(optimizer: str, steps: int, kernels: bool) -> None:
    """All numbers of the first step have nearly one size, and of a few steps a few sizes: on a grid by chance."""
    first = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)]
    layers = first if kernels else [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
    model = initialized(nn.Sequential(*layers)).float()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    step = OPTIMIZERS[optimizer](model.parameters())
    images = torch.rand(8 if steps == 1 else 1, 1, 8, 8, generator=stream(0, "pictures"))
    for _ in range(steps):
        step.zero_grad()
        nn.functional.cross_entropy(model(images), torch.arange(len(images))).backward()
        step.step()
    update = {name: start[name] - value.detach() for name, value in model.named_parameters()}
    assert grid_note(update, start, {}) == []
    assert grid_bounds(update, start, {}) == {}


def test_pixels_of_eight_bits_in_a_difference_of_weights_are_no_few_bits() -> None:
    """Of one picture, whose numbers the last places of the weights put off its pixels' grid."""
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2)]
    model = nn.Sequential(*layers)
    for seed in (8, 10, 20, 27):
        for name, value in model.named_parameters():
            value.data = (torch.rand(value.shape, generator=stream(seed, name)) - 0.5) * (
                0.25 if name[0] == "1" else 0.7
            )
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        picture = torch.randint(0, 256, (1, 64), generator=stream(seed, "picture")) / 255
        loss = nn.functional.cross_entropy(model(picture), torch.tensor([1]))
        pairs = zip(start.items(), torch.autograd.grad(loss, list(model.parameters())), strict=True)
        update = {name: value - (value - 0.01 * gradient) for (name, value), gradient in pairs}
        assert grid_note(update, start, {}) == []


@pytest.mark.parametrize("steps", [5, 8])
def test_sums_of_signs_are_named_beside_few_bits(steps: int) -> None:
    """Sums of steps of one size lie on one grid in all tensors; bits have a scale for each tensor."""
    draws = {name: torch.randn(steps, 64, 9, generator=stream(0, name)).sign().sum(0) for name in ("a", "b")}
    start = {name: torch.randn(64, 9, generator=stream(1, name)) for name in draws}
    (note,) = grid_note({name: 1e-3 * value for name, value in draws.items()}, start, {})
    assert "or as several steps of one size, or of few, make them (signSGD, Lion, Rprop)" in note
    scaled = {"a": draws["a"], "b": 0.37 * draws["b"]}
    (note,) = grid_note(scaled, start, {})
    assert "signSGD" not in note
    assert "a, b: numbers on an even grid, as sent in" in note


@pytest.mark.parametrize("bits", [3, 8])
def test_qsgd_is_still_named(bits: int) -> None:
    values: Tensors = {"a": numbers(2000).view(40, 50), "b": numbers(900).view(9, 100)}
    sent = QSGD(bits=bits, norm="max").transform_update(values, stream(2))
    (note,) = grid_note({name: dense(value) for name, value in sent.items()}, {name: numbers(9) for name in sent}, {})
    assert note.startswith("a, b: ")
    assert all(bits_of_grid(dense(value)) == bits for value in sent.values())


def test_weights_before_that_are_integers_have_no_last_places() -> None:
    """A count of batches may be sent as floats."""
    values = torch.arange(64.0)
    assert bits_of_grid(values, torch.tensor(3)) == bits_of_grid(values)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_four_values_of_both_signs_are_two_bits(rounding: Literal["nearest", "stochastic"]) -> None:
    """Extremes are of nearly one size, but not to the numbers' rounding, as they are of signs."""
    values: Tensors = {"a": torch.cat([numbers(2000).clamp(-2, 2), torch.tensor([-2.02])]).view(-1, 23)}
    sent = Quantize(bits=2, rounding=rounding).transform_update(values, stream(2))
    assert len(torch.unique(dense(sent["a"]))) == 4
    assert bits_of_grid(dense(sent["a"])) == 2


@pytest.mark.parametrize("seed", range(6))
def test_few_numbers_no_two_of_which_are_next_to_each_other_lie_on_a_grid(seed: int) -> None:
    """Of 64 in eight bits the nearest two may be two steps apart or more."""
    values = torch.randn(64, generator=stream(seed, "few"))
    values[torch.arange(64) % 4 > 0] = 0  # units at rest
    step = values.abs().max() / 127
    sent = (values / step + torch.rand(64, generator=stream(seed, "up"))).floor() * step
    assert grid_step(sent) == pytest.approx(float(step), rel=1e-4)
    assert grid_step(values) == 0.0


def test_what_stochastic_rounding_leaves_at_zero_is_not_called_sparsified() -> None:
    net = initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)), 0).float()
    pixels = (255 * torch.rand(1, 3, 8, 8, generator=stream(0, "pixels"))).round() / 255
    view, _ = from_batch(net, pixels, torch.tensor([3]))
    update = {name: rounded(dense(value), 8, random=True) for name, value in view.update.items()}
    report = hyperleak.audit(
        net,
        update=update,
        input_shape=(3, 8, 8),
        method={"name": "fedavg", "lr": 1.0, "steps": 1},
        attacks=["analytic"],
    )
    assert not report.mismatch
    assert report.findings[0].verified is None
    assert "in 8 bits a number" in report.findings[0].notes[0]


def sent_by_rows(rows: int = 40) -> Tensor:
    """Rows of grids of their own, as of an integer and a scale for each."""
    return torch.stack([(1 + row) * rounded(numbers(30).roll(row), 8) for row in range(rows)])


def test_the_grids_of_a_tensor_are_read_once_while_nobody_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read, made = [], quantization_grids._read_grids
    monkeypatch.setattr(quantization_grids, "_read_grids", lambda values: read.append(0) or made(values))
    values = sent_by_rows()
    apart = grid_steps(values)
    assert apart is not None
    with readings_cached():
        for again in (values, values.detach(), values):
            assert torch.equal(grid_steps(again), apart)  # type: ignore[arg-type]
        assert grid_steps(values, spacing=1e6) is None
        assert len(read) == 2
        values.mul_(2)
        assert torch.equal(grid_steps(values), 2 * apart)  # type: ignore[arg-type]
        grid_steps(values.mT)
        grid_steps(values.clone())
    assert len(read) == 5


def test_reading_the_grids_of_rows_ends_with_the_time() -> None:
    with limited_by(SearchControl(time_limit=0)), pytest.raises(StoppedError):
        grid_steps(sent_by_rows())
