"""Weight decay is read off an update where its own numbers tell it, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from attacks.base import Reconstruction, build
from attacks.update.decay_reading import read_decay, with_decay_read_off
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

SHAPE = (1, 14, 14)


def network(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 24), activation(), nn.Linear(24, 10))
    initialize(model, stream(0, "decay"))
    for value in (model[1].bias, model[3].bias):
        value.data.uniform_(-0.1, 0.1, generator=stream(1, "decay"))
    return model


def examples(count: int) -> tuple[Tensor, Tensor]:
    draw = stream(2, "decay")
    return torch.rand(count, *SHAPE, generator=draw).mul(255).round() / 255, torch.arange(count) % 10


def seen(
    model: nn.Module,
    rule: Callable[..., torch.optim.Optimizer],
    stated: FedAvg,
    count: int = 1,
    steps: int = 1,
    *,
    frozen: str = "none",
) -> ServerView:
    """The view of steps on all examples, by the optimizer that the client really has."""
    trained, (inputs, labels) = copy.deepcopy(model), examples(count)
    for name, value in trained.named_parameters():
        value.requires_grad_(not name.startswith(frozen))
    optimizer = rule([value for value in trained.parameters() if value.requires_grad])
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
    after = dict(trained.named_parameters())
    update = {name: (value - after[name]).detach() for name, value in model.named_parameters()}
    return from_update(model, update, input_shape=SHAPE, method=stated, batch_size=count)


def plain(decay: float = 0.0, **settings: object) -> FedAvg:
    return FedAvg(**{"lr": 0.1, "steps": 1, "batch_size": None, "weight_decay": decay, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("used", "stated"), [(0.01, 0.0), (5e-4, 0.0), (0.0, 0.01), (0.01, 0.02)])
def test_another_decay_than_stated_is_read(activation: type, count: int, used: float, stated: float) -> None:
    view = seen(network(activation), partial(SGD, lr=0.1, weight_decay=used), plain(stated), count)
    read, note = with_decay_read_off(view)
    assert read.method.weight_decay == used  # type: ignore[attr-defined]
    assert note.endswith(f"where {stated:g} was stated" if stated else "which was not stated")
    if count == 1:
        found = [build("analytic")(one) for one in (view, read)]
        assert [isinstance(one, Reconstruction) and bool(one.verified) for one in found] == [False, True]


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_what_was_stated_rightly_stays(decay: float) -> None:
    view = seen(network(), partial(SGD, lr=0.1, weight_decay=decay), plain(decay))
    assert with_decay_read_off(view) == (view, "")


def test_many_steps_that_rounding_cuts_to_its_grid_are_no_other_decay() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), nn.Linear(24, 10))
    image = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(1))
    image[:, :, :6] = 0  # what flows through black pixels is nothing
    trained = copy.deepcopy(model)
    optimizer = SGD(trained.parameters(), lr=1e-3, weight_decay=5e-4)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(image), torch.tensor([3])).backward()
        optimizer.step()
    after = dict(trained.named_parameters())
    update = {name: (value - after[name]).detach() for name, value in model.named_parameters()}
    view = from_update(model, update, input_shape=SHAPE, method=plain(5e-4, lr=1e-3, steps=20), batch_size=1)
    assert read_decay(view) is not None
    assert with_decay_read_off(view) == (view, "")


def test_decay_of_several_steps_with_momentum_is_that_of_one() -> None:
    rule = partial(SGD, lr=0.01, momentum=0.9, weight_decay=0.02)
    view = seen(network(), rule, plain(lr=0.01, momentum=0.9, steps=3), steps=3)
    assert with_decay_read_off(view)[0].method.weight_decay == 0.02  # type: ignore[attr-defined]


def test_the_decay_that_adamw_comes_with_is_read_where_nothing_flows() -> None:
    view = seen(network(), partial(AdamW, lr=0.01), plain(lr=0.01, optimizer="adamw"))
    assert with_decay_read_off(view)[0].method.weight_decay == 0.01  # type: ignore[attr-defined]
    smooth = seen(network(nn.Tanh), partial(AdamW, lr=0.01), plain(lr=0.01, optimizer="adamw"))
    assert read_decay(smooth) is None


def without_vectors(values: Sequence[Tensor]) -> torch.optim.Optimizer:
    kinds = ([v for v in values if v.ndim > 1], 0.01), ([v for v in values if v.ndim < 2], 0.0)
    return SGD([{"params": own, "weight_decay": decay} for own, decay in kinds], lr=0.1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_what_decay_spares_is_told(activation: type, frozen: bool) -> None:
    rule = partial(SGD, lr=0.1, weight_decay=0.01) if frozen else without_vectors
    view = seen(network(activation), rule, plain(), frozen="1." if frozen else "none")
    read, note = with_decay_read_off(view)
    assert note.endswith(f"it spares 2 of 4 tensors, such as 1.{'weight' if frozen else 'bias'}")
    found = build("analytic")(read)
    assert isinstance(found, Reconstruction)
    assert found.verified


def test_where_nothing_tells_nothing_is_read() -> None:
    rule = partial(SGD, lr=0.1, weight_decay=0.01)
    assert read_decay(seen(network(nn.Tanh), rule, plain(), 22)) is None  # of 24 rows too few are free
    model = nn.Sequential(nn.Conv2d(1, 4, 5), nn.Sigmoid(), nn.Flatten(), nn.Linear(400, 4))
    assert read_decay(seen(model, rule, plain())) is None
    view = seen(network(), rule, plain())
    draw = stream(3, "decay")
    noisy = {name: value + 1e-5 * torch.randn(value.shape, generator=draw) for name, value in view.update.items()}
    noised = from_update(network(), noisy, input_shape=SHAPE, method=plain(), batch_size=1)
    assert read_decay(noised) is None
    adam = seen(network(), partial(torch.optim.Adam, lr=0.01), plain(lr=0.01, optimizer="adam"))
    assert read_decay(adam) is None


def test_a_step_of_unknown_size_shows_a_share_of_the_weights() -> None:
    model, rule = network(), partial(SGD, lr=0.1, weight_decay=0.01)
    view = seen(model, rule, plain())
    unknown = from_update(model, view.update, input_shape=SHAPE, batch_size=1)
    read, note = with_decay_read_off(unknown)
    assert note.startswith("weight decay by 0.001 of the weights was read off")
    found = build("analytic")(read)
    assert isinstance(found, Reconstruction)
    assert found.verified
