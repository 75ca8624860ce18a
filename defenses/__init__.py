"""Defenses: one file each, found by name in `defenses.defenses`."""

from fl.defense import Defense, defenses

__all__ = ["Defense", "build", "defenses"]

build = defenses.build
