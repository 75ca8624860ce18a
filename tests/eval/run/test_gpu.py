"""The same table from a GPU as from the CPU, up to the tolerances stated here.

Devices round differently, and a search by signs amplifies that: pictures may differ by half a decibel on average,
accuracies by two test images of the whole federation, closed forms by float32's rounding.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.runs import run, tiny
from support.tiny import Registered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ATTACKS = (
    "[{name: ig, iterations: 400}, {name: peel+ig, against: hyperfl, iterations: 400}, {name: peel, against: hyperfl}]"
)


def test_a_run_on_cuda_gives_the_table_of_the_cpu(tmp_path: Path) -> None:
    with Registered():
        experiment = tiny(f"attack={ATTACKS}")
    cpu, cuda = (run(experiment, tmp_path / device, device=device) for device in ("cpu", "cuda"))
    keys = ("seed", "method", "defense", "attack", "round", "update")
    assert [[row.get(key) for key in keys] for row in cpu] == [[row.get(key) for key in keys] for row in cuda]
    for mine, other in zip(cuda, cpu, strict=True):
        assert mine["accuracy"] == pytest.approx(other["accuracy"], abs=0.05)
        assert mine.get("not_applicable") == other.get("not_applicable")
        if other.get("extractor_error") is not None and other["extractor_error"] < 1e-3:
            assert mine["extractor_error"] < 1e-3
    groups = {(row["method"], row["attack"]) for row in cpu if row.get("psnr") is not None}
    assert groups
    for group in groups:
        means = [
            fmean(
                row["psnr"] for row in rows if (row["method"], row["attack"]) == group and row.get("psnr") is not None
            )
            for rows in (cpu, cuda)
        ]
        assert means[1] == pytest.approx(means[0], abs=0.5), group
