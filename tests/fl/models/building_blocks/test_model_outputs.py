from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch

from fl.models.building_blocks.model_outputs import OutputHook, choose_output

A, B = torch.zeros(2, 3), torch.ones(2, 4)
Pair = namedtuple("Pair", ["logits", "aux"])


@pytest.mark.parametrize(
    ("output", "choice", "expected"),
    [
        (A, None, A),
        ({"logits": A, "hidden": B}, None, A),
        (OrderedDict(loss=None, out=A), None, A),
        (Pair(A, B), None, A),
        (SimpleNamespace(logits=A, other=B), None, A),
        ((A,), None, A),
        ((A, B), 1, B),
        ((A, B), "1", B),
        ({"x": A, "y": B}, "y", B),
        ({"x": A, "y": B}, lambda output: output["x"] + 1, A + 1),
    ],
)
def test_the_tensor_that_is_meant_is_found(output, choice, expected):
    assert torch.equal(choose_output(output, choice), expected)


@pytest.mark.parametrize(
    ("output", "choice", "said"),
    [
        ((A, B), None, r"tuple of 0 \(2, 3\), 1 \(2, 4\); say which by output="),
        ({"x": A, "y": B}, "z", r"expected an output 'z', got dict of 'x' \(2, 3\), 'y' \(2, 4\)"),
        ({"x": A, "n": 3}, "n", "expected output 'n' to be a tensor, got int"),
        (A, "x", "got one tensor"),
        (3, None, "got int"),
        ({"x": A, "y": B}, lambda output: output, "a function that returns a tensor, got dict"),
    ],
)
def test_an_output_that_can_not_be_chosen_is_refused_with_what_there_is(output, choice, said):
    with pytest.raises(ValueError, match=said):
        choose_output(output, choice)


def test_single_numbers_become_a_column():
    assert OutputHook()(torch.nn.Identity(), (), torch.zeros(5)).shape == (5, 1)
