"""Defences: one file each, found by name in `defenses.defenses`."""

from fl.defense import Defense
from fl.registry import Registry

defenses = Registry[Defense]("defense", "defenses")
defenses.register("none")(Defense)

__all__ = ["Defense", "defenses"]
