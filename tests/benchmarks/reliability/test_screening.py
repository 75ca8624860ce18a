"""The benchmark of screenings measures what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.reliability import screening
from benchmarks.reliability.screening import KINDS, document, measure, record
from fl.types import Batch


@pytest.fixture(autouse=True)
def made_up_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    batch = Batch(torch.rand(3000, 3, 32, 32, generator=draw), torch.arange(3000) % 10)
    monkeypatch.setattr(screening, "pictures", lambda: batch)
    monkeypatch.setattr(screening, "FIRST_PICTURE", 0)


def test_a_planted_picture_leaks_and_noise_hides_it() -> None:
    plain = measure("planted", KINDS["dense network, one picture, one step of SGD"], 2)
    noisy = measure("private", KINDS["dense network, 1 picture, noise 0.1"], 2)
    assert plain["verdicts"] == {"leaked": 2}
    assert plain["shown"] == {"images": 2}
    assert noisy["verdicts"] == {"not shown to leak": 2}
    text = "\n".join(document([plain, noisy]))
    assert "| planted | 2 | 2 | 0 | 0 | 0 | images 2 |" in text
    assert "Of all: 0 of 2 called leaked." in text
    assert "Of all: 2 of 2 called leaked." in "\n".join(document([{**plain, "noise": 0.1}]))


def test_updates_are_what_the_facts_say() -> None:
    kind = replace(KINDS["dense network, one picture, one step of SGD"], examples=2)
    model, update = record(kind, 1)
    assert update.training.examples == 2
    difference = update.difference()
    images = screening.pictures().take(torch.arange(2, 4))
    torch.nn.functional.cross_entropy(model(images.inputs), images.labels).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(difference[name], 0.01 * weight.grad, atol=1e-7)
