from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fl.models import build, models
from fl.models.building_blocks.initialization import initialize
from fl.models.building_blocks.layers import Normalize
from fl.registry import UnknownNameError
from fl.types import Task


def _gray(num_classes: int) -> list[nn.Module]:
    return [nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5, padding=1), nn.Linear(800, 128), nn.Linear(128, num_classes)]


def _color(num_classes: int) -> list[nn.Module]:
    convolutions = [nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5, padding=1), nn.Conv2d(32, 64, 3, padding=1)]
    return [*convolutions, nn.Linear(576, 128), nn.Linear(128, num_classes)]


def _lenet(num_classes: int) -> list[nn.Module]:
    convolutions = [nn.Conv2d(c, 12, 5, stride=s, padding=2) for c, s in ((3, 2), (12, 2), (12, 1))]
    return [*convolutions, nn.Linear(768, num_classes)]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generator as after `torch.manual_seed`, put back afterwards: what ours is measured against."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # noqa: TID251
        yield


def _constructed(layers: Callable[[int], list[nn.Module]], num_classes: int, seed: int) -> list[Tensor]:
    with _seeded(seed):
        return [p.detach() for layer in layers(num_classes) for p in layer.parameters()]


@pytest.mark.parametrize(
    ("name", "layers", "settings"),
    [("hyperfl-grey", _gray, {}), ("hyperfl-colour", _color, {}), ("lenet-zhu", _lenet, {"init": "default"})],
)
@pytest.mark.parametrize(("num_classes", "seed"), [(10, 0), (62, 3)])
def test_initial_values_equal_construction_after_manual_seed(
    name: str, layers: Callable[[int], list[nn.Module]], settings: dict[str, str], num_classes: int, seed: int
) -> None:
    expected = _constructed(layers, num_classes, seed)
    actual = list(build(name, num_classes=num_classes, seed=seed, **settings).model.parameters())
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("init", ["uniform", "redrawn"])
def test_uniform_initial_values_of_lenet(init: str) -> None:
    with _seeded(0):
        made_before = _lenet(10)
    with _seeded(7):
        layers = made_before if init == "uniform" else _lenet(10)
        expected = [p.data.uniform_(-0.5, 0.5) for layer in layers for p in (layer.weight, layer.bias)]
    actual = list(build("lenet-zhu", num_classes=10, seed=7, init=init).model.parameters())
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def _example(name: str, num_classes: int, seed: int = 0) -> Task:
    """The network `name` at its example's size; skips where it needs an extra that is not installed."""
    try:
        return dict(models.examples())[name].build_task(num_classes=num_classes, seed=seed)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", models.names())
def test_building_leaves_the_global_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    _example(name, num_classes=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", models.names())
def test_every_network_classifies_its_images_and_names_its_parts(name: str) -> None:
    task, again, other = (_example(name, num_classes=5, seed=seed) for seed in (1, 1, 2))
    images = torch.rand(2, *task.input_shape, generator=torch.Generator().manual_seed(0))
    logits = task.model(images)
    assert logits.shape == (2, 5)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, again.model(images))
    assert not torch.equal(logits, other.model(images))
    assert task.head == "head."
    for parameter, _ in task.model.named_parameters():
        assert parameter.startswith(("body.", "head."))
    assert isinstance(task.model.head, nn.Linear)


@pytest.mark.parametrize(("name", "count"), [("hyperfl-grey", 115_776), ("hyperfl-colour", 106_400)])
def test_extractors_of_hyperfl_have_the_published_size(name: str, count: int) -> None:
    model = build(name, num_classes=10).model
    assert sum(p.numel() for p in model.body.parameters()) == count
    assert sum(p.numel() for p in model.head.parameters()) == 1290


def test_parameter_names_of_hyperfl_gray() -> None:
    names = [name for name, _ in build("hyperfl-grey", num_classes=10).model.named_parameters()]
    layers = ["body.conv1", "body.conv2", "body.fc1", "head"]
    assert names == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def test_hyperfl_gray_equals_its_description() -> None:
    task = build("hyperfl-grey", num_classes=10, seed=0)
    p = dict(task.model.named_parameters())
    f = nn.functional
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    h = (x - 0.1307) / 0.3081
    h = f.max_pool2d(f.leaky_relu(f.conv2d(h, p["body.conv1.weight"], p["body.conv1.bias"]), 0.01), 2)
    h = f.max_pool2d(f.leaky_relu(f.conv2d(h, p["body.conv2.weight"], p["body.conv2.bias"], padding=1), 0.01), 2)
    h = f.leaky_relu(f.linear(h.flatten(1), p["body.fc1.weight"], p["body.fc1.bias"]), 0.01)
    expected = f.linear(h, p["head.weight"], p["head.bias"])
    torch.testing.assert_close(task.model(x), expected)


@pytest.mark.parametrize(("shape", "width"), [((3, 32, 32), 768), ((1, 28, 28), 588)])
def test_lenet_takes_both_image_sizes(shape: tuple[int, int, int], width: int) -> None:
    task = build("lenet-zhu", num_classes=100, input_shape=shape)
    assert task.model.head.weight.shape == (100, width)
    assert task.mean == (0.0,) * shape[0]
    assert max(p.abs().max().item() for p in task.model.parameters()) <= 0.5


def test_the_normalization_survives_construction_and_is_told_to_the_task() -> None:
    task = build("hyperfl-colour", num_classes=10)
    assert task.mean == (0.4914, 0.4822, 0.4465)
    assert task.std == (0.2470, 0.2435, 0.2616)
    x = torch.full((1, 3, 2, 2), 0.5)
    expected = (x - torch.tensor(task.mean).view(3, 1, 1)) / torch.tensor(task.std).view(3, 1, 1)
    assert torch.equal(task.model.normalize(x), expected)
    assert not any(key.startswith("normalize") for key in task.model.state_dict())
    assert build("lenet-zhu", num_classes=10, normalize=True).mean == task.mean
    assert build("tiny", num_classes=2, normalize=True, mean=[0.5], std=[0.25]).std == (0.25,)


def test_batch_norm_variant_starts_as_the_identity() -> None:
    model = build("tiny", num_classes=2, batch_norm=True).model
    state = model.state_dict()
    assert torch.equal(state["body.norm1.weight"], torch.ones(4))
    assert torch.equal(state["body.norm1.running_mean"], torch.zeros(4))
    assert torch.equal(state["body.norm1.running_var"], torch.ones(4))
    plain = build("tiny", num_classes=2).model
    assert torch.equal(model.head.weight, plain.head.weight)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'hyperfl-grey'"):
        build("hyperfl-gray", num_classes=10)
    with pytest.raises(UnknownNameError, match="setting of model 'tiny' 'batchnorm'; did you mean 'batch_norm'"):
        build("tiny", num_classes=10, batchnorm=True)
    with pytest.raises(ValueError, match=r"expected images that fit the network, got input_shape \(1, 4, 4\)"):
        build("hyperfl-grey", num_classes=10, input_shape=(1, 4, 4))
    with pytest.raises(ValueError, match="at least 2 classes, got 1"):
        build("tiny", num_classes=1)
    with pytest.raises(ValueError, match="expected both mean and std or neither"):
        build("hyperfl-grey", num_classes=10, mean=(0.5,))
    with pytest.raises(ValueError, match="for each of 1 channels"):
        build("hyperfl-grey", num_classes=10, mean=(0.5, 0.5), std=(1, 1))
    with pytest.raises(ValueError, match="there are usual ones for 1 and 3 only"):
        build("hyperfl-grey", num_classes=10, input_shape=(2, 28, 28))
    with pytest.raises(ValueError, match="expected std > 0"):
        Normalize((0.0,), (0.0,))


def test_layers_with_no_known_start_are_refused() -> None:
    with pytest.raises(ValueError, match="got Embedding at '0'"):
        initialize(nn.Sequential(nn.Embedding(2, 3)), torch.Generator())


def test_specs_of_networks_round_trip() -> None:
    for _, network in models.examples():
        assert models.build(models.spec(network)) == network


@pytest.mark.parametrize(("name", "shape"), [("hyperfl-grey", (1, 28, 28)), ("hyperfl-colour", (3, 32, 32))])
def test_pooling_before_the_activation_is_the_published_network(name, shape):
    task = build(name, num_classes=10, seed=0)
    layers = dict(task.model.body.named_children())
    order = [f"{kind}{i}" for i in (1, 2, 3) for kind in ("conv", "act", "pool") if f"{kind}{i}" in layers]
    published = nn.Sequential(*(layers[key] for key in [*order, "flatten", "fc1", "act"]), task.model.head)
    inputs = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0))
    there, here = published(task.model.normalize(inputs)), task.model(inputs)
    assert torch.equal(there, here)
    weights = list(task.model.parameters())
    for mine, other in zip(*(torch.autograd.grad(out.square().sum(), weights) for out in (here, there)), strict=True):
        torch.testing.assert_close(mine, other)


def test_pixels_are_normalized_whatever_initialize_leaves_out() -> None:
    """A subclass that fills its own layers alone once trained on whatever lay in memory as mean and std."""

    class Filled(type(models.build("mlp"))):  # type: ignore[misc]
        def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
            for value in model.parameters():
                nn.init.normal_(value, std=0.1, generator=generator)

    task = Filled(input_shape=(1, 4, 4)).build_task(num_classes=3)
    assert task.model.normalize.mean.item() == pytest.approx(0.1307)
    assert task.model.normalize.std.item() == pytest.approx(0.3081)


def test_what_initialize_leaves_without_a_value_is_said() -> None:
    class Empty(type(models.build("mlp"))):  # type: ignore[misc]
        def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
            nn.init.zeros_(model.head.weight)

    with pytest.raises(ValueError, match=r"expected initialize to fill 'body.fc1.weight', which has no value: .*timm"):
        Empty(input_shape=(1, 4, 4)).build_task(num_classes=3)
