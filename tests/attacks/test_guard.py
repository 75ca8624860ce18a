"""What every attack owes, whoever wrote it: results, and views as they were; and what it is given for that."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import chains, worlds
from torch import nn

import attacks as attacks_package
from attacks import base as attacks_base
from attacks.base import Attack, NotApplicable, Reconstruction, ViewRewriter, build, run_checked
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView


@dataclass(frozen=True, kw_only=True)
class Own(Attack):
    """Someone's first attempt."""

    name = "own"
    made: Callable[[ServerView], Any]

    def attack_view(self, view: ServerView, seed: int) -> Any:
        return self.made(view)


def seen() -> ServerView:
    return worlds.federation(FedAvg(lr=0.1, steps=1, batch_size=None)).observe(0)[0]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda view: None, "expected attack 'own' to return a Reconstruction or NotApplicable, got NoneType"),
        (lambda view: torch.zeros(1), "to return a Reconstruction or NotApplicable, got Tensor"),
        (lambda view: Reconstruction([[0.5]]), "expected inputs of attack 'own' as a tensor, got list"),
        (lambda view: Reconstruction(None, [3]), "expected labels of attack 'own' as a tensor, got list"),
    ],
    ids=["nothing", "a tensor", "a list", "labels"],
)
def test_what_is_no_result_is_refused_in_words(made: Callable[[ServerView], Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        Own(made=made)(seen())


def test_an_attack_that_defines_one_is_heard_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"^Former\.one is now Former\.attack_view$"):

        @dataclass(frozen=True, kw_only=True)
        class Former(Attack):
            name = "former"

            def one(self, view: ServerView, seed: int) -> NotApplicable:
                return NotApplicable(f"seed {seed}")

    assert Former()(seen(), seed=3) == NotApplicable("seed 3")
    with pytest.warns(DeprecationWarning, match="Former.one is now Former.attack_view"):
        assert Former().one(seen(), 4) == NotApplicable("seed 4")


def test_a_view_that_was_changed_is_not_handed_on() -> None:
    def spoilt(view: ServerView) -> NotApplicable:
        dense(next(iter(view.update.values()))).zero_()
        return NotApplicable("zero")

    with pytest.raises(TypeError, match="changed tensors of the view in place"):
        Own(made=spoilt)(seen())


def test_a_result_is_owed_for_every_view() -> None:
    class Short(Own):
        def run(self, views: Any, seeds: Any) -> Any:
            return super().run(views, seeds)[1:]

    with pytest.raises(TypeError, match="a result of attack 'own' for each of 2 views"):
        run_checked(Short(made=lambda view: NotApplicable("no")), [seen(), seen()], [0, 1])


def test_labels_that_are_not_those_known_are_noted() -> None:
    view = replace(seen(), labels=torch.tensor([2, 0, 1]), batch_size=3)
    for found, odd in (([0, 1, 2], False), ([1], False), ([0, 1, 1], True)):
        result = Own(made=lambda _, found=found: Reconstruction(None, torch.tensor(found), note="before"))(view)
        assert isinstance(result, Reconstruction)
        assert result.note == (
            "before; the labels found, [0, 1, 1], are not those known, [2, 0, 1]" if odd else "before"
        )
    unknown = Own(made=lambda _: Reconstruction(None, torch.tensor([0, 1, 1])))(replace(view, labels=None))
    assert isinstance(unknown, Reconstruction)
    assert not unknown.note


def test_what_is_no_view_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    pair = from_batch(model, torch.rand(1, 1, 8, 8), torch.tensor([1]))
    with pytest.raises(TypeError, match=r"expected a ServerView, got tuple: .* returns the view and the truth"):
        build("analytic")(pair)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a ServerView, got dict"):
        build("analytic")({})  # type: ignore[arg-type]


def test_a_search_needs_no_gradients_of_the_caller() -> None:
    with torch.no_grad():
        found = build({"name": "ig", "iterations": 3})(seen())
        assert not torch.is_grad_enabled()
    assert isinstance(found, Reconstruction)


@pytest.mark.parametrize("attack", ["ig", "dlg"])
def test_fused_attention_is_searched_through(attack: str) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(x[:, 0]).mean(1))

    model = chains.initialized(Attending().eval())
    view, _ = from_batch(model, torch.rand(1, 1, 8, 8, generator=stream(0, "x")).double(), torch.tensor([1]))
    found = build({"name": attack, "iterations": 3})(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None


def test_the_old_name_of_a_rewriter_of_views_warns() -> None:
    for module in (attacks_package, attacks_base):
        with pytest.warns(DeprecationWarning, match="ViewRewriter"):
            assert module.ViewAttack is ViewRewriter
