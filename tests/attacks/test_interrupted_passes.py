"""Passes through large networks end in their midst once the time is up, and are not taken twice."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, build
from attacks.network import reading_cache
from attacks.network.layer_chain import trace_view
from attacks.network.reading_cache import cached_reading, readings_cached
from attacks.search_control import SearchControl, StoppedError, limited_by
from fl.capture import from_batch
from fl.gradient import autograd_derivative
from fl.losses.function import function_errors_named
from fl.models.building_blocks.initialization import initialize
from fl.predict import predict
from fl.seeds import stream
from fl.types import Candidate

DEEP = 6
"""Layers of a network."""


class Seconds(list[float]):
    """The time, which copies of a network have in common."""

    def __deepcopy__(self, memo: object) -> "Seconds":
        return self


class Ticking(nn.Module):
    """A layer that takes a second."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now, self.layer = now, nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.now[0] += 1.0
        return self.layer(values)


class TickingBackward(torch.autograd.Function):
    """Passes numbers on, and takes a second on the way back."""

    @staticmethod
    def forward(ctx, values, now):
        ctx.now = now
        return values.clone()

    @staticmethod
    def backward(ctx, slope):
        ctx.now[0] += 1.0
        return slope, None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still but where a network moves it."""
    found = Seconds([0.0])
    monkeypatch.setattr("attacks.search_control.time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


def test_a_forward_pass_ends_between_two_modules(now: list[float]) -> None:
    net = nn.Sequential(*(Ticking(now) for _ in range(DEEP)))
    with limited_by(SearchControl(time_limit=2.5)), pytest.raises(StoppedError):
        net(torch.zeros(1, 4))
    assert now == [3.0]
    net(torch.zeros(1, 4))  # outside nothing is asked
    assert now == [3.0 + DEEP]


class Keeping(nn.Module):
    """A network that keeps its features, as those do that show them."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.below, self.above = Ticking(now), Ticking(now)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.features = self.below(images.flatten(1))
        return self.above(self.features)


def test_a_network_whose_pass_ended_can_be_copied_though_it_keeps_features(now: list[float]) -> None:
    """What comes next of it begins with a copy: another attack, or the check of what was found."""
    images, labels = torch.rand(1, 1, 2, 2, generator=stream(0, "passes")), torch.tensor([1])
    view, _ = from_batch(Keeping(now), images, labels)
    now[0] = 0.0
    with limited_by(SearchControl(time_limit=1.5)), pytest.raises(StoppedError):
        predict(view, Candidate(images, labels))
    assert not hasattr(view.client.fixed_statistics_model, "features")
    assert isinstance(build("analytic")(view), Reconstruction)


def test_a_recorded_pass_ends_between_two_operations(now: list[float]) -> None:
    net = nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4) for _ in range(DEEP)))
    view, _ = from_batch(net, torch.rand(1, 1, 2, 2, generator=stream(0, "passes")), torch.tensor([1]))
    traced = trace_view(view)
    assert not isinstance(traced, NotApplicable)
    graph = traced[1]
    with limited_by(SearchControl(time_limit=1.0)):
        now[0] = 1.0
        with pytest.raises(StoppedError):
            graph.replay(graph.operations_behind(graph.returned), graph.returned, {})


def test_a_backward_pass_ends_between_two_parameters(now: list[float]) -> None:
    weights = {str(number): torch.eye(3) for number in range(DEEP)}

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        values = torch.ones(1, 3)
        for leaf in leaves.values():
            values = TickingBackward.apply(values @ leaf, now)
        return values.sum()

    with limited_by(SearchControl(time_limit=2.5)), pytest.raises(StoppedError):
        autograd_derivative(loss, weights)
    assert now == [3.0]
    autograd_derivative(loss, weights)
    assert now == [3.0 + DEEP]


def test_no_error_of_a_loss_of_the_users_own_is_made_of_it(now: list[float]) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        try:
            return nn.CrossEntropyLoss()(outputs, targets)
        except Exception:  # noqa: BLE001  as users write
            return outputs.sum()

    now[0] = 2.0
    with limited_by(SearchControl(time_limit=-1.0)), pytest.raises(StoppedError), function_errors_named():
        loss(torch.zeros(1, 3), torch.tensor([1]))


def test_reading_a_network_before_an_attack_ends_at_the_time_limit_as_well(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an attack takes off a network is read off a trace of it, which takes seconds of a large one."""
    net = nn.Sequential(nn.Flatten(), *(Ticking(now) for _ in range(DEEP)))
    view, _ = from_batch(net, torch.rand(1, 1, 2, 2, generator=stream(0, "passes")), torch.tensor([1]))
    monkeypatch.setattr("attacks.analytic.analytic.Analytic.attack_view", lambda *_: pytest.fail("begun"))
    now[0] = 0.0
    result = build("analytic")(view, control=SearchControl(time_limit=2.5))
    assert isinstance(result, NotApplicable)
    assert result.cut_short == "not done before the time limit"
    assert now[0] <= 3.0


class Counting(nn.Module):
    """A network that counts its passes of several pictures."""

    passes: list[int] = []  # noqa: RUF012  its copies have it in common

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * 36, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes.append(len(images))
        return self.above(functional.relu(self.below(images)).flatten(1))


def test_one_pass_says_what_linear_layers_are_given_to_an_attack_and_to_the_check_of_its_result() -> None:
    net = Counting()
    initialize(net, stream(0, "counting"))
    view, _ = from_batch(net, torch.rand(1, 1, 6, 6, generator=stream(0, "passes")), torch.tensor([1]))
    Counting.passes.clear()
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert [count for count in Counting.passes if count > 1] == [8]


def test_the_largest_reading_gives_way_where_they_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_cache, "MAX_NUMBERS", 100)
    view, _ = from_batch(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.rand(1, 1, 2, 2), torch.tensor([1]))
    made: list[str] = []

    def read(what: str, numbers: int) -> str:
        return cached_reading(view, what, lambda: made.append(what) or what, lambda _: numbers)

    with readings_cached():
        for what, numbers in (("small", 1), ("large", 60), ("huge", 101), ("other", 50)) * 2:
            assert read(what, numbers) == what
    assert made == ["small", "large", "huge", "other", "large", "huge", "other"]
