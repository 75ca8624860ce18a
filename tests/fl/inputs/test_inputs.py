import pytest
import torch

from fl.inputs.description import check_values, describe_inputs
from fl.inputs.form import image_form

ROWS = torch.tensor([[-2.0, 0.0, 1.0, 3.0], [1.0, 1.0, 0.0, 0.5]])


@pytest.mark.parametrize(
    ("inputs", "settings", "kind", "shape"),
    [
        (torch.rand(2, 3, 8, 8), {}, "image", (3, 8, 8)),
        (torch.rand(2, 3, 8, 8) * 2 - 1, {"input_range": (-1, 1)}, "image", (3, 8, 8)),
        (torch.rand(2, 5, 9), {}, "series", (5, 1, 9)),
        (torch.rand(2, 5, 3, 4, 6), {}, "series", (5, 12, 6)),
        (ROWS, {"input_range": (-3, 4)}, "table", (4, 1, 1)),
        (ROWS, {"input_range": ([-2, 0, 0, -1], [2, 1, 1, 3])}, "table", (4, 1, 1)),
        (ROWS, {"input_range": (-3, 4), "categories": [(1, 3)]}, "table", (4, 1, 1)),
        (torch.rand(2), {}, "table", (1, 1, 1)),
        (torch.tensor([[1, 40000], [7, 0]]), {}, "tokens", (2, 1, 1)),
        ((torch.rand(2, 3), torch.tensor([[1], [9]])), {}, "several", (4, 1, 1)),
        ({"x": torch.rand(2, 3, 4, 4), "mask": torch.tensor([[True], [False]])}, {}, "several", (49, 1, 1)),
    ],
)
def test_inputs_come_back_as_they_were_given(inputs, settings, kind, shape):
    form = describe_inputs(inputs, **settings)
    packed = form.pack(inputs, torch.float32)
    assert (form.kind, form.shape, packed.shape[1:]) == (kind, shape, shape)
    check_values(form, packed)
    assert float(packed.min()) >= 0
    assert float(packed.max()) <= 1
    torch.testing.assert_close(form.restore(packed), inputs)
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in form.units())
    if kind == "table" and not form.categories and "input_range" in settings:  # variables are the user's own numbers
        torch.testing.assert_close(((packed - mean) / std).flatten(1), inputs)


def test_pictures_in_their_range_are_left_alone():
    images = torch.rand(2, 3, 8, 8)
    assert describe_inputs(images).pack(images, torch.float64) is images
    assert describe_inputs(images) == image_form((3, 8, 8))


@pytest.mark.parametrize(
    ("inputs", "settings", "said"),
    [
        (ROWS, {"input_range": (1, 1)}, "low < high"),
        (ROWS, {"input_range": 3}, r"input_range as \(low, high\)"),
        (ROWS, {"input_range": ([0, 0], 4)}, "one low value, or one for each of 4 channels"),
        (ROWS, {"categories": [(2, 3)]}, "at least 2 of 4 columns"),
        (torch.rand(2, 3, 4), {"categories": [(0, 2)]}, "expected a table"),
        (ROWS, {"column_std": (1.0,)}, "column_std > 0 for each of 4 columns"),
        (torch.tensor([[-1, 2]]), {}, "expected ids >= 0"),
        ((torch.rand(2, 3), torch.rand(3, 3)), {}, r"as many examples in each input, got \[2, 3\]"),
        ([], {}, "at least one input"),
    ],
)
def test_inputs_that_are_none_are_refused(inputs, settings, said):
    with pytest.raises(ValueError, match=said):
        describe_inputs(inputs, **settings)


def test_numbers_beyond_the_range_stated_and_categories_that_are_none_are_refused():
    for settings, said in (
        ({}, r"got -2 to 3: state what the attacker knows of their range, input_range="),
        ({"input_range": (-1, 3)}, "in the input_range stated, -1 to 3, got -2 to 3"),
        ({"input_range": (-3, 4), "categories": [(2, 4)]}, "expected one 1 and else 0 in columns 2 to 3"),
    ):
        form = describe_inputs(ROWS, **settings)
        with pytest.raises(ValueError, match=said):
            check_values(form, form.pack(ROWS, torch.float32))
