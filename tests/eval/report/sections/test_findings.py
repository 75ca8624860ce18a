"""Which attack a report calls the strongest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eval.report.result_groups import ResultGroup
from eval.report.sections.findings import strongest_attack


def group(attack: str, psnrs: Sequence[float]) -> ResultGroup:
    """An attack on as many images, beside a guess of 14 dB."""
    rows = [
        {"picture": f"0:{number}", "seed": 0, "psnr": psnr, "floor_mean_psnr": 14.0}
        for number, psnr in enumerate(psnrs)
    ]
    return ResultGroup("fedavg", "none", attack, 0, tuple(rows))


@pytest.mark.parametrize(
    ("first", "second", "strongest"),
    [
        ([12.0, 13.0, 12.5, 12.4, 13.1, 12.9], [40.0, 12.0, 13.0, 14.0, 35.0, 12.0], "second"),  # neither for certain
        ([20.0, 20.5, 19.5, 20.1, 20.2, 19.9], [60.0, 12.0, 13.0, 14.0, 35.0, 12.0], "first"),  # the first for certain
        ([20.0, 20.5, 19.5, 20.1, 20.2, 19.9], [25.0, 25.5, 24.5, 25.1, 25.2, 24.9], "second"),  # both
    ],
)
def test_the_strongest_attack_leaks_for_certain_or_else_has_the_highest_mean(
    first: Sequence[float], second: Sequence[float], strongest: str
) -> None:
    found = strongest_attack([group("first", first), group("second", second)])
    assert found is not None
    assert found.attack == strongest
