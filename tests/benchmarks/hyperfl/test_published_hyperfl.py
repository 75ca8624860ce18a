"""`benchmarks.hyperfl.published_hyperfl`, and that pages on HyperFL say under which conditions they were measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import fl.data
from attacks.base import NotApplicable
from attacks.hypernetworks.peel import INACTIVE, HypernetPeel
from benchmarks import common
from benchmarks.hyperfl import published_hyperfl
from benchmarks.hyperfl.peel import uploaded
from benchmarks.hyperfl.published_hyperfl import Case, Classifier
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.hyperfl import HyperFL
from fl.models import build
from fl.types import Batch

ROOT = Path(__file__).parents[3]
PAGES = [*(ROOT / "docs" / "results").glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
NO_LEAKAGE = {"scaling.md", "published_hyperfl.md"}
"""Pages of speed, and the one of the whole algorithm."""


@pytest.mark.parametrize("head_epochs", [0, 1])
def test_certain_of_its_only_image_a_client_sends_no_gradient(head_epochs: int) -> None:
    image = Batch(fl.data.load("faces").train.inputs[:1], torch.tensor([3]))
    method = HyperFL(lr=0.01, steps=1, batch_size=None, head_epochs=head_epochs)
    federation = Federation(Client(build("hyperfl-grey", num_classes=10), method), [ClientData(image, image)], seed=0)
    peeled = HypernetPeel().solve(uploaded(federation.observe(0)[0]))
    if head_epochs:
        assert isinstance(peeled, NotApplicable)
        assert peeled.reason == INACTIVE
    else:
        assert not isinstance(peeled, NotApplicable)
        assert peeled.verified


def row(init: str, classifier: Classifier, number: int, **found: Any) -> dict[str, Any]:
    case = Case("fashion_mnist", "HyperFL", init, classifier, "step", "1", True, number)
    return {**asdict(case), "active": 64, "signal": bool(found), "seconds": 1.0, **found}


def test_the_page_counts_pictures_under_their_conditions() -> None:
    close = {"psnr": 50.0, "exact": False, "verified": False, "extractor": 1e-7, "embedding": 1e-7}
    exact = {**close, "psnr": 100.0, "exact": True, "verified": True}
    rows = [row("published", "same images", number) for number in range(3)]
    rows += [row("published", "at rest", 0, **exact), row("published", "at rest", 1, **close)]
    rows += [row("published", "at rest", 2, **close) | {"normalize": False}]
    text = "\n".join(published_hyperfl.document(rows))
    assert "| `published` | the same image | 0 of 3 |" in text
    assert "| `published` | nothing (at rest) | 2 of 2 |" in text
    assert "| fashion_mnist | published | nothing (at rest) | 2 | 2 | 1.0e-07 | 1.0e-07 | 1 | 2 | 1 | 0 |" in text


def test_a_page_written_anew_keeps_the_machine_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    (tmp_path / "peel.json").write_text(json.dumps({"machine": {"processor": "another"}, "rows": [1, 2]}))
    common.rewrite("peel", lambda known: [f"{len(known['rows'])} rows"])
    text = (tmp_path / "peel.md").read_text()
    assert text.startswith("2 rows\n")
    assert text.endswith("Measured on:\n\n| processor |\n|---|\n| another |\n")
    assert json.loads((tmp_path / "peel.json").read_text())["machine"] == {"processor": "another"}


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_pages_on_hyperfl_name_their_conditions(page: Path) -> None:
    text = page.read_text()
    if "peel+" not in text or page.name in NO_LEAKAGE:
        return
    assert "published_hyperfl.md" in text, "it does not point at the whole algorithm"
    for word in ("at rest", "step size", "normali"):
        assert word in text, f"{page.name} has figures on HyperFL and does not say: {word}"
