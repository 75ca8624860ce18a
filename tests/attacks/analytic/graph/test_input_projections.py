"""What gradients determine of an input, where they leave part of it open."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks import Reconstruction
from attacks.analytic.graph import picture_search
from attacks.analytic.graph.feature_inversion import InvertedImages
from attacks.analytic.graph.feature_residuals import FeatureTarget
from attacks.analytic.graph.input_projections import solve_projection, weighted_projection
from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.layer_solves import KnownSignal
from attacks.analytic.graph.undetermined_numbers import count_undetermined
from fl.capture import CapturedUpdateSettings, from_batch, from_update
from fl.seeds import stream

ONE = (1, 1), (0, 0), (1, 1)


def transition(images: int, window: int) -> tuple[KnownSignal, Tensor]:
    """A 1x1 convolution whose output is averaged over windows, with its gradient, and its input."""
    draw = stream(window, "transition")
    given = torch.randn(images, 3, 4, 4, generator=draw, dtype=torch.float64)
    weight = torch.randn(48, 3, 1, 1, generator=draw, dtype=torch.float64).requires_grad_()
    out = functional.conv2d(given, weight)
    small = torch.randn(images, 48, 4 // window, 4 // window, generator=draw, dtype=torch.float64)
    signal = functional.interpolate(small, scale_factor=window)
    (gradient,) = torch.autograd.grad(out, weight, signal)
    layer = LayerEquations("weight", weight.detach(), gradient, *ONE, 1, given.shape, out.shape)
    return KnownSignal(layer, signal), given


def test_means_over_windows_are_determined() -> None:
    known, given = transition(images=2, window=2)
    solved = solve_projection([known])
    assert solved is not None
    assert solved.rank == 8
    means = functional.interpolate(functional.avg_pool2d(given, 2), scale_factor=2)
    assert torch.allclose(solved.values, means, atol=1e-9)
    again = (given.flatten(2) @ solved.projection).reshape(given.shape)
    assert torch.allclose(again, means, atol=1e-9)
    assert solved.misfit < 1e-9


def test_channels_whose_signal_is_wrong_are_left_out() -> None:
    known, given = transition(images=2, window=2)
    known.signal[0, 5, :2, :2] = 0  # as by a wrong bit of the activation above
    known.signal[1, 30] *= -1
    solved = solve_projection([known])
    assert solved is not None
    means = functional.interpolate(functional.avg_pool2d(given, 2), scale_factor=2)
    assert torch.allclose(solved.values, means, atol=1e-9)
    assert solved.misfit < 1e-9


def test_silent_channels_do_not_count_as_wrong_ones() -> None:
    known, given = transition(images=2, window=2)
    layer, signal = known.layer, known.signal.clone()
    signal[:, :30] = 0
    gradient = torch.einsum("bchw,bkhw->ck", signal, given)[..., None, None]
    gradient = gradient + 1e-7 * torch.randn(gradient.shape, generator=stream(0, "rounding"), dtype=torch.float64)
    solved = solve_projection([KnownSignal(replace(layer, gradient=gradient), signal)])
    assert solved is not None
    means = functional.interpolate(functional.avg_pool2d(given, 2), scale_factor=2)
    assert torch.allclose(solved.values, means, atol=1e-6)


def test_silent_channels_are_no_equations() -> None:
    """Eight channels for eight numbers fit always, ten do not where one has a wrong bit."""
    known, _ = transition(images=2, window=2)
    signal = known.signal.clone()
    signal[:, 8:] = 0
    assert solve_projection([KnownSignal(known.layer, signal)]) is None
    signal[:, 8:10] = known.signal[:, 8:10]
    wrong = signal.clone()
    wrong[0, 3, :2, :2] = 0
    solved = solve_projection([KnownSignal(known.layer, wrong)])
    assert solved is None or solved.misfit > 1e-3


def test_nothing_is_told_where_few_channels_agree() -> None:
    known, _ = transition(images=2, window=2)
    known.signal[:, :24] = known.signal[:, :24].roll(1, 1)
    solved = solve_projection([known])
    assert solved is None or solved.misfit > 0.1


def test_nothing_is_told_where_all_is_determined_or_images_are_mixed() -> None:
    known, _ = transition(images=2, window=1)
    assert solve_projection([known]) is None
    same, _ = transition(images=2, window=2)
    same.signal[1] = same.signal[0]
    assert solve_projection([same]) is None


def test_what_gradients_say_of_the_input_is_weighted_by_singular_values() -> None:
    known, given = transition(images=1, window=1)
    signal = known.signal.clone()
    signal[:, 5:] = 0  # five equations for sixteen numbers of each channel
    gradient = torch.einsum("bchw,bkhw->ck", signal, given)[..., None, None]
    found = weighted_projection([KnownSignal(replace(known.layer, gradient=gradient), signal)])
    assert found is not None
    assert torch.allclose((given.flatten(2) @ found.matrix).reshape(given.shape), found.values, atol=1e-9)
    values = torch.linalg.eigvalsh(found.matrix[0])
    assert int((values > 1e-9).sum()) == 5
    assert abs(float(values[-1]) - 1) < 1e-9


def test_of_a_vector_gradients_say_nothing_that_guides_a_search() -> None:
    given, signal = torch.ones(1, 8, 1, 1, dtype=torch.float64), torch.ones(1, 4, 1, 1, dtype=torch.float64)
    weight = torch.ones(4, 8, 1, 1, dtype=torch.float64)
    layer = LayerEquations("weight", weight, weight, *ONE, 1, given.shape, signal.shape)
    assert weighted_projection([KnownSignal(layer, signal)]) is None


def test_a_network_of_linear_layers_is_refused_or_solved_where_its_update_is_coarse() -> None:
    image = torch.randint(256, (1, 3, 8, 8), generator=stream(0, "picture")) / 255
    for seed in range(3):
        with torch.random.fork_rng():
            torch.random.default_generator.manual_seed(seed)
            model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
        loss = functional.cross_entropy(model(image), torch.tensor([seed]))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        steps = [gradient.abs().max() / 127 for gradient in gradients]
        coarse = [(g / step).round() * step for g, step in zip(gradients, steps, strict=True)]
        update = dict(zip((name for name, _ in model.named_parameters()), coarse, strict=True))
        view = from_update(model, update, input_shape=(3, 8, 8), options=CapturedUpdateSettings(kind="gradient"))
        assert attacks.build("backsolve")(view) is not None


def test_what_gradients_say_of_several_images_is_not_told_apart() -> None:
    known, _ = transition(images=2, window=1)
    assert weighted_projection([known]) is None


class Pooled(nn.Module):
    """A network of which a 1x1 convolution is averaged before anything else takes it, as in a DenseNet's transition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.narrow = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 40, 1)
        self.top, self.head = nn.Conv2d(40, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(self.narrow(self.stem(x).relu()), 2)
        return self.head(self.top(x.relu()).relu().mean((2, 3)))


def test_a_picture_comes_back_from_means_of_its_features() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = Pooled()
    image = torch.randint(256, (1, 3, 8, 8), generator=stream(0, "picture")) / 255
    found = attacks.build("backsolve")(from_batch(model, image, torch.tensor([3]))[0])
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert float((found.inputs - image).abs().max()) < 1e-3
    assert found.verified


def test_means_of_features_count_as_many_equations_as_there_are_means() -> None:
    known, given = transition(images=1, window=2)
    solved = solve_projection([known])
    assert solved is not None
    images, projection = given.clone(), solved.projection  # 48 pixels, of which 12 means are compared
    target = FeatureTarget(solved.values, projection=projection)
    found = InvertedImages(images, torch.tensor([0.0]), torch.tensor([True]), torch.tensor([1]), 1)
    assert count_undetermined(lambda x: [x], lambda x: [x], [target], found, seed=0) == 36


def test_a_picture_that_is_met_exactly_ends_at_once() -> None:
    image = torch.rand((1, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = picture_search.search_pictures(lambda z: [z], lambda z: [z], [FeatureTarget(image)], image.shape, 0)
    assert int(found.steps) < 10
