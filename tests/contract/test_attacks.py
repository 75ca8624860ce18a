"""What every attack keeps to: it sees the server's view and nothing else, and no unit moves it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support import worlds
from support.attacking import ALIKE, ATTACKS, BEHIND, assert_equal
from support.compare import assert_same, tensors
from support.cover import SLOW, pairwise
from support.loud import Loud
from support.matrix import COLUMNS, shares
from support.matrix import ROWS as METHODS
from support.probes import Probe

from attacks import NotApplicable, Reconstruction
from attacks.base import Result, ViewRewriter
from fl.client import Client
from fl.defense import Defense, overrides
from fl.methods.fedavg import FedAvg
from fl.simulation.client_round import Round, RoundKey, observe, prepare
from fl.tensors import Tensors, dense, scale_tensors
from fl.types import Truth
from fl.view import ServerView

NETWORKS = {
    "fedavg, strided": worlds.strided,
    "fedavg, mlp": worlds.flat,
    "fedavg, patches": worlds.patched,
    "fedavg, residual": worlds.residual,
}
"""Networks of FedAvg's clients that attacks solve which take no pooling, no convolution, patches or shortcuts."""
ROWS = METHODS | {row: Probe(FedAvg.example(), task=network()) for row, network in NETWORKS.items()}
ADAPTIVE = "fedavg, mlp by adam"
"""The one victim of attacks on adaptive optimizers, whose steps have a size of their own: no unit is left open."""
ROWS[ADAPTIVE] = Probe(FedAvg(optimizer="adam", lr=1e-3), task=worlds.flat())
VICTIMS = {row: "shares nothing" for row in METHODS if not shares(row)}


def _marks(row: str, often: tuple[str, ...]) -> list[Any]:
    if row in VICTIMS:
        return [pytest.mark.skip(reason=f"{row} {VICTIMS[row]}")]
    return [] if row in often else [SLOW]


def _every(often: tuple[str, ...]) -> Any:
    """All attacks on every kind of victim; those not met `often` are marked slow."""
    pairs = [
        pytest.param(row, name, marks=_marks(row, TWO if name in ALIKE else often)) for row in KINDS for name in ATTACKS
    ]
    return pytest.mark.parametrize(("row", "name"), pairs)


SYSTEMS = ("hyperfl", "dp-hyperfl", "hyperfedzero", "hyperfednet", "fedprox+hfn", "hfedf-latent")
KINDS = ("fedavg", "fedper", "local", "scaffold", *SYSTEMS, *NETWORKS)
TWO = ("fedavg", "hyperfl")
EVERY, SOME = _every(KINDS), _every(TWO)
EVERY.args[1].append(pytest.param(ADAPTIVE, "adaptive-step"))


@cache
def world(row: str) -> Any:
    probe = ROWS[row]
    return worlds.federation(probe.method, probe.defense, probe.task)


def victim(row: str, defense: Defense | None = None) -> tuple[ServerView, Truth, Round, list[Any]]:
    """One step on a single image in the second round, nothing of it shared with another call."""
    run, probe = world(row), ROWS[row]
    if defense is not None and overrides(defense, "wrap_model"):  # then the server's network is another one
        run = worlds.federation(probe.method, defense, probe.task)
    client = Client(run.client.base, worlds.one_step(run.client.method), defense or run.client.defense)
    fresh = [worlds.images(1, "victim")]
    state = torch.utils._pytree.tree_map(lambda x: x, run.clients[1])
    state = replace(state, private=_copies(state.private), memory={k: _copies(v) for k, v in state.memory.items()})
    view, truth, done = observe(prepare(client, state, run.download(1), fresh[0], key=RoundKey(round=1)))
    return view, truth, done, [state, fresh[0]]


def _copies(values: Tensors) -> Tensors:
    return {name: value.clone() for name, value in values.items()}  # type: ignore[union-attr]


@cache
def plain(row: str, name: str) -> Result:
    """What the attack finds of the victim."""
    return ATTACKS[name](victim(row)[0], seed=3)


@EVERY
def test_an_attack_holds_nothing_of_the_client(row: str, name: str) -> None:
    view, truth, done, held = victim(row)
    server = {value.data_ptr() for value in tensors([world(row).download(1)])}
    for value in tensors([truth, done, held]):
        if value.is_floating_point() and value.data_ptr() not in server:
            value.fill_(torch.nan)
        elif value.data_ptr() not in server:
            value.zero_()
    assert truth.inputs.isnan().all()
    assert all(value.isfinite().all() for value in tensors(view))
    assert_equal(ATTACKS[name](view, seed=3), plain(row, name))


@SOME
def test_the_same_seed_gives_the_same_result(row: str, name: str) -> None:
    view = victim(row)[0]
    before = [value.clone() for value in tensors(view)]
    assert_equal(ATTACKS[name](view, seed=3), plain(row, name))
    assert all(torch.equal(x, y) for x, y in zip(before, tensors(view), strict=True)), "the attack changed its view"


@SOME
def test_the_unit_of_the_update_changes_no_bit(row: str, name: str) -> None:
    quiet, loud = victim(row)[0], victim(row, Loud())[0]
    assert_same(loud.update, scale_tensors(quiet.update, 1024.0))
    assert_equal(ATTACKS[name](loud, seed=3), plain(row, name))


@pairwise(name=sorted(ATTACKS.keys() - BEHIND), column=COLUMNS, row=("fedavg", "hyperfl"))
def test_every_attack_answers_under_every_defense(name: str, column: str, row: str) -> None:
    assert_answers(name, column, row)


@pytest.mark.slow
@pairwise(name=sorted(BEHIND), column=COLUMNS, row=("fedavg", "hyperfl"))
def test_exact_attacks_behind_a_rewriting_answer_under_every_defense(name: str, column: str, row: str) -> None:
    assert_answers(name, column, row)


def assert_answers(name: str, column: str, row: str) -> None:
    result = ATTACKS[name](victim(row, COLUMNS[column])[0], seed=0)
    if isinstance(result, NotApplicable):
        assert result.reason
    elif result.inputs is not None:
        assert result.inputs.shape == (1, 1, 8, 8)
        assert result.inputs.isfinite().all()
        assert 0 <= float(result.inputs.min()) <= float(result.inputs.max()) <= 1


ON_IDS = {name for name, attack in ATTACKS.items() if attack.reads_ids and name != "analytic"}
"""What reads ids that a network is given, which no victim here has: see `tests/attacks/analytic/test_tokens.py`."""


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - ON_IDS))
def test_every_attack_has_a_victim_of_which_it_reconstructs(name: str) -> None:
    """Else nothing would be held to what stands above: that an attack refuses is the same with any truth."""
    results = (plain(row, name) for row in (*KINDS, ADAPTIVE) if row not in VICTIMS)
    rewrites = isinstance(ATTACKS[name], ViewRewriter)  # the images are left to what follows
    assert any(isinstance(found, Reconstruction) and (rewrites or found.inputs is not None) for found in results)


@cache
def unspoiled(row: str) -> ServerView:
    """The victim's view, to be read only."""
    return victim(row)[0]


@pytest.mark.parametrize("odd", ["in turn", *(pytest.param(odd, marks=SLOW) for odd in ("nan", "inf"))])
@pytest.mark.parametrize("name", list(ATTACKS))
def test_no_attack_answers_on_numbers_that_are_none(name: str, odd: str) -> None:
    """In whatever tensor of whatever method's update; by default, of that of every kind of client."""
    turn = itertools.cycle(("nan", "inf") if odd == "in turn" else (odd,))
    for row in (row for row in (KINDS if odd == "in turn" else METHODS) if row not in VICTIMS):
        view = unspoiled(row)
        for spoiled, value in view.update.items():
            none = torch.full_like(dense(value), float(next(turn)))
            found = ATTACKS[name](replace(view, update={**view.update, spoiled: none}), seed=3)
            assert isinstance(found, NotApplicable), (row, spoiled)
