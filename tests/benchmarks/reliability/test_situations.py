"""Some cheap rows of `benchmarks.reliability.situations`, and what it takes for one to count as right."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.reliability.situations import __main__ as command
from benchmarks.reliability.situations.row import Python, Right, Situation, is_right, measure

EVERY = command.all_situations()
CHEAP = (
    "a table scaled to (-2, 3)",
    "a dictionary with logits",
    "a table scaled to (-2, 3), its range not said",
    "Flower's list of arrays without names, .npz",
    "a .safetensors file that was cut off",
)


@pytest.mark.parametrize("name", CHEAP)
def test_a_row_is_attacked_or_refused_rightly(name):
    row = measure(EVERY[name])
    assert row["outcome"] in {"attacked", "refused"}, row
    assert row["right"], row


def test_there_are_enough_rows_each_known_by_its_words():
    assert len(EVERY) >= 60
    assert all(name == one.words for name, one in EVERY.items())


def test_a_traceback_is_no_outcome():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("broken")

    def give(_):
        return Python(model=Broken(), inputs=torch.rand(1, 3, 4, 4), targets=torch.tensor([0]))

    crash = Situation(words="x", part="x", give=lambda folder: {}["nothing"], right=Right(kind="refused"))
    assert measure(crash)["outcome"] == "crashed"
    row = measure(replace(crash, give=give))
    assert row["outcome"] == "crashed" or "broken" in row["reason"]


ATTACKED = {"outcome": "attacked", "guess": 11.0, "verified": True, "said": "", "wrongly verified": []}


def test_what_is_right_follows_from_the_truth():
    exact, near = {**ATTACKED, "figures": {"psnr": 90.0}}, {**ATTACKED, "figures": {"psnr": 12.5}}
    assert is_right(exact, Right(kind="exact"))
    assert not is_right(near, Right(kind="exact"))
    assert is_right(near, Right(kind="closer"))
    assert not is_right(near, Right(kind="hidden"))
    assert is_right({**near, "verified": None}, Right(kind="hidden"))
    assert not is_right({**exact, "wrongly verified": ["cascade at 9.0 dB"]}, Right(kind="exact"))
    assert not is_right(exact, Right(kind="exact", words=("not said",)))
    assert is_right({**ATTACKED, "figures": {"tokens_recall": 1.0}}, Right(kind="found", figure="tokens_recall"))
    refused = {"outcome": "refused", "reason": "it is cut off", "said": ""}
    assert is_right(refused, Right(kind="refused", words=("cut off",)))
    assert not is_right(refused, Right(kind="exact"))
    assert not is_right(refused, Right(kind="refused", words=("pickle",)))
    assert not is_right(exact, Right(kind="refused"))
