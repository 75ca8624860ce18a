"""Batch normalization in training mode: what its statistics and gradients give away of the layers around it."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.graph import batch_statistics_blocks
from attacks.analytic.graph.batch_statistics import (
    BatchNormalization,
    KnownSignal,
    NormalizedConvolution,
    SolvedInputs,
    find_centered_columns,
    set_zeros,
    solve_by_shifts,
    solve_inputs,
    unmix_by_zeros,
)
from attacks.analytic.graph.batch_statistics_blocks import NormalizedBlock, UnsolvedError, descend_blocks
from attacks.analytic.graph.mask_correction import correct_mask


class Block(nn.Module):
    """A residual block with batch normalization."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.strided = stride > 1
        if self.strided:
            self.down, self.bn3 = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = self.bn1(self.conv1(x)).relu()
        shortcut = self.bn3(self.down(x)) if self.strided else x
        return (self.bn2(self.conv2(hidden)) + shortcut).relu()


class Network(nn.Module):
    """A stem, two residual blocks of which the first is strided, global average pooling and a classifier."""

    def __init__(self, width: int, inner: int = 40) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, inner, 3, 1, 1, bias=False), nn.BatchNorm2d(inner)
        self.blocks = nn.Sequential(Block(inner, width, 2), Block(width, width, 1))
        self.classifier = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.classifier(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


class Victim:
    """One step of a network in training mode: its gradients, statistics, and what passed through it."""

    def __init__(self, images: int, *, single: bool = False, width: int = 80) -> None:
        generator = torch.Generator().manual_seed(images)
        network = Network(width).train().double()
        for name, parameter in network.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
            if parameter.ndim > 1:
                parameter.data = drawn * 2 / parameter[0].numel() ** 0.5
            else:
                parameter.data = 1 + drawn if name.endswith("weight") else 0.4 * drawn
        pictures = torch.rand(images, 3, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (images,), generator=generator)
        if single:
            network, pictures = network.float(), pictures.float()
        self.inputs: dict[str, Tensor] = {}
        self.signals: dict[str, Tensor] = {}
        for name, module in network.named_modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
                module.register_forward_hook(self._watch(name))
        loss = functional.cross_entropy(network(pictures), labels)
        found = torch.autograd.grad(loss, list(network.parameters()))
        self.gradients = OrderedDict(
            (n, g.double()) for (n, _), g in zip(network.named_parameters(), found, strict=True)
        )
        self.parameters = {n: p.detach().double() for n, p in network.named_parameters()}
        self.buffers = dict(network.named_buffers())
        self.images = images

    def _watch(self, name: str):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            self.inputs[name] = args[0].detach().double()
            output.register_hook(lambda g: self.signals.__setitem__(name, g.double()))

        return hook

    def layer(self, convolution: str, norm: str, stride: int = 1) -> NormalizedConvolution:
        """Return a convolution with its normalization as the server sees them."""
        size = self.inputs[convolution].shape[2:]
        count = self.inputs[norm].numel() // self.inputs[norm].shape[1]
        mean = self.buffers[f"{norm}.running_mean"].double() / 0.1
        variance = (self.buffers[f"{norm}.running_var"].double() - 0.9) / 0.1 * (count - 1) / count
        weight, bias = f"{norm}.weight", f"{norm}.bias"
        seen = BatchNormalization(
            self.parameters[weight], self.parameters[bias], self.gradients[weight], self.gradients[bias],
            mean, variance, count,
        )  # fmt: skip
        name = f"{convolution}.weight"
        return NormalizedConvolution(
            self.parameters[name], self.gradients[name], stride, (size[0], size[1]), self.images, seen
        )

    def normalized(self, norm: str) -> Tensor:
        """Return the true xhat."""
        z = self.inputs[norm]
        return (z - z.mean((0, 2, 3), keepdim=True)) / (z.var((0, 2, 3), unbiased=False) + 1e-5).sqrt()[:, None, None]


def off(found: Tensor, true: Tensor) -> float:
    """Return the relative error."""
    return float((found - true).norm() / true.norm())


def in_order(found: Tensor, true: Tensor) -> Tensor:
    """Return the true images in the order of those found."""
    return true[torch.stack([(true - f).flatten(1).norm(dim=1).argmin() for f in found])]


def test_normalization_is_undone_both_ways() -> None:
    victim = Victim(2)
    norm, xhat = victim.layer("blocks.1.conv2", "blocks.1.bn2").norm, victim.normalized("blocks.1.bn2")
    signal, output_signal = victim.signals["blocks.1.bn2"], victim.signals["blocks.1.conv2"]
    assert off(norm.pull_back(signal, xhat), output_signal) < 1e-9
    assert off(norm.push_up(output_signal, xhat, norm.sigma), signal) < 1e-9
    first, xhat = victim.layer("blocks.1.conv1", "blocks.1.bn1"), victim.normalized("blocks.1.bn1")
    assert off(first.norm.scale(xhat).relu(), victim.inputs["blocks.1.conv2"]) < 1e-9
    assert off(first.normalized_outputs(victim.inputs["blocks.1.conv1"]), first.norm.scale(xhat)) < 1e-9
    assert off(first.norm.unscale(first.norm.scale(xhat)), xhat) < 1e-12


@pytest.mark.parametrize("images", [1, 2])
def test_shifts_give_signals_and_inputs_up_to_a_mixing(images: int) -> None:
    victim = Victim(images)
    gradient = victim.gradients["blocks.1.conv2.weight"]
    columns = find_centered_columns(gradient, (4, 4), images)
    inputs = victim.inputs["blocks.1.conv2"].flatten(2).permute(2, 0, 1)  # (P, B, K)
    signals = victim.signals["blocks.1.conv2"].flatten(2).permute(1, 2, 0)  # (C, P, B)
    rows, true = columns.inputs.transpose(1, 2).flatten(0, 1), inputs.transpose(1, 2).flatten(0, 1)
    mixing = torch.linalg.lstsq(rows, true).solution
    assert off(rows @ mixing, true) < 1e-8
    assert off(columns.signals @ torch.linalg.inv(mixing).mT, signals) < 1e-8
    assert columns.gap > 1e6


def test_more_positions_than_filters_are_refused() -> None:
    with pytest.raises(ValueError, match="128 positions"):
        find_centered_columns(Victim(2).gradients["blocks.1.conv2.weight"], (8, 8), 2)


def draw(*shape: int) -> Tensor:
    """Return normal numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_zeros_unmix_images() -> None:
    mixing = draw(3, 3)
    unmixing = unmix_by_zeros(draw(800, 3).clamp(min=0) @ mixing)
    assert unmixing is not None
    share = mixing @ unmixing
    share = share / share.amax(0)
    assert float(share.abs().sort(0).values[:-1].max()) < 1e-9
    assert sorted(share.argmax(0).tolist()) == [0, 1, 2]


def test_zeros_without_one_sign_are_no_inputs_of_a_rectifier() -> None:
    signals = draw(800, 3) * (draw(3, 800).mT > 0)
    assert unmix_by_zeros(signals @ draw(3, 3)) is None


@pytest.mark.parametrize(("images", "single"), [(1, False), (2, False), (2, True)])
def test_top_convolution_is_solved_from_nothing(images: int, single: bool) -> None:
    victim = Victim(images, single=single)
    solved = solve_by_shifts(victim.layer("blocks.1.conv2", "blocks.1.bn2"))
    assert solved is not None
    bound = 1e-4 if single else 1e-8
    order = in_order(solved.inputs, victim.inputs["blocks.1.conv2"])
    assert off(solved.inputs, order) < bound
    assert torch.equal(solved.inputs > 0, order > 0)
    signal = victim.signals["blocks.1.bn2"]
    assert off(solved.signal.sort(0).values, signal.sort(0).values) < bound


def test_images_are_put_in_the_order_of_known_signals_or_refused() -> None:
    victim = Victim(2)
    layer, signal = victim.layer("blocks.1.conv2", "blocks.1.bn2"), victim.signals["blocks.1.bn2"]
    for order in ([0, 1], [1, 0]):
        solved = solve_by_shifts(layer, like=signal[order])
        assert solved is not None
        assert off(solved.inputs, victim.inputs["blocks.1.conv2"][order]) < 1e-8
    assert solve_by_shifts(layer, like=signal[[0, 0]]) is None


def test_inputs_follow_from_a_known_signal() -> None:
    victim = Victim(2)
    layer = victim.layer("blocks.1.conv1", "blocks.1.bn1")
    signal, hidden = victim.signals["blocks.1.bn1"], victim.inputs["blocks.1.conv2"]
    normalized = layer.norm.unscale(hidden)
    solved = solve_inputs([KnownSignal(layer, signal, normalized, hidden > 0)])
    assert off(solved.inputs, victim.inputs["blocks.1.conv1"]) < 1e-7
    assert solved.residual < 1e-7


def test_a_wrong_bit_is_found_by_the_equations_of_its_channel() -> None:
    victim = Victim(2)
    layer = victim.layer("blocks.1.conv1", "blocks.1.bn1")
    unmasked, hidden = victim.signals["blocks.1.conv2"], victim.inputs["blocks.1.conv2"]
    unmasked = victim.layer("blocks.1.conv2", "blocks.1.bn2").pull_back(unmasked)
    signal = victim.signals["blocks.1.bn1"].clone()
    at = (0, 7, 1, 2)
    signal[at] = unmasked[at] if float(signal[at]) == 0 else 0.0
    normalized = layer.norm.unscale(hidden)
    known = hidden > 0
    known[at] = False
    solved = solve_inputs([KnownSignal(layer, signal, normalized, known, unmasked)])
    assert solved.changed >= 1
    assert off(solved.signals[0], victim.signals["blocks.1.bn1"]) < 1e-9
    assert off(solved.inputs, victim.inputs["blocks.1.conv1"]) < 1e-7


def test_a_stride_hides_a_constant_that_the_means_tell() -> None:
    victim = Victim(2)
    first = victim.layer("blocks.0.conv1", "blocks.0.bn1", 2)
    down = victim.layer("blocks.0.down", "blocks.0.bn3", 2)
    true = victim.inputs["blocks.0.conv1"]
    branches = []
    for layer, norm in ((first, "blocks.0.bn1"), (down, "blocks.0.bn3")):
        xhat = victim.normalized(norm)
        branches.append(KnownSignal(layer, victim.signals[norm], xhat, torch.ones_like(xhat) > 0))
    shifted = true.clone()
    shifted[:, :, ::2, ::2] += draw(true.shape[1], 1, 1)
    for branch in branches:
        layer = branch.layer
        dz = layer.norm.pull_back(branch.signal, branch.normalized)
        made = torch.nn.grad.conv2d_weight(shifted, layer.weight.shape, dz, layer.stride, layer.padding)
        assert off(made, layer.gradient) < 1e-9
    assert off(solve_inputs(branches).inputs, true) < 1e-7


def test_masks_are_corrected_by_the_gradient_of_beta() -> None:
    values = draw(1, 30, 4, 4).clamp(min=0) + 1e-6 * draw(30, 1, 4, 4).transpose(0, 1)
    signal = draw(4, 30, 4, 1).permute(3, 1, 0, 2)
    true = set_zeros(values) > 0
    values[0, 3, 0, 0], true[0, 3, 0, 0] = 1e-7, True  # open, but too small to show
    found = correct_mask(signal, values, (signal * true).sum((0, 2, 3)))
    assert torch.equal(found.mask, true)
    assert found.changed == 1
    assert not found.open_channels


@pytest.mark.parametrize(("images", "single"), [(1, True), (2, False)])
def test_blocks_give_their_inputs(images: int, single: bool) -> None:
    victim = Victim(images, single=single)
    blocks = [
        NormalizedBlock(
            victim.layer(f"blocks.{i}.conv1", f"blocks.{i}.bn1", stride),
            victim.layer(f"blocks.{i}.conv2", f"blocks.{i}.bn2"),
            victim.layer("blocks.0.down", "blocks.0.bn3", 2) if stride == 2 else None,
        )
        for i, stride in enumerate((2, 1))
    ]
    found = descend_blocks(blocks[::-1])
    assert not found.end
    assert len(found.features) == 2
    for features, i in zip(found.features, (1, 0), strict=True):
        true = victim.inputs[f"blocks.{i}.conv1"]
        assert features.inputs is not None
        assert features.inputs.residual < 1e-3
        assert off(features.inputs.inputs, in_order(features.inputs.inputs, true)) < (1e-3 if single else 1e-6)


def test_the_descent_ends_where_equations_are_too_few_and_counts_them() -> None:
    victim = Victim(2, width=20)
    block = NormalizedBlock(
        victim.layer("blocks.1.conv1", "blocks.1.bn1"), victim.layer("blocks.1.conv2", "blocks.1.bn2")
    )
    found = descend_blocks([block])
    assert not found.features
    assert "20 directions for 32 positions of 2 images" in found.end


@pytest.mark.parametrize(("width", "accepted"), [(80, True), (4, False)])
def test_few_equations_must_be_explained_better(monkeypatch: pytest.MonkeyPatch, width: int, accepted: bool) -> None:
    victim = Victim(2, width=width)
    layer = victim.layer("blocks.1.conv1", "blocks.1.bn1")  # 9 width equations for 32 numbers
    signal, hidden = victim.signals["blocks.1.bn1"], victim.inputs["blocks.1.conv2"]
    known = KnownSignal(layer, signal, layer.norm.unscale(hidden), hidden > 0)
    left = SolvedInputs(victim.inputs["blocks.1.conv1"], (signal,), 6e-4, 0, 0, 1)
    monkeypatch.setattr(batch_statistics_blocks, "solve_inputs", lambda *_: left)
    if accepted:
        assert batch_statistics_blocks._solve([known]) is left
    else:
        with pytest.raises(UnsolvedError, match=r"6.0e-04 of it is left"):
            batch_statistics_blocks._solve([known])
