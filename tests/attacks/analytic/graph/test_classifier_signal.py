"""What flows back into a classifier follows with the sizes of what is known below."""

import torch
from torch import Tensor

from attacks.analytic.graph.classifier_signal import Features, find_classifier_signal
from fl.seeds import stream


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(0, "classifier-signal", *map(str, shape)), dtype=torch.float64)


def victim(images: int, classes: int = 10) -> tuple[Tensor, Features, Tensor, Tensor]:
    """A gradient, the features of its images by their sizes, what flows back, and the sizes."""
    one, other, sizes = randn(images, 64, 16), randn(images, 64, 16) + 0.1, 10 ** (randn(images) / 2)

    def features(given: Tensor) -> Tensor:
        pooled = (one * given[:, None, None] + other).relu().mean(2)
        return torch.cat([pooled, torch.ones_like(pooled[:, :1])], 1)

    signal = torch.nn.functional.one_hot(torch.arange(images) // 2, classes) - randn(images, classes).softmax(1)
    return signal.mT @ features(sizes), features, signal, sizes


def test_signals_and_sizes_explain_the_gradient() -> None:
    """Two of five images have one label."""
    gradient, features, signal, sizes = victim(5)
    found = find_classifier_signal(gradient, features, 5)
    assert found is not None
    torch.testing.assert_close(found.sizes, sizes, rtol=1e-8, atol=0)
    torch.testing.assert_close(found.signal, signal, rtol=1e-7, atol=1e-9)


def test_more_images_than_independent_rows_are_not_told() -> None:
    gradient, features, _, _ = victim(5, classes=4)
    assert find_classifier_signal(gradient, features, 5) is None


def test_features_of_other_images_are_not_believed() -> None:
    gradient, features, _, _ = victim(3)
    assert find_classifier_signal(gradient, lambda sizes: features(sizes).roll(1, 1), 3) is None


def test_features_proportional_to_a_size_do_not_tell_it() -> None:
    features, sizes, signal = randn(3, 24), 10 ** randn(3), randn(3, 10)
    gradient = signal.mT @ (features * sizes[:, None])
    assert find_classifier_signal(gradient, lambda given: features * given[:, None], 3) is None
