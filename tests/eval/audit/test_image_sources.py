"""True images of an audit as people give them: folders of pictures, arrays in any layout, or a way on."""

import numpy as np
import pytest
import torch
from PIL import Image

from eval.audit.image_sources import load_images
from fl.registry import UnknownNameError


def refused(source, kind=ValueError):
    with pytest.raises(kind) as caught:
        load_images(str(source))
    return str(caught.value)


def folder(root, *names, mode="RGB", size=(8, 6)):
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        Image.new(mode, size, 10 * number if mode == "L" else (10 * number, 0, 0)).save(root / name / "a.png")
    return root


def test_a_folder_has_a_folder_for_each_label(tmp_path):
    found = load_images(str(folder(tmp_path / "numbers", "10", "2")))
    assert found.labels.tolist() == [2, 10]
    assert found.inputs.shape == (2, 3, 6, 8)  # as they are, and in the order of the labels
    assert (found.inputs[:, 0, 0, 0] * 255).round().tolist() == [10, 0]
    found = load_images(str(folder(tmp_path / "words", "cat", "dog", mode="L")))
    assert found.labels.tolist() == [0, 1]
    assert found.inputs.shape == (2, 1, 6, 8)
    folder(tmp_path / "words" / "dog", "large", size=(9, 9))
    assert "expected images of one size" in refused(tmp_path / "words")


def test_pictures_without_labels_are_refused_with_the_way_on(tmp_path):
    way = "put each into PICTURES/CLASS/, where CLASS is the number of its label, and give --images PICTURES"
    root = folder(tmp_path, "3")
    said = refused(root / "3" / "a.png")
    assert said.startswith("expected labels beside images, got the picture")
    assert way in said
    assert f"got pictures alone in the folder {root / '3'}: a label comes" in refused(root / "3")
    assert way in refused(root / "3")
    (root / "3" / "a.png").unlink()
    assert "got no folders in the folder" in refused(root / "3")


def test_paths_are_not_taken_for_names_of_data_sets(tmp_path):
    assert refused(tmp_path / "a.png", FileNotFoundError).startswith("no file ")
    assert "or a folder of pictures" in refused(tmp_path / "pictures", FileNotFoundError)
    (tmp_path / "true.pt").touch()
    assert "got the file" in refused(tmp_path / "true.pt")
    assert "did you mean 'faces'" in refused("face", UnknownNameError)


def test_floating_point_arrays_are_inputs_as_they_are(tmp_path):
    path, table = tmp_path / "true.npz", np.random.default_rng(0).normal(size=(3, 5)).astype(">f4")
    np.savez(path, images=table, labels=np.float64([0.5, 1, 2]))
    found = load_images(str(path))
    assert np.array_equal(found.inputs.numpy(), table)
    assert found.labels.dtype == torch.float32
    pixels = np.random.default_rng(0).random((2, 3, 8, 8))
    np.savez(path, images=pixels, labels=np.int32([1, 0]))
    found = load_images(str(path))
    assert torch.equal(found.inputs, torch.from_numpy(pixels))
    assert found.labels.dtype == torch.int64


def test_arrays_in_another_layout_or_range_name_the_conversion(tmp_path):
    def said(images, labels=(0, 1)):
        np.savez(tmp_path / "true.npz", images=images, labels=np.array(labels))
        return refused(tmp_path / "true.npz")

    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 6, 3)).astype(np.uint8)
    assert said(pixels.transpose(0, 3, 1, 2)).endswith("images.transpose(0, 2, 3, 1)")
    last = said(pixels / 255)
    assert "images.transpose(0, 3, 1, 2)" in last
    assert "(255 * images).round().astype('uint8')" in last
    assert "images / 255" in said(pixels.transpose(0, 3, 1, 2).astype(np.float32))
    assert "expected labels as numbers" in said(pixels.transpose(0, 3, 1, 2) / 255, ("cat", "dog"))
    assert "one label per image" in said(pixels.transpose(0, 3, 1, 2) / 255, (0, 1, 2))
    assert "expected images uint8" in said(pixels.astype(np.int64))


def test_settings_may_hold_paths_and_be_longer_than_one(tmp_path):
    root = folder(tmp_path / "pictures", "cat", "dog")
    for number in range(9):
        for name in ("cat", "dog"):
            Image.new("RGB", (8, 6), (number, 0, 0)).save(root / name / f"{number}.png")
    padded = f"{{name: folder, path: {root}{' ' * 5000}}}"
    for settings in (f"{{name: folder, path: {root}}}", f"name: folder\npath: {root}", padded):
        assert len(load_images(settings).inputs) > 0


def test_an_empty_text_is_no_folder():
    assert "got an empty text" in refused("")


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_by_their_image(tmp_path, odd):
    images = np.random.default_rng(0).random((6, 1, 8, 8))
    images[4, 0, 3, 3] = odd
    np.savez(tmp_path / "true.npz", images=images, labels=np.arange(6))
    assert "got NaN or infinite ones in 1 of 6 images (4, counted from 0): leave these out" in refused(
        tmp_path / "true.npz"
    )
    np.savez(tmp_path / "true.npz", images=np.full((6, 1, 8, 8), odd), labels=np.arange(6))
    assert "in 6 of 6 images (0, 1, 2, 3, ...," in refused(tmp_path / "true.npz")
    np.savez(tmp_path / "true.npz", images=images[:4], labels=np.float64([1, 2, odd, 3]))
    assert "in 1 of 4 labels (2," in refused(tmp_path / "true.npz")


@pytest.mark.parametrize("kind", [np.longdouble, ">f8", np.float16])
def test_arrays_of_other_floating_point_types_are_read(tmp_path, kind):
    images = np.random.default_rng(0).random((2, 1, 8, 8)).astype(kind)
    np.savez(tmp_path / "true.npz", images=images, labels=np.array([1, 0], ">i4"))
    found = load_images(str(tmp_path / "true.npz"))
    assert np.array_equal(found.inputs.double().numpy(), images.astype(np.float64))
    assert found.labels.tolist() == [1, 0]
