"""R-GAP: each layer's input from its equations, and what they leave open."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import layer_equations
from support import chains
from support.loud import Loud
from support.pictures import photograph, victim
from torch import Tensor, nn

from attacks import NotApplicable, Reconstruction
from attacks.analytic.recursive.layer_equations import (
    ActivationInputs,
    gradient_rows,
    invert_activation,
    slope_change,
    solve_input,
    weight_rows,
)
from attacks.analytic.rgap import RGAP
from attacks.base import build
from attacks.network.layer_chain import Stage, extract_layer_chain
from defenses.clip import Clip
from fl.capture import from_batch
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models import build as network
from fl.models.building_blocks.layers import Normalize
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView, ThreatModel

LEAKY = lambda: nn.LeakyReLU(0.2)  # noqa: E731


def attack(view: ServerView) -> Reconstruction:
    result = RGAP()(view)
    assert isinstance(result, Reconstruction), result
    return result


def off(result: Reconstruction, truth: Tensor) -> float:
    assert result.inputs is not None
    return float((result.inputs - truth).abs().max())


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.2), nn.ReLU(), nn.Identity()])
def test_how_slopes_change_with_what_an_activation_returned(act: nn.Module) -> None:
    given = torch.randn(9, generator=stream(0, "given"), dtype=torch.float64)
    values, step = act(given).detach(), 1e-7
    change = (invert_activation(act, values + step * (values != 0))[1] - invert_activation(act, values)[1]) / step
    assert torch.allclose(slope_change(act, values), change, atol=1e-5)


# ---- the equations ---------------------------------------------------------------------------------------------------
CONVOLUTIONS = pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(3, 1, 1, 1), (4, 2, 2, 1), (5, 2, 2, 1), (3, 3, 0, 1), (3, 1, 2, 2)]
)


def convolution(kernel: int, stride: int, padding: int, dilation: int, out: int) -> tuple[Stage, Tensor, Tensor]:
    """A stage, an input and a signal."""
    draw = stream(0, "convolution", kernel, stride)
    layer = nn.Conv2d(2, out, kernel, stride, padding, dilation, bias=False).double()
    nn.init.normal_(layer.weight, generator=draw)
    x = torch.randn(1, 2, 7, 6, generator=draw, dtype=torch.float64)
    signal = torch.randn(layer(x).shape, generator=draw, dtype=torch.float64)
    return Stage("conv", layer, x.shape[1:]), x, signal


@CONVOLUTIONS
def test_the_matrices_are_those_written_out_row_by_row(kernel: int, stride: int, padding: int, dilation: int) -> None:
    stage, x, signal = convolution(kernel, stride, padding, dilation, 3)
    rows, weights, padded = layer_equations.equations(stage.layer, signal, (2, 7, 6))
    inner = np.abs(padded).sum(0) == 0
    small = gradient_rows(stage, signal, x.shape[1:]).numpy().reshape(3, -1, 42)
    for c in range(2):
        theirs = rows[:, inner].reshape(3, 2, -1, 2, 42)[:, c]
        assert np.allclose(theirs[:, :, c], small, rtol=0, atol=1e-12)
        assert not theirs[:, :, 1 - c].any()
    assert np.allclose(weight_rows(stage, x.shape[1:])[0].detach().numpy(), weights[:, inner], rtol=0, atol=1e-12)


@CONVOLUTIONS
@pytest.mark.parametrize("out", [2, 12])
@pytest.mark.parametrize("trust", [None, 0.03])
def test_solution_and_rank_are_those_of_the_padded_system(
    kernel: int, stride: int, padding: int, dilation: int, out: int, trust: float | None
) -> None:
    stage, x, signal = convolution(kernel, stride, padding, dilation, out)
    output = stage.layer(x)
    (gradient,) = torch.autograd.grad((output * signal).sum(), [stage.layer.weight])
    output = output.detach()
    values, rank = layer_equations.solution(stage.layer, signal, gradient, output, (2, 7, 6))
    known = ActivationInputs(output, torch.ones_like(output, dtype=torch.bool))
    solved = solve_input(stage, signal, gradient, known, trust=trust, cutoff=1e-10)
    assert solved.unknown_count == 84
    assert solved.rank == rank
    assert (solved.condition < float("inf")) == (rank == 84)
    if rank == 84:
        assert np.allclose(solved.values[0].numpy(), values, rtol=0, atol=1e-7)
        assert np.allclose(values, x[0].numpy(), rtol=0, atol=1e-7)


# ---- whole networks --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("act", [LEAKY, nn.Sigmoid, nn.Tanh, nn.Identity], ids=["leaky", "sigmoid", "tanh", "none"])
@pytest.mark.parametrize("label", [0, 3])
def test_a_double_precision_update_gives_the_image(act: Callable[[], nn.Module], label: int) -> None:
    view, truth = chains.seen(chains.chain(act), label=label)
    result = attack(view)
    assert off(result, truth.inputs) < 1e-6
    assert result.verified
    assert result.labels is not None
    assert result.labels.tolist() == [label]


def test_linear_maps_around_the_layers_are_undone() -> None:
    norm = nn.BatchNorm2d(12)
    norm.running_mean.uniform_(-0.2, 0.2, generator=stream(0, "mean"))  # type: ignore[union-attr]
    model = nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.AvgPool2d(2), nn.LeakyReLU(0.3), nn.Conv2d(12, 12, 3, padding=1), norm
    )
    model.extend([nn.Tanh(), nn.Flatten(), nn.Linear(192, 20), nn.LeakyReLU(0.1), nn.Linear(20, 4)])
    chains.initialized(model)
    whole = nn.Sequential(Normalize((0.4, 0.6), (0.2, 0.3)), *model).double()
    whole[0].reset_buffers()  # type: ignore[operator]
    view, truth = chains.seen(whole.eval(), method=FedAvg(lr=0.5, steps=1, batch_size=None, train_mode=False))
    result = attack(view)
    # pooling the first convolution leaves 192 outputs and 108 gradient numbers a channel: still enough
    assert result.private["rank/1"].tolist()[0] == 128  # type: ignore[union-attr]
    assert off(result, truth.inputs) < 1e-6
    assert result.verified


def test_decay_momentum_and_clipping_are_taken_off() -> None:
    method = FedAvg(lr=0.3, steps=1, batch_size=None, weight_decay=0.1, momentum=0.9, max_norm=1e-3)
    view, truth = chains.seen(chains.chain(LEAKY), method=method)
    assert off(attack(view), truth.inputs) < 1e-6


def test_no_unit_of_the_update_changes_the_result() -> None:
    model = chains.chain(LEAKY)
    plain, loud = (attack(chains.seen(model, defense=defense)[0]) for defense in (None, Loud()))
    assert plain.inputs is not None
    assert loud.inputs is not None
    assert torch.equal(plain.inputs, loud.inputs)
    assert plain.objective == loud.objective


def test_a_single_precision_update_is_enough_for_the_eye() -> None:
    view, truth = chains.seen(chains.chain(LEAKY).float())
    result = attack(view)
    assert result.verified
    assert 1e-9 < off(result, truth.inputs) < 1e-3


# ---- without biases: the loss gives the logits -----------------------------------------------------------------------
@pytest.mark.parametrize("classes", [2, 4])
def test_without_any_bias_the_logits_follow_from_the_loss(classes: int) -> None:
    model = chains.chain(nn.Sigmoid, classes=classes, bias=False)
    for label in range(classes):
        view, truth = chains.seen(model, label=label)
        result = attack(view)
        assert off(result, truth.inputs) < 1e-6
        assert result.labels is not None
        assert result.labels.tolist() == [label]


@pytest.mark.parametrize("dim", [False, True])
def test_a_right_prediction_of_two_classes_leaves_the_brightness_of_a_dim_image_open(dim: bool) -> None:
    """A network without biases gives every multiple of an image the same gradient, up to its size."""
    model, image = chains.chain(LEAKY, classes=2, bias=False), chains.image() * (0.1 if dim else 1.0)
    with torch.no_grad():
        logits = model(image)[0]
        model[-1].weight *= 0.5 / (logits[0] - logits[1]).abs()  # type: ignore[operator, union-attr]
    right = int(logits.argmax())
    wrong = attack(from_batch(model, image, torch.tensor([1 - right]))[0])
    assert off(wrong, image) < 1e-6
    assert wrong.approximate  # of two classes a picture off levels may lie between two that were stated as one
    result = attack(from_batch(model, image, torch.tensor([right]))[0])
    assert result.inputs is not None
    ratio = result.inputs / image  # the other margin that explains the gradient is five times as large
    assert float(ratio.std()) < 1e-6
    assert not result.verified
    assert result.approximate is not dim
    assert dim or off(result, image) < 1e-6


def test_an_unknown_size_of_the_gradient_is_no_ground_for_logits() -> None:
    method = FedAvg(lr=0.3, steps=1, batch_size=None, max_norm=1e-3)
    result = RGAP()(chains.seen(chains.chain(LEAKY, bias=False), method=method)[0])
    assert isinstance(result, NotApplicable)
    assert "size of its gradient" in result.reason
    for classes in (2, 4):  # of two classes, any size has logits that explain it
        model = chains.chain(LEAKY, classes=classes, bias=False)
        short, long = (RGAP()(chains.seen(model, defense=Clip(max_norm=norm))[0]) for norm in (0.05, 1e6))
        assert isinstance(short, NotApplicable)
        assert "size of its gradient" in short.reason
        assert isinstance(long, Reconstruction)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_lengths_clipped_apart_are_never_verified(deep: bool, known: bool) -> None:
    top = [nn.Linear(128, 64), LEAKY(), nn.Linear(64, 4)] if deep else [nn.Linear(128, 4)]
    model = chains.initialized(nn.Sequential(nn.Flatten(), *top))
    for defense, right in ((Clip(max_norm=0.05, scope="tensor"), False), (Defense(), known or deep)):
        view, _ = chains.seen(model, defense=defense, threat=ThreatModel(knows_defense=known))
        result = RGAP()(view)
        assert isinstance(result, Reconstruction) or (known and "ratio" in result.reason)
        assert isinstance(result, NotApplicable) or result.verified is right


# ---- other methods ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [True, False])
def test_a_private_classifier_stops_it_unless_a_layer_below_has_a_bias(bias: bool) -> None:
    body = [*chains.chain(LEAKY)][:-1]
    model = chains.initialized(nn.Sequential(*body, nn.Linear(192, 20, bias=bias), nn.LeakyReLU(0.2), nn.Linear(20, 4)))
    task = Task(model, (2, 8, 8), 4, "7.")
    data = Batch(chains.image(), torch.tensor([2]))
    method = FedPer(lr=0.1, steps=1, batch_size=None)
    view, truth = Federation(Client(task, method), [ClientData(data, data)]).observe(0)
    if bias:
        result = attack(view)
        assert off(result, truth.inputs) < 1e-6
        assert result.verified
        assert result.labels is None
        told = attack(replace(view, labels=truth.labels))
        assert told.knowledge == ("labels",)
    else:
        assert isinstance(RGAP()(view), NotApplicable)


def test_it_takes_over_from_the_peel() -> None:
    body = [*chains.chain(LEAKY)][:-1]
    model = chains.initialized(nn.Sequential(*body, nn.Linear(192, 20), nn.LeakyReLU(0.2), nn.Linear(20, 4)))
    task = Task(model, (2, 8, 8), 4, "7.")
    data = Batch(chains.image(), torch.tensor([2]))
    generator = Hypernetwork(embedding=4, hidden=16, init="scaled")
    method = HyperFL(steps=1, head_epochs=0, batch_size=None, parametrization=generator)
    view, truth = Federation(Client(task, method), [ClientData(data, data)]).observe(0)
    for name in ("peel+rgap", "peel+headless+rgap", "peel+rconv"):
        result = build(name)(view)
        assert isinstance(result, Reconstruction), (name, result)
        assert off(result, truth.inputs) < 1e-4
        assert result.verified


# ---- what stops it ---------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self, filters: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, filters, 3, padding=1)
        self.flatten, self.fc = nn.Flatten(), nn.Linear(64 * filters, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.flatten(self.conv(x) + x))
        return out


class Functional(Residual):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.flatten(torch.relu(self.conv(x))))
        return out


class InPlace(Residual):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.flatten(nn.functional.leaky_relu_(self.conv(x), 0.2)))
        return out


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv2d(2, 12, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.act(self.conv(x)).flatten(1))
        return out


@pytest.mark.parametrize("name", ["rgap", "rconv", "cascade"])
@pytest.mark.parametrize("model", [Flattening, InPlace])
def test_what_forward_does_needs_no_modules(name: str, model: type[nn.Module]) -> None:
    view, truth = chains.seen(chains.initialized(model(*[12] * (model is not Flattening))))
    result = build(name)(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert off(result, truth.inputs) < 1e-6


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)), "cascade"),
        (chains.chain(nn.ReLU), "rconv"),
        (Residual(), "a residual connection"),
        (Functional(), "rconv"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(144, 4)), "groups"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(144, 4)), "SiLU"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)), "batch statistics"),
    ],
    ids=["max pooling", "relu", "residual", "functional", "groups", "silu", "batch norm"],
)
def test_it_says_what_it_can_not_undo(model: nn.Module, words: str) -> None:
    method = FedAvg(lr=1.0, steps=1, batch_size=None)
    result = RGAP()(chains.seen(model.double(), method=method)[0])
    assert isinstance(result, NotApplicable)
    assert words in result.reason


def test_it_takes_one_step_on_one_image() -> None:
    model, data = chains.chain(LEAKY), chains.image()
    two = from_batch(model, torch.cat([data, data]), torch.tensor([0, 1]))[0]
    steps = chains.seen(model, method=FedAvg(lr=0.1, steps=2, batch_size=None))[0]
    for view in (two, steps):
        assert isinstance(RGAP()(view), NotApplicable)


def test_a_system_that_is_too_large_is_refused_with_its_size() -> None:
    result = RGAP(gigabytes=1e-6)(chains.seen(chains.chain(LEAKY))[0])
    assert isinstance(result, NotApplicable)
    assert "GB" in result.reason


def test_pooling_written_out_as_a_matrix_counts_too() -> None:
    model = nn.Sequential(nn.Conv2d(2, 24, 3, padding=1), LEAKY(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    view, _ = chains.seen(chains.initialized(nn.Sequential(*model, nn.Linear(24, 4))))
    result = RGAP(gigabytes=5e-3)(view)  # 1536 numbers come into the pooling: 19 MB
    assert isinstance(result, NotApplicable)
    assert "equations of 4 take 0.019 GB" in result.reason
    assert isinstance(RGAP()(view), Reconstruction)


@pytest.mark.parametrize("setting", [{"fits": 0.0}, {"cutoff": 1.0}, {"gigabytes": 0.0}])
def test_settings_are_checked(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        RGAP(**setting)


# ---- what it says of itself ------------------------------------------------------------------------------------------
def test_too_few_equations_are_counted_and_nothing_is_verified() -> None:
    model = chains.chain(LEAKY, (2, 4))
    view, truth = chains.seen(model)
    result = attack(view)
    assert not result.verified
    assert off(result, truth.inputs) > 0.05
    ranks = {name: value.tolist() for name, value in result.private.items() if name.startswith("rank/")}  # type: ignore[union-attr]
    assert [unknowns for unknowns, _, _ in ranks.values()] == [128, 32, 64]
    assert [rank < unknowns for unknowns, _, rank in ranks.values()] == [True, False, False]
    assert result.private["condition/0"].item() == float("inf")  # type: ignore[union-attr]


@pytest.mark.parametrize(("seed", "level"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_verified_is_to_the_level_of_a_pixel(seed: int, level: bool) -> None:
    """The sigmoid LeNet in single precision: both explain their gradient to a thousandth; one is .6 of a level off."""
    picture = photograph(32, channels=3)
    result = attack(victim(network("lenet-zhu", num_classes=10, seed=seed), picture))
    assert result.objective < 1e-3
    assert (off(result, picture) < 0.5 / 255) is level
    assert result.verified is level


def test_a_changed_update_is_not_verified() -> None:
    view, _ = chains.seen(chains.chain(LEAKY))
    noise = stream(0, "noise")
    for share in (0.01, 1.0):
        update = {
            n: v + share * v.std() * torch.randn(v.shape, generator=noise, dtype=v.dtype)  # type: ignore[union-attr]
            for n, v in view.update.items()
        }
        assert not attack(replace(view, update=update)).verified  # type: ignore[arg-type]


def test_the_published_networks_are_chains() -> None:
    for name, unknowns in (("cnn6", [3072, 3468, 2916, 2916, 2916, 1600, 3200]), ("lenet-zhu", [3072, 3072, 768, 768])):
        task = network(name, num_classes=10)
        view = from_batch(task.model, torch.full((1, 3, 32, 32), 0.5), torch.tensor([1]))[0]
        stages = extract_layer_chain(view)
        assert not isinstance(stages, NotApplicable)
        assert [stage.shape.numel() for stage in stages] == unknowns
