"""What fixes single precision runs in double, by every way in which attacks run a network, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fl.models import build
from fl.network import Network
from fl.runtime.double_precision import DoubleForm, KeepDouble, PrecisionError
from fl.seeds import stream
from fl.types import Task

SHAPE = (1, 6, 6)


class Loop(nn.Module):
    """Fixes single precision in a state, a constant and a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.turn = torch.eye(6).flip(0)

    def forward(self, x: Tensor) -> Tensor:
        state, rows = torch.zeros(len(x), 8), x[:, 0].float() @ self.turn
        for step in range(6):
            state = torch.tanh(self.i(rows[:, step]) + self.h(state))
        return torch.softmax(self.head(state), -1, dtype=torch.float32)


def task(model: nn.Module) -> Task:
    return Task(model=model, input_shape=SHAPE, num_classes=3)


@pytest.fixture
def single() -> Task:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return task(Loop())


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, *SHAPE, generator=stream(0, "images"), dtype=torch.float64)


def in_double(model: nn.Module) -> nn.Module:
    return task(model).to(dtype=torch.float64).model


def test_it_runs_in_double_precision(single: Task, images: Tensor) -> None:
    model, own = single.to(dtype=torch.float64).model, single.model(images.float())
    with pytest.raises(RuntimeError, match="dtype"):
        copy.deepcopy(single.model).double()(images)
    assert single.double_form == DoubleForm(fixes_single=True)
    assert model(images).dtype is torch.float64
    assert torch.allclose(model(images).float(), own, atol=1e-6)
    nudged = (model(images + 1e-12) - model(images)).detach()
    assert 0 < float(nudged.abs().max()) < 1e-11
    assert list(model.state_dict()) == list(single.model.state_dict())
    assert type(model).__name__ == "Loop"
    assert isinstance(model, Loop)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch's own use of it
def test_it_runs_so_in_every_way_that_torch_runs_functions(single: Task, images: Tensor) -> None:
    model = single.to(dtype=torch.float64).model
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def call(x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,))

    expected = model(images)
    assert torch.equal(call(images), expected)
    assert torch.equal(Network(model, weights, {})(images), expected)
    assert torch.equal(copy.deepcopy(model)(images), expected)
    assert torch.equal(copy.deepcopy(copy.deepcopy(model))(images), expected)
    assert torch.equal(make_fx(call)(images / 2)(images), expected)
    assert torch.allclose(vmap(call)(images[:, None]), expected[:, None], rtol=1e-14)
    ahead = jvp(call, (images,), (torch.ones_like(images),))[1]
    assert torch.allclose(ahead, (call(images + 1e-6) - call(images - 1e-6)) / 2e-6, atol=1e-9)
    back = vjp(call, images)[1](expected)[0]
    assert (ahead.dtype, back.dtype) == (torch.float64, torch.float64)
    assert torch.allclose(back.sum(), (ahead * expected).sum(), atol=1e-12)
    assert _get_current_function_mode_stack() == []


def test_single_precision_is_left_alone(single: Task, images: Tensor) -> None:
    again = single.to(dtype=torch.float64).to(dtype=torch.float32).model
    assert torch.equal(again(images.float()), single.model(images.float()))
    assert type(single.to(dtype=torch.float32).model) is Loop


@pytest.mark.parametrize("name", ["tiny", "lenet-zhu", "resnet18"])
def test_ordinary_networks_run_without_the_mode(name: str) -> None:
    given = build(name, num_classes=3, seed=0, input_shape=(3, 16, 16))
    made = given.to(dtype=torch.float64).model
    assert given.double_form == DoubleForm()
    assert type(made) is type(given.model)


def test_the_mode_changes_no_bit_of_an_ordinary_network() -> None:
    given = build("resnet18", num_classes=3, seed=0, input_shape=(3, 16, 16)).to(dtype=torch.float64)
    images = torch.rand(2, 3, 16, 16, generator=stream(0, "images"), dtype=torch.float64)
    kept = DoubleForm(fixes_single=True).apply(copy.deepcopy(given.model))
    assert torch.equal(kept(images), given.model(images))


def test_constants_keep_the_digits_that_the_client_computes() -> None:
    number, far = torch.rand(1, dtype=torch.float64), torch.arange(90.0, 100.0)
    with KeepDouble():
        waves = torch.sin(torch.arange(90, 100).float() * 1.7) + number
    assert torch.equal(waves, torch.sin(far * 1.7).double() + number)


def test_what_the_network_made_itself_can_be_written_into() -> None:
    value = torch.rand(3, dtype=torch.float64)
    with KeepDouble():
        for made in (torch.zeros(3), (value > 2).float(), torch.tensor([0.0] * 3), torch.empty(5).new_zeros(3)):
            kept = made
            kept += value
            assert torch.equal(kept, value)
            made[0] = value[1]
            assert made[0] == value[1]
        out = torch.tensor([0.0] * 3)
        torch.mul(value, 2, out=out)
        assert torch.equal(out, 2 * value)


def test_what_is_not_the_networks_own_is_never_written_into() -> None:
    outside, value = torch.zeros(3), torch.rand(3, dtype=torch.float64)
    with (
        KeepDouble(),
        pytest.raises(RuntimeError, match=r"writes numbers of torch\.float64 into a tensor"),
    ):
        outside.copy_(value)
    assert torch.equal(outside, torch.zeros(3))
    with KeepDouble(), pytest.raises(RuntimeError, match="writes numbers"):
        torch.tensor([0.0] * 3)[:2].add_(value[:2])


def test_half_precision_that_is_asked_for_is_given() -> None:
    value = torch.rand(3, dtype=torch.float64)
    with KeepDouble():
        assert torch.equal(value.half().float() + value, value.half().double() + value)


def test_a_traced_network_is_copied_by_its_own_way(images: Tensor) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1).float())

    model = in_double(fx.symbolic_trace(Cast()))
    assert torch.equal(copy.deepcopy(model)(images), model(images))
    assert model(images).dtype is torch.float64


def test_a_network_that_can_not_says_so_when_it_is_called(images: Tensor) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("expected float32")
            return self.head(x.flatten(1))

    model = in_double(Cast())
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(PrecisionError, match=r"double precision \(float64\).*TypeError: expected float32.*x\.new"):
            one(images)
    assert copy.deepcopy(model).float()(images.float()).shape == (4, 3)


def test_a_network_that_is_another_in_double_precision_is_refused(images: Tensor) -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            sign = 1.0 if x.dtype is torch.float32 else -1.0
            return sign * (self.head(x.flatten(1)) @ torch.eye(3))

    with pytest.raises(PrecisionError, match="it returns something else than in its own precision"):
        in_double(Told())(images)


def test_a_network_that_runs_in_no_precision_is_left_to_its_own_error(images: Tensor) -> None:
    model = in_double(nn.Linear(5, 3))
    assert type(model) is nn.Linear
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(images)


def test_batch_normalization_in_training_mode_is_tried_on_two_images_and_left_as_it_was() -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.first(x.flatten(1).float())))

    given = task(Normalized().train())
    kept = {name: value.clone() for name, value in given.model.state_dict().items()}
    assert given.double_form == DoubleForm(fixes_single=True)
    assert all(torch.equal(value, kept[name]) for name, value in given.model.state_dict().items())


def test_random_numbers_stay_as_they_were() -> None:
    given = task(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3)).train())
    state = torch.random.get_rng_state()
    assert given.double_form == DoubleForm()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_error_inside_leaves_no_mode_behind(single: Task) -> None:
    model = single.to(dtype=torch.float64).model
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.rand(1, 1, 5, 5, dtype=torch.float64))
    assert not any(isinstance(mode, TorchFunctionMode) for mode in _get_current_function_mode_stack())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min and quant_max")
def test_simulated_integers_are_named_as_the_reason() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare_qat(model)
    prepared(torch.rand(2, *SHAPE, generator=stream(0, "quantization")))  # which observers have to see
    refusal = task(prepared).double_form.refusal
    assert "rounds its numbers to those that integers can hold ('1.weight_fake_quant'" in refusal
    assert "single precision alone" in refusal
    assert "x.new_zeros" not in refusal
