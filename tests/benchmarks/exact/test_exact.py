"""`benchmarks.exact.exact`: what is found of a batch is compared with its own images, and what says nothing counts."""

from __future__ import annotations

import torch

from benchmarks.exact import exact
from fl.types import Batch


def test_counts_are_of_the_images_found() -> None:
    draw = torch.Generator().manual_seed(0)
    count = exact.FIRST + 4
    data = Batch(torch.rand(count, 1, 28, 28, generator=draw), torch.arange(count) % 10)
    batch = exact.Case("spear", "mlp", "fashion_mnist", 4, exact.GRAY)
    pooled = exact.Case("rconv", "hyperfl-grey", "fashion_mnist")
    rows = [exact.attack_victim(case, data, 10, 0) for case in (batch, pooled)]
    assert rows[0]["exact"] == 4
    assert "max pooling" in rows[1]["reason"]
    text = exact.document([(batch, rows[:1]), (pooled, rows[1:])])
    assert any("| spear | mlp | fashion_mnist | 4 | 4 of 4 | 4 | 1 of 1 | 0 | 0 |" in line for line in text)
    assert any("| rconv | hyperfl-grey | fashion_mnist | 1 | 0 of 1 | 0 | 0 of 1 | 0 | 1 |" in line for line in text)
