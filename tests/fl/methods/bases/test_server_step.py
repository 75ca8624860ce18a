"""The server's optimizer against torch.optim, with parameters that have no gradient in some steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_near
from torch.nn.utils import clip_grad_norm_

from fl.methods.bases.server_step import server_step
from fl.seeds import stream
from fl.tensors import Tensors
from fl.types import Group, Phase


@pytest.mark.parametrize(
    ("optimizer", "momentum", "reference"),
    [
        ("sgd", 0.9, lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.05)),
        ("sgd", 0.0, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05)),
        ("adam", 0.0, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.05)),
        ("adamw", 0.0, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.05)),
    ],
)
def test_it_steps_as_torch_does_and_leaves_the_rest_alone(optimizer: str, momentum: float, reference: Any) -> None:
    group = Group(lr=0.1, weight_decay=0.05, max_norm=1.5)
    phase = Phase(groups=(group,), optimizer=optimizer, momentum=momentum, steps=1)
    start = {n: torch.randn(3, 2, generator=stream(0, n), dtype=torch.float64) for n in "abc"}
    leaves = {n: v.clone().requires_grad_() for n, v in start.items()}
    solver = reference(list(leaves.values()))
    params: Tensors = dict(start)
    kept: Tensors = {}
    for step, present in enumerate(["abc", "a", "bc", "ab", "ab"]):
        grads = {n: torch.randn(3, 2, generator=stream(step, "g", n), dtype=torch.float64) for n in present}
        for n, leaf in leaves.items():
            leaf.grad = grads[n].clone() if n in grads else None
        clip_grad_norm_([leaves[n] for n in present], 1.5)
        solver.step()
        before = dict(params)
        params, kept = server_step(phase, params, grads, kept)  # type: ignore[arg-type]
        assert_near(params, leaves, 1e-12)  # type: ignore[arg-type]
        assert all(params[n] is before[n] for n in "abc" if n not in present)
    assert int(kept["step.a"]) == (4 if momentum or optimizer != "sgd" else 0)
