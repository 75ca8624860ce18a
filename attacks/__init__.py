"""Attacks: one file each, found by name in `attacks.attacks`."""

from importlib import import_module
from typing import Any

from attacks.base import Attack, Chain, NotApplicable, Reconstruction, Result, ViewRewriter, attacks, build, label

__all__ = ["Attack", "Chain", "NotApplicable", "Reconstruction", "Result", "ViewRewriter", "attacks", "build", "label"]


def __getattr__(name: str) -> Any:
    if name == "ViewAttack":
        return import_module("attacks.base").ViewAttack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
