import numpy as np
import pytest
import torch
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.label_skew import Dirichlet, Shards, dirichlet
from fl.data.partitions.partition import Partition, partitions
from fl.seeds import stream
from fl.types import Batch

BOTH = pytest.mark.parametrize("over", ["clients", "classes"])


def _dataset(num_classes: int = 10, train: int = 400, test: int = 100) -> Dataset:
    def part(each: int, seed: int) -> Batch:
        labels = torch.arange(num_classes * each) % num_classes
        return Batch(
            torch.zeros(len(labels), 1, 1, 1), labels[torch.randperm(len(labels), generator=stream(seed, "labels"))]
        )

    return Dataset(part(train, 0), part(test, 1), "made up", tuple(map(str, range(num_classes))), "")


def _counts(parts: tuple[Tensor, ...], batch: Batch, num_classes: int = 10) -> Tensor:
    return torch.stack([torch.bincount(batch.labels[index], minlength=num_classes) for index in parts])


def _check_owned_once(partition: Partition, dataset: Dataset, all_dealt: bool = True) -> None:
    for parts, batch in ((partition.train, dataset.train), (partition.test, dataset.test)):
        owned = torch.cat(parts)
        assert len(owned.unique()) == len(owned)
        assert not all_dealt or len(owned) == len(batch)
        assert all(torch.equal(part, part.sort().values) for part in parts)


@pytest.mark.parametrize("concentration", [(0.1,) * 4, (1.0,) * 4, (0.3, 1.5, 4.0, 0.8)])
def test_draws_have_the_moments_of_a_dirichlet_distribution(concentration: tuple[float, ...]) -> None:
    rows, alpha = 20_000, np.array(concentration)
    draws = dirichlet(alpha, rows, stream(0, "x"))
    assert draws.shape == (rows, 4)
    assert np.allclose(draws.sum(1), 1)
    total = alpha.sum()
    mean = alpha / total
    variance = mean * (1 - mean) / (total + 1)
    assert np.abs(draws.mean(0) - mean).max() < 4.5 * np.sqrt(variance.max() / rows)
    assert np.abs(draws.var(0) / variance - 1).max() < 0.08
    assert np.cov(draws[:, 0], draws[:, 1])[0, 1] == pytest.approx(-mean[0] * mean[1] / (total + 1), rel=0.15)


def test_tiny_concentrations_draw_corners() -> None:
    draws = dirichlet(np.full(5, 1e-6), 4000, stream(1, "x"))
    assert (draws.max(1) > 0.999).mean() > 0.999
    assert np.abs(np.bincount(draws.argmax(1), minlength=5) - 800).max() < 4.5 * np.sqrt(800)


@BOTH
@pytest.mark.parametrize("alpha", [0.1, 0.5, 10.0])
def test_dirichlet_deals_every_image_once_and_test_like_train(over: str, alpha: float) -> None:
    dataset = _dataset()
    partition = Dirichlet(alpha=alpha, clients=8, over=over)(dataset)
    _check_owned_once(partition, dataset)
    train, test = _counts(partition.train, dataset.train), _counts(partition.test, dataset.test)
    assert (train.sum(0) == 400).all()
    # the same fraction of every class, up to the rounding of both
    assert (train / 400 - test / 100).abs().max() <= 1 / 400 + 1 / 100
    sizes = train.sum(1)
    assert sizes.min() >= 10
    if over == "classes":
        assert (sizes - 500).abs().max() <= 10  # half an image for each edge of each class


@BOTH
def test_a_large_alpha_is_iid(over: str) -> None:
    dataset = _dataset()
    partition = Dirichlet(alpha=1e6, clients=8, over=over)(dataset)
    assert (_counts(partition.train, dataset.train) - 50).abs().max() <= 1
    assert ((_counts(partition.test, dataset.test) - 12.5).abs() <= 1.5).all()


def test_a_small_alpha_gives_every_class_to_one_client_or_every_client_one_class() -> None:
    dataset = _dataset()
    whole = _counts(Dirichlet(alpha=1e-6, clients=3, min_size=1)(dataset).train, dataset.train)
    assert ((whole == 0) | (whole == 400)).all()
    few = _counts(Dirichlet(alpha=1e-6, clients=100, over="classes")(dataset).train, dataset.train)
    assert (few.max(1).values >= 39).float().mean() > 0.7  # the last ones get what is left of other classes
    assert few[:10].sum(1).tolist() == [40] * 10
    assert (few[:10].max(1).values == 40).all()


def test_shares_of_the_classes_have_the_mean_and_variance_of_the_distribution() -> None:
    dataset, alpha, clients = _dataset(train=200, test=20), 0.5, 5
    seeds = range(60)
    counts = [
        _counts(Dirichlet(alpha=alpha, clients=clients, min_size=1, seed=s)(dataset).train, dataset.train)
        for s in seeds
    ]
    shares = torch.stack(counts).double() / 200  # (60, clients, K)
    assert (shares.mean((0, 2)) - 1 / clients).abs().max() < 0.04
    variance = (1 / clients) * (1 - 1 / clients) / (alpha * clients + 1)
    assert shares.var().item() == pytest.approx(variance, rel=0.1)


def test_a_class_without_images_is_left_out() -> None:
    dataset = _dataset()
    keep = dataset.train.labels != 3
    train = Batch(dataset.train.inputs[keep], dataset.train.labels[keep])
    some = Dataset(train, dataset.test, "made up", dataset.class_names, "")
    for over in ("clients", "classes"):
        partition = Dirichlet(clients=4, over=over)(some)
        _check_owned_once(partition, some, all_dealt=False)
        assert sum(map(len, partition.train)) == 3600


def test_draws_that_leave_a_client_bare_are_repeated_and_given_up() -> None:
    dataset = _dataset(train=40, test=20)
    assert min(map(len, Dirichlet(alpha=0.3, clients=8, min_size=12)(dataset).train)) >= 12
    with pytest.raises(
        ValueError, match=r"expected 10 training images .* each of 20 clients, .* alpha 1e-06: take a larger"
    ):
        Dirichlet(alpha=1e-6)(dataset)
    for settings, message in [
        ({"alpha": 0.0}, "alpha: expected a number >= 1e-06, got 0"),
        ({"alpha": float("nan")}, "alpha: expected"),
        ({"clients": 0}, "clients: expected a whole number >= 1, got 0"),
        ({"min_size": 0}, "min_size: expected a whole number >= 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Dirichlet(**settings)


@pytest.mark.parametrize(("clients", "shards"), [(20, 2), (7, 3), (100, 1)])
def test_shards_hold_few_classes(clients: int, shards: int) -> None:
    dataset = _dataset()
    partition = Shards(clients=clients, shards_per_client=shards)(dataset)
    _check_owned_once(partition, dataset)
    train, test = _counts(partition.train, dataset.train), _counts(partition.test, dataset.test)
    assert (train.sum(1) - 4000 / clients).abs().max() <= shards
    assert (train > 0).sum(1).max() <= 2 * shards  # a shard reaches into two classes at most
    assert (train / 400 - test / 100).abs().max() <= 1 / 100
    assert not ((test > 0) & (train == 0)).any()


def test_shards_of_whole_divisors_hold_one_class_each() -> None:
    dataset = _dataset()
    train = _counts(Shards(clients=20)(dataset).train, dataset.train)
    assert set(train.flatten().tolist()) <= {0, 100, 200}
    with pytest.raises(ValueError, match="expected at most 4000 shards, one for each training image, got 4002"):
        Shards(clients=2001)(dataset)
    with pytest.raises(ValueError, match=r"expected a test image for every client.*take fewer clients"):
        Shards(clients=1000)(dataset)
    with pytest.raises(ValueError, match="shards_per_client: expected a whole number >= 1, got 0"):
        Shards(shards_per_client=0)


def test_skewed_partitions_never_change() -> None:
    dataset = _dataset()
    digests = {
        over: Dirichlet(alpha=0.5, clients=8, over=over, seed=4)(dataset).digest for over in ("clients", "classes")
    }
    digests["shards"] = Shards(clients=8, seed=4)(dataset).digest
    assert digests == DIGESTS
    assert Dirichlet(clients=8, seed=5)(dataset).digest != digests["clients"]


DIGESTS = {
    "clients": "0f0d789ef5c0f419c294f12c1bca533b710efd423e3d00803e6581cc7dd6e427",
    "classes": "4074499309c0a4611d6190eac6891cecfbbb93ea337a94685d0e01f9fbec58c6",
    "shards": "42ee667d212a7c8c7acbd381255da32b17e396b53813de866662683f778ff7f8",
}


def test_settings_come_from_plain_data() -> None:
    assert partitions.build({"name": "dirichlet", "alpha": 0.25, "over": "classes"}) == Dirichlet(
        alpha=0.25, over="classes"
    )
    with pytest.raises(ValueError, match="over"):
        partitions.build({"name": "dirichlet", "over": "images"})
    for name in ("dirichlet", "shards"):
        assert name in partitions.names()
