"""Layers whose outputs are normalized over each image are solved for, up to the size and with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from attacks import build
from attacks.analytic.backsolve import _read_network
from attacks.analytic.graph import evaluation_mode
from attacks.analytic.graph.image_factors import solve_robustly
from attacks.analytic.graph.layer_solves import NO_GRADIENT
from attacks.analytic.graph.mask_correction import correct_by_biases
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.normalized_layers import CONTRADICTED_SIZE, NO_SIZE, is_normalization
from attacks.analytic.graph.propagation import Propagation
from attacks.analytic.graph.second_descent import descend_again
from attacks.analytic.graph.solver import NO_SIZE_ABOVE, GraphSolver
from attacks.base import NotApplicable, Reconstruction
from attacks.network.operation_trace import IMAGE, Ref
from attacks.search_control import StoppedError
from attacks.update.step_gradient import exact_step_gradient
from fl.capture import from_batch


class Normalized(nn.Module):
    """Two residual blocks with a normalization behind each convolution, the first of stride 2."""

    def __init__(self, groups: int, *, affine: bool = True, bias: bool = False, flat: bool = False) -> None:
        super().__init__()

        def normalized(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)
            return nn.Sequential(convolution, nn.GroupNorm(groups, outputs, affine=affine))

        self.stem = normalized(3, 32, 5, 2)
        self.first = nn.ModuleList([normalized(32, 48, 3, 2), normalized(48, 48, 3, 1), normalized(32, 48, 1, 2)])
        self.second = nn.ModuleList([normalized(48, 48, 3, 1), normalized(48, 48, 3, 1)])
        self.flat, self.head = flat, nn.Linear(48 * (16 if flat else 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x - 0.5).relu()
        x = (self.first[1](self.first[0](x).relu()) + self.first[2](x)).relu()
        x = (self.second[1](self.second[0](x).relu()) + x).relu()
        return self.head(x.flatten(1) if self.flat else x.mean((2, 3)))


class NormalizedRows(nn.Sequential):
    """Linear layers with a normalization behind each, which has the only biases below the classifier."""

    def __init__(self, activation: type[nn.Module], bias: float = 0.0) -> None:
        widths = (128, 64, 48)
        hidden = [
            nn.Sequential(nn.Linear(one, other, bias=False), nn.LayerNorm(other), activation())
            for one, other in pairwise(widths)
        ]
        super().__init__(nn.Flatten(), nn.Linear(768, 128), activation(), *hidden, nn.Linear(48, 10))
        nn.init.constant_(hidden[0][1].bias, bias)


def network_of(model: nn.Module, image: Tensor) -> NetworkGraph:
    view, _ = from_batch(model.eval(), image, torch.arange(len(image)) + 3)
    gradient = exact_step_gradient(view, batches=True)
    assert not isinstance(gradient, NotApplicable)
    network = _read_network(view, gradient, len(image))
    assert not isinstance(network, NotApplicable)
    return network


def descend(model: nn.Module, image: Tensor, *, from_linear: bool = False) -> GraphSolver:
    network = network_of(model, image)
    solver = GraphSolver(network, len(image), Propagation(network))
    if from_linear:
        solver.begin_at_linear_layers()
        return solver
    solver.run()
    return descend_again(solver)


def drawn(make: type[nn.Module], *arguments: object, seed: int = 0, **settings: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(seed)
        return make(*arguments, **settings)


def picture() -> Tensor:
    return pictures(1)


def pictures(count: int) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def errors(solver: GraphSolver, image: Tensor) -> list[float]:
    """By which share of itself each solved tensor is off, its images in any order."""
    graph, found = solver.network.graph, []
    for tensor in solver.solved:
        operations = solver.network.operations_to([tensor.ref])
        true = graph.replay(operations, tensor.ref, {Ref(IMAGE): image.to(tensor.values)}).detach()
        order = torch.cdist(tensor.values.flatten(1), true.flatten(1)).argmin(1)
        found.append(float((tensor.values - true[order]).norm() / true.norm()))
    return found


@pytest.mark.parametrize(("groups", "images"), [(1, 1), (4, 1), (8, 1), (1, 2), (8, 2), (4, 3)])
def test_all_layers_are_solved_for_at_their_size(groups: int, images: int) -> None:
    solver = descend(drawn(Normalized, groups), pictures(images))
    assert {name.split(".")[0] for tensor in solver.solved for name in tensor.by} == {"head", "second", "first"}
    assert len(solver.solved) == 5
    assert all(tensor.scaled for tensor in solver.solved)
    assert max(errors(solver, pictures(images))) < 1e-5 * images**2


@pytest.mark.parametrize("images", [1, 2])
def test_a_classifier_without_bias_tells_the_sizes_as_well(images: int) -> None:
    model = drawn(Normalized, 8)
    model.head = drawn(nn.Linear, 48, 10, bias=False)
    solver = descend(model, pictures(images))
    assert len(solver.solved) == 5
    assert max(errors(solver, pictures(images))) < 1e-5 * images**2


def test_a_highest_tensor_that_is_known_less_precisely_is_not_needed() -> None:
    images = pictures(2)
    network = network_of(drawn(Normalized, 8), images)
    first = GraphSolver(network, 2, Propagation(network))
    first.run()
    upper, *lower = first.solved
    noise = torch.rand(upper.values.shape, generator=torch.Generator().manual_seed(1)).to(upper.values)
    first.solved = [replace(upper, values=upper.values * (1 + 0.02 * noise)), *lower]
    solver = descend_again(first)
    assert len(solver.solved) == 5
    assert max(errors(solver, images)) < 4e-5


def test_layers_below_a_normalization_say_that_no_sizes_are_known() -> None:
    solver = descend(drawn(Normalized, 8, affine=False), pictures(2))
    assert NO_SIZE_ABOVE in solver.ends.values()


def test_layers_below_a_normalization_say_why_no_descent_begins_with_them() -> None:
    images = pictures(4)
    network = network_of(drawn(Normalized, 8), images)
    solver = GraphSolver(network, 4, Propagation(network))
    solver.run()
    assert not solver.solved
    assert "too few channels to tell positions apart" in solver.ends["second.1.0.weight"]
    assert NO_SIZE_ABOVE not in solver.ends.values()


@pytest.mark.parametrize(("groups", "images", "layers"), [(8, 1, 5), (4, 3, 4)])
def test_biases_below_a_normalization_are_no_obstacle(groups: int, images: int, layers: int) -> None:
    solver = descend(drawn(Normalized, groups, bias=True), pictures(images))
    assert len(solver.solved) >= layers
    assert all(tensor.scaled for tensor in solver.solved)
    assert max(errors(solver, pictures(images))) < 1e-5 * images**2


class ChannelsLast(nn.Module):
    """A normalization of each position over its channels, which it puts last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def chain(normalization: Callable[[int], nn.Module], *, bias: bool) -> nn.Sequential:
    """Three convolutions, the first two of stride 2, with a normalization behind each."""

    def normalized(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        convolution = drawn(nn.Conv2d, inputs, outputs, 3, stride, 1, bias=bias)
        return nn.Sequential(convolution, normalization(outputs), nn.ReLU())

    layers = [normalized(3, 32, 2), normalized(32, 48, 2), normalized(48, 48, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), drawn(nn.Linear, 48, 10))


@pytest.mark.parametrize(("normalization", "images"), [(ChannelsLast, 1), (partial(nn.GroupNorm, 8), 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_chains_are_solved_for_down_to_the_second_convolution(
    normalization: Callable[[int], nn.Module], images: int, bias: bool
) -> None:
    solver = descend(chain(normalization, bias=bias), pictures(images))
    assert {name for tensor in solver.solved for name in tensor.by} >= {"1.0.weight", "2.0.weight"}
    assert all(tensor.scaled for tensor in solver.solved)
    assert max(errors(solver, pictures(images))) < 1e-5 * images**2


class Split(nn.Module):
    """A normalization takes some channels of a convolution, and the classifier takes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.split = drawn(nn.Conv2d, 3, 32, 3, 2, 1), drawn(nn.Conv2d, 32, 56, 3, 2, 1)
        self.norm, self.last = nn.GroupNorm(8, 48), drawn(nn.Conv2d, 48, 48, 3, 1, 1)
        self.head = drawn(nn.Linear, 56, 10)

    def forward(self, x: Tensor) -> Tensor:
        normalized, others = self.split(self.stem(x).relu()).split([48, 8], 1)
        last = self.last(self.norm(normalized).relu()).relu()
        return self.head(torch.cat([last.mean((2, 3)), others.mean((2, 3))], 1))


def test_a_layer_of_which_a_part_is_normalized_is_not_solved_for_by_that_part() -> None:
    solver = descend(Split(), picture())
    assert [tensor.by for tensor in solver.solved][-1] == ("last.weight",)
    assert "split.weight" not in solver.ends


def test_a_bias_that_instance_normalization_takes_away_tells_no_size() -> None:
    def normalized(inputs: int, outputs: int) -> nn.Sequential:
        convolution = drawn(nn.Conv2d, inputs, outputs, 3, padding=1)
        return nn.Sequential(convolution, nn.InstanceNorm2d(outputs), nn.ReLU())

    head = drawn(nn.Linear, 16 * 64, 10)
    model = nn.Sequential(nn.AvgPool2d(2), normalized(3, 16), normalized(16, 16), nn.Flatten(), head)
    solver = descend(model, picture(), from_linear=True)
    assert solver.ends["2.0.weight"] == NO_SIZE


def test_from_a_flattened_map_down_no_convolution_needs_to_be_begun_with() -> None:
    solver = descend(drawn(Normalized, 8, flat=True), picture(), from_linear=True)
    assert len(solver.solved) == 5
    assert max(errors(solver, picture())) < 1e-5


def test_without_a_bias_below_the_size_is_open() -> None:
    solver = descend(drawn(Normalized, 8, affine=False, flat=True), picture(), from_linear=True)
    assert NO_SIZE in solver.ends.values()
    assert not any(tensor.scaled for tensor in solver.solved[1:])  # begun anew, each up to a factor


def test_the_picture_comes_back() -> None:
    model = drawn(Normalized, 8)
    levels = (255 * picture()).round() / 255
    found = build("backsolve")(from_batch(model.eval(), levels, torch.tensor([3]))[0])
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert torch.equal((255 * found.inputs).round(), (255 * levels).round())


def test_features_of_the_second_descent_are_handed_out_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise StoppedError("the time limit")

    monkeypatch.setattr(evaluation_mode, "search_pictures", stop)
    found = build("backsolve")(from_batch(drawn(Normalized, 8).eval(), picture(), torch.tensor([3]))[0])
    assert isinstance(found, Reconstruction)
    assert list(found.private) == ["features/first.0.0.weight+first.2.0.weight"]
    assert found.cut_short == "not done before the time limit: features alone"


def test_what_is_free_of_scale_is_told_by_numbers() -> None:
    network = descend(drawn(Normalized, 8), picture()).network
    names = [network.graph.nodes[number].operation for number in network.used if is_normalization(network, number)]
    assert set(names) == {"native_group_norm"}
    assert len(names) == 6


@pytest.mark.parametrize("saturating", [nn.Sigmoid, nn.ReLU6, nn.Hardtanh])
def test_an_activation_that_saturates_is_no_normalization(saturating: type[nn.Module]) -> None:
    network = network_of(nn.Sequential(nn.Flatten(), nn.Linear(768, 16), saturating(), nn.Linear(16, 10)), picture())
    assert not any(is_normalization(network, number) for number in network.used)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_biases_of_the_normalizations_tell_sizes_between_linear_layers(activation: type[nn.Module]) -> None:
    solver = descend(drawn(NormalizedRows, activation), picture(), from_linear=True)
    assert len(solver.solved) == 4
    assert max(errors(solver, picture())) < 1e-5


def test_biases_that_contradict_every_size_are_said_to() -> None:
    network = network_of(drawn(NormalizedRows, nn.ReLU), picture())
    network.gradient["3.1.bias"].neg_()  # so that the size would be below zero
    solver = GraphSolver(network, 1, Propagation(network))
    solver.begin_at_linear_layers()
    assert solver.ends["4.0.weight"] == CONTRADICTED_SIZE


def test_of_a_wrong_input_no_size_is_said_to_be_missing() -> None:
    network = network_of(drawn(NormalizedRows, nn.ReLU), picture())
    network.gradient["4.0.weight"].normal_(generator=torch.Generator().manual_seed(0))
    solver = GraphSolver(network, 1, Propagation(network))
    solver.begin_at_linear_layers()
    assert "no input was found that explains its gradient" in solver.ends["4.0.weight"]


def test_a_layer_whose_gradient_is_zero_is_said_to_tell_nothing() -> None:
    solver = descend(drawn(NormalizedRows, nn.ReLU, bias=-50.0), picture(), from_linear=True)
    assert solver.ends["4.0.weight"] == NO_GRADIENT


def test_nothing_is_told_by_equations_of_zeros() -> None:
    zeros = torch.zeros(8, dtype=torch.float64)
    assert solve_robustly(zeros[:, None], zeros, 1e-2) is None


def test_a_wrong_bit_is_found_by_the_bias_below() -> None:
    solver = descend(drawn(Normalized, 8), picture())
    known = solver.known
    activation = next(tensor.ref.node for tensor in solver.solved if "second.1.0.weight" in tensor.by)
    true, values = known.mask(activation).clone(), known.value(Ref(activation)).clone()
    heard = true & (known.signal(Ref(activation)) != 0)
    place = int(torch.where(heard, values, torch.inf).flatten().argmin())
    values.view(-1)[place] = 0.0  # as rounding may have made of it
    assert not torch.equal(values > 0, true)
    correct_by_biases(known, activation, values)
    assert torch.equal(known.mask(activation), true)


def test_two_pictures_below_group_normalization_come_back() -> None:
    images = (pictures(2) * 255).round() / 255
    found = build("backsolve")(from_batch(drawn(Normalized, 8).eval(), images, torch.tensor([3, 3]))[0])
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert found.inputs is not None
    levels = (255 * found.inputs).round().to(torch.uint8)
    wanted = (255 * images).round().to(torch.uint8)
    assert {row.numpy().tobytes() for row in levels} == {row.numpy().tobytes() for row in wanted}


def test_images_that_match_nothing_above_are_not_put_in_any_order() -> None:
    images = pictures(2)
    solver = descend(drawn(Normalized, 8), images)
    upper, lower = (
        next(t for t in solver.solved if name in t.by) for name in ("second.1.0.weight", "second.0.0.weight")
    )
    order = solver._match_order(lower.ref, upper)
    assert order is not None
    assert order.tolist() == [0, 1]
    solver.known.values[lower.ref] = lower.values.flip(0)
    order = solver._match_order(lower.ref, upper)
    assert order is not None
    assert order.tolist() == [1, 0]
    solver.known.values[lower.ref] = lower.values[:1].expand_as(lower.values)
    assert solver._match_order(lower.ref, upper) is None
