"""`benchmarks.exact.cascade_batches`: a batch that was stopped on the way is not counted as refused."""

from __future__ import annotations

import pytest
import torch

from attacks import NotApplicable, Reconstruction
from benchmarks.exact import cascade_batches
from fl.types import Batch


def test_a_batch_that_was_stopped_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Batch(torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(6))
    results = [
        NotApplicable("they are alike"),
        Reconstruction(inputs=None, verified=False, note="a layer: 3 cells open"),
        Reconstruction(inputs=data.inputs[4:], verified=True),
    ]
    rows = []
    for number, result in enumerate(results):
        monkeypatch.setattr(cascade_batches, "build", lambda _, result=result: lambda _: result)
        rows.append(cascade_batches.attack_batch(data, 10, "hyperfl-grey", "FedAvg", 0, 2, number))
    assert rows[0]["reason"] == "they are alike"
    assert rows[1]["stopped"] == "a layer: 3 cells open"
    group = {"set": "fashion_mnist", "method": "FedAvg", "size": 2}
    head, row = (
        line.split(" | ")
        for line in cascade_batches.document([{**group, **row} for row in rows], 0)
        if "refused |" in line or line.startswith("| fashion")
    )
    cells = dict(zip(head, row, strict=True))
    assert [cells[name] for name in ("batches", "refused", "stopped above the pixels")] == ["3", "1", "1"]
    assert cells["8-bit exact"] == "2"
