"""What solves instead of searching does so where the view lies, also on a device that is not the CPU.

The device is a made-up one (`support.elsewhere`), so that it needs no GPU; on a real one `test_gpu` says the same of
all attacks. Searches transform functions, which the made-up one can't.
"""

from __future__ import annotations

import pytest
from contract.test_attacks import KINDS, ROWS, VICTIMS
from support import worlds
from support.attacking import ATTACKS
from support.compare import assert_near
from support.elsewhere import ELSEWHERE, elsewhere

from attacks import Reconstruction
from attacks.base import Attack, Chain, Result
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.learned.lti import LearningToInvert


def searches(attack: Attack) -> bool:
    """Whether it, or what it hands its view to, transforms functions."""
    return (
        searches(attack.then) if isinstance(attack, Chain) else isinstance(attack, GradientMatching | LearningToInvert)
    )


SOLVE = [name for name, attack in ATTACKS.items() if not searches(attack)]


def attacked(name: str, row: str, device: str) -> Result:
    """Of one step on a single image in the second round."""
    probe = ROWS[row]
    return ATTACKS[name](worlds.victim(probe.method, probe.defense, probe.task, device), seed=3)


@pytest.mark.parametrize("name", SOLVE)
def test_another_device_gives_what_the_cpu_gives(name: str) -> None:
    here = ((row, attacked(name, row, "cpu")) for row in KINDS if row not in VICTIMS)
    row, near = next((row, found) for row, found in here if isinstance(found, Reconstruction))
    with elsewhere():
        far = attacked(name, row, ELSEWHERE)
        assert isinstance(far, Reconstruction)
        parts = {"inputs": far.inputs, "labels": far.labels, "fixed": far.fixed}
        assert all(part is None or part.is_meta for part in parts.values())
        found = {k: part.cpu() for k, part in parts.items() if part is not None} | {
            k: value.cpu() for k, value in far.private.items()
        }
    expected = {k: getattr(near, k) for k in parts if getattr(near, k) is not None} | near.private
    assert_near(found, expected, 1e-6)
    assert far.verified == near.verified
    assert bool(far.note) == bool(near.note)  # numbers in it are rounded otherwise
