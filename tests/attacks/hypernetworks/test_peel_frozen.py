"""The peel where the method freezes the classifier, and where part of the hypernetwork is not sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds

from attacks.base import NotApplicable, Reconstruction, build
from attacks.hypernetworks.peel import HypernetPeel
from fl.methods.fedbabu import FedBABU
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.predict import predict
from fl.tensors import add_scaled, norm
from fl.types import Candidate, Truth
from fl.view import ServerView

TINY = Hypernetwork(embedding=8, hidden=16, init="scaled")


def victim(**settings: int | float | None) -> tuple[ServerView, Truth]:
    """A client of FedBABU whose extractor is generated."""
    how = {"lr": 0.1, "epochs": None, "batch_size": None} | settings
    run = worlds.federation(FedBABU(parametrization=TINY, **how), rounds=0)  # type: ignore[arg-type]
    return run.observe(0, data=worlds.images(1, "victim"))


def test_a_frozen_classifier_stays_frozen_in_the_plain_view() -> None:
    view, truth = victim(steps=1)
    easier = HypernetPeel(classifier="joint").rewrite(view)
    assert isinstance(easier, ServerView)
    assert not easier.private
    with torch.no_grad():
        made = predict(easier, Candidate(truth.inputs, truth.labels))
    assert float(norm(add_scaled(made, easier.update, -1.0)) / norm(easier.update)) < 1e-12


def test_a_search_behind_it_runs_over_several_steps() -> None:
    view, _ = victim(steps=3)
    assert isinstance(build({"name": "peel+ig", "iterations": 2})(view), Reconstruction)


@pytest.mark.parametrize("attack", ["peel", "bilevel", "peel+ig"])
def test_a_hypernetwork_of_which_a_part_is_not_sent_is_a_reason(attack: str) -> None:
    view, _ = victim(steps=1)
    lost = next(name for name in view.update if name.startswith("hypernet.heads."))
    found = build(attack)(replace(view, update={n: v for n, v in view.update.items() if n != lost}))
    assert isinstance(found, NotApplicable)
    assert repr(lost) in found.reason
