import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl.data import datasets, load
from fl.data.sources.folders import Folder
from fl.data.sources.npz_files import DatasetMissingError


def _picture(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def _fill(folder: Path, each: int, names: tuple[str, ...] = ("cat", "dog")) -> None:
    for k, name in enumerate(names):
        for i in range(each):
            _picture(folder / name / f"{i}.png", seed=100 * k + i)


def test_folders_with_train_and_test(tmp_path: Path) -> None:
    _fill(tmp_path / "train", 6)
    _fill(tmp_path / "test", 2)
    dataset = load("folder", path=str(tmp_path), size=8)
    assert dataset.class_names == ("cat", "dog")
    assert (dataset.input_shape, len(dataset.train), len(dataset.test)) == ((3, 8, 8), 12, 4)
    assert dataset.train.labels.bincount().tolist() == [6, 6]
    assert dataset.name == tmp_path.name
    assert str(tmp_path) not in dataset.source
    # every image with its own label: what the file of that class holds
    for image, label in zip(dataset.train.inputs, dataset.train.labels.tolist(), strict=True):
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        assert any(
            (pixels == np.asarray(Image.open(path))).all()
            for path in (tmp_path / "train" / ("cat", "dog")[label]).iterdir()
        )
    assert dataset.train.labels.tolist() != sorted(dataset.train.labels.tolist())  # not one class after the other
    assert torch.equal(load("folder", path=str(tmp_path), size=8).train.inputs, dataset.train.inputs)
    assert not torch.equal(load("folder", path=str(tmp_path), size=8, seed=1).train.inputs, dataset.train.inputs)


def test_folders_without_test_hold_a_share_out(tmp_path: Path) -> None:
    _fill(tmp_path / "flat", 10)
    _fill(tmp_path / "deep" / "train", 10)
    for path in (tmp_path / "flat", tmp_path / "deep"):
        dataset = load("folder", path=str(path), size=8, test_share=0.3, limit=5, test_limit=4)
        assert (len(dataset.train), len(dataset.test)) == (5, 4)
        whole = load("folder", path=str(path), size=8, test_share=0.3)
        assert whole.test.labels.bincount().tolist() == [3, 3]
        assert torch.equal(whole.train.inputs[:5], dataset.train.inputs)
        assert len(torch.cat([whole.train.inputs, whole.test.inputs]).flatten(1).unique(dim=0)) == 20


def test_images_are_fitted_and_antialiased(tmp_path: Path) -> None:
    stripes = np.zeros((64, 96, 3), dtype=np.uint8)
    stripes[:, ::2] = 255  # as fine as can be: gray once it is smoothed, one of the two if pixels are only picked
    stripes[:, :16], stripes[:, 80:] = (255, 0, 0), (0, 0, 255)  # cut off by the center square
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.fromarray(stripes).save(tmp_path / name / f"{i}.png")
    dataset = load("folder", path=str(tmp_path), size=16, test_share=0.5)
    inner = dataset.train.inputs[..., 2:-2]
    assert (inner - 0.5).abs().max() < 0.05
    assert load("folder", path=str(tmp_path), size=16, test_share=0.5, mode="gray").input_shape == (1, 16, 16)
    assert load("folder", path=str(tmp_path), size=None, test_share=0.5).input_shape == (3, 64, 96)


def test_gray_alpha_palette_and_turned_images_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    _picture(folder / "gray.png", mode="L")
    gray = Image.open(folder / "gray.png")
    gray.convert("P").save(folder / "palette.png")
    alpha = gray.convert("RGBA")
    alpha.putalpha(7)
    alpha.save(folder / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to see it upright
    gray.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=exif)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    _fill(tmp_path, 4, names=("b",))
    train = load("folder", path=str(tmp_path), size=8, test_share=0.25).train
    images = train.inputs[train.labels == 0]
    expected = torch.from_numpy(np.asarray(gray) / np.float32(255)).expand(3, 8, 8)
    assert len(images) == 3
    for image in images:
        assert torch.allclose(image, expected, atol=1e-6)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    def expect(message: str, path: Path, error: type[Exception] = ValueError, **settings: object) -> None:
        with pytest.raises(error, match=message):
            load("folder", path=str(path), **settings)

    expect("no folder .*nowhere: expected one with a folder", tmp_path / "nowhere", DatasetMissingError)
    (tmp_path / "empty").mkdir()
    expect("expected a folder for each class in .*empty, got none", tmp_path / "empty")
    (tmp_path / "bare" / "a").mkdir(parents=True)
    expect("expected images in .*a, got none with .*png", tmp_path / "bare")
    _fill(tmp_path / "extra" / "train", 2)
    _fill(tmp_path / "extra" / "test", 2, names=("cat", "dog", "fox"))
    expect("expected only the classes of the training images in .*test, got fox", tmp_path / "extra")
    _fill(tmp_path / "lacking" / "train", 2)
    _fill(tmp_path / "lacking" / "test", 2, names=("cat",))
    expect("expected images in .*test.dog", tmp_path / "lacking")
    _fill(tmp_path / "broken", 4)
    (tmp_path / "broken" / "cat" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n cut")
    expect(r"expected an image in .*cat.0\.png", tmp_path / "broken", test_share=0.5)
    _fill(tmp_path / "uneven", 4)
    _picture(tmp_path / "uneven" / "cat" / "0.png", size=(9, 8))
    expect("expected images of one size|expected test images", tmp_path / "uneven", test_share=0.5, size=None)
    _fill(tmp_path / "deep", 4)
    Image.fromarray(np.full((8, 8), 60_000, dtype=np.uint16)).save(tmp_path / "deep" / "cat" / "0.png")
    expect("expected 8 bits per channel in .*0.png, got an image of mode I;16", tmp_path / "deep", test_share=0.5)
    _fill(tmp_path / "few", 4)
    expect("limit of at most 4 images, got 5", tmp_path / "few", test_share=0.5, limit=5)
    with pytest.raises(ValueError, match="size: expected a whole number >= 1 or null, got 0"):
        Folder(path="x", size=0)
    with pytest.raises(ValueError, match="limit: expected a whole number >= 1 or null, got 0"):
        Folder(path="x", limit=0)


def test_a_folder_round_trips() -> None:
    folder = Folder(path="x", size=None, mode="gray")
    assert datasets.build(datasets.spec(folder)) == folder


def test_links_and_pipes_in_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    _fill(tmp_path / "other", 3)
    own = tmp_path / "own"
    for attack, said in (
        (lambda: (own / "cat" / "link.png").symlink_to("../../other/cat/0.png"), r"link\.png is a link that leads out"),
        (lambda: (own / "fox").symlink_to("../other/cat"), r"fox is a link that leads out"),
        (lambda: os.mkfifo(own / "cat" / "pipe.png"), r"a pipe: .*pipe\.png"),
        (lambda: (own / "cat" / "folder.png").mkdir(), r"a folder: .*folder\.png"),
        (lambda: (own / os.fsdecode(b"caf\xe9")).mkdir(), r"UTF-8, got 'caf.*udce9'; rename it"),
    ):
        shutil.rmtree(own, ignore_errors=True)
        _fill(own, 3)
        attack()
        with pytest.raises(ValueError, match=said):
            load("folder", path=str(own), size=8)
    shutil.rmtree(own)
    _fill(own, 3)
    (own / "cat" / "again.png").symlink_to("0.png")  # a link within is none of these
    assert len(load("folder", path=str(own), size=8, test_share=0.34).train) > 3


def test_images_are_measured_by_their_header(tmp_path: Path) -> None:
    _fill(tmp_path, 3)
    for width, height in ((13_000, 13_000), (2**16, 2**12), (10**5, 10**5), (2**31 - 1, 2**31 - 1)):
        header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
        (tmp_path / "cat" / "0.png").write_bytes(
            png + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
        )
        with pytest.raises(ValueError, match=r"(at most 67,108,864 pixels|expected an image) in .*0\.png"):
            load("folder", path=str(tmp_path), size=8)


def test_no_other_format_hides_under_a_name(tmp_path: Path) -> None:
    _fill(tmp_path, 3)
    Image.new("L", (8, 8)).save(tmp_path / "cat" / "0.png", "GIF")
    with pytest.raises(ValueError, match=r"expected an image in .*0\.png"):
        load("folder", path=str(tmp_path), size=8)
