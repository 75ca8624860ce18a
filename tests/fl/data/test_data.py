import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fl.data import Dataset, datasets, load, stratified_split
from fl.data.sources.npz_files import DatasetMissingError, Npz, read_batch, save_images
from fl.registry import UnknownNameError

FOLDER = os.environ.get("HYPERLEAK_DATA", "")
needs_files = pytest.mark.skipif(not Path(FOLDER, "cifar10_train.npz").is_file(), reason="HYPERLEAK_DATA has no files")


def _check(dataset: Dataset) -> None:
    for part in (dataset.train, dataset.test):
        assert part.inputs.dtype == torch.float32
        assert part.labels.dtype == torch.int64
        assert part.inputs.shape == (len(part.labels), *dataset.input_shape)
        assert part.inputs.min() >= 0
        assert part.inputs.max() <= 1
        assert part.labels.min() >= 0
        assert part.labels.max() < dataset.num_classes


def _floor(image: torch.Tensor) -> float:
    """PSNR of the constant mean color."""
    return float(-10 * (image - image.mean((1, 2), keepdim=True)).square().mean().log10())


def test_faces_are_split_alike_and_stay_what_they_are() -> None:
    dataset = load("faces")
    _check(dataset)
    assert dataset.input_shape == (1, 28, 28)
    assert dataset.train.labels.bincount().tolist() == [80, 80]
    assert dataset.test.labels.bincount().tolist() == [20, 20]
    assert dataset.train.labels[:10].unique().numel() == 2  # not one class after the other
    whole = torch.cat([dataset.train.inputs, dataset.test.inputs]).flatten(1)
    assert len(whole.unique(dim=0)) == 200
    labels = torch.cat([dataset.train.labels, dataset.test.labels])
    # aligned faces lie closer to their mean image than crops of anything else
    spread = [(whole[labels == k] - whole[labels == k].mean(0)).square().mean().item() for k in (0, 1)]
    assert spread[0] < 0.6 * spread[1]
    assert torch.equal(load("faces").train.inputs, dataset.train.inputs)
    assert not torch.equal(load("faces", seed=1).train.inputs, dataset.train.inputs)


def test_faces_keep_their_own_size_on_request() -> None:
    assert load("faces", size=25).input_shape == (1, 25, 25)
    assert load("faces", size=32, test_share=0.5).test.inputs.shape == (100, 1, 32, 32)


@pytest.mark.parametrize(
    ("mode", "size", "floors"),
    [("color", 32, (11.10, 19.00, 12.68, 18.79)), ("gray", 28, (11.70, 19.67, 12.93, 19.22))],
)
def test_photographs_have_the_known_floors(mode: str, size: int, floors: tuple[float, ...]) -> None:
    dataset = load("photos", mode=mode, size=size)
    _check(dataset)
    assert dataset.input_shape == (3 if mode == "color" else 1, size, size)
    assert dataset.train.labels.tolist() == [1, 3, 5, 7]
    assert dataset.test.labels.tolist() == [0, 2, 4, 6, 8, 9]
    assert [_floor(image) for image in dataset.train.inputs] == pytest.approx(floors, abs=0.006)
    assert torch.equal((dataset.train.inputs * 255).round() / 255, dataset.train.inputs)


def test_photographs_come_by_name() -> None:
    dataset = load("photos", names=["retina", "camera"])
    assert dataset.train.labels.tolist() == [6, 8]
    assert len(dataset.test) == 8
    with pytest.raises(ValueError, match=r"unknown photograph 'chelsee'; did you mean 'chelsea'"):
        load("photos", names=["chelsee"])
    with pytest.raises(ValueError, match="expected names of different photographs"):
        load("photos", names=["coffee", "coffee"])


def test_a_stratified_split_is_a_partition() -> None:
    labels = torch.tensor([0, 1, 1, 0, 2, 2, 2, 2, 0, 1])
    train, test = stratified_split(labels, 0.34, seed=3)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(10))
    assert labels[test].bincount().tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"test_share in \(0, 1\), got 1"):
        stratified_split(labels, 1.0, seed=0)
    with pytest.raises(ValueError, match="class 0 on both sides, got 0 of 3 for test: take another test_share"):
        stratified_split(labels, 0.1, seed=0)


def _images(count: int, channels: int = 3, size: int = 6) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, channels), dtype=np.uint8)


def test_a_saved_file_comes_back(tmp_path: Path) -> None:
    images, labels = _images(20), np.arange(20) % 4
    save_images(tmp_path / "mine.npz", images, labels, ["a", "b", "c", "d"])
    batch, names = read_batch(tmp_path / "mine.npz")
    assert names == ("a", "b", "c", "d")
    assert torch.equal((batch.inputs * 255).round().to(torch.uint8), torch.from_numpy(images).permute(0, 3, 1, 2))
    assert batch.labels.tolist() == labels.tolist()
    dataset = load("npz", train=str(tmp_path / "mine.npz"), test_share=0.2)
    _check(dataset)
    assert (len(dataset.train), len(dataset.test), dataset.name) == (16, 4, "mine")
    with pytest.raises(ValueError, match="expected labels"):
        save_images(tmp_path / "bad.npz", images, labels + 1, ["a", "b", "c", "d"])
    assert [p.name for p in tmp_path.iterdir()] == ["mine.npz"]  # nothing half-written


def test_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path))
    for part, count in (("train", 12), ("test", 4)):
        save_images(tmp_path / f"mnist_{part}.npz", _images(count, channels=1), np.arange(count) % 2, ["0", "1"])
    dataset = load("mnist", limit=5)
    _check(dataset)
    assert (len(dataset.train), len(dataset.test), dataset.input_shape) == (5, 4, (1, 6, 6))
    assert len(load("npz", train="mnist").train) == 12
    assert len(load("npz", train="mnist_test.npz", test="mnist_train.npz", test_limit=3).test) == 3
    with pytest.raises(ValueError, match="limit of at most 12 images, got 13"):
        load("mnist", limit=13)
    with pytest.raises(ValueError, match="limit: expected a whole number >= 1 or null, got 0"):
        load("mnist", limit=0)


def test_a_missing_file_says_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPERLEAK_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        DatasetMissingError,
        match=r"no file cifar10_train\.npz: looked for cifar10_train\.npz and .*cache/hyperleak/data/cifar10_train\.npz"
        r"; .* \(HYPERLEAK_DATA is not set\)\. Run `hyperleak doctor --download cifar10`, or set HYPERLEAK_DATA .*save",
    ):
        load("cifar10")
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path))
    save_images(tmp_path / "orl.npz", _images(2), np.zeros(2, dtype=int), ["a"])
    with pytest.raises(FileNotFoundError, match=r"looked for .*cifar10_train\.npz; that folder has orl\.npz\. Run"):
        load("cifar10")
    with pytest.raises(FileNotFoundError, match=r"that folder has orl\.npz\. Set HYPERLEAK_DATA"):  # not published
        load("handwritten62")
    with pytest.raises(UnknownNameError, match=r"unknown dataset 'cifar'; did you mean 'cifar10' or 'cifar100'\?"):
        load("cifar")


def test_gray_images_need_no_axis_of_channels_and_classes_no_names(tmp_path: Path) -> None:
    images = _images(4, channels=1)
    np.savez(tmp_path / "x.npz", images=images[..., 0], labels=np.array([2, 0, 5, 2]))
    batch, names = read_batch(tmp_path / "x.npz")
    save_images(tmp_path / "y.npz", images, np.array([2, 0, 5, 2]), list("012345"))
    other, others = read_batch(tmp_path / "y.npz")
    assert torch.equal(batch.inputs, other.inputs)
    assert batch.labels.tolist() == other.labels.tolist() == [2, 0, 5, 2]
    assert names == others


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, 2, 3, 3], "none of 0 up to 3: if they count from 1, write labels - 1; if there are such classes"),
        ([0, 2, 2, 5], "none of 1, 3, 4 up to 5: numpy.unique"),
        ([7, 8, 8, 7], "if they count from 7, write labels - 7"),
    ],
)
def test_classes_that_go_by_their_numbers_have_to_have_images_to_train_on(labels, message, tmp_path: Path) -> None:
    arrays = {"images": _images(4), "labels": np.array(labels)}
    np.savez(tmp_path / "x.npz", **arrays)
    np.savez(tmp_path / "named.npz", **arrays, class_names=np.array(list("abcdefghi")))
    for test in (None, str(tmp_path / "x.npz")):
        with pytest.raises(ValueError, match=message):
            load("npz", train=str(tmp_path / "x.npz"), test=test)
    named = str(tmp_path / "named.npz")
    assert load("npz", train=named, test=named).num_classes == 9  # which was said


GOOD = {"images": _images(4), "labels": np.arange(4), "class_names": np.array(list("abcd"))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "expected images, labels in .*, got no labels"),
        ({"images": _images(4).astype(np.float32)}, r"expected images uint8 .*, got float32 \(4, 6, 6, 3\)"),
        ({"images": _images(4).astype(np.int64)}, r"got int64 .*; they fit: write images.astype\('uint8'\)$"),
        ({"images": _images(4).astype(np.int64) - 300}, r"got int64 \(4, 6, 6, 3\)$"),
        ({"images": np.zeros((4, 6, 6, 4), np.uint8)}, r"if the fourth channel is opacity, write images\[..., :3\]$"),
        ({"images": _images(4)[..., 0, 0]}, r"expected images uint8 .*, got uint8 \(4, 6\)"),
        ({"images": _images(4)[..., 0].astype(np.float32)}, r"expected images uint8 .*, got float32 \(4, 6, 6\)"),
        ({"images": _images(4).transpose(0, 3, 1, 2)}, r"expected images uint8 .*, got uint8 \(4, 3, 6, 6\)"),
        ({"images": _images(4)[:0], "labels": np.arange(0)}, r"expected images in .*, got none"),
        ({"labels": np.arange(3)}, r"expected labels int \[4\] in .*, got int64 \(3,\)"),
        ({"labels": np.arange(4.0)}, r"expected labels int \[4\] in .*, got float64"),
        ({"labels": np.arange(4) - 1}, r"expected labels in \[0, 4\) in .*, got -1 to 2"),
        ({"labels": np.arange(4) - 1, "class_names": None}, r"expected labels in \[0, 3\) in .*, got -1 to 2"),
        ({"labels": np.arange(4.0), "class_names": None}, r"expected labels int \[4\] in .*, got float64"),
        (
            {"labels": np.array([0, 1, 2, 10**12]), "class_names": None},
            r"in \[0, 65536\) in .*, got 0 to 1000000000000",
        ),
        ({"labels": np.arange(4) + 1}, r"got 1 to 4; they seem to count from 1: write labels - 1"),
        ({"labels": np.eye(4)}, r"they are one-hot: write labels.argmax\(1\)"),
        ({"labels": np.arange(4)[:, None]}, r"write labels\[:, 0\]$"),
        ({"labels": np.arange(4.0)}, r"they are whole: write labels.astype\('int64'\)"),
        ({"labels": np.arange(4) + 0.5}, "a data set has classes, not numbers"),
        ({"labels": np.array(list("abcd"))}, r"class_names, labels = numpy.unique\(labels, return_inverse=True\)"),
        ({"class_names": np.arange(4)}, "expected class_names as a list of strings"),
        ({"class_names": np.array(list("abcd"), dtype=object)}, "expected a .npz file without objects"),
    ],
)
def test_a_wrong_file_says_which_key(change: dict[str, object], message: str, tmp_path: Path) -> None:
    arrays = {key: value for key, value in (GOOD | change).items() if value is not None}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_batch(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"text"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a \.npz file without objects, got .*x\.npz"):
        read_batch(tmp_path / "x.npz")


def test_train_and_test_files_must_agree(tmp_path: Path) -> None:
    save_images(tmp_path / "a.npz", _images(4), np.arange(4) % 2, ["a", "b"])
    save_images(tmp_path / "b.npz", _images(4, channels=1), np.arange(4) % 2, ["a", "b"])
    save_images(tmp_path / "c.npz", _images(4), np.arange(4) % 2, ["b", "a"])
    with pytest.raises(ValueError, match=r"expected test images \(3, 6, 6\) as the training images"):
        load("npz", train=str(tmp_path / "a.npz"), test=str(tmp_path / "b.npz"))
    with pytest.raises(
        ValueError, match=r"expected the class_names of the training file in .*c\.npz, a, b, got b, a: write"
    ):
        load("npz", train=str(tmp_path / "a.npz"), test=str(tmp_path / "c.npz"))


def test_specs_of_datasets_round_trip() -> None:
    for _, source in datasets.examples():
        assert datasets.build(datasets.spec(source)) == source
    assert datasets.build({"name": "npz", "train": "x", "limit": 7}) == Npz(train="x", limit=7)


@needs_files
@pytest.mark.parametrize(
    ("name", "shape", "classes", "counts"),
    [("cifar10", (3, 32, 32), 10, (15_000, 5_000)), ("handwritten62", (1, 28, 28), 62, (4_805, 930))],
)
def test_real_sets_have_their_published_counts(
    name: str, shape: tuple[int, int, int], classes: int, counts: tuple[int, int]
) -> None:
    dataset = load(name)
    _check(dataset)
    assert dataset.input_shape == shape
    assert dataset.num_classes == classes
    assert (len(dataset.train), len(dataset.test)) == counts
    assert dataset.train.labels.unique().numel() == classes
