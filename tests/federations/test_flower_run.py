"""In Flower's own engines a planted leak is withheld, the rounds go on, and the report names the client."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from support import flower_processes

from eval.audit.recorded_update import RecordedUpdate

pytestmark = pytest.mark.slow

AUDITED = {
    "\napp = ClientApp()\n": "\nfrom hyperleak.flower import audit_mod\n\n"
    "app = ClientApp(mods=[audit_mod(Net, input_shape=(3, 32, 32), record=True, seconds=20)])\n",
}
"""All that is changed in the app."""


def rows(folder: Path, round: int) -> list[dict[str, Any]]:
    (place,) = folder.glob(f"hyperleak-audit/run-*/round-{round}")
    return [json.loads(line) for line in (place / "screenings.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_a_planted_leak_is_withheld_and_named(engine, tmp_path):
    if engine == "simulation":
        pytest.importorskip("ray")
    app = flower_processes.copy_app(tmp_path, AUDITED)
    with getattr(flower_processes, engine)(tmp_path) as options:
        printed = flower_processes.run(tmp_path, app, options)
    assert printed.count("Received 1 results and 1 failures") == 2
    refused = set(re.findall(r"error in reply from node (\d+): hyperleak: withheld by the client", printed))
    assert len(refused) == 1
    for round in (1, 2):
        found = {row["client"]: row for row in rows(tmp_path, round)}
        assert {client for client, row in found.items() if row["verdict"] == "leaked"} == refused
        assert sorted(row["response"].partition(":")[0] for row in found.values()) == ["sent", "withheld"]
        (page,) = tmp_path.glob(f"hyperleak-audit/run-*/round-{round}/report.html")
        assert f"Shown to leak: {refused.copy().pop()}" in page.read_text()
    # the mean of round 2 is what the other client sent, and nothing else
    (sent,) = (row["update"] for row in found.values() if row["verdict"] != "leaked")
    (kept,) = tmp_path.glob(f"hyperleak-audit/run-*/round-2/{sent}")
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    torch.testing.assert_close(dict(final), dict(RecordedUpdate.load(kept).after), rtol=0, atol=0)
