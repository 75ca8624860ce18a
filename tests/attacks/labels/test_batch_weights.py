"""How much an example counts in a batch under losses that weigh classes: told by trying batches of classes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.elsewhere import ELSEWHERE, elsewhere
from support.pictures import STEP
from torch import Tensor, nn

import attacks
from attacks.labels.batch_weights import batch_weights
from fl.capture import from_batch
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.losses import Loss
from fl.losses.cross_entropy import CrossEntropy
from fl.losses.function import GivenFunction, build_loss, known_loss
from fl.seeds import stream
from fl.types import Batch, Task

CLASSES = 4
WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 10.0])
SHAPE = torch.Size([CLASSES])


def ignoring(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, ignore_index=1)


def centered(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs - 0.3 * outputs.mean(0), labels)


def test_weighted_cross_entropy_counts_an_example_by_its_class_over_the_mean() -> None:
    loss = known_loss(build_loss(nn.CrossEntropyLoss(weight=WEIGHTS)), SHAPE)
    found = batch_weights(loss, SHAPE, CLASSES, 2)
    assert found is not None
    for weight, told in zip(WEIGHTS.double(), found, strict=True):
        expected = (2 * weight / (weight + WEIGHTS.double())).sort().values
        assert torch.allclose(told, expected, atol=1e-5)


def test_plain_means_count_all_the_same_and_other_losses_none() -> None:
    for loss in (CrossEntropy(), known_loss(build_loss(nn.CrossEntropyLoss(label_smoothing=0.2)), SHAPE)):
        found = batch_weights(loss, SHAPE, CLASSES, 3)
        assert found is not None
        assert all(told.tolist() == [1.0] for told in found)
    assert batch_weights(known_loss(build_loss(centered), SHAPE), SHAPE, CLASSES, 2) is None
    assert batch_weights(known_loss(build_loss(nn.CrossEntropyLoss(weight=WEIGHTS)), SHAPE), SHAPE, CLASSES, 40) is None


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHTS), nn.CrossEntropyLoss(weight=WEIGHTS.flip(0))])
def test_analytic_reads_each_image_of_a_batch_under_weights_of_classes_once(loss: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    images = torch.randint(256, (2, 1, 8, 8), generator=stream(0, "batch weights test")) / 255
    view, truth = from_batch(model, images, torch.tensor([0, 3]), loss=loss)
    result = attacks.build("analytic")(view)
    assert isinstance(result, attacks.Reconstruction)
    assert result.inputs is not None
    assert result.verified
    assert len(result.inputs) == 2
    assert (result.inputs - truth.inputs[result.labels.argsort().argsort()]).abs().max() < 1e-3


def balanced(outputs: Tensor, labels: Tensor) -> Tensor:
    times = torch.bincount(labels, minlength=outputs.shape[1]).to(outputs)
    return F.cross_entropy(outputs, labels, weight=torch.where(times > 0, 1 / times.clamp(min=1), 0))


def by_effective_number(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cui et al., CVPR 2019, with the batch's own counts."""
    times = torch.bincount(labels, minlength=outputs.shape[1]).clamp(min=1)
    weights = (1 - 0.9) / (1 - 0.9**times)
    return F.cross_entropy(outputs, labels, weight=(weights / weights.sum() * len(times)).to(outputs))


def by_root(outputs: Tensor, labels: Tensor) -> Tensor:
    times = torch.bincount(labels, minlength=outputs.shape[1]).to(outputs)
    return (F.cross_entropy(outputs, labels, reduction="none") / times[labels].sqrt()).sum()


@pytest.mark.parametrize("classes", [4, 30])
def test_weights_by_how_often_classes_occur_in_the_batch_are_told(classes: int) -> None:
    shape = torch.Size([classes])
    found = batch_weights(known_loss(build_loss(balanced), shape), shape, classes, 4)
    assert found is not None
    expected = torch.tensor([2 / 3, 1.0, 4 / 3, 2.0], dtype=torch.float64)  # of 3 of 4; 1 of 3 has 4/3, 2 of 3 has 2/3
    for told in found:
        assert all(bool((told - one).abs().min() < 1e-5) for one in expected)
        assert all(bool((expected - one).abs().min() < 1e-5) for one in told)


@pytest.mark.parametrize("loss", [balanced, by_effective_number, by_root])
@pytest.mark.parametrize(("classes", "labels"), [(4, [0, 0, 3]), (4, [0, 0, 0]), (30, [1, 1, 1, 2])])
def test_analytic_reads_a_batch_under_weights_by_its_own_labels(loss, classes: int, labels: list[int]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, classes))
    images = torch.randint(256, (len(labels), 1, 8, 8), generator=stream(2, "batch weights test")) / 255
    view, truth = from_batch(model, images, torch.tensor(labels), loss=loss)
    result = attacks.build("analytic")(view)
    assert isinstance(result, attacks.Reconstruction)
    assert result.inputs is not None
    assert result.verified
    distances = torch.cdist(result.inputs.flatten(1), truth.inputs.flatten(1))
    assert float(distances.amin(1).max()) < 1e-3
    assert result.labels.tolist() == truth.labels[distances.argmin(1)].tolist()


def weighted() -> Loss:
    return GivenFunction(call=nn.CrossEntropyLoss(weight=WEIGHTS.to(ELSEWHERE)), targets="classes")


@pytest.mark.parametrize("loss", [CrossEntropy, weighted])
def test_analytic_reads_a_batch_on_another_device(loss) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    images = torch.randint(256, (2, 1, 8, 8), generator=stream(0, "batch weights test")) / 255
    with elsewhere():
        task = replace(Task(model, (1, 8, 8), CLASSES, "3.").to(device=ELSEWHERE), loss=loss())
        batch = Batch(images.to(ELSEWHERE), torch.tensor([0, 3]).to(ELSEWHERE))
        client = Client(task, replace(STEP, batch_size=None))
        found = attacks.build("analytic")(Federation(client, [ClientData(batch, batch)]).observe(0)[0])
        assert isinstance(found, attacks.Reconstruction)
        assert found.verified
        assert found.inputs is not None
        distances = torch.cdist(found.inputs.cpu().flatten(1), images.flatten(1))
    assert len(distances) == 2
    assert distances.amin(0).max() < 1e-3


def test_analytic_reads_the_image_that_counts_beside_an_ignored_one() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    images = torch.randint(256, (2, 1, 8, 8), generator=stream(1, "batch weights test")) / 255
    view, truth = from_batch(model, images, torch.tensor([1, 3]), loss=ignoring)
    result = attacks.build("analytic")(view)
    assert isinstance(result, attacks.Reconstruction)
    assert result.inputs is not None
    assert (result.inputs - truth.inputs[1:]).abs().max() < 1e-3


def test_a_loss_that_takes_no_example_alone_counts_all_the_same() -> None:
    def refusing(outputs: Tensor, labels: Tensor) -> Tensor:
        if len(labels) < 2:
            raise ValueError("expected two examples or more")
        return F.cross_entropy(outputs, labels)

    loss = GivenFunction(call=refusing, targets="classes")
    found = batch_weights(loss, SHAPE, CLASSES, 2)
    assert found is not None
    assert all(told.tolist() == [1.0] for told in found)
