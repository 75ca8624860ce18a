"""A run that is killed goes on and leaves the bytes of one that was not."""

import pytest
from support.scripts import script


@pytest.mark.parametrize(("points", "seeds"), [(1, 1), pytest.param(10, 2, marks=pytest.mark.slow)])
def test_kills_at_random_points_change_nothing(tmp_path, points, seeds):
    outcomes = script("killed", tmp_path, str(points), str(seeds))
    assert len(outcomes) == points + 1
    assert all(outcome["same"] for outcome in outcomes), outcomes
