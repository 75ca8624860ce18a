import pytest
import torch
from torch import Tensor

import fl.models
from fl.client import Client
from fl.data.augment import Augmentation, CropFlip, augmentations
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch


def _batch(count: int, channels: int = 3, height: int = 6, width: int = 5) -> Batch:
    inputs = torch.rand(count, channels, height, width, generator=stream(0, "images")) + 0.01
    return Batch(inputs, torch.arange(count) % 3)


def _naive(inputs: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """One image after the other, pixel by pixel, from the same numbers."""
    count, channels, height, width = inputs.shape
    top = torch.randint(2 * padding + 1, (count,), generator=generator).tolist()
    left = torch.randint(2 * padding + 1, (count,), generator=generator).tolist()
    coins = torch.rand(count, generator=generator).tolist() if flip else [1.0] * count
    result = torch.zeros_like(inputs)
    for i in range(count):
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    row, column = y + top[i] - padding, x + left[i] - padding
                    if 0 <= row < height and 0 <= column < width:
                        result[i, c, y, width - 1 - x if coins[i] < 0.5 else x] = inputs[i, c, row, column]
    return result


@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True), (9, True)])
def test_crop_flip_is_the_naive_loop(padding: int, flip: bool) -> None:
    batch = _batch(12)
    before = batch.inputs.clone()
    got = CropFlip(padding=padding, flip=flip)(batch, stream(1, "augment"))
    assert torch.equal(got.inputs, _naive(batch.inputs, padding, flip, stream(1, "augment")))
    assert got.labels is batch.labels
    assert got.inputs.is_contiguous()
    assert torch.equal(batch.inputs, before)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_training_keeps_the_layout_of_augmented_images(layout: torch.memory_format) -> None:
    batch = _batch(12, height=32, width=32)
    data = Batch(batch.inputs.to(memory_format=layout), batch.labels)
    assert CropFlip()(data, stream(1, "augment")).inputs.is_contiguous(memory_format=layout)
    client = Client(fl.models.build("hyperfl-colour", num_classes=3, seed=0), FedAvg(lr=0.1, batch_size=5))
    federation = Federation(client, [ClientData(data, data, CropFlip())])
    # a federation lays images out channels innermost, however they came
    assert federation.start(0).trace.inputs.is_contiguous(memory_format=torch.channels_last)


def test_no_padding_and_no_flip_change_nothing() -> None:
    batch = _batch(5, channels=1).inputs.double()
    got = CropFlip(padding=0, flip=False)(Batch(batch, torch.zeros(5, 4)), stream(0, "x"))
    assert got.inputs.dtype == torch.float64
    assert torch.equal(got.inputs, batch)


def test_draws_are_even_and_each_image_has_its_own() -> None:
    count, size, padding = 8100, 13, 4
    inputs = torch.zeros(count, 1, size, size)
    inputs[:, 0, 6, 5] = 1.0  # off the center by one column, never cut off
    got = CropFlip(padding=padding)(Batch(inputs, torch.zeros(count, dtype=torch.int64)), stream(3, "x")).inputs
    assert torch.equal(got.sum((1, 2, 3)), torch.ones(count))
    place = got.flatten(1).argmax(1)
    rows, columns = (place // size).bincount(minlength=size), (place % size).bincount(minlength=size)
    assert (rows[:2].sum(), rows[11:].sum()) == (0, 0)  # 6 +- 4
    assert (rows[2:11] - 900).abs().max() < 4.5 * (8100 / 9 * 8 / 9) ** 0.5
    # unflipped at 5 +- 4, flipped at 7 +- 4: both in columns 3 to 9, one of them in 1, 2, 10, 11
    expected = torch.tensor([0, 450, 450, *[900] * 7, 450, 450, 0])
    assert (columns - expected).abs().max() < 4.5 * 900**0.5
    edge = columns[1:3].sum() / (columns[1:3].sum() + columns[10:12].sum())
    assert abs(edge - 0.5) < 0.06


def test_only_the_given_generator_is_drawn_from() -> None:
    batch = _batch(40)
    state = torch.get_rng_state()
    first, second = (CropFlip()(batch, stream(0, "x")).inputs for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, CropFlip()(batch, stream(1, "x")).inputs)
    assert torch.equal(torch.get_rng_state(), state)
    generator = stream(0, "x")
    assert not torch.equal(CropFlip()(batch, generator).inputs, CropFlip()(batch, generator).inputs)


def test_none_is_the_identity() -> None:
    batch, generator = _batch(3), stream(0, "x")
    assert augmentations.build("none")(batch, generator) is batch
    assert torch.equal(generator.get_state(), stream(0, "x").get_state())
    assert type(augmentations.build("none")) is Augmentation


def test_augmentations_by_name() -> None:
    assert augmentations.names() == ["crop-flip", "none"]
    for _, augmentation in augmentations.examples():
        assert augmentations.build(augmentations.spec(augmentation)) == augmentation
    assert augmentations.build({"name": "crop-flip", "padding": 2, "flip": False}) == CropFlip(padding=2, flip=False)
    with pytest.raises(ValueError, match="padding: expected a whole number >= 0, got -1"):
        CropFlip(padding=-1)


@pytest.mark.gpu
def test_crop_flip_is_the_same_on_a_gpu() -> None:
    batch = _batch(12)
    moved = Batch(batch.inputs.cuda(), batch.labels.cuda())
    got = CropFlip()(moved, stream(1, "x"))
    assert got.inputs.is_cuda
    assert torch.equal(got.inputs.cpu(), CropFlip()(batch, stream(1, "x")).inputs)
