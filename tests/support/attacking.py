"""Every attack, cheaply, and when two of its results are the same."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from support.compare import assert_same

from attacks import NotApplicable, Reconstruction, attacks
from attacks.base import Attack, Chain, build

ITERATIONS = 2
"""Of a search: what it is given shows in the first, and in the second what it kept."""
SEARCHES = ("peel+headless+ig", "filters+ig", "unembed+ig")
CHAINS = {name: build({"name": name, "iterations": ITERATIONS}) for name in SEARCHES} | {
    name: build(name) for name in ("peel+cascade", "headless+cascade")
}


def _brief(attack: Attack) -> Attack:
    """The attack with few iterations."""
    if isinstance(attack, Chain):
        return replace(attack, then=_brief(attack.then))
    few = {f.name: ITERATIONS for f in fields(attack) if f.name in {"iterations", "lower_iterations"}}
    return replace(attack, **few)


ATTACKS = {name: _brief(attack) for name, attack in attacks.examples()} | CHAINS
ATTACKS["lti"] = replace(ATTACKS["lti"], batch_size=16)  # type: ignore[call-arg]  # clients that it imitates for each step
BEHIND = {"headless+cascade", "peel+cascade"}
"""What is done behind a rewriting is `cascade`'s work, and that is among the others."""
ALIKE = {"dlg", "idlg", "rog", "gradinversion"} | BEHIND
"""Those, and searches of one engine with `ig`: by default they meet two kinds of victims, and the others every kind."""


def assert_equal(x: Any, y: Any) -> None:
    """The same result, bit for bit."""
    assert type(x) is type(y)
    if isinstance(x, NotApplicable):
        assert x == y
        return
    assert isinstance(x, Reconstruction)
    found = [{k: v for k, v in (("inputs", r.inputs), ("labels", r.labels)) if v is not None} for r in (x, y)]
    assert_same(*found)
    assert_same(x.private, y.private)
