"""`presets`: what is called after a network was measured on it, and the page says how far it carries."""

from __future__ import annotations

import json

import attacks
import fl.models
from benchmarks.common import RESULTS
from benchmarks.leakage import presets


def test_every_preset_of_a_network_was_measured_untrained_and_trained() -> None:
    found = json.loads((RESULTS / "presets.json").read_text())["cases"]
    for name in attacks.attacks.names():
        for preset in attacks.attacks.get(name).presets:
            if preset in map(presets.called, fl.models.models.names()):
                mine = [case for case in presets.CASES if (case[0], presets.called(case[1][0])) == (name, preset)]
                assert {rounds for _, _, rounds in mine} == {0, presets.ROUNDS}
    for name, network, rounds in presets.CASES:
        points = found[presets.case(name, *network, rounds).name]
        assert [len(point["psnr"]) for point in points] == [presets.IMAGES] * 2
