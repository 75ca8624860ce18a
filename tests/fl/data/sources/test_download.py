import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fl.data import datasets, load
from fl.data.sources import download as downloads
from fl.data.sources.benchmark_sets import available_sets
from fl.data.sources.download import download, downloadable_sets
from fl.data.sources.npz_files import DatasetMissingError, Npz, data_folder, read_batch, save_images
from fl.registry import UnknownNameError


def _random(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def _idx(path: Path, array: NDArray[np.uint8]) -> None:
    """A file in the format of MNIST: magic number, sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def _pixels(path: Path) -> NDArray[np.uint8]:
    """What a written file holds, (N, H, W, C)."""
    batch, _ = read_batch(path)
    return (batch.inputs * 255).round().byte().permute(0, 2, 3, 1).numpy()


@pytest.fixture(autouse=True)
def _any_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets made up for tests are smaller than those published."""
    if "published" not in request.node.name:
        monkeypatch.setattr(downloads, "_check_published", lambda *_: None)


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_a_made_up_set_does_not_pass_for_the_published_one(name: str, kind: str, tmp_path: Path) -> None:
    raw = tmp_path / "source" / kind / "raw"
    for part in ("train", "t10k"):
        _idx(raw / f"{part}-images-idx3-ubyte", _random(100, 28, 28))
        _idx(raw / f"{part}-labels-idx1-ubyte", np.arange(100, dtype=np.uint8) % 10)
    with pytest.raises(
        ValueError, match=f"expected the 60000 images of {name}'s train part in .*, got 100; it is another"
    ):
        download(name, tmp_path / "data", source=tmp_path / "source")
    assert [*(tmp_path / "data").iterdir()] == []


def test_digits_are_counted_against_the_published_ones() -> None:
    right = np.repeat(np.arange(10), downloads.MNIST_CLASSES[1])
    downloads._check_published("mnist", "test", right, Path("source"))
    wrong = right.copy()
    wrong[0] = 9
    with pytest.raises(ValueError, match="expected MNIST's images of each digit"):
        downloads._check_published("mnist", "test", wrong, Path("source"))


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_files_are_converted(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path / "data"))
    raw = tmp_path / "source" / kind / "raw"
    images = {"train": _random(20, 28, 28), "t10k": _random(10, 28, 28, seed=1)}
    for part, pixels in images.items():
        _idx(raw / f"{part}-images-idx3-ubyte", pixels)
        _idx(raw / f"{part}-labels-idx1-ubyte", np.arange(len(pixels), dtype=np.uint8) % 10)
    paths = download(name, source=tmp_path / "source")
    assert paths == [tmp_path / "data" / f"{name}_{part}.npz" for part in ("train", "test")]
    assert sorted(entry.name for entry in (tmp_path / "data").iterdir()) == sorted(path.name for path in paths)
    assert (_pixels(paths[0])[..., 0] == images["train"]).all()
    dataset = load(name)
    assert dataset.test.labels.tolist() == list(range(10))
    assert dataset.class_names[:2] == (("0", "1") if name == "mnist" else ("T-shirt/top", "Trouser"))
    assert available_sets()[name] == paths[0]


def test_emnist_is_turned_upright(tmp_path: Path) -> None:
    raw = tmp_path / "source" / "EMNIST" / "raw"
    images, labels = _random(62, 28, 28), np.arange(62, dtype=np.uint8)
    for part in ("train", "test"):
        _idx(raw / f"emnist-byclass-{part}-images-idx3-ubyte", images.transpose(0, 2, 1).copy())
        _idx(raw / f"emnist-byclass-{part}-labels-idx1-ubyte", labels)
    train, _ = download("emnist", tmp_path / "data", source=tmp_path / "source")
    assert (_pixels(train)[..., 0] == images).all()
    batch, class_names = read_batch(train)
    assert class_names[9:12] + class_names[35:37] == ("9", "A", "B", "Z", "a")
    assert batch.labels.tolist() == list(range(62))


@pytest.mark.parametrize(("name", "kind"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100")])
def test_cifar_is_converted(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, calls = _random(6, 32, 32, 3), []

    def stand_in(root: str, *, train: bool, download: bool) -> SimpleNamespace:
        calls.append((Path(root), train, download))
        return SimpleNamespace(
            data=images[: 4 if train else 2], targets=[1, 0, 1, 0][: 4 if train else 2], classes=["a", "b"]
        )

    monkeypatch.setattr(f"torchvision.datasets.{kind}", stand_in)
    train, test = download(name, tmp_path, source=tmp_path / "source")
    assert calls == [(tmp_path / "source", True, False), (tmp_path / "source", False, False)]
    assert (_pixels(train) == images[:4]).all()
    assert read_batch(test)[0].labels.tolist() == [1, 0]
    calls.clear()
    download(name, tmp_path)
    root = calls[0][0]
    assert calls == [(root, True, True), (root, False, True)]
    assert root.parent == tmp_path
    assert not root.exists()  # what torchvision had there is gone
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"{name}_test.npz", f"{name}_train.npz"]


def test_svhn_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = _random(3, 3, 32, 32)

    def stand_in(root: str, *, split: str, download: bool) -> SimpleNamespace:
        count = {"train": 3, "test": 1}[split]
        return SimpleNamespace(data=images[:count], labels=np.array([0, 9, 1])[:count])

    monkeypatch.setattr("torchvision.datasets.SVHN", stand_in)
    train, test = download("svhn", tmp_path)
    assert (_pixels(train) == images.transpose(0, 2, 3, 1)).all()
    batch, class_names = read_batch(train)
    assert batch.labels.tolist() == [0, 9, 1]
    assert class_names == tuple("0123456789")
    assert len(read_batch(test)[0]) == 1


def test_files_that_torchvision_refuses_are_named(tmp_path: Path) -> None:
    """Its own checks are left on: a file with the right name and wrong content is not read."""
    batches = tmp_path / "source" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (batches / name).write_bytes(b"something else")
    (tmp_path / "source" / "train_32x32.mat").write_bytes(b"something else")
    for name in ("cifar10", "svhn", "mnist"):
        with pytest.raises(
            DatasetMissingError, match=rf"{name} is not in .*source \(.*not found.*\. Get torchvision's files"
        ):
            download(name, tmp_path / "data", source=tmp_path / "source")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_failed_download_says_what_to_do_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    save_images(tmp_path / "cifar10_train.npz", _random(2, 4, 4, 3), np.arange(2), ["a", "b"])
    monkeypatch.setattr("torchvision.datasets.CIFAR10", fail)
    with pytest.raises(
        DatasetMissingError, match=r"could not be downloaded \(no route to host\)\. .* or copy cifar10_train"
    ):
        download("cifar10", tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cifar10_train.npz"]
    with pytest.raises(
        UnknownNameError, match=r"unknown data set to download 'cifar-10'; did you mean 'cifar10' or 'cifar100'\?"
    ):
        download("cifar-10", tmp_path)


def _picture(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=100)


def test_cinic10_comes_from_its_folder(tmp_path: Path) -> None:
    source, images = tmp_path / "CINIC-10", {}
    for part in ("train", "valid", "test"):
        for label, name in enumerate(("airplane", "automobile", "bird")):
            for i in range(4):
                pixels = images[part, label, i] = _random(32, 32, 3, seed=len(images))
                _picture(source / part / name / f"{i}.png", pixels)
    paths = download("cinic10", tmp_path / "data", source=source)
    for path, part in zip(paths, ("train", "test"), strict=True):
        batch, class_names = read_batch(path)
        assert class_names == ("airplane", "automobile", "bird")
        own = [(label, pixels) for (where, label, _), pixels in images.items() if where == part]
        assert len(batch) == len(own) == 12
        for pixels, label in zip(_pixels(path), batch.labels.tolist(), strict=True):
            assert any(label == k and (pixels == other).all() for k, other in own)
        assert batch.labels.tolist() != sorted(batch.labels.tolist())  # shuffled, so that a limit takes all classes
    assert sorted(entry.name for entry in (tmp_path / "data").iterdir()) == ["cinic10_test.npz", "cinic10_train.npz"]
    first = paths[0].read_bytes()
    with np.load(paths[0]) as file:
        order = file["labels"].tolist()
    download("cinic10", tmp_path / "data", source=source)
    with np.load(paths[0]) as file:
        assert file["labels"].tolist() == order
    assert len(paths[0].read_bytes()) == len(first)


def _tiny_imagenet(root: Path) -> None:
    wnids = ("n01443537", "n01629819", "n02012849", "n03126707")
    for k, wnid in enumerate(wnids):
        for i in range(3):
            shade = np.full((64, 64, 3), 40 * k, dtype=np.uint8)
            _picture(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", shade[..., 0] if i == 0 else shade)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("boxes")
        _picture(root / "val" / "images" / f"val_{k}.JPEG", np.full((64, 64, 3), 40 * k, dtype=np.uint8))
    (root / "val" / "val_annotations.txt").write_text(
        "".join(f"val_{k}.JPEG\t{wnid}\t0\t32\t44\t62\n" for k, wnid in reversed(list(enumerate(wnids))))
    )
    (root / "words.txt").write_text(
        "n00000001\tnothing\nn01443537\tgoldfish, Carassius auratus\nn01629819\tEuropean fire salamander\n"
        "n02012849\tcrane\nn03126707\tcrane, hoist\n"
    )


def test_tiny_imagenet_comes_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path / "data"))
    _tiny_imagenet(tmp_path / "source")
    download("tiny-imagenet", source=tmp_path / "source")
    dataset = load("tiny-imagenet")
    assert dataset.class_names == ("goldfish", "European fire salamander", "crane (n02012849)", "crane (n03126707)")
    assert (len(dataset.train), len(dataset.test), dataset.input_shape) == (12, 4, (3, 64, 64))
    for part in (dataset.train, dataset.test):
        shades = part.inputs.mean((1, 2, 3)) * 255
        assert (shades - 40 * part.labels).abs().max() < 1.5
    (tmp_path / "source" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99999999\n")
    with pytest.raises(ValueError, match=r"one of the training classes in val_annotations\.txt, got .*n99999999"):
        download("tiny-imagenet", source=tmp_path / "source")


@pytest.mark.parametrize("line", ["../../../secret.JPEG", "/etc/passwd", "link.JPEG", "..", "pipe.JPEG"])
def test_no_line_of_tiny_imagenet_leaves_its_folder(line: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    _tiny_imagenet(source)
    _picture(tmp_path / "secret.JPEG", np.zeros((64, 64, 3), dtype=np.uint8))
    (source / "val" / "images" / "link.JPEG").symlink_to(tmp_path / "secret.JPEG")
    os.mkfifo(source / "val" / "images" / "pipe.JPEG")
    with (source / "val" / "val_annotations.txt").open("a") as file:
        file.write(f"{line}\tn01443537\n")
    with pytest.raises(ValueError, match=r"plain name|leads out of|got a pipe"):
        download("tiny-imagenet", tmp_path / "data", source=source)
    assert list((tmp_path / "data").glob("tiny-imagenet_test*")) == []


@pytest.mark.parametrize("name", ["cinic10", "tiny-imagenet"])
def test_sets_that_are_fetched_by_hand_say_where_from(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DatasetMissingError, match=rf"{name} has to be fetched by hand: unpack .*https?://.* as the source"
    ):
        download(name, tmp_path)
    with pytest.raises(DatasetMissingError, match=rf"{name} is not in .*nowhere .*: unpack"):
        download(name, tmp_path, source=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_the_data_folder_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path / "given"))
    assert data_folder() == tmp_path / "given"
    monkeypatch.delenv("HYPERLEAK_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "hyperleak" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_folder() == tmp_path / "home" / ".cache" / "hyperleak" / "data"


def test_data_sets_at_hand_are_told_from_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path))
    everything = available_sets()
    assert set(everything.values()) == {None}
    assert set(downloadable_sets()) == set(everything) - {"handwritten62"}
    save_images(tmp_path / "svhn_train.npz", _random(2, 4, 4, 3), np.arange(2), ["a", "b"])
    assert available_sets()["svhn"] is None  # half of it
    save_images(tmp_path / "svhn_test.npz", _random(2, 4, 4, 3), np.arange(2), ["a", "b"])
    assert available_sets() == everything | {"svhn": tmp_path / "svhn_train.npz"}
    assert len(load("svhn").train) == 2
    fetched = r"Unpack http.*, and run `hyperleak doctor --download tiny-imagenet --source FOLDER` with that folder, or"
    with pytest.raises(DatasetMissingError, match=fetched):
        load("tiny-imagenet")


def test_a_limit_is_taken_before_images_become_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = _random(500, 8, 8, 1)
    save_images(tmp_path / "x.npz", images, np.arange(500) % 2, ["a", "b"])
    made = []
    empty = torch.empty

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        made.append(empty(*args, **kwargs))  # type: ignore[call-overload]
        return made[-1]

    monkeypatch.setattr(torch, "empty", counted)
    batch, _ = read_batch(tmp_path / "x.npz", limit=7)
    assert max(len(tensor) for tensor in made) == 7
    assert (batch.inputs * 255).round().byte().numpy().tolist() == images[:7].transpose(0, 3, 1, 2).tolist()
    made.clear()
    split = Npz(train=str(tmp_path / "x.npz"), limit=5, test_limit=3).load()
    assert (len(split.train), len(split.test)) == (5, 3)
    whole = Npz(train=str(tmp_path / "x.npz")).load()
    assert torch.equal(whole.train.inputs[:5], split.train.inputs)
    assert torch.equal(whole.test.labels[:3], split.test.labels)


def test_saving_takes_views_and_leaves_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = _random(4, 6, 5, 3)
    mapped = np.memmap(tmp_path / "raw", dtype=np.uint8, mode="w+", shape=images.shape)
    mapped[:] = images
    for view in (mapped, images[::-1][::-1]):
        save_images(tmp_path / "x.npz", view, np.arange(4), list("abcd"))
        assert (_pixels(tmp_path / "x.npz") == images).all()
    before = (tmp_path / "x.npz").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            save_images(tmp_path / "x.npz", images[:2], np.arange(2), list("ab"))
    assert (tmp_path / "x.npz").read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["raw", "x.npz"]


def test_named_sets_are_settings() -> None:
    for name in available_sets():
        source = datasets.build({"name": name, "limit": 3})
        assert datasets.build(datasets.spec(source)) == source


@pytest.mark.download
@pytest.mark.parametrize(
    ("name", "shape", "counts", "classes"),
    [
        ("mnist", (1, 28, 28), (60_000, 10_000), 10),
        ("fashion_mnist", (1, 28, 28), (60_000, 10_000), 10),
        ("cifar10", (3, 32, 32), (50_000, 10_000), 10),
        ("cifar100", (3, 32, 32), (50_000, 10_000), 100),
        ("svhn", (3, 32, 32), (73_257, 26_032), 10),
        ("emnist", (1, 28, 28), (697_932, 116_323), 62),
    ],
)
def test_real_downloads(
    name: str,
    shape: tuple[int, int, int],
    counts: tuple[int, int],
    classes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path))
    download(name)
    dataset = load(name)
    assert (dataset.input_shape, len(dataset.train), len(dataset.test)) == (shape, *counts)
    assert dataset.train.labels.unique().numel() == dataset.num_classes == classes
