"""Residual networks are inverted exactly from one gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.brief import brief_picture_searches
from support.cover import SLOW, one_at_a_time
from support.residual import Block, ResNet, assert_exact, decibels, pictures, victim
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.analytic.backsolve import Backsolve
from attacks.analytic.graph import evaluation_mode
from attacks.analytic.graph.feature_inversion import InvertedImages
from attacks.analytic.graph.picture_search import SolvedPictures
from attacks.analytic.graph.solver import GraphSolver
from attacks.base import NotApplicable, Reconstruction
from attacks.search_control import SearchControl
from defenses import defenses
from defenses.clip import Clip
from defenses.prune import Prune
from fl.capture import from_batch, from_update
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.models.building_blocks.model_checks import find_head
from fl.models.resnet20 import ResNet20
from fl.tensors import dense
from fl.types import Batch, Task


@pytest.mark.parametrize(
    ("count", "training"),
    [
        (1, True),
        (2, False),
        pytest.param(1, False, marks=SLOW),  # what hands residual networks over, below, is of one picture
        pytest.param(2, True, marks=SLOW),  # and the next test of two in training mode
    ],
)
def test_residual_networks_give_batches_away_exactly(count: int, training: bool) -> None:
    """Also where batch normalization is in training mode."""
    images, labels = pictures(count)
    view, _ = from_batch(victim().train(training), images, labels)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.labels is not None
    assert min(decibels(found.inputs, images)) > 80
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())
    assert found.verified is True


def test_shortcuts_without_parameters_and_biases_are_no_trouble_in_training_mode() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        network = ResNet20(input_shape=(3, 16, 16), blocks=1, width=24)
        model = nn.Sequential(network.body(), nn.Linear(96, 10)).train()
    images, labels = pictures(2)
    found = attacks.build("backsolve")(from_batch(model, images, labels)[0])
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert min(decibels(found.inputs, images)) > 80
    assert found.verified is True


def test_training_mode_without_the_buffers_that_came_back_is_refused() -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim().train(), images, labels)
    found = attacks.build("backsolve")(replace(view, buffers_after=None))
    assert isinstance(found, NotApplicable)
    assert "buffers_after" in found.reason


def test_evaluation_mode_is_not_solved_as_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels)

    def refuse(*_: object) -> None:
        raise AssertionError("a network in evaluation mode was taken for one in training mode")

    monkeypatch.setattr("attacks.analytic.backsolve.solve_in_training_mode", refuse)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.verified is True


@pytest.mark.parametrize("ratio", [0.5, pytest.param(0.75, marks=SLOW)])
def test_a_random_share_of_the_update_is_enough(ratio: float) -> None:
    """Where a random mask leaves entries out, those that were sent tell the picture and its label all the same."""
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels, defense=Prune(ratio=ratio, keep="random"))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.verified is True
    assert torch.equal((255 * found.inputs).round(), (255 * images).round())  # type: ignore[operator]
    assert found.labels.tolist() == labels.tolist()  # type: ignore[union-attr]


def test_a_refusal_names_the_smallest_numbers_that_were_left_out() -> None:
    """It is them that the equations miss: the step is plain, and statistics are fixed."""
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels, defense=Prune(ratio=0.8))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "left out the smallest numbers, here 80% of" in found.reason
    assert "one plain step" not in found.reason
    assert found.limit


def test_a_pruned_update_of_two_images_tells_their_labels() -> None:
    images, labels = pictures(2)
    view, _ = from_batch(victim(), images, labels, defense=Prune(ratio=0.2, keep="random"))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert min(decibels(found.inputs, images)) > 80
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())  # type: ignore[union-attr]
    assert found.verified is True


@pytest.mark.parametrize("name", ["stem.weight", pytest.param("blocks.1.conv1.weight", marks=SLOW)])
def test_a_layer_of_which_next_to_nothing_was_sent_is_no_error(name: str) -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels, defense=Prune(ratio=0.3, keep="random"))
    value = dense(view.update[name])
    little = torch.zeros_like(value)
    little.view(-1)[[0, 5]] = value.view(-1)[[0, 5]]
    found = attacks.build("backsolve")(replace(view, update={**view.update, name: little}))
    if isinstance(found, Reconstruction) and found.verified:
        assert min(decibels(found.inputs, images)) > 80  # type: ignore[arg-type]
    else:
        assert found.reason if isinstance(found, NotApplicable) else found.note


def test_zeros_of_training_mode_are_no_gaps() -> None:
    """A parameter that nothing uses, in an update that clipping made shorter."""
    images, labels = pictures(1)
    model = victim().train()
    model.extra = nn.Parameter(torch.ones(3))
    found = attacks.build("backsolve")(from_batch(model, images, labels, defense=Clip(max_norm=0.1))[0])
    assert isinstance(found, Reconstruction)
    assert found.verified is True


def test_a_pruned_update_in_training_mode_is_refused() -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim().train(), images, labels, defense=Prune(ratio=0.2, keep="random"))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "training mode it takes whole gradients" in found.reason


def test_wrong_statistics_of_the_batch_are_not_verified() -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim().train(), images, labels)
    assert view.buffers_after is not None
    wrong = {n: v * 1.05 if n.endswith("running_mean") else v for n, v in view.buffers_after.items()}
    with brief_picture_searches():  # they are in vain
        found = attacks.build("backsolve")(replace(view, buffers_after=wrong))
    assert isinstance(found, NotApplicable) or found.verified is not True


@one_at_a_time(count=[1, 2], hidden=[False, True])
def test_sizes_follow_from_the_classifier_where_normalizations_are_frozen(count: int, hidden: bool) -> None:
    """Frozen ones send no gradient, and no bias below the classifier says how much of an image's signal there is."""
    images, labels = pictures(count)
    labels = torch.tensor([7, 3])[:count]
    model = freeze_normalizations(victim())
    if hidden:
        with torch.random.fork_rng():
            torch.random.default_generator.manual_seed(1)
            model.head = nn.Sequential(nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 10))
    view, _ = from_batch(model, images, labels)
    assert_exact(attacks.build("backsolve")(view), images)


def freeze_normalizations(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model


def test_sizes_follow_from_shifts_where_frozen_normalizations_have_statistics() -> None:
    """Images of one label send the same into the classifier's bias."""
    images, _ = pictures(2, size=12)
    model = victim().train()
    with torch.no_grad():
        for _ in range(20):
            model(pictures(8, seed=5, size=12)[0])
    view, _ = from_batch(freeze_normalizations(model.eval()), images, torch.tensor([7, 7]))
    assert_exact(attacks.build("backsolve")(view), images)


@pytest.mark.parametrize(("count", "size"), [(1, 8), (2, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_pictures_of_unknown_brightness_are_not_verified(count: int, size: int, bias: bool) -> None:
    """Without shifts, biases or differing labels a darker picture has the same features, up to a factor.

    Under a defense that changes sizes alone no update is made again that would tell. A bias of the classifier does.
    """
    images, _ = pictures(count, size=size)
    model = freeze_normalizations(victim())
    model.head.bias.requires_grad_(bias)
    clip = defenses.build({"name": "clip", "max_norm": 0.01})
    view, _ = from_batch(model, images, torch.tensor([7, 7])[:count], defense=clip)
    with brief_picture_searches():
        found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert bool(found.verified) == bias
    assert (min(decibels(found.inputs, images)) > 40) == bias


class Activated(ResNet):
    """The same with another activation in its blocks."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__((16, 48, 128))
        for block in self.blocks:
            block.forward = partial(self._run, block, activation)

    @staticmethod
    def _run(block: Block, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        inner = activation(block.bn1(block.conv1(x)))
        return activation(block.bn2(block.conv2(inner)) + block.shortcut(x))


@pytest.mark.parametrize(
    "activation",
    [
        partial(functional.leaky_relu, negative_slope=0.1),
        functional.elu,
        pytest.param(functional.relu6, marks=SLOW),  # below it signals are zero on two sides, in place of one
    ],
)
def test_images_are_told_apart_by_other_activations(activation: Callable[[Tensor], Tensor]) -> None:
    """Below a leaky ReLU signals have two values, and below an ELU neighbors have one where both were above zero."""
    images, labels = pictures(2, size=12)[0], torch.tensor([7, 3])
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = Activated(activation).train()
    with torch.no_grad():
        for _ in range(20):  # numbers of usual size go into the activations
            model(pictures(8, seed=5, size=12)[0])
    model.eval()
    view, _ = from_batch(model, images, labels)
    assert_exact(attacks.build("backsolve")(view), images)


def test_repeated_labels_are_no_trouble() -> None:
    images, _ = pictures(2, size=12)
    view, _ = from_batch(victim(), images, torch.tensor([3, 3]))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert min(decibels(found.inputs, images)) > 80


def test_labels_are_told_by_features_where_pictures_were_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = pictures(3)
    model = victim()
    search = evaluation_mode.search_pictures

    def lose_one(*arguments: Any) -> InvertedImages:
        found = search(*arguments)
        lost = torch.arange(3) == 1
        wrong = torch.where(lost[:, None, None, None], 1 - found.images, found.images)
        return replace(found, images=wrong, residual=torch.where(lost, 1.0, found.residual), converged=~lost)

    monkeypatch.setattr(evaluation_mode, "search_pictures", lose_one)
    found = attacks.build("backsolve")(from_batch(model, images, labels)[0])
    assert isinstance(found, Reconstruction)
    assert not found.verified
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())


def test_differences_of_float32_weights_are_taken() -> None:
    images, labels = pictures(1, size=16)
    model = victim()
    loss = functional.cross_entropy(model(images), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    before = {n: p.detach() for n, p in model.named_parameters()}
    update = {n: p - (p - 0.1 * g) for (n, p), g in zip(before.items(), grads, strict=True)}
    view = from_update(model, update, input_shape=(3, 16, 16), num_classes=10)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert min(decibels(found.inputs, images)) > 40


def test_the_refusal_counts_equations() -> None:
    images, labels = pictures(3, size=16)
    view, _ = from_batch(victim((8, 12, 24)), images, labels)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "24" in found.reason
    assert "48" in found.reason


def test_a_changed_update_is_not_verified() -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels)
    changed = {n: v + 1e-2 * v.abs().mean() * torch.randn(v.shape, generator=torch.Generator().manual_seed(0))
               for n, v in view.update.items()}  # fmt: skip
    with brief_picture_searches():
        found = attacks.build("backsolve")(view.__class__(**{**vars(view), "update": changed}))
    assert isinstance(found, NotApplicable) or found.verified is not True


def test_an_update_of_zeros_is_refused() -> None:
    model = victim()
    update = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    view = from_update(model, update, input_shape=(3, 16, 16), num_classes=10, kind="gradient")
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "zero in every tensor" in found.reason


def test_instance_normalization_of_a_batch_is_refused() -> None:
    layers = nn.Conv2d(3, 64, 3, padding=1), nn.InstanceNorm2d(64, affine=True), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    images, labels = pictures(2)
    view, _ = from_batch(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10)).eval(), images, labels)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "other operations" in found.reason


@pytest.mark.parametrize(
    ("order", "labels", "seed"),
    [
        ([0, 0], [1, 1], 1),
        pytest.param([0, 0], [1, 2], 1, marks=SLOW),
        ([0, 0, 1], [1, 4, 7], 7),  # rounding gives it as many directions as three distinct ones have
        pytest.param([0, 0, 1, 1], [1, 3, 5, 5], 1, marks=SLOW),
    ],
)
def test_pictures_that_are_there_several_times_come_back_as_often(
    order: list[int], labels: list[int], seed: int
) -> None:
    distinct = pictures(2, seed)[0]
    view, _ = from_batch(victim(), distinct[order], torch.tensor(labels))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction), found
    assert found.inputs is not None
    assert found.labels is not None
    assert len(found.inputs) == len(order)
    nearest = torch.cdist(found.inputs.flatten(1), distinct.flatten(1)).argmin(1)
    assert sorted(zip(nearest.tolist(), found.labels.tolist(), strict=True)) == sorted(zip(order, labels, strict=True))
    assert float((found.inputs - distinct[nearest]).abs().max()) < 1e-4
    assert found.verified is True


def test_equal_pictures_are_refused_where_nothing_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = pictures(1)
    view, _ = from_batch(victim(), images.repeat(2, 1, 1, 1), torch.tensor([1, 2]))
    monkeypatch.setattr("attacks.analytic.backsolve.count_labels", lambda *_: None)
    with brief_picture_searches():
        found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "2 images look as of 1 distinct ones" in found.reason


def test_a_layer_that_cannot_be_begun_with_is_named() -> None:
    convolutions = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()
    images, labels = pictures(1, size=16)
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
    found = attacks.build("backsolve")(from_batch(model, images, labels)[0])
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("2.weight: not a convolution of stride 1")
    assert "too few for the 768 of the picture" in found.reason


def test_one_picture_is_begun_with_at_linear_layers() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        lowest = nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU()
        model = nn.Sequential(*lowest, nn.Flatten(), nn.Linear(1536, 16), nn.ReLU(), nn.Linear(16, 10))
    images, labels = pictures(1, size=16)
    images = (255 * images[..., :12, :12]).round() / 255
    assert_exact(attacks.build("backsolve")(from_batch(model, images, labels)[0]), images)


def test_one_picture_is_begun_with_at_a_normalization_of_one_position() -> None:
    """Its shift's gradient is what flows back, as a bias's is, where the classifier stays with the client."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        features = nn.Conv2d(3, 24, 8, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten()
        model = nn.Sequential(*features, nn.Linear(24, 10)).eval()
    images, labels = pictures(1)
    found = attacks.build("backsolve")(
        from_batch(
            model, images, labels, method=FedPer(lr=1.0, steps=1, batch_size=None, head_lr=0.0, train_mode=False)
        )[0]
    )
    assert_exact(found, images)


class OneBias(nn.Linear):
    """A linear layer that adds one number to all of its outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


@pytest.mark.parametrize("attack", ["backsolve", "cascade"])
def test_one_bias_of_several_outputs_is_not_what_flows_back(attack: str) -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        below = nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Flatten(), OneBias(2400, 16), nn.ReLU()
        model = nn.Sequential(*below, nn.Linear(16, 10)).eval()
    images, labels = pictures(1, size=16)
    found = attacks.build(attack)(from_batch(model, images[..., :12, :12], labels)[0])
    if isinstance(found, Reconstruction):
        assert found.inputs is not None
        assert float((found.inputs - images[..., :12, :12]).abs().max()) < 1e-3
    else:
        assert "one bias" in found.reason


def test_noise_of_the_top_convolution_is_spread_over_its_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = pictures(1, size=16)
    view, _ = from_batch(victim(), images, labels)
    rough = {n: dense(v).to(torch.float16).to(torch.float32) for n, v in (view.update or {}).items()}
    attack, found = attacks.build("backsolve"), []
    monkeypatch.setattr("attacks.analytic.graph.evaluation_mode.descend_again", lambda first: first)  # needs no top
    for _ in range(2):
        with brief_picture_searches():
            result = attack(replace(view, update=rough))
        assert isinstance(result, Reconstruction)
        assert result.inputs is not None
        found += decibels(result.inputs, images)
        monkeypatch.setattr("attacks.analytic.graph.shift_signals.CLEAR_GAP", 0.0)  # the columns are taken as they are
    assert found[0] > found[1] + 3


def test_a_network_of_few_features_is_refused() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(100, 10))
    images, labels = pictures(1, size=16)
    found = attacks.build("backsolve")(from_batch(model, images[..., :12, :12], labels)[0])
    assert isinstance(found, NotApplicable)
    few = "from its linear layers down 100 numbers other than zero are solved for, too few for the 432 of the picture"
    assert few in found.reason


def test_a_residual_above_the_noise_verifies_only_whole_levels() -> None:
    images, _ = pictures(1)
    missed = InvertedImages(images, torch.tensor([5e-5]), torch.tensor([False]), torch.tensor([1]), 1)
    attack = Backsolve()
    assert not attack._is_explained(missed, images, snapped=False)
    assert attack._is_explained(missed, images, snapped=True)
    assert attack._is_explained(replace(missed, converged=torch.tensor([True])), images, snapped=False)


def test_cascade_hands_residual_networks_over() -> None:
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels)
    found = attacks.build("cascade")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert min(decibels(found.inputs, images)) > 80


class Cropped(nn.Module):
    """A network that does not look at the last column of a picture."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x[..., :-1])


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=SLOW)])
def test_pixels_that_move_nothing_are_not_verified(*, train: bool) -> None:
    images, labels = pictures(1)
    view, _ = from_batch(Cropped(victim()).train(train), images, labels)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert float((found.inputs - images)[..., :-1].abs().max()) < 1e-4
    assert found.verified is not True
    assert "24 numbers of the pictures are not told" in found.note


def test_a_top_block_that_passes_nothing_on_is_named_in_training_mode() -> None:
    model = victim().train()
    with torch.no_grad():
        model.get_parameter("blocks.2.bn1.bias").fill_(-100)
    found = attacks.build("backsolve")(from_batch(model, *pictures(1))[0])
    assert isinstance(found, NotApplicable)
    assert found.reason == "blocks.2.conv2.weight: its gradient is zero"


def test_equal_pictures_in_training_mode_are_refused_for_what_they_lack() -> None:
    images, _ = pictures(1)
    view, _ = from_batch(victim().train(), images.repeat(2, 1, 1, 1), torch.tensor([1, 2]))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "what flows back has fewer than 7 independent directions" in found.reason


def test_a_top_block_with_few_open_channels_is_named_in_training_mode() -> None:
    model = victim().train()
    with torch.no_grad():
        model.get_parameter("blocks.2.bn1.bias")[10:] = -100
    found = attacks.build("backsolve")(from_batch(model, *pictures(1, size=16))[0])
    assert isinstance(found, NotApplicable)
    assert "what it takes has fewer than 16 independent directions" in found.reason


def test_buffers_that_did_not_move_are_named() -> None:
    view, _ = from_batch(victim().train(), *pictures(1))
    found = attacks.build("backsolve")(replace(view, buffers_after=view.buffers))
    assert isinstance(found, NotApplicable)
    assert "are the buffers those that came back after the step?" in found.reason


def test_pixels_that_no_kernel_reaches_are_not_solved_for_by_known_outputs() -> None:
    convolutions = nn.Conv2d(3, 96, 1, 2), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1), nn.ReLU()
    top = nn.Conv2d(96, 96, 3, 2, 1), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1), nn.ReLU()
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(*convolutions, *top, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)).eval()
    images, labels = pictures(1, seed=2, size=16)
    found = attacks.build("backsolve")(from_batch(model, images, labels)[0])
    assert isinstance(found, Reconstruction)
    assert found.verified is not True
    assert list(found.private) == ["features/2.weight"]
    assert "576 numbers of the pictures are not told" in found.note


class Averaged(nn.Module):
    """A network that sees of a picture's last two columns only their mean."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        mean = x[..., -2:].mean(3, keepdim=True)
        return self.network(torch.cat([x[..., :-2], mean, mean], 3))


@pytest.mark.parametrize("train", [pytest.param(False, marks=SLOW), True])
def test_pixels_that_are_seen_only_together_are_not_verified(*, train: bool) -> None:
    images, labels = pictures(1, seed=2)
    images = (255 * (0.4 * images + 0.3)).round() / 255
    found = attacks.build("backsolve")(from_batch(Averaged(victim()).train(train), images, labels)[0])
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert float((found.inputs - images).abs().max()) > 1 / 255
    assert found.verified is not True
    assert "numbers of the pictures are not told" in found.note


def test_when_the_time_is_up_the_features_found_by_then_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patience(SearchControl):
        """A control whose time is up once features are solved for."""

        is_over = False

        def stop_reason(self) -> str:
            return "the time limit" if self.is_over else ""

    def end(solver: GraphSolver, shape: Sequence[int], seed: int) -> SolvedPictures | NotApplicable:
        control.is_over = True
        return solve(solver, shape, seed)

    control, solve = Patience(), evaluation_mode._solve_for_pictures
    monkeypatch.setattr(evaluation_mode, "_solve_for_pictures", end)
    images, labels = pictures(1)
    view, _ = from_batch(victim(), images, labels)
    found = attacks.build("backsolve")(view, control=control)
    assert isinstance(found, Reconstruction)
    assert found.inputs is None
    assert found.verified is False
    assert found.cut_short == "not done before the time limit: features alone"
    ((name, _),) = found.private.items()
    assert name == "features/stem.weight"


def test_a_batch_above_a_convolution_of_one_position_is_refused_by_its_signals() -> None:
    body = nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()
    images = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    view, _ = from_batch(nn.Sequential(*body, nn.Flatten(), nn.Linear(24, 10)).eval(), images, torch.arange(2))
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert "the signals of 0 of 2 images could be told apart" in found.reason


def test_a_mean_of_clients_in_training_mode_is_no_batch() -> None:
    """Each normalizes by its own picture; in evaluation mode the mean is one step on all of them."""
    images, _ = pictures(2)
    model = victim().train()
    task, data = Task(model, (3, 8, 8), 10, find_head(model, None, 10)), Batch(images, torch.tensor([7, 3]))
    clients = [ClientData(own, own) for own in (data.take(torch.tensor([i])) for i in range(2))]
    group = defenses.build({"name": "secagg", "group_size": 2})
    view, _ = Federation(Client(task, FedAvg(lr=1.0, steps=1, batch_size=None), group), clients).observe(0)
    found = attacks.build("backsolve")(view)
    assert isinstance(found, NotApplicable)
    assert found.reason == "only the mean of 2 clients: batch norm takes every client's statistics apart"
