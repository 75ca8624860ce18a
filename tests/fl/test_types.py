import math

import pytest

from fl.types import Group, Phase


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"lr": math.nan}, "expected lr >= 0, got nan"),
        ({"lr": math.inf}, "expected lr >= 0, got inf"),
        ({"lr": 0.1, "weight_decay": -0.1}, "expected weight_decay >= 0, got -0.1"),
        ({"lr": 0.1, "max_norm": 0.0}, "expected max_norm > 0 or None, got 0.0"),
        ({"lr": 0.1, "max_norm": math.nan}, "expected max_norm > 0 or None, got nan"),
    ],
)
def test_group_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        Group(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "expected exactly one of epochs and steps"),
        ({"steps": 0}, "expected steps >= 1, got 0"),
        ({"steps": -1}, "expected steps >= 1, got -1"),
        ({"epochs": -1}, "expected epochs >= 0, got -1"),
        ({"epochs": 1, "batch_size": 0}, "expected batch_size >= 1, got 0"),
        ({"epochs": 1, "batch_size": -3}, "expected batch_size >= 1, got -3"),
        ({"epochs": 1, "batches_per_step": 0}, "expected batches_per_step >= 1, got 0"),
        ({"epochs": 1, "momentum": 2}, r"expected momentum in \[0, 1\), got 2"),
        ({"epochs": 1, "momentum": math.nan}, r"expected momentum in \[0, 1\), got nan"),
        ({"epochs": 1, "optimizer": "lion"}, "expected optimizer"),
        ({"epochs": 1, "sampler": "random"}, "expected sampler"),
    ],
)
def test_phase_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        Phase(groups=(Group(lr=0.1),), **settings)


def test_what_stands_still_is_allowed():
    assert Phase(groups=(Group(lr=0.0),), epochs=0).batch_size is None
