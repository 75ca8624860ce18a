"""What solves instead of searching does so where the view lies, also on a device that is not the CPU.

The device is a made-up one (`support.elsewhere`), so that it needs no GPU; on a real one `test_gpu` says the same of
all attacks. Searches transform functions, which the made-up one can't.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract.test_attacks import ADAPTIVE, KINDS, ON_IDS, ROWS, VICTIMS
from support import worlds
from support.attacking import ATTACKS
from support.compare import assert_near
from support.elsewhere import ELSEWHERE, elsewhere
from support.probes import Probe

from attacks import Reconstruction
from attacks.base import Attack, Chain, Result
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.learned.lti import LearningToInvert


def searches(attack: Attack) -> bool:
    """Whether it, or what it hands its view to, transforms functions."""
    return (
        searches(attack.then) if isinstance(attack, Chain) else isinstance(attack, GradientMatching | LearningToInvert)
    )


SOLVE = [name for name, attack in ATTACKS.items() if not searches(attack) and name not in ON_IDS]
STRIDED = {row: replace(ROWS[row], task=worlds.strided()) for row in ("fedavg", "hyperfl")}
"""Where `cascade` has no positions to search: that it does so elsewhere, too, is in `test_cascade_elsewhere`."""


def attacked(name: str, probe: Probe, device: str) -> Result:
    """Of one step on a single image in the second round."""
    return ATTACKS[name](worlds.victim(probe.method, probe.defense, probe.task, device), seed=3)


@pytest.mark.parametrize("name", SOLVE)
def test_another_device_gives_what_the_cpu_gives(name: str) -> None:
    rows = STRIDED if "cascade" in name else {row: ROWS[row] for row in (*KINDS, ADAPTIVE) if row not in VICTIMS}
    here = ((probe, attacked(name, probe, "cpu")) for probe in rows.values())
    probe, near = next((probe, found) for probe, found in here if isinstance(found, Reconstruction))
    with elsewhere():
        far = attacked(name, probe, ELSEWHERE)
        assert isinstance(far, Reconstruction)
        parts = {"inputs": far.inputs, "labels": far.labels, "fixed": far.fixed}
        assert all(part is None or part.is_meta for part in parts.values())
        found = {k: part.cpu() for k, part in parts.items() if part is not None} | {
            k: value.cpu() for k, value in far.private.items()
        }
    expected = {k: getattr(near, k) for k in parts if getattr(near, k) is not None} | near.private
    rounding = {k for k in found.keys() & expected.keys() if k.startswith("residual/")}
    assert all(torch.allclose(found.pop(k), expected.pop(k), atol=1e-12) for k in rounding)
    assert_near(found, expected, 1e-6)
    assert far.verified == near.verified
    assert bool(far.note) == bool(near.note)  # numbers in it are rounded otherwise
