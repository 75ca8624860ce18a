"""Data sets of several domains, and the split that leaves one of them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fl.data import Dataset, Groups, load
from fl.data.partitions.leave_one_domain_out import LeaveOneOut, deal_domains
from fl.data.partitions.partition import Partition, partitions
from fl.data.sources.npz_files import DATA_VARIABLE, DatasetMissingError
from fl.registry import UnknownNameError
from fl.types import Batch

DOMAINS, CLASSES = ("art", "photo", "sketch"), ("cat", "dog")


def pixels(number: int, size: int = 8) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)


def fill(root: Path, each: int = 10) -> None:
    for d, domain in enumerate(DOMAINS):
        for k, name in enumerate(CLASSES):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(each):
                Image.fromarray(pixels(1000 * d + 100 * k + i)).save(folder / f"{i}.png")


def owner_of(image: Tensor) -> tuple[int, int]:
    """Domain and label of an image made by `fill`."""
    found = (image * 255).round().byte().permute(1, 2, 0).numpy()
    return next(
        (d, k) for d in range(3) for k in range(2) for i in range(10) if (found == pixels(1000 * d + 100 * k + i)).all()
    )


def test_folders_of_domains(tmp_path: Path) -> None:
    fill(tmp_path)
    dataset = load("domain-folder", path=str(tmp_path), size=8, test_share=0.2)
    assert dataset.class_names == CLASSES
    assert (len(dataset.train), len(dataset.test)) == (48, 12)
    groups = dataset.groups
    assert groups is not None
    assert groups.names == DOMAINS
    for part, of, each in ((dataset.train, groups.train, 8), (dataset.test, groups.test, 2)):
        assert (of * 2 + part.labels).bincount().tolist() == [each] * 6
        assert of.tolist() != sorted(of.tolist())
        for image, label, domain in zip(part.inputs, part.labels.tolist(), of.tolist(), strict=True):
            assert owner_of(image) == (domain, label)
    limited = load("domain-folder", path=str(tmp_path), size=8, test_share=0.2, limit=7)
    assert torch.equal(limited.train.inputs, dataset.train.inputs[:7])
    assert limited.groups is not None
    assert torch.equal(limited.groups.train, groups.train[:7])
    with pytest.raises(ValueError, match="expected limit of at most 54 images, got 55"):
        load("domain-folder", path=str(tmp_path), limit=55)  # a tenth of 10 is held out of each class


def test_domains_with_other_classes_are_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "sketch" / "dog").rename(tmp_path / "sketch" / "wolf")
    with pytest.raises(ValueError, match=r"expected only the classes of the training images .* wolf"):
        load("domain-folder", path=str(tmp_path))


@pytest.mark.parametrize(("name", "folder"), [("pacs", "pacs"), ("office-home", "office_home"), ("vlcs", "VLCS")])
def test_the_named_ones_lie_in_the_data_folder(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    with pytest.raises(DatasetMissingError, match=r"pacs64.npz|folder for each domain"):
        load(name)
    fill(tmp_path / folder)
    dataset = load(name, size=4)
    assert (dataset.name, dataset.input_shape, len(dataset.test)) == (name, (3, 4, 4), 6)


def test_pacs_from_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    images = np.stack([pixels(i, 64) for i in range(40)])
    domains, labels = np.arange(40) % 2, np.arange(40) // 2 % 2
    common = {"images": images, "labels": labels, "class_names": np.array(CLASSES)}
    np.savez(tmp_path / "pacs64.npz", **common)
    with pytest.raises(ValueError, match="got no domain_names, domains"):
        load("pacs")
    np.savez(tmp_path / "pacs64.npz", **common, domains=domains + 1, domain_names=np.array(["a", "b"]))
    with pytest.raises(ValueError, match=r"expected domains int \[40\] in \[0, 2\)"):
        load("pacs")
    np.savez(tmp_path / "pacs64.npz", **common, domains=domains, domain_names=np.array(["a", "b"]))
    whole, small = load("pacs", size=64), load("pacs")
    assert whole.input_shape == (3, 64, 64)
    assert small.input_shape == (3, 32, 32)
    assert small.groups is not None
    for image, tiny, label, domain in zip(
        whole.train.inputs, small.train.inputs, small.train.labels.tolist(), small.groups.train.tolist(), strict=True
    ):
        found = (image * 255).round().byte().permute(1, 2, 0).numpy()
        at = next(i for i in range(40) if (images[i] == found).all())
        assert (label, domain) == (labels[at], domains[at])
        expected = np.asarray(Image.fromarray(images[at]).resize((32, 32), Image.Resampling.BICUBIC))
        assert torch.equal((tiny * 255).round().byte().permute(1, 2, 0), torch.from_numpy(expected.copy()))


# ---- Algorithm 5 -----------------------------------------------------------------------------------------------------
def algorithm_5(sizes: list[int], clients: int, d: int) -> list[list[int]]:
    """Word by word: the domains of every client."""
    a, b = clients * d // len(sizes), clients * d % len(sizes)
    largest = sorted(range(len(sizes)), key=lambda j: -sizes[j])[:b]
    subsets = {j: [j] * (a + 1 if j in largest else a) for j in range(len(sizes))}
    mine: list[list[int]] = [[] for _ in range(clients)]
    for _ in range(d):
        for i in range(clients):
            for pieces in subsets.values():
                if pieces:
                    mine[i].append(pieces.pop(0))
                    break
    return mine


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[5, 5, 5], [3, 9, 4], [1, 2, 8]])
def test_domains_are_dealt_by_algorithm_5(clients: int, d: int, sizes: list[int]) -> None:
    if clients * d < 3:
        with pytest.raises(ValueError, match="some domain would go to nobody"):
            deal_domains(sizes, clients, d)
        return
    owners = deal_domains(sizes, clients, d)
    found = [[j for j, held in enumerate(owners) if i in held] for i in range(clients)]
    assert found == algorithm_5(sizes, clients, d)
    assert all(len(set(mine)) == d for mine in found)


def dataset(sizes: tuple[int, ...] = (30, 50, 40, 20), tests: int = 12) -> Dataset:
    train = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    test = torch.arange(4).repeat_interleave(tests)
    train, test = (x[torch.randperm(len(x), generator=torch.Generator().manual_seed(7))] for x in (train, test))
    parts = [Batch(torch.zeros(len(x), 1, 1, 1), torch.zeros(len(x), dtype=torch.int64)) for x in (train, test)]
    return Dataset(*parts, "made up", ("a", "b"), "", Groups(train, test, ("w", "x", "y", "z")))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_last_client_has_the_domain_left_out(d: int) -> None:
    data = dataset()
    groups = data.groups
    assert groups is not None
    found = partitions.build({"name": "domains", "leave_out": "x", "per_client": d})(data)
    assert len(found) == 4
    assert found.overlap == {"train": 0, "test": 0}
    for part, of in ((found.train, groups.train), (found.test, groups.test)):
        assert torch.equal(part[3], (of == 1).nonzero().flatten())
        assert sorted(torch.cat(part).tolist()) == list(range(len(of)))
        for index in part[:3]:
            assert len(of[index].unique()) == d
            assert index.tolist() == sorted(index.tolist())
    for train, test in zip(found.train[:3], found.test[:3], strict=True):  # tested on the domains it trains on
        assert torch.equal(groups.train[train].unique(), groups.test[test].unique())
    again = partitions.build({"name": "domains", "leave_out": "x", "per_client": d, "seed": 1})(data)
    assert (again.digest == found.digest) == (d == 1)  # one whole domain for each leaves nothing to chance


def test_shots_go_to_the_clients_and_not_to_the_score() -> None:
    data = dataset()
    assert data.groups is not None
    found = LeaveOneOut(leave_out="x", shots=4)(data)
    assert found.overlap == {"train": 0, "test": 0}
    target = data.groups.train == 1
    assert [int(target[index].sum()) for index in found.train] == [4, 4, 4, 50 - 12]
    assert all(int((data.groups.test[index] == 1).sum()) == 0 for index in found.test[:3])
    with pytest.raises(ValueError, match="expected shots of at most 16 for 3 clients, got 17"):
        LeaveOneOut(leave_out="x", shots=17)(data)


def test_clients_may_be_scored_on_the_domain_left_out() -> None:
    data = dataset()
    assert data.groups is not None
    found = LeaveOneOut(leave_out="z", score="left-out")(data)
    assert all(torch.equal(index, (data.groups.test == 3).nonzero().flatten()) for index in found.test)
    assert LeaveOneOut(leave_out="z")(data).train[0].tolist() == found.train[0].tolist()


def test_what_cannot_be_left_out_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'x'"):
        LeaveOneOut(leave_out="X")(dataset())
    with pytest.raises(ValueError, match="expected per_client from 1 to 3, got 4"):
        LeaveOneOut(leave_out="x", per_client=4)(dataset())
    with pytest.raises(ValueError, match="at least 3 test images of 'w', got 2"):
        LeaveOneOut(leave_out="x", clients=9)(dataset(tests=2))
    with pytest.raises(ValueError, match="expected a data set with domains"):
        LeaveOneOut(leave_out="x")(load("faces"))
    for settings in ({"clients": -1}, {"shots": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected a whole number"):
            LeaveOneOut(leave_out="x", **settings)


def test_a_saved_partition_belongs_to_its_domains(tmp_path: Path) -> None:
    data, path = dataset(), tmp_path / "p.json"
    found = LeaveOneOut(leave_out="x")(data)
    found.save(path, data)
    assert Partition.load(path, data).digest == found.digest
    other = dataset((50, 30, 40, 20))
    with pytest.raises(ValueError, match="expected a partition of groups"):
        Partition.load(path, other)
