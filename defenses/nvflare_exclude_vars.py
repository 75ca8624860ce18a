"""NVFlare's ExcludeVars: tensors of some names are not sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from defenses import defenses
from fl.defense import Defense
from fl.tensors import Tensors, zeros


@defenses.register("nvflare-exclude-vars")
@dataclass(frozen=True, kw_only=True)
class NVFlareExcludeVars(Defense):
    """Leaves out tensors by name, an old idea (Shokri and Shmatikov, CCS 2015, share a part), as NVFlare 2.9 does it.

    All others are sent as they are. The client trains these tensors all the same, and begins every round with the
    server's, which stay as they were. So the server knows the whole network, and misses a part of the update. The names
    are seen, so there is nothing for an attacker to know beside. A name that is not in the update is no error there,
    nor here; without names nothing is left out, which is NVFlare's default.

    Attributes:
        names: of tensors; exactly these are left out.
        pattern: a regular expression, found anywhere in a name; empty is none. It goes with no names.

    Raises:
        ValueError: both are given, or the pattern is no regular expression.
    """

    plain: ClassVar[str] = "tensors of some names are not sent."

    names: tuple[str, ...] = ()
    pattern: str = ""

    def __post_init__(self) -> None:
        if self.names and self.pattern:
            raise ValueError(f"expected names or a pattern, got both: {', '.join(self.names)}, {self.pattern!r}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"expected pattern as a regular expression, got {self.pattern!r}: {error}") from error

    @classmethod
    def example(cls) -> NVFlareExcludeVars:
        """Return a filter that keeps biases."""
        return cls(pattern=r"bias$")

    def withholds(self, name: str) -> bool:
        """Return whether a tensor of that name is not sent."""
        return name in self.names or bool(self.pattern and re.search(self.pattern, name))

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update with zeros for what is not sent, by which the server's tensors stay as they were."""
        left = {name: value for name, value in update.items() if self.withholds(name)}
        return {**update, **zeros(left, left)}

    def release(self, update: Tensors) -> Tensors:
        """Return the tensors that a real client sends."""
        return {name: value for name, value in update.items() if not self.withholds(name)}
