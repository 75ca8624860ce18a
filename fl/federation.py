"""Simulated federations: the public names of `fl.simulation.federation`."""

from fl.simulation.federation import (
    ClientData,
    Federation,
    asked,
    takes_any_layout,
)

__all__ = [
    "ClientData",
    "Federation",
    "asked",
    "takes_any_layout",
]
