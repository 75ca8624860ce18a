"""Attacks: one file each, found by name in `attacks.attacks`."""

from attacks.base import Attack, Chain, NotApplicable, Reconstruction, Result, ViewAttack, attacks, build, label

__all__ = ["Attack", "Chain", "NotApplicable", "Reconstruction", "Result", "ViewAttack", "attacks", "build", "label"]
